"""Random combinations of options train as with stock TRL; `make fuzz` draws more."""

import dataclasses
import inspect

import pytest
import trl
from transformers import TrainingArguments

import fuzz
import trl_ext
from fuzz import NOT_DRAWN, draw, outcome
from tiny import Workshop

# Draws that cannot be compared; all others must be
NOT_COMPARED = {23: "refused", 30: "refused", 31: "both raise", 38: "no gradient"}


# TRL 1.16 deprecates one of the values that are drawn
@pytest.mark.filterwarnings("ignore:.*keep_end.*deprecated:FutureWarning")
@pytest.mark.filterwarnings(
    "ignore:The following (rank|alpha)_pattern keys did not match"
)  # PEFT, for some drawn adapters
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_a_draw_trains_as_stock(seed: int, workshop: Workshop) -> None:
    found = outcome(seed, workshop)
    if seed in NOT_COMPARED:
        assert str(found).startswith(NOT_COMPARED[seed]), found
    else:
        assert found == [], "\n".join([str(draw(seed)), *found[:20]])


# Two of DPO and two of GRPO
@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 9, 6, 4])
def test_a_wrong_loss_is_noticed(seed: int, workshop: Workshop) -> None:
    assert outcome(seed, workshop) == []
    wrong = outcome(seed, workshop, lambda ours: ours.with_loss_times(1.01))
    assert isinstance(wrong, list)
    assert wrong


def test_every_field_of_the_configs_is_drawn_or_says_why_not() -> None:
    of_transformers = {field.name for field in dataclasses.fields(TrainingArguments)}
    configs = (trl.DPOConfig, trl.GRPOConfig, trl_ext.DPOConfig, trl_ext.GRPOConfig)
    fields = {field.name for config in configs for field in dataclasses.fields(config)} - of_transformers
    left_out = {name for name in fields if name not in NOT_DRAWN and not name.startswith(("vllm_", "log_"))}
    source = inspect.getsource(fuzz)
    unnamed = {name for name in left_out if f'"{name}"' not in source and f"{name}=" not in source}
    # Written with their prefix apart
    assert unnamed == {f"vespo_{x}" for x in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")}
    assert set(NOT_DRAWN) <= fields
