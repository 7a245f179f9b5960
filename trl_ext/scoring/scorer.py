"""Attach scoring forwards to a trainer's models, check them, count their tokens, and describe them in the plan."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

from ..distributed.sequence_parallel import unsplit_reason
from ..heads.kernels.work import check_kernels, triton_unavailable_reason
from ..packing.packing import Packing, padded_in
from .backbone import ForwardTokens
from .forward import ScoringForward, ScoringOptions, attach_scoring_forward
from .weight_layout import WHOLE_HERE

_HOW = {"tiled": "log-probs in tiles, without storing all logits", "dense": "log-probs from all logits at once"}


def agree_on_packing(packings: Iterable[Packing]) -> None:
    """Make ranks adopt a reason against packing that any of them has found in its first batch. Every rank calls it."""
    for packing in packings:
        if packing.checked and not packing.agreed:
            from accelerate.utils import gather_object

            rank_reasons = gather_object([packing.reasons])
            padded_reasons, unshared_reasons = zip(*rank_reasons, strict=True)
            packing.agree(list(padded_reasons), list(unshared_reasons))


class Scorer:
    """The `forwards` of a trainer: the policy's, then the reference model's if there is one."""

    def __init__(self, options: Any, *, smoothed: bool = False) -> None:
        self.options = options
        self.smoothed = smoothed  # whether the loss smooths labels over the vocabulary
        self.forwards: list[ScoringForward] = []

    @property
    def packings(self) -> list[Packing]:
        return [x.packing for x in self.forwards]

    @property
    def policy(self) -> ScoringForward:
        return self.forwards[0]

    def attach(self, model: Any, *, entropy_requires_grad: bool = False, **options: Any) -> None:
        is_policy = not self.forwards
        if is_policy and self.smoothed:
            options["outputs"] = (*options["outputs"], "mean_log_probs")
        self.forwards.append(
            attach_scoring_forward(
                model,
                ScoringOptions(
                    head=self.options.head,
                    chunk_size=self.options.head_chunk_size,
                    kernels=self.options.head_kernels,
                    entropy_requires_grad=is_policy and entropy_requires_grad,
                    padding_free=self.options.padding_free is not False,
                    share_prompts=self.options.share_prompts is not False,
                    **options,
                ),
                "model" if is_policy else "ref_model",
            )
        )

    scorer_of_policy = "The exact LM head"  # in an error
    comparison = "8 tokens run twice, to compare log-probs with the model's own logits"  # in the first step

    def set_entropy_gradient(self, requires_grad: bool) -> None:
        """Set whether the entropy has a gradient in the policy's next forward. Code of the user may come to need it."""
        if requires_grad != self.policy.options.entropy_requires_grad:
            self.policy.options = replace(self.policy.options, entropy_requires_grad=requires_grad)

    def look_for_hooks(self, policy: Any) -> bool:
        """Return whether hooks of users have come to a model since the plan was made, which the plan must know.

        Args:
            policy (`nn.Module`): in the wrappers of PEFT and the engine.
        """
        changes = [self.policy.look_for_hooks(policy)]
        changes += [forward.look_for_hooks() for forward in self.forwards[1:]]
        return any(changes)

    def check(self, device: Any, padded_reason: str | None) -> None:
        """Check the kernels on the trainer's device. If there is a `padded_reason`, keep all batches padded."""
        check_kernels(self.options.head_kernels, device, "head_kernels")
        if padded_reason:
            for packing in self.packings:
                packing.padded_reason = padded_reason

    def split_over(self, ranks: Any, config: Any) -> None:
        """Split the tokens of a row over the ranks of `ranks.sequence`, if there is such a group.

        Raises:
            `ValueError`: the engine, the model's `config` or padding does not allow it.
        """
        group = ranks.sequence
        if group is None:
            return
        padded = next((x.padded_reason for x in self.packings if x.padded_reason is not None), None)
        reason = unsplit_reason(ranks.accelerator, group, config)
        if reason is None and not all(packing.takes_text_only for packing in self.packings):
            reason = "the model takes inputs other than text, which cannot be split"
        if reason is None and any(packing.has_mixers for packing in self.packings):
            reason = "the model has recurrent or convolutional layers, which need all tokens of a row"
        if reason is None and padded is not None:
            reason = f"it can split only batches without padding, but batches stay padded: {padded}"
        if reason is not None:
            raise ValueError(f"`{group.kind}_size={group.size}` is not supported here: {reason}.")
        for scoring in self.forwards:
            scoring.sequence_group = group

    @contextmanager
    def policy_scored(self, *, is_required: bool, entropy_requires_grad: bool | None) -> Iterator[None]:
        """Check, if required, that our forward scores the policy in the `with` block. Then ranks agree on packing.

        Args:
            entropy_requires_grad (`bool`, *optional*):
                whether the entropy has a gradient in this block, which costs a product with the vocabulary.
        """
        policy = self.policy
        policy.was_called = False
        with self.scoring_options(entropy_requires_grad):
            yield
        if is_required and not policy.was_called:
            raise RuntimeError(
                f"{self.scorer_of_policy} did not score the policy, because something replaced `model.forward` after "
                "the trainer was built: another trainer with the same model object, or a library that patches models. "
                "Build this trainer last, or give each trainer its own model object."
            )
        agree_on_packing(self.packings)

    @contextmanager
    def scoring_options(self, entropy_requires_grad: bool | None) -> Iterator[None]:
        """Set whether the entropy has a gradient in the `with` block; `None` changes nothing."""
        policy = self.policy
        options = policy.options
        if entropy_requires_grad is not None:
            self.set_entropy_gradient(entropy_requires_grad)
        try:
            yield
        finally:
            policy.options = options

    def padded(self) -> AbstractContextManager[None]:
        """Keep batches padded in the `with` block. None of them counts as the first batch, which packing checks."""
        return padded_in(self.packings)

    def take_counts(self) -> ForwardTokens:
        """Return the token counts of all forwards since the last call."""
        counts = [forward.take_counts() for forward in self.forwards]
        return ForwardTokens(*map(sum, zip(*counts, strict=True)))

    def describe(self, device: Any, alone: bool) -> str:
        """Return the text of the plan's row `head`."""
        rows = self.policy.head_rows or (WHOLE_HERE if alone else "each pass chooses how ranks share the weight's rows")
        kernels = ""
        option = self.options.head_kernels
        if self.options.head != "dense" and (device.type != "cpu" or option == "triton"):
            reason = "`head_kernels` is 'torch'" if option == "torch" else triton_unavailable_reason(device)
            kernels = ", with Triton kernels" if reason is None else f", without Triton kernels ({reason})"
        return f"{'; '.join([_HOW[self.options.head] + kernels, rows, *self._differences()])}."

    def _differences(self) -> list[str]:
        """Return where log-probs differ from TRL's, and why."""
        reasons = dict.fromkeys(x.difference_from_trl for x in self.forwards if x.difference_from_trl)
        difference = "TRL's log-probs are not those of the model's logits, but trl_ext's are"
        return [f"{difference}: {reason}" for reason in reasons]

    @property
    def is_usual(self) -> bool:
        """Whether the head runs as it does by default, on one device."""
        is_default = self.options.head == "tiled" and self.options.head_kernels is None
        return is_default and self.policy.head_rows in (None, WHOLE_HERE) and not self.differs_from_trl

    @property
    def differs_from_trl(self) -> bool:
        """Whether a model's log-probs are not TRL's, because TRL's are not those of the model's logits."""
        return any(x.difference_from_trl for x in self.forwards)
