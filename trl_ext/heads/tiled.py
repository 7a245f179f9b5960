"""The exact head in tiles: the gradient formed in the forward pass (frozen head) or recomputed (trained head)."""

from typing import Any

import torch
from torch import Tensor

from .adapters import Operands
from .gradients import Coefficients, Upstream
from .logits import LinearLogProbs
from .parallel import Part
from .products import coefficients_dtype, exact_arithmetic, matmul_into, refuse_second_derivative, statistics_dtype
from .rows import Rows
from .scan import Head, gathered, joined, scan
from .tiles import Tile


class TiledLogProbsRecompute(torch.autograd.Function):
    """Log-probs, entropy and mean log-probs with a gradient to every operand.

    The backward recomputes the tiles.

    On several ranks the gradient of the weight's rows that are here is that of the sum of all ranks' losses.
    """

    @staticmethod
    def forward(ctx: Any, head: Head, targets: Tensor, entropy_grad: bool, *operands: Tensor | None) -> LinearLogProbs:
        x = Operands(*operands)  # type: ignore[arg-type]
        ctx.set_materialize_grads(False)
        scored, saved = [], []
        with head.readable(), exact_arithmetic(x.hidden.device):
            for part in head.parts(x.hidden):
                targets_M = part.gathered(targets)
                statistics = scan(head, gathered(x, part), head.rows(x.weight, x.bias, targets_M), targets_M)
                head.shard.exchange.combine_(statistics)
                scored.append(part.own_results(statistics.results(head.outputs)))
                saved.append([part.own(x) for x in (statistics.shift, statistics.sum_exp, statistics.target_logit)])
        results = joined(scored)
        kept = [x[0] if len(saved) == 1 else torch.cat(x) for x in zip(*saved, strict=True)]
        ctx.save_for_backward(*x, targets, *kept, results.entropy if entropy_grad else None)
        ctx.head = head
        differentiable = {"log_probs", "mean_log_probs", *(["entropy"] if entropy_grad else [])}
        ctx.mark_non_differentiable(
            *(x for name, x in results._asdict().items() if x is not None and name not in differentiable)
        )
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        head: Head = ctx.head
        of_results = LinearLogProbs(*gradients)
        upstream = Upstream(of_results.log_probs, of_results.entropy, of_results.mean_log_probs)
        # The other ranks may have a gradient, and wait for this one
        if all(x is None for x in upstream) and not head.shard.spread:
            return (None,) * len(ctx.needs_input_grad)
        saved = ctx.saved_tensors  # read once: offloading and checkpointing give each tensor back once
        x, (targets, *statistics) = Operands(*saved[:6]), saved[6:]
        with head.readable(), exact_arithmetic(x.hidden.device):
            parts = []
            for part in head.parts(x.hidden):
                targets_M = part.gathered(targets)
                rows = head.rows(x.weight, x.bias, targets_M)
                of_tokens = _gathered_numbers(part, head, statistics, upstream)
                parts.append((part, rows, targets_M, Coefficients(*of_tokens, head.transform, rows.vocabulary)))
            # One for all parts: in it sums over tokens overflow only where the gradient does, and do not become NaN
            unit = torch.stack([coefficients.unit() for *_, coefficients in parts]).amax()
            grads = _Gradients(ctx.needs_input_grad[3:], x, unit, several=len(parts) > 1)
            for part, rows, targets_M, coefficients in parts:
                coefficients.use_unit(unit)
                grads.add_(part, head, gathered(x, part), rows, targets_M, coefficients)
        return None, None, None, *grads.of_operands()


def _gathered_numbers(
    part: Part, head: Head, saved: list[Any], upstream: Upstream
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Upstream]:
    """What the coefficients of the tokens that are scored together are made of: numbers of shape (M,), or None."""
    maximum, sum_exp, target_logit, entropy = saved
    if not head.shard.partial:
        return maximum, sum_exp, target_logit, entropy, upstream
    # Every rank sends as many numbers, also where one has no gradient
    asked = {"log_probs": "log_probs" in head.outputs, "entropy": entropy is not None}
    asked["mean_log_probs"] = "mean_log_probs" in head.outputs
    zeros = torch.zeros_like(maximum)
    of_upstream = {name: zeros if x is None else x for name, x in upstream._asdict().items() if asked[name]}
    sent = [maximum, sum_exp, target_logit, *([] if entropy is None else [entropy]), *of_upstream.values()]
    numbers = iter(part.gathered(torch.stack(sent, 1)).unbind(1))
    maximum_M, sum_exp_M, target_logit_M = next(numbers), next(numbers), next(numbers)
    # 0 where a rank's tokens were filled up: nothing comes back from there, but log 0 must not either
    sum_exp_M = sum_exp_M.masked_fill(sum_exp_M == 0, 1.0)
    entropy_M = None if entropy is None else next(numbers)
    upstream_M = Upstream(**dict(zip(of_upstream, numbers, strict=True)))
    return maximum_M, sum_exp_M, target_logit_M, entropy_M, upstream_M


class _Gradients:
    """The gradients of a backward, added up tile by tile and part by part; those of classes in units of `unit`."""

    def __init__(self, needed: tuple[bool, ...], x: Operands, unit: Tensor, *, several: bool) -> None:
        self.needs = Operands(*needed)  # type: ignore[arg-type]
        sums: dict[str, Any] = {"dtype": unit.dtype, "device": x.hidden.device}
        self.x, self.sums, self.unit, self.several = x, sums, unit, several
        self.hidden: list[Tensor] = []
        self.down: list[Tensor] = []
        # Zeros: with no token at all no tile is written
        sums_of_weight = unit.dtype if several else x.weight.dtype
        self.weight = torch.zeros_like(x.weight, dtype=sums_of_weight) if self.needs.weight else None
        self.bias, self.up, self.rows = (
            torch.zeros(tensor.shape, **self.sums) if needs and tensor is not None else None
            for needs, tensor in ((self.needs.bias, x.bias), (self.needs.up, x.up), (self.needs.rows, x.rows))
        )

    def add_(
        self, part: Part, head: Head, x: Operands, rows: Rows, targets_M: Tensor, coefficients: Coefficients
    ) -> None:
        """Add the tiles of the tokens of `part`, of all ranks; `x` are their operands."""
        grad_hidden = torch.zeros(x.hidden.shape, **self.sums) if self.needs.hidden else None
        grad_down = torch.zeros_like(x.down) if self.needs.down and x.down is not None else None
        work, operand = head.work(x.hidden.device), coefficients_dtype(head.dtype, x.hidden.device)
        of_classes = any(sums is not None for sums in (self.bias, self.up, self.rows))
        dtypes = {
            "nontarget_grad": self.sums["dtype"]
            if grad_down is not None
            else operand
            if grad_hidden is not None
            else None,
            "whole": self.sums["dtype"] if of_classes else operand if self.weight is not None else None,
        }
        for tile in head.tiles(x, rows):
            nontarget_grad, whole = work.gradient(coefficients, tile, targets_M[tile.tokens], **dtypes)
            if grad_hidden is not None and nontarget_grad is not None:
                matmul_into(grad_hidden[tile.tokens], nontarget_grad.to(operand), tile.weight, accumulate=True)
            if grad_down is not None and nontarget_grad is not None and tile.up is not None:
                matmul_into(grad_down[tile.tokens], nontarget_grad, tile.up, accumulate=True)
            if whole is not None:
                self._add_of_classes_(head, tile, whole, len(x.hidden))
        if grad_hidden is not None:
            grad_hidden.mul_(coefficients.row_factor[:, None])
            head.add_targets_(grad_hidden, coefficients.target, rows, targets_M, x.rows)
            self.hidden.append(part.summed(grad_hidden.mul_(coefficients.size[:, None])))
        if grad_down is not None and x.up is not None:
            grad_down.mul_(coefficients.row_factor[:, None])
            # Clamped as in LocalShards
            of_targets = x.up[targets_M.clamp(0, len(x.up) - 1)].to(head.up_dtype).to(grad_down.dtype)
            grad_down.addcmul_(of_targets, coefficients.target[:, None])
            self.down.append(grad_down.mul_(coefficients.size[:, None]))

    def _add_of_classes_(self, head: Head, tile: Tile, coefficients: Tensor, tokens: int) -> None:
        """Add a tile's part of what belongs to classes; its coefficients may be overwritten."""
        columns = slice(tile.classes.start - head.shard.first, tile.classes.stop - head.shard.first)
        if self.bias is not None:
            self.bias[columns].add_(coefficients.sum(0))
        if self.up is not None and tile.down is not None:
            self.up[columns] += coefficients.t() @ tile.down
        some = slice(0, 0) if head.replaced is None else head.replaced.within(tile.classes)
        if head.replaced is not None and some.start < some.stop:
            places = head.replaced.ids[some] - tile.classes.start
            if self.rows is not None:
                self.rows[some] += coefficients[:, places].t() @ tile.hidden.to(self.rows.dtype)
            coefficients.index_fill_(1, places, 0.0)  # these rows of the weight are not read
        if self.weight is not None:
            if tile.tokens.start == 0:
                self.of_tile = torch.empty(tile.weight.shape, **self.sums)
            operand = coefficients.to(coefficients_dtype(head.dtype, coefficients.device))
            matmul_into(self.of_tile, operand.t(), tile.hidden, accumulate=tile.tokens.start > 0)
            if tile.tokens.stop == tokens and self.several:
                self.weight[columns] += self.of_tile
            elif tile.tokens.stop == tokens:
                torch.mul(self.of_tile, self.unit, out=self.weight[columns])

    def of_operands(self) -> Operands:
        """In the operands' dtypes; None where none is needed."""
        hidden, down = (torch.cat(x) if x else None for x in (self.hidden, self.down))
        for total in (self.bias, self.up, self.rows, self.weight if self.several else None):
            if total is not None:
                total.mul_(self.unit)
        sums = (hidden, self.weight, self.bias, down, self.up, self.rows)
        found = (
            None if total is None or tensor is None else total.to(tensor.dtype)
            for total, tensor in zip(sums, self.x, strict=True)
        )
        return Operands(*found)  # type: ignore[arg-type]


def score(head: Head, x: Operands, targets: Tensor) -> LinearLogProbs:
    """Per-token results without a gradient."""
    scored = []
    with torch.no_grad(), head.readable(), exact_arithmetic(x.hidden.device):
        for part in head.parts(x.hidden):
            targets_M = part.gathered(targets)
            statistics = scan(head, gathered(x, part), head.rows(x.weight, x.bias, targets_M), targets_M)
            head.shard.exchange.combine_(statistics)
            scored.append(part.own_results(statistics.results(head.outputs)))
    return joined(scored)


class TiledLogProbsFrozen(torch.autograd.Function):
    """Log-probs whose gradient goes to the hidden states alone, formed in the forward.

    d log p_t / dh = (1 - p_t) (c_t W_t - sum_{v != t} q_v c_v W_v), with q the softmax over the others and c = dz/dx.
    Neither factor cancels when the target is nearly certain. It is kept in fp32 in the place of the hidden states. So
    the backward exchanges nothing with other ranks.
    """

    @staticmethod
    def forward(ctx: Any, head: Head, targets: Tensor, x: Operands, hidden: Tensor) -> LinearLogProbs:
        ctx.set_materialize_grads(False)
        x = x._replace(hidden=hidden)
        scored, gradients = [], []
        with head.readable(), exact_arithmetic(hidden.device):
            for part in head.parts(hidden):
                together, targets_M = gathered(x, part), part.gathered(targets)
                shape, dtype = together.hidden.shape, statistics_dtype(head.dtype)
                gradient_MH = torch.empty(shape, dtype=dtype, device=hidden.device)
                rows = head.rows(x.weight, x.bias, targets_M)
                statistics = scan(head, together, rows, targets_M, others_NH=gradient_MH)
                rescale = head.shard.exchange.combine_(statistics)
                others_share = torch.sigmoid(-statistics.log_odds)[:, None]
                factor = -others_share / statistics.sum_exp[:, None]
                gradient_MH.mul_(factor * rescale)
                slope = head.transform.derivative(statistics.target_logit)
                head.add_targets_(gradient_MH, others_share[:, 0] * slope, rows, targets_M, x.rows)
                gradients.append(part.summed(gradient_MH))
                scored.append(part.own_results(statistics.results(head.outputs)))
        ctx.save_for_backward(gradients[0] if len(gradients) == 1 else torch.cat(gradients))
        ctx.hidden_dtype = hidden.dtype
        results = joined(scored)
        ctx.mark_non_differentiable(*(x for x in results[1:] if x is not None))
        return results

    @staticmethod
    def backward(ctx: Any, grad_log_probs: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        if grad_log_probs is None:
            return None, None, None, None
        (gradient_NH,) = ctx.saved_tensors
        grad_hidden = torch.empty(gradient_NH.shape, dtype=ctx.hidden_dtype, device=gradient_NH.device)
        torch.mul(gradient_NH, grad_log_probs[:, None], out=grad_hidden)
        return None, None, None, grad_hidden


def tiled_log_probs(head: Head, x: Operands, targets: Tensor, *, entropy_requires_grad: bool = False) -> LinearLogProbs:
    """Per-token results tile by tile; chooses the path by what needs a gradient, which changes no result.

    Whether a gradient is recorded is read here: inside an autograd function grad mode is always off.
    """
    entropy_grad = entropy_requires_grad and "entropy" in head.outputs
    mean_grad = "mean_log_probs" in head.outputs
    differentiable = "log_probs" in head.outputs or entropy_grad or mean_grad
    needed = [tensor is not None and tensor.requires_grad for tensor in x]
    if not torch.is_grad_enabled() or not differentiable or not any(needed):
        return score(head, x, targets)
    if any(needed[1:]) or entropy_grad or mean_grad:
        return LinearLogProbs(*TiledLogProbsRecompute.apply(head, targets, entropy_grad, *x))
    return LinearLogProbs(*TiledLogProbsFrozen.apply(head, targets, x, x.hidden))
