"""The tokens of a batch, split over ranks by context and by sequence parallelism, train as on one process."""

import functools
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from launch import launch
from sequence_cases import CONTROLS, RUNS, Seen
from sequence_cases import __file__ as SCRIPT
from tiny import _SHAPE, _WORD_IDS, Workshop, word_tokenizer


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workshop = Workshop(tmp_path_factory.mktemp("models"))
    for name in ("untied", "tied", "experts"):
        workshop.model(name)
    one_key = LlamaConfig(**{**_SHAPE, **_WORD_IDS, "num_key_value_heads": 1, "num_hidden_layers": 1})
    AutoModelForCausalLM.from_config(one_key).save_pretrained(workshop.root / "odd_heads-0")
    word_tokenizer().save_pretrained(workshop.root / "odd_heads-0")
    return workshop.root


@pytest.fixture(autouse=True)
def cases_find_them(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINY_MODELS", str(models))


@functools.cache
def on_one_process(name: str) -> Seen:
    return RUNS[name](None)


def far(seen: Seen, expected: Seen) -> float:
    """How far apart the two changes of the weights are, against the size of that of one process."""
    assert seen.change.keys() == expected.change.keys()
    ours, one = (torch.cat([of.change[name].double().flatten() for name in expected.change]) for of in (seen, expected))
    return ((ours - one).norm() / one.norm()).item()


def check(cases: list[str], engine: str, folder: Path, processes: int = 2) -> None:
    for name, of_ranks in launch(SCRIPT, cases, engine, folder, processes, timeout=600).items():
        if name not in RUNS and name not in CONTROLS:
            continue
        expected = on_one_process("-".join(name.split("-")[:2]))
        for seen in of_ranks:
            if name in CONTROLS:
                assert far(seen, expected) > 0.05, name
                continue
            assert far(seen, expected) <= 1e-4, (name, far(seen, expected))
            assert len(seen.logs) == len(expected.logs)
            for log, one in zip(seen.logs, expected.logs, strict=True):
                assert log.keys() == one.keys(), name
                if processes > 2:  # smaller batches have less padding
                    log, one = ({key: x for key, x in of.items() if not key.startswith("skipped")} for of in (log, one))
                assert log == pytest.approx(one, rel=1e-4, abs=2e-5), name
        if "draws" not in name and "evaluated" not in name:
            # In a training step each rank feeds half, and at most one token more
            halves = [-(-tokens // 2) for tokens in expected.fed[-4:]]
            assert processes > 2 or all(seen.fed[-4:] == halves for seen in of_ranks), name


def test_sequence_parallelism_trains_as_one_process(tmp_path: Path):
    pytest.importorskip("deepspeed")
    check(["dpo-lora", "grpo-full", "grpo-full-unexchanged"], "zero2", tmp_path)


def test_context_parallelism_trains_as_one_process(tmp_path: Path):
    check(["dpo-full", "grpo-lora", "dpo-full-unscaled", "padded", "heads"], "fsdp2", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["zero1", "zero2", "zero3", "fsdp2"])
def test_all_cases(engine: str, tmp_path: Path):
    if engine != "fsdp2":
        pytest.importorskip("deepspeed")
    check([*RUNS, *CONTROLS], engine, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["zero2", "zero3", "fsdp2"])
def test_two_groups_of_two_ranks(engine: str, tmp_path: Path):
    if engine != "fsdp2":
        pytest.importorskip("deepspeed")
    check(["dpo-whole", "grpo-full", "grpo-batch"], engine, tmp_path, processes=4)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["zero2", "fsdp2"])
def test_refusals(engine: str, tmp_path: Path):
    if engine != "fsdp2":
        pytest.importorskip("deepspeed")
    check(["padded", "vllm", "generations", "heads"], engine, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["other-rows", "other-rewards"])
def test_ranks_that_differ_stop(case: str, tmp_path: Path):
    check([case], "fsdp2", tmp_path)
