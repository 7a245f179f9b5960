"""What the log-prob passes of GRPO and RLOO share: which rows and tokens a pass scores, and a pass over them.

Dimensions: B rows of a batch, R rows that run, C completion tokens.
"""

from collections import defaultdict
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Generic, TypeVar

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..compat import sampled as internals
from ..compat.overrides import PASS
from ..compat.replaced import unrecorded_pass
from ..packing.packing import LastResult
from ..planning.micro_batches import RowTokens
from ..planning.rows import PolicyScores, ScoredTokens, all_tokens, live_tokens
from .route_replay import RouteReplay
from .sampled_metrics import SampledMetrics

Batch = dict[str, Any]  # `planning/batch_keys.py` lists the keys
Plan = TypeVar("Plan", bound=Any)

_STEPS_BETWEEN_COMPARISONS = 100  # each takes one more pass


class SampledPasses(Generic[Plan]):
    """Runs log-prob passes of one trainer.

    Args:
        trainer (`GRPOTrainer` or `RLOOTrainer`): its plan decides what is scored; its log-prob pass runs.
    """

    def __init__(self, trainer: Any, metrics: SampledMetrics, routes: RouteReplay) -> None:
        self.trainer = trainer
        self.metrics = metrics
        self.routes = routes
        # completion mask -> options of `live_tokens` -> tokens
        self._live_tokens: Any = WeakTensorKeyDictionary()

    @property
    def _plan(self) -> Plan:
        plan: Plan = self.trainer.plan
        return plan

    # Rows and tokens

    def tokens_to_score(self, batch: Batch) -> ScoredTokens:
        """Return the rows and tokens that a pass over `batch` scores: the same for policy, old policy and reference."""
        plan = self._plan
        # A subclass, or a loss that is not known, may read the tokens of tool calls
        all_are_read = plan.loss_runs_passes or plan.facts.has_own_pass
        if not self.trainer.model.training or internals.has_images(batch) or all_are_read:
            return all_tokens(batch, of_tools=all_are_read)
        # The passes of a micro-batch share the result, so the host waits for the device only once
        options = {"skip_masked": plan.skips_masked, "skip_zero_advantages": plan.skips_zero_advantages}
        tensors = [batch.get(key) for key in ("completion_mask", "tool_mask", "advantages", "prompt_mask")]
        last_results = self._live_tokens.setdefault(batch["completion_mask"], defaultdict(LastResult))
        last_result: LastResult = last_results[tuple(options.values())]
        return last_result.of(*tensors, make=partial(live_tokens, batch, **options))  # type: ignore[no-any-return]

    def row_tokens(self, batch: Batch) -> RowTokens:
        """Return the tokens of each row in the policy's pass."""
        packing = self.trainer._packing_plan()
        scored_tokens = self.tokens_to_score(batch)
        return RowTokens.of(batch, scored_tokens, packed=packing.padding_free, shared=packing.share_in_training)

    # The policy

    def score_micro_batch(self, model: Any, batch: Batch) -> PolicyScores:
        """Run the policy's pass over `batch`, with a graph."""
        scored_tokens = self.tokens_to_score(batch)
        self.metrics.skipped_tokens += scored_tokens.skipped_tokens(batch)
        with self._policy_scored():
            return self._score(model, batch, scored_tokens, compute_aux_loss=self.trainer.aux_loss_enabled)

    def _policy_scored(self) -> AbstractContextManager[None]:
        subclass_pass = f"`{type(self.trainer).__name__}.{PASS}`" if self._plan.facts.has_own_pass else None
        policy_scored: AbstractContextManager[None] = self.trainer._policy_scored(subclass_pass)
        return policy_scored

    def _score(self, model: Any, batch: Batch, scored_tokens: ScoredTokens, **options: Any) -> PolicyScores:
        log_probs_RC, entropies_RC, router_loss = self._forward(
            model, batch, scored_tokens, compute_entropy=True, **options
        )
        return PolicyScores(scored_tokens, log_probs_RC, entropies_RC, router_loss)

    def compare_routes(self, model: Any, batch: Batch) -> None:
        """Log, in some steps, the mismatch with the sampler that the policy would have if its routers chose anew."""
        trainer = self.trainer
        step = trainer.state.global_step
        if self.routes.source != "sampler" or not trainer.model.training or step % _STEPS_BETWEEN_COMPARISONS:
            return
        if "sampling_per_token_logps" not in batch or trainer._buffer.sampled_at_step != step:
            return
        if self._plan.facts.randomness is not None:  # one more pass would change the draws of training
            return
        scored_tokens = self.tokens_to_score(batch)
        skipped_tokens = self.metrics.skipped_tokens
        with unrecorded_pass(trainer), self.routes.switched_off():
            log_probs_RC = self._log_probs(model, batch, scored_tokens)
        self.metrics.skipped_tokens = skipped_tokens  # TRL has no such pass
        self.metrics.record_mismatch_without_routes(scored_tokens.scatter(log_probs_RC), batch, scored_tokens)

    def _log_probs(self, model: Any, batch: Batch, scored_tokens: ScoredTokens) -> Tensor:
        """Return log-probs `(R, C)`, for a caller that needs no gradient."""
        log_probs_RC: Tensor = self._forward(model, batch, scored_tokens)[0]
        return log_probs_RC

    # A forward

    def _forward(self, model: Any, batch: Batch, scored_tokens: ScoredTokens, **options: Any) -> tuple[Any, Any, Any]:
        """Run TRL's scoring pass over the R rows. Returns log-probs and entropies, `(R, C)` or None, and router loss.

        `options` are those of TRL's pass that differ from its defaults: a subclass's pass may not know the others.
        """
        if not self._plan.facts.has_own_pass:
            outputs = ("log_probs", "entropy") if options.get("compute_entropy") else ("log_probs",)
            routes = self.routes.of_pass(model, batch)
            model = scored_tokens.limit_scoring(model, outputs, self._sampling_mask(batch), routes)
        with self.routes.pass_over(scored_tokens.rows_R):
            return internals.completion_log_probs(self.trainer, model, scored_tokens.select_rows(batch), **options)

    def _sampling_mask(self, batch: Batch) -> tuple[Tensor, ...]:
        """Return the entries of the batch that limit each log-prob to the tokens that the sampler could choose."""
        return ()
