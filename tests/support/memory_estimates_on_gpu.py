"""Measures the memory of training steps on the pretended GPU; see `memory_estimates.py`.

python tests/support/memory_estimates_on_gpu.py FOLDER dpo-lora-offloading ...   # JSON to stdout
"""

import gc
import json
import sys
from pathlib import Path
from typing import Any

_TORCH = ("--head_kernels", "torch")  # Triton's kernels take less
_OFFLOADS = ("--activation_offloading", "true", *_TORCH)
_HOSTED = ("--reference_device", "cpu", *_TORCH)
# Case in `memory_estimates.py`, and further arguments
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "sft-full": ("sft-full", _TORCH),
    "sft-full-offloading": ("sft-full", _OFFLOADS),
    "sft-lora-offloading": ("sft-lora", _OFFLOADS),
    "dpo-lora": ("dpo-lora", _TORCH),
    "dpo-lora-offloading": ("dpo-lora", _OFFLOADS),
    "dpo-full-checkpointing-offloading": ("dpo-full-checkpointing", _OFFLOADS),
    "dpo-full-hosted": ("dpo-full", _HOSTED),
    "dpo-full-offloading-hosted": ("dpo-full", (*_OFFLOADS, *_HOSTED)),
    "kto-full-offloading": ("kto-full", _OFFLOADS),
    "kto-full-hosted": ("kto-full", _HOSTED),
    "grpo-lora-offloading": ("grpo-lora-reference", _OFFLOADS),
    "grpo-full-hosted": ("grpo-full-reference", _HOSTED),
}


def main(folder: Path, names: list[str]) -> None:
    import peft  # noqa: F401 - before `start()`, because bitsandbytes would load what torch lacks
    import torch
    from transformers import TrainerCallback

    import pretended_gpu

    torch.set_num_threads(1)
    pretended_gpu.start()
    from memory_estimates import CASES as ALL
    from memory_estimates import parsed
    from trl_ext.cli.training import build
    from trl_ext.trainers import reference_weights

    # A pretended weight is no plain parameter, and goes to the host only from the device
    reference_weights.check_supported = pretended_gpu.moved

    class Steady(TrainerCallback):
        """Counts from the second step on, when the optimizer's states exist."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            pretended_gpu.RECORD.on = state.global_step > 0

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            pretended_gpu.RECORD.on = False

    peaks = {}
    with pretended_gpu.DeviceMode():
        for name in names:
            case, further = CASES[name]
            trainer: Any = build(ALL[case][0], parsed(case, folder, further))
            trainer.add_callback(Steady())
            pretended_gpu.MEMORY.peak = 0
            trainer.train()
            peaks[name] = pretended_gpu.MEMORY.peak
            del trainer
            gc.collect()
    print(json.dumps(peaks), file=sys.__stdout__)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
    sys.__stdout__.flush()
    import pretended_gpu

    pretended_gpu.leave()
