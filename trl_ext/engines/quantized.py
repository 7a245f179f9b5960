"""Layers that bitsandbytes has quantized to 4 bit, and that would lose their gradient on a CPU."""

from torch import nn


def keep_differentiable(model: nn.Module) -> None:
    """
    Let no layer of `model` change into bitsandbytes' format for inference on a CPU.

    A 4-bit layer does so for good in its first forward in evaluation mode (a generation, an evaluation) where the CPU
    has instructions for bf16, and nothing is differentiated through it from then on.
    """
    for module in model.modules():
        if "support_avx512bf16_for_cpu" in vars(module):
            vars(module)["support_avx512bf16_for_cpu"] = False
