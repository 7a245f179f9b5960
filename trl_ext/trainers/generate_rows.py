"""GRPO's and RLOO's `generate` without copies of prompts and finished completions, where that changes no sample."""

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..compat.generate import GenerateRows, UnprovenError
from ..compat.replaced import replaced
from ..distributed.ranks import Ranks
from ..packing.first_batch import is_coarse, undisturbed
from ..packing.support import has_experts
from ..planning.sampled import GenerateFacts
from ..reference.weights import base_of

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
        options = trainer._added_fields.of(trainer.args)
        if trainer.use_vllm:
            return GenerateFacts(sampler="vLLM")
        if getattr(trainer, "rollout_func", None) is not None:
            return GenerateFacts(sampler="`rollout_func`")
        if trainer._replaces("generation"):
            return GenerateFacts(sampler="an overridden method")
        if trainer.use_transformers_continuous_batching:
            return GenerateFacts(sampler="transformers' continuous batching")
        reason = trainer._features.why_off("fewer rows in generation") or self._unproven_reason
        if not options.generate_fewer_rows:
            reason = "`generate_fewer_rows=False`"
        elif reason is None and any(config.is_prompt_learning for config in self._adapters()):
            reason = "the adapter adds virtual tokens to each row"
        return GenerateFacts(sampler="`generate`", all_rows_reason=reason)

    def _adapters(self) -> list[Any]:
        return list(getattr(self.trainer.model, "peft_config", {}).values())

    def _all_rows_reason(self) -> str | None:
        """Return why this call of `generate` runs all rows; `None` if it does not."""
        facts = self.facts()
        if facts.sampler != "`generate`":
            return facts.sampler
        randomness = self.trainer._randomness()
        if randomness is not None and (self.trainer.model.training or not randomness.in_training_only):
            return str(randomness.reason)
        return facts.all_rows_reason

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Let the model run fewer rows in the `with` block, in which TRL may call `generate`."""
        trainer = self.trainer
        if self.facts().sampler != "`generate`":
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
        device = arguments["input_ids"].device
        rng = torch if device.type == "cpu" else torch.get_device_module(device)
        random_state = rng.get_rng_state()
        rows = GenerateRows(base_of(self.trainer.model), looks_for_state=not self._is_checked)
        try:
            with rows.running():
                ids = run(**arguments)
            checked_tokens = 0
            if not self._is_checked:
                checked_tokens = self._check(run, arguments, ids, rows)
                self._is_checked = True
        except UnprovenError as error:
            reason = str(error)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of any model's code, which may need the rows of the batch
            if self._is_checked:
                raise
            reason = f"fewer rows raise {type(error).__name__}: {error}"
        else:
            self._count(rows.tokens, rows.trl_tokens, checked_tokens)
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

    def _check(self, run: Callable[..., Any], arguments: dict[str, Any], ids: Tensor, rows: GenerateRows) -> int:
        """Compare the last step with a plain `generate` of a few rows: their tokens but the last, then one step.

        All of what fewer rows do to the cache has happened by then. Every rank runs one forward. Returns its tokens.

        Raises:
            `UnprovenError`: on any rank, the logits differ.
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
        expected_RV = outputs.logits[0]
        is_compared_RV = logits_RV.isfinite() & expected_RV.isfinite()
        difference_R = ((logits_RV.float() - expected_RV.float()) * is_compared_RV).nan_to_num().norm(dim=1)
        relative_R = difference_R / (expected_RV.float() * is_compared_RV).nan_to_num().norm(dim=1).clamp(min=1e-30)
        coarse = is_coarse(model, logits_RV)
        is_outlier_R = relative_R > (_COARSE_TOLERANCE if coarse else _TOLERANCE)
        allowed_share = _OUTLIERS if coarse or has_experts(model) else 0.0
        if self.ranks.any(bool(is_outlier_R.float().mean() > allowed_share)):
            raise UnprovenError(
                "in the first generation, logits of fewer rows differ from those of all rows by "
                f"{float(relative_R.max()):.2g} of their norm"
            )
        return ids_RS.numel()

    def _count(self, tokens: int, trl_tokens: int, checked_tokens: int = 0) -> None:
        tokens, trl_tokens, checked_tokens = self.ranks.sum_counts([tokens, trl_tokens, checked_tokens])
        mode = "train" if self.trainer.model.training else "eval"
        self.trainer.token_counts.add_generation(mode, tokens, checked_tokens)
        if trl_tokens > tokens:
            self.trainer.skip_counts.add(mode, generation_tokens=trl_tokens - tokens)
