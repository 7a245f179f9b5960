"""The commands of `trl-ext`. A new one is an object in `COMMANDS`, and a file of its name with a function `run`.

That file imports torch and TRL, so it is imported only then: after `--version`, `--help` and the checks of `line.py`.
"""

import gc
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

from . import CommandError, ReportedError, TrainingStoppedError, one_line
from .demo import demo_words
from .errors import as_typed, of_environment
from .line import METHODS, Line, check, check_output, read, read_method

HELP = ("-h", "--help")


@dataclass(frozen=True)
class Process:
    """What the process that runs a command may do."""

    may_launch: bool  # False in one that torchrun or `accelerate launch` has started: it starts no others
    shows_traceback: bool


def _imported(name: str) -> Any:
    """Return the module `name` of this package."""
    was_enabled = gc.isenabled()
    # Torch and TRL make many objects and little garbage: a quarter of the import would be a search for it
    gc.disable()
    try:
        return import_module(f".{name}", __package__)
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True)
class Command:
    """A command without arguments."""

    name: str
    help: str  # in the list of commands
    usage: ClassVar[str | None] = ""  # what follows the name; `None`: its arguments have a `--help` of their own

    def run(self, words: list[str], process: Process) -> int:
        """Run with the `words` after the name, and return the exit status."""
        if words:
            raise CommandError(f"`{self.name}` takes no arguments, got `{words[0]}`.")
        return int(import_module(f".{self.name}", __package__).run())


@dataclass(frozen=True)
class MethodCommand(Command):
    """A command about a training: a method and the arguments of the training follow its name."""

    reads_data: bool = True  # so that a data set must be given
    usage: ClassVar[str | None] = f" {{{','.join(METHODS)}}} [ARGUMENTS]"

    def run(self, words: list[str], process: Process) -> int:
        line = self.read(words)
        try:
            return int(_imported(self.file).run(line, process))
        except (CommandError, TrainingStoppedError) as error:
            error.add_note(line.where(str(error)) + of_environment(str(error)))
            raise
        except Exception as error:
            if process.shows_traceback:
                raise
            raise ReportedError(as_typed(one_line(error), line)) from error

    @property
    def file(self) -> str:
        return self.name

    def read(self, words: list[str]) -> Line:
        """Return the words, checked as far as they can be without the types of the arguments."""
        line = read_method(self.name, words)
        check(line, reads_data=self.reads_data)
        return line


class Compare(MethodCommand):
    """Without a model and data, it compares on those of the demo."""

    def read(self, words: list[str]) -> Line:
        line = read_method(self.name, words)
        if not line.asks_for_help and line.value("model_name_or_path") is None and line.value("dataset_name") is None:
            words = [line.method, *demo_words(line.method), *words[1:]]
        return super().read(words)


class Train(MethodCommand):
    """A method, whose name is the command."""

    usage = None

    @property
    def file(self) -> str:
        return "training"

    def read(self, words: list[str]) -> Line:
        line = read(self.name, f"trl-ext {self.name}", words)
        check(line, reads_data=True)
        check_output(line)
        return line


_WORDS = {"reward": "train a reward model", "distillation": "distill a teacher into a model (or `distill`)"}
COMMANDS: dict[str, Command] = {
    command.name: command
    for command in (
        *(Train(method, _WORDS.get(method, f"train with {method.upper()}")) for method in METHODS),
        MethodCommand("explain", "show what a run computes, reuses and skips, and why"),
        MethodCommand(
            "estimate", "estimate the memory of a training step, and the longest sequence that fits", reads_data=False
        ),
        MethodCommand("plan", "find the batch, checkpointing and engine that fit, and show the fastest first"),
        Compare("compare", "compare a few steps of TRL and of trl_ext: results, tokens, time, memory"),
        Command("doctor", "check versions, devices and the engine, and test the LM head on each device"),
    )
}
