"""Attention modules with softcap, sinks or neither, inputs for them, and what they cost on the pretended GPU.

python tests/support/attention_cases.py   # on the pretended GPU; JSON to stdout
"""

import functools
import json
import logging
import sys
import warnings
from contextlib import nullcontext
from typing import Any

import numpy as np
import peft  # noqa: F401 - before `pretended_gpu.start()`, because bitsandbytes would load what torch lacks
import torch
import transformers as t

from trl_ext.heads.linear_log_probs import linear_log_probs
from trl_ext.heads.products import ExactLinear
from trl_ext.packing.attention import packed_attention
from trl_ext.packing.layout import Layout

HEADS, SIZE = 4, 8
SHAPE = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": HEADS, "head_dim": SIZE, "vocab_size": 8}
FULL = {"layer_types": ["full_attention"]}  # the window is an argument
KINDS = {
    "softcap": lambda **heads: t.Gemma2Config(**SHAPE, **heads, **FULL, attn_logit_softcapping=2.0),
    "sinks": lambda **heads: t.GptOssConfig(**SHAPE, **heads, **FULL, num_local_experts=1),
    "sdpa": lambda **heads: t.LlamaConfig(**SHAPE, **heads),
    "eager": lambda **heads: t.LlamaConfig(**SHAPE, **heads),
}
NO_MASK = torch.full((1, 1, 1, 1), torch.nan)


@functools.cache
def module_of(kind: str, kv_heads: int, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config = KINDS[kind](num_key_value_heads=kv_heads)
    module = t.AutoModelForCausalLM.from_config(config).model.layers[0].self_attn
    if kind == "sinks":
        torch.nn.init.normal_(module.sinks)
    return module.to(dtype)


def options_of(kind: str, module: Any, window: int | None) -> dict[str, Any]:
    special = {"softcap": {"softcap": 2.0}, "sinks": {"s_aux": getattr(module, "sinks", None)}}.get(kind, {})
    return {"scaling": 0.7, "sliding_window": window, **special}


def layout_of(rows: list[list[int]], *, share: bool, kind: str, device: str = "cpu") -> Layout:
    lengths_B = np.array([len(row) for row in rows])
    ids_BS = np.zeros((len(rows), lengths_B.max()), np.int64)
    for ids, row in zip(ids_BS, rows, strict=True):
        ids[: len(row)] = row
    implementation = "sdpa" if kind == "sdpa" else "eager"
    how = {"share": share, "rebase": share, "implementation": implementation, "device": device}
    return Layout(ids_BS, lengths_B, 0 * lengths_B, **how)


def tensors(layout: Layout, kv_heads: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(1, heads, layout.tokens, SIZE) for heads in (HEADS, kv_heads, kv_heads)]
    return [torch.randn(x, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for x in shapes]


def counts(kind: str, gpu: Any) -> dict[str, int]:
    """Return what two layers cost, forward and backward, for 16 short rows of other lengths."""
    dtype = torch.float32 if kind == "sdpa" else torch.bfloat16
    rows = [[1 + i] * (24 + 7 * i) for i in range(16)]
    layout = layout_of(rows, share=False, kind=kind, device="cuda")
    module = gpu.moved(module_of(kind, 2, dtype))
    qkv = [x.detach().to("cuda").requires_grad_() for x in tensors(layout, 2, dtype)]
    no_mask = NO_MASK.to("cuda")
    gpu.RECORD.clear()
    with gpu.RECORD.counting(True):
        for _ in range(2):
            options = options_of(kind, module, None)
            output, _ = packed_attention(module, *qkv, no_mask, packed_layout=layout, **options)
            output.float().sum().backward()
    launches = gpu.RECORD.launches
    calls = launches["sdpa"] + launches["_softmax"]
    return {"calls": calls, "launches": launches.total(), "waits": gpu.RECORD.waits.total()}


def main() -> None:
    import pretended_gpu

    pretended_gpu.start()
    logged: list[str] = []
    logging.getLogger("trl_ext").addFilter(lambda line: bool(logged.append(line.getMessage())))
    with pretended_gpu.DeviceMode(), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = {kind: counts(kind, pretended_gpu) for kind in ("sdpa", "softcap", "sinks")}
        targets = torch.zeros(9, dtype=torch.long).to("cuda")
        for dtype in (torch.bfloat16, torch.float32, torch.float32):
            x = torch.randn(9, 8).to("cuda", dtype).requires_grad_()
            linear_log_probs(x, x, targets, kernels="torch").log_probs.sum().backward()
            ExactLinear.apply(x, x, None, (dtype, dtype), torch.float32, nullcontext).sum().backward()
    of_head = [str(x.message) for x in warned if "/trl_ext/heads/" in x.filename]
    print(json.dumps([found, logged, of_head]), file=sys.__stdout__, flush=True)
    pretended_gpu.leave()


if __name__ == "__main__":
    main()
