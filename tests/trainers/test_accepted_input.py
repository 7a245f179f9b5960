"""Input that only looks like a mistake trains as in TRL, and the checks do not read whole datasets."""

import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets.arrow_dataset
import numpy as np
import pytest
import torch
import trl
from datasets import Dataset, IterableDataset
from transformers import LlamaConfig, LlamaForSequenceClassification
from trl.trainer.dpo_trainer import DataCollatorForPreference

import trl_ext
from short_training import PAIR, PAIRS, PROMPTS, Bench, of_answers, of_completions, reward, tokenizer, with_more_tokens
from tiny import V_WORDS, Workshop, chat_tokenizer, preferences, prompts, scripted_rollout
from trl_ext.checks.data import _check_prompts, check_enough_prompts, checked_rows, pair_columns
from trl_ext.checks.sampled_rows import sampled_rows
from trl_ext.checks.values import check_numbers

SOURCED = PROMPTS.add_column("source", ["a"] * len(PROMPTS))


def own_loss(base: Any) -> Any:
    class Own(base):
        def _compute_loss(self, model: Any, inputs: Any, return_outputs: bool) -> Any:
            self.loss_types, self.beta = ["sigmoid"], 0.1
            return super()._compute_loss(model, inputs, return_outputs)

    return Own


def own_level(base: Any) -> Any:
    class Own(base):
        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            self.importance_sampling_level = "sequence"
            return super()._compute_loss(model, inputs)

    return Own


def own_preparation(base: Any) -> Any:
    class Own(base):
        def _prepare_dataset(self, dataset: Any, *positional: Any, **keywords: Any) -> Any:
            dataset = dataset.filter(lambda row: row["better"] is not None)
            return super()._prepare_dataset(dataset.rename_column("better", "chosen"), *positional, **keywords)

    return Own


def own_call_of_rewards(base: Any) -> Any:
    class Own(base):
        def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
            return torch.tensor([[float(len(x))] for x in self.reward_funcs[0](completions, completion_ids_list)])

    return Own


def own_sampler(base: Any) -> Any:
    class Own(base):
        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return [0] * self.args.generation_batch_size

    return Own


def by_place(completions: Any, completion_ids: Any) -> list[list[int]]:
    return completion_ids


def none_for_one(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    return [None if place == 1 else float(place) for place, _ in enumerate(completion_ids)]


def sometimes(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    return [None if place % 2 else 1.0 for place, _ in enumerate(completion_ids)]


def sometimes_nan(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [math.nan if place % 2 else 1.0 for place, _ in enumerate(completion_ids)]


async def awaited(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    return none_for_one(completion_ids)


class Rewarder:
    __name__ = "rewarder"

    def __call__(self, completion_ids: list[list[int]], **_: Any) -> Any:
        return torch.arange(len(completion_ids))


@functools.wraps(of_completions)
def wrapped(**given: Any) -> list[float]:
    return of_completions(given["completions"])


def with_all_names(prompts: Any, completions: Any, completion_ids: Any, **kwargs: Any) -> list[float]:
    return reward(completion_ids)


def without_columns(
    prompts: Any, completions: Any, completion_ids: Any, trainer_state: Any, log_extra: Any, log_metric: Any
) -> list[float]:
    return reward(completion_ids)


def of_extras(completions: Any, score: list[float], **_: Any) -> list[float]:
    return score


def with_scores(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """A rollout that renders messages itself, and adds a column for the rewards."""
    texts = [x if isinstance(x, str) else x[-1]["content"] for x in prompts]
    output = scripted_rollout(texts, trainer)
    return output | {"score": [float(len(ids)) for ids in output["completion_ids"]]}


def short_rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """Return completions of up to 3 tokens, whatever `max_completion_length` is."""
    held, trainer.max_completion_length = trainer.max_completion_length, 3
    try:
        return scripted_rollout(prompts, trainer)
    finally:
        trainer.max_completion_length = held


class Room:
    """An environment that owns the data."""

    def reset(self, **_: Any) -> str:
        return "How many?"

    def count(self, text: str) -> int:
        """
        Counts letters.

        Args:
            text: what is counted

        Returns:
            How many there are.
        """
        return len(text)

    def get_reward(self) -> float:
        return random.random()


def reward_model() -> Any:
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=V_WORDS, num_labels=1, pad_token_id=0, eos_token_id=1, bos_token_id=None, **shape)
    return LlamaForSequenceClassification(config)


def made_of_questions(batch: dict[str, list[str]]) -> dict[str, list[str]]:
    return {"prompt": batch["question"], "answer": ["w1" for _ in batch["question"]]}


def transformed() -> Dataset:
    return PROMPTS.rename_column("prompt", "question").with_transform(made_of_questions)


def filtered() -> Dataset:
    rows = Dataset.from_list([PAIR, {**PAIR, "chosen": None}, {**PAIR, "rejected": None}, PAIR, PAIR])
    return rows.select([0, 3, 4])


def chat_pairs() -> Dataset:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    rows = preferences(4, seed=1, conversational=True)
    return rows.map(lambda _, place: {"tools": tools, "source": place}, with_indices=True)


def bare_chat_tokenizer() -> Any:
    made = chat_tokenizer()
    made.pad_token = made.eos_token = None
    return made


ACCEPTED: dict[str, Callable[[Bench], None]] = {
    # Data
    "pairs without prompts": lambda b: b.dpo(
        train_dataset=Dataset.from_list([{"chosen": "w1 w2", "rejected": " w3", "source": "a"}] * 4)
    ),
    "prompts within the completions": lambda b: b.dpo(
        train_dataset=Dataset.from_list([{"chosen": "w1 w2 w3", "rejected": "w1 w2 w4", "question": "w1"}] * 4)
    ),
    "short prompts within the completions": lambda b: b.dpo(
        train_dataset=Dataset.from_list([{"chosen": "w1w2", "rejected": "w1w3", "question": "w1"}] * 4)
    ),
    "rows that were None and were filtered out": lambda b: b.dpo(train_dataset=filtered()),
    "a stream": lambda b: b.dpo(train_dataset=PAIRS.to_iterable_dataset()),
    "a stream, GRPO": lambda b: b.grpo(train_dataset=PROMPTS.to_iterable_dataset()),
    "a stream whose columns are unknown": lambda b: b.dpo(
        train_dataset=IterableDataset.from_generator(lambda: iter([PAIR] * 4))
    ),
    "a stream of many shards": lambda b: b.dpo(train_dataset=PAIRS.to_iterable_dataset(num_shards=3)),
    "messages, tools and another column": lambda b: b.dpo(model=b.workshop.model("chat"), train_dataset=chat_pairs()),
    "messages, GRPO": lambda b: b.grpo(
        model=b.workshop.model("chat"), train_dataset=prompts(6, seed=1, conversational=True)
    ),
    "prompts and a reward's column made by a transform": lambda b: b.grpo(
        train_dataset=transformed(), reward_funcs=of_answers
    ),
    "evaluation data by name": lambda b: b.dpo(eval_dataset={"first": PAIRS, "second": PAIRS}),
    "no evaluation data after all": lambda b: b.grpo(
        eval_dataset=PROMPTS.select([]), eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=4
    ),
    "evaluation data that nothing reads": lambda b: b.grpo(eval_dataset=PROMPTS.rename_column("prompt", "question")),
    # Tokenizers
    "no pad token, where there is an end": lambda b: b.dpo(processing_class=tokenizer(pad_token=None)),
    "neither, where a collator pads": lambda b: b.dpo(
        model=b.workshop.model("chat"),
        processing_class=bare_chat_tokenizer(),
        train_dataset=preferences(4, seed=1, conversational=True),
        data_collator=DataCollatorForPreference(pad_token_id=256),
    ),
    "tokens that no text has": lambda b: b.dpo(processing_class=with_more_tokens()),
    "a vocabulary that is padded": lambda b: b.dpo(model=b.workshop.model("odd_vocab")),
    "a vocabulary that is padded, GRPO": lambda b: b.grpo(
        model=b.workshop.model("odd_vocab"), rollout_func=scripted_rollout
    ),
    # Rewards
    "a completion that nothing rewards": lambda b: b.grpo(reward_funcs=none_for_one),
    "a reward that does not always apply": lambda b: b.grpo(reward_funcs=[reward, sometimes]),
    "NaN beside a number": lambda b: b.grpo(reward_funcs=[reward, sometimes_nan]),
    "a reward that is awaited": lambda b: b.grpo(reward_funcs=[awaited, reward]),
    "a reward that is an object": lambda b: b.grpo(reward_funcs=Rewarder()),
    "a reward with arguments of its own": lambda b: b.grpo(
        reward_funcs=functools.partial(of_answers, answer=["w1"] * 4)
    ),
    "a reward that is wrapped": lambda b: b.grpo(reward_funcs=wrapped),
    "a reward of each name": lambda b: b.grpo(reward_funcs=with_all_names),
    "a reward of no column, where unused ones are removed": lambda b: b.grpo(
        train_dataset=SOURCED, reward_funcs=without_columns, remove_unused_columns=True
    ),
    "a reward of no column, where the format leaves them out": lambda b: b.grpo(
        train_dataset=SOURCED.with_format(columns=["prompt"]), reward_funcs=without_columns
    ),
    "a reward that is a model": lambda b: b.grpo(reward_funcs=reward_model(), reward_processing_classes=tokenizer()),
    "a reward of what a rollout adds": lambda b: b.grpo(reward_funcs=of_extras, rollout_func=with_scores),
    "messages that a rollout renders": lambda b: b.grpo(
        train_dataset=prompts(6, seed=1, conversational=True), rollout_func=with_scores
    ),
    "an environment that has the prompts": lambda b: b.grpo(
        model=b.workshop.model("chat"),
        reward_funcs=None,
        train_dataset=Dataset.from_dict({"environment": ["room"] * 6}),
        environment_factory={"room": Room},
    ),
    # Values
    "beta of 0 beside a term without it": lambda b: b.dpo(beta=0.0, loss_type=["sigmoid", "sft"]),
    "numbers of numpy": lambda b: b.dpo(beta=np.float32(0.1), max_length=np.int64(64)),
    "no upper bound of the ratio": lambda b: b.grpo(epsilon_high=math.inf),
    "completions of any length": lambda b: b.grpo(max_completion_length=None, rollout_func=short_rollout),
    "completions longer than the model was trained on": lambda b: b.grpo(
        max_completion_length=512, generation_kwargs={"max_new_tokens": 3}
    ),
    "completions longer than a table of positions, by a rollout that ends them": lambda b: b.grpo(
        model=b.with_position_table(),
        processing_class=tokenizer(),
        max_completion_length=64,
        rollout_func=short_rollout,
    ),
    "completions longer than a table of positions, that generation ends": lambda b: b.grpo(
        model=b.with_position_table(),
        processing_class=tokenizer(),
        max_completion_length=64,
        generation_kwargs={"max_new_tokens": 3},
    ),
    "no way to cut where nothing is cut": lambda b: b.dpo(max_length=None, truncation_mode=None),
    "TRL's own config": lambda b: b.dpo(args=trl.DPOConfig(**b.shortest())),
    # Subclasses
    "a loss of a subclass": lambda b: b.dpo(subclass=own_loss, loss_type="mine", beta=-0.1),
    "a ratio of a subclass": lambda b: b.grpo(subclass=own_level, importance_sampling_level="turn"),
    "a preparation of a subclass": lambda b: b.dpo(
        subclass=own_preparation,
        train_dataset=Dataset.from_list(
            [{"prompt": "w1", "better": x, "rejected": " w3"} for x in (None, *[" w2"] * 4)]
        ),
    ),
    "a subclass that calls the rewards": lambda b: b.grpo(subclass=own_call_of_rewards, reward_funcs=by_place),
    "a sampler of a subclass": lambda b: b.grpo(
        subclass=own_sampler, train_dataset=PROMPTS.select([0]), per_device_train_batch_size=8
    ),
}
FAST = ("a completion that nothing rewards", "a stream whose columns are unknown", "a loss of a subclass")


@pytest.mark.parametrize("what", [x if x in FAST else pytest.param(x, marks=pytest.mark.slow) for x in ACCEPTED])
def test_input_that_trl_trains_correctly_still_trains(what: str, workshop: Workshop, tmp_path: Path) -> None:
    bench = Bench(workshop, tmp_path)
    ACCEPTED[what](bench)
    assert bench.trainer.state.global_step == 1


@pytest.mark.slow
@pytest.mark.parametrize("what", ACCEPTED)
def test_trl_trains_it(what: str, workshop: Workshop, tmp_path: Path) -> None:
    bench = Bench(workshop, tmp_path, trl)
    ACCEPTED[what](bench)
    assert bench.trainer.state.global_step == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("pairs without prompts", "`train_dataset` has no `prompt`"),
        ("no evaluation data after all", "`eval_dataset` has no rows"),
        (
            "completions longer than the model was trained on",
            "`max_completion_length=512` is not less than the 512 tokens",
        ),
    ],
)
def test_doubtful_input_that_trl_trains_is_a_warning(
    what: str, words: str, workshop: Workshop, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ACCEPTED[what](Bench(workshop, tmp_path))
    assert words in caplog.text


@pytest.mark.slow
def test_checks_read_few_rows_of_a_million(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that were selected are checked, and others are not."""
    rows_read: list[int] = []
    query_table = datasets.arrow_dataset.query_table

    def counted(*positional: Any, **keywords: Any) -> Any:
        table = query_table(*positional, **keywords)
        rows_read.append(table.num_rows)
        return table

    monkeypatch.setattr(datasets.arrow_dataset, "query_table", counted)
    texts = ["w1 w2" if place % 1000 else None for place in range(1_000_000)]
    whole = Dataset.from_dict(dict.fromkeys(("prompt", "chosen", "rejected"), texts))
    rows = whole.select([place for place in range(1_000_000) if place % 1000])
    states = random.getstate(), torch.get_rng_state(), np.random.get_state()[1].tolist()
    checked_rows(rows, "train", tokenizer(), pair_columns, has_end=True)
    _check_prompts(rows, "train_dataset", tokenizer(), "GRPO")
    check_enough_prompts(rows, 64, 8)
    assert sum(rows_read) < 1000
    assert states[0] == random.getstate()
    assert torch.equal(states[1], torch.get_rng_state())
    assert states[2] == np.random.get_state()[1].tolist()
    with pytest.raises(ValueError, match=r"`prompt` is None in row 0 "):
        _check_prompts(whole, "train_dataset", tokenizer(), "GRPO")


def test_sampled_rows_are_spread_over_the_set() -> None:
    rows = Dataset.from_dict({"a": range(100_000), "b": range(100_000)})
    places = list(sampled_rows(rows, ["a", "c"]))
    assert (places[0], places[-1], len(places)) == (0, 99_999, 66)
    assert max(after - before for before, after in itertools.pairwise(places)) < 1600
    chosen = rows.select(range(5, 100_000, 2))
    assert all(row == {"a": 5 + 2 * place} for place, row in sampled_rows(chosen, ["a"]).items())
    assert list(sampled_rows(rows.select(range(3)), ["a"])) == [0, 1, 2]


def test_the_first_row_of_a_stream_is_checked_once() -> None:
    rows = [{"chosen": "w4 w2", "rejected": "w4 w3"}] * 2 + [{"chosen": "w1", "rejected": "w2"}] * 2
    stream = Dataset.from_list([{**row, "context": "w4"} for row in rows]).to_iterable_dataset(num_shards=2)
    checked = checked_rows(stream, "train", tokenizer(), pair_columns, has_end=True)
    next(iter(checked))  # as TRL prepares it
    assert len(list(checked.shard(num_shards=2, index=1))) == 2  # as a data loader worker reads it


def test_a_transform_of_the_prompts_is_not_called_before_training() -> None:
    def at_random(batch: dict[str, list[str]]) -> dict[str, list[str]]:
        return {"prompt": [f"w{random.randrange(9)}" for _ in batch["prompt"]]}

    state = random.getstate()
    _check_prompts(PROMPTS.with_transform(at_random), "train_dataset", tokenizer(), "GRPO")
    assert random.getstate() == state


@pytest.mark.slow
def test_only_the_first_thousand_rows_are_searched_for_token_ids(workshop: Workshop, tmp_path: Path) -> None:
    bench = Bench(workshop, tmp_path)
    rows = Dataset.from_list([PAIR] * 1000 + [{**PAIR, "chosen": " x2"}])
    arguments = {"model": workshop.model("tied"), "args": bench.config("DPO"), "processing_class": with_more_tokens()}
    trainer = trl_ext.DPOTrainer(train_dataset=rows, **arguments)
    batch = trainer.data_collator([trainer.train_dataset[1000]])
    with pytest.raises(ValueError, match=r"the data contain the token id 98"):  # at the batch, before the embedding
        trainer.compute_loss(trainer.model, batch)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["DPO", "GRPO"])
def test_building_a_trainer_reads_as_much_of_a_stream_as_trl(kind: str, workshop: Workshop, tmp_path: Path) -> None:
    def drawn(package: Any) -> int:
        count = 0

        def rows() -> Iterator[dict[str, str]]:
            nonlocal count
            for _ in range(100):
                count += 1
                yield PAIR

        given: dict[str, Any] = {"reward_funcs": reward} if kind == "GRPO" else {}
        stream = IterableDataset.from_generator(rows)
        config = Bench(workshop, tmp_path, package).config(kind, per_device_train_batch_size=8)
        trainer_class = getattr(package, f"{kind}Trainer")
        trainer_class(model=workshop.model("tied"), args=config, train_dataset=stream, **given)
        return count

    # One more for DPO, to see whether the rows have reference log-probs
    assert drawn(trl_ext) <= drawn(trl) + (kind == "DPO")


def test_fields_that_a_user_adds_to_a_config_may_have_any_type(tmp_path: Path) -> None:
    @dataclass
    class Own(trl.DPOConfig):
        mixture: list[float] = field(default_factory=lambda: [1.0])
        steps_at: tuple[int, ...] = (1, 2)
        by_step: dict[int, float] = field(default_factory=dict)
        loose: float = "auto"  # type: ignore[assignment]

    check_numbers(Own(str(tmp_path), bf16=False))
    with pytest.raises(TypeError, match="`learning_rate` must be a number, got the string '5e-5'"):
        check_numbers(Own(str(tmp_path), bf16=False, learning_rate="5e-5"))  # type: ignore[arg-type]


def test_an_empty_completion_trains_as_in_trl() -> None:
    messages = [{"role": "user", "content": "w1"}]
    row = {"prompt": messages, "chosen": [], "rejected": [{"role": "assistant", "content": "w2"}]}
    checked_rows(Dataset.from_list([row]), "train", chat_tokenizer(), pair_columns, has_end=True)
