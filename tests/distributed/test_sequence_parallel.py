"""Context and sequence parallelism, which split the tokens of a batch over ranks, train as one process does."""

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from launch import launch
from sequence_parallel_cases import CONTROLS, RUNS, Seen
from sequence_parallel_cases import __file__ as SCRIPT
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
    """Return the difference of two changes of the weights, relative to that of one process."""
    assert seen.change.keys() == expected.change.keys()
    ours, one = (torch.cat([of.change[name].double().flatten() for name in expected.change]) for of in (seen, expected))
    return ((ours - one).norm() / one.norm()).item()


def check(cases: list[str], engine: str, folder: Path, processes: int = 2) -> None:
    """Launch `cases`, compare those that train with one process, and name every one that differs."""
    results = launch(SCRIPT, cases, engine, folder, processes, timeout=600)
    wrong = []
    for name in [name for name in cases if name in RUNS or name in CONTROLS]:
        expected = on_one_process("-".join(name.split("-")[:2]))
        for rank, seen in enumerate(results[name]):
            distance = far(seen, expected)
            if name in CONTROLS:
                wrong += [f"{name}: the control is right ({distance:.2g})"] if distance < 0.05 else []
                continue
            wrong += [f"{name}, rank {rank}: the weights are off by {distance:.2g}"] if distance > 1e-4 else []
            wrong += [f"{name}, rank {rank}: {what}" for what in differences(seen.logs, expected.logs, processes)]
            # In a training step each rank processes half of the tokens, plus at most one of padding
            halves = [-(-tokens // 2) for tokens in expected.fed[-4:]]
            if processes == 2 and "draws" not in name and "evaluated" not in name and seen.fed[-4:] != halves:
                wrong.append(f"{name}, rank {rank}: {seen.fed[-4:]} tokens were fed, not {halves}")
    assert not wrong, "\n".join(wrong)


def differences(logs: list[dict[str, float]], expected: list[dict[str, float]], processes: int) -> Iterator[str]:
    """Return the differences of the logs from one process."""
    for log, one in zip(logs, expected, strict=True):
        # Each of two groups has its own padding, and some metrics are means over micro-batches
        names = [*one] if processes == 2 else [name for name in one if name in ("loss", "grad_norm")]
        if processes == 2 and log.keys() != one.keys():
            yield f"{sorted(log.keys() ^ one.keys())}"
        for name in names:
            if name in log and log[name] != pytest.approx(one[name], rel=1e-4, abs=2e-5):
                yield f"{name} is {log[name]}, not {one[name]}"


@pytest.mark.slow
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
    check(["padded", "vllm", "generations", "heads", "reward", "grpo-judged"], engine, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["other-rows", "other-completions"])
def test_ranks_that_differ_stop(case: str, tmp_path: Path):
    check([case], "fsdp2", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_a_run_is_resumed_from_its_checkpoint(processes: int, tmp_path: Path):
    check(["resumed"], "fsdp2", tmp_path, processes)
