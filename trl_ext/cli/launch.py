"""The arguments for `accelerate launch` in a command, and the processes that it starts."""

import os
import subprocess
import sys
from typing import Any

import torch
from accelerate.commands.config.config_args import default_config_file, load_config_from_file
from accelerate.commands.launch import launch_command, launch_command_parser
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from ..checks.names import did_you_mean
from ..compat.choices import accelerate_configs, launch_words_of_config
from . import CommandError, one_line
from .line import Line, refuse_word

# Arguments with a minimum; accelerate would take 0 or less as if nothing was given
_LEAST = {"num_processes": 1, "num_machines": 1, "machine_rank": 0, "main_process_port": 0}


def with_config_file(words: list[str]) -> list[str]:
    """Return words for `accelerate launch`, with a file in place of the name of a config that TRL ships."""
    word_parts = [word.split("=", 1) if word.startswith("--accelerate_config=") else [word] for word in words]
    words = [part for parts in word_parts for part in parts]
    if "--accelerate_config" in words:
        at = words.index("--accelerate_config") + 1
        config = words[at] if at < len(words) else ""
        shipped_configs = accelerate_configs()
        if not os.path.isfile(config) and config not in shipped_configs:
            problem = f"is `{config}`, which is neither a file nor a config of TRL." if config else "has no value."
            hint = did_you_mean(config, shipped_configs)
            raise CommandError(f"`--accelerate_config` {problem}{hint} Choose from: {', '.join(shipped_configs)}.")
    return launch_words_of_config(words)


def check_launch(launcher: Any, arguments: list[str], line: Line) -> None:
    """Raise `CommandError` for a word, a number or a config file with which `accelerate launch` starts no processes."""
    # It would run the first word that is neither an argument nor its value
    options = launcher.parse_args([*with_config_file(arguments), "-m", line.prog])
    if options.training_script != line.prog:
        refuse_word(options.training_script, line)
    for name, least in _LEAST.items():
        value = getattr(options, name, None)
        if value is not None and value < least:
            raise CommandError(f"`--{name}` must be {least} or more, got {value}.")
    file = options.config_file
    if file is None:
        return
    if not os.path.isfile(file):
        raise CommandError(f"`--config_file` is `{file}`, but there is no such file. Current folder: {os.getcwd()}.")
    try:
        load_config_from_file(file)
    except Exception as error:  # accelerate raises errors of many types for wrong content
        raise CommandError(
            f"`--config_file {file}` is not a config of accelerate: {one_line(error).rstrip('.')}. `accelerate config` "
            "makes one."
        ) from error


def launch_words(in_file: dict[str, Any], launcher: Any) -> list[str]:
    """Return arguments of a YAML file as `accelerate launch` reads them: flags without values, lists with commas."""
    words: list[str] = []
    for name, value in in_file.items():
        action = launcher._option_string_actions.get(f"--{name}")
        if action is not None and action.nargs == 0:
            if not isinstance(value, bool):
                raise CommandError(f"`{name}` must be true or false, got {value!r}.")
            words += [f"--{name}"] * value
        elif value is not None:
            if value is False and action.choices:
                value = "no"  # YAML reads `no` as false
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            words += [f"--{name}", text.lower() if isinstance(value, bool) else text]
    return words


def asks_for_one_process(launch_arguments: list[str]) -> bool:
    """Return whether `--num_processes 1` is the only argument for `accelerate launch`."""
    return " ".join(launch_arguments).replace("=", " ") == "--num_processes 1"


def needs_launch(launch_arguments: list[str]) -> bool:
    """Return whether there are arguments or a default file for `accelerate launch`, or several GPUs."""
    if asks_for_one_process(launch_arguments):
        return False
    return bool(launch_arguments) or os.path.isfile(default_config_file) or torch.cuda.device_count() > 1


def without(launch_arguments: list[str], words: list[str]) -> list[str]:
    """Return the words without the arguments for `accelerate launch`, which are among them in the same order."""
    to_skip = list(launch_arguments)
    other_words = []
    for word in words:
        if to_skip and word == to_skip[0]:
            to_skip.pop(0)
        else:
            other_words.append(word)
    return other_words


def launch(launch_arguments: list[str], arguments: list[str]) -> int:
    """Run the command with `arguments` in new processes, one or several; return the first failure's status."""
    if asks_for_one_process(launch_arguments):
        return subprocess.run([sys.executable, "-m", "trl_ext.cli", *arguments]).returncode
    options = [*with_config_file(launch_arguments), "-m", "trl_ext.cli", *arguments]
    try:
        launch_command(launch_command_parser().parse_args(options))
    except subprocess.CalledProcessError as error:  # the process has printed its error
        return error.returncode
    except ChildFailedError as error:
        return int(error.get_first_failure()[1].exitcode)
    return 0
