"""Training steps on a GPU that is not there.

Devices never mix, the numbers are the CPU's, no wait is added, and the memory is what `estimate` predicts.
"""

import fcntl
import importlib.util
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

import pretended_gpu
import pretended_steps
from memory_estimates import ON_GPU, estimated_and_measured_on_gpu
from pretended_steps import STEPS, Outcome, train

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="the pretended GPU needs g++"),
    pytest.mark.skipif(torch.version.cuda is not None, reason="the pretended GPU needs a build of torch for the CPU"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="runs Triton's kernels by its interpreter"),
]

FAST = [name + library for name in ("grpo-lora", "dpo-lora") for library in ("", "/stock")]
SLOW = [name for name in STEPS if name not in FAST]
NAMES = [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in STEPS]

# How often our files make the host wait in four micro-batches and two steps. Lower a number when you remove a wait
WAITS = {
    "grpo-lora": {
        "trl_ext/packing/packing.py": 8,
        "trl_ext/planning/micro_batches.py": 2,
        "trl_ext/planning/rows.py": 6,
        "trl_ext/trainers/row_balance.py": 2,
        "trl_ext/trainers/sampled_batches.py": 2,
        "trl_ext/trainers/sampled_metrics.py": 4,
    },
    "dpo-lora": {
        "trl_ext/packing/packing.py": 4,  # one for each micro-batch: reference and policy share the layout
        "trl_ext/reference/sequences.py": 12,
    },
}
LAUNCHES = ("grpo-lora", "dpo-lora")


def on_gpu(name: str, factory: pytest.TempPathFactory) -> Outcome:
    """Return the outcome of `name` on the pretended GPU. One process runs the fast ones for all test processes."""
    tier = FAST if name in FAST else [name]
    root = factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    path = root / f"pretended-{tier[0]}.json"
    with Path(f"{path}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            path.write_text(pretended_gpu.python(pretended_steps.__file__, *tier))
        return Outcome(**json.loads(path.read_text())[name])


def test_the_pretended_gpu_refuses_to_mix_devices_and_counts_waits():
    script = """
import pretended_gpu, torch
pretended_gpu.start()
with pretended_gpu.DeviceMode(), pretended_gpu.RECORD.counting(True):
    x = torch.ones(3, device="cuda")
    x[x > 0].sum().item()
    torch.ones(3).to("cuda", non_blocking=True).cpu()
    try:
        x + torch.ones(3)
        raise AssertionError
    except RuntimeError as error:
        assert str(error).startswith("Expected all tensors to be on the same device: aten.add.Tensor"), error
    print(*sorted(reason for _, _, reason in pretended_gpu.RECORD.waits))
"""
    assert pretended_gpu.python("-c", script) == "_local_scalar_dense boolean index copy to the host"


def test_a_reference_that_is_kept_on_the_host_may_move_to_its_gpu_by_any_of_its_names():
    script = """
import transformers, pretended_gpu, torch
sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 8}
config = transformers.LlamaConfig(**sizes)
model = transformers.LlamaForCausalLM(config)
pretended_gpu.start()
from trl_ext.host.reference import HostedReference
with pretended_gpu.DeviceMode():
    HostedReference(model, torch.device("cuda"))
    for name in ("cuda", "cuda:0", torch.device("cuda", 0)):
        assert model.to(name) is model
print("moved")
"""
    assert pretended_gpu.python("-c", script) == "moved"


def test_streams_must_wait_for_each_other():
    script = """
import pretended_gpu, torch
pretended_gpu.start()
found = []

def wrong(work):
    try:
        work()
    except RuntimeError as error:
        found.append(str(error).split(", from")[0])

with pretended_gpu.DeviceMode():
    x, side, pinned = torch.ones(4, device="cuda"), torch.cuda.Stream(), torch.empty(4, pin_memory=True)

    def on_side():
        with torch.cuda.stream(side):
            return x + 1

    wrong(on_side)
    side.wait_stream(torch.cuda.current_stream())
    y = on_side()
    wrong(lambda: y * 2)
    torch.cuda.current_stream().wait_event(side.record_event())
    y * 2
    on_side()
    wrong(lambda: x.sub_(1))
    pinned.copy_(y, non_blocking=True)
    wrong(lambda: pinned / 3)
    torch.cuda.synchronize()
    x.sub_(1), pinned / 3
    for lent in (True, False):
        z = torch.ones(4, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            z + 1
        if lent:
            z.record_stream(side)
        del z
        wrong(lambda: x + 1)
print(*found, sep="; ")
"""
    on = ("aten.add.Tensor on stream 1", "aten.mul.Tensor on stream 0", "aten.sub_.Tensor on stream 0")
    others = (0, 1, 1)
    expected = [f"{what} does not wait for stream {other}" for what, other in zip(on, others, strict=True)]
    expected.append("aten.div.Tensor on the host does not wait for stream 0")
    expected.append("memory of stream 0 is freed before stream 1 is done")
    assert pretended_gpu.python("-c", script) == "; ".join(expected)


def test_kernels_and_streams_must_wait_for_each_other():
    script = """
import pretended_gpu, torch, triton, triton.language as tl
pretended_gpu.start()
found = []

@triton.jit
def double(x, y):
    tl.store(y + tl.arange(0, 4), tl.load(x + tl.arange(0, 4)) * 2)

def wrong(work):
    try:
        work()
    except RuntimeError as error:
        found.append(str(error).split(", from")[0])

def on_side(work):
    with torch.cuda.stream(side):
        work()

with pretended_gpu.DeviceMode():
    x, y, side = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda"), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    double[(1,)](x, y)
    on_side(lambda: x + 1)
    wrong(lambda: on_side(lambda: x.sub_(1)))
    wrong(lambda: on_side(lambda: y * 2))
    side.wait_stream(torch.cuda.current_stream())
    on_side(lambda: x.sub_(1))
    wrong(lambda: double[(1,)](x, y))
print(*found, sep="; ")
"""
    expected = ("aten.sub_.Tensor on stream 1", "aten.mul.Tensor on stream 1", "double on stream 0")
    expected = [f"{what} does not wait for stream {other}" for what, other in zip(expected, (0, 0, 1), strict=True)]
    assert pretended_gpu.python("-c", script) == "; ".join(expected)


def test_the_hosted_reference_locks_its_own_bytes_and_orders_its_copies():
    script = """
import logging, transformers, pretended_gpu, torch
from unittest.mock import patch
sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 2}
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=700))
tokens = torch.arange(48).view(2, 24)
want = model(tokens).logits.detach()
pretended_gpu.start()
from trl_ext.host import reference as hosted
lines = []
logging.getLogger("trl_ext").addFilter(lambda line: lines.append(line.getMessage()))
with pretended_gpu.DeviceMode(), torch.no_grad():
    pretended_gpu.RUNTIME.refuses = True
    hosted._Group(iter([torch.nn.Parameter(torch.ones(9))]), True)
    assert "cudaHostRegister: error 2" in lines[0]
    pretended_gpu.RUNTIME.refuses = False
    reference = hosted.HostedReference(pretended_gpu.moved(model), torch.device("cuda"))
    locked = pretended_gpu.RUNTIME.locked
    weights = sum(x.nbytes for x in model.parameters())
    assert len(locked) == 5 and weights <= sum(locked.values()) <= weights + 5 * 4096
    ahead = []  # the copy of the next layer starts before a layer computes
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda *_: ahead.append(max(x.layer or 0 for x in reference._places)))
    for _ in range(2):
        assert torch.allclose(model(tokens.to("cuda")).logits.cpu(), want, atol=1e-5)
        assert all(x.device.type == "cpu" for x in model.parameters())
    assert ahead == [1, 2, 3, 3] * 2
    wait, wrong = hosted.wait, []

    def call_without(number):
        # Leave out one wait of the first three layers
        numbers = iter(range(1000))
        torch.cuda.synchronize()
        x = tokens.to("cuda") + 0
        try:
            with patch.object(hosted, "wait", lambda *given: next(numbers) == number or wait(*given)):
                model(x)
        except ZeroDivisionError:
            x + 0
        except RuntimeError:
            wrong.append(number)

    for number in range(8):
        call_without(number)
    broken = model.model.layers[0].register_forward_pre_hook(lambda *_: 1 / 0)
    for number in (1000, 5):
        try:
            call_without(number)
        except RuntimeError as error:
            wrong.append(str(error).split(", from")[0])
print(*wrong, sep="; ")
"""
    freed = "memory of stream 0 is freed before stream 1 is done"
    assert pretended_gpu.python("-c", script) == f"1; 3; 5; 6; 7; {freed}"


@pytest.mark.parametrize("name", NAMES)
def test_devices_do_not_mix_and_numbers_are_those_of_the_cpu(
    name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
):
    gpu, cpu = on_gpu(name, tmp_path_factory), train(name, tmp_path)
    assert gpu.mixed == []
    # Nothing fell back. What fp32 costs is said
    said = ["Attention runs in torch.float32", "The LM head multiplies fp32"] if STEPS[name].tf32 else []
    assert [line[: len(words)] for line, words in zip(gpu.warnings, said, strict=True)] == said
    # In bf16, varlen attention and the head round where the kernels of the CPU do not: 3 % of an update
    tolerance = 1e-4 if STEPS[name].tf32 else 0.05
    assert gpu.loss == pytest.approx(cpu.loss, rel=tolerance, abs=tolerance / 10)
    assert gpu.updates.keys() == cpu.updates.keys()
    got, want = (torch.cat([torch.tensor(x) for x in run.updates.values()]).double() for run in (gpu, cpu))
    assert want.norm() > 1e-2
    assert (got - want).norm() <= tolerance * want.norm()


@pytest.mark.parametrize("name", WAITS)
def test_no_file_makes_the_host_wait_more_often(name: str, tmp_path_factory: pytest.TempPathFactory):
    outcome = on_gpu(name, tmp_path_factory)
    for file, count in outcome.waits_of().items():
        places = [place for place in outcome.waits if place.startswith(file)]
        if file.startswith("trl_ext"):
            assert count <= WAITS[name].get(file, 0), f"{file} makes the host wait {count} times: {places}"
    stock = on_gpu(name + "/stock", tmp_path_factory)
    assert sum(outcome.waits.values()) <= sum(stock.waits.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "without"),
    [("grpo-lora-offloading", "grpo-lora"), ("dpo-lora-offloading", "dpo-lora"), ("dpo-full-hosted", "dpo-full")],
)
def test_copies_to_and_from_the_host_add_no_wait(name: str, without: str, tmp_path_factory: pytest.TempPathFactory):
    copied, kept = (on_gpu(x, tmp_path_factory) for x in (name, without))
    waits = [{file: n for file, n in x.waits_of().items() if "trl/" not in file} for x in (copied, kept)]
    assert waits[0] == waits[1]  # TRL's class, which DPO takes, adds some
    assert copied.launches.get("copy_", 0) > kept.launches.get("copy_", 0)


@pytest.mark.parametrize("name", LAUNCHES)
def test_launches_are_about_those_of_stock_trl_at_most(name: str, tmp_path_factory: pytest.TempPathFactory):
    ours, stock = (on_gpu(name + library, tmp_path_factory) for library in ("", "/stock"))
    assert ours.launches["varlen"] > 0
    assert ours.launches["triton fold"] > 0
    assert ours.launches["triton finish"] > 0
    # A percent of slack: a few launches are not worth other code
    assert sum(ours.launches.values()) <= 1.01 * sum(stock.launches.values())
    # Not ours: the same batches, losses and optimizer
    assert ours.loss == pytest.approx(stock.loss, rel=0.05)


@pytest.mark.parametrize("case", ["dpo-lora-offloading", pytest.param("others", marks=pytest.mark.slow)])
def test_what_is_estimated_is_within_a_tenth_of_what_the_gpu_allocates(case: str, tmp_path: Path):
    names = [name for name in ON_GPU if (name == case) == (case != "others")]
    found = estimated_and_measured_on_gpu(names, tmp_path)
    for name, (expected, measured) in found.items():
        print(f"{name}: {expected} bytes estimated, {measured} measured, {expected / measured:.3f}")
        assert 0.9 <= expected / measured <= 1.1, name
    assert [*found] == names
