"""A turn of GRPO's tool loop begins from the cache of the turn before: samples and weights are those of stock TRL."""

import weakref
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from test_generate_rows import Run

import trl_ext
from tiny import Workshop, lora_config, prompts
from token_counts import total
from tool_calls import ENDS, look_up, model_that_ends, tool_tokenizer
from trl_ext.compat.generate_turns import EarlierTurn


def run(
    workshop: Workshop,
    folder: Path,
    package: Any = trl_ext,
    *,
    model: Any = None,
    dtype: torch.dtype = torch.float32,
    **arguments: Any,
) -> Run:
    options = {
        **{"tools": [look_up], "processing_class": tool_tokenizer(), "max_completion_length": 40, "optim": "sgd"},
        **{"train_dataset": prompts(8, seed=1, conversational=True), "max_tool_calling_iterations": 3, **arguments},
    }
    return Run("grpo", workshop, folder, package, model=model or model_that_ends(workshop, dtype=dtype), **options)


def assert_equal_training(ours: Run, stock: Run) -> None:
    assert ours.samples == stock.samples
    assert torch.equal(ours.random_state, stock.random_state)
    assert ours.logged("loss") == pytest.approx(stock.logged("loss"), abs=1e-6)
    assert ours.logged("tools/call_frequency") == stock.logged("tools/call_frequency")
    for name, weight in stock.weights.items():
        torch.testing.assert_close(ours.weights[name], weight, rtol=0.0, atol=1e-6)


Turn = list[tuple[list[int], list[int]]]  # of each row, the prompt and the completion up to its end


def noting_turns(model: Any, turns: list[Turn]) -> Any:
    """Make `generate` note prompts and completions in `turns`."""
    generate = model.generate

    def note(input_ids: torch.Tensor, attention_mask: torch.Tensor, **options: Any) -> torch.Tensor:
        ids = generate(input_ids=input_ids, attention_mask=attention_mask, **options)
        turn: Turn = []
        for row, mask in zip(ids.tolist(), attention_mask.tolist(), strict=True):
            completion = row[len(mask) :]
            ends = [place for place, token in enumerate(completion, 1) if token in ENDS]
            turn.append((row[len(mask) - sum(mask) : len(mask)], completion[: (ends or [len(completion)])[0]]))
        turns.append(turn)
        return ids

    model.generate = note
    return model


def decoded_tokens(turn: Turn) -> int:
    return sum(len(completion) - 1 for _, completion in turn)


def padded_tokens(turn: Turn) -> int:
    return len({tuple(prompt) for prompt, _ in turn}) * max(len(prompt) for prompt, _ in turn)


def suffix_tokens(turn: Turn, earlier: Turn) -> int:
    """Return the tokens of a prefill that runs no column which all rows have run in the turn before."""
    left: list[int] = []
    for prompt, _ in turn:
        ran = [x + y[:-1] for x, y in earlier]  # a turn does not run the last token that it draws
        left.append(len(prompt) - max(len(ids) for ids in ran if prompt[: len(ids)] == ids))
    return len({tuple(prompt) for prompt, _ in turn}) * max(left)


CASES: dict[str, dict[str, Any]] = {
    "float32": {},
    "float64": {"dtype": torch.float64},
    "lora": {"peft_config": lora_config()},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": prompts(4, 2, conversational=True)},
}


@pytest.mark.parametrize("name", CASES)
def test_training_is_that_of_stock_trl(name: str, workshop: Workshop, tmp_path: Path) -> None:
    ours = run(workshop, tmp_path / "a", **CASES[name])
    stock = run(workshop, tmp_path / "b", trl, **CASES[name])
    assert_equal_training(ours, stock)
    assert ours.trainer.explain()["generation"].reason.startswith("`generate` runs each distinct prompt once")
    assert ours.trainer._grpo_generation.fewer_rows._unchecked == set()
    other = run(workshop, tmp_path / "c", seed=4, **CASES[name])
    assert other.samples != ours.samples


def test_only_new_tokens_of_a_turn_are_embedded(workshop: Workshop, tmp_path: Path) -> None:
    turns: list[Turn] = []
    stock = run(workshop, tmp_path / "a", trl, max_steps=1, model=noting_turns(model_that_ends(workshop), turns))
    ours = run(workshop, tmp_path / "b", max_steps=1)
    assert ours.samples == stock.samples
    assert len(turns) == 4
    assert all(len(turn) > 2 for turn in turns)
    assert len({len(prompt) for prompt, _ in turns[2]}) > 2  # ragged
    expected = padded_tokens(turns[0]) + sum(map(decoded_tokens, turns))
    expected += sum(suffix_tokens(turn, earlier) for earlier, turn in pairwise(turns))
    assert total(ours.generation) == expected
    assert ours.logged("tokens_processed/generation") == [expected]
    assert ours.logged("skipped/generation_tokens") == [total(stock.generation) - expected]
    assert expected < 0.8 * (sum(map(padded_tokens, turns)) + sum(map(decoded_tokens, turns)))


def test_sliding_windows_begin_each_turn_anew(workshop: Workshop, tmp_path: Path) -> None:
    turns: list[Turn] = []
    model = noting_turns(model_that_ends(workshop, "softcap"), turns)
    stock = run(workshop, tmp_path / "a", trl, max_steps=1, model=model)
    ours = run(workshop, tmp_path / "b", max_steps=1, model=model_that_ends(workshop, "softcap"))
    assert ours.samples == stock.samples
    assert torch.equal(ours.random_state, stock.random_state)
    assert len(turns) > 1
    assert total(ours.generation) == sum(map(padded_tokens, turns)) + sum(map(decoded_tokens, turns))


def test_wrong_keys_are_noticed(workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = EarlierTurn.store

    def store_wrong_keys(self: EarlierTurn, ids: list[int], *positional: Any, **options: Any) -> None:
        store(self, ids, *positional, **options)
        self._rows[tuple(ids)] = [(keys.flip(0), values) for keys, values in self._rows[tuple(ids)]]

    monkeypatch.setattr(EarlierTurn, "store", store_wrong_keys)
    ours = run(workshop, tmp_path / "a")
    assert "in a check, its logits differ" in ours.trainer.explain()["generation"].reason
    assert_equal_training(ours, run(workshop, tmp_path / "b", trl))


def test_keys_and_values_end_with_the_generation(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[weakref.ref[EarlierTurn]] = []
    left: list[int] = []
    stored: list[int] = []
    init, store = EarlierTurn.__init__, EarlierTurn.store

    def note(self: EarlierTurn) -> None:
        init(self)
        turns.append(weakref.ref(self))

    def count(self: EarlierTurn, ids: list[int], *positional: Any, **options: Any) -> None:
        store(self, ids, *positional, **options)
        stored.append(len(self))

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        left.append(sum(turn() is not None for turn in turns))
        return [float(sum(ids) % 5) for ids in completion_ids]

    monkeypatch.setattr(EarlierTurn, "__init__", note)
    monkeypatch.setattr(EarlierTurn, "store", count)
    run(workshop, tmp_path, reward_funcs=reward)
    assert len(turns) == 3
    assert max(stored) > 4
    assert left == [0, 0, 0]
