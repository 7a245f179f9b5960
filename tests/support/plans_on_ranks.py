"""Measures the memory of planned options on two ranks, on each by its own allocator; see `plan_cases.py`."""

import json
from functools import partial

from launch import LaunchedRank
from memory_estimates_on_ranks import peak_of
from plan_cases import ON_RANKS


def _measured(name: str, rank: LaunchedRank) -> list[int]:
    """Return the peak of each option of a case, whose arguments the launching process has written."""
    runs = json.loads((rank.folder / f"{name}.json").read_text())
    return [peak_of(ON_RANKS[name].method, words, rank) for words in runs]


CASES = {name: partial(_measured, name) for name in ON_RANKS}
