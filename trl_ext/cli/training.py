"""`trl-ext dpo` and the like: build a trainer from arguments, and train in one or several processes."""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from datasets.exceptions import DatasetGenerationError
from huggingface_hub import is_offline_mode
from peft import AutoPeftModelForCausalLM, AutoPeftModelForSequenceClassification
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations
from trl import get_dataset, get_peft_config, get_quantization_config

from ..checks.names import did_you_mean
from ..fit.policy import is_adapter, model_init_arguments, teacher_init_arguments
from . import CommandError, TrainingStoppedError, one_line
from .arguments import REWARDS, OneLineParser, Parsed, dataclasses_of, parse
from .commands import Process
from .launch import launch, needs_launch, without
from .line import DATA_FORMATS, Line, class_name


def trainer_class_of(method: str) -> Any:
    """Return our trainer of a method, imported only now."""
    return getattr(importlib.import_module("..", __package__), class_name(method, "Trainer"))


def rewards_of(script_args: Any) -> list[Any]:
    """Return the reward model, if any, and the functions of `--reward_funcs`, in TRL's order."""
    model = script_args.reward_model_name_or_path
    return [*([] if model is None else [model]), *map(_function, script_args.reward_funcs)]


def _function(reward: str) -> Any:
    """Return a function for `reward`: `my_rewards.py:name`, `my_rewards.name`, or a name in `trl.rewards`."""
    place, mark, name = reward.rpartition(":" if ":" in reward else ".")
    file = Path(place)
    folder = os.getcwd()
    if not mark:
        if name not in REWARDS:
            raise CommandError(
                f"`--reward_funcs` has `{reward}`, which is not in "
                f"`trl.rewards`.{did_you_mean(reward, REWARDS)} Pass the file of your function, such as "
                f"`my_rewards.py:{reward}`, or one of {', '.join(REWARDS)}."
            )
        function = getattr(importlib.import_module("trl.rewards"), name)
        # The values of TRL's command
        soft = name == "get_soft_overlong_punishment"
        return function(max_completion_len=1280, soft_punish_cache=256) if soft else function
    if name == "py" or not name:
        reward = reward.removesuffix(":")
        raise CommandError(f"`--reward_funcs` has `{reward}`, which names no function. Write `{reward}:NAME`.")
    if not place:
        raise CommandError(f"`--reward_funcs` has `{reward}`, which names no file. Write `FILE.py:{name}`.")
    if mark == ":" and file.suffix != ".py":
        raise CommandError(f"`--reward_funcs` has `{reward}`, which names no Python file. Write `{place}.py:{name}`.")
    if mark == ":" and not file.is_file():
        raise CommandError(f"`--reward_funcs` has `{reward}`, but there is no such file. Current folder: {folder}.")
    # As Python does, look for modules in the folder of the file, or in the current one
    sys.path.insert(0, str(file.parent.resolve()) if mark == ":" else folder)
    try:
        module = _module_of(file) if mark == ":" else _imported(place, reward)
    except CommandError:
        raise
    except Exception as error:  # the user's code may raise anything
        why = one_line(error).rstrip(".")
        raise CommandError(f"`--reward_funcs` has `{reward}`, but `{place}` cannot be imported: {why}.") from error
    if not callable(getattr(module, name, None)):
        close = did_you_mean(name, [x for x, value in vars(module).items() if callable(value)])
        raise CommandError(f"`--reward_funcs` has `{reward}`, but `{place}` has no function `{name}`.{close}")
    return getattr(module, name)


def _module_of(file: Path) -> Any:
    unique = f"reward_functions_{file.stem}"  # not the name of an installed module
    loaded_module = sys.modules.get(unique)
    if loaded_module is not None and loaded_module.__file__ == str(file.resolve()):
        return loaded_module
    spec: Any = importlib.util.spec_from_file_location(unique, file.resolve())
    module = sys.modules[unique] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _imported(name: str, reward: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module exists, and imports another that does not
        raise CommandError(
            f"`--reward_funcs` has `{reward}`, but there is no module `{name}` in {os.getcwd()} or among the "
            "installed packages. Pass its file, such as `path/to/my_rewards.py:brevity`."
        ) from error


def build(method: str, parsed_arguments: Parsed, *, trainer_class: Any = None, most_rows: int | None = None) -> Any:
    """Return the trainer, ready to train, on at most the first `most_rows` of each data set.

    Args:
        trainer_class (`type`, *optional*): TRL's, in place of ours.
    """
    script = parsed_arguments.script
    training = parsed_arguments.training
    arguments: dict[str, Any] = {}
    if method in ("grpo", "rloo"):
        arguments = {"reward_funcs": rewards_of(script)}
    elif method == "distillation":
        arguments = {"teacher_model": _teacher(training, parsed_arguments.model)}
    train, evaluation = data_sets(script, training, parsed_arguments.mixture, most_rows)
    adapter_class = AutoPeftModelForSequenceClassification if method == "reward" else AutoPeftModelForCausalLM
    model, quantization_config = _model(training, parsed_arguments.model, adapter_class)
    trainer = (trainer_class or trainer_class_of(method))(
        model=model,
        args=training,
        train_dataset=train,
        eval_dataset=evaluation,
        quantization_config=quantization_config,
        peft_config=get_peft_config(parsed_arguments.model),
        **arguments,
    )
    if script.ignore_bias_buffers:
        # DDP broadcasts buffers, and some backends cannot broadcast booleans
        trainer.model._ddp_params_and_buffers_to_ignore = [
            name for name, buffer in trainer.model.named_buffers() if buffer.dtype == torch.bool
        ]
    return trainer


def _teacher(training: Any, model_args: Any) -> str | None:
    """Return the teacher's name, and set the arguments that load it."""
    name: str | None = training.teacher_model_name_or_path
    if name is not None:
        training.teacher_model_init_kwargs = teacher_init_arguments(training, model_args)
    return name


def _model(training: Any, model_args: Any, adapter_class: Any) -> tuple[Any, Any]:
    """Return the model or its name, and the quantization with which the trainer loads it.

    `adapter_class` is PEFT's class that loads an adapter with its base model.
    """
    name = model_args.model_name_or_path
    arguments = model_init_arguments(training, model_args)
    quantization_config = get_quantization_config(model_args)
    if not is_adapter(name):
        training.model_init_kwargs = {"revision": model_args.model_revision, **arguments}
        return name, quantization_config
    # The trainer loads no adapter from a folder; PEFT loads adapters for inference by default
    training.model_init_kwargs = None
    if adapter_class is AutoPeftModelForSequenceClassification:
        arguments["num_labels"] = 1
    model = adapter_class.from_pretrained(name, is_trainable=True, quantization_config=quantization_config, **arguments)
    return model, None


def data_sets(script: Any, training: Any, mixture: Any, most_rows: int | None) -> tuple[Any, Any]:
    """Return the rows to train on and those to evaluate, each at most the first `most_rows`."""
    data = get_dataset(mixture) if mixture.datasets else _loaded(script)
    splits = {"dataset_train_split": script.dataset_train_split}
    if training.eval_strategy != "no":
        splits["dataset_test_split"] = script.dataset_test_split
    for argument, split in splits.items():
        if split not in data and argument == "dataset_test_split" and split == "test":
            raise CommandError(
                f"`--eval_strategy {getattr(training.eval_strategy, 'value', training.eval_strategy)}` needs data to "
                f"evaluate on, but the data set has no split `test`. Pass `--dataset_test_split` with one of "
                f"{', '.join(data)}, or leave `--eval_strategy` out."
            )
        if split not in data:
            raise CommandError(
                f"`--{argument}` is `{split}`, but the data set has no such split. Choose from: {', '.join(data)}."
            )
    parts = [data[split] for split in splits.values()]
    if most_rows is not None:
        # A streaming data set has no `select`
        parts = [x.select(range(min(most_rows, len(x)))) if hasattr(x, "select") else x for x in parts]
    return parts[0], parts[1] if len(parts) > 1 else None


def _loaded(script: Any) -> Any:
    """Return the splits of `--dataset_name`: a file, a folder, or a data set on the Hub."""
    name = script.dataset_name
    options = {"name": script.dataset_config, "streaming": script.dataset_streaming}
    file_format = DATA_FORMATS.get(Path(name).suffix)
    exists = os.path.exists(name)
    why = ""
    try:
        if file_format is None or os.path.isdir(name):
            return load_dataset(name, **options)
        if exists:
            return load_dataset(file_format, data_files=name, **options)
    except StopIteration:
        raise CommandError(f"`--dataset_name` is `{name}`, which has no rows.") from None
    except DatasetGenerationError as error:
        why = one_line(error.__cause__ or error)
        raise CommandError(f"`--dataset_name {name}` cannot be read: {why.rstrip('.')}.") from error
    except Exception as error:
        why = one_line(error).rstrip(".")
        if "BuilderConfig" in why or "Config name" in why:
            given_config = f", got {script.dataset_config}" if script.dataset_config else ""
            raise CommandError(
                f"`--dataset_config` must be a config of `--dataset_name {name}`{given_config}: {why}."
            ) from error
        if exists and getattr(error, "errno", None) is not None:  # such as a cache that cannot be written to
            raise CommandError(f"`--dataset_name {name}` cannot be read: {why}.") from error
        if exists:
            file_types = ", ".join(DATA_FORMATS)
            problem = f"no rows that {file_format} can read"
            if os.path.isdir(name):
                problem = f"no file that can be read ({file_types})"
            raise CommandError(f"`--dataset_name {name}` has {problem}: {why}.") from error
        why = "" if file_format else f" ({why})"
    problem = "file" if file_format else f"folder, and no data set of this name can be loaded from the Hub{why}"
    raise CommandError(f"`--dataset_name` is `{name}`, but there is no such {problem}. Current folder: {os.getcwd()}.")


def run(line: Line, process: Process) -> int:
    """Train, and save the model."""
    return run_in_processes(line, process, _train)


def run_in_processes(line: Line, process: Process, action: Callable[[str, Parsed], Any]) -> int:
    """Call `action`, which returns a trainer, in this process or in those that `accelerate launch` starts."""
    variables = line.in_file.get("env") or {}
    sets_variables = any(os.environ.get(name) != str(value) for name, value in variables.items())
    if process.may_launch and str(line.value("num_processes")) == "1":
        # Before CUDA starts: Hugging Face's Trainer would use all GPUs that one process sees
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    parsed_arguments = parse(
        OneLineParser(dataclasses_of(line.method), prog=line.prog), line, may_launch=process.may_launch
    )
    launch_arguments = [*parsed_arguments.launch_of_file, *parsed_arguments.launch]
    # Libraries read the environment when they are imported, so variables that a file sets need a new process
    if process.may_launch and (needs_launch(launch_arguments) or sets_variables):
        words = [*line.prog.split()[1:], *without(parsed_arguments.launch, line.all_words)]
        if process.shows_traceback:
            words.append("--traceback")
        return launch(launch_arguments, words)
    _check_packages(parsed_arguments.training)
    checkpoint = parsed_arguments.training.resume_from_checkpoint
    is_switch = checkpoint in (None, True, False, "auto", "true", "false", "True", "False")
    if not is_switch and not os.path.isdir(checkpoint):
        remedy = f"Pass a checkpoint, or `auto` for the last one in `--output_dir`. Current folder: {os.getcwd()}."
        raise CommandError(f"`--resume_from_checkpoint` is `{checkpoint}`, but there is no such folder. {remedy}")
    trainer = action(line.method, parsed_arguments)
    if hasattr(trainer, "end"):  # transformers 5.18 and later: closes the trackers and the process group
        trainer.end()
    return 0


# What `pip` calls the packages of `--report_to` with other names
_PACKAGES = {"azure_ml": "azureml-core", "comet_ml": "comet-ml"}


def _check_packages(training: Any) -> None:
    """Raise `CommandError` for an optional package that is not installed."""
    integrations = [*INTEGRATION_TO_CALLBACK]
    installed = get_available_reporting_integrations()
    for name in training.report_to:
        if name not in integrations:
            choices = ", ".join(map(repr, ["all", "none", *integrations]))
            raise CommandError(f"Unknown `--report_to` {name!r}. Choose from: {choices}.")
        if name not in (*installed, "flyte", "kubeflow"):  # transformers does not list these two
            package = _PACKAGES.get(name, name)
            raise CommandError(
                f"`--report_to {name}` needs a package that is not installed. Run `pip install {package}`, or pass "
                "`--report_to none`."
            )
    if getattr(training, "use_vllm", False) and importlib.util.find_spec("vllm") is None:
        raise CommandError(
            '`--use_vllm` needs vLLM, which is not installed. Run `pip install ".[vllm]"` in a clone of trl_ext (this '
            "also installs a version of transformers that vLLM supports), or leave `--use_vllm` out."
        )


def _train(method: str, parsed_arguments: Parsed) -> Any:
    training = parsed_arguments.training
    if training.push_to_hub and is_offline_mode():
        raise CommandError(
            "`--push_to_hub` needs the Hub, which is offline (`HF_HUB_OFFLINE`). Unset it, or leave `--push_to_hub` "
            "out."
        )
    trainer = build(method, parsed_arguments)
    try:
        trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    except Exception as error:
        if trainer.state.global_step == 0:
            raise
        raise TrainingStoppedError(
            f"Training stopped after step {trainer.state.global_step}. Checkpoints are in {training.output_dir}. To "
            "resume from the last complete one, or start over if there is none, pass `--resume_from_checkpoint auto`."
        ) from error
    trainer.save_model(training.output_dir)
    if training.push_to_hub:
        trainer.push_to_hub(dataset_name=parsed_arguments.script.dataset_name)
    return trainer
