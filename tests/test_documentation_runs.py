"""Every block of python and bash in the README and the docs runs as it stands, or says why it cannot run here."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from doc_blocks import ROOT, Block, blocks

BLOCKS = blocks()
RUN = [block for block in BLOCKS if block.why_not is None]
# The head by itself, which takes no time. The others train, or start processes
HEAD_ALONE = ("README.md", "docs/exact-head.md", "docs/extending.md", "docs/sharding.md")
SHORT = [block for block in RUN if block.page in HEAD_ALONE and block.language == "python"]
LONG = [block for block in RUN if block not in SHORT]
# Why a block is not run. A new reason is a decision: here it is counted
NOT_RUN = {
    "a piece of a script": 7,
    "installs": 2,
    "needs a GPU and a network": 4,
    "takes minutes, and its parts have tests of their own": 3,
}


def test_blocks_that_do_not_run_are_counted():
    assert Counter(block.why_not for block in BLOCKS if block.why_not) == NOT_RUN
    assert len(RUN) >= 10


@pytest.mark.parametrize("block", SHORT, ids=str)
def test_a_short_block_runs(block: Block):
    exec(compile(block.code, str(block), "exec"), {"__name__": "__main__"})


@pytest.mark.slow
@pytest.mark.parametrize("block", LONG, ids=str)
def test_a_block_runs(block: Block, tmp_path: Path):
    # The folders that a block names are the repository's, but for runs/, which it writes
    for name in ("examples", "tests", "benchmarks", "trl_ext", "docs", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "ACCELERATE_USE_CPU": "true",
    }
    if block.language == "python":
        command = [sys.executable, "-c", block.code]
    else:
        command = ["bash", "-euo", "pipefail", "-c", block.code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{block}\n{block.code}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
