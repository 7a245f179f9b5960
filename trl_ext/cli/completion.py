"""The command `completion`: a script for the shell that holds all arguments, so that completing starts no Python."""

import argparse
import contextlib
import sys
from collections.abc import Collection
from typing import Any

import shtab

from .line import METHODS

FILES = (
    "accelerate_config",
    "config",
    "dataset_name",
    "model_name_or_path",
    "output_dir",
    "plan_output",
    "reward_model_name_or_path",
)


def run(shell: str, commands: dict[str, str]) -> None:
    """Print the script. Libraries that print while they are imported print to stderr."""
    with contextlib.redirect_stdout(sys.stderr):
        parser = _parser_of_all(commands)
    print(shtab.complete(parser, shell))


def _parser_of_all(texts: dict[str, str]) -> argparse.ArgumentParser:
    from ..compat.choices import (
        ADVANTAGE_CHOICES,
        DPO_CHOICES,
        GRPO_CHOICES,
    )
    from ..losses.loss_types import DPO_LOSS_TYPES, GRPO_LOSS_TYPES, KTO_LOSS_TYPES, SFT_LOSS_TYPES
    from ..losses.preference import PREFERENCE_LOSSES
    from .arguments import REWARDS, OneLineParser, dataclasses_of
    from .estimate import EstimateArguments
    from .plan import PlanArguments

    # Values that TRL checks only in the first step, so that its parser does not know them
    choices: dict[str, dict[str, Collection[str]]] = {
        "dpo": {**DPO_CHOICES, "loss_type": (*DPO_LOSS_TYPES, *PREFERENCE_LOSSES)},
        "grpo": {**GRPO_CHOICES, "loss_type": GRPO_LOSS_TYPES, **ADVANTAGE_CHOICES, "reward_funcs": REWARDS},
        "sft": {"loss_type": SFT_LOSS_TYPES},
        "kto": {"loss_type": KTO_LOSS_TYPES},
        "rloo": {"reward_funcs": REWARDS},
    }

    def add_method(subparsers: Any, method: str, *further: type) -> None:
        types = (*dataclasses_of(method), *further)
        added = subparsers.add_parser(method, help=texts[method], dataclass_types=types)
        for argument in ("--config", "--accelerate_config"):
            added.add_argument(argument, help="a YAML file")
        for action in added._actions:
            if action.dest in FILES:
                action.complete = shtab.FILE
            action.choices = action.choices or choices[method].get(action.dest)

    further: dict[str, list[type]] = {"explain": [], "estimate": [EstimateArguments], "plan": [PlanArguments]}
    parser = argparse.ArgumentParser(prog="trl-ext")
    commands: Any = parser.add_subparsers(parser_class=OneLineParser)
    for name, text in texts.items():
        if name in METHODS:
            add_method(commands, name)
            continue
        command = commands.add_parser(name, help=text)
        if name in further:
            methods = command.add_subparsers(parser_class=OneLineParser)
            for method in METHODS:
                add_method(methods, method, *further[name])
        elif name == "completion":
            command.add_argument("shell", choices=shtab.SUPPORTED_SHELLS)
    return parser
