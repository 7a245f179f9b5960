"""Which methods run code of the user is found out when a plan is made, and not again in each loss."""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import trl_ext
from short_training import Bench
from tiny import Workshop

PACKAGE = str(Path(trl_ext.__file__).parent)


@pytest.mark.parametrize("kind", ["sft", "dpo", "kto", "grpo", "rloo", "reward"])
def test_a_loss_does_not_look_for_overrides(kind: str, workshop: Workshop, tmp_path: Path) -> None:
    depth = 0
    entered: set[str] = set()

    def record(frame: FrameType, event: str, _: Any) -> None:
        nonlocal depth
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE):
            return
        if code.co_name == "compute_loss":
            depth += {"call": 1, "return": -1}.get(event, 0)
        elif depth and event == "call":
            entered.add(code.co_filename.removeprefix(f"{PACKAGE}/"))

    bench = Bench(workshop, tmp_path)
    sys.setprofile(record)
    try:
        getattr(bench, kind)(max_steps=2)
    finally:
        sys.setprofile(None)
    forward = "classifier" if kind == "reward" else "forward"
    assert {"trainers/base.py", f"scoring/{forward}.py"} <= entered
    assert not entered & {"compat/overrides.py", "compat/readers.py"}
