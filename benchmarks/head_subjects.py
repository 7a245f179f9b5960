"""The heads that are measured beside ours: each a function that imports its peer and gives back the call.

How each is called, and what it gives:

- `trl_ext_torch`, `trl_ext`: ours without and with its Triton kernels. fp32 log-probs from logits that are not rounded.
- `trl`: TRL 1.16's chunked head, with the chunk size that its trainers give it. Tiles of logits are rounded to bf16.
- `liger`: Liger's fused linear cross-entropy with `reduction="none"`, negated; made for losses, not for scoring. Logits
  are rounded to bf16, in chunks of tokens; the backward makes them again, and sums the weight's gradient in bf16 (its
  default; `accum_dtype` would make it fp32).
- `liger_grpo`: Liger's fused linear GRPO loss, with a row of one token for every token, so that each has an advantage
  of its own; on-policy, without KL term, normalised by 1. The loss is then the sum of upstream * log p, and its
  gradients are those of all others; log-probs are not given back. It is plain torch. The product of the gradient is an
  fp32 one, as slow as the device's fp32. All rows are one chunk, which is the fastest that it can do (its own default,
  a row at a time, is made for rows of many tokens), and its loss on N numbers is not compiled.
- `cut_cross_entropy`: Apple's, with `reduction="none"`, negated, and its defaults: in the backward, blocks of logits
  whose gradients are all below 2.4e-4 (bf16) are skipped, so that its gradient is an approximation, and the more so and
  the faster the more certain the model is. Logits stay in fp32, but the target's is a sum of products rounded to bf16;
  gradients are summed in bf16.
- `torch_linear_cross_entropy`: torch's, from 2.13 on, chunked, with the options that torch chooses and
  `reduction="none"`. Logits are in fp32 or rounded by its policy for the device; log-probs come back in bf16.
- `logits`, `logits_compiled`: the whole logits in bf16, `log_softmax` in fp32 and a gather, eager and by
  `torch.compile`.

Dimensions: N tokens, H hidden size, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from head_inputs import Inputs
from torch import Tensor

from trl_ext import linear_log_probs

# (inputs, outputs) -> log-probs (N,), or the sum of upstream * log-probs where these are not given
Head = Callable[[Inputs, tuple[str, ...]], Tensor]


@dataclass(frozen=True)
class Subject:
    load: Callable[[], Head]
    needs_gpu: bool = False
    everywhere: bool = True  # at every shape, not at the first alone
    entropy: bool = False  # gives the entropy too
    scores: bool = True  # gives log-probs, also without a gradient


def ours(**options: Any) -> Head:
    """Our head with options of `linear_log_probs`."""

    def head(inputs: Inputs, outputs: tuple[str, ...]) -> Tensor:
        log_probs = linear_log_probs(*inputs[:3], outputs=outputs, **options).log_probs
        assert log_probs is not None
        return log_probs

    return head


def ours_on_triton() -> Head:
    import triton  # noqa: F401

    return ours(kernels="triton")


def trl() -> Head:
    # Its backward imports this: a machine that lacks a part of it should say so now, and not in a measurement
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
    # It compiles for each shape and use, which would take as long as all measurements together, as it would on the CPU
    "logits_compiled": Subject(logits_compiled, needs_gpu=True, everywhere=False),
}


def load(device: torch.device, without: list[str]) -> dict[str, Head]:
    """The heads that run here, in the order of `SUBJECTS`; of each other one a line is printed that says why not."""
    heads: dict[str, Head] = {}
    for name, subject in SUBJECTS.items():
        if name in without:
            print(f"left out: {name}, as asked for")
        elif subject.needs_gpu and device.type != "cuda":
            print(f"left out: {name}, which is measured on a GPU")
        else:
            try:
                heads[name] = subject.load()
            except ImportError as error:
                print(f"left out: {name} cannot be imported ({error})")
    return heads
