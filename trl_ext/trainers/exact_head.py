"""What both trainers share: our scoring forward in the place of TRL's fused head, from their `__init__` on."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import TrainingArguments

from ..compat import head_attached_by
from ..heads import check_kernels, why_not_triton
from ..passes import Decision
from ..scoring import WHOLE_HERE, ScoringForward, ScoringOptions, attach_scoring_forward
from .guarded_engine import GuardedEngineMixin
from .head_arguments import HeadArguments
from .packed import PackedMixin, padding_free_is_ours
from .packing_arguments import PackingArguments
from .sequence_split import SequenceSplitMixin
from .tensor_parallel import TensorParallelMixin

logger = logging.getLogger("trl_ext")


class ExactHeadMixin(PackedMixin, GuardedEngineMixin, SequenceSplitMixin, TensorParallelMixin):
    """Mixed in before a TRL trainer: its models are scored by our forward.

    Attributes:
        head_arguments (`HeadArguments`): the fields of the config that choose the head.
        scoring_forwards (`list[ScoringForward]`): the policy's, then the reference model's where there is one.
    """

    _trl_trainer: type
    _scored_elsewhere: str | None

    def __init__(self, *positional: Any, **keywords: Any) -> None:
        config = self._config_among(positional, keywords)
        self.head_arguments = HeadArguments.of(config)
        self.packing_arguments = PackingArguments.of(config)
        self.scoring_forwards: list[ScoringForward] = []
        # The head that GRPO casts to fp32 is a linear layer from then on, without its adapter. What vLLM samples with,
        # where the head of a tied model has one, has not been seen
        adapted = not (getattr(config, "cast_lm_head_to_fp32", False) or getattr(config, "use_vllm", False))
        with head_attached_by(self._attach, self._trl_trainer, adapted=adapted), padding_free_is_ours(config):
            super().__init__(*positional, **keywords)  # type: ignore[call-arg]
        check_kernels(self.head_arguments.head_kernels, self.accelerator.device, "head_kernels")  # type: ignore[attr-defined]
        self._tell_packing_of_the_run()  # a wrong argument is an error here, not at the first step
        self.padding_free = self._packing_plan().padding_free
        self._join_sequence_group()

    @staticmethod
    def _config_among(positional: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """The trainer's `args`, wherever in the call they stand: DPO's and GRPO's positions differ."""
        return next((x for x in (*positional, *keywords.values()) if isinstance(x, TrainingArguments)), None)

    def _head_decision(self) -> Decision:
        """The row `head` of the plan: which rows of the head's weight the policy's last pass was scored with."""
        how = {"tiled": "log-probs in tiles, without the logits", "dense": "from all logits of a batch at once"}
        alone = self.accelerator.state.num_processes == 1  # type: ignore[attr-defined]
        ahead = WHOLE_HERE if alone else "where the rows of its weight lie is seen at each pass"
        seen = self.scoring_forwards[0].head_rows or ahead
        return Decision("head", "run", f"{how[self.head_arguments.head]}{self._kernels_of_head()}; {seen}.")

    def _kernels_of_head(self) -> str:
        """What works on the tiles, where that may be Triton."""
        device, asked = self.accelerator.device, self.head_arguments.head_kernels  # type: ignore[attr-defined]
        if self.head_arguments.head == "dense" or (device.type == "cpu" and asked != "triton"):
            return ""
        reason = "`head_kernels` says so" if asked == "torch" else why_not_triton(device)
        return ", by Triton's kernels" if reason is None else f", without Triton's kernels, since {reason}"

    def _entropy_requires_grad(self) -> bool:
        """Whether a term of the loss sends a gradient through the policy's entropy."""
        return False

    def _attach(self, model: Any, **options: Any) -> None:
        """Stands for `add_fused_lm_head`, with its options, while TRL's `__init__` runs."""
        entropy_requires_grad = not self.scoring_forwards and self._entropy_requires_grad()
        scoring = attach_scoring_forward(
            model,
            ScoringOptions(
                head=self.head_arguments.head,
                chunk_size=self.head_arguments.head_chunk_size,
                kernels=self.head_arguments.head_kernels,
                entropy_requires_grad=entropy_requires_grad,
                padding_free=self.packing_arguments.padding_free is not False,
                share_prompts=self.packing_arguments.share_prompts is not False,
                **options,
            ),
        )
        self.scoring_forwards.append(scoring)

    @contextmanager
    def _policy_scored_here(self, by: str | None = None) -> Iterator[None]:
        """Within, the policy must be scored by our forward.

        Args:
            by (`str`, *optional*): a subclass's own method, which may score without our forward. The plan says so then.

        Raises:
            `RuntimeError`: it was scored by something else, because its forward was replaced after the trainer was
            built.
        """
        policy = self.scoring_forwards[0]
        policy.used = False
        yield
        if by is not None and not policy.used:
            if self._scored_elsewhere is None:
                self._scored_elsewhere = f"{by} scores the policy, without `fused_lm_head=True`."
                if self.accelerator.is_main_process:  # type: ignore[attr-defined]
                    logger.warning(f"The plan has changed:\n{self.explain()}")  # type: ignore[attr-defined]
            return
        if not policy.used:
            raise RuntimeError(
                "The policy was not scored by the exact head: something replaced `model.forward` after the trainer "
                "was built (another trainer on the same model object, or a library that patches models). Build this "
                "trainer last, or give each trainer a model of its own."
            )
        self._agree_on_packing()
