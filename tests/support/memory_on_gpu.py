"""Measures the memory of training steps on the pretended GPU, in a process of its own.

python tests/support/memory_on_gpu.py FILE   # {name: [method, arguments]} in JSON; peak bytes in JSON to stdout
"""

import gc
import json
import sys
from pathlib import Path
from typing import Any

import pretended_gpu


def peaks(runs: dict[str, tuple[str, list[str]]], folder: Path) -> dict[str, int]:
    """Return the bytes that each run holds at the peak of a step after the first."""
    file = folder / "runs.json"
    file.write_text(json.dumps({name: [method, [*words, *_further(method)]] for name, (method, words) in runs.items()}))
    measured: dict[str, int] = json.loads(pretended_gpu.python(__file__, str(file)))
    return measured


def _further(method: str) -> list[str]:
    """Return further arguments: Triton's kernels take less memory than torch's, which `estimate` runs."""
    kernels = [] if method == "distillation" else ["--head_kernels", "torch"]
    return [*kernels, "--max_steps", "3"]


def _main(runs: dict[str, tuple[str, list[str]]]) -> None:
    import peft  # noqa: F401 - before `start()`, because bitsandbytes would load what torch lacks
    import torch
    from transformers import TrainerCallback

    torch.set_num_threads(1)
    pretended_gpu.start()
    from trl_ext.cli.arguments import OneLineParser, dataclasses_of, parse
    from trl_ext.cli.commands import COMMANDS
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

    found = {}
    with pretended_gpu.DeviceMode():
        for name, (method, words) in runs.items():
            before = pretended_gpu.MEMORY.held  # of earlier runs
            arguments = parse(OneLineParser(dataclasses_of(method)), COMMANDS[method].read(words), may_launch=False)
            trainer: Any = build(method, arguments)
            for parameter_name, parameter in trainer.model.named_parameters():
                if "lora_B" in parameter_name:  # as in `memory_estimates.py`
                    torch.nn.init.normal_(parameter)
            trainer.add_callback(Steady())
            pretended_gpu.MEMORY.peak = 0
            trainer.train()
            found[name] = pretended_gpu.MEMORY.peak - before
            del trainer
            gc.collect()
    print(json.dumps(found), file=sys.__stdout__)


if __name__ == "__main__":
    _main(json.loads(Path(sys.argv[1]).read_text()))
    sys.__stdout__.flush()
    pretended_gpu.leave()
