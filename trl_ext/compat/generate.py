"""Transformers' `generate` on fewer rows: each distinct prompt once in the prefill, then only unfinished rows.

`generate` keeps its batch, so padding, positions, logits processors, stopping criteria and draws are those of all
rows. Only the model's forward gets fewer rows. Finished rows get logits of 0, and `generate` replaces what it draws
from these by padding.

Dimensions: B rows of the batch, R rows that the model runs, S tokens, V classes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, StoppingCriteriaList
from transformers.cache_utils import Cache, DynamicLayer

from ..routing.routes import RowsOfForward
from .generate_turns import EarlierTurn
from .replaced import replaced

_CACHE_NAMES = ("cache", "past_key_values", "cache_params")
_TENSORS_OF_ROWS = ("input_ids", "attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids")
# Inputs that all rows share
_SHARED = ("cache_position", "use_cache", "logits_to_keep", "return_dict")


class UnprovenError(Exception):
    """Samples may depend on which rows share a forward pass. The argument says why, as a clause."""


class GenerateRows:
    """Runs the model on fewer rows in one call of `generate`, and counts their tokens.

    Args:
        model (`nn.Module`): whose `generate` is called; without its PEFT wrapper.
        looks_for_state (`bool`): whether to look for tensors that modules keep outside the cache.
        earlier_turn (`EarlierTurn`, *optional*): has the keys and values of the turn before, and gets those of this
            call.
        lists_rows (`bool`): whether to list the rows of each forward pass.
    """

    def __init__(
        self,
        model: Any,
        *,
        looks_for_state: bool,
        earlier_turn: EarlierTurn | None = None,
        lists_rows: bool = False,
    ) -> None:
        self.model = model
        self.lists_rows = lists_rows
        self.looks_for_state = looks_for_state
        self.earlier_turn = earlier_turn
        self.tokens = 0  # that the model has run
        self.trl_tokens = 0  # that it would have run on all rows
        # "shared": a prompt ran for several rows; "dropped": a finished row left; "continued": a row of the last step
        # began from the cache of an earlier turn
        self.saved: set[str] = set()
        self.forwards: list[RowsOfForward] = []  # if it lists rows
        self._last_step: tuple[Tensor, Tensor] | None = None  # rows of the batch, and their logits `(R, 1, V)`
        self._distinct_B: Tensor | None = None  # the index of each row's prompt among the distinct ones
        self._padding_B: Tensor | None = None  # columns of padding on the left of each row
        self._continued_B: Tensor | None = None  # whether a row began from the cache of an earlier turn
        self._cache: Any = None  # only if its rows will be stored
        self._criteria: _RecordingCriteria | None = None
        self._rows_R: Tensor | None = None  # rows of the batch that the cache holds; None: all
        self._is_prefill = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Make `generate` run fewer rows in the `with` block.

        Raises:
            `UnprovenError`: in `generate`.
        """
        model = self.model
        run_prefill = model._prefill
        run_forward = model.forward
        get_criteria = model._get_stopping_criteria

        @wraps(run_prefill)
        def prefill(*positional: Any, **options: Any) -> Any:
            self._is_prefill = True
            try:
                return self._prefill(run_prefill, *positional, **options)
            finally:
                self._is_prefill = False

        @wraps(run_forward)  # `generate` reads its signature
        def forward(*positional: Any, **inputs: Any) -> Any:
            if self._is_prefill:
                if self.lists_rows:
                    assert self._distinct_B is not None
                    self.forwards.append(RowsOfForward(torch.arange(len(self._distinct_B)), self._distinct_B))
                return run_forward(*positional, **inputs)
            return self._decode(run_forward, *positional, **inputs)

        @wraps(get_criteria)
        def recording_criteria(*positional: Any, **options: Any) -> StoppingCriteriaList:
            self._criteria = _RecordingCriteria(get_criteria(*positional, **options))
            return self._criteria

        with replaced(model, _prefill=prefill, forward=forward, _get_stopping_criteria=recording_criteria):
            yield
        if self._cache is not None:
            self._store(torch.arange(self._cache.layers[0].keys.size(0)), copies=False)
            self._cache = None

    def _prefill(
        self,
        run_prefill: Callable[..., Any],
        input_ids: Tensor,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        *positional: Any,
        **options: Any,
    ) -> Any:
        """Run the distinct prompts, and copy their cache and last logits to the rows that repeat them."""
        _check_config(generation_config)
        first_R, distinct_B = _distinct_rows(input_ids, model_kwargs.get("attention_mask"))
        self._distinct_B = distinct_B
        row_inputs = _inputs_of_rows(model_kwargs, first_R, len(input_ids))
        _check_cache(_cache_of(model_kwargs), is_new=True)
        columns = self._continue_rows(_cache_of(model_kwargs), input_ids, model_kwargs.get("attention_mask"), first_R)
        self.trl_tokens += input_ids.numel()
        self.tokens += len(first_R) * (input_ids.size(1) - columns)
        tensors_before = _tensors_outside_cache(self.model) if self.looks_for_state else {}
        outputs = run_prefill(input_ids[first_R], generation_config, row_inputs, *positional, **options)
        if self.looks_for_state:
            _check_state(tensors_before, _tensors_outside_cache(self.model))
        cache = _cache_of(model_kwargs) or _cache_of(outputs)
        _check_cache(cache)
        # Without positions as input, a forward may count padding, which changes from turn to turn
        has_positions = isinstance(model_kwargs.get("position_ids"), Tensor)
        if self.earlier_turn is not None and has_positions and _holds_each_token(cache, input_ids.size(1)):
            self._cache = cache
        logits_R1V = outputs.logits[:, -1:]
        if len(first_R) < len(input_ids):
            # Made for beam search: each kind of layer has this method, and it takes an index of any length
            cache.reorder_cache(distinct_B)
            self.saved.add("shared")
            logits_R1V = logits_R1V.index_select(0, distinct_B.to(logits_R1V.device))
        outputs.logits = logits_R1V
        self._last_step = torch.arange(len(input_ids), device=input_ids.device), logits_R1V
        return outputs

    def _continue_rows(self, cache: Any, input_ids: Tensor, mask: Tensor | None, first_R: Tensor) -> int:
        """Fill the new cache with the keys and values of the turn before. Return the number of columns that it got.

        `generate` runs the other columns.
        """
        self._padding_B = torch.zeros_like(input_ids[:, 0]) if mask is None else input_ids.size(1) - mask.sum(1)
        columns = 0
        if self.earlier_turn is not None and cache is not None:
            columns = self.earlier_turn.move_into(cache, input_ids[first_R], self._padding_B[first_R])
        self._continued_B = self._padding_B < columns
        if columns:
            self.saved.add("continued")
        return columns

    def _store(self, places: Tensor, *, copies: bool = True) -> None:
        """Store rows of the cache for the next turn. The cache lacks the last token that each row has drawn."""
        assert self.earlier_turn is not None
        assert self._padding_B is not None
        ids_BS = None if self._criteria is None else self._criteria.ids_BS
        if ids_BS is None:
            return
        rows_R = torch.arange(len(ids_BS)) if self._rows_R is None else self._rows_R
        for place in places.tolist():
            row = int(rows_R[place])
            # With a sharded model, a rank whose rows are all finished keeps running them
            columns = slice(int(self._padding_B[row]), ids_BS.size(1) - 1)
            self.earlier_turn.store(ids_BS[row, columns].tolist(), self._cache, place, columns, copies=copies)

    def _decode(self, run_forward: Callable[..., Any], *positional: Any, **inputs: Any) -> Any:
        """Run unfinished rows, and return logits `(B, 1, V)`."""
        cache = _cache_of(inputs)
        if positional or not isinstance(inputs.get("input_ids"), Tensor) or cache is None:
            raise UnprovenError("its forward takes inputs other than token ids and a cache")
        batch_size = len(inputs["input_ids"])
        is_done = self._drop_finished(cache)
        self.trl_tokens += inputs["input_ids"].numel()
        rows_R = self._rows_R
        if rows_R is None:
            rows_R = torch.arange(batch_size, device=inputs["input_ids"].device)
        if self.lists_rows:
            self.forwards.append(RowsOfForward(rows_R, torch.arange(len(rows_R))))
        row_inputs = _inputs_of_rows(inputs, rows_R, batch_size)
        self.tokens += row_inputs["input_ids"].numel()
        outputs = run_forward(**row_inputs)
        logits_R1V = outputs.logits
        if not is_done:
            self._last_step = rows_R, logits_R1V
        if len(rows_R) < batch_size:
            logits_B1V = logits_R1V.new_zeros(batch_size, *logits_R1V.shape[1:])
            outputs.logits = logits_B1V.index_copy_(0, rows_R.to(logits_R1V.device), logits_R1V)
        return outputs

    def _drop_finished(self, cache: Any) -> bool:
        """Remove finished rows from the cache, unless all are finished. Return whether all are."""
        criteria = self._criteria
        # Without an end token, `generate` does not pad finished rows, but keeps drawing from their logits
        if criteria is None or criteria.finished_B is None or not criteria.pads_finished_rows:
            return False
        is_live = ~criteria.finished_B
        if self._rows_R is not None:
            is_live = is_live[self._rows_R]
        live = is_live.nonzero().squeeze(1)
        if not len(live):
            # Another rank has unfinished rows, and a sharded model needs all ranks in each forward pass
            return True
        if len(live) < len(is_live):
            if self._cache is not None:
                self._store((~is_live).nonzero().squeeze(1))
            cache.reorder_cache(live)
            self.saved.add("dropped")
            self._rows_R = live if self._rows_R is None else self._rows_R[live]
            assert self._continued_B is not None
            if not self._continued_B[self._rows_R].any():
                self.saved.discard("continued")  # a check compares only rows of the last step
        return False

    def last_step(self, most: int) -> tuple[Tensor, Tensor]:
        """Return rows that ran in the last step, one of each of at most `most` prompts, and their logits `(R, V)`.

        Those that continue an earlier turn come first.
        """
        assert self._last_step is not None
        assert self._distinct_B is not None
        assert self._continued_B is not None
        rows_R, logits_R1V = self._last_step
        order = self._continued_B[rows_R].int().argsort(descending=True, stable=True)
        places = dict(zip(self._distinct_B[rows_R[order]].tolist(), order.tolist(), strict=True))
        chosen = torch.tensor(list(places.values())[:most], device=rows_R.device)
        return rows_R[chosen], logits_R1V[chosen.to(logits_R1V.device), -1]


class _RecordingCriteria(StoppingCriteriaList):
    """Stopping criteria that also record the tokens, and which rows have finished."""

    finished_B: Tensor | None = None
    ids_BS: Tensor | None = None

    @property
    def pads_finished_rows(self) -> bool:
        return any(hasattr(criterion, "eos_token_id") for criterion in self)

    def __call__(self, input_ids: Any, scores: Any, **options: Any) -> Any:
        self.ids_BS = input_ids
        finished_B = super().__call__(input_ids, scores, **options)
        self.finished_B = finished_B.clone() if self.finished_B is None else self.finished_B | finished_B
        return finished_B


def rows_reason(config: Any) -> str | None:
    """Return which option needs other rows or forward passes than plain sampling, as a clause; `None` if none does."""
    mode = config.get_generation_mode().value
    if mode not in ("sample", "greedy_search"):
        return f"it uses {mode}"
    if config.use_cache is False:
        return "it has no cache (`use_cache=False`)"
    if (config.guidance_scale or 1) != 1:
        return "`guidance_scale` runs the model twice"
    if config.num_return_sequences not in (None, 1):
        return "`num_return_sequences` repeats its rows"
    return None


def _check_config(config: Any) -> None:
    """Raise `UnprovenError` for an option that needs other rows or forward passes than plain sampling, or outputs."""
    reason = rows_reason(config)
    if reason is not None:
        raise UnprovenError(reason)
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name):
            raise UnprovenError(f"it returns more than tokens (`{name}`)")


def _check_cache(cache: Any, *, is_new: bool = False) -> None:
    if cache is None and is_new:
        return  # the model makes it
    # Subclasses, and static and quantized caches, may keep states that `reorder_cache` does not reorder
    if type(cache) is not DynamicCache:
        raise UnprovenError(f"its cache is a `{type(cache).__name__}`")
    if getattr(cache, "offloading", False):
        raise UnprovenError("its cache is offloaded")
    if is_new and _has_past(cache):
        raise UnprovenError("its cache is not empty")
    if not is_new and not _has_past(cache):
        raise UnprovenError("its forward uses no cache")


def _holds_each_token(cache: Any, tokens: int) -> bool:
    """Return whether each layer holds keys and values of all tokens, and no other state of a row."""
    return all(type(layer) is DynamicLayer and layer.get_seq_length() == tokens for layer in cache.layers)


def _has_past(cache: Any) -> bool:
    try:
        return bool(cache.get_seq_length() > 0)
    except ValueError:  # only recurrent layers
        return bool(cache.has_previous_state())


def _cache_of(inputs: Any) -> Any:
    caches = [inputs[name] for name in _CACHE_NAMES if isinstance(inputs.get(name), Cache)]
    return caches[0] if caches else None


def _distinct_rows(input_ids: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the first row of each distinct prompt, `(R,)`, and the index there of each row's prompt, `(B,)`."""
    keys = input_ids if mask is None else torch.cat([input_ids, mask.to(input_ids.dtype)], dim=1)
    places: dict[tuple[int, ...], int] = {}
    first_rows: list[int] = []
    distinct_rows: list[int] = []
    for row, key in enumerate(map(tuple, keys.tolist())):
        place = places.setdefault(key, len(first_rows))
        if place == len(first_rows):
            first_rows.append(row)
        distinct_rows.append(place)
    device = input_ids.device
    return torch.tensor(first_rows, device=device), torch.tensor(distinct_rows, device=device)


def _inputs_of_rows(inputs: dict[str, Any], rows_R: Tensor, batch_size: int) -> dict[str, Any]:
    """Return the inputs of some rows of the batch.

    Raises:
        `UnprovenError`: an input may have a part for each row.
    """
    row_inputs: dict[str, Any] = {}
    for name, value in inputs.items():
        has_rows = isinstance(value, Tensor) or (isinstance(value, list | tuple | dict) and len(value) > 0)
        if name in _CACHE_NAMES or name in _SHARED or not has_rows:
            row_inputs[name] = value
            continue
        if name not in _TENSORS_OF_ROWS or not isinstance(value, Tensor) or value.ndim not in (2, 3):
            raise UnprovenError(f"its forward takes `{name}`")
        # Positions with several axes are `(3, B, S)`; without padding, positions are `(1, S)`
        dimension = value.ndim - 2
        if value.shape[dimension] == batch_size:
            row_inputs[name] = value.index_select(dimension, rows_R.to(value.device))
        elif value.shape[dimension] == 1:
            row_inputs[name] = value
        else:
            raise UnprovenError(f"its forward takes a `{name}` of shape {tuple(value.shape)}")
    return row_inputs


def _tensors_outside_cache(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that modules keep as plain attributes, by name."""
    tensors = {}
    for module_name, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                tensors[f"{module_name}.{name}".lstrip(".")] = value
    return tensors


def _check_state(before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    """Raise `UnprovenError` if a forward replaced a module's tensor, which may have a part for each row."""
    for name, tensor in after.items():
        if before.get(name) is not tensor:
            raise UnprovenError(f"the forward keeps a tensor in `{name}`, outside the cache")
