"""The packed row on CUDA with torch's varlen attention equals plain definitions in float64, and needs less memory.

Tests that need no CUDA kernel also run on the CPU.
"""

from contextlib import nullcontext

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    FalconH1Config,
    Gemma2Config,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
)

from device_memory import allocated_by
from trl_ext.packing.attention import _varlen, index_select_fp32_grad, packed_attention
from trl_ext.packing.layout import Layout
from trl_ext.scoring.forward import ScoringOptions, attach_scoring_forward

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="runs a kernel of CUDA's")
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)]

SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "initializer_range": 0.1}
IDS = {"vocab_size": 257, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, "max_position_embeddings": 512}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SHAPE, **IDS, **HEADS),
    "qwen3": lambda: Qwen3Config(**SHAPE, **IDS, **HEADS),
    "window": lambda: MistralConfig(**SHAPE, **IDS, **HEADS, sliding_window=7),
    "odd heads": lambda: LlamaConfig(**SHAPE, **IDS, **{**HEADS, "head_dim": 20}),
    "softcap": lambda: Gemma2Config(**SHAPE, **IDS, **HEADS, sliding_window=7, attn_implementation="eager"),
    "mla": lambda: DeepseekV3Config(
        **SHAPE,
        **IDS,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=32,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=24,
        first_k_dense_replace=2,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
    ),
}
HYBRID = {
    "qwen3_5": lambda: Qwen3_5TextConfig(
        **SHAPE,
        **IDS,
        **HEADS,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
    ),
    "falcon_h1": lambda: FalconH1Config(
        **SHAPE,
        **IDS,
        **HEADS,
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_d_ssm=128,
        mamba_d_state=16,
        mamba_chunk_size=16,
    ),
    "lfm2": lambda: Lfm2Config(**SHAPE, **IDS, **HEADS, layer_types=["conv", "full_attention"]),
}
BY_SEGMENTS = {"softcap"}  # the kernel has no softcap


class Varlen(TorchDispatchMode):
    """Record the calls of torch's varlen attention within: their arguments by name."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if str(func) == "torch_attn._varlen_attn.default":
            names = [argument.name for argument in func._schema.arguments]
            self.calls.append(dict(zip(names, args, strict=False)) | (kwargs or {}))
        return func(*args, **(kwargs or {}))


def batch(device, seed=0):
    """Make two groups with prompts of different length, padded on the left, and completions of 0 to 24 tokens."""
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(3, 257, (length,), generator=generator) for length in (37, 21)]
    P, C = 40, 24
    rows = []
    for prompt, length in ((0, 24), (1, 5), (0, 1), (0, 17), (1, 24), (1, 0), (0, 11)):
        tokens = torch.randint(3, 257, (length,), generator=generator)
        ids, mask = torch.zeros(P + C, dtype=torch.long), torch.zeros(P + C, dtype=torch.long)
        start = P - len(prompts[prompt])
        ids[start:P], ids[P : P + length], mask[start : P + length] = prompts[prompt], tokens, 1
        rows.append((ids, mask))
    ids, mask = (torch.stack(x) for x in zip(*rows, strict=True))
    scored = mask.bool() & (torch.arange(P + C) >= P)
    return {
        "input_ids": ids.to(device),
        "attention_mask": mask.to(device),
        "labels": ids.masked_fill(~scored, -100).to(device),
    }


def layout_of(inputs, share=True):
    mask = inputs["attention_mask"]
    lengths = mask.sum(dim=1)
    on_host = (x.cpu().numpy() for x in (inputs["input_ids"], lengths, mask.argmax(dim=1)))
    return Layout(*on_host, share=share, rebase=share, implementation="sdpa", device=mask.device), lengths


def plain_attention(query, key, value, layout, lengths, scaling, window):
    """Compute softmax attention row by row in float64: `(T, heads, head_size)`.

    A shared token has the same result in each row. To get the same gradients, each row adds only its own tokens.
    """
    query, key, value = (x[0].transpose(0, 1).double() for x in (query, key, value))
    groups = query.shape[1] // key.shape[1]
    output = query.new_zeros(query.shape[0], query.shape[1], value.shape[-1])
    written = set()
    for row in range(len(layout.at_BS)):
        at = layout.at_BS[row]
        at = at[at >= 0].to(query.device)
        assert len(at) == lengths[row]
        own = [i for i, t in enumerate(at.tolist()) if t not in written]
        written.update(at.tolist())
        if not own:
            continue
        own = torch.tensor(own, device=at.device)
        q = query[at[own]]
        k, v = (x[at].repeat_interleave(groups, dim=1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", q, k) * scaling
        distance = own.unsqueeze(1) - torch.arange(len(at), device=at.device)
        seen = (distance >= 0) & (distance < (window or len(at)))
        probs = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
        output = output.index_copy(0, at[own], torch.einsum("hqk,khd->qhd", probs, v))
    assert written == set(range(len(output)))
    return output


def off(x, reference):
    return ((x.double() - reference).norm() / reference.norm()).item()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("share", [True, False], ids=["shared", "padding-free"])
@pytest.mark.parametrize("name", ["llama", "window", "odd heads", "mla"])
def test_attention_equals_its_definition_forward_and_backward(name, share, device):
    # Some keys are outside of every window, and some rows have fewer own tokens than they see
    config = CONFIGS[name]()
    attention = AutoModelForCausalLM.from_config(config).model.layers[0].self_attn
    layout, lengths = layout_of(batch(device), share)
    T = layout.tokens
    if name == "mla":
        sizes, kv_heads = (config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim), 4
    else:
        sizes, kv_heads = (config.head_dim, config.head_dim), 2
    window = getattr(config, "sliding_window", None)
    dtype, close = (torch.bfloat16, 1e-2) if device == "cuda" else (torch.float32, 1e-5)
    generator = torch.Generator(device).manual_seed(1)
    shapes = (4, sizes[0]), (kv_heads, sizes[0]), (kv_heads, sizes[1])
    qkv = [
        torch.randn(1, T, heads, size, generator=generator, device=device).to(dtype).transpose(1, 2).requires_grad_()
        for heads, size in shapes
    ]
    mask = torch.full((1, 1, 1, 1), torch.nan, device=device)  # as comes with a layout
    with Varlen() as varlen:
        output, _ = packed_attention(
            attention, *qkv, mask, packed_layout=layout, scaling=attention.scaling, sliding_window=window
        )
    assert len(varlen.calls) == (device == "cuda")
    assert layout.shares_tokens == share
    reference = plain_attention(*qkv, layout, lengths, attention.scaling, window)
    upstream = torch.randn(reference.shape, generator=generator, device=device).to(dtype)
    assert off(output[0], reference) < close
    gradients = torch.autograd.grad(output[0], qkv, upstream)
    expected = torch.autograd.grad(reference, qkv, upstream.double())
    for gradient, by_definition in zip(gradients, expected, strict=True):
        assert off(gradient, by_definition.double()) < close


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_a_shared_token_are_rounded_once(dtype, device):
    x = torch.zeros(3, 50, dtype=dtype, device=device, requires_grad=True)
    index = torch.arange(2, device=device).repeat(64)  # two tokens in 64 rows, and one in none
    upstream = 1 + torch.rand(128, 50, device=device).to(dtype)
    (gradient,) = torch.autograd.grad(index_select_fp32_grad(x, index), x, upstream)
    sums = upstream.double().view(64, 2, 50).sum(dim=0)
    assert torch.equal(gradient[:2], sums.to(dtype))
    assert gradient[2].eq(0).all()


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize(("kv_heads", "sizes"), [(4, (32, 32)), (2, (32, 32)), (4, (48, 24)), (2, (20, 20))])
def test_varlen_attention_accepts_our_arguments(kv_heads, sizes, window):
    # Without a device: shapes and arguments, forward and backward, in the installed torch
    layout, _ = layout_of(batch("cpu"))
    T, K = layout.tokens, layout.keys_K.numel()
    shapes = (T, 4, sizes[0]), (K, kv_heads, sizes[0]), (K, kv_heads, sizes[1])
    qkv = [torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True) for shape in shapes]
    with Varlen() as varlen:
        output = _varlen(*qkv, layout.to("meta"), None, window)
        gradients = torch.autograd.grad(output.sum(), qkv)
    (call,) = varlen.calls
    assert call["query"].shape[-1] == call["key"].shape[-1] == call["value"].shape[-1]
    assert call["query"].shape[-1] % 8 == 0
    # The padding of a head does not change the scale; a window includes the token
    assert call["scale"] == sizes[0] ** -0.5
    assert call["is_causal"] == (window is None)
    assert call["window_size"] == ([-1, 0] if window is None else [6, 0])
    assert (call["max_q"], call["max_k"]) == (layout.longest_query, layout.longest_key)
    assert output.shape == (1, T, 4, sizes[1])
    assert [gradient.shape for gradient in gradients] == [x.shape for x in qkv]


def scored(model, inputs, autocast):
    """Return log-probs of the scored tokens, and all gradients of their weighted sum as one vector."""
    with torch.autocast(inputs["input_ids"].device.type, torch.bfloat16, enabled=autocast):
        outputs = model(**inputs, fused_lm_head=True)
    return with_gradients(model, outputs.log_probs[outputs.label_mask])


def scored_by_definition(model, inputs):
    """Return the same row by row without padding, from the model's logits."""
    log_probs = []
    for ids, mask, labels in zip(*(inputs[name] for name in ("input_ids", "attention_mask", "labels")), strict=True):
        ids, labels = ids[mask.bool()], labels[mask.bool()]
        log_p = model(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        log_probs.append(log_p.gather(1, ids[1:, None])[labels[1:] != -100, 0])
    return with_gradients(model, torch.cat(log_probs))


def with_gradients(model, log_probs):
    model.zero_grad(set_to_none=True)
    weights = torch.linspace(-1, 1, log_probs.numel(), device=log_probs.device, dtype=log_probs.dtype)
    (log_probs * weights).sum().backward()
    gradients = torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])
    return log_probs.detach(), gradients


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "checkpointing", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "checkpointing"]
)
@pytest.mark.parametrize("precision", ["bf16 weights", "bf16 autocast"])
@pytest.mark.parametrize("name", ["qwen3", "window", "softcap"])
def test_a_bf16_model_is_as_exact_as_padded(name, precision, checkpointing, device):
    torch.manual_seed(0)
    autocast = precision == "bf16 autocast"
    first = AutoModelForCausalLM.from_config(CONFIGS[name]())
    first = first if autocast else first.bfloat16()
    reference = AutoModelForCausalLM.from_config(first.config).to(device, torch.float64)
    reference.load_state_dict(first.state_dict())
    expected = scored_by_definition(reference, batch(device))
    found = {}
    for packed in (False, True):
        model = AutoModelForCausalLM.from_config(first.config, dtype=first.dtype).to(device).train()
        model.load_state_dict(first.state_dict())
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        attach_scoring_forward(model, ScoringOptions(padding_free=packed, share_prompts=packed))
        # On an H100 or H200, cuDNN's gradients of these padded rows are NaN (pytorch #196678)
        without_cudnn = sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
        with Varlen() as varlen, nullcontext() if packed else without_cudnn:
            found[packed] = scored(model, batch(device), autocast)
        assert bool(varlen.calls) == (packed and device == "cuda" and name not in BY_SEGMENTS)
    for of in (0, 1):
        padded, packed = (off(found[x][of], expected[of].double()) for x in (False, True))
        assert 0 < packed < 1.5 * padded
        assert packed < 0.1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", HYBRID)
def test_a_hybrid_model_equals_its_rows(name, device):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(HYBRID[name]()).to(device, torch.float64).train()
    expected = scored_by_definition(model, batch(device))
    scoring = attach_scoring_forward(model, ScoringOptions())
    found = scored(model, batch(device), autocast=False)
    assert scoring.packing.padded_reason is None
    assert scoring.packing.skipped_tokens > 0
    for of in (0, 1):
        assert off(found[of], expected[of]) < 1e-5  # norms, and Qwen3.5's delta rule, compute in fp32


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["qwen3", "window", "mla"])
def test_a_completion_does_not_change_others_of_its_prompt(name, device):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]()).bfloat16().to(device)
    scoring = attach_scoring_forward(model, ScoringOptions())
    scoring.packing.checked = True
    scoring.is_compared = True
    inputs = batch(device)
    changed = {key: x.clone() for key, x in inputs.items()}
    # Not its first token, so that the order of rows and all shapes stay the same
    tokens = changed["input_ids"][0, 41:64]
    changed["input_ids"][0, 41:64] = changed["labels"][0, 41:64] = 3 + (tokens + 50) % 250
    with torch.no_grad():
        before, after = (model(**x, fused_lm_head=True).log_probs for x in (inputs, changed))
    assert scoring.packing.skipped_tokens > 0
    assert torch.equal(before[1:], after[1:])
    assert not torch.equal(before[0], after[0])


@NEEDS_CUDA
def test_a_packed_step_needs_less_memory():
    config = LlamaConfig(
        **{**IDS, "max_position_embeddings": 2048},
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    prompt = torch.randint(3, 257, (1, 512), device="cuda").expand(8, -1)
    ids = torch.cat([prompt, torch.randint(3, 257, (8, 64), device="cuda")], dim=1)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
    inputs["labels"][:, :512] = -100
    peaks = {}
    for packed in (False, True):
        model = AutoModelForCausalLM.from_config(config).bfloat16().cuda().train()
        attach_scoring_forward(model, ScoringOptions(padding_free=packed, share_prompts=packed))
        scored(model, inputs, autocast=False)  # workspaces of libraries, and the checks of the first batch
        model.zero_grad(set_to_none=False)
        peaks[packed] = allocated_by(lambda m=model: m(**inputs, fused_lm_head=True).loss.backward())
    # 1,016 of 4,608 tokens, and each layer's keys and values again for every row
    assert peaks[True] < 0.5 * peaks[False], peaks
