"""Sums over the vocabulary that a divergence needs, folded tile by tile.

A sum over ranks that split the vocabulary would be here. Dimensions: N tokens, H hidden size, (n, v) tokens and columns
of a tile.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .divergence_terms import Divergence, GapTile, Move, Sums
from .products import matmul_into

# A divergence beyond this comes from such a logit
_INFINITE_DIVERGENCE = 1e16
# How far the teacher's largest logit may be from its shift, which follows the sums
_LARGEST_DISTANCE = 24.0
# The largest gap whose exponential is formed from the student's
_LARGEST_GAP = 64.0


@dataclass(frozen=True)
class Tile:
    """The logits of a tile, (n, v); and the operands of its gradients, in the dtype of products."""

    tokens: slice
    columns: slice
    student_logits: Tensor
    # The teacher's logits, or with one head their gap to the student's
    other_logits: Tensor
    hidden: Tensor
    weight: Tensor
    # The factor that a softcap gives to dz/dx of the student
    slope: Tensor | None
    # (n, v) each, for what follows from the logits
    shifted_logits: Tensor
    exponentials: Tensor
    gap: Tensor
    excess: Tensor
    scratch: Tensor

    @property
    def is_first(self) -> bool:
        """Whether it is the first tile of its tokens."""
        return self.columns.start == 0

    @property
    def is_first_of_columns(self) -> bool:
        """Whether it is the first tile of its columns."""
        return self.tokens.start == 0


def _subtract(logits: Tensor, shift: Tensor, out: Tensor) -> None:
    """Subtract the shift (n,) of each row. The difference is rounded to the dtype of `out`, not the logits."""
    torch.sub(logits, shift[:, None], out=out)


class Gradients:
    """Two sums over rows of the student's weight, (N, H): with the factors e_s, and with the coefficients.

    Both factors include that of a softcap, but not the slope.
    """

    def __init__(self, hidden: Tensor, accumulate: torch.dtype, operand_dtype: torch.dtype) -> None:
        self.student_sums = hidden.new_zeros(hidden.shape, dtype=accumulate)
        self.coefficient_sums = torch.zeros_like(self.student_sums)
        self.operand_dtype = operand_dtype

    def add_(self, tile: Tile, student: Tensor, coefficients: Tensor) -> None:
        weight_vH = tile.weight.to(self.operand_dtype)
        for sums_NH, factors in ((self.student_sums, student), (self.coefficient_sums, coefficients)):
            if tile.slope is not None:
                factors = factors.mul_(tile.slope)
            matmul_into(sums_NH[tile.tokens], factors.to(self.operand_dtype), weight_vH, accumulate=True)

    def move_(self, tokens: slice, student: Tensor, p: Tensor, q: Tensor) -> None:
        """Rescale e_s by `student`; a coefficient becomes p coefficient + q e_s."""
        student_sums = self.student_sums[tokens]
        coefficient_sums = self.coefficient_sums[tokens]
        student, p, q = (x.to(student_sums.dtype)[:, None] for x in (student, p, q))
        coefficient_sums.mul_(p).add_(student_sums * q)
        student_sums.mul_(student)


class TokenSums:
    """Sums over the vocabulary, (N,) in float64, and the shifts of the exponentials.

    e_s is the exponential of the student's logit minus `student_shift`. D is, with one head, the gap minus
    `other_shift`; otherwise that is the shift of the teacher's logits. Shifts move so that no exponential overflows
    and T / S stays near 1; then the sums move with them.
    """

    def __init__(
        self, divergence: Divergence, hidden: Tensor, *, has_one_head: bool, dtype: torch.dtype, tile_dtype: torch.dtype
    ) -> None:
        self.divergence = divergence
        self.has_one_head = has_one_head
        self.dtype = dtype
        zeros = hidden.new_zeros(len(hidden), dtype=tile_dtype)
        self.student_shift = zeros
        self.other_shift = zeros.clone()
        self.largest_teacher = zeros - torch.inf
        sum_dtype = torch.float32 if hidden.device.type == "mps" else torch.float64
        # `logit_sums`: of e_s times the shifted logit
        self.logit_sums, *totals = hidden.new_zeros(5, len(hidden), dtype=sum_dtype).unbind()
        self.sums = Sums(*totals)

    # A Jensen-Shannon divergence has no terms before the last pass
    def fold_(self, tile: Tile, gradients: Gradients | None, *, with_terms: bool) -> None:
        """Add a tile, and move the shifts if needed. Overwrites its buffers."""
        tokens = tile.tokens
        self._shift_to_largest_(tile, gradients)
        dtype = self.logit_sums.dtype
        student = self.exponentials(tile)
        sum_student = student.sum(-1).to(dtype)
        sum_logits = torch.mul(tile.shifted_logits, student, out=tile.scratch).sum(-1)
        gaps = self.gaps(tile, student)
        sum_excess = gaps.excess.sum(-1).to(dtype)
        total_student = self.sums.student[tokens] + sum_student
        ratio = (1 + (self.sums.excess[tokens] + sum_excess) / total_student).clamp(min=1e-6)
        is_outside = (ratio > 2) | (ratio < 0.5)
        if bool(is_outside.any()):
            shift_change = torch.where(is_outside, ratio.log(), 0).to(self.other_shift.dtype)
            self._move_(tokens, self.student_shift[tokens], self.other_shift[tokens] + shift_change, gradients)
            gaps = self.gaps(tile, student)
            sum_excess = gaps.excess.sum(-1).to(dtype)
        self.sums.student[tokens] += sum_student
        self.sums.excess[tokens] += sum_excess
        self.logit_sums[tokens] += sum_logits
        if with_terms:
            self.fold_terms_(tile, gaps, gradients)

    def fold_terms_(self, tile: Tile, gaps: GapTile, gradients: Gradients | None) -> None:
        """Add a tile's terms and coefficients. Overwrites its buffers."""
        coefficients = self.divergence.coefficients(gaps, tile.scratch, tile.shifted_logits)
        self.sums.coefficients[tile.tokens] += coefficients.sum(-1)
        out = tile.scratch if coefficients is gaps.excess else gaps.excess
        self.sums.terms[tile.tokens] += self.divergence.terms(gaps, coefficients, out, tile.shifted_logits).sum(-1)
        if gradients is not None:
            gradients.add_(tile, gaps.student, coefficients)

    def exponentials(self, tile: Tile) -> Tensor:
        """Shift the student's logits, and return e_s. Replaces the logits by their gap to the teacher's."""
        _subtract(tile.student_logits, self.student_shift[tile.tokens], tile.shifted_logits)
        if not self.has_one_head:
            torch.sub(tile.other_logits, tile.student_logits, out=tile.student_logits)
        return torch.exp(tile.shifted_logits, out=tile.exponentials)

    def gaps(self, tile: Tile, student: Tensor) -> GapTile:
        """Return the gaps and exponentials, after `exponentials`."""
        gap, excess = tile.gap, tile.excess
        other_shift = self.other_shift[tile.tokens]
        if not self.has_one_head:
            # Exponents near 0 have the smallest rounding errors
            largest_teacher = self.largest_teacher[tile.tokens]
            _subtract(tile.other_logits, largest_teacher, excess)
            factor = torch.exp(largest_teacher - other_shift)
            teacher = torch.exp(excess, out=tile.scratch).mul_(factor[:, None])
            torch.sub(teacher, student, out=excess)
            _subtract(tile.student_logits, other_shift - self.student_shift[tile.tokens], gap)
            return GapTile(gap, student, excess, teacher=teacher)
        _subtract(tile.other_logits, other_shift, gap)
        torch.expm1(gap, out=excess).mul_(student)
        if float(gap.amax()) > _LARGEST_GAP:
            # There e_s may have underflowed, but not e_t
            torch.where(gap > _LARGEST_GAP, torch.exp(tile.shifted_logits + gap), excess, out=excess)
        return GapTile(gap, student, excess, is_exact=True)

    def _shift_to_largest_(self, tile: Tile, gradients: Gradients | None) -> None:
        tokens = tile.tokens
        dtype = self.student_shift.dtype
        largest_student = tile.student_logits.amax(-1)
        teacher_logits = tile.other_logits
        if self.has_one_head:
            teacher_logits = torch.add(tile.student_logits, tile.other_logits, out=tile.gap)
        self.largest_teacher[tokens] = torch.maximum(self.largest_teacher[tokens], teacher_logits.amax(-1).to(dtype))
        largest_teacher = self.largest_teacher[tokens]
        old_shift = self.student_shift[tokens]
        if tile.is_first:
            student_shift = largest_student
            other_shift = largest_teacher
            if self.has_one_head:
                other_shift = tile.other_logits.gather(1, tile.student_logits.argmax(-1, keepdim=True))[:, 0]
        else:
            student_shift = torch.maximum(largest_student, old_shift)
            # The gap stays the same if the teacher's logits move as much as the student's
            other_shift = self.other_shift[tokens]
            if not self.has_one_head:
                other_shift = other_shift + (student_shift - old_shift)
        teacher_shift = student_shift + other_shift if self.has_one_head else other_shift
        is_far = (largest_teacher - teacher_shift).abs() > _LARGEST_DISTANCE
        largest_shift = largest_teacher - student_shift if self.has_one_head else largest_teacher
        other_shift = torch.where(is_far, largest_shift, other_shift.to(largest_shift.dtype))
        if tile.is_first:
            self.student_shift[tokens] = student_shift
            self.other_shift[tokens] = other_shift
        else:
            self._move_(tokens, student_shift, other_shift, gradients)

    def centre_(self) -> None:
        """Move D so that T = S."""
        shift_change = (self.sums.excess / self.sums.student).log1p()
        all_tokens = slice(0, len(shift_change))
        self._move_(all_tokens, self.student_shift, (self.other_shift + shift_change).to(self.other_shift.dtype), None)

    def _move_(self, tokens: slice, student_shift: Tensor, other_shift: Tensor, gradients: Gradients | None) -> None:
        """Move the shifts of `tokens`, and all sums with them."""
        old_sums = Sums(*(x[tokens] for x in self.sums))
        student_change = student_shift.to(old_sums.student.dtype) - self.student_shift[tokens]
        other_change = other_shift.to(old_sums.student.dtype) - self.other_shift[tokens]
        self.student_shift[tokens] = student_shift
        self.other_shift[tokens] = other_shift
        gap_change = other_change if self.has_one_head else other_change - student_change
        teacher_change = student_change + other_change if self.has_one_head else other_change
        if not bool(((student_change != 0) | (gap_change != 0)).any()):
            return
        move = Move(torch.exp(-student_change), torch.exp(-teacher_change), gap_change)
        self.logit_sums[tokens] = move.student * (self.logit_sums[tokens] - student_change * old_sums.student)
        new_sums = old_sums._replace(
            student=move.student * old_sums.student,
            excess=move.teacher * old_sums.excess + (move.teacher - move.student) * old_sums.student,
        )
        if not self.divergence.is_centred:
            p, q = self.divergence.move_coefficients(move)
            new_sums = new_sums._replace(coefficients=p * old_sums.coefficients + q * old_sums.student)
            moved_terms = self.divergence.move_terms(move, old_sums, new_sums)
            new_sums = new_sums._replace(terms=torch.where(gap_change == 0, move.student * old_sums.terms, moved_terms))
            if gradients is not None:
                gradients.move_(tokens, move.student, p, q)
        for total, new_total in zip(self.sums, new_sums, strict=True):
            total[tokens] = new_total

    def results(self) -> tuple[Tensor, Tensor]:
        """Return the divergence and the student's entropy of each token, `(N,)`, after the last tile."""
        student = self.sums.student
        divergence = self.divergence.value(self.sums.terms / student, self.sums.excess / student).clamp(min=0)
        divergence = divergence.masked_fill(divergence > _INFINITE_DIVERGENCE, torch.inf)
        entropy = student.log() - self.logit_sums / student
        return divergence.to(self.dtype), entropy.to(self.dtype)

    def gradient_factors(self) -> tuple[Tensor, Tensor]:
        """Return a and b, (N,): the gradient with respect to a logit is a e_s - b coefficient."""
        student = self.sums.student
        b = self.divergence.factor(student, student + self.sums.excess)
        a = b * (self.sums.coefficients / student)
        return a.to(self.dtype), b.to(self.dtype)
