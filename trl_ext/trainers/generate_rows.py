"""GRPO's and RLOO's `generate` without copies of prompts and finished completions, where that changes no sample."""

import copy
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import ProcessorMixin

from ..compat.generate_turns import EarlierTurn
from ..compat.replaced import replaced
from ..distributed.ranks import Ranks
from ..packing.first_batch import is_coarse, undisturbed
from ..packing.hooks import functions_of_users
from ..packing.support import has_experts, positions_by_length
from ..planning.sampled import GENERATE, VLLM, GenerateFacts
from ..reference.weights import base_of
from ..routing.routes import RowsOfForward
from ..sampler.sampling_mask import SamplingMaskRecorder
from .continuous_batching import ContinuousBatching
from .sampled_routes import SampledRoutes

if TYPE_CHECKING:
    from ..compat.generate import GenerateRows

logger = logging.getLogger("trl_ext")

_ARGUMENTS = {"input_ids", "attention_mask", "generation_config"}
# Inputs from processors of text and images: 0 for text
_TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")
_COMPARED = 4  # rows in a check, of different prompts
# Tolerances relative to the norm of a row's logits, in fp32 and in lower precision
_TOLERANCE = 1e-3
_COARSE_TOLERANCE = 0.05
# Fewer rows than this share may exceed the tolerance in lower precision, or if rounding can change a router's experts
_OUTLIERS = 0.5


class FewerRows:
    """Lets the model run fewer rows in TRL's calls of `generate`, and checks the first calls that do.

    Args:
        trainer (`GRPOTrainer` or `RLOOTrainer`): which generates.
        routes (`SampledRoutes`, *optional*): records the experts that routers choose.
    """

    def __init__(self, trainer: Any, ranks: Ranks, routes: SampledRoutes | None = None) -> None:
        self.trainer = trainer
        self.ranks = ranks
        self.routes = routes
        self.continuous = ContinuousBatching(trainer, routes)
        self.recorder: SamplingMaskRecorder | None = None  # of the tokens that `generate` can choose
        self._unchecked = {"shared", "dropped", "continued"}  # savings that no check has compared yet
        self._earlier_turn: EarlierTurn | None = None  # while a trainer with tools draws a generation batch
        self._unproven_reason: str | None = None  # found while generating
        self._counts = [0, 0, 0]  # this rank's tokens: in `generate`, on all rows, and in checks

    def facts(self) -> GenerateFacts:
        """Return what the plan must know of generation."""
        trainer = self.trainer
        if trainer.use_vllm:
            return GenerateFacts(VLLM)
        if getattr(trainer, "rollout_func", None) is not None:  # RLOO has none
            return GenerateFacts("`rollout_func`")
        if trainer._replaces("generation"):
            return GenerateFacts("an overridden method")
        reason = trainer._features.why_off("fewer rows in generation")
        if not trainer._added_fields.of(trainer.args).generate_fewer_rows:
            reason = "`generate_fewer_rows=False`"
        if getattr(trainer, "use_transformers_continuous_batching", False):
            return self.continuous.facts(reason)
        return GenerateFacts(GENERATE, all_rows_reason=reason or self._unproven_reason or self._model_reason())

    def _model_reason(self) -> str | None:
        """Return why samples may depend on which rows share a forward, even with equal draws; `None` if they do not."""
        model = self.trainer.model
        if any(config.is_prompt_learning for config in getattr(model, "peft_config", {}).values()):
            return "the adapter adds virtual tokens to each row"
        if isinstance(self.trainer.processing_class, ProcessorMixin) and self._may_have_images():
            return "prompts may have images"
        if positions_by_length(model):
            return "the model's rotary embeddings depend on the longest row of a forward pass"
        for owner in (model, base_of(model)):
            for function in functions_of_users(owner.generate):
                name = getattr(function, "__name__", function)
                return f"`generate` runs your function `{name}`, which may read the rows of a batch"
        return None

    def _may_have_images(self) -> bool:
        trainer = self.trainer
        columns = getattr(trainer.train_dataset, "column_names", None)
        returns_images = getattr(trainer, "tools", None) or getattr(trainer, "environment_factories", None)
        return columns is None or bool({"image", "images"} & {*columns}) or bool(returns_images)

    def _all_rows_reason(self) -> str | None:
        """Return why this call of `generate` runs all rows; `None` if it does not."""
        randomness = self.trainer._randomness()
        if randomness is not None and (self.trainer.model.training or not randomness.in_training_only):
            return str(randomness.reason)
        return self.facts().all_rows_reason

    def run_turn(self, single_turn: Callable[..., Any], *positional: Any, **keywords: Any) -> Any:
        """Run TRL's `single_turn` with fewer rows in the model."""
        facts = self.facts()
        with _without_router_logits(self.trainer.model):
            if facts.keeps_log_probs:
                return self.continuous.run_turn(single_turn, *positional, **keywords)
            if facts.sampler != GENERATE:
                return single_turn(*positional, **keywords)
            with self._generating():
                output = single_turn(*positional, **keywords)
        if self.routes is not None:
            completion_ids = output[0] if isinstance(output, tuple) else output  # GRPO's also returns log-probs
            self.routes.end_turn(positional[0], completion_ids, waits_for_ranks=self._forwards_together)
        return output

    @contextmanager
    def _generating(self) -> Iterator[None]:
        """Let the model run fewer rows in the `with` block, in which TRL may call `generate`."""
        trainer = self.trainer
        run = trainer.model.generate
        reason = self._all_rows_reason()

        def generate(*positional: Any, **keywords: Any) -> Any:
            has_types_of_text = all(not keywords[name].any() for name in _TOKEN_TYPES if name in keywords)
            is_of_text = has_types_of_text and keywords.keys() <= {*_ARGUMENTS, *_TOKEN_TYPES}
            if reason is not None or positional or not is_of_text:
                return self._generate_all_rows(run, *positional, **keywords)
            return self._generate(run, keywords)

        with replaced(trainer.model, generate=generate):
            yield

    @contextmanager
    def continuing_turns(self) -> Iterator[None]:
        """In the `with` block, let each turn of a tool loop start from the keys and values of the turn before."""
        # They last until the generation batch is complete: training needs the memory, and changes the weights
        self._earlier_turn = EarlierTurn() if getattr(self.trainer, "tools", None) else None  # RLOO has no tools
        try:
            yield
        finally:
            self._earlier_turn = None

    def record(self) -> None:
        """Log the tokens since the last record, not in each call: with tools, some ranks call `generate` more often."""
        tokens, trl_tokens, checked_tokens = self.ranks.sum_counts(self._counts)
        self._counts = [0, 0, 0]
        mode = "train" if self.trainer.model.training else "eval"
        if tokens:
            self.trainer.token_counts.add_generation(mode, tokens, checked_tokens)
        if trl_tokens > tokens:
            self.trainer.skip_counts.add(mode, generation_tokens=trl_tokens - tokens)

    def _count(self, tokens: int, trl_tokens: int, checked_tokens: int) -> None:
        for place, count in enumerate((tokens, trl_tokens, checked_tokens)):
            self._counts[place] += count

    def _generate(self, run: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """Generate with fewer rows. If this may change samples, generate again as TRL does."""
        from ..compat.generate import GenerateRows, UnprovenError  # internals that may have moved

        device = arguments["input_ids"].device
        rng = torch if device.type == "cpu" else torch.get_device_module(device)
        random_state = rng.get_rng_state()
        rows = GenerateRows(
            base_of(self.trainer.model),
            looks_for_state="shared" in self._unchecked,
            earlier_turn=self._earlier_turn,
            lists_rows=self.routes is not None,
        )
        checked_tokens = 0
        try:
            with self._routes_recorded(arguments["input_ids"], rows.forwards), rows.running():
                ids = run(**arguments)
            reason = self._agreed(None)
            if reason is None and self._is_on_any_rank(rows.saved & self._unchecked):
                reason, checked_tokens = self._difference(run, arguments, ids, rows)
                reason = self._agreed(reason)
        except UnprovenError as error:
            reason = self._agreed(str(error))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # from the model's code, which may need all rows
            if self._forwards_together:
                # The other ranks may be in a forward, which needs this one
                raise RuntimeError(
                    f"`generate` raises {type(error).__name__} with fewer rows than TRL runs: {error}. Set "
                    "`generate_fewer_rows=False`."
                ) from error
            reason = self._agreed(f"with fewer rows, it raises {type(error).__name__}: {error}")
        if reason is None:
            self._unchecked -= rows.saved
            self._count(rows.tokens, rows.trl_tokens, checked_tokens)
            return ids
        self._unproven_reason = reason
        self._earlier_turn = None
        logger.warning(f"`generate` runs every copy of a prompt and finished completions, as in TRL: {reason}.")
        self._count(0, 0, rows.tokens + checked_tokens)
        rng.set_rng_state(random_state)
        if self.recorder is not None:
            self.recorder.clear()
        return self._generate_all_rows(run, **arguments)

    def _routes_recorded(self, input_ids: Any, forwards: list[RowsOfForward]) -> AbstractContextManager[None]:
        return nullcontext() if self.routes is None else self.routes.generating(input_ids, forwards)

    @property
    def _forwards_together(self) -> bool:
        return self.ranks.forward_together(self.trainer.model)

    def _agreed(self, reason: str | None) -> str | None:
        """Return the reason of this rank. If ranks run each forward together, the first reason of any rank."""
        if not self._forwards_together:
            return reason
        return next(filter(None, self.ranks.gather_objects(reason)), None)

    def _is_on_any_rank(self, unchecked: set[str]) -> bool:
        """Return whether this rank must check. If ranks run each forward together, whether any must."""
        if not self._forwards_together:
            return bool(unchecked)
        return any(self.ranks.gather_objects(bool(unchecked)))

    def _generate_all_rows(self, run: Callable[..., Any], *positional: Any, **keywords: Any) -> Any:
        model = base_of(self.trainer.model)
        run_forward = model.forward
        input_ids: Any = keywords.get("input_ids", positional[0] if positional else None)
        tokens = 0
        forwards: list[RowsOfForward] = []

        def forward(*inputs: Any, **named_inputs: Any) -> Any:
            nonlocal tokens
            ids = named_inputs.get("input_ids", inputs[0] if inputs else None)
            tokens += ids.numel() if isinstance(ids, Tensor) else 0
            if self.routes is not None:
                forwards.append(RowsOfForward.all(len(input_ids)))
            return run_forward(*inputs, **named_inputs)

        forward.__signature__ = inspect.signature(run_forward)  # type: ignore[attr-defined]  # `generate` reads it
        with self._routes_recorded(input_ids, forwards), replaced(model, forward=forward):
            output = run(*positional, **keywords)
        self._count(tokens, tokens, 0)
        return output

    def _difference(
        self, run: Callable[..., Any], arguments: dict[str, Any], ids: Tensor, rows: "GenerateRows"
    ) -> tuple[str | None, int]:
        """Return how fewer rows change logits, `None` if they do not, and the number of tokens that the check runs.

        A plain `generate` repeats the last step of a few rows, which read the whole cache. Each rank runs one forward.

        Args:
            ids: what `generate` returned, `(B, S)`.
        """
        rows_R, logits_RV = rows.last_step(_COMPARED)
        ids_RS = ids[rows_R, :-1]
        mask_RS = torch.ones_like(ids_RS)
        prompt_mask = arguments["attention_mask"][rows_R]
        mask_RS[:, : prompt_mask.size(1)] = prompt_mask
        config = copy.deepcopy(arguments["generation_config"])
        config.update(max_new_tokens=1, min_new_tokens=None, return_dict_in_generate=True, output_logits=True)
        model = self.trainer.model
        unrecorded = nullcontext() if self.recorder is None else self.recorder.paused()
        with undisturbed(model, ids.device), unrecorded:
            token_types = {name: torch.zeros_like(ids_RS) for name in _TOKEN_TYPES if name in arguments}
            outputs = run(input_ids=ids_RS, attention_mask=mask_RS, generation_config=config, **token_types)
        expected_RV = outputs.logits[0].float()
        coarse = self._is_coarse(logits_RV)
        # Some models exclude classes with a logit of -inf
        expected_RV = expected_RV.masked_fill(~expected_RV.isfinite(), 0.0)
        logits_RV = logits_RV.float().masked_fill(~logits_RV.isfinite(), 0.0)
        relative_R = (logits_RV - expected_RV).norm(dim=1) / expected_RV.norm(dim=1).clamp(min=1e-30)
        is_outlier_R = relative_R > (_COARSE_TOLERANCE if coarse else _TOLERANCE)
        may_exceed = coarse or has_experts(model)
        if not is_outlier_R.any() or (may_exceed and is_outlier_R.float().mean() < _OUTLIERS):
            return None, ids_RS.numel()
        off = f"{float(relative_R.max()):.2g} of their norm"
        return f"in a check, its logits differ from those of a forward pass without a cache by {off}", ids_RS.numel()

    def _is_coarse(self, logits_RV: Tensor) -> bool:
        """Whether the model computes in lower precision than fp32, even if its logits are fp32."""
        trainer = self.trainer
        if trainer.accelerator.mixed_precision != "no":  # autocast within the model's forward
            return True
        has_half_weights = any(x.dtype in (torch.bfloat16, torch.float16) for x in trainer.model.parameters())
        return has_half_weights or is_coarse(trainer.model, logits_RV)


def _without_router_logits(model: Any) -> AbstractContextManager[None]:
    """Make the model return no router logits in the `with` block.

    In decoding, the router loss would compare one token's logits with the mask of all tokens, and raise an error.
    """
    config = model.config.get_text_config()
    returns_logits = getattr(config, "output_router_logits", False)
    return replaced(config, output_router_logits=False) if returns_logits else nullcontext()
