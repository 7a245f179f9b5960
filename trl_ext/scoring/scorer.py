"""The models of a trainer, each with its scoring forward: attached, checked, counted, and described in the plan."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..distributed.sequence_parallel import unsplit_reason
from ..heads.kernels.work import check_kernels, triton_unavailable_reason
from ..packing.packing import Packing
from .forward import ScoringForward, ScoringOptions, attach_scoring_forward
from .weight_layout import WHOLE_HERE

_HOW = {"tiled": "log-probs in tiles, without the logits", "dense": "from all logits of a batch at once"}


class Scorer:
    """Attributes: `forwards` (`list[ScoringForward]`): the policy's, then the reference model's where there is one."""

    def __init__(self, options: Any, *, smoothed: bool = False) -> None:
        self.options, self.smoothed = options, smoothed
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
            )
        )

    def check(self, device: Any, why_padded: str | None) -> None:
        """Check the kernels on the trainer's device; where there is a reason `why_padded`, pack no batch."""
        check_kernels(self.options.head_kernels, device, "head_kernels")
        if why_padded:
            for packing in self.packings:
                packing.why_padded = why_padded

    def split_over(self, ranks: Any, config: Any) -> None:
        """Split the tokens of a row over the ranks of `ranks.sequence`, if there is such a group.

        Raises:
            `ValueError`: the engine, the model's `config` or padding forbids it.
        """
        group = ranks.sequence
        if group is None:
            return
        padded = next((x.why_padded for x in self.packings if x.why_padded is not None), None)
        reason = unsplit_reason(ranks.accelerator, group, config)
        if reason is None and padded is not None:
            reason = f"a padded batch is not split, and this one is padded: {padded}"
        if reason is not None:
            raise ValueError(f"`{group.kind}_size={group.size}` is not supported here: {reason}.")
        for scoring in self.forwards:
            scoring.sequence_group = group

    @contextmanager
    def policy_scored(self, here: bool = True) -> Iterator[None]:
        """Within, our forward must score the policy (`here`); afterwards the ranks agree on how batches are packed."""
        self.policy.used = False
        yield
        if here and not self.policy.used:
            raise RuntimeError(
                "The policy was not scored by the exact head: something replaced `model.forward` after the trainer "
                "was built (another trainer on the same model object, or a library that patches models). Build this "
                "trainer last, or give each trainer a model of its own."
            )
        for packing in self.packings:
            if packing.checked and not packing.agreed:
                from accelerate.utils import gather_object

                every = gather_object([(packing.why_padded, packing.why_unshared)])
                packing.agree(*(list(why) for why in zip(*every, strict=True)))

    @contextmanager
    def padded(self) -> Iterator[None]:
        """Within, models get padded batches, which do not count as the first packed batch that is checked."""
        held = [(packing, packing.why_padded) for packing in self.packings]
        for packing, _ in held:
            packing.why_padded = "it is fed padded here"
        try:
            yield
        finally:
            for packing, why in held:
                packing.why_padded = why

    def take_counts(self) -> list[int]:
        """Tokens since the last call: left out; processed with a gradient; processed without; scored by the head."""
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
