"""TRL's own command `trl`, run in this process until it would train."""

import importlib
import re
import warnings
from typing import Any

import pytest
from trl.cli.accelerate_launcher import launch_training_script
from trl.cli.main import main


def stock_says(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> str:
    """Return the last line that the user of `trl` reads. Runs its script here, not under `accelerate launch`."""

    def run_here(args: Any) -> None:
        script = importlib.import_module(f"trl.scripts.{words[0]}")
        parsed = script.make_parser().parse_args_and_config(args.training_script_args, fail_with_unknown_args=False)
        script.main(*parsed)

    assert launch_training_script.__kwdefaults__ is not None
    monkeypatch.setitem(launch_training_script.__kwdefaults__, "launch_command_fn", run_here)
    capsys.readouterr()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            main(words)
    except SystemExit:
        lines = [x for x in capsys.readouterr().err.splitlines() if x.strip()]
        return lines[-1] if lines else ""
    except Exception as error:
        return re.sub(r"\s+", " ", f"{type(error).__name__}: {error}")
    return ""
