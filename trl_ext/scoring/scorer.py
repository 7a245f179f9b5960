"""The models of one trainer, each with its scoring forward: attached, watched, and described in the plan."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..distributed.sequence_parallel import why_not_split
from ..heads.kernels.work import check_kernels, triton_unavailable_reason
from .forward import ScoringForward, ScoringOptions, attach_scoring_forward
from .weight_layout import WHOLE_HERE

_HOW = {"tiled": "log-probs in tiles, without the logits", "dense": "from all logits of a batch at once"}


class Scorer:
    """Attributes: `forwards` (`list[ScoringForward]`): the policy's, then the reference model's where there is one."""

    def __init__(self, options: Any, *, smoothed: bool = False) -> None:
        self.options, self.smoothed = options, smoothed
        self.forwards: list[ScoringForward] = []

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
            )
        )

    def check(self, device: Any, why_padded: str | None) -> None:
        """What is known once TRL has built the trainer: the kernels of the device, and what forbids one row for all."""
        check_kernels(self.options.head_kernels, device, "head_kernels")
        for scoring in self.forwards if why_padded else ():
            scoring.packing.why_padded = why_padded

    def split_over(self, ranks: Any, config: Any) -> None:
        group = ranks.sequence
        if group is None:
            return
        reason = why_not_split(ranks.accelerator, group, config) or next(
            (
                f"rows that are fed padded are not split, and here they are: {x.packing.why_padded}"
                for x in self.forwards
                if x.packing.why_padded is not None
            ),
            None,
        )
        if reason is not None:
            raise ValueError(f"`{group.kind}_size={group.size}` cannot be had here: {reason}.")
        for scoring in self.forwards:
            scoring.sequence_group = group

    @contextmanager
    def policy_scored(self, here: bool = True) -> Iterator[None]:
        """Within, the policy must be scored by our forward; afterwards the ranks agree on how batches are packed."""
        self.policy.used = False
        yield
        if here and not self.policy.used:
            raise RuntimeError(
                "The policy was not scored by the exact head: something replaced `model.forward` after the trainer "
                "was built (another trainer on the same model object, or a library that patches models). Build this "
                "trainer last, or give each trainer a model of its own."
            )
        for packing in (x.packing for x in self.forwards):
            if packing.checked and not packing.agreed:
                from accelerate.utils import gather_object

                every = gather_object([(packing.why_padded, packing.why_unshared)])
                packing.agree(*(list(why) for why in zip(*every, strict=True)))

    @contextmanager
    def padded(self) -> Iterator[None]:
        """Within, models get padded batches, and the first one that is not padded is still to be checked."""
        held = [(x.packing, x.packing.why_padded) for x in self.forwards]
        for packing, _ in held:
            packing.why_padded = "it is fed padded here"
        try:
            yield
        finally:
            for packing, why in held:
                packing.why_padded = why

    def take_counts(self) -> list[int]:
        """Since the last call: tokens not fed; fed with a gradient; fed without; scored by the head."""
        counts = [[x.packing.left_out, *x.fed] for x in self.forwards]
        for x in self.forwards:
            x.packing.left_out, x.fed = 0, [0, 0, 0]
        return [sum(count) for count in zip(*counts, strict=True)]

    def describe(self, device: Any, alone: bool) -> str:
        """The row `head` of the plan."""
        rows = self.policy.head_rows or (
            WHOLE_HERE if alone else "where the rows of its weight lie is seen at each pass"
        )
        kernels, asked = "", self.options.head_kernels
        if self.options.head != "dense" and (device.type != "cpu" or asked == "triton"):
            reason = "`head_kernels` says so" if asked == "torch" else triton_unavailable_reason(device)
            kernels = ", by Triton's kernels" if reason is None else f", without Triton's kernels, since {reason}"
        return f"{_HOW[self.options.head]}{kernels}; {rows}."
