"""`metric_for_best_model`: a name that no evaluation gives is an error before training; nothing is lost otherwise."""

import inspect
import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import trl

import trl_ext
from short_training import LABELLED, PAIRS, PROMPTS, TEXTS, Bench, reward
from tiny import Workshop
from trl_ext.checks.best_metric import _metrics_of_trl
from trl_ext.compat.choices import METRICS

DATA = {"sft": TEXTS, "dpo": PAIRS, "kto": LABELLED, "grpo": PROMPTS, "rloo": PROMPTS, "reward": PAIRS}
EVALUATES = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4, "max_steps": 2}


def train(bench: Bench, kind: str, metric: str | None, **given: Any) -> Any:
    given = {"eval_dataset": DATA[kind], **EVALUATES, "metric_for_best_model": metric, **given}
    getattr(bench, kind)(**given)
    return bench.trainer


def extra(completions: list[str], log_metric: Callable[[str, float], None], **_: Any) -> list[float]:
    log_metric("extra", 1.0)
    return [float(len(text)) for text in completions]


def extra_by_key(completions: list[str], **given: Any) -> list[float]:
    given["log_" + "metric"]("extra", 1.0)
    return [float(len(text)) for text in completions]


def unread(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


class OfUser(transformers.TrainerCallback):
    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        metrics["eval_extra"] = 1.0


def with_own_metrics(base: Any) -> Any:
    class Own(base):
        def evaluate(self, *given: Any, **named: Any) -> Any:
            return {**super().evaluate(*given, **named), "eval_extra": 1.0}

    return Own


UNKNOWN = {
    "SFT": ("sft", "eval_accuracy", {}, "'eval_entropy'"),
    "DPO": ("dpo", "rewards/accuracy", {}, "'eval_rewards/accuracies'"),
    "KTO": ("kto", "rewards/accuracies", {}, "'eval_rewards/margins'"),
    "GRPO": ("grpo", "eval_rewards/rewards/mean", {}, "'eval_rewards/reward/mean'"),
    "GRPO, keywords that nothing reads": ("grpo", "extra", {"reward_funcs": unread}, "'eval_reward'"),
    "RLOO": ("rloo", "rewards", {}, "'eval_reward'"),
    "reward modeling": ("reward", "accuracies", {}, "'eval_accuracy'"),
    "several sets": ("dpo", "loss", {"eval_dataset": {"a": PAIRS, "b": PAIRS}}, "'eval_a_loss'"),
    "DPO without a reference": ("dpo", "rewards/margins", {"loss_type": "sft"}, "'eval_runtime'"),
}


@pytest.mark.parametrize(
    "name", [x if x in ("DPO", "several sets") else pytest.param(x, marks=pytest.mark.slow) for x in UNKNOWN]
)
def test_a_name_that_no_evaluation_gives_stops_before_a_step(name: str, workshop: Workshop, tmp_path: Path) -> None:
    kind, metric, given, known = UNKNOWN[name]
    bench = Bench(workshop, tmp_path)
    with pytest.raises(
        ValueError, match=f"^Unknown `metric_for_best_model` '{metric}'. The evaluation gives: "
    ) as raised:
        train(bench, kind, metric, **given)
    assert known in str(raised.value)
    assert bench.trainer.state.global_step == 0


KNOWN = {
    "the loss": ("dpo", "loss", {}),
    "a reward": ("dpo", "eval_rewards/accuracies", {}),
    "entropy": ("sft", "entropy", {}),
    "a reward function": ("grpo", "eval_rewards/reward/mean", {}),
    "lengths": ("rloo", "completions/mean_length", {}),
    "the KL term": ("kto", "kl", {}),
    "one of several sets": ("dpo", "b_loss", {"eval_dataset": {"a": PAIRS, "b": PAIRS}}),
    "of a reward function": ("grpo", "extra", {"reward_funcs": extra}),
    "of a reward function, by a key": ("rloo", "extra", {"reward_funcs": extra_by_key}),
    "of a callback": ("dpo", "extra", {"callbacks": [OfUser()]}),
    "of a subclass": ("dpo", "extra", {"subclass": with_own_metrics}),
    "of no evaluation": ("dpo", "extra", {"eval_strategy": "no"}),
    "the best model": ("sft", "mean_token_accuracy", {"load_best_model_at_end": True, "save_strategy": "best"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("package", [trl_ext, trl], ids=["ours", "stock"])
@pytest.mark.parametrize("name", KNOWN)
def test_a_name_that_an_evaluation_gives_trains(name: str, package: Any, workshop: Workshop, tmp_path: Path) -> None:
    kind, metric, given = KNOWN[name]
    assert train(Bench(workshop, tmp_path, package), kind, metric, **given).state.global_step == 2


def sometimes(base: Any) -> Any:
    class Own(base):
        def evaluate(self, *given: Any, **named: Any) -> Any:
            return super().evaluate(*given, **named)

    return Own


@pytest.mark.parametrize("scheduler", ["linear", pytest.param("reduce_lr_on_plateau", marks=pytest.mark.slow)])
def test_what_was_trained_is_saved_before_an_unknown_name_stops(
    scheduler: str, workshop: Workshop, tmp_path: Path
) -> None:
    bench = Bench(workshop, tmp_path)
    message = r"^Unknown `metric_for_best_model` 'bleu'\. .* and resume from `checkpoint-1`"
    with pytest.raises(ValueError, match=message):
        train(bench, "sft", "bleu", subclass=sometimes, lr_scheduler_type=scheduler)
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-1")
    weights = dict(bench.trainer.model.named_parameters())
    for name, param in saved.named_parameters():
        assert torch.equal(param, weights[name])


@pytest.mark.slow
def test_a_metric_without_a_value_is_not_the_best(workshop: Workshop, tmp_path: Path) -> None:
    def none(completions: list[str], **_: Any) -> list[None]:
        return [None for _ in completions]

    trainer = train(Bench(workshop, tmp_path), "grpo", "rewards/none/mean", reward_funcs=[reward, none])
    assert trainer.state.global_step == 2
    assert trainer.state.best_metric is None


# Several evaluation sets


@pytest.mark.parametrize("kind", ["dpo", *(pytest.param(x, marks=pytest.mark.slow) for x in DATA if x != "dpo")])
def test_each_of_several_sets_keeps_its_metrics(kind: str, workshop: Workshop, tmp_path: Path) -> None:
    sets = {"first": DATA[kind].select([0, 1, 2, 3]), "last": DATA[kind].select([2, 3, 4, 5])}
    trainer = train(Bench(workshop, tmp_path), kind, None, max_steps=1, eval_dataset=sets)
    found = trainer.evaluate()
    names = [x for x in found if x.startswith("eval_") and f"eval_last_{x.removeprefix('eval_')}" in found]
    assert len(names) > 3
    for name in names:
        short = name.removeprefix("eval_")
        if short.startswith(("skipped", "num_tokens")) or kind in ("grpo", "rloo"):  # counts; samples
            continue
        assert found[name] == found[f"eval_last_{short}"]  # as in TRL
        assert f"eval_first_{short}" in found
    for of_set in sets:
        assert found[f"eval_{of_set}_loss"] is not None


@pytest.mark.slow
def test_a_metric_of_the_last_set_is_a_warning(
    workshop: Workshop, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sets = {"a": PAIRS, "b": PAIRS}
    train(Bench(workshop, tmp_path), "dpo", "rewards/margins", eval_dataset=sets)
    assert (
        "is the metric of the last evaluation set. To use the metric of a certain set, choose from: "
        "'eval_a_rewards/margins'" in caplog.text
    )
    caplog.clear()
    trainer = train(Bench(workshop, tmp_path), "dpo", "b_rewards/margins", eval_dataset=sets)
    assert "evaluation sets" not in caplog.text
    assert trainer.state.best_metric is not None


def test_the_metrics_are_those_of_trl() -> None:
    for name, patterns in METRICS.items():
        source = inspect.getsource(inspect.getmodule(getattr(trl, name)))  # type: ignore[arg-type]
        logged = set(re.findall(r'_metrics\[mode\]\["([^"]+)"\]', source))
        assert len(logged) > 3
        assert [x for x in logged if not any(fnmatchcase(x, pattern) for pattern in patterns)] == []
        assert [x for x in patterns if not any(fnmatchcase(y, x) for y in logged)] == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", DATA)
def test_an_evaluation_gives_no_other_metric(kind: str, workshop: Workshop, tmp_path: Path) -> None:
    trainer = train(Bench(workshop, tmp_path), kind, None)
    names = [x.removeprefix("eval_") for x in trainer.evaluate() if x.startswith("eval_")]
    known = [*_metrics_of_trl(trainer), "skipped/*", "tokens_processed/*", "head/*", "loss", "runtime", "*_per_second"]
    assert [
        x for x in names if not any(fnmatchcase(x, pattern) for pattern in (*known, "model_preparation_time"))
    ] == []
