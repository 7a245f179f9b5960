"""Each block of Python and bash in the README and the docs runs unchanged, or says why it cannot run here.

Commands that need a GPU and a network run for one step on the CPU, with the demo's model and data.
"""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from doc_blocks import ROOT, Block, blocks

BLOCKS = blocks()
RUN = [block for block in BLOCKS if block.why_not is None]
# Python that builds no config and no trainer takes no time. Other blocks train, or start processes
SHORT = [block for block in RUN if block.language == "python" and not re.search(r"(Config|Trainer)\(", block.code)]
LONG = [block for block in RUN if block not in SHORT]
# Why a block is not run, and how many blocks may say so: a further one is a decision
NOT_RUN = {
    "each command has a test of its own": 2,
    "a piece of a script": 2,
    "installs": 4,
    "needs several GPUs and a network; the same launches, of small models, are test_accelerate_configs.py's": 1,
    "needs vLLM": 2,
    "takes minutes, and its parts have tests of their own": 3,
}
WITH_DEMO = [block for block in BLOCKS if block.with_demo]
DEMO = (
    (r"Qwen/\S+", "examples/demo/model"),
    (r"trl-lib/\S+", "examples/demo/data/dpo"),
    ("accelerate_configs/one_gpu.yaml", "accelerate_configs/cpu.yaml"),
    (
        r"--output_dir (\S+)",
        r"--output_dir runs/\1 --use_cpu --bf16 false --max_steps 1 --per_device_train_batch_size 2",
    ),
)


def test_few_blocks_do_not_run_and_their_reasons_are_known():
    found = Counter(block.why_not for block in BLOCKS if block.why_not and not block.with_demo)
    assert {why: count for why, count in found.items() if count > NOT_RUN.get(why, 0)} == {}
    assert 2 <= len(WITH_DEMO) <= 5
    assert len(RUN) >= 12
    assert len(SHORT) >= 2


def test_the_targets_of_make_in_the_docs_exist():
    asked = {name for block in BLOCKS for name in re.findall(r"^make ((?:[a-z-]+ ?)+)", block.code, re.MULTILINE)}
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert len(asked) > 5
    assert {name for names in asked for name in names.split()} <= targets


@pytest.mark.parametrize("block", SHORT, ids=str)
def test_a_short_block_runs(block: Block):
    exec(compile(block.code, str(block), "exec"), {"__name__": "__main__"})


@pytest.mark.slow
@pytest.mark.parametrize("block", LONG, ids=str)
def test_a_block_runs(block: Block, tmp_path: Path):
    run(block, block.code, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("block", WITH_DEMO, ids=str)
def test_a_block_runs_with_the_demo(block: Block, tmp_path: Path):
    if "--load_in_4bit" in block.code:
        pytest.importorskip("bitsandbytes")
    code = block.code
    for there, here in DEMO:
        code = re.sub(there, here, code)
    run(block, code, tmp_path)


def run(block: Block, code: str, tmp_path: Path) -> None:
    # Folders that a block names are the repository's, except runs/, which it writes
    for name in ("examples", "tests", "benchmarks", "trl_ext", "docs", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    # As `pip install` writes it, because trl_ext may not be installed
    script = tmp_path / "bin" / "trl-ext"
    script.parent.mkdir()
    script.write_text(f"#!{sys.executable}\nfrom trl_ext.cli.__main__ import main\nraise SystemExit(main())\n")
    script.chmod(0o755)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PATH": os.pathsep.join([str(script.parent), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "ACCELERATE_USE_CPU": "true",
    }
    command = [sys.executable, "-c"] if block.language == "python" else ["bash", "-euo", "pipefail", "-c"]
    done = subprocess.run([*command, code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{block}\n{code}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
