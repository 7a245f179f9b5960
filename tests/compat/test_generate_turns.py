"""`generate` continues rows of an earlier call, and returns what it returns from all tokens."""

from typing import Any

import pytest
import torch
from test_generate import CHOOSES_BLOCKS, CLASSES, FAST, OWN_DRAWS, OWN_TOKENS, PAD, Samples, batch
from torch import Tensor

from model_classes import build_class
from model_families import build
from trl_ext.compat.generate import UnprovenError
from trl_ext.compat.generate_turns import EarlierTurn

# Each layer of their caches holds keys and values of all tokens, and nothing else. The other tiny models have sliding
# windows, recurrent layers or an indexer, or take no positions
CONTINUED = ("LlamaForCausalLM", "GPT2LMHeadModel", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM")
NOTICED = ("GitForCausalLM",)  # the check of the first turn finds another prefill


def prompts_after(samples: Samples, inputs: dict[str, Tensor], rows: tuple[int, ...]) -> list[list[int]]:
    """Return the tokens of some rows, up to their end, each with 1 to 5 further tokens."""
    generator = torch.Generator().manual_seed(7)
    prompts: list[list[int]] = []
    for row in rows:
        padding = samples.width - int(inputs["attention_mask"][row].sum())
        ids = samples.ids[row, padding : samples.width + int(samples.lengths[row])]
        prompts.append([*ids.tolist(), *torch.randint(10, 90, (1 + row % 5,), generator=generator).tolist()])
    return prompts


def padded(prompts: list[list[int]]) -> dict[str, Tensor]:
    width = max(map(len, prompts))
    ids = [[PAD] * (width - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


class Turns:
    """A turn of some rows, and the one after it: from the cache of the first, and from all tokens."""

    def __init__(self, model: Any, *, rows: tuple[int, ...] = (0, 1, 4, 6, 9, 11)) -> None:
        self.model = model
        self.earlier_turn = EarlierTurn()
        inputs = batch((4, 11, 7), 4, model.config.get_text_config().vocab_size)
        first = Samples(model, inputs, fewer=True, earlier_turn=self.earlier_turn)
        self.stored_rows = len(self.earlier_turn)
        self.prompts = prompts_after(first, inputs, rows)

    def run(self, **options: Any) -> None:
        inputs = padded(self.prompts)
        self.width = inputs["input_ids"].size(1)
        self.ours = Samples(self.model, inputs, fewer=True, earlier_turn=self.earlier_turn, seed=2, **options)
        self.stock = Samples(self.model, inputs, fewer=False, seed=2, **options)

    @property
    def columns_run(self) -> int:
        """The columns that the prefill ran."""
        decoded = int((self.stock.lengths - 1).sum())
        return (self.ours.tokens - decoded) // len(set(map(tuple, self.prompts)))


@pytest.mark.parametrize("model_class", CLASSES)
def test_a_class_continues_or_begins_anew(model_class: str) -> None:
    if model_class in OWN_DRAWS:
        pytest.skip("its draws depend on more than its logits")
    model = build_class(model_class, torch.float32).eval()
    try:
        Samples(model, batch((9, 17), 2, model.config.get_text_config().vocab_size), fewer=False)
    except Exception as error:
        pytest.skip(f"its own `generate` fails: {error}")
    try:
        turns = Turns(model)
    except UnprovenError as error:
        pytest.skip(f"`generate` runs all rows: {error}")
    turns.run()
    difference = turns.ours.difference(turns.stock)
    print(f"{model_class}: {turns.stored_rows} rows, {difference:.1e}")
    if model_class in NOTICED:
        assert difference > 0.01
        return
    assert turns.ours.equals(turns.stock)
    assert difference < (0.05 if model_class in CHOOSES_BLOCKS else 1e-5)
    if model_class in FAST:
        assert (turns.stored_rows > 0) == (model_class in CONTINUED)
    # The last token of each row has not run, and at most 5 follow it
    if model_class not in OWN_TOKENS:
        assert turns.columns_run == (6 if turns.stored_rows else turns.width)
    assert ("continued" in turns.ours.rows.saved) == (turns.stored_rows > 0)


@pytest.mark.parametrize("options", [{"prefill_chunk_size": 4}, {"max_new_tokens": 1}, {"top_k": 5}], ids=str)
def test_an_option_continues_the_same(options: dict[str, Any]) -> None:
    turns = Turns(build("tied"))
    turns.run(**options)
    assert turns.ours.equals(turns.stock)
    assert turns.columns_run == 6


def test_a_prompt_that_begins_otherwise_begins_all_anew() -> None:
    turns = Turns(build("tied"))
    longest = max(turns.prompts, key=len)
    longest[0] += 1
    turns.run()
    assert turns.ours.equals(turns.stock)
    assert turns.columns_run == turns.width
    assert "continued" not in turns.ours.rows.saved


def test_a_new_short_prompt_shares_the_columns_of_its_padding() -> None:
    turns = Turns(build("tied"))
    turns.prompts.append([20, 21, 22])
    turns.run()
    assert turns.ours.equals(turns.stock)
    assert turns.columns_run == 6


def test_rows_with_the_same_tokens_share_what_is_stored() -> None:
    turns = Turns(build("tied"))
    turns.prompts += [[*turns.prompts[0], 33], turns.prompts[1]]
    turns.run()
    assert turns.ours.equals(turns.stock)
    assert turns.columns_run == 6


def test_a_third_turn_continues_the_second() -> None:
    turns = Turns(build("tied"))
    turns.run()
    inputs = padded(turns.prompts)
    turns.prompts = prompts_after(turns.ours, inputs, (0, 2, 3))
    turns.run()
    assert turns.ours.equals(turns.stock)
    assert turns.columns_run == 5


def test_a_check_compares_continued_rows_first() -> None:
    turns = Turns(build("tied"), rows=(4,))  # the longest
    turns.prompts[:0] = [[20, 21, 22], [23, 24]]
    turns.run(max_new_tokens=1)
    rows, _ = turns.ours.rows.last_step(1)
    assert rows.tolist() == [2]
    assert "continued" in turns.ours.rows.saved


def test_a_check_is_not_of_continued_rows_once_they_have_left() -> None:
    turns = Turns(build("tied"), rows=(4,))
    turns.prompts[:0] = [[20, 21, 22], [23, 24]]
    token = Samples(turns.model, padded(turns.prompts), fewer=False, seed=2, max_new_tokens=1).ids[2, -1]
    turns.run(max_new_tokens=4, eos_token_id=int(token))
    assert turns.ours.equals(turns.stock)
    assert turns.ours.tokens < turns.stock.tokens
    assert turns.ours.rows.saved == {"dropped"}


def test_rows_that_end_last_are_not_copied() -> None:
    """The cache of the last step is stored as it is, so that it is in memory once."""
    model = build("tied")
    earlier_turn = EarlierTurn()
    inputs = batch((4, 11, 7), 4, model.config.get_text_config().vocab_size)
    Samples(model, inputs, fewer=True, earlier_turn=earlier_turn, eos_token_id=[10**6])
    assert len(earlier_turn) > 3
    storages = {keys.untyped_storage().data_ptr() for row in earlier_turn._rows.values() for keys, _ in row}
    assert len(storages) == model.config.num_hidden_layers
