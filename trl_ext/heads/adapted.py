"""What an adapter adds to the head's product: a low-rank term, and rows of single classes in the place of the weight's.

Dimensions: N tokens, H hidden size, V vocabulary, R rank of the term, K classes with rows of their own.
"""

from bisect import bisect_left
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from .products import ExactLinear


class LowRank(NamedTuple):
    """The term `down @ up.T` of the product.

    Args:
        down (`Tensor` of shape `(N, R)`): hidden states times the first factor and the scaling; fp32 or float64.
        up (`Tensor` of shape `(V, R)`): the second factor.
        dtype (`torch.dtype`): what `up` is rounded to as an operand.
    """

    down: Tensor
    up: Tensor
    dtype: torch.dtype


class ReplacedRows(NamedTuple):
    """Classes whose row of the weight is another one.

    Args:
        classes (`tuple[int, ...]`): in ascending order, each once.
        ids (`Tensor` of shape `(K,)`): the same, on the weight's device.
    """

    classes: tuple[int, ...]
    ids: Tensor

    @classmethod
    def of(cls, classes: tuple[int, ...], device: torch.device) -> "ReplacedRows":
        return cls(classes, torch.tensor(classes, dtype=torch.int64, device=device))

    def within(self, classes: slice) -> slice:
        """Which of them lie in a range of classes."""
        return slice(bisect_left(self.classes, classes.start), bisect_left(self.classes, classes.stop))

    def put(self, weight_vH: Tensor, classes: slice, rows_KH: Tensor) -> Tensor:
        """The weight's rows of a range of classes, with those of `rows_KH` in their places."""
        some = self.within(classes)
        if some.start == some.stop:
            return weight_vH
        return weight_vH.index_copy(0, self.ids[some] - classes.start, rows_KH[some].to(weight_vH.dtype))

    def of_targets(self, weight_nH: Tensor, targets: Tensor, rows_KH: Tensor) -> Tensor:
        """The targets' rows, with those of `rows_KH` in their places."""
        place = torch.searchsorted(self.ids, targets).clamp(max=len(self.classes) - 1)
        found = self.ids[place] == targets
        return torch.where(found[:, None], rows_KH[place].to(weight_nH.dtype), weight_nH)


class Operands(NamedTuple):
    """What the product of N tokens is made of: `hidden @ weight.T + bias + down @ up.T`.

    `rows` (K, H) stand in the place of the weight's rows of the classes that the head names.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None
    down: Tensor | None = None
    up: Tensor | None = None
    rows: Tensor | None = None


class Factors(NamedTuple):
    """One adapter's factors: it adds `scaling * (hidden @ first.T @ second.T + bias)` to the product.

    Args:
        first (`Tensor` of shape `(R, H)`), second (`Tensor` of shape `(V, R)`), bias (`Tensor` of shape `(V,)`,
            *optional*): as they are trained.
        scaling (`float`): what the adapter is multiplied by.
    """

    first: Tensor
    second: Tensor
    bias: Tensor | None
    scaling: float


# Not compiled, as the head is not
@torch.compiler.disable  # type: ignore[untyped-decorator]
def low_rank_term(hidden: Tensor, factors: tuple[Factors, ...], dtype: torch.dtype, accumulate: torch.dtype) -> LowRank:
    """The term of all factors together; differentiable.

    Hidden states and factors are rounded to `dtype`. What lies between the two products is not.
    """
    downs, ups = [], []
    for first, second, bias, scaling in factors:
        downs.append(ExactLinear.apply(hidden, first, None, (dtype, dtype), accumulate, nullcontext) * scaling)
        ups.append(second)
        if bias is not None:
            downs.append(downs[-1].new_full((len(hidden), 1), scaling))
            ups.append(bias[:, None])
    if len(ups) == 1:
        return LowRank(downs[0], ups[0], dtype)
    return LowRank(torch.cat(downs, 1), torch.cat(ups, 1), dtype)
