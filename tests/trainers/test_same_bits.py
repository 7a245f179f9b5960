"""The comparison of two trees finds nothing in a tree beside itself, and notices a changed loss of each trainer."""

import shutil
from pathlib import Path

import pytest

from same_bits import CASES, NAMED, NEW, TRAINERS, chosen, compare

NAMES = [f"{trainer}-defaults" for trainer in TRAINERS]
FAULT = """
def _turned(loss):
    return lambda self, *given, **options: -loss(self, *given, **options)

for name in ("SFTTrainer", "DPOTrainer", "KTOTrainer", "GRPOTrainer", "RLOOTrainer", "RewardTrainer"):
    trainer = __getattr__(name)
    trainer.compute_loss = _turned(trainer.compute_loss)
"""


@pytest.mark.slow
def test_a_tree_gives_the_same_bits_and_a_turned_sign_does_not(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(NEW / "trl_ext", tmp_path / "fault" / "trl_ext", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "fault" / "trl_ext" / "__init__.py").open("a") as package:
        package.write(FAULT)
    same = compare(NEW, NEW, NAMES, tmp_path / "remembered")
    assert same == {name: [] for name in NAMES}
    differ = compare(NEW, tmp_path / "fault", NAMES, tmp_path / "remembered")
    for name, lines in differ.items():
        assert any(line.startswith("weights: ") for line in lines), name
        assert any(line.startswith("log 0: loss: ") for line in lines), name
    assert "6 cases: 6 are the same" in capfd.readouterr().out


@pytest.mark.slow
def test_no_named_case_raises(capfd: pytest.CaptureFixture[str]) -> None:
    names = list(NAMED)
    assert not any(compare(NEW, NEW, names).values())
    assert f"{len(names)} cases: {len(names)} are the same" in capfd.readouterr().out


def test_cases_are_chosen_by_trainer_and_name() -> None:
    assert chosen(["kto"], ["*-defaults"], 0, 0) == ["kto-defaults"]
    assert len(chosen(["rloo"], [], 3, 5)) == 3 + sum(case.trainer == "rloo" for case in NAMED.values())
    # Two ranks train last, in one launch
    names = chosen(list(TRAINERS), [], 2, 0)
    assert names[-len(CASES) :] == list(CASES)
