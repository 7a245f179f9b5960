"""The command `explain`: what a training computes, reuses and skips, and why."""

import tempfile
from typing import Any

from ..checks.best_metric import check_best_metric
from . import training, wrapped
from .arguments import Parsed
from .commands import Process
from .line import Line

# Rows of the data set with which the trainer is built: the plan does not depend on their number
_ROWS = 64


def run(line: Line, process: Process) -> int:
    """Print the plan and its warnings."""
    return training.run_in_processes(line, process, _explain)


def _explain(method: str, parsed_arguments: Parsed) -> Any:
    arguments = parsed_arguments.training
    # With these, TRL's `__init__` creates a repository, also one of completions
    arguments.push_to_hub = False
    arguments.log_completions = False
    with tempfile.TemporaryDirectory() as folder:
        arguments.output_dir = folder
        trainer = training.build(method, parsed_arguments, most_rows=_ROWS)
        check_best_metric(trainer)
        plan = trainer.explain()
    if trainer.accelerator.is_main_process:
        print(plan)
        for warning in plan.warnings:
            print(wrapped(warning, "warning: "))
    return trainer
