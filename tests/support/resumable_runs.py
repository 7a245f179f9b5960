"""Small DPO, GRPO and RLOO runs that save often, for tests that interrupt and resume them."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from datasets import config as datasets_config
from safetensors.torch import save_file
from torch.optim.optimizer import register_optimizer_step_post_hook

import trl_ext
from rewards import id_reward
from tiny import lora_config, preferences, prompts

COMMON = {
    "learning_rate": 1e-2,
    "optim": "adamw_torch",
    "lr_scheduler_type": "linear",
    "gradient_checkpointing": False,
    "bf16": False,
    "use_cpu": True,
    "report_to": "none",
    "save_strategy": "steps",
    "save_steps": 1,
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "num_train_epochs": 2,
}
DPO = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
# Each of three slices is visited twice, two per optimizer step: every other step ends within a cycle, and an epoch has
# six steps
GRPO = {
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "steps_per_generation": 3,
    "gradient_accumulation_steps": 2,
    "num_iterations": 2,
    "beta": 0.1,
    "max_completion_length": 6,
}


def build(name: str, library: Any, model: str, output: Path, streaming: bool = False, **changes: Any) -> Any:
    """Build a "dpo", "grpo" or "rloo" trainer of `library` that writes all its files into `output`."""
    datasets_config.HF_DATASETS_CACHE = output / "cache"
    peft_config = lora_config() if changes.pop("peft_config", False) else None
    if name == "dpo":
        data = preferences(12, seed=1)
        return library.DPOTrainer(
            model=model,
            args=library.DPOConfig(output_dir=str(output), **{**COMMON, **DPO, **changes}),
            train_dataset=data.to_iterable_dataset() if streaming else data,
            eval_dataset=data if "eval_strategy" in changes else None,
            peft_config=peft_config,
        )
    data = prompts(6, seed=1)
    trainer_class, config_class = {
        "grpo": (library.GRPOTrainer, library.GRPOConfig),
        "rloo": (library.RLOOTrainer, library.RLOOConfig),
    }[name]
    rollouts = {"rollout_func": changes.pop("rollout_func")} if "rollout_func" in changes else {}
    return trainer_class(
        model=model,
        reward_funcs=changes.pop("reward_funcs", id_reward),
        **rollouts,
        args=config_class(output_dir=str(output), **{**COMMON, **GRPO, **changes}),
        train_dataset=data.to_iterable_dataset() if streaming else data,
        eval_dataset=data if "eval_strategy" in changes else None,
        peft_config=peft_config,
    )


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in trainer.model.named_parameters()}


@contextmanager
def optimizer_steps() -> Iterator[list[str]]:
    """Record the optimizer of each step that is taken in the `with` block."""
    steps: list[str] = []

    def stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if any(group["lr"] != 0 for group in optimizer.param_groups):  # a step of 0 initializes the state
            steps.append(type(optimizer).__name__)

    handle = register_optimizer_step_post_hook(stepped)
    try:
        yield steps
    finally:
        handle.remove()


def made_up(trainer: Any, best_step: int) -> None:
    """Make evaluation return a metric that is best after `best_step`."""
    evaluate = trainer.evaluate

    def evaluated(*positional: Any, **keywords: Any) -> dict[str, float]:
        metrics = evaluate(*positional, **keywords)
        return {**metrics, "eval_made_up": -abs(trainer.state.global_step - best_step)}

    trainer.evaluate = evaluated
    trainer.args.greater_is_better = True


def train_to_the_end(name: str, model: str, folder: str, kill_at_write: str = "") -> None:
    """Train as a user's script does, from the last complete checkpoint if there is one, and save the weights in a file.

    With `kill_at_write`, the process kills itself at the file operation of that number in its checkpoints.
    """
    output = Path(folder)
    writes = kill_when_written(output, int(kill_at_write or 0))
    trainer = build(name, trl_ext, model, output, save_total_limit=2)
    try:
        trainer.train(resume_from_checkpoint=any(output.glob("checkpoint-*")))
    except ValueError as error:
        if "no complete checkpoint" not in str(error):
            raise
        trainer = build(name, trl_ext, model, output, save_total_limit=2)
        trainer.train()
    save_file(weights(trainer), output / "unfinished")
    (output / "writes").write_text(str(writes()))
    (output / "unfinished").rename(output / "weights.safetensors")


def kill_when_written(output: Path, kill_at: int) -> Callable[[], int]:
    """Count the files of checkpoints that Python writes, creates, renames and deletes; at `kill_at`, send SIGKILL."""
    events = 0
    changes = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal events
        writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
        if (writes or event in changes) and isinstance(args[0], str | os.PathLike):
            path = str(args[0])
            if path.startswith(str(output)) and "checkpoint-" in path.removeprefix(str(output)):
                events += 1
                if events == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    return lambda: events
