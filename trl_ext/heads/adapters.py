"""Adapters on the LM head: a low-rank term added to its product, and replaced rows of its weight.

Dimensions: N tokens, H hidden size, V vocabulary, R rank of the term, K classes with replaced rows.
"""

from bisect import bisect_left
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from .products import ExactLinear


class LowRank(NamedTuple):
    """The term `down @ up.T + bias` that an adapter adds to the product."""

    down: Tensor  # (N, R), hidden states times the first factor and the scaling; fp32 or float64
    up: Tensor  # (V, R), the second factor
    dtype: torch.dtype  # the dtype to which `up` is rounded
    bias: Tensor | None = None  # (V,), the sum of the adapters' biases, fp32 or float64


class ReplacedRows(NamedTuple):
    """The classes whose rows of the weight an adapter replaces."""

    classes: tuple[int, ...]  # in ascending order, without duplicates
    ids: Tensor  # (K,), the classes as a tensor on the weight's device

    @classmethod
    def of(cls, classes: tuple[int, ...], device: torch.device) -> "ReplacedRows":
        return cls(classes, torch.tensor(classes, dtype=torch.int64, device=device))

    def within(self, classes: slice) -> slice:
        """Return the slice of `self.classes` that lies in a range of classes."""
        return slice(bisect_left(self.classes, classes.start), bisect_left(self.classes, classes.stop))

    def put(self, weight_vH: Tensor, classes: slice, rows_KH: Tensor) -> Tensor:
        """Return the rows `weight_vH` of a range of classes, with replaced rows taken from `rows_KH`."""
        inside = self.within(classes)
        if inside.start == inside.stop:
            return weight_vH
        return weight_vH.index_copy(0, self.ids[inside] - classes.start, rows_KH[inside].to(weight_vH.dtype))

    def of_targets(self, weight_nH: Tensor, targets: Tensor, rows_KH: Tensor) -> Tensor:
        """Return the rows `weight_nH` of the targets, with replaced rows taken from `rows_KH`."""
        place = torch.searchsorted(self.ids, targets).clamp(max=len(self.classes) - 1)
        is_replaced = self.ids[place] == targets
        return torch.where(is_replaced[:, None], rows_KH[place].to(weight_nH.dtype), weight_nH)


class Operands(NamedTuple):
    """The operands of the product of N tokens: `hidden @ weight.T + bias + down @ up.T`.

    The bias is added in the dtype of the sums. For the classes in the head's `ReplacedRows`, `rows` (K, H) replace the
    weight's rows.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None
    down: Tensor | None = None
    up: Tensor | None = None
    rows: Tensor | None = None

    @classmethod
    def of(
        cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, term: LowRank | None, rows: Tensor | None
    ) -> "Operands":
        """Return the operands, with an adapter's low-rank term if there is one; differentiable."""
        if term is None:
            return cls(hidden, weight, bias, rows=rows)
        return cls(hidden, weight, _sum(bias, term.bias), term.down, term.up, rows)


class Factors(NamedTuple):
    """One adapter's factors: it adds `scaling * (hidden @ first.T @ second.T + bias)` to the product."""

    first: Tensor  # (R, H)
    second: Tensor  # (V, R)
    bias: Tensor | None  # (V,)
    scaling: float


# Not compiled, for the reasons given at `run_head`
@torch.compiler.disable  # type: ignore[untyped-decorator]
def low_rank_term(hidden: Tensor, factors: tuple[Factors, ...], dtype: torch.dtype, accumulate: torch.dtype) -> LowRank:
    """Return the sum of the adapters' terms as one term; differentiable.

    Hidden states and factors are rounded to `dtype`; the result of the first product is not.
    """
    downs: list[Tensor] = []
    ups: list[Tensor] = []
    bias: Tensor | None = None
    for first, second, adapter_bias, scaling in factors:
        downs.append(ExactLinear.apply(hidden, first, None, (dtype, dtype), accumulate, nullcontext) * scaling)
        ups.append(second)
        bias = _sum(bias, None if adapter_bias is None else adapter_bias.to(accumulate) * scaling)
    if len(ups) == 1:
        return LowRank(downs[0], ups[0], dtype, bias)
    return LowRank(torch.cat(downs, 1), torch.cat(ups, 1), dtype, bias)


def _sum(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    return y if x is None else x if y is None else x + y
