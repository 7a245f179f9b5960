"""The launcher of the matrix notices a rank that fails, ranks that hang, and another engine than the requested one."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import launch
from launch import ENGINES, LaunchedRank


def fail_on_rank_1(rank: LaunchedRank) -> None:
    if rank.index == 1:
        raise ValueError("this rank cannot")
    time.sleep(600)


def hang_on_rank_1(rank: LaunchedRank) -> None:
    torch.distributed.init_process_group("gloo")
    if rank.index == 1:
        time.sleep(600)
    torch.distributed.barrier()


def stock_row(rank: LaunchedRank) -> None:
    """Train with stock TRL, because our trainers would notice the engine first."""
    import trl

    from matrix_rows import train

    train(rank, "dpo", "lora", "few", library=trl)


CASES = {"fail": fail_on_rank_1, "hang": hang_on_rank_1, "stock": stock_row}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("fail", r"(?s)rank1 failed first.*fail_on_rank_1.*ValueError: this rank cannot"),
        ("hang", r"(?s)The ranks hang.*stack of rank 0.*barrier.*stack of rank 1.*hang_on_rank_1"),
    ],
)
def test_the_launcher_names_the_failure_and_leaves_no_process(case: str, words: str, tmp_path: Path):
    with pytest.raises(AssertionError, match=words):
        launch.launch(__file__, [case], "ddp", tmp_path, timeout=60)
    ranks = [int(path.read_text()) for path in tmp_path.glob("rank*.pid")]
    assert len(ranks) == 2
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{rank}").exists() for rank in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
def test_a_silent_fallback_to_another_engine_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With ACCELERATE_USE_CPU, a launch with DeepSpeed's config trains under DDP, and exits 0."""
    from matrix_rows import save_models

    (tmp_path / "models").mkdir()
    save_models(tmp_path / "models")
    monkeypatch.setenv("MATRIX_MODELS", str(tmp_path / "models"))
    monkeypatch.setitem(ENGINES, "zero2", replace(ENGINES["zero2"], environment={"ACCELERATE_USE_CPU": "true"}))
    with pytest.raises(AssertionError, match=r"(?s)failed first.*in check.*\('MULTI_CPU', 'DistributedDataParallel'"):
        launch.launch(__file__, ["stock"], "zero2", tmp_path)
