"""Options, rollouts and rewards that GRPO and RLOO cannot follow stop in one line; what TRL trains correctly trains."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trl
from datasets import Dataset

import trl_ext
from short_training import PROMPTS, Bench, reward
from tiny import Workshop, prompts

KINDS = ("grpo", "rloo")
CHAT = prompts(6, seed=1, conversational=True)


def sampled(**options: Any) -> Callable[[Bench, str], None]:
    return lambda bench, kind: getattr(bench, kind)(generation_kwargs=options)


def with_column(name: str, value: Any, rows: Dataset = PROMPTS) -> Dataset:
    return rows.add_column(name, [value] * len(rows))


def rollout(*lengths: int, extra: int = 0) -> Callable[..., dict[str, Any]]:
    """Return a rollout whose completions have these lengths."""

    def called(given: list[str], trainer: Any) -> dict[str, Any]:
        ids = [[3, 4, 5, 1][:length] for length in lengths[: len(given)]] + [[3, 1]] * extra
        return {"prompt_ids": [[7]] * len(ids), "completion_ids": ids, "logprobs": None}

    return called


# What is done; then the message from its start
MISTAKES: dict[str, tuple[Callable[[Bench, str], None], str]] = {
    "stop strings": (sampled(stop_strings=["w1"]), "`generation_kwargs` has `stop_strings=['w1']`, but TRL calls"),
    "several sequences": (
        sampled(num_return_sequences=2),
        "`generation_kwargs` has `num_return_sequences=2`, but TRL samples one completion for each row of a batch. Set "
        "`num_generations` instead.",
    ),
    "more than tokens": (
        sampled(return_dict_in_generate=True, output_scores=True),
        "`generation_kwargs` has `return_dict_in_generate=True`, but TRL expects only the tokens. Leave it out.",
    ),
    "a temperature of 0": (sampled(temperature=0.0), "`generation_kwargs` has `temperature=0.0`, which must be above"),
    "a lookup of several rows": (
        sampled(prompt_lookup_num_tokens=3),
        "`generation_kwargs` has `prompt_lookup_num_tokens=3`, which `generate` supports for one row at a time",
    ),
    "another end of completions": (
        sampled(eos_token_id=[1, 7]),
        "`generation_kwargs` has `eos_token_id=[1, 7]`, but TRL cuts completions after [1], and would train on the "
        "padding after 7. Set `model.generation_config.eos_token_id`.",
    ),
    "no dictionary": (
        lambda bench, kind: getattr(bench, kind)(generation_kwargs="top_k"),
        "`generation_kwargs` must be a dictionary, got 'top_k'.",
    ),
    "images of None": (
        lambda bench, kind: getattr(bench, kind)(
            model=bench.workshop.model("chat"), train_dataset=with_column("image", None, CHAT)
        ),
        '`image` of `train_dataset` is None in every row. Remove the column: `dataset.remove_columns("image")`.',
    ),
    "lists of images of None": (
        lambda bench, kind: getattr(bench, kind)(train_dataset=with_column("images", None)),
        "`images` of `train_dataset` is None in every row.",
    ),
    "images for a model of text": (
        lambda bench, kind: getattr(bench, kind)(train_dataset=with_column("image", "a.png")),
        "`image` of `train_dataset` is for images, but the model reads none. Remove the column",
    ),
}
OF_GRPO: dict[str, tuple[Callable[[Bench], None], str]] = {
    "Dr. GRPO without a length": (
        lambda bench: bench.grpo(loss_type="dr_grpo", max_completion_length=None, rollout_func=rollout(4, 3, 2, 1)),
        '`max_completion_length` is None, but `loss_type="dr_grpo"` divides by it. Set it to a number of tokens.',
    ),
    "an empty completion": (
        lambda bench: bench.grpo(rollout_func=rollout(4, 3, 0, 1)),
        "`rollout_func` returned an empty completion in row 2. Return at least one token, such as the token that ends "
        "completions.",
    ),
    "a completion too many": (
        lambda bench: bench.grpo(rollout_func=rollout(4, 3, 2, 1, extra=1)),
        "`rollout_func` returned 5 completions for 4 prompts. TRL repeats a prompt for each of its completions: return "
        "one completion for each entry of `prompts`.",
    ),
}
FAST = {("stop strings", "grpo"), ("several sequences", "rloo"), ("images of None", "grpo")}


def _marked(names: Any) -> list[Any]:
    cases = [(name, kind) for name in names for kind in KINDS]
    return [case if case in FAST else pytest.param(*case, marks=pytest.mark.slow) for case in cases]


@pytest.mark.parametrize(("name", "kind"), _marked(MISTAKES))
def test_what_cannot_be_sampled_stops_before_a_step(name: str, kind: str, workshop: Workshop, tmp_path: Path) -> None:
    make, message = MISTAKES[name]
    bench = Bench(workshop, tmp_path)
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the message is compared
        make(bench, kind)
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)
    assert bench.trainer is None  # it stops when the trainer is built


@pytest.mark.parametrize("name", ["an empty completion", *(pytest.param(x, marks=pytest.mark.slow) for x in OF_GRPO)])
def test_what_grpo_cannot_train_stops_before_a_step(name: str, workshop: Workshop, tmp_path: Path) -> None:
    make, message = OF_GRPO[name]
    bench = Bench(workshop, tmp_path)
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the message is compared
        make(bench)
    assert str(raised.value) == message
    assert bench.trainer is None or bench.trainer.state.global_step == 0


# What looks like a mistake, and trains in TRL too
ACCEPTED: dict[str, Callable[[Bench, str], None]] = {
    "a known end of completions": sampled(eos_token_id=1),
    "one sequence": sampled(num_return_sequences=1, use_cache=False, min_new_tokens=2),
    "the temperature again": sampled(temperature=1.0, max_new_tokens=2),
    "scores that nothing reads": sampled(output_scores=True),
    "no stop string": sampled(stop_strings=None, prompt_lookup_num_tokens=None),
    "beams": sampled(num_beams=2),
    "empty lists of images": lambda bench, kind: getattr(bench, kind)(train_dataset=with_column("images", [])),
}


@pytest.mark.slow
@pytest.mark.parametrize("package", [trl_ext, trl], ids=["ours", "stock"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ACCEPTED)
def test_what_can_be_sampled_trains(
    name: str, kind: str, package: Any, workshop: Workshop, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(workshop, tmp_path, package)
    ACCEPTED[name](bench, kind)
    assert bench.trainer.state.global_step == 1
    assert "generation_kwargs" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("package", [trl_ext, trl], ids=["ours", "stock"])
def test_a_rollout_of_one_token_without_a_length_trains(package: Any, workshop: Workshop, tmp_path: Path) -> None:
    bench = Bench(workshop, tmp_path, package)
    bench.grpo(max_completion_length=None, loss_type="dapo", rollout_func=rollout(4, 1, 1, 2))
    assert bench.trainer.state.global_step == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"do_sample": False}, "`do_sample=False`, so all completions of a prompt are equal"),
        ({"temperature": 0.5}, "`temperature=0.5`, but log-probs are computed with `temperature=1.0`"),
        ({"top_q": 3}, "`top_q`, which `generate` does not know, and may ignore. Did you mean `top_"),
    ],
)
def test_a_doubtful_option_is_a_warning(
    options: dict[str, Any], words: str, workshop: Workshop, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(workshop, tmp_path)
    bench.grpo(generation_kwargs=options)
    assert bench.trainer.state.global_step == 1
    assert words in caplog.text


# Rewards that are no numbers


def nan_in_every_batch(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [math.nan if place == 2 else float(place) for place, _ in enumerate(completion_ids)]


def _rewarded(package: Any, kind: str, workshop: Workshop, folder: Path, rewards: Any, **config: Any) -> Any:
    bench = Bench(workshop, folder, package)
    getattr(bench, kind)(reward_funcs=rewards, max_steps=2, logging_steps=1, learning_rate=1e-2, **config)
    return bench.trainer


@pytest.mark.parametrize("kind", [pytest.param("rloo", marks=pytest.mark.slow), "grpo"])
def test_nan_is_none_in_every_batch_as_in_trl(
    kind: str, workshop: Workshop, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours = _rewarded(trl_ext, kind, workshop, tmp_path / "ours", nan_in_every_batch)
    warnings = [x.message for x in caplog.records if "`nan_in_every_batch` returned nan for completion 2" in x.message]
    assert len(warnings) == 1
    stock = _rewarded(trl, kind, workshop, tmp_path / "stock", nan_in_every_batch)
    for step in range(2):
        log, of_stock = ours.state.log_history[step], stock.state.log_history[step]
        for name in ("loss", "reward", "reward_std", "grad_norm"):
            assert log[name] == pytest.approx(of_stock[name], rel=1e-4, abs=1e-6)  # the advantages of RLOO sum to 0


def infinite(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [math.inf if place == 2 else float(place) for place, _ in enumerate(completion_ids)]


def test_an_infinite_reward_that_is_clipped_trains_as_in_trl(workshop: Workshop, tmp_path: Path) -> None:
    clipped = {"reward_clip_range": (-2.0, 2.0)}
    ours = _rewarded(trl_ext, "rloo", workshop, tmp_path / "ours", infinite, **clipped)
    stock = _rewarded(trl, "rloo", workshop, tmp_path / "stock", infinite, **clipped)
    assert ours.state.log_history[0]["loss"] == pytest.approx(stock.state.log_history[0]["loss"], rel=1e-4)
    assert ours.state.log_history[1]["grad_norm"] == pytest.approx(stock.state.log_history[1]["grad_norm"], rel=1e-4)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        pytest.param("rloo", {}, marks=pytest.mark.slow),
        ("rloo", {"reward_clip_range": (-2.0, None)}),
        pytest.param("grpo", {}, marks=pytest.mark.slow),
    ],
)
def test_an_infinite_reward_that_is_not_clipped_stops(
    kind: str, config: dict[str, Any], workshop: Workshop, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"completion 2 of the first generation batch got \[inf\] from \['infinite'\]"):
        _rewarded(trl_ext, kind, workshop, tmp_path, infinite, **config)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_an_infinite_reward_without_a_weight_trains(kind: str, workshop: Workshop, tmp_path: Path) -> None:
    trainer = _rewarded(trl_ext, kind, workshop, tmp_path, [reward, infinite], reward_weights=[1.0, 0.0])
    assert trainer.state.global_step == 2
