"""Loss types of a made-up later TRL, which this release does not know, train as in that TRL, with one warning."""

import json
import logging
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import trl

import trl_ext
import trl_ext.compat  # warns of a later TRL here, because warnings are errors where ranks run
from drop_in_cases import Case
from later_trl import NEW, NEW_LOSS_TYPES, environment_of, make_later_trl, run_python
from ranks import Rank, run_on_ranks
from run_losses import Record, Trainers, train
from tiny import Workshop
from training_comparison import tensors_differ


@dataclass(frozen=True)
class Trained:
    """A training with each of the two libraries."""

    differences: list[str]
    warnings: list[str]  # those of ours that name the loss type
    plan: dict[str, str] = field(default_factory=dict)  # reasons, by the name of the decision


_STEP = {"gradient_accumulation_steps": 2}
_GROUPS = {**_STEP, "per_device_train_batch_size": 4, "loss_type": NEW["grpo"]}
_PAIRS = {**_STEP, "per_device_train_batch_size": 3, "loss_type": [NEW["dpo"]]}
# Regrouped rows, dead rows, dynamic sampling (which finds all groups alive), parts, and rows that move between ranks.
# Without `keep_groups_together=False`, the default of `Case`
CASES_OF_TRAINING = [
    Case("grpo-defaults", "grpo", config=_GROUPS, ours={}, rewards=("half_dead",)),
    Case("grpo-old-policy", "grpo", config={**_GROUPS, "num_iterations": 2, "beta": 0.1}, ours={}),
    Case("grpo-dynamic", "grpo", config=_GROUPS, ours={"dynamic_sampling": True}),
    Case("grpo-parts", "grpo", config=_GROUPS, ours={"max_tokens_per_micro_batch": 40}, rewards=("half_dead",)),
    Case("dpo-defaults", "dpo", config=_PAIRS, ours={}),
    Case("dpo-mixed", "dpo", config={**_PAIRS, "loss_type": ["sigmoid", NEW["dpo"]]}, ours={}),
    Case("dpo-parts", "dpo", config=_PAIRS, ours={"max_tokens_per_micro_batch": 40}),
    Case("kto", "kto", config={**_STEP, "loss_type": NEW["kto"]}, ours={}),
    Case("sft", "sft", config={**_STEP, "loss_type": NEW["sft"]}, ours={}),
]
BY_NAME = {case.name: case for case in CASES_OF_TRAINING}


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def trained(case: Case, workshop: Workshop, check: Callable[[Any], None] = lambda trainer: None) -> Trained:
    seen, built = _Warnings(), []
    logger = logging.getLogger("trl_ext")
    logger.addHandler(seen)
    try:
        ours = train(case, Trainers.of(trl_ext), workshop, prepare=built.append)
    finally:
        logger.removeHandler(seen)
    check(built[0])
    stock = train(replace(case, ours={}), Trainers.of(trl), workshop)
    plan = {x.name: x.reason for x in built[0].explain().decisions}
    return Trained(differences(ours, stock), seen.texts, plan)


def differences(ours: Record, stock: Record) -> list[str]:
    wrong = tensors_differ("weight update", ours.updates, stock.updates)
    for step, (got, want) in enumerate(zip(ours.gradients, stock.gradients, strict=True)):
        wrong += tensors_differ(f"gradient of step {step}", got, want)
    for place, (got_log, want_log) in enumerate(zip(ours.logs, stock.logs, strict=True)):
        for name in ("loss", "entropy"):
            if name in want_log and not abs(got_log[name] - want_log[name]) <= 1e-5 * max(1.0, abs(want_log[name])):
                wrong.append(f"log {place} {name}: ours {got_log[name]!r}, TRL's {want_log[name]!r}")
    assert stock.gradients
    return wrong


def main(root: str, names: list[str]) -> None:
    """Print what `trained` returns for each case, as JSON."""
    workshop = Workshop(Path(root))
    print(json.dumps({name: vars(trained(BY_NAME[name], workshop)) for name in names}))


def _of_rank(case: Case) -> Callable[[Rank], Any]:
    def run(rank: Rank) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["HF_DATASETS_CACHE"] = folder
            return vars(trained(case, Workshop(Path(os.environ["TINY_ROOT"])), rank.check))

    return run


CASES = {name: _of_rank(case) for name, case in BY_NAME.items()}


@pytest.fixture(scope="module")
def later(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("later")
    make_later_trl(folder, NEW_LOSS_TYPES)
    return folder


def check(name: str, result: dict[str, Any], *, warns: bool = True) -> None:
    assert not result["differences"], f"{name}: {result['differences'][:20]}"
    new = NEW[BY_NAME[name].trainer]
    assert [f"does not know '{new}' of TRL 1.17.0" in text for text in result["warnings"]] == [True] * warns, result


def test_new_loss_types_train_as_in_their_trl(later: Path, workshop: Workshop) -> None:
    workshop.model("tied")
    code = f"import test_unknown_loss_types as t; t.main({str(workshop.root)!r}, {list(BY_NAME)})"
    done = run_python(code, environment_of(later, Path(__file__).parent))
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stderr.count("is not tested with trl 1.17.0") == 1
    results = json.loads(done.stdout.splitlines()[-1])
    for name in BY_NAME:
        check(name, results[name])
    for name, decision in (("grpo-parts", "micro-batches"), ("dpo-parts", "policy")):
        reason = results[name]["plan"][decision]
        assert "`max_tokens_per_micro_batch=40` limits only" in reason
        assert "is unknown to this release of trl_ext, and may depend on the whole micro-batch" in reason


@pytest.mark.slow
def test_new_loss_types_train_as_in_their_trl_on_two_ranks(
    later: Path, workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workshop.model("tied")
    monkeypatch.setenv("TINY_ROOT", str(workshop.root))
    for name, value in environment_of(later).items():
        monkeypatch.setenv(name, value)
    found = run_on_ranks(__file__, list(BY_NAME), "ddp", tmp_path, timeout=500)
    for name, of_ranks in found.items():
        for rank, result in enumerate(of_ranks):
            check(name, result, warns=rank == 0)


MISTAKES = """
import trl_ext
for name, loss_type in [("DPO", ["batch_centred"]), ("GRPO", "batch_pul"), ("KTO", "batch"), ("SFT", "batch_focl")]:
    method = name.lower()
    check = getattr(__import__("trl_ext.checks.arguments", fromlist=["x"]), "check_arguments_of")
    try:
        check(method, getattr(trl_ext, f"{name}Config")(output_dir="x", loss_type=loss_type, bf16=False, use_cpu=True))
    except ValueError as error:
        print(error)
"""


@pytest.mark.slow
def test_a_typo_is_refused_and_the_error_names_the_new_loss_types(later: Path) -> None:
    done = run_python(MISTAKES, environment_of(later))
    errors = done.stdout.splitlines()
    assert len(errors) == 4, done.stderr[-4000:]
    for error, (typo, new) in zip(
        errors,
        [("batch_centred", NEW["dpo"]), ("batch_pul", NEW["grpo"]), ("batch", NEW["kto"]), ("batch_focl", NEW["sft"])],
        strict=True,
    ):
        assert error.startswith(f"Unknown `loss_type` '{typo}'. Choose from: ")
        assert f"'{new}'" in error
