"""The commands `dpo`, `grpo` and `explain`: the trainer is built as it is asked for, and trains or shows its plan."""

import subprocess
import tempfile
from typing import Any

from .arguments import OneLineParser, Parsed, dataclasses_of, method_of, parse
from .building import build
from .errors import TrainingStoppedError
from .launching import launch, needs_launch

# Rows of the data set that `explain` builds the trainer on: the plan does not depend on how many there are
_ROWS_TO_EXPLAIN = 64


def run(command: str, arguments: list[str], *, may_launch: bool, shows_traceback: bool) -> int:
    """`dpo`, `grpo` or `explain` with its arguments, in this process or in those that `accelerate launch` starts."""
    method, rest = method_of(arguments, command) if command == "explain" else (command, arguments)
    words = [command, method] if command == "explain" else [command]
    parser = OneLineParser(dataclasses_of(method), prog=f"trl-ext {' '.join(words)}")
    parsed = Parsed(*parse(parser, rest, may_launch=may_launch))
    launch_arguments = [*parsed.launch_of_file, *parsed.launch]
    # Libraries read the environment when they are imported: what a file has set is read in a new process
    if may_launch and (needs_launch(launch_arguments) or parser.set_environment):
        flags = ["--traceback"] if shows_traceback else []
        try:
            return launch(launch_arguments, [*words, *_without(rest, parsed.launch), *flags])
        except subprocess.CalledProcessError as error:
            return error.returncode  # it has said why
    if command == "explain":
        _explain(method, parsed)
    else:
        _train(method, parsed)
    return 0


def _explain(method: str, parsed: Parsed) -> None:
    training = parsed.training
    training.push_to_hub = training.log_completions = False  # TRL makes a repository of completions as it is built
    with tempfile.TemporaryDirectory() as folder:
        training.output_dir = folder
        trainer = build(method, parsed, most_rows=_ROWS_TO_EXPLAIN)
        plan = trainer.explain()
    if trainer.accelerator.is_main_process:
        print(plan)
        for warning in plan.warnings:
            print(f"warning: {warning}")
    _end(trainer)


def _train(method: str, parsed: Parsed) -> None:
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
    _end(trainer)


def _end(trainer: Any) -> None:
    if hasattr(trainer, "end"):  # transformers 5.18 and later: closes the trackers and the process group
        trainer.end()


def _without(arguments: list[str], launch_arguments: list[str]) -> list[str]:
    """`arguments` without those of the launch, which stand among them in the same order."""
    left, kept = list(launch_arguments), []
    for argument in arguments:
        if left and argument == left[0]:
            left.pop(0)
        else:
            kept.append(argument)
    return kept
