"""What a run says when training ends: its tokens are those that hooks count, and TRL's those of a stock run."""

import logging
import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trl
from transformers import GenerationMixin

import trl_ext
from drop_in_cases import Case
from ranks import Rank, run_on_ranks
from run_losses import ALL_CASES, Record, Trainers, build
from short_training import PROMPTS, Bench
from tiny import Workshop
from token_counts import Feed
from trl_ext.callbacks.summary import PhaseTimes, tokens_line

STOCK = Trainers.of(trl)
OURS = Trainers.of(trl_ext)
LINE = re.compile(
    r"Processed (?P<tokens>[\d,]+) tokens(, (?P<share>[\d.]+) % of the (?P<of_trl>[\d,]+) that TRL would have "
    r"processed)?(; (((?P<passes>[\d,]+) forward pass(es)?( on each process)?)?( and )?((?P<rows>[\d,]+) rows?)?) "
    r"skipped)?\."
)


@dataclass
class Counts:
    """The numbers of the line; 0 for absent ones."""

    tokens: int
    of_trl: int
    passes: int
    rows: int

    @classmethod
    def read(cls, messages: list[str]) -> "Counts":
        (found,) = filter(None, map(LINE.fullmatch, messages))
        numbers = {name: int((found[name] or "0").replace(",", "")) for name in ("tokens", "of_trl", "passes", "rows")}
        assert 0 not in [int(found[name].replace(",", "")) for name in ("passes", "rows") if found[name]]
        return cls(**{**numbers, "of_trl": numbers["of_trl"] or numbers["tokens"]})


@contextmanager
def generation_apart(feeds: list[Feed]) -> Iterator[list[Feed]]:
    """Move what `generate` processes in the `with` block from `feeds` to the returned list."""
    plain = GenerationMixin.generate
    generation: list[Feed] = []

    def generate(*positional: Any, **keywords: Any) -> Any:
        before = len(feeds)
        output = plain(*positional, **keywords)
        generation.extend(feeds[before:])
        del feeds[before:]
        return output

    GenerationMixin.generate = generate
    try:
        yield generation
    finally:
        GenerationMixin.generate = plain


@dataclass
class Forwards:
    """The forwards of a training, without those of evaluation."""

    passes: list[Feed]
    generation: list[Feed]

    @property
    def tokens(self) -> int:
        return total(self.passes) + total(self.generation)


def run(case: Case, trainers: Trainers, workshop: Workshop, folder: Path, resume: Any = None) -> Forwards:
    record = Record()
    trainer = build(case, trainers, workshop, str(folder), record)
    with generation_apart(record.feeds) as generation:
        trainer.train(resume)
    return Forwards(*([x for x in feeds if x.training] for feeds in (record.feeds, generation)))


def total(feeds: list[Feed], what: str = "tokens") -> int:
    return sum(getattr(x, what) for x in feeds)


RUNS = {
    "sft": ALL_CASES["sft-accumulation"],
    "sft-evaluation": ALL_CASES["sft-evaluation"],
    "dpo": ALL_CASES["dpo-accumulation"],
    "dpo-evaluation": ALL_CASES["dpo-evaluation"],
    "dpo-precompute": ALL_CASES["dpo-precompute"],
    "dpo-epochs": replace(ALL_CASES["dpo-sigmoid-lora"], steps=7),
    "dpo-padded": replace(ALL_CASES["dpo-sigmoid-lora"], ours={"padding_free": False, "reference_store": "off"}),
    "dpo-parts": replace(ALL_CASES["dpo-accumulation"], ours={"max_tokens_per_micro_batch": 60}),
    "kto": ALL_CASES["kto-accumulation"],
    "kto-padded": replace(ALL_CASES["kto-kto-lora"], ours={"padding_free": False, "reference_store": "off"}),
    "kto-epochs": ALL_CASES["kto-epochs"],
    "grpo": ALL_CASES["grpo-accumulation-off_policy"],
    "grpo-dead-group": ALL_CASES["grpo-dead-group"],
    "grpo-generation": ALL_CASES["grpo-generation"],
    "grpo-evaluation": ALL_CASES["grpo-evaluation"],
    "grpo-parts": replace(ALL_CASES["grpo-accumulation"], ours={"max_tokens_per_micro_batch": 40}),
    "rloo": ALL_CASES["rloo-half-dead"],
    "rloo-without-kl": ALL_CASES["rloo-without-kl-lora"],
}


@pytest.mark.filterwarnings("ignore:Position ids are not supported:UserWarning")  # PEFT's, when it generates
@pytest.mark.parametrize("name", RUNS)
def test_the_tokens_are_those_that_hooks_count(
    name: str, workshop: Workshop, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    case = RUNS[name]
    stock = run(case, STOCK, workshop, tmp_path / "stock")
    assert not caplog.messages
    ours = run(case, OURS, workshop, tmp_path / "ours")
    counts = Counts.read(caplog.messages)
    assert (counts.tokens, counts.of_trl) == (ours.tokens, stock.tokens)
    assert counts.tokens < counts.of_trl or "padded" in name
    # A pass in several parts counts once; the reference's passes count where their log-probs are stored
    if name not in ("grpo-parts", "dpo-parts", "dpo-padded", "kto-padded"):
        assert counts.passes == max(0, len(stock.passes) - len(ours.passes))
    padded = Record()
    if counts.rows:  # a packed row is one
        trainer = build(case, OURS.padded(), workshop, str(tmp_path / "padded"), padded)
        with generation_apart(padded.feeds):
            trainer.train()
        policy = [x for x in padded.feeds if x.training and x.grad]
        assert counts.rows == total([x for x in stock.passes if x.grad], "rows") - total(policy, "rows")
    assert bool(counts.rows) == (name in ("grpo-dead-group", "rloo"))


def test_a_resumed_run_counts_what_it_trains_itself(
    workshop: Workshop, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    case = ALL_CASES["kto-kto-lora"]
    case = replace(case, steps=3, config={**case.config, "save_strategy": "steps", "save_steps": 2})
    of_steps = []
    for library in (STOCK, OURS):
        folder = tmp_path / str(len(of_steps))
        run(case, library, workshop, folder)
        caplog.clear()
        of_steps.append(run(case, library, workshop, folder, resume=str(folder / "checkpoint-2")))
    stock, ours = of_steps
    assert {x.step for x in stock.passes} == {x.step for x in ours.passes} == {2}
    counts = Counts.read(caplog.messages)
    assert (counts.tokens, counts.of_trl) == (ours.tokens, stock.tokens)


def test_each_training_counts_anew(workshop: Workshop, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    record = Record()
    trainer = build(ALL_CASES["sft-nll-full"], OURS, workshop, str(tmp_path), record)
    trainer.train()
    first = total(record.feeds)
    caplog.clear()
    trainer.train()
    assert Counts.read(caplog.messages).tokens == total(record.feeds) - first


def of_ranks(rank: Rank, trainers: Trainers, name: str) -> dict[str, Any]:
    messages: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    collector = Collector()
    logging.getLogger("trl_ext").addHandler(collector)
    case = ALL_CASES[name]
    case = replace(case, config={**case.config, "per_device_train_batch_size": 4})
    record = Record()
    folder = str(rank.folder / f"{name}-{trainers is OURS}")
    trainer = build(case, trainers, Workshop(Path(os.environ["TINY_ROOT"])), folder, record)
    with generation_apart(record.feeds) as generation:
        trainer.train()
    rank.check(trainer)
    logging.getLogger("trl_ext").removeHandler(collector)
    passes = [x for x in record.feeds if x.training]
    tokens = total(passes) + total([x for x in generation if x.training])
    return {"tokens": tokens, "forwards": len(passes), "messages": messages}


FAST_ON_RANKS = ("dpo-accumulation", "grpo-accumulation")
SLOW_ON_RANKS = (
    *("sft-nll-full", "dpo-sigmoid-lora", "kto-kto-lora"),
    *("grpo-accumulation-off_policy", "grpo-evaluation", "rloo-defaults-full"),
)
CASES = {
    f"{name}-{library}": partial(of_ranks, trainers=trainers, name=name)
    for name in (*FAST_ON_RANKS, *SLOW_ON_RANKS)
    for library, trainers in (("ours", OURS), ("stock", STOCK))
}


@pytest.mark.parametrize("names", [FAST_ON_RANKS, pytest.param(SLOW_ON_RANKS, marks=pytest.mark.slow)])
def test_ranks_count_the_tokens_of_all(
    names: tuple[str, ...], workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    workshop.model("tied")
    monkeypatch.setenv("TINY_ROOT", str(workshop.root))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "of_ranks"))
    cases = [f"{name}-{library}" for name in names for library in ("ours", "stock")]
    results = run_on_ranks(__file__, cases, "ddp", tmp_path, 2)
    for name in names:
        ours, stock = results[f"{name}-ours"], results[f"{name}-stock"]
        counts = Counts.read(ours[0]["messages"])
        assert not [x for x in ours[1]["messages"] if "rained on" in x or "took" in x]
        assert counts.tokens == sum(x["tokens"] for x in ours)
        assert counts.of_trl == sum(x["tokens"] for x in stock), name
        assert counts.passes == max(0, stock[0]["forwards"] - ours[0]["forwards"])
        if counts.passes:
            assert any("on each process" in x for x in ours[0]["messages"])


@pytest.mark.parametrize(
    ("processed", "skipped", "text"),
    [
        (0, {"tokens": 5}, None),
        (12, {}, "Processed 12 tokens."),
        (12, {"tokens": 0, "passes": 0, "rows": 0}, "Processed 12 tokens."),
        (12340, {"tokens": 10942, "passes": 40, "rows": 112}, "40 forward passes and 112 rows skipped."),
        (12340, {"tokens": 10942, "rows": 1}, "53 % of the 23,282 that TRL would have processed; 1 row skipped."),
        (10, {"tokens": -2, "passes": -1}, "Processed 10 tokens, 125 % of the 8 that TRL would have processed."),
        (1, {"tokens": 999}, "Processed 1 tokens, 0.1 % of the 1,000 that TRL would have processed."),
    ],
)
def test_what_was_not_counted_is_absent(processed: int, skipped: dict[str, int], text: str | None):
    line = tokens_line(processed, Counter(skipped), 1)
    assert line == text or (line is not None and line.endswith(text or "-"))


def test_times_are_of_the_outer_phase_and_absent_if_there_is_none():
    times = PhaseTimes()
    assert re.fullmatch(r"Training took \d\.\d s\.", times.line())
    with times.measured("evaluation"), times.measured("generation"):
        time.sleep(0.12)
    with times.measured("generation"):
        time.sleep(0.06)
    with times.measured("rewards"):
        pass
    time.sleep(0.06)
    assert re.fullmatch(
        r"Training took \d\.\d s: evaluation 0\.[1-9] s, generation 0\.[1-9] s, other \(steps, start-up\) 0\.[1-9] s\.",
        times.line(),
    )
    assert 0.12 <= times.seconds["evaluation"] < 0.5


@pytest.mark.parametrize("has_generation", [True, False])
def test_a_step_without_any_other_phase_has_seconds_of_training(has_generation: bool):
    """As the first one of a run that resumes in the middle of a generation batch."""
    times = PhaseTimes()
    times.steps_begin(3, has_generation=has_generation)
    assert list(times.take(4)) == (["seconds/training"] if has_generation else [])
    assert times.take(4) == {}


def test_phases_are_where_they_are(workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    case = ALL_CASES["grpo-evaluation"]
    case = replace(case, config={**case.config, "save_strategy": "steps", "save_steps": 1})
    trainer = build(case, OURS, workshop, str(tmp_path), Record())
    calls = []
    monkeypatch.setattr(PhaseTimes, "line", lambda self: calls.append(dict(self.seconds)) or "")
    trainer.train()
    assert calls[0].keys() == {"evaluation", "generation", "rewards", "passes", "checkpoints"}
    assert all(seconds > 0 for seconds in calls[0].values())


def test_nothing_is_said_without_show_plan(workshop: Workshop, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    case = replace(ALL_CASES["sft-nll-full"], ours={"show_plan": False})
    trainer = build(case, OURS, workshop, str(tmp_path), Record())
    trainer.train()
    trainer.save_model()
    assert caplog.messages == []


@pytest.mark.parametrize("name", ["sft-nll-full", "sft-nll-lora"])
def test_the_last_line_says_where_the_model_is(
    name: str, workshop: Workshop, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    case = ALL_CASES[name]
    case = replace(case, config={**case.config, "save_strategy": "steps", "save_steps": 1})
    trainer = build(case, OURS, workshop, str(tmp_path), Record())
    trainer.train()
    assert not [x for x in caplog.messages if " is in " in x]  # checkpoints are not the model
    trainer.save_model(str(tmp_path / "saved"))
    base = workshop.model("tied")
    where = str(tmp_path / "saved")
    assert (
        caplog.messages[-1]
        == {
            "sft-nll-full": f"The model is in {where}.",
            "sft-nll-lora": f"The adapter is in {where}, without its base model ({base}).",
        }[name]
    )


@pytest.mark.parametrize(("kind", "options"), [("grpo", {"beta": 0.1}), ("grpo", {}), ("rloo", {"beta": 0.1})])
def test_logs_have_the_seconds_of_each_phase(
    kind: str, options: dict[str, Any], workshop: Workshop, tmp_path: Path
) -> None:
    def slow_reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        time.sleep(0.2)
        return [float(ids[0] % 7) for ids in completion_ids]

    bench = Bench(workshop, tmp_path)
    evaluation = {"eval_strategy": "steps", "eval_steps": 2, "eval_dataset": PROMPTS.select(range(4))}
    begun = time.monotonic()
    schedule = {"max_steps": 4, "logging_steps": 2, "num_iterations": 1, **evaluation}
    getattr(bench, kind)(reward_funcs=slow_reward, **schedule, **options)
    elapsed = time.monotonic() - begun
    logs = [log for log in bench.trainer.state.log_history if "loss" in log]
    phases = ["generation", "rewards", "training", *(["passes"] if options else [])]
    assert [{name for name in log if name.startswith("seconds/")} for log in logs] == [
        {f"seconds/{phase}" for phase in phases}
    ] * 2
    assert all(log["seconds/rewards"] >= 0.2 for log in logs)
    assert all(log[f"seconds/{phase}"] > 0 for log in logs for phase in phases)
    # Of four steps together, without the evaluations, whose rewards take as long
    assert sum(2 * log[f"seconds/{phase}"] for log in logs for phase in phases) < elapsed - 2 * 0.2
    assert not any("seconds/" in name for log in bench.trainer.state.log_history if "loss" not in log for name in log)


def test_a_phase_that_did_not_run_is_absent_from_the_log(workshop: Workshop, tmp_path: Path) -> None:
    bench = Bench(workshop, tmp_path)
    bench.grpo(max_steps=2, num_iterations=2, logging_steps=1, learning_rate=0.0)
    first, second = [log for log in bench.trainer.state.log_history if "loss" in log]
    assert {"seconds/generation", "seconds/rewards", "seconds/training"} <= first.keys()
    assert [name for name in second if name.startswith("seconds/")] == ["seconds/training"]
    bench.dpo()
    assert not any(name.startswith("seconds/") for log in bench.trainer.state.log_history for name in log)
