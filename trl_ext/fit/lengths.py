"""The tokens of a data set's rows, truncated as in training, and the largest forwards that they can make.

Dimensions: U units (rows, or pairs in DPO), C completions of a unit.
"""

import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..planning.micro_batches import UNSHARED, RowTokens
from ..planning.parts import few_parts
from .step import Row

Array = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Lengths:
    """The tokens of each unit of the data. A forward has no padding."""

    prompts_U: Array
    completions_UC: Array
    group: int = 1  # completions of a prompt, each of which is a unit
    shares: bool = True  # completions of a prompt share it in a forward
    kept_together: bool = True  # completions of a group share a micro-batch where there is room

    @property
    def rows_U(self) -> Array:
        """The tokens of the longest row of each unit."""
        longest: Array = self.prompts_U + self.completions_UC.max(axis=1)
        return longest

    @cached_property
    def units_U(self) -> Array:
        """The tokens that the model processes of each unit, alone."""
        copies = 1 if self.shares else self.completions_UC.shape[1]
        # A row's last token is only predicted, and its first is not
        apart_UC = np.maximum(self.completions_UC - 1, 0)
        tokens: Array = np.maximum(copies * self.prompts_U + apart_UC.sum(axis=1), 1)
        return tokens

    @property
    def mean_pairs(self) -> float:
        """The pairs of query and key in a unit, on average."""
        rows_UC = self.prompts_U[:, None] + self.completions_UC
        return float((rows_UC.astype(float) ** 2 / 2).sum(axis=1).mean())

    @property
    def mean_scored(self) -> float:
        """The tokens that the head scores in a unit, on average."""
        return float(self.completions_UC.sum(axis=1).mean())

    @cached_property
    def _longest_first(self) -> Array:
        """The numbers of the units, those with the most tokens first."""
        return np.argsort(-self.units_U, kind="stable")

    def most(self, units: int) -> tuple[Row, ...]:
        """Return the rows of the `units` units with the most tokens."""
        prompts = units
        # Without sharing, every copy of a prompt counts; with it, the worst has the most prompts
        if self.group > 1 and (self.kept_together or not self.shares):
            groups, remainder = divmod(units, self.group)
            prompts = groups + (remainder > 0) + (remainder > 0 and groups > 0 and self.shares)
        order_U = self._longest_first[:prompts]
        rows: list[Row] = []
        for unit in range(units):
            # Without sharing, the worst has whole groups of the longest
            place = unit if self.shares else unit // self.group
            rows += self._rows(unit, int(order_U[place % len(order_U)]))
        return tuple(rows)

    def within(self, budget: int, units: int) -> tuple[Row, ...]:
        """Return as many rows of the longest of `units` units as fill `budget` tokens; at least one unit."""
        count = bisect.bisect_right(range(2, units + 1), budget, key=lambda x: self.tokens_of(self.most(x)))
        return self.most(count + 1)

    def _rows(self, unit: int, i: int) -> Iterator[Row]:
        """Yield the rows of unit `i` of the data, which is number `unit` of a micro-batch."""
        for c, completion in enumerate(self.completions_UC[i]):
            prompt = i if self.group > 1 else unit
            group = prompt if self.shares else unit * len(self.completions_UC[i]) + c
            yield Row(group, int(self.prompts_U[i]), int(completion))

    def tokens_of(self, rows: tuple[Row, ...]) -> int:
        """Return the number of tokens in a forward over `rows`."""
        prompts = {row.group: row.prompt for row in rows}
        return max(1, sum(prompts.values()) + sum(max(row.completion - 1, 0) for row in rows))

    def parts(self, budget: int, units: int) -> int:
        """Return in how many parts of at most `budget` tokens `units` typical units run."""
        prompts = -(-units // self.group)
        order_U = self._longest_first
        typical = order_U[((np.arange(prompts) + 0.5) / prompts * len(order_U)).astype(int)]
        shares_in_group = self.group > 1 and self.shares
        prompts_B = [i // self.group if shares_in_group else UNSHARED for i in range(units)]
        prompt_tokens_B = np.repeat(self.prompts_U[typical], self.group)[:units].tolist()
        apart_tokens_B = np.repeat((self.units_U - self.prompts_U)[typical], self.group)[:units].tolist()
        return len(few_parts(RowTokens(prompts_B, prompt_tokens_B, apart_tokens_B), list(range(units)), budget))
