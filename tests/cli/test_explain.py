"""`trl-ext explain` is what then happens: each row of its plan, against the rows and tokens that a run feeds."""

import re
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from explain_runs import Forward, Happened, Run, explained, happened, least, rows_of, run_of
from tiny import Workshop

_LORA = ["--use_peft", "true", "--lora_target_modules", "all-linear", "--lora_dropout", "0"]
_EVALUATION = ["--eval_strategy", "steps", "--eval_steps", "2", "--per_device_eval_batch_size", "4"]


@dataclass(frozen=True)
class Case:
    """Arguments, the actions that the plan is to have for them, and words that are to stand in its reasons."""

    method: str
    options: list[str]
    says: dict[str, str]
    words: tuple[str, ...] = ()
    reward: str = "id"


def _dpo(*options: str, reference: str, packing: str = "run", words: tuple[str, ...] = ()) -> Case:
    return Case("dpo", [*options], {"reference": reference, "packing": packing}, words)


def _grpo(*options: str, words: tuple[str, ...] = (), reward: str = "id", **says: str) -> Case:
    return Case("grpo", [*options], {"reference": "skip", "packing": "run", **says}, words, reward)


def _slices(steps_per_generation: int, accumulation: int, steps: int) -> list[str]:
    schedule = {"steps_per_generation": steps_per_generation, "gradient_accumulation_steps": accumulation}
    return [f"--{name}={value}" for name, value in {**schedule, "max_steps": steps}.items()]


CASES = {
    "dpo, LoRA": _dpo(*_LORA, reference="reuse", words=("the adapter off", "on disk")),
    "dpo, LoRA, no store": _dpo(*_LORA, "--reference_store", "off", reference="run"),
    "dpo, a reference model, in memory": _dpo("--reference_store", "memory", reference="reuse", words=("in memory",)),
    "dpo, a reference model, no store": _dpo(
        *("--reference_store", "off", "--gradient_accumulation_steps", "2"),
        reference="run",
        words=("a copy of the policy",),
    ),
    "dpo, precomputed": _dpo(
        "--precompute_ref_log_probs", "true", reference="reuse", words=("before training starts",)
    ),
    "dpo, precomputed, LoRA, evaluation": _dpo(
        *(*_LORA, *_EVALUATION, "--precompute_ref_log_probs", "true", "--reference_store", "memory"), reference="reuse"
    ),
    "dpo, sft alone": _dpo("--loss_type", "sft", reference="skip"),
    "dpo, padded": _dpo("--padding_free", "false", "--reference_store", "off", reference="run", packing="skip"),
    "dpo, prompts apart": _dpo(*_LORA, "--share_prompts", "false", reference="reuse", words=("computed separately",)),
    "dpo, evaluation": _dpo(*_LORA, *_EVALUATION, "--gradient_accumulation_steps", "2", reference="reuse"),
    "dpo, dropout": _dpo(
        *(*_LORA[:-1], "0.5", "--disable_dropout", "false", *_EVALUATION), reference="reuse", words=("dropout is",)
    ),
    "grpo": _grpo(words=("fully masked completions are skipped",), reward="half_dead"),
    "grpo, LoRA, beta": _grpo(
        *(*_LORA, "--beta", "0.1"), reference="run", words=("completions are processed, because",), reward="half_dead"
    ),
    "grpo, a reference model": _grpo("--beta", "0.1", reference="run"),
    "grpo, two iterations": _grpo("--num_iterations", "2", "--max_steps", "4", words=("for the later iterations",)),
    "grpo, two steps of a generation": _grpo(*_slices(4, 2, 4), words=("scored just before", "kept together")),
    "grpo, two steps and iterations": _grpo(*_slices(4, 2, 4), "--num_iterations", "2", words=("scored just before",)),
    "grpo, on-policy slices": _grpo(*_slices(2, 2, 2), "--beta", "0.1", reference="run", words=("kept together",)),
    "grpo, rows in TRL's order": _grpo(
        *(*_slices(2, 2, 2), "--keep_groups_together", "false"), **{"micro-batches": "skip"}
    ),
    "grpo, padded": _grpo("--padding_free", "false", packing="skip", reward="half_dead"),
    "grpo, prompts apart": _grpo("--share_prompts", "false", *_slices(2, 2, 2), words=("computed separately",)),
    "grpo, dead groups, two iterations": _grpo(*_slices(2, 2, 4), "--num_iterations", "2", reward="half_dead"),
    "grpo, parts": _grpo("--max_tokens_per_micro_batch", "12", words=("at most 12 tokens",)),
    "grpo, evaluation": _grpo(*_EVALUATION, "--beta", "0.1", reference="run"),
}
FAST = {"dpo, LoRA", "grpo, two steps of a generation"}


@pytest.mark.parametrize("name", [x if x in FAST else pytest.param(x, marks=pytest.mark.slow) for x in CASES])
def test_what_is_explained_is_what_is_fed(
    name: str, workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    case = CASES[name]
    run = run_of(case.method, case.options, workshop, tmp_path)
    plan = explained(run, monkeypatch, capsys)
    shutil.rmtree(tmp_path / "datasets" / "trl_ext_reference_log_probs", ignore_errors=True)
    assert {row: plan[row][0] for row in case.says} == case.says
    for words in case.words:
        assert any(words in reason for _, reason in plan.values()), words
    seen = happened(run, monkeypatch, case.reward)
    assert rows_of(seen.trainer) == plan
    (_check_dpo if case.method == "dpo" else _check_grpo)(plan, run, seen)
    _check_packing(plan, run, seen)


@pytest.mark.slow
def test_a_later_run_reads_what_an_earlier_one_has_scored(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    run = run_of("dpo", [*_LORA, "--reference_store_dir", str(tmp_path / "store")], workshop, tmp_path)
    action, reason = explained(run, monkeypatch, capsys)["reference"]
    assert action == "reuse"
    assert "or in an earlier run" in reason
    first, later = (happened(run, monkeypatch, "id").scored("reference") for _ in range(2))
    assert first.total() == 16
    assert 0 < later.total() <= 4  # the check that the reference is still the same


def _check_dpo(plan: dict[str, tuple[str, str]], run: Run, seen: Happened) -> None:
    epochs, evaluations = 2, _evaluations(seen)
    train = Counter({row: epochs * count for row, count in Counter(run.rows["train"]).items()})
    test = Counter({row: evaluations * count for row, count in Counter(run.rows["test"]).items() if evaluations})
    assert plan["policy"][0] == "run"
    assert seen.scored("policy") == train
    assert seen.scored("evaluation") == test
    assert not seen.of("old policy")
    action, reason = plan["reference"]
    if action == "skip":
        assert not seen.of("reference")
    elif action == "run":
        assert seen.scored("reference") == train + test
    else:
        assert seen.scored("reference") == Counter(set(train) | set(test))
        assert ("before training starts" in reason) == all(x.step == 0 for x in seen.of("reference"))


def _check_grpo(plan: dict[str, tuple[str, str]], run: Run, seen: Happened) -> None:
    args = seen.trainer.args
    batches = [x for x in seen.sampled if x.rows[0][0] in run.prompts["train"]]
    tests = [x for x in seen.sampled if x.rows[0][0] not in run.prompts["train"]]
    assert sum(len(x.rows) for x in tests) == _evaluations(seen) * args.num_generations_eval * len(run.data["test"])

    live = "zero-advantage and fully masked completions are skipped" in plan["policy"][1]
    rows = Counter(row for batch in batches for row in (batch.live if live else batch.sequences))
    assert live or rows == Counter(row for batch in batches for row in batch.sequences)
    assert seen.scored("policy") == Counter({row: args.num_iterations * count for row, count in rows.items()})
    assert seen.scored("evaluation") == Counter(row for test in tests for row in test.sequences)

    _, reason = plan["old policy"]
    late = _slices_that_meet_other_weights(args)
    assert len(seen.of("old policy")) == late
    assert ("scored just before" in reason) == (late > 0)
    assert not seen.scored("old policy") - rows

    every = Counter(row for batch in seen.sampled for row in batch.sequences)
    assert seen.scored("reference") == (every if plan["reference"][0] == "run" else Counter())
    _check_micro_batches(plan["micro-batches"], args, seen)


def _slices_that_meet_other_weights(args: object) -> int:
    """Of all generation batches: the slices whose first visit comes after a step that came after their generation."""
    per_generation, accumulation = args.steps_per_generation, args.gradient_accumulation_steps
    generations = args.max_steps * accumulation // (per_generation * args.num_iterations)
    firsts = [generation * per_generation * args.num_iterations for generation in range(generations)]
    return sum((first + i) // accumulation > first // accumulation for first in firsts for i in range(per_generation))


def _check_micro_batches(decision: tuple[str, str], args: object, seen: Happened) -> None:
    _, reason = decision
    forwards = seen.of("policy")
    micro_batches = args.max_steps * args.gradient_accumulation_steps
    budget = re.search(r"in parts of one (?:pair|row), or of at most (\d+) tokens", reason)
    if budget:
        assert all(x.fed <= int(budget[1]) for x in forwards if len(x.rows) > 1)
        assert len(forwards) > micro_batches
        return
    assert len(forwards) == micro_batches
    prompt_of = {p + c: p for batch in seen.sampled for p, c in batch.rows}
    mixed = [forward for forward in forwards if len({prompt_of[row] for row in forward.rows}) > 1]
    if args.steps_per_generation == 1:
        return
    if "kept together" not in reason:
        assert mixed
    # A micro-batch has room for one group, where a step takes all that TRL has shuffled
    elif args.gradient_accumulation_steps % args.steps_per_generation == 0:
        assert not mixed


def _check_packing(plan: dict[str, tuple[str, str]], run: Run, seen: Happened) -> None:
    action, reason = plan["packing"]
    assert len({x.fed for x in seen.forwards}) > 1
    for forward in seen.forwards:
        if action == "run":
            shared = "computed once" in reason and not (forward.training and "not in training" in reason)
            assert forward.fed == least(forward.rows, shared=shared), forward
        else:
            assert forward.fed == len(forward.given) * _width(run, seen, forward), forward


def _width(run: Run, seen: Happened, forward: Forward) -> int:
    """Columns of the padded batch that the rows stand in."""
    if run.method == "dpo":
        return max(len(row) for row in forward.given)
    rows = set(forward.given)
    return next(x.width for x in seen.sampled if rows <= set(x.sequences))


def _evaluations(seen: Happened) -> int:
    return sum("eval_loss" in log for log in seen.trainer.state.log_history)
