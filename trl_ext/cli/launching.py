"""`accelerate launch` for the commands that train, where several processes or an engine are asked for."""

import os

import torch
from accelerate.commands.config.config_args import default_config_file
from accelerate.commands.launch import launch_command, launch_command_parser
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from ..compat import resolve_accelerate_config_argument


def needs_launch(launch_arguments: list[str]) -> bool:
    """Whether `accelerate launch` has something to do: it was given arguments, a default file, or several GPUs."""
    return bool(launch_arguments) or os.path.isfile(default_config_file) or torch.cuda.device_count() > 1


def launch(launch_arguments: list[str], arguments: list[str]) -> int:
    """Run the command line with `arguments` in the processes that accelerate starts; the status of the first to fail.

    Raises:
        `subprocess.CalledProcessError`: the one process that there was has failed.
    """
    options = [*resolve_accelerate_config_argument(launch_arguments), "-m", "trl_ext.cli", *arguments]
    try:
        launch_command(launch_command_parser().parse_args(options))
    except ChildFailedError as error:
        return int(error.get_first_failure()[1].exitcode)
    return 0
