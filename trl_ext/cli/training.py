"""`trl-ext dpo` and `trl-ext grpo`: build a trainer from arguments, and train in one or several processes."""

import importlib
import os
import subprocess
import sys
import tempfile
from typing import Any

import torch
from accelerate.commands.config.config_args import default_config_file
from accelerate.commands.launch import launch_command, launch_command_parser
from datasets import load_dataset
from peft import AutoPeftModelForCausalLM
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from trl import get_dataset, get_peft_config, get_quantization_config

from ..compat.choices import resolve_accelerate_config_argument
from ..trainers.dpo import DPOTrainer
from ..trainers.grpo import GRPOTrainer
from . import CommandError, TrainingStoppedError, did_you_mean
from .arguments import OneLineParser, Parsed, dataclasses_of, method_of, parse

_NAMES = ("accuracy_reward", "get_soft_overlong_punishment", "reasoning_accuracy_reward", "think_format_reward")


def rewards_of(script_args: Any) -> list[Any]:
    """The reward model, if any, and the functions of `--reward_funcs`, in TRL's order."""
    model = script_args.reward_model_name_or_path
    rewards: list[Any] = [] if model is None else [model]
    rewards += [_function(path) for path in script_args.reward_funcs or []]
    if not rewards:
        raise CommandError(
            "`--reward_funcs` is not set. Give names in `trl.rewards`, such as `accuracy_reward`, or dotted paths, "
            "such as `my_rewards.brevity`; or give `--reward_model_name_or_path`."
        )
    return rewards


def _function(path: str) -> Any:
    module_name, _, name = path.rpartition(".")
    if not module_name:
        if name not in _NAMES:
            raise CommandError(
                f"`--reward_funcs` has `{path}`, which is neither a dotted path such as `my_rewards.{path}` nor one of "
                f"{', '.join(_NAMES)}.{did_you_mean(path, _NAMES)}"
            )
        function = getattr(importlib.import_module("trl.rewards"), name)
        # The values of TRL's command
        soft = name == "get_soft_overlong_punishment"
        return function(max_completion_len=1280, soft_punish_cache=256) if soft else function
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists, and imports another that does not
        raise CommandError(
            f"`--reward_funcs` has `{path}`, but there is no module `{module_name}` in {os.getcwd()} or among the "
            "installed packages. Start in the folder that holds it, or install it."
        ) from error
    if not callable(getattr(module, name, None)):
        raise CommandError(
            f"`--reward_funcs` has `{path}`, but the module `{module_name}` has no function `{name}`."
            f"{did_you_mean(name, vars(module))}"
        )
    return getattr(module, name)


def build(method: str, parsed: Parsed, *, most_rows: int | None = None) -> Any:
    """The trainer, ready to train; with the first `most_rows` of each data set, to show the plan alone."""
    script, training, model_args, mixture, *_ = parsed
    rewards = {"reward_funcs": rewards_of(script)} if method == "grpo" else {}
    require_model(model_args)
    train, evaluation = _data_sets(script, training, mixture, most_rows)
    model, quantization_config = _model(training, model_args)
    trainer_class = DPOTrainer if method == "dpo" else GRPOTrainer
    trainer = trainer_class(
        model=model,
        args=training,
        train_dataset=train,
        eval_dataset=evaluation,
        quantization_config=quantization_config,
        peft_config=get_peft_config(model_args),
        **rewards,
    )
    if script.ignore_bias_buffers:
        # DDP broadcasts buffers, and some backends cannot broadcast booleans
        trainer.model._ddp_params_and_buffers_to_ignore = [
            name for name, buffer in trainer.model.named_buffers() if buffer.dtype == torch.bool
        ]
    return trainer


def require_model(model_args: Any) -> None:
    """Raise `CommandError` where no model was named."""
    if model_args.model_name_or_path is None:
        raise CommandError("`--model_name_or_path` is not set. Give a model's name on the Hub or a folder.")


def model_init_arguments(training: Any, model_args: Any) -> dict[str, Any]:
    """The arguments that load the model, as in TRL's scripts."""
    return {
        "dtype": model_args.dtype,
        "attn_implementation": model_args.attn_implementation,
        "trust_remote_code": training.trust_remote_code,
        **(training.model_init_kwargs or {}),
    }


def is_adapter(name: str) -> bool:
    """Whether `name` is the folder of a PEFT adapter."""
    return os.path.isfile(os.path.join(name, "adapter_config.json"))


def _model(training: Any, model_args: Any) -> tuple[Any, Any]:
    """The model or its name, and the quantization with which the trainer loads it."""
    name, arguments = model_args.model_name_or_path, model_init_arguments(training, model_args)
    quantization_config = get_quantization_config(model_args)
    if not is_adapter(name):
        training.model_init_kwargs = {"revision": model_args.model_revision, **arguments}
        return name, quantization_config
    # The trainer loads no adapter from a folder; PEFT loads adapters for inference by default
    training.model_init_kwargs = None
    model = AutoPeftModelForCausalLM.from_pretrained(
        name, is_trainable=True, quantization_config=quantization_config, **arguments
    )
    return model, None


def _data_sets(script: Any, training: Any, mixture: Any, most_rows: int | None) -> tuple[Any, Any]:
    if mixture.datasets:
        data = get_dataset(mixture)
    elif script.dataset_name:
        data = load_dataset(script.dataset_name, name=script.dataset_config, streaming=script.dataset_streaming)
    else:
        raise CommandError(
            "`--dataset_name` is not set. Give a data set's name on the Hub or a folder of JSONL files; or "
            "`datasets`, a list, in the file of `--config`."
        )
    wanted = {"dataset_train_split": script.dataset_train_split}
    if training.eval_strategy != "no":
        wanted["dataset_test_split"] = script.dataset_test_split
    for argument, split in wanted.items():
        if split not in data:
            there = ", ".join(data)
            raise CommandError(f"`--{argument}` is `{split}`, but the data set has {there}: give one of these.")
    found = [data[split] for split in wanted.values()]
    if most_rows is not None:
        found = [x.select(range(min(most_rows, len(x)))) if hasattr(x, "select") else x for x in found]
    return found[0], found[1] if len(found) > 1 else None


def needs_launch(launch_arguments: list[str]) -> bool:
    """Whether `accelerate launch` has arguments, a default file, or several GPUs."""
    return bool(launch_arguments) or os.path.isfile(default_config_file) or torch.cuda.device_count() > 1


def launch(launch_arguments: list[str], arguments: list[str]) -> int:
    """Run the command line with `arguments` in the processes that accelerate starts; the status of the first to fail.

    If a single process fails, it raises `subprocess.CalledProcessError`.
    """
    options = [*resolve_accelerate_config_argument(launch_arguments), "-m", "trl_ext.cli", *arguments]
    try:
        launch_command(launch_command_parser().parse_args(options))
    except ChildFailedError as error:
        return int(error.get_first_failure()[1].exitcode)
    return 0


# Rows of the data set with which `explain` builds the trainer: the plan does not depend on their number
_ROWS_TO_EXPLAIN = 64


def run(command: str, arguments: list[str], *, may_launch: bool, shows_traceback: bool) -> int:
    """Run `dpo`, `grpo` or `explain`, in this process or in those that `accelerate launch` starts."""
    method, rest = method_of(arguments, command) if command == "explain" else (command, arguments)
    commands = [command, method] if command == "explain" else [command]
    parser = OneLineParser(dataclasses_of(method), prog=f"trl-ext {' '.join(commands)}")
    parsed = Parsed(*parse(parser, rest, may_launch=may_launch))
    launch_arguments = [*parsed.launch_of_file, *parsed.launch]
    # Libraries read the environment when they are imported, so variables that a file sets need a new process
    if may_launch and (needs_launch(launch_arguments) or parser.set_environment):
        flags = ["--traceback"] if shows_traceback else []
        try:
            return launch(launch_arguments, [*commands, *_without(rest, parsed.launch), *flags])
        except subprocess.CalledProcessError as error:
            return error.returncode  # the process has printed its error
    trainer = _explain(method, parsed) if command == "explain" else _train(method, parsed)
    if hasattr(trainer, "end"):  # transformers 5.18 and later: closes the trackers and the process group
        trainer.end()
    return 0


def _explain(method: str, parsed: Parsed) -> Any:
    training = parsed.training
    training.push_to_hub = training.log_completions = False  # TRL's `__init__` creates a repository of completions
    with tempfile.TemporaryDirectory() as folder:
        training.output_dir = folder
        trainer = build(method, parsed, most_rows=_ROWS_TO_EXPLAIN)
        plan = trainer.explain()
    if trainer.accelerator.is_main_process:
        print(plan)
        for warning in plan.warnings:
            print(f"warning: {warning}")
    return trainer


def _train(method: str, parsed: Parsed) -> Any:
    trainer = build(method, parsed)
    training = parsed.training
    try:
        trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    except Exception as error:
        if trainer.state.global_step == 0:
            raise
        raise TrainingStoppedError(
            f"Training stopped after step {trainer.state.global_step}. Checkpoints are in {training.output_dir}; "
            "`--resume_from_checkpoint auto` goes on from the last complete one, or from the beginning."
        ) from error
    trainer.save_model(training.output_dir)
    trainer.accelerator.print(f"Model saved to {training.output_dir}.")
    if training.push_to_hub:
        trainer.push_to_hub(dataset_name=parsed.script.dataset_name)
    return trainer


def _without(arguments: list[str], launch_arguments: list[str]) -> list[str]:
    """`arguments` without those of the launch, which are among them in the same order."""
    left, kept = list(launch_arguments), []
    for argument in arguments:
        if left and argument == left[0]:
            left.pop(0)
        else:
            kept.append(argument)
    return kept
