"""`trl-ext dpo` and the like: build a trainer from arguments, and train in one or several processes."""

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from accelerate.commands.launch import launch_command, launch_command_parser
from datasets import load_dataset
from datasets.exceptions import DatasetGenerationError
from huggingface_hub import is_offline_mode
from peft import AutoPeftModelForCausalLM
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations
from trl import get_dataset, get_peft_config, get_quantization_config

from ..trainers.dpo import DPOTrainer
from ..trainers.grpo import GRPOTrainer
from ..trainers.kto import KTOTrainer
from ..trainers.rloo import RLOOTrainer
from ..trainers.sft import SFTTrainer
from . import CommandError, TrainingStoppedError, did_you_mean, one_line, wrapped
from .arguments import (
    REWARDS,
    OneLineParser,
    Parsed,
    asks_for_one_process,
    dataclasses_of,
    needs_launch,
    parse,
    with_config_file,
)
from .line import DATA_FORMATS, Line

TRAINERS: dict[str, Any] = {
    "sft": SFTTrainer,
    "dpo": DPOTrainer,
    "kto": KTOTrainer,
    "grpo": GRPOTrainer,
    "rloo": RLOOTrainer,
}


def rewards_of(script_args: Any) -> list[Any]:
    """Return the reward model, if any, and the functions of `--reward_funcs`, in TRL's order."""
    model = script_args.reward_model_name_or_path
    return [*([] if model is None else [model]), *map(_function, script_args.reward_funcs)]


def _function(given: str) -> Any:
    """Return the reward function `given`: `my_rewards.py:name`, `my_rewards.name`, or a name in `trl.rewards`."""
    place, mark, name = given.rpartition(":" if ":" in given else ".")
    file, folder = Path(place), os.getcwd()
    if not mark:
        if name not in REWARDS:
            raise CommandError(
                f"`--reward_funcs` has `{given}`, which is not in `trl.rewards`.{did_you_mean(given, REWARDS)} Pass "
                f"the file of your function, such as `my_rewards.py:{given}`, or one of {', '.join(REWARDS)}."
            )
        function = getattr(importlib.import_module("trl.rewards"), name)
        # The values of TRL's command
        soft = name == "get_soft_overlong_punishment"
        return function(max_completion_len=1280, soft_punish_cache=256) if soft else function
    if name == "py" or not name:
        given = given.removesuffix(":")
        raise CommandError(f"`--reward_funcs` has `{given}`, which names no function. Write `{given}:NAME`.")
    if not place:
        raise CommandError(f"`--reward_funcs` has `{given}`, which names no file. Write `FILE.py:{name}`.")
    if mark == ":" and file.suffix != ".py":
        raise CommandError(f"`--reward_funcs` has `{given}`, which names no Python file. Write `{place}.py:{name}`.")
    if mark == ":" and not file.is_file():
        raise CommandError(f"`--reward_funcs` has `{given}`, but there is no such file. Current folder: {folder}.")
    # As Python does, look for modules in the folder of the file, or in the current one
    sys.path.insert(0, str(file.parent.resolve()) if mark == ":" else folder)
    try:
        module = _module_of(file) if mark == ":" else _imported(place, given)
    except CommandError:
        raise
    except Exception as error:  # the user's code may raise anything
        why = one_line(error).rstrip(".")
        raise CommandError(f"`--reward_funcs` has `{given}`, but `{place}` cannot be imported: {why}.") from error
    if not callable(getattr(module, name, None)):
        close = did_you_mean(name, [x for x, value in vars(module).items() if callable(value)])
        raise CommandError(f"`--reward_funcs` has `{given}`, but `{place}` has no function `{name}`.{close}")
    return getattr(module, name)


def _module_of(file: Path) -> Any:
    unique = f"reward_functions_{file.stem}"  # not the name of an installed module
    loaded = sys.modules.get(unique)
    if loaded is not None and loaded.__file__ == str(file.resolve()):
        return loaded
    spec: Any = importlib.util.spec_from_file_location(unique, file.resolve())
    module = sys.modules[unique] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _imported(name: str, given: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module exists, and imports another that does not
        raise CommandError(
            f"`--reward_funcs` has `{given}`, but there is no module `{name}` in {os.getcwd()} or among the installed "
            "packages. Pass its file, such as `path/to/my_rewards.py:brevity`."
        ) from error


def build(method: str, parsed: Parsed, *, most_rows: int | None = None) -> Any:
    """Return the trainer, ready to train, with at most the first `most_rows` of each data set."""
    script, training, model_args, mixture, *_ = parsed
    rewards = {"reward_funcs": rewards_of(script)} if method in ("grpo", "rloo") else {}
    train, evaluation = data_sets(script, training, mixture, most_rows)
    model, quantization_config = _model(training, model_args)
    trainer = TRAINERS[method](
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


def model_init_arguments(training: Any, model_args: Any) -> dict[str, Any]:
    """Return the arguments that load the model, as in TRL's scripts."""
    return {
        "dtype": model_args.dtype,
        "attn_implementation": model_args.attn_implementation,
        "trust_remote_code": training.trust_remote_code,
        **(training.model_init_kwargs or {}),
    }


def is_adapter(name: str) -> bool:
    """Return whether `name` is the folder of a PEFT adapter."""
    return os.path.isfile(os.path.join(name, "adapter_config.json"))


def _model(training: Any, model_args: Any) -> tuple[Any, Any]:
    """Return the model or its name, and the quantization with which the trainer loads it."""
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


def data_sets(script: Any, training: Any, mixture: Any, most_rows: int | None) -> tuple[Any, Any]:
    """Return the rows to train on and those to evaluate, each at most the first `most_rows`."""
    data = get_dataset(mixture) if mixture.datasets else _loaded(script)
    wanted = {"dataset_train_split": script.dataset_train_split}
    if training.eval_strategy != "no":
        wanted["dataset_test_split"] = script.dataset_test_split
    for argument, split in wanted.items():
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
    found = [data[split] for split in wanted.values()]
    if most_rows is not None:
        found = [x.select(range(min(most_rows, len(x)))) if hasattr(x, "select") else x for x in found]
    return found[0], found[1] if len(found) > 1 else None


def _loaded(script: Any) -> Any:
    """Return the splits of `--dataset_name`: a file, a folder, or a data set on the Hub."""
    name, options = script.dataset_name, {"name": script.dataset_config, "streaming": script.dataset_streaming}
    file, is_there, why = DATA_FORMATS.get(Path(name).suffix), os.path.exists(name), ""
    try:
        if file is None or os.path.isdir(name):
            return load_dataset(name, **options)
        if is_there:
            return load_dataset(file, data_files=name, **options)
    except StopIteration:
        raise CommandError(f"`--dataset_name` is `{name}`, which has no rows.") from None
    except DatasetGenerationError as error:
        why = one_line(error.__cause__ or error)
        raise CommandError(f"`--dataset_name {name}` cannot be read: {why.rstrip('.')}.") from error
    except Exception as error:
        why = one_line(error).rstrip(".")
        if "BuilderConfig" in why or "Config name" in why:
            given = f", got {script.dataset_config}" if script.dataset_config else ""
            raise CommandError(f"`--dataset_config` must be one of `--dataset_name {name}`{given}: {why}.") from error
        if is_there and getattr(error, "errno", None) is not None:  # such as a cache that cannot be written to
            raise CommandError(f"`--dataset_name {name}` cannot be read: {why}.") from error
        if is_there:
            known = ", ".join(DATA_FORMATS)
            what = f"no file that can be read ({known})" if os.path.isdir(name) else f"no rows that {file} can read"
            raise CommandError(f"`--dataset_name {name}` has {what}: {why}.") from error
        why = "" if file else f" ({why})"
    what = "file" if file else f"folder, and no data set of this name can be loaded from the Hub{why}"
    raise CommandError(f"`--dataset_name` is `{name}`, but there is no such {what}. Current folder: {os.getcwd()}.")


def launch(launch_arguments: list[str], arguments: list[str]) -> int:
    """Run the command with `arguments` in the processes that accelerate starts; return the first failure's status."""
    options = [*with_config_file(launch_arguments), "-m", "trl_ext.cli", *arguments]
    try:
        launch_command(launch_command_parser().parse_args(options))
    except subprocess.CalledProcessError as error:  # the process has printed its error
        return error.returncode
    except ChildFailedError as error:
        return int(error.get_first_failure()[1].exitcode)
    return 0


# Rows of the data set with which `explain` builds the trainer: the plan does not depend on their number
_ROWS_TO_EXPLAIN = 64


def run(command: str, line: Line, *, may_launch: bool, shows_traceback: bool) -> int:
    """Run a method or `explain`, in this process or in those that `accelerate launch` starts."""
    # Libraries read the environment when they are imported, so variables that a file sets need a new process
    variables = line.in_file.get("env")
    new = isinstance(variables, dict) and any(os.environ.get(x) != str(value) for x, value in variables.items())
    if may_launch and str(line.value("num_processes")) == "1":
        # Before CUDA starts: Hugging Face's Trainer would use all GPUs that one process sees
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    parsed = Parsed(*parse(OneLineParser(dataclasses_of(line.method), prog=line.prog), line, may_launch=may_launch))
    launch_arguments = [*parsed.launch_of_file, *parsed.launch]
    if may_launch and (needs_launch(launch_arguments) or new):
        left = list(parsed.launch)  # all are also in `line.whole`, in the same order
        words = [x for x in line.whole if x not in left[:1] or not left.pop(0)]
        words = [*line.prog.split()[1:], *words, *["--traceback"] * shows_traceback]
        if asks_for_one_process(launch_arguments):
            return subprocess.run([sys.executable, "-m", "trl_ext.cli", *words]).returncode
        return launch(launch_arguments, words)
    _check_packages(parsed.training)
    resumed = parsed.training.resume_from_checkpoint
    if resumed not in (None, True, False, "auto", "true", "false", "True", "False") and not os.path.isdir(resumed):
        known = f"Pass a checkpoint, or `auto` for the last one in `--output_dir`. Current folder: {os.getcwd()}."
        raise CommandError(f"`--resume_from_checkpoint` is `{resumed}`, but there is no such folder. {known}")
    trainer = _explain(line.method, parsed) if command == "explain" else _train(line.method, parsed)
    if hasattr(trainer, "end"):  # transformers 5.18 and later: closes the trackers and the process group
        trainer.end()
    return 0


# What `pip` calls the packages of `--report_to` with other names
_PACKAGES = {"azure_ml": "azureml-core", "comet_ml": "comet-ml"}


def _check_packages(training: Any) -> None:
    """Raise `CommandError` for an optional package that is not installed."""
    known, installed = [*INTEGRATION_TO_CALLBACK], get_available_reporting_integrations()
    for name in training.report_to:
        if name not in known:
            choices = ", ".join(map(repr, ["all", "none", *known]))
            raise CommandError(f"Unknown `--report_to` {name!r}. Choose from: {choices}.")
        if name not in (*installed, "flyte", "kubeflow"):  # transformers does not list these two
            package = _PACKAGES.get(name, name)
            raise CommandError(
                f"`--report_to {name}` needs a package that is not installed. Run `pip install {package}`, or pass "
                "`--report_to none`."
            )
    if getattr(training, "use_vllm", False) and importlib.util.find_spec("vllm") is None:
        raise CommandError(
            '`--use_vllm` needs vLLM, which is not installed. Run `pip install ".[vllm]"` in a clone of trl_ext, which '
            "also installs a version of transformers that vLLM takes, or leave `--use_vllm` out."
        )
    if training.push_to_hub and is_offline_mode():
        raise CommandError(
            "`--push_to_hub` needs the Hub, which is offline (`HF_HUB_OFFLINE`). Unset it, or leave `--push_to_hub` "
            "out."
        )


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
            print(wrapped(warning, "warning: "))
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
            f"Training stopped after step {trainer.state.global_step}. Checkpoints are in {training.output_dir}. To "
            "resume from the last complete one, or start over if there is none, pass `--resume_from_checkpoint auto`."
        ) from error
    trainer.save_model(training.output_dir)
    trainer.accelerator.print(f"Model saved to {training.output_dir}.")
    if training.push_to_hub:
        trainer.push_to_hub(dataset_name=parsed.script.dataset_name)
    return trainer
