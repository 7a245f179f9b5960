"""The heads that are measured: ours and its peers. Each is a function that imports its library and returns the call.

- `trl_ext_torch`, `trl_ext`: ours without and with Triton kernels. fp32 log-probs from logits that are not rounded.
- `trl`: TRL 1.16's chunked head, with the chunk size of its trainers. Tiles of logits are rounded to bf16.
- `liger`: Liger's fused linear cross-entropy with `reduction="none"`, negated; made for losses, not for scoring. Logits
  are rounded to bf16, in chunks of tokens; the backward computes them again, and sums the weight's gradient in bf16
  (the default; `accum_dtype` would make it fp32).
- `liger_grpo`: Liger's fused linear GRPO loss. Each token is a row, so that it has its own advantage; on-policy,
  without KL term, normalized by 1. The loss is then the sum of upstream * log p, with the same gradients as the other
  heads; it returns no log-probs. It is plain torch, with an fp32 product for the gradient. All rows are one chunk,
  which is fastest here (the default, one row at a time, is made for rows of many tokens), and it is not compiled.
- `cut_cross_entropy`: Apple's, with `reduction="none"`, negated, and its defaults. The backward skips blocks of logits
  whose gradients are all below 2.4e-4 (bf16): the more certain the model, the faster and the less exact. Logits are in
  fp32, but the target's logit is a sum of products rounded to bf16; gradients are summed in bf16.
- `torch_linear_cross_entropy`: from torch 2.13, chunked, with torch's default options and `reduction="none"`. Logits
  are in fp32, or rounded as torch decides for the device; log-probs are returned in bf16.
- `logits`, `logits_compiled`: whole logits in bf16, `log_softmax` in fp32 and a gather, eager and compiled.

Dimensions: N tokens, H hidden size, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from head_inputs import Inputs
from torch import Tensor

from trl_ext import linear_log_probs

# (inputs, outputs) -> log-probs (N,), or the sum of upstream * log-probs if the head does not return them
Head = Callable[[Inputs, tuple[str, ...]], Tensor]


@dataclass(frozen=True)
class Subject:
    load: Callable[[], Head]
    needs_gpu: bool = False
    everywhere: bool = True  # at every shape, not only at the first
    entropy: bool = False  # can return the entropy
    scores: bool = True  # can return log-probs, with and without a gradient


def ours(**options: Any) -> Head:
    """Return our head, with options of `linear_log_probs`."""

    def head(inputs: Inputs, outputs: tuple[str, ...]) -> Tensor:
        log_probs = linear_log_probs(*inputs[:3], outputs=outputs, **options).log_probs
        assert log_probs is not None
        return log_probs

    return head


def ours_on_triton() -> Head:
    import triton  # noqa: F401

    return ours(kernels="triton")


def trl() -> Head:
    # Its backward imports this; a missing dependency should fail now, not in a measurement
    import trl.trainer.utils  # noqa: F401
    from trl.kernels import ChunkedLogProbFunction

    def head(inputs: Inputs, outputs: tuple[str, ...]) -> Tensor:
        hidden, weight, targets, _ = inputs
        # Temperature 1, TRL's own chunk size, no softcap, no scale
        return ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, 32768, None, 1.0, outputs)[0]

    return head


def liger() -> Head:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    def head(inputs: Inputs, outputs: tuple[str, ...]) -> Tensor:
        hidden, weight, targets, _ = inputs
        # No bias, no weights of classes, no label to ignore, no z-loss, no label smoothing
        options = (None, None, -100, 0.0, 0.0, "none")
        return -LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, targets, *options)[0]

    return head


def liger_grpo() -> Head:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    def head(inputs: Inputs, outputs: tuple[str, ...]) -> Tensor:
        hidden, weight, targets, upstream = inputs
        loss = LigerFusedLinearGRPOLoss(
            beta=0.0, compiled=False, use_ref_model=False, chunk_size=len(hidden), loss_type="dapo"
        )
        mask_N1 = torch.ones_like(upstream)[:, None]
        # The loss is -advantage * log p
        return loss(hidden[:, None], weight, targets[:, None], mask_N1, -upstream, num_items_in_batch=1)[0]

    return head


def cut_cross_entropy() -> Head:
    from cut_cross_entropy import linear_cross_entropy

    def head(inputs: Inputs, outputs: tuple[str, ...]) -> Tensor:
        return -linear_cross_entropy(*inputs[:3], reduction="none")

    return head


def torch_linear_cross_entropy() -> Head:
    from torch.nn import LinearCrossEntropyOptions
    from torch.nn.functional import linear_cross_entropy

    def head(inputs: Inputs, outputs: tuple[str, ...]) -> Tensor:
        return -linear_cross_entropy(*inputs[:3], reduction="none", options=LinearCrossEntropyOptions())

    return head


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    log_probs_NV = torch.log_softmax(hidden @ weight.t(), dim=-1, dtype=torch.float32)
    return log_probs_NV.gather(1, targets[:, None])[:, 0]


def logits() -> Head:
    return lambda inputs, outputs: plain(*inputs[:3])


def logits_compiled() -> Head:
    compiled = torch.compile(plain)
    return lambda inputs, outputs: compiled(*inputs[:3])


SUBJECTS = {
    "trl_ext_torch": Subject(lambda: ours(kernels="torch"), entropy=True),
    "trl_ext": Subject(ours_on_triton, entropy=True, needs_gpu=True),
    "trl": Subject(trl, entropy=True),
    "liger": Subject(liger, needs_gpu=True),
    "liger_grpo": Subject(liger_grpo, scores=False, everywhere=False),
    "cut_cross_entropy": Subject(cut_cross_entropy, needs_gpu=True),
    "torch_linear_cross_entropy": Subject(torch_linear_cross_entropy),
    "logits": Subject(logits),
    # Compiling it for every shape and use, or on the CPU, would take as long as all measurements together
    "logits_compiled": Subject(logits_compiled, needs_gpu=True, everywhere=False),
}


def load(device: torch.device, without: list[str]) -> dict[str, Head]:
    """Return the heads that run here, in the order of `SUBJECTS`; print why each of the others does not."""
    heads: dict[str, Head] = {}
    for name, subject in SUBJECTS.items():
        if name in without:
            print(f"left out: {name} (`--without`)")
        elif subject.needs_gpu and device.type != "cuda":
            print(f"left out: {name}, which needs a GPU")
        else:
            try:
                heads[name] = subject.load()
            except ImportError as error:
                print(f"left out: {name} cannot be imported ({error})")
    return heads
