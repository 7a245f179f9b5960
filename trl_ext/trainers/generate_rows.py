"""GRPO's and RLOO's `generate` without copies of prompts and finished completions, where that changes no sample."""

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..compat.replaced import replaced
from ..distributed.ranks import Ranks
from ..packing.first_batch import is_coarse, undisturbed
from ..packing.support import has_experts
from ..planning.sampled import GENERATE, GenerateFacts
from ..reference.weights import base_of

if TYPE_CHECKING:
    from ..compat.generate import GenerateRows

logger = logging.getLogger("trl_ext")

_ARGUMENTS = {"input_ids", "attention_mask", "generation_config"}
# Tolerances relative to the norm of a row's logits, in fp32 and in lower precision
_TOLERANCE = 1e-3
_COARSE_TOLERANCE = 0.2
# The share of rows that may exceed them in lower precision, or if rounding can change a router's choice of experts
_OUTLIERS = 0.5


class FewerRows:
    """Lets the model run fewer rows in TRL's call of `generate`, and checks the first one.

    Args:
        trainer (`GRPOTrainer` or `RLOOTrainer`): which generates.
    """

    def __init__(self, trainer: Any, ranks: Ranks) -> None:
        self.trainer = trainer
        self.ranks = ranks
        self._is_checked = False
        self._unproven_reason: str | None = None  # found while generating

    def facts(self) -> GenerateFacts:
        """Return what the plan must know of generation."""
        trainer = self.trainer
        if trainer.use_vllm:
            return GenerateFacts(sampler="vLLM")
        if getattr(trainer, "rollout_func", None) is not None:  # RLOO has none
            return GenerateFacts(sampler="`rollout_func`")
        if trainer._replaces("generation"):
            return GenerateFacts(sampler="an overridden method")
        reason = trainer._features.why_off("fewer rows in generation")
        if reason is None and trainer.use_transformers_continuous_batching:
            return GenerateFacts(sampler="transformers' continuous batching")
        if not trainer._added_fields.of(trainer.args).generate_fewer_rows:
            reason = "`generate_fewer_rows=False`"
        elif any(config.is_prompt_learning for config in getattr(trainer.model, "peft_config", {}).values()):
            reason = "the adapter adds virtual tokens to each row"
        return GenerateFacts(sampler=GENERATE, all_rows_reason=reason or self._unproven_reason)

    def _all_rows_reason(self) -> str | None:
        """Return why this call of `generate` runs all rows; `None` if it does not."""
        randomness = self.trainer._randomness()
        if randomness is not None and (self.trainer.model.training or not randomness.in_training_only):
            return str(randomness.reason)
        return self.facts().all_rows_reason

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Let the model run fewer rows in the `with` block, in which TRL may call `generate`."""
        trainer = self.trainer
        if self.facts().sampler != GENERATE:
            yield
            return
        run = trainer.model.generate
        reason = self._all_rows_reason()

        def generate(*positional: Any, **keywords: Any) -> Any:
            if reason is not None or positional or keywords.keys() - _ARGUMENTS:
                return self._generate_all_rows(run, *positional, **keywords)
            return self._generate(run, keywords)

        with replaced(trainer.model, generate=generate):
            yield

    def _generate(self, run: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """Generate with fewer rows. If that is not proven to change nothing, draw again as TRL does."""
        from ..compat.generate import GenerateRows, UnprovenError  # internals that may have moved

        device = arguments["input_ids"].device
        rng = torch if device.type == "cpu" else torch.get_device_module(device)
        random_state = rng.get_rng_state()
        is_first = not self._is_checked
        rows = GenerateRows(base_of(self.trainer.model), looks_for_state=is_first)
        reason = None
        try:
            with rows.running():
                ids = run(**arguments)
        except UnprovenError as error:
            reason = str(error)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of any model's code, which may need the rows of the batch
            if not is_first:
                raise
            reason = f"fewer rows raise {type(error).__name__}: {error}"
        checked_tokens = 0
        if is_first:
            if reason is None:
                reason, checked_tokens = self._difference(run, arguments, ids, rows)
            reason = next(filter(None, self.ranks.gather_objects(reason)), None)
            self._is_checked = True
        if reason is None:
            self._count(rows.tokens, rows.trl_tokens, checked_tokens=checked_tokens)
            return ids
        self._unproven_reason = reason
        rng.set_rng_state(random_state)
        return self._generate_all_rows(run, **arguments)

    def _generate_all_rows(self, run: Callable[..., Any], *positional: Any, **keywords: Any) -> Any:
        ids = run(*positional, **keywords)
        if isinstance(ids, Tensor):
            tokens = len(ids) * (ids.size(1) - 1)
            self._count(tokens, tokens)
        return ids

    def _difference(
        self, run: Callable[..., Any], arguments: dict[str, Any], ids: Tensor, rows: "GenerateRows"
    ) -> tuple[str | None, int]:
        """Return how fewer rows change logits, `None` if they do not, and the tokens that it took to find out.

        A plain `generate` repeats the last step of a few rows. What fewer rows do to the cache has happened by then.
        Each rank runs one forward.

        Args:
            ids: what `generate` returned, `(B, S)`.
        """
        assert rows.last_step is not None
        rows_R, logits_RV = rows.last_step
        ids_RS = ids[rows_R, :-1]
        mask_RS = torch.ones_like(ids_RS)
        prompt_mask = arguments["attention_mask"][rows_R]
        mask_RS[:, : prompt_mask.size(1)] = prompt_mask
        config = copy.deepcopy(arguments["generation_config"])
        config.update(max_new_tokens=1, min_new_tokens=None, return_dict_in_generate=True, output_logits=True)
        model = self.trainer.model
        with undisturbed(model, ids.device):
            outputs = run(input_ids=ids_RS, attention_mask=mask_RS, generation_config=config)
        expected_RV = outputs.logits[0].float()
        coarse = is_coarse(model, logits_RV)
        # Some models exclude classes with a logit of -inf
        expected_RV = expected_RV.masked_fill(~expected_RV.isfinite(), 0.0)
        logits_RV = logits_RV.float().masked_fill(~logits_RV.isfinite(), 0.0)
        relative_R = (logits_RV - expected_RV).norm(dim=1) / expected_RV.norm(dim=1).clamp(min=1e-30)
        is_outlier_R = relative_R > (_COARSE_TOLERANCE if coarse else _TOLERANCE)
        allowed_share = _OUTLIERS if coarse or has_experts(model) else 0.0
        if is_outlier_R.float().mean() <= allowed_share:
            return None, ids_RS.numel()
        largest = float(relative_R.max())
        reason = (
            f"in the first generation, logits of fewer rows differ from those of all by {largest:.2g} of their norm"
        )
        return reason, ids_RS.numel()

    def _count(self, tokens: int, trl_tokens: int, *, checked_tokens: int = 0) -> None:
        tokens, trl_tokens, checked_tokens = self.ranks.sum_counts([tokens, trl_tokens, checked_tokens])
        mode = "train" if self.trainer.model.training else "eval"
        self.trainer.token_counts.add_generation(mode, tokens, checked_tokens)
        if trl_tokens > tokens:
            self.trainer.skip_counts.add(mode, generation_tokens=trl_tokens - tokens)
