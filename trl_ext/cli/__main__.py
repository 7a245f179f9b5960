"""`trl-ext`: runs one command. It exits with status 0, or with one line on stderr and status 2.

Each command imports torch and TRL when it needs them: after `--version`, the overview and the checks of `line.py`.
"""

import os
import re
import signal
import sys
import warnings

from ..version import __version__
from . import CommandError, ReportedError, TrainingStoppedError, did_you_mean, one_line, wrapped
from .errors import as_typed, of_environment
from .line import METHODS, read

COMMANDS = {
    "sft": "train with SFT",
    "dpo": "train with DPO",
    "kto": "train with KTO",
    "grpo": "train with GRPO",
    "rloo": "train with RLOO",
    "explain": "show what a run computes, reuses and skips, and why",
    "estimate": "estimate the memory of a training step, and the longest sequence that fits",
    "plan": "find the batch, checkpointing and engine that fit, the fastest first",
    "doctor": "check versions, devices and the engine, and test the LM head on each device",
}
# What follows a command that is not a method
_METHOD = f" {{{','.join(METHODS)}}} [ARGUMENTS]"
_FOLLOWED_BY = {
    "explain": _METHOD,
    "estimate": _METHOD,
    "plan": _METHOD,
    "doctor": "",
}
_HELP = ("-h", "--help")
_OVERVIEW = """usage: trl-ext [--version] COMMAND [ARGUMENTS]

TRL's trainers with exact log-probs and less work.

commands:"""
_OF_LAUNCHED = {"LOCAL_RANK", "WORLD_SIZE"}, {"ACCELERATE_DYNAMO_BACKEND", "ACCELERATE_MIXED_PRECISION"}


def main(argv: list[str] | None = None) -> int:
    """Run one command with the arguments in `argv`, by default those of the process, and return the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    shows_traceback = "--traceback" in arguments
    arguments = [argument for argument in arguments if argument != "--traceback"]
    name = arguments[0] if arguments and arguments[0] in COMMANDS else ""
    prints = name not in METHODS or not {*_HELP}.isdisjoint(arguments)
    if argv is None and prints and hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` closes the pipe
    # A process of torchrun or `accelerate launch` starts no others. A user may set one of the variables, not both
    may_launch = not any(os.environ.keys() >= names for names in _OF_LAUNCHED)
    try:
        with warnings.catch_warnings():
            # TRL's configs call gradient checkpointing by the name that transformers 5.23 has replaced
            warnings.filterwarnings("ignore", "`(is_)?gradient_checkpointing", FutureWarning)
            return _run(arguments, may_launch, shows_traceback)
    except TrainingStoppedError:
        raise
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if shows_traceback:
            raise
        said = str(error) if isinstance(error, ReportedError) else one_line(error)
        said = "".join([said, *getattr(error, "__notes__", ())])
        if unknown := re.search(r"'(\w+)'\.( Choose from: .*)", said):
            hint = did_you_mean(unknown[1], re.findall(r"'(\w+)'", unknown[2]))
            said = said.replace(unknown[2], hint + unknown[2])
        # An open progress bar has no line break
        for bar in [*getattr(getattr(sys.modules.get("tqdm"), "tqdm", None), "_instances", ())]:
            bar.close()
        hint = "" if isinstance(error, CommandError) else " (`--traceback` shows where)"
        print(f"{' '.join(filter(None, ['trl-ext', name]))}: error: {said}{hint}", file=sys.stderr)
        return 2


def _run(arguments: list[str], may_launch: bool, shows_traceback: bool) -> int:
    command, *rest = arguments or ["--help"]
    if command in _HELP:
        print(_OVERVIEW, *(wrapped(text, f"    {name:<14}") for name, text in COMMANDS.items()), sep="\n")
        print("\n`COMMAND --help` lists its arguments. `--traceback` shows where an error arose.")
    elif command == "--version":
        print(__version__)
    elif command not in COMMANDS:
        hint = did_you_mean(command, COMMANDS)
        raise CommandError(f"`{command}` is not a command.{hint} Choose from: {', '.join(COMMANDS)}.")
    elif command in _FOLLOWED_BY and rest and rest[0] in _HELP:
        print(f"usage: trl-ext {command}{_FOLLOWED_BY[command]}\n\n{COMMANDS[command].capitalize()}.")
        if "ARGUMENTS" in _FOLLOWED_BY[command]:
            print(f"\n`trl-ext {command} dpo --help` lists the arguments.")
    elif command == "doctor":
        if rest:
            raise CommandError(f"`doctor` takes no arguments, got `{rest[0]}`.")
        from . import doctor

        return doctor.run()
    else:
        line = read(command, rest)
        try:
            if command == "estimate":
                from . import estimate

                return estimate.run(line)
            if command == "plan":
                from . import plan

                return plan.run(line)
            from . import training

            return training.run(command, line, may_launch=may_launch, shows_traceback=shows_traceback)
        except (CommandError, TrainingStoppedError) as error:
            error.add_note(line.where(str(error)) + of_environment(str(error)))
            raise
        except Exception as error:
            if shows_traceback:
                raise
            raise ReportedError(as_typed(one_line(error), line)) from error
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
