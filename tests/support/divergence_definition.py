"""The definition of the divergence between two heads, dense and in float64, and TRL's own."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

from trl_ext.heads.divergence import DivergenceHead, LinearDivergence
from trl_ext.heads.logits import LogitTransform


def defined_divergence(
    student_hidden: Tensor, student: DivergenceHead, teacher_hidden: Tensor, teacher: DivergenceHead, beta: float
) -> LinearDivergence:
    """Return what `linear_divergence` does, from all logits in float64; differentiable.

    A class without probability in the first argument of a divergence adds nothing.
    """
    log_s, log_t = (
        _logits(hidden, head).log_softmax(-1) for hidden, head in ((student_hidden, student), (teacher_hidden, teacher))
    )
    if beta == 0:
        divergence = _divergence(log_t, log_s)
    elif beta == 1:
        divergence = _divergence(log_s, log_t)
    else:
        log_m = torch.logaddexp(log_s + math.log(1 - beta), log_t + math.log(beta))
        divergence = beta * _divergence(log_t, log_m) + (1 - beta) * _divergence(log_s, log_m)
    return LinearDivergence(divergence, _divergence(log_s, torch.zeros_like(log_s)).neg().detach())


def _logits(hidden: Tensor, head: DivergenceHead) -> Tensor:
    products = hidden.double() @ head.weight.double().t()
    if head.bias is not None:
        products = products + head.bias.double()
    return head.transform(products)


def _divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    absent = log_p == -torch.inf
    log_ratio = log_p.masked_fill(absent, 0) - log_q.masked_fill(absent, 0)
    return (log_p.exp() * log_ratio).sum(-1)


def trl_divergence(
    student_hidden: Tensor, student: DivergenceHead, teacher_hidden: Tensor, teacher: DivergenceHead, beta: float
) -> LinearDivergence:
    """Return TRL's results, which has one temperature for both models."""
    results = ChunkedDivergenceFunction.apply(
        student_hidden,
        student.weight,
        student.bias,
        teacher_hidden,
        teacher.weight,
        teacher.bias,
        beta,
        student.transform.temperature,
        student.transform.logit_scale,
        student.transform.softcap,
        teacher.transform.logit_scale,
        teacher.transform.softcap,
    )
    return LinearDivergence(*results)


PLAIN = LogitTransform()


class Problem(NamedTuple):
    """Hidden states and heads of both models."""

    student_hidden: Tensor
    student: DivergenceHead
    teacher_hidden: Tensor
    teacher: DivergenceHead


def random_problem(
    tokens: int = 7,
    vocabulary: int = 300,
    *,
    spread: float = 3.0,
    apart: float | None = None,
    width: int = 24,
    dtype: torch.dtype = torch.float64,
    transform: LogitTransform = PLAIN,
    has_bias: bool = False,
    seed: int = 0,
) -> Problem:
    """Return a problem whose logits have the standard deviation `spread`, before the transform.

    `apart`: both models have one head, and their logits differ by about this much. Otherwise the teacher is wider, and
    has another transform with the same temperature, and no bias.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    hidden = normal(tokens, width).to(dtype)
    weight = (normal(vocabulary, width) * (spread / math.sqrt(width))).to(dtype)
    student = DivergenceHead(weight, normal(vocabulary).to(dtype) if has_bias else None, transform)
    if apart is not None:
        teacher_hidden = (hidden.double() + normal(tokens, width) * (apart / spread)).to(dtype)
        return Problem(hidden, student, teacher_hidden, student)
    wider = 2 * width
    teacher_weight = (normal(vocabulary, wider) * (spread / math.sqrt(wider))).to(dtype)
    softcap = None if transform.softcap is None else 2 * transform.softcap
    teacher_transform = LogitTransform(transform.temperature, 1.2 * transform.logit_scale, softcap)
    return Problem(
        hidden, student, normal(tokens, wider).to(dtype), DivergenceHead(teacher_weight, None, teacher_transform)
    )


class Outcome(NamedTuple):
    """Results and gradients in float64."""

    divergence: Tensor
    entropy: Tensor
    hidden: Tensor
    weight: Tensor | None
    bias: Tensor | None


def outcome(
    divergence: Callable[..., LinearDivergence],
    problem: Problem,
    beta: float,
    *,
    trained: bool = False,
    upstream: Tensor | None = None,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> Outcome:
    """Run `divergence` forward and backward on copies. `trained`: the student's head has a gradient too."""

    def copy(tensor: Tensor | None, requires_grad: bool = False) -> Tensor | None:
        if tensor is None:
            return None
        return tensor.detach().to(dtype or tensor.dtype, copy=True).requires_grad_(requires_grad)

    hidden = copy(problem.student_hidden, requires_grad=True)
    weight = copy(problem.student.weight, requires_grad=trained)
    bias = copy(problem.student.bias, requires_grad=trained)
    student = DivergenceHead(weight, bias, problem.student.transform)
    has_one_head = problem.student is problem.teacher
    teacher = replace(problem.teacher, weight=copy(problem.teacher.weight), bias=copy(problem.teacher.bias))
    if has_one_head:
        teacher = replace(student, weight=weight.detach(), bias=None if bias is None else bias.detach())
    results = divergence(hidden, student, copy(problem.teacher_hidden), teacher, beta, **options)
    results.divergence.backward(
        torch.ones_like(results.divergence) if upstream is None else upstream.to(results.divergence)
    )
    return Outcome(
        *(
            None if x is None else x.detach().double()
            for x in (*results, hidden.grad, weight.grad, None if bias is None else bias.grad)
        )
    )
