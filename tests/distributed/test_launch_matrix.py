"""Every engine trains as one process does under `accelerate launch`: DPO and GRPO, full and LoRA, tied or not."""

import functools
import tempfile
from pathlib import Path

import pytest
import torch
import trl

from launch import ENGINES, launch
from matrix_rows import CONTROLS, FAMILY_ROWS, OTHER_ROWS, OWN_CODE_ROWS, ROWS, OneProcess, Seen, save_models, train
from matrix_rows import __file__ as SCRIPT
from tiers import fast_first

# Rounding changes the update of the weights by at most 1e-5 of its size. Without gradient sync it is very different
LIMIT, UNSYNCED = 1e-4, 0.1


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_models(folder)
    return folder


@pytest.fixture(autouse=True)
def rows_find_them(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MATRIX_MODELS", str(models))


@functools.cache
def on_one_process(row: str) -> Seen:
    with tempfile.TemporaryDirectory() as folder:
        return train(OneProcess(Path(folder)), *row.split("-"))


def distances(seen: Seen, expected: Seen) -> dict[str, float]:
    """Return the relative differences of two runs: of losses, gradient norms and changes of the weights."""
    assert seen.change.keys() == expected.change.keys()
    assert all(torch.equal(seen.start[name], weight) for name, weight in expected.start.items())
    pairs = {
        "losses": (torch.tensor(seen.losses), torch.tensor(expected.losses)),
        "grad_norms": (torch.tensor(seen.grad_norms), torch.tensor(expected.grad_norms)),
        "change": tuple(
            torch.cat([of.change[name].double().flatten() for name in expected.change]) for of in (seen, expected)
        ),
    }
    return {what: ((a - b).norm() / b.norm()).item() for what, (a, b) in pairs.items()}


def check_matrix(engine: str, rows: list[str], folder: Path, processes: int = 2) -> None:
    """Launch `rows` and a control for each, compare all with one process, and name every row that differs."""
    results = launch(SCRIPT, rows, engine, folder, processes, timeout=900)
    wrong = []
    for row, of_ranks in results.items():
        expected = on_one_process(row.removesuffix("-unsynced"))
        found = [distances(seen, expected) for seen in of_ranks]
        if row in CONTROLS:
            right = any(of_rank["change"] > UNSYNCED for of_rank in found)
        else:
            right = all(distance <= LIMIT for of_rank in found for distance in of_rank.values())
        print(engine, row, {what: f"{distance:.1e}" for what, distance in found[0].items()}, of_ranks[0].head)
        if not right:
            wrong.append(f"{row}: {found}")
    assert not wrong, "\n".join([f"{engine} on {processes} processes:", *wrong])


ALL = [f"{'-'.join(row)}{control}" for control in ("", "-unsynced") for row in ROWS]
FAMILIES = ["-".join(row) for row in FAMILY_ROWS]
OTHERS = [f"{'-'.join(row)}{control}" for control in ("", "-unsynced") for row in OTHER_ROWS]


@pytest.mark.parametrize(
    "row", fast_first(["dpo-full-tied", "dpo-lora-untied", "grpo-full-odd", "grpo-lora-tied"], "grpo-full-odd")
)
def test_one_process_is_stock_trl(row: str, tmp_path: Path):
    found = distances(on_one_process(row), train(OneProcess(tmp_path), *row.split("-"), library=trl))
    assert max(found.values()) <= LIMIT, found


@pytest.mark.slow
def test_zero3_trains_a_row_as_one_process(tmp_path: Path):
    check_matrix("zero3", ["grpo-full-tied"], tmp_path)


@pytest.mark.parametrize("row", ["-".join(row) for row in OTHER_ROWS])
def test_other_trainers_on_one_process_are_stock_trl(row: str, tmp_path: Path):
    found = distances(on_one_process(row), train(OneProcess(tmp_path), *row.split("-"), library=trl))
    assert max(found.values()) <= LIMIT, found


@pytest.mark.parametrize("engine", fast_first(["ddp", "fsdp2", "zero3"], "ddp"))
def test_other_trainers_train_as_one_process(engine: str, tmp_path: Path):
    check_matrix(engine, OTHERS, tmp_path)


@pytest.mark.slow
def test_sft_and_kto_train_under_tensor_parallelism(tmp_path: Path):
    check_matrix("tp", [row for row in OTHERS if not row.startswith(("rloo", "reward", "distillation"))], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["zero2", "zero3"])
def test_a_model_whose_code_computes_its_logits_trains_as_one_process(engine: str, tmp_path: Path):
    check_matrix(engine, ["-".join(row) for row in OWN_CODE_ROWS], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("row", FAMILIES)
def test_hybrid_and_multimodal_models_on_one_process_are_stock_trl(row: str, tmp_path: Path):
    found = distances(on_one_process(row), train(OneProcess(tmp_path), *row.split("-"), library=trl))
    assert max(found.values()) <= LIMIT, found


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero3"])
def test_hybrid_and_multimodal_models_train_as_one_process(engine: str, tmp_path: Path):
    check_matrix(engine, FAMILIES, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_trains_every_row_as_one_process(engine: str, tmp_path: Path):
    check_matrix(engine, ALL, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("processes", [3, 4])
@pytest.mark.parametrize("engine", ["ddp", "tp"])
def test_more_processes_train_as_one(engine: str, processes: int, tmp_path: Path):
    check_matrix(engine, ALL, tmp_path, processes)
