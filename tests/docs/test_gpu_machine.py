"""benchmarks/gpu.sh works on a machine that has little more than torch and no network, and ends in time."""

import importlib.metadata as metadata
import json
import os
import shutil
import subprocess
import time
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
# What docs/performance.md asks of the machine, beside what these need
THERE = (
    "torch",
    "triton",
    "transformers",
    "accelerate",
    "peft",
    "pandas",
    "pyarrow",
    "xxhash",
    "pytest",
    "pytest-xdist",
    "hypothesis",
)
PROGRAMS = ("head", "training", "packing")
TESTS = ("reference/test_hosted_reference_gpu.py", "packing/test_packing_gpu.py", "heads/test_kernels.py")


def with_what_they_need(names: tuple[str, ...]) -> set[str]:
    found: set[str] = set()
    left = [*names]
    while left:
        name = left.pop().lower().replace("_", "-")
        try:
            needed = [] if name in found else [Requirement(text) for text in metadata.requires(name) or []]
        except metadata.PackageNotFoundError:  # such as Triton, which torch for the CPU comes without
            continue
        found.add(name)
        left += [x.name for x in needed if x.marker is None or x.marker.evaluate({"extra": ""})]
    return found


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables for gpu.sh: an interpreter that has what is `THERE`, and a folder with the wheels of wheels.txt."""
    folder = tmp_path_factory.mktemp("machine")
    venv.create(folder / "bare", symlinks=True)
    (site,) = (folder / "bare").glob("lib/python*/site-packages")
    for name in with_what_they_need(THERE):
        distribution = metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(str(distribution.locate_file(top)))
    (folder / "wheels").mkdir()
    for line in (ROOT / "benchmarks" / "wheels.txt").read_text().splitlines():
        name = line.split("==")[0]
        if line.startswith("#") or not is_there(name):
            continue
        distribution = metadata.distribution(name)
        with zipfile.ZipFile(folder / "wheels" / f"{name}-{distribution.version}-py3-none-any.whl", "w") as wheel:
            for file in distribution.files or ():
                if file.parts[0] != ".." and "__pycache__" not in file.parts:
                    wheel.write(str(file.locate()), str(file))
    return {
        "PATH": os.environ["PATH"],
        "PYTHON": str(folder / "bare" / "bin" / "python"),
        "WHEELS": str(folder / "wheels"),
        "DEVICE": "cpu",
        "HOME": str(folder),
    }


def is_there(name: str) -> bool:
    try:
        return bool(metadata.version(name))
    except metadata.PackageNotFoundError:
        return False


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    folder = tmp_path / "clone"
    folder.mkdir()
    for name in ("benchmarks", "docs", "tests", "trl_ext"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.jsonl"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def gpu_sh(clone: Path, part: str, variables: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    command = [str(clone / "benchmarks" / "gpu.sh"), part]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=500)


IMPORTS = """
import importlib.util, sys
sys.path[:0] = ["benchmarks"]
assert importlib.util.find_spec("mypy") is None  # the environment is a bare one
import head, training, packing, pytest
sys.exit(pytest.main(["--collect-only", "-q", "-W", "default", *sys.argv[1:]]))
"""


@pytest.mark.slow
def test_everything_that_runs_there_is_there_or_in_the_wheels(machine: dict[str, str], clone: Path, tmp_path: Path):
    script = (clone / "benchmarks" / "gpu.sh").read_text()
    assert all(f"benchmarks/{name}.py" in script for name in PROGRAMS)
    assert all(f"tests/{name}" in script for name in TESTS)
    for wheel in Path(machine["WHEELS"]).iterdir():
        zipfile.ZipFile(wheel).extractall(tmp_path / "unpacked")
    variables = machine | {"PYTHONPATH": f"{clone}:{tmp_path / 'unpacked'}"}
    command = [machine["PYTHON"], "-c", IMPORTS, *(f"tests/{name}" for name in TESTS)]
    done = subprocess.run(command, cwd=clone, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("part", ["head", "training"])
def test_each_call_measures_and_writes_to_both_folders(part: str, machine: dict[str, str], clone: Path, tmp_path: Path):
    (tmp_path / "out").mkdir()
    done = gpu_sh(clone, part, machine | {"OUT": str(tmp_path / "out")})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (kept,) = (clone / "runs" / "bench").iterdir()
    (out,) = (tmp_path / "out").iterdir()
    assert kept.read_text() == out.read_text()
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    measured = {line["benchmark"].split("_")[0] for line in lines}
    assert measured == ({"head"} if part == "head" else {"grpo", "dpo", "packing"})
    assert "trl" in {line["subject"] for line in lines}
    if part == "training":
        # A machine with few cores does not reach all tests within the limit of a call
        assert " PASSED " in done.stdout
        assert " FAILED " not in done.stdout


def test_a_call_ends_in_time_and_says_what_it_left_out(clone: Path, tmp_path: Path):
    slow = tmp_path / "python"
    slow.write_text('#!/bin/sh\n[ "$1" = -c ] || exec sleep 60\n')
    slow.chmod(0o755)
    begun = time.monotonic()
    done = gpu_sh(clone, "training", {"PATH": os.environ["PATH"], "PYTHON": str(slow), "LIMIT": "2"})
    assert time.monotonic() - begun < 20
    assert done.stdout.splitlines() == [
        "left out: the rest of whole steps, past its limit of 2 s",
        "left out: what packing costs where it saves nothing, past the 2 s of a call",
        "left out: the tests, past the 2 s of a call",
    ]
