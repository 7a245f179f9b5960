"""How long an optimizer step takes, predicted from its tokens, the model and the device: a model to rank options.

A step is its passes. A pass is its products, or the reading of the weights if that takes longer, and a fixed time for
each layer; several devices add what they exchange. Nothing here was fitted to a GPU, so only ratios mean something.
"""

import re
from dataclasses import dataclass

from ..planning.cost import CostModel


@dataclass(frozen=True)
class Device:
    """A device's limits. GB are 10^9 bytes, as in data sheets."""

    memory: int  # bytes
    flops: float  # per second: dense products in bf16
    bandwidth: float  # of its memory, bytes per second
    link: float  # to the other devices, bytes per second in one direction
    host: float  # to host memory, bytes per second in one direction
    overhead: float = 2e-4  # seconds of a layer's forward or backward in which nothing is multiplied


def _gpu(memory: int, teraflops: float, bandwidth: int, link: int, host: int) -> Device:
    """Return a GPU of `memory` GB; bandwidths are in GB/s, those of links in both directions together."""
    return Device(memory * 10**9, teraflops * 1e12, bandwidth * 1e9, link * 1e9 / 2, host * 1e9 / 2)


# From the vendors' data sheets, without sparsity: NVIDIA A10, L4, L40S, A100, H100 SXM, H200 SXM, HGX B200 and the
# white papers of the GA102 and AD102 GPUs; AMD Instinct MI300X. PCIe 4.0 has 64 GB/s, PCIe 5.0 128 GB/s.
GPUS = {
    "A10": _gpu(24, 125, 600, 64, 64),
    "L4": _gpu(24, 121, 300, 64, 64),
    "L40S": _gpu(48, 362, 864, 64, 64),
    "A100-40GB": _gpu(40, 312, 1555, 600, 64),
    "A100-80GB": _gpu(80, 312, 2039, 600, 64),
    "H100": _gpu(80, 989, 3350, 900, 128),
    "H200": _gpu(141, 989, 4800, 900, 128),
    "B200": _gpu(180, 2250, 8000, 1800, 128),
    "RTX-3090": _gpu(24, 71, 936, 64, 64),
    "RTX-4090": _gpu(24, 165, 1008, 64, 64),
    "MI300X": _gpu(192, 1307, 5300, 896, 128),
}


def gpu_named(name: str) -> Device | None:
    """Return the GPU that a driver calls `name`, such as "NVIDIA A100-SXM4-80GB"; `None` if it is not in the table."""
    words = re.split(r"[\s-]+", name)
    return next((gpu for table_name, gpu in GPUS.items() if {*table_name.split("-")} <= {*words}), None)


# One core of a server, in fp32
CPU = Device(0, 5e10, 1e10, 1e9, 1e10, 1e-4)


@dataclass(frozen=True)
class Model:
    """What the time depends on, of the policy."""

    cost: CostModel
    layers: int
    weight_bytes: int
    trained_bytes: int

    @property
    def backward(self) -> float:
        """The products of a backward of the backbone, over those of its forward: of inputs, and of trained weights."""
        return 1.0 + min(1.0, self.trained_bytes / self.weight_bytes)


@dataclass(frozen=True)
class StepWork:
    """An optimizer step on one device."""

    passes: int  # forward passes with a gradient
    tokens: float  # that the backbone processes in all of them, with padding
    pairs: float  # of query and key
    scored_tokens: float  # tokens that the head scores
    checkpointing: bool
    engine: str  # "one_process", "ddp", "fsdp2", or "zero1" to "zero3"
    devices: int
    reference: float = 0.0  # forward passes of a reference over all tokens, on average
    offloaded: float = 0.0  # bytes of activations that go to host memory and back
    hosts_reference: bool = False  # a reference model's weights come from host memory in each of its passes


def seconds(work: StepWork, model: Model, device: Device) -> float:
    """Return the predicted time of the step. It grows with each number in `work`."""
    cost = model.cost
    backbone = cost.of_token * work.tokens + cost.of_pair * work.pairs
    head = cost.of_scored_token * work.scored_tokens
    recomputed = float(work.checkpointing)
    forwards = 1.0 + recomputed + work.reference
    # The tiled head computes its logits again in the backward
    products = backbone * (forwards + model.backward) + head * (4.0 + work.reference)
    readings = work.passes * model.weight_bytes * (forwards + model.backward) / device.bandwidth
    fixed = work.passes * model.layers * (forwards + 1.0) * device.overhead
    # Copies run while the device computes
    copied = 2 * work.offloaded + work.hosts_reference * work.passes * work.reference * model.weight_bytes
    return max(products / device.flops, readings, copied / device.host) + fixed + _exchange(work, model) / device.link


def _exchange(work: StepWork, model: Model) -> float:
    """Return the bytes that a device sends in the step. An all-reduce is a reduce-scatter and an all-gather."""
    sent_share = (work.devices - 1) / work.devices
    reduced = model.trained_bytes
    if work.engine in ("fsdp2", "zero3"):
        # Weights are gathered for the forward and for the backward, which also recomputes
        return sent_share * (work.passes * model.weight_bytes * (2 + work.reference) + reduced)
    if work.engine == "zero2":  # reduces gradients after each pass
        return sent_share * (work.passes + 1) * reduced
    return sent_share * 2 * reduced
