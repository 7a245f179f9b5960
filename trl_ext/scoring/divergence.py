"""The divergence of a student and a teacher from the hidden states of both."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor

from ..heads.divergence import DivergenceHead, LinearDivergence, linear_divergence
from .forward import HeadInputs, ScoringOptions, attach_scoring_forward
from .scorer import Scorer
from .weight_layout import WeightLayout, weight_layout_of


class DivergenceScorer(Scorer):
    """The forwards of student and teacher, whose heads are compared without log-probs of single tokens."""

    scorer_of_policy = "The divergence"

    def attach(self, model: Any, *, entropy_requires_grad: bool = False, **options: Any) -> None:
        """Attach a forward, first to the student, then to the teacher."""
        self.forwards.append(
            attach_scoring_forward(
                model,
                ScoringOptions(
                    chunk_size=self.options.head_chunk_size,
                    padding_free=self.options.padding_free is not False,
                    share_prompts=self.options.share_prompts is not False,
                    **options,
                ),
                "teacher_model" if self.forwards else "model",
            )
        )

    def check(self, device: Any, padded_reason: str | None) -> None:
        """If there is a `padded_reason`, keep all batches padded."""
        if padded_reason:
            for packing in self.packings:
                packing.padded_reason = padded_reason

    def describe(self, device: Any, alone: bool) -> str:
        """Return the text of the plan's row `head`."""
        tiles = "the divergence of the two heads is summed in tiles, without storing all logits"
        return f"{'; '.join([tiles, *self._differences()])}."

    @property
    def is_usual(self) -> bool:
        return not self.differs_from_trl


def divergence_of(
    student: HeadInputs, teacher: HeadInputs, beta: float, *, chunk_size: int | None = None
) -> LinearDivergence:
    """Return the divergence of two models at the same N tokens, `(N,)`, and the student's entropy.

    Args:
        beta (`float`): 0 for the forward KL, 1 for the reverse KL, between for the Jensen-Shannon divergence.
        chunk_size (`int`, *optional*): tokens in a tile.

    Raises:
        `ValueError`: the heads are on different devices, of which the teacher's is not the host.
    """
    student_layout = _layout(student)
    is_one_head = student.head.linear is teacher.head.linear
    teacher_layout = student_layout if is_one_head else _layout(teacher)
    if (
        student_layout.weight.device.type != teacher_layout.weight.device.type == "cpu"
    ):  # between passes, a teacher in host memory has its head there too
        device = student_layout.weight.device
        bias = None if teacher_layout.bias is None else teacher_layout.bias.to(device)
        teacher_layout = teacher_layout._replace(weight=teacher_layout.weight.to(device), bias=bias)
    if student_layout.weight.device != teacher_layout.weight.device:
        raise ValueError(
            f"The student's LM head is on {student_layout.weight.device} and the teacher's on "
            f"{teacher_layout.weight.device}. Place both on the same device (`device_map`)."
        )

    @contextmanager
    def readable() -> Iterator[None]:
        with ExitStack() as stack:
            for layout in (student_layout,) if is_one_head else (student_layout, teacher_layout):
                stack.enter_context(layout.readable())
            yield

    with readable():
        return linear_divergence(
            student.hidden,
            DivergenceHead(student_layout.weight, student_layout.bias, student.transform),
            teacher.hidden.to(student.hidden.device),
            DivergenceHead(teacher_layout.weight, teacher_layout.bias, teacher.transform),
            beta,
            chunk_size=chunk_size,
            readable=readable,
        )


def whole_head(inputs: HeadInputs) -> tuple[Tensor, Tensor | None]:
    """Return copies of the head's weight `(V, H)` and bias `(V,)` in host memory. Every rank calls it."""
    layout = _layout(inputs)
    with layout.readable():
        weight = layout.weight.detach().to("cpu", copy=True)
        bias = None if layout.bias is None else layout.bias.detach().to("cpu", copy=True)
    return weight, bias


def scatter_tokens(values_N: Tensor, inputs: HeadInputs) -> Tensor:
    """Return values of the N tokens in the shape of `inputs.mask`, 0 elsewhere."""
    return values_N.new_zeros(inputs.mask.shape).masked_scatter(inputs.mask, values_N)


def _layout(inputs: HeadInputs) -> WeightLayout:
    return weight_layout_of(inputs.head, inputs.hidden, outputs=(), whole=True, entropy_grad=False)
