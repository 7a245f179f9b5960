"""Which tokens of a packed row each call of a recurrent mixer gets.

A mixer runs on padded rows. It is causal, so rows padded on the right give each real token its exact output. Where the
mixer can continue from a state, a prefix that several rows share is a call of its own, and the rows continue from it.

Dimensions: T packed tokens; R rows and C columns of a call.
"""

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .layout import Layout

# A shorter prefix runs again in each row, which costs less than one more call
_SHORTEST_PREFIX = 8
# The share of a call's cells that may be padding. Rows of other lengths get another call
_PADDING = 0.25
# With one column, mixers take the path of generation, which overwrites states in place
_LEAST_COLUMNS = 2


class MixerCall(NamedTuple):
    """One call of a mixer.

    Attributes:
        tokens_RC (`Tensor`): the index in the packed row of each cell. A short row ends with copies of its last token.
        prefix_R (`Tensor`, *optional*): the number of the prefix from whose state each row continues; 0 for none. None
            if no row continues.
        is_prefix (`bool`): whether other rows continue from these, which have equal lengths.
    """

    tokens_RC: Tensor
    prefix_R: Tensor | None
    is_prefix: bool


@dataclass(frozen=True)
class MixerCalls:
    """The calls of a mixer in order, and where each packed token lies among the cells of all calls, `(T,)`."""

    calls: list[MixerCall]
    place_T: Tensor


class _Span(NamedTuple):
    """Successive tokens of a row, and the prefix from which they continue, 0 for none."""

    tokens: NDArray[np.int64]
    prefix: int


class _Group(NamedTuple):
    """Rows `first` to `last - 1`. Their first `begin` tokens are in prefixes, `level` of them; `prefix` is the last."""

    first: int
    last: int
    begin: int = 0
    prefix: int = 0
    level: int = 0


def mixer_calls(layout: Layout, device: torch.device, *, continues: bool, in_one_call: bool) -> MixerCalls:
    """Return the calls for a packed row.

    Args:
        continues (`bool`): whether the mixer can continue from a state.
        in_one_call (`bool`): whether all rows share one call, because each call has collectives.
    """
    rows, common = _distinct_rows(layout)
    levels, ends = _spans(rows, common, continues=continues and not in_one_call)
    # A prefix comes after the one from which it continues. Prefixes of equal lengths share a call
    groups = [group for level in levels for group in _by_length(level)]
    numbers = {0: 0}
    for group in groups:
        numbers |= {number: len(numbers) + place for place, number in enumerate(group)}
    calls = [(list(group.values()), True) for group in groups]
    calls += [(group, False) for group in ([ends] if in_one_call else _of_near_lengths(ends))]
    place_T = np.full(layout.tokens, -1)
    cells = 0
    row_calls = []
    for spans, is_prefix in calls:
        columns = max(len(span.tokens) for span in spans)
        columns = columns if is_prefix else max(columns, _LEAST_COLUMNS)
        for row, span in enumerate(spans):
            is_new = place_T[span.tokens] < 0
            place_T[span.tokens[is_new]] = cells + row * columns + np.flatnonzero(is_new)
        tokens_RC = np.stack([np.pad(span.tokens, (0, columns - len(span.tokens)), mode="edge") for span in spans])
        cells += tokens_RC.size
        prefix_R = torch.tensor([numbers[span.prefix] for span in spans], device=device)
        continues_here = any(span.prefix for span in spans)
        row_calls.append(
            MixerCall(torch.from_numpy(tokens_RC).to(device), prefix_R if continues_here else None, is_prefix)
        )
    return MixerCalls(row_calls, torch.from_numpy(place_T).to(device))


def _distinct_rows(layout: Layout) -> tuple[list[NDArray[np.int64]], list[int]]:
    """Return the rows with which no other begins, and how many leading tokens each shares with the one before."""
    rows: list[NDArray[np.int64]] = []
    common: list[int] = []
    for path, shared in zip(layout.paths(), layout.shared_lengths, strict=True):
        if rows and shared == len(rows[-1]):
            rows[-1] = path.copy()  # begins with the row before, so it shares with the one before that as much
        elif len(path):
            rows.append(path.copy())
            common.append(shared)
    return rows, common


def _spans(
    rows: list[NDArray[np.int64]], common: list[int], *, continues: bool
) -> tuple[list[dict[int, _Span]], list[_Span]]:
    """Divide rows in the order of the packed row into prefixes that several share and the ends of each.

    Returns:
        The prefixes by number, in a dictionary for each level; those of a level continue from the level before. And the
        ends.
    """
    levels: defaultdict[int, dict[int, _Span]] = defaultdict(dict)
    prefixes = 0
    ends: list[_Span] = []
    groups = [_Group(0, len(rows))]
    while groups:
        first, last, begin, prefix, level = groups.pop()
        if last - first == 1:
            ends.append(_Span(rows[first][begin:], prefix))
            continue
        shared = min(common[first + 1 : last])
        branches = [first, *(row for row in range(first + 1, last) if common[row] == shared), last]
        if continues and shared - begin >= _SHORTEST_PREFIX:
            prefixes += 1
            levels[level][prefixes] = _Span(rows[first][begin:shared], prefix)
            begin, prefix, level = shared, prefixes, level + 1
        groups += [_Group(*branch, begin, prefix, level) for branch in pairwise(branches)]
    return [levels[level] for level in sorted(levels)], ends


def _by_length(spans: dict[int, _Span]) -> list[dict[int, _Span]]:
    groups: defaultdict[int, dict[int, _Span]] = defaultdict(dict)
    for number, span in spans.items():
        groups[len(span.tokens)][number] = span
    return list(groups.values())


def _of_near_lengths(spans: list[_Span]) -> list[list[_Span]]:
    """Group spans, so that padding is a small share of each group."""
    groups: list[list[_Span]] = []
    for span in sorted(spans, key=_length, reverse=True):
        group = [*groups[-1], span] if groups else []
        cells: Any = len(group) * _length(group[0]) if group else 0
        if group and sum(map(_length, group)) >= (1 - _PADDING) * cells:
            groups[-1] = group
        else:
            groups.append([span])
    return groups


def _length(span: _Span) -> int:
    return len(span.tokens)
