"""Router replay: a mixture of experts trains on the experts that its routers chose before (`replay_routes`).

Dimensions: B rows of a batch, R rows that run, S tokens of a row, L routers, k experts of a token.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..compat import sampled as internals
from ..compat.overrides import overrides
from ..distributed.ranks import Ranks
from ..packing.first_batch import undisturbed
from ..planning.batch_keys import COMPLETION_ROUTES, PROMPT_ROUTES, ROUTE_KEYS
from ..planning.sampled import CONTINUOUS_BATCHING, GENERATE, GenerateFacts
from ..reference.weights import base_of
from ..routing.routers import Routers, UnknownRoutersError
from ..routing.routes import HostRoutes, padded
from ..scoring.scorer import Scorer
from .sampled_routes import SampledRoutes


class RouteReplay:
    """The routes that one trainer's passes use, and what is logged of them.

    Args:
        trainer (`GRPOTrainer` or `RLOOTrainer`): whose policy has routers.
    """

    def __init__(self, trainer: Any, ranks: Ranks, scorer: Scorer) -> None:
        self.trainer = trainer
        self.ranks = ranks
        self.scorer = scorer
        # Whose routes are used: those of the "sampler", of the "old_policy", or None
        self.source: str | None = getattr(trainer._added, "replay_routes", None)
        self.sampled = SampledRoutes(lambda: self.routers, ranks) if self.source == "sampler" else None
        self._recorded_BSLk: Tensor | None = None  # while passes over a batch are recorded
        self._is_off = False

    def check(self, generation: GenerateFacts) -> None:
        """Raise `ValueError` if routes cannot be replayed here, with this kind of generation."""
        if self.source is None:
            return
        if generation.sampler == CONTINUOUS_BATCHING and self.source == "sampler":
            self.trainer._features.require("routes of continuous batching")
        reason = self._reason(generation)
        if reason is not None:
            raise ValueError(f"`replay_routes={self.source!r}` is not supported here: {reason}.")
        if not self.ranks.forward_together(self.trainer.model):
            self.routers  # noqa: B018  # a model whose routers are unknown is an error now, not at the first step

    def _reason(self, generation: GenerateFacts) -> str | None:
        """Return why routes cannot be replayed, and what to do; `None` if they can."""
        trainer = self.trainer
        added = trainer._added
        rollout_func = getattr(trainer, "rollout_func", None)  # RLOO has none
        override = overrides(trainer, "_generate", "_generate_single_turn") or internals.overridden_below(trainer)
        override = override or internals.overridden_pass(trainer) or internals.overridden_loss(trainer)
        if override is not None:
            return f"this trainer overrides TRL's `{override}`, which samples, or scores, without routes"
        if self.source == "sampler" and trainer.use_vllm and rollout_func is None:
            return "routes of vLLM are not read. Sample with transformers, or with a `rollout_func` that returns them"
        if self.source == "old_policy" and not hasattr(added, "trust_sampling_log_probs"):
            return "the experts of RLOO's old policy are not recorded. Choose 'sampler'"
        if self.source == "old_policy" and added.trust_sampling_log_probs:
            return "with `trust_sampling_log_probs`, the old policy has no pass. Remove one of the two"
        if getattr(trainer, "tools", None) or getattr(trainer, "environment_factories", None) is not None:
            return "completions with tools are sampled in several turns. Call tools in a `rollout_func`"
        if any(config.is_prompt_learning for config in getattr(trainer.model, "peft_config", {}).values()):
            return "the adapter adds virtual tokens to each row. Use another kind of adapter"
        if trainer.args.torch_compile:
            return "routers are not seen in compiled code. Set `torch_compile=False`"
        if getattr(trainer, "_is_vlm", False):
            return "models of images are not supported. Train a text model"
        if getattr(added, "generation_lag", 0) or getattr(added, "sample_ahead", None):
            return "routes are not read in the thread that samples ahead. Leave `generation_lag` and `sample_ahead` off"
        if self.ranks.tensor_parallel is not None or self.ranks.sequence is not None:
            return "ranks that share a layer or a row are not supported. Use data parallelism, FSDP2 or ZeRO-3"
        if self.source != "sampler":
            return None
        if generation.sampler == CONTINUOUS_BATCHING and not generation.keeps_log_probs:
            return f"continuous batching runs as in TRL: {generation.all_rows_reason}"
        if generation.sampler == GENERATE and trainer._features.why_off("fewer rows in generation") is None:
            from ..compat.generate import rows_reason  # internals that may have moved

            reason = rows_reason(trainer.generation_config)
            return None if reason is None else f"`generate` does not sample plainly: {reason}"
        return None

    def refuse_loss(self) -> None:
        """Raise `RuntimeError` if routes are to be replayed: called where a loss runs passes without them."""
        if self.source is not None:
            raise RuntimeError(
                f"`replay_routes={self.source!r}` is not supported here: an overridden loss runs its own passes. Leave "
                "`replay_routes` unset."
            )

    @cached_property
    def routers(self) -> Routers:
        """The policy's routers, from a forward pass of four tokens. Ranks that share a model find them together."""
        trainer = self.trainer
        policy = base_of(trainer.model)
        called = trainer.model_wrapped if self.ranks.forward_together(trainer.model) else policy
        device = next(policy.parameters()).device
        ids_1S = torch.zeros(1, 4, dtype=torch.long, device=device)
        try:
            with undisturbed(policy, device):
                routers = Routers.of(
                    policy, lambda: called(input_ids=ids_1S, attention_mask=torch.ones_like(ids_1S), use_cache=False)
                )
        except UnknownRoutersError as error:
            raise ValueError(
                f"`replay_routes={self.source!r}` is not supported for `{type(policy).__name__}`: {error}. Leave "
                "`replay_routes` unset."
            ) from None
        self.scorer.policy.routers = routers
        return routers

    # Entries of a batch

    def sampled_entries(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Return the entries with the routes of a batch that has just been sampled."""
        if self.sampled is None:
            return {}
        entries, unknown_share = self.sampled.take_entries(batch)
        internals.mode_metrics(self.trainer)["routes/unknown"].append(unknown_share)
        return entries

    def drop_sampled(self) -> None:
        """Forget the routes of a batch whose generation has failed."""
        if self.sampled is not None:
            self.sampled.rows = None

    def padding(self) -> dict[str, float]:
        """Return the fill values of the entries."""
        return dict.fromkeys(ROUTE_KEYS, self.routers.unknown) if self.source is not None else {}

    def schedule(self) -> dict[str, int]:
        """Return what a checkpoint must know, so that its completions are trained on only with the same option."""
        return {} if self.source is None else {f"replay_routes={self.source!r}": 1}

    # Passes

    def of_pass(self, model: Any, batch: dict[str, Any]) -> HostRoutes | None:
        """Return the routes that a pass of `model` over `batch` uses, if any.

        Raises:
            `RuntimeError`: code of the user has removed them.
        """
        if self.source is None or self._is_off or model is getattr(self.trainer, "ref_model", None):
            return None
        self.routers  # noqa: B018  # after a checkpoint, nothing has asked for them
        if not batch.keys() >= {*ROUTE_KEYS}:
            if self.source == "old_policy":  # the first pass, which chooses
                return None
            raise RuntimeError(
                f'`replay_routes="sampler"` needs {" and ".join(map(repr, ROUTE_KEYS))} of a micro-batch, but they are '
                f"gone: this trainer {self.trainer.plan.facts.batch_reader}. Pass every entry of the batch on."
            )
        return HostRoutes(torch.cat([batch[PROMPT_ROUTES], batch[COMPLETION_ROUTES]], dim=1))

    def while_sampling(self, model: Callable[..., Any], input_ids: Tensor, completion_width: int) -> Callable[..., Any]:
        """Return a function that runs `model` with the routes of the batch that is being sampled.

        Args:
            input_ids (`Tensor`): of TRL's pass over all rows, which calls the function with successive rows.
            completion_width (`int`): columns of completions in it.
        """
        rows = None if self.sampled is None or self._is_off else self.sampled.rows
        if rows is None:
            return model
        prompt_width = input_ids.size(1) - completion_width
        prompt_routes = padded([row.prompt for row in rows], prompt_width, pads_left=True)
        completion_routes = padded([row.completion for row in rows], completion_width, pads_left=False)
        routes = HostRoutes(torch.cat([prompt_routes, completion_routes], dim=1))
        start = 0

        def score_chunk(*positional: Any, labels: Tensor, **model_inputs: Any) -> Any:
            nonlocal start
            chunk = slice(start, start + len(labels))
            start = chunk.stop
            return model(*positional, labels=labels, routes=routes[chunk], **model_inputs)

        return score_chunk

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        """Let routers choose in the `with` block."""
        self._is_off = True
        try:
            yield
        finally:
            self._is_off = False

    @contextmanager
    def recorded(self, batch: dict[str, Any], *, is_read_again: bool = True) -> Iterator[dict[str, Tensor]]:
        """Record the routes of the first pass over `batch`; the entries are there when the `with` block ends."""
        entries: dict[str, Tensor] = {}
        if self.source != "old_policy" or PROMPT_ROUTES in batch or not is_read_again:
            yield entries
            return
        routers = self.routers
        prompt_width, completion_width = (batch[key].size(1) for key in ("prompt_ids", "completion_ids"))
        shape = (len(batch["prompt_ids"]), prompt_width + completion_width, len(routers.routers), routers.chosen)
        self._recorded_BSLk = torch.full(shape, routers.unknown, dtype=routers.dtype)
        try:
            yield entries
            parts = self._recorded_BSLk.split([prompt_width, completion_width], dim=1)
        finally:
            self._recorded_BSLk = None
        entries.update(zip(ROUTE_KEYS, parts, strict=True))

    @contextmanager
    def pass_over(self, rows_R: Tensor) -> Iterator[None]:
        """Note what the routers choose in a pass over rows of the batch that is recorded, if one is."""
        if self._recorded_BSLk is None:
            yield
            return
        policy = self.scorer.policy
        policy.recorded_routes = []
        try:
            yield
            self._recorded_BSLk[rows_R.cpu()] = torch.cat(policy.recorded_routes).cpu()
        finally:
            policy.recorded_routes = None

    # Metrics

    def record(self) -> None:
        """Log what the routers would have chosen otherwise in the policy's pass, and conflicts of shared tokens."""
        if self.source is None or "routers" not in vars(self):
            return
        policy = self.scorer.policy
        counts = [*map(int, self.routers.differences.take()), policy.conflicts, policy.shared_routes]
        policy.conflicts = 0
        policy.shared_routes = 0
        differing, replayed, conflicts, shared = self.ranks.sum_counts(counts)
        metrics = internals.mode_metrics(self.trainer)
        if replayed:
            metrics["routes/differing"].append(differing / replayed)
        if shared:
            metrics["routes/conflicts"].append(conflicts / shared)
