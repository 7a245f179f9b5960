"""The pinned versions are tested ones and give no warning; others give one, which is no error in these tests."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from later_trl import environment_of
from trl_ext.compat import FOUND
from trl_ext.version import TESTED

ROOT = Path(__file__).parents[2]
PINS = dict(re.findall(r"^([a-z]+)==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))


def run(*command: object, environment: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    python = [sys.executable, *map(str, command)]
    return subprocess.run(python, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=500)


def test_the_pinned_versions_are_tested_ones() -> None:
    assert [name for name in TESTED if PINS[name] not in TESTED[name]] == []


@pytest.mark.skipif(any(FOUND[name] not in TESTED[name] for name in FOUND), reason="for tested versions")
def test_tested_versions_give_no_warning() -> None:
    done = run("-W", "error", "-c", "from trl_ext import DPOTrainer", environment={**os.environ})
    lines = (done.stdout + done.stderr).splitlines()
    # bitsandbytes says so on CPUs with bf16 instructions, if the package `kernels` is not installed
    lines = [line for line in lines if not line.startswith("Failed to load CPU gemm_4bit_forward")]
    assert (done.returncode, lines) == (0, [])


def test_an_untested_version_is_no_error_when_tests_are_collected(tmp_path: Path) -> None:
    metadata = tmp_path / "accelerate-1.99.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Name: accelerate\nVersion: 1.99.0\n")
    environment = environment_of(tmp_path)
    warned = run("-c", "import trl_ext.compat", environment=environment)
    assert "is not tested with accelerate 1.99.0" in warned.stderr
    done = run("-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", __file__, environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr
