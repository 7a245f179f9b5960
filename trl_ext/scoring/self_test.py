"""The head's self-test on a device: the check of the first batch, on made-up numbers, each way that it trains."""

import torch
from torch import nn

from ..heads import LogitTransform
from .head_check import check_head
from .head_parts import KnownHead
from .head_rows import rows_of_head

_TOKENS, _HIDDEN, _CLASSES = 64, 128, 1000
_OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def self_test(device: torch.device) -> tuple[str, ...]:
    """What was tried on `device`, in words; all of it agrees with the dense definition.

    Raises:
        `RuntimeError`: something does not; what the device itself raises is passed on.
    """
    tried = []
    generator = torch.Generator("cpu").manual_seed(0)
    hidden_NH = torch.randn(_TOKENS, _HIDDEN, generator=generator)
    weight_VH = torch.randn(_CLASSES, _HIDDEN, generator=generator) / 4
    targets_N = torch.randint(_CLASSES, (_TOKENS,), generator=generator).to(device)
    for dtype in (torch.bfloat16, torch.float32):
        for trained in (False, True):
            linear = nn.Linear(_HIDDEN, _CLASSES, bias=False, device=device, dtype=dtype)
            linear.weight = nn.Parameter(weight_VH.to(device, dtype), requires_grad=trained)
            hidden = hidden_NH.to(device, dtype)
            rows = rows_of_head(
                KnownHead(linear), hidden, outputs=_OUTPUTS, whole=False, gradient=True, entropy_grad=False
            )
            check_head(hidden, rows, targets_N, LogitTransform(0.9, 1.0, None), _OUTPUTS, False)
            tried.append(f"{str(dtype).removeprefix('torch.')} with a {'trained' if trained else 'frozen'} weight")
    return tuple(tried)
