"""GRPO under tensor parallelism: a copy of the model draws one set of completions, on however many ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import set_seed
from transformers import LogitsProcessor, LogitsProcessorList

from ..compat import gathered_by
from ..engines.tensor_parallel import TensorParallel
from .counted_once import count_generation_batch
from .grpo_passes import GRPOPassesMixin


class SameCompletionsMixin(GRPOPassesMixin):
    """Mixed in before TRL's `GRPOTrainer`."""

    def __init__(self, *positional: Any, **keywords: Any) -> None:
        super().__init__(*positional, **keywords)
        if self.tensor_parallel is not None:
            # TRL's seed is another one on each rank
            set_seed(self.args.seed + self.tensor_parallel.copy)  # type: ignore[attr-defined]

    def create_accelerator_and_postprocess(self) -> None:
        """Transformers' own; then the sizes of what is generated, for as many processes as have prompts of their own.

        Raises:
            `ValueError`: the groups do not fit into them, or the sampler would get a part of the weights.
        """
        super().create_accelerator_and_postprocess()
        if self.tensor_parallel is not None:
            args: Any = self.args  # type: ignore[attr-defined]
            _refuse_other_samplers(args)
            count_generation_batch(args, self.tensor_parallel, "tensor parallelism")

    def _draw(self, inputs: Any) -> dict[str, Any]:
        if self.tensor_parallel is None:
            return super()._draw(inputs)
        with gathered_by(self.accelerator, self._trl_trainer), self._sampling_in_step(self.tensor_parallel):
            return super()._draw(inputs)

    def _generated(self, batch: dict[str, Any]) -> dict[str, Any]:
        batch = super()._generated(batch)
        ranks = self._ranks_in_step()
        if ranks is not None:
            # The user's functions may have drawn random numbers, and TRL shuffles by them next
            ranks.share_random_state(self.accelerator.device)
        return batch

    @contextmanager
    def _sampling_in_step(self, ranks: TensorParallel) -> Iterator[None]:
        """Within, the model's `generate` draws the same tokens on all `ranks`.

        Its forward is one forward of them all, so a token that differs would spoil it, and one that ends a completion
        on some of them would leave the others waiting.
        """
        ranks.share_random_state(self.accelerator.device)
        model: Any = self.model  # type: ignore[attr-defined]
        generate = model.generate

        def in_step(*positional: Any, logits_processor: Any = None, **keywords: Any) -> Any:
            processors = LogitsProcessorList([*(logits_processor or []), _SameScores(ranks)])
            return generate(*positional, logits_processor=processors, **keywords)

        held = {"generate": vars(model)["generate"]} if "generate" in vars(model) else {}
        vars(model)["generate"] = in_step
        try:
            yield
        finally:
            del vars(model)["generate"]
            vars(model).update(held)


class _SameScores(LogitsProcessor):
    """The next token's scores as the first of `ranks` has them: rounding may differ between devices."""

    def __init__(self, ranks: TensorParallel) -> None:
        self.ranks = ranks

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return self.ranks.share_(scores.clone(memory_format=torch.contiguous_format))


def _refuse_other_samplers(args: Any) -> None:
    name = next((x for x in ("use_vllm", "use_transformers_continuous_batching") if getattr(args, x, False)), None)
    if name == "use_vllm":
        raise ValueError(
            "`use_vllm=True` under tensor parallelism: TRL would load into vLLM the part of a weight that a rank holds "
            "for the whole. Set `use_vllm=False`, or train with FSDP2 or DeepSpeed in the place of tensor parallelism."
        )
    if name is not None:
        raise ValueError(
            f"`{name}=True` under tensor parallelism: the ranks that hold one model would schedule and sample apart. "
            f"Set `{name}=False`."
        )
