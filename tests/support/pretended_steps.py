"""Training steps of both trainers, ours and stock TRL's, on the CPU or on the pretended GPU.

python tests/support/pretended_steps.py grpo-lora dpo-lora/stock   # on the pretended GPU; JSON to stdout
"""

import contextlib
import dataclasses
import json
import logging
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_STEPS = 3
_CONFIG = {"max_steps": _STEPS, "logging_steps": _STEPS, "gradient_accumulation_steps": 2}
_PARTS = {"max_tokens_per_micro_batch": 48}
_CHECKPOINTS = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}


@dataclass(frozen=True)
class Steps:
    """A run of three optimizer steps of two micro-batches each."""

    kind: str
    lora: dict[str, Any] | None = None
    config: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)  # arguments that stock TRL lacks
    tf32: bool = False
    model: str = "tied"


STEPS = {
    "grpo-lora": Steps("grpo", {}),
    "dpo-lora": Steps("dpo", {}),
    "grpo-full-parts": Steps("grpo", None, {"beta": 0.0}, _PARTS),
    "dpo-full-checkpointing": Steps("dpo", None, _CHECKPOINTS),
    "grpo-head-adapter-tf32": Steps("grpo", {"target_modules": ["q_proj", "lm_head"]}, tf32=True, model="untied"),
    "grpo-full": Steps("grpo", None, {"beta": 0.0}),
    "dpo-full": Steps("dpo"),
    "grpo-lora-checkpointing": Steps("grpo", {}, _CHECKPOINTS),
    "dpo-head-adapter-tf32": Steps("dpo", {"target_modules": ["q_proj", "lm_head"]}, tf32=True, model="untied"),
    # In fp32: rounding to bf16 puts ratios of the second iteration on the other side of the clip range
    "grpo-lora-iterations": Steps("grpo", {}, {"num_iterations": 2}, tf32=True),
    "grpo-lora-torch-kernels": Steps("grpo", {}, {}, {"head_kernels": "torch"}),
    "grpo-lora-padded": Steps("grpo", {}, {}, {"padding_free": False}),
    "grpo-lora-offloading": Steps("grpo", {}, {}, {"activation_offloading": True}),
    "dpo-lora-offloading": Steps("dpo", {}, {"activation_offloading": True}),  # by TRL
    "dpo-full-hosted": Steps("dpo", None, {}, {"reference_device": "cpu"}),
}


@dataclass
class Outcome:
    """The results of a run, and on the pretended GPU the costs of its last two steps."""

    loss: float
    updates: dict[str, list[float]]  # name of a trained weight -> its change
    waits: dict[str, int] = field(default_factory=dict)  # "file:line reason" -> host waits
    launches: dict[str, int] = field(default_factory=dict)
    mixed: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def waits_of(self) -> dict[str, int]:
        """Return file -> host waits."""
        files: dict[str, int] = {}
        for place, count in self.waits.items():
            file = place.split(":")[0]
            files[file] = files.get(file, 0) + count
        return files


def train(name: str, root: Path, record: Any = None) -> Outcome:
    """Run the entry `name` of `STEPS`; with "/stock" after the name, run it with stock TRL.

    Args:
        record (`Record`, *optional*): the record of the pretended GPU, in whose `DeviceMode` this runs; None: the CPU.
    """
    import trl
    from transformers import TrainerCallback

    import trl_ext
    from adapter_cases import base, build
    from fp32_precision import fewer_digits
    from tiny import Workshop, lora_config

    name, _, library = name.partition("/")
    steps = STEPS[name]
    workshop = Workshop(root / "tiny")
    folder = Path(tempfile.mkdtemp(dir=root))
    config = steps.config | ({} if library else steps.ours)
    if record is None:
        config.pop("activation_offloading", None)  # the CPU has nothing to offload
    if steps.kind == "dpo" and not library:
        config["reference_store_dir"] = str(folder)
    lora = None if steps.lora is None else lora_config(**steps.lora)
    policy = base(workshop, steps.model)
    bf16 = not steps.tf32  # TF32 concerns fp32 products
    if bf16 and lora is not None:
        policy = policy.bfloat16()
    reference = base(workshop, steps.model) if steps.kind == "dpo" and lora is None else None
    if record is not None and reference is not None:
        reference = reference.to("cuda")  # the parameters of a hosted one go to the host and back

    class Counts(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
            self.before = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if record is not None and state.global_step == 1:
                record.on = True

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if record is not None and state.global_step == _STEPS:
                record.on = False

    counts = Counts()
    if record is not None:
        record.clear()
    logged: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda line: logged.append(line.getMessage())  # type: ignore[method-assign]
    logging.getLogger("trl_ext").addHandler(handler)
    with (
        warnings.catch_warnings(record=True) as warned,
        fewer_digits("tf32=True") if steps.tf32 else contextlib.nullcontext(),
    ):
        warnings.simplefilter("always")
        trainer = build(
            *(steps.kind, trl if library else trl_ext, workshop, folder, policy, reference),
            **{**_CONFIG, "bf16": bf16, "use_cpu": record is None, "model": steps.model, "peft_config": lora},
            **config,
        )
        trainer.add_callback(counts)
        trainer.train()
    logging.getLogger("trl_ext").removeHandler(handler)
    after = dict(trainer.model.named_parameters())
    updates = {n: (after[n].detach() - was).cpu().flatten().tolist() for n, was in counts.before.items()}
    (loss,) = (log["train_loss"] for log in trainer.state.log_history if "train_loss" in log)
    outcome = Outcome(loss, updates)
    package = Path(trl_ext.__file__).parent
    outcome.warnings = logged + [str(x.message) for x in warned if Path(x.filename).is_relative_to(package)]
    if record is not None:
        outcome.waits = {f"{file}:{line} {why}": n for (file, line, why), n in record.waits.most_common()}
        outcome.launches, outcome.mixed = dict(record.launches.most_common()), record.mixed
    return outcome


def main(names: list[str]) -> None:
    import peft  # noqa: F401 - before `start()`, because bitsandbytes would load what torch lacks
    import torch

    import pretended_gpu

    torch.set_num_threads(1)
    pretended_gpu.start()
    import trl.kernels.chunked_logprob as stock

    # Triton's interpreter stops at an `if` of theirs. These are their functions for devices without Triton
    stock._forward_kernel = pretended_gpu.one_kernel(stock._forward_tile)
    stock._backward_kernel = pretended_gpu.one_kernel(stock._backward_tile)
    from trl_ext.trainers import reference_weights

    reference_weights.check_supported = lambda _: None  # a pretended weight is no plain parameter
    outcomes = {}
    with tempfile.TemporaryDirectory() as folder, pretended_gpu.DeviceMode():
        for name in names:
            start = time.process_time()
            outcomes[name] = train(name, Path(folder), pretended_gpu.RECORD)
            outcomes[name].seconds = time.process_time() - start
    print(json.dumps({name: dataclasses.asdict(outcome) for name, outcome in outcomes.items()}), file=sys.__stdout__)


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.__stdout__.flush()
    import pretended_gpu

    pretended_gpu.leave()
