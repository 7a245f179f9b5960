"""Activation offloading keeps activations on the host, and gradients stay bitwise equal."""

import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM

import trl_ext
from device_memory import allocated_by
from resumable_runs import build, weights
from tiny import Workshop, lora_config
from trl_ext.host.activations import ActivationsOnHost, HostCopy, HostTensors
from trl_ext.scoring.forward import ScoringOptions, attach_scoring_forward

CPU = torch.device("cpu")


def gradients(model: Any, offloaded: bool) -> dict[str, torch.Tensor]:
    """Train with offloading; on the CPU, it copies from host to host."""
    tokens = torch.arange(3, 3 + 4 * 16).view(4, 16)
    model.zero_grad()
    with ActivationsOnHost(lambda: model, CPU) if offloaded else nullcontext():
        model(input_ids=tokens, labels=tokens, fused_lm_head=True).log_probs.exp().sum().backward()
    return {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}


@pytest.mark.parametrize("name", ["tied", "untied", "experts"])
def test_gradients_are_bitwise_equal(name: str, workshop: Workshop) -> None:
    model = AutoModelForCausalLM.from_pretrained(workshop.model(name))
    attach_scoring_forward(model, ScoringOptions())
    want, got = gradients(model, False), gradients(model, True)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[key], want[key]) for key in want)


def test_large_activations_are_copied_and_weights_are_not() -> None:
    layer = torch.nn.Linear(64, 64, bias=False)
    inputs = torch.randn(32, 64, requires_grad=True)
    with ActivationsOnHost(lambda: layer, CPU):
        out = layer(inputs)
    saved = out.grad_fn
    held = [saved._saved_self, saved._saved_mat2]  # a matrix product's: unpacked when they are read
    assert held[0].data_ptr() != inputs.data_ptr()
    assert torch.equal(held[0], inputs)
    assert held[1].untyped_storage().data_ptr() == layer.weight.data_ptr()


def test_a_tensor_that_is_saved_twice_is_copied_once() -> None:
    kept = HostTensors(torch.nn.Linear(2, 2), CPU)
    x = torch.randn(32, 64)
    first = kept.pack(x)
    assert isinstance(first, HostCopy)
    assert kept.pack(x) is first
    assert kept.pack(x.t()) is not first
    before = x.clone()
    x.mul_(2)
    second = kept.pack(x)
    assert second is not first
    held = weakref.ref(kept.pack(x.clone()))
    assert held() is None  # the graph alone keeps a copy
    # A graph with `retain_graph=True` unpacks twice
    assert all(torch.equal(kept.unpack(first), before) for _ in range(2))
    assert torch.equal(kept.unpack(second), x)


def test_tensors_that_lora_layers_save_several_times_are_copied_once(workshop: Workshop) -> None:
    base = AutoModelForCausalLM.from_pretrained(workshop.model("untied"), dtype=torch.bfloat16)
    attach_scoring_forward(base, ScoringOptions())
    model = get_peft_model(base, lora_config(target_modules="all-linear"))
    kept, saved = HostTensors(model, CPU), []

    def pack(tensor: torch.Tensor) -> Any:
        packed = kept.pack(tensor)
        if isinstance(packed, HostCopy):
            saved.append((tensor.detach(), packed))  # alive, so that no address is used again
        return packed

    tokens = torch.arange(3, 3 + 4 * 16).view(4, 16)
    with torch.autograd.graph.saved_tensors_hooks(pack, kept.unpack):
        model(input_ids=tokens, labels=tokens, fused_lm_head=True)
    distinct = {(x.data_ptr(), x.nbytes, x.dtype) for x, _ in saved}
    assert len({packed for _, packed in saved}) == len(distinct)
    assert len(distinct) < len(saved)


def test_without_an_accelerator_it_is_refused(workshop: Workshop, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ValueError, match="`activation_offloading=True` keeps activations in host memory"):
        build("grpo", trl_ext, workshop.model("untied"), tmp_path, activation_offloading=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="measures CUDA")
def test_on_cuda_a_run_ends_with_the_same_weights_and_needs_less_memory(workshop: Workshop, tmp_path: Path) -> None:
    ended: dict[bool, dict[str, torch.Tensor]] = {}

    def train(offloads: bool) -> None:
        changes = {"use_cpu": False, "save_strategy": "no", "activation_offloading": offloads}
        trainer = build("grpo", trl_ext, workshop.model("untied"), tmp_path / str(offloads), **changes)
        trainer.train()
        ended[offloads] = weights(trainer)

    torch.use_deterministic_algorithms(True)  # sums of atomic additions differ between two runs of the same code
    try:
        peaks = {offloads: allocated_by(lambda x=offloads: train(x)) for offloads in (False, True)}
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(ended[True][name], ended[False][name]) for name in ended[False])
    assert peaks[True] <= peaks[False]
