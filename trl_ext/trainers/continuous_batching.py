"""Transformers' continuous batching in GRPO and RLOO, with one request for each prompt, and with log-probs."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ..compat.replaced import replaced
from ..packing.hooks import functions_of_users
from ..planning.sampled import CONTINUOUS_BATCHING, GenerateFacts
from ..reference.weights import base_of
from .sampled_routes import SampledRoutes


class ContinuousBatching:
    """Passes each prompt once in TRL's call of `generate_batch`, and keeps the log-probs.

    Args:
        trainer (`GRPOTrainer` or `RLOOTrainer`): which generates.
        routes (`SampledRoutes`, *optional*): records the experts that routers choose.
    """

    def __init__(self, trainer: Any, routes: SampledRoutes | None = None) -> None:
        self.trainer = trainer
        self.routes = routes
        self.log_probs: list[list[float]] | None = None  # of the last completions, if the trainer reads them

    def facts(self, off_reason: str | None) -> GenerateFacts:
        """Return what the plan must know of generation.

        Args:
            off_reason (`str`, *optional*): why `generate_batch` runs as in TRL.
        """
        model = self.trainer.model
        for owner in (model, base_of(model)):
            if off_reason is None and any(functions_of_users(owner.generate_batch)):
                off_reason = "`generate_batch` runs your function"
        return GenerateFacts(
            sampler=CONTINUOUS_BATCHING,
            all_rows_reason=off_reason or self._copies_reason(),
            keeps_log_probs=off_reason is None,
        )

    def _copies_reason(self) -> str | None:
        """Return why each copy of a prompt is a request; `None` if all copies are one request."""
        from ..compat.continuous import RETURNS_ALL_COMPLETIONS  # internals that may have moved

        if not RETURNS_ALL_COMPLETIONS:
            return "transformers before 5.18 returns one completion per request"
        is_asynchronous = self.trainer.continuous_batching_config.use_async_batching
        if is_asynchronous is None:
            is_asynchronous = self.trainer.accelerator.device.type != "cpu"
        return "`use_async_batching` is not tested with several completions per request" if is_asynchronous else None

    def run_turn(self, single_turn: Callable[..., Any], *positional: Any, **keywords: Any) -> Any:
        """Run TRL's `single_turn`. GRPO's returns completions and log-probs, RLOO's completions."""
        from ..compat.continuous import complete

        trainer = self.trainer
        run = trainer.model.generate_batch
        shares_prompts = self._copies_reason() is None
        log_probs: list[list[float]] = []

        def generate_batch(
            prompt_ids: Any, generation_config: Any, continuous_batching_config: Any, **options: Any
        ) -> Any:
            batching_config = continuous_batching_config
            if self.routes is not None:
                # Routers are not seen in a CUDA graph
                batching_config = copy.copy(batching_config)
                batching_config.use_cuda_graph = False
                batching_config.use_async_batching = False
            with nullcontext() if self.routes is None else self.routes.batching():
                outputs, log_probs[:] = complete(
                    run,
                    prompt_ids,
                    generation_config,
                    batching_config,
                    shares_prompts=shares_prompts,
                    **options,
                )
            if self.routes is not None:
                self.routes.end_batching(outputs)
            return outputs

        is_training = trainer.model.training
        with replaced(trainer.model, generate_batch=generate_batch):
            output = single_turn(*positional, **keywords)
        if not is_training:
            trainer.model.eval()  # TRL leaves it in training mode
        # Log-probs that the plan does not use stay out of the batch, where some of TRL's losses would read them
        self.log_probs = log_probs if trainer.plan.reads_sampler_log_probs else None
        return (output[0], self.log_probs) if isinstance(output, tuple) else output

    def take_log_probs(self, batch: dict[str, Any]) -> Tensor | None:
        """Return the log-probs `(B, C)` of the batch's completions, only once; `None` if there are none."""
        log_probs, self.log_probs = self.log_probs, None
        completion_ids = batch.get("completion_ids")
        if log_probs is None or completion_ids is None or len(completion_ids) != len(log_probs):
            return None
        log_probs_BC = torch.full(completion_ids.shape, torch.nan)
        for row, values in enumerate(log_probs):
            log_probs_BC[row, : len(values)] = torch.tensor(values)
        return log_probs_BC.to(completion_ids.device)
