"""Divergences between two softmaxes, as sums of terms over the vocabulary.

With p_s and p_t of student and teacher and L = log p_t - log p_s, each divergence is E_s[f(L)] for a function f that is
never negative and that vanishes with its derivative at L = 0. Its gradient with respect to the student's logits is
p_s (w - E_s[w]) with w = f - f':

- forward KL(p_t || p_s): f = L e^L - e^L + 1, w = 1 - e^L;
- reverse KL(p_s || p_t): f = e^L - 1 - L, w = -L;
- Jensen-Shannon, with the mixture m = (1 - beta) p_s + beta p_t and g = log m - log p_s = log(1 + beta (e^L - 1)):
  f = beta L e^L - e^g g, w = -(1 - beta) g.

The normalisers are known only after the last tile. So tiles hold unnormalised numbers: e_s = S p_s, e_t = T p_t, and
the gap D = L + log(T / S), so that e_t = e_s e^D. A term is e_s f(D), and a coefficient is -e_s w(D), up to a factor.
The caller keeps T / S near 1, so that no result is a small difference of large sums.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Up to this gap, f comes from its power series. Beyond it, the terms of the formula hardly cancel
NEAR_GAP = 0.5
DEGREE = 11


@dataclass(frozen=True)
class GapTile:
    """The numbers of a tile, (n, v) each: D, e_s, and e_t - e_s.

    `is_exact`: the error of `gap` and of `excess` is relative to D, not to the logits.
    `teacher`: e_t, which is less exact as a sum of the others.
    """

    gap: Tensor
    student: Tensor
    excess: Tensor
    is_exact: bool = False
    teacher: Tensor | None = None

    def teacher_exponentials(self, out: Tensor) -> Tensor:
        """Return e_t; may write it to `out`."""
        return torch.add(self.student, self.excess, out=out) if self.teacher is None else self.teacher


class Move(NamedTuple):
    """How the unnormalised numbers of each token change, (N,) each."""

    student: Tensor
    """The factor of e_s."""
    teacher: Tensor
    """The factor of e_t."""
    gap: Tensor
    """What is subtracted from D."""


class Sums(NamedTuple):
    """Sums over the vocabulary, (N,) each."""

    student: Tensor
    """S, of e_s."""
    excess: Tensor
    """T - S."""
    terms: Tensor
    coefficients: Tensor


class Divergence(ABC):
    """One kind of divergence. Its sums over the vocabulary are tensors (N,)."""

    is_centred = False
    """Whether tiles must have T = S, so that D is L. Otherwise T / S need only be near 1."""
    # Of f: coefficients of D^2, D^3, and so on
    series: tuple[float, ...]

    @abstractmethod
    def coefficients(self, tile: GapTile, out: Tensor, scratch: Tensor) -> Tensor:
        """Return the coefficients. May write them to `out`, and overwrites `scratch`."""

    @abstractmethod
    def formula(self, tile: GapTile, coefficients: Tensor, out: Tensor, scratch: Tensor) -> Tensor:
        """Write the terms to `out`, from the formula of f. Overwrites `scratch`.

        `out` may be the tile's excess, unless this is what `coefficients` returned.
        """

    @abstractmethod
    def factor(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return k for S and T: the gradient is k (mean e_s - coefficient), where the mean is the sum over S."""

    @abstractmethod
    def value(self, terms: Tensor, excess: Tensor) -> Tensor:
        """Return the divergence from E_s[f(D)] and from y = T / S - 1."""

    def move_coefficients(self, move: Move) -> tuple[Tensor, Tensor]:
        """Return p and q: after the move a coefficient is p coefficient + q e_s, both from before."""
        raise NotImplementedError

    def move_terms(self, move: Move, old_sums: Sums, new_sums: Sums) -> Tensor:
        """Return the sum of the terms after a move with another gap; `new_sums` has the other sums."""
        raise NotImplementedError

    def terms(self, tile: GapTile, coefficients: Tensor, out: Tensor, scratch: Tensor) -> Tensor:
        """Write the terms to `out`, as `formula` does."""
        if not tile.is_exact:
            return self.formula(tile, coefficients, out, scratch)
        smallest_gap, largest_gap = (float(x) for x in tile.gap.aminmax())
        if smallest_gap > -NEAR_GAP and largest_gap < NEAR_GAP:
            return self._near_terms(tile, tile.gap, out)
        near_terms = self._near_terms(
            tile, torch.clamp(tile.gap, -NEAR_GAP, NEAR_GAP, out=scratch), torch.empty_like(out)
        )
        self.formula(tile, coefficients, out, scratch)
        is_near = tile.gap.abs() < NEAR_GAP
        return torch.where(is_near, near_terms, out, out=out)

    def _near_terms(self, tile: GapTile, gap: Tensor, out: Tensor) -> Tensor:
        out.fill_(self.series[-1])
        for coefficient in reversed(self.series[:-1]):
            torch.addcmul(gap.new_tensor(coefficient), out, gap, out=out)
        return out.mul_(gap).mul_(gap).mul_(tile.student)


class ForwardKL(Divergence):
    """KL(p_t || p_s)."""

    series = tuple((k - 1) / math.factorial(k) for k in range(2, DEGREE + 1))

    def coefficients(self, tile: GapTile, out: Tensor, scratch: Tensor) -> Tensor:
        return tile.excess

    def formula(self, tile: GapTile, coefficients: Tensor, out: Tensor, scratch: Tensor) -> Tensor:
        e_t = tile.teacher_exponentials(scratch)
        return torch.mul(e_t, tile.gap, out=out).sub_(tile.excess)

    def factor(self, student: Tensor, teacher: Tensor) -> Tensor:
        return 1 / teacher

    def value(self, terms: Tensor, excess: Tensor) -> Tensor:
        # E_t[D] - log(1 + y), with E_s[f(D)] = (1 + y) E_t[D] - y
        return (terms - ((1 + excess) * excess.log1p() - excess)) / (1 + excess)

    def move_coefficients(self, move: Move) -> tuple[Tensor, Tensor]:
        return move.teacher, move.teacher - move.student

    def move_terms(self, move: Move, old_sums: Sums, new_sums: Sums) -> Tensor:
        sum_gaps = old_sums.terms + old_sums.excess - move.gap * (old_sums.student + old_sums.excess)  # of e_t D
        return move.teacher * sum_gaps - new_sums.excess


class ReverseKL(Divergence):
    """KL(p_s || p_t)."""

    series = tuple(1 / math.factorial(k) for k in range(2, DEGREE + 1))

    def coefficients(self, tile: GapTile, out: Tensor, scratch: Tensor) -> Tensor:
        return torch.mul(tile.student, tile.gap, out=out)

    def formula(self, tile: GapTile, coefficients: Tensor, out: Tensor, scratch: Tensor) -> Tensor:
        return torch.sub(tile.excess, coefficients, out=out)

    def factor(self, student: Tensor, teacher: Tensor) -> Tensor:
        return 1 / student

    def value(self, terms: Tensor, excess: Tensor) -> Tensor:
        # log(1 + y) - E_s[D], with E_s[f(D)] = y - E_s[D]
        return terms - (excess - excess.log1p())

    def move_coefficients(self, move: Move) -> tuple[Tensor, Tensor]:
        return move.student, -move.student * move.gap

    def move_terms(self, move: Move, old_sums: Sums, new_sums: Sums) -> Tensor:
        return new_sums.excess - new_sums.coefficients


class JensenShannon(Divergence):
    """beta KL(p_t || m) + (1 - beta) KL(p_s || m)."""

    is_centred = True  # so terms and coefficients never move

    def __init__(self, beta: float) -> None:
        self.beta = beta
        self.series = _jensen_shannon_series(beta)

    def coefficients(self, tile: GapTile, out: Tensor, scratch: Tensor) -> Tensor:
        if tile.is_exact:
            share = self._log_mixture_share(tile, out, scratch)
            return share.add_(torch.clamp(tile.gap, min=0, out=scratch)).mul_(tile.student)
        # g - log(1 - beta), which is small where p_t is far below p_s: so the gradient keeps its precision if the two
        # have different classes. Nearly equal p_t and p_s lose some, but then the gap's own error is larger
        torch.add(tile.gap, math.log(self.beta / (1 - self.beta)), out=scratch)
        return F.softplus(scratch).mul_(tile.student)

    def formula(self, tile: GapTile, coefficients: Tensor, out: Tensor, scratch: Tensor) -> Tensor:
        # beta e_t (L - g) - (1 - beta) e_s g, where L - g has a value also if L is infinite
        share = self._log_mixture_share(tile, scratch, torch.empty_like(out))
        to_mixture = torch.clamp(tile.gap, max=0).sub_(share).mul_(self.beta)
        torch.mul(tile.teacher_exponentials(out), to_mixture, out=out)
        return out.sub_(share.add_(torch.clamp(tile.gap, min=0)).mul_(tile.student), alpha=1 - self.beta)

    def _log_mixture_share(self, tile: GapTile, out: Tensor, scratch: Tensor) -> Tensor:
        """Write log(m / max(p_s, p_t)) to `out`: g, less L where L is positive. Nothing overflows."""
        torch.abs(tile.gap, out=out).neg_().expm1_()
        if self.beta == 0.5:
            return out.mul_(0.5).log1p_()
        share_of_smaller = torch.sign(tile.gap, out=scratch).mul_(0.5 - self.beta).add_(0.5)
        return out.mul_(share_of_smaller).log1p_()

    def factor(self, student: Tensor, teacher: Tensor) -> Tensor:
        return (1 - self.beta) / student

    def value(self, terms: Tensor, excess: Tensor) -> Tensor:
        return terms


def divergence_of(beta: float) -> Divergence:
    """Return the divergence of TRL's `beta`."""
    if beta == 0:
        return ForwardKL()
    return ReverseKL() if beta == 1 else JensenShannon(beta)


def _jensen_shannon_series(beta: float) -> tuple[float, ...]:
    exponential = [1 / math.factorial(k) for k in range(DEGREE + 1)]
    mixture = [1.0] + [beta * x for x in exponential[1:]]
    log_mixture = [0.0]
    for k in range(1, DEGREE + 1):
        # From m (log m)' = m'
        products = sum(j * log_mixture[j] * mixture[k - j] for j in range(1, k))
        log_mixture.append(mixture[k] - products / k)
    return tuple(
        beta * exponential[k - 1] - sum(mixture[j] * log_mixture[k - j] for j in range(k + 1))
        for k in range(2, DEGREE + 1)
    )
