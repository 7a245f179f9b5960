"""The check at the start of training: the tiled head against the dense definition, on a few tokens of the first batch.

A fused path that nobody checked has trained on wrong numbers before (positive log-probs, a collapsed reward). The
definition runs in float64, so that a confident policy, whose 1 - p is tiny, is judged rightly too.
"""

from math import sqrt

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..heads import (
    Head,
    LinearLogProbs,
    LogitTransform,
    VocabularyShard,
    dense_logits,
    log_probs_of,
    operand_dtype,
    tiled_log_probs,
)

_TOKENS = 8
# Of the values, in units of max(1, largest logit / 32); the head is exact to 1e-5 of that
_VALUES = 1e-3
# Of a gradient's norm; half-precision products are good to 2e-3
_GRADIENT = 2e-2
# Of what the gradient would be at p = 0: where every 1 - p is below this, float64's own 1 - p has lost its digits. A
# softcap's slope 1 - tanh^2 is good to 1e-7 in fp32, however small it is where the cap saturates.
_NEGLIGIBLE, _NEGLIGIBLE_CAPPED = 1e-10, 1e-5


@torch.compiler.disable  # type: ignore[untyped-decorator]
def check_against_dense(
    hidden_NH: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets_N: Tensor,
    transform: LogitTransform,
    outputs: tuple[str, ...],
    entropy_requires_grad: bool,
    trained: tuple[bool, bool],
) -> None:
    """Raise `RuntimeError` if the tiled head disagrees with the definition, in values or in gradients.

    At most 8 tokens are looked at, spread over the batch, in up to three tiles each way. The path taken is that of
    training: weight and bias get a gradient here where `trained` says so of each.
    """
    if hidden_NH.device.type == "mps":
        return  # it has no float64 to define the head in
    N, V = len(targets_N), weight.shape[0]
    some = torch.linspace(0, N - 1, min(_TOKENS, N), device=targets_N.device).long()
    targets, dtype = targets_N[some], operand_dtype(hidden_NH, weight)
    upstream = torch.linspace(1, 2, len(some), device=targets_N.device)
    # A few rows of the weight's gradient stand for all: the targets' and others
    rows = torch.cat([targets, torch.linspace(0, V - 1, 32, device=targets.device).long()])

    def with_gradients(scored: LinearLogProbs, inputs: list[Tensor]) -> dict[str, Tensor]:
        assert scored.log_probs is not None
        loss = (scored.log_probs * upstream).sum()
        if entropy_requires_grad and scored.entropy is not None:
            loss = loss + (scored.entropy * upstream.flip(0)).sum()
        gradients = torch.autograd.grad(loss, [x for x in inputs if x.requires_grad])
        # Which of several equal logits is the first may turn on the last bit
        seen = {k: v.detach() for k, v in scored._asdict().items() if v is not None and k != "is_top1"}
        names = [name for name, x in zip(("hidden states", "weight", "bias"), inputs, strict=False) if x.requires_grad]
        for name, gradient in zip(names, gradients, strict=True):
            seen[f"gradient of the {name}"] = gradient if name == "hidden states" else gradient[rows]
        return seen

    def inputs() -> list[Tensor]:
        given = zip((weight, bias), trained, strict=True)
        parameters = [x.detach().requires_grad_(grad) for x, grad in given if x is not None]
        return [hidden_NH[some].detach().requires_grad_(), *parameters]

    # The caller's hooks on saved tensors (activation offloading) are for the model's own graph
    with torch.enable_grad(), saved_tensors_hooks(lambda x: x, lambda x: x):
        h, w, *b = inputs()
        head = Head(
            *(dtype, transform, outputs, VocabularyShard()),
            chunk_size=-(-len(some) // 3),
            columns=min(8192, -(-V // 3)),
        )
        tiled = tiled_log_probs(head, h, w, b[0] if b else None, targets, entropy_requires_grad=entropy_requires_grad)
        found = with_gradients(tiled, [h, w, *b])
        h, w, *b = inputs()
        logits_NV = dense_logits(h, w, b[0] if b else None, transform, dtype, torch.float64)
        dense = log_probs_of(logits_NV, targets, outputs, entropy_requires_grad=entropy_requires_grad)
        expected = with_gradients(dense, [h, w, *b])
    slope = abs(transform.logit_scale) / transform.temperature
    sizes = {
        "gradient of the hidden states": w[rows].detach().double().norm() * slope,
        "gradient of the weight": h.detach().double().norm() * slope,
        "gradient of the bias": torch.tensor(slope * sqrt(len(some))),
    }
    largest_logit = logits_NV.detach().abs().max()
    for name, value in expected.items():
        difference = (found[name].double() - value.double()).abs()
        if name in sizes:
            # What fp16 cannot hold at all is lost to every head
            finest = torch.finfo(value.dtype)
            lost = finest.smallest_normal * finest.eps * sqrt(value.numel())
            negligible = _NEGLIGIBLE if transform.softcap is None else _NEGLIGIBLE_CAPPED
            allowed = _GRADIENT * value.double().norm() + negligible * sizes[name] + lost
            _raise_if_off(name, value, difference, difference.norm() / allowed)
        else:
            allowed = _VALUES * (largest_logit / 32).clamp(min=1)
            _raise_if_off(name, value, difference, difference.amax() / allowed)


def _raise_if_off(name: str, expected: Tensor, difference: Tensor, off: Tensor) -> None:
    # A model that has itself gone to NaN is not the head's doing
    if expected.isfinite().all() and not off <= 1:
        raise RuntimeError(
            f"The tiled head disagrees with the dense definition on the first batch: {name}, largest difference "
            f"{difference.max():.3g}, {off:.3g} times what is allowed. Training would be wrong. "
            'Set `head="dense"` in the config to go on without the tiled head, and report this with the model\'s name '
            "and the output of `trl env`."
        )
