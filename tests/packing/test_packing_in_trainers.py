"""Packing in the trainers: errors before the first step, the plan of `explain()`, and dropout."""

import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from transformers import AutoModelForCausalLM, BloomConfig

import trl_ext
from drop_in_cases import Case
from packing_batches import tokens_needed
from packing_runs import Call, watch
from run_losses import Record, Trainers, build, train
from tiny import _WORD_IDS, Workshop, word_tokenizer

STOCK, OURS = Trainers.of(trl), Trainers.of(trl_ext)
DROPOUT = {"lora_dropout": 0.3}


def made(
    kind: str, workshop: Workshop, folder: Path, options: dict[str, Any] | None = None, model: Any = None, **fields: Any
) -> Any:
    """Build our trainer. `options` are fields that only our config has, `model` is another checkpoint."""
    name = f"{kind}_config"
    trainers = replace(OURS, **{name: partial(getattr(OURS, name), **(options or {}))})
    keys = {key: fields.pop(key) for key in ("setup", "lora") if key in fields}
    if model is not None:
        trainers = replace(trainers, **{f"{kind}_trainer": with_model(getattr(OURS, f"{kind}_trainer"), model)})
    return build(Case("packing", kind, config=fields, **keys), trainers, workshop, str(folder), Record())


def with_model(trainer: type, path: str) -> type:
    class Other(trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "model": path})

    return Other


@pytest.fixture
def bloom(tmp_path: Path) -> str:
    """Make a checkpoint of a model whose batches always stay padded."""
    torch.manual_seed(0)
    config = BloomConfig(**_WORD_IDS, hidden_size=32, n_layer=1, n_head=2, hidden_dropout=0.0, attention_dropout=0.0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "bloom")
    word_tokenizer().save_pretrained(tmp_path / "bloom")
    return str(tmp_path / "bloom")


@pytest.mark.parametrize("kind", ["dpo", "grpo"])
@pytest.mark.parametrize("option", ["padding_free", "share_prompts"])
def test_an_option_that_the_model_does_not_support_is_an_error(
    kind: str, option: str, workshop: Workshop, tmp_path: Path, bloom: str
) -> None:
    with pytest.raises(ValueError, match=rf"`{option}=True`.*attention interface.*Leave `{option}` at None"):
        made(kind, workshop, tmp_path, {option: True}, model=bloom).train()
    trainer = made(kind, workshop, tmp_path, model=bloom)
    row = trainer.explain()["packing"]
    assert row.action == "skip"
    assert "attention interface" in row.reason


@pytest.mark.parametrize("kind", ["dpo", "grpo"])
@pytest.mark.parametrize(
    ("options", "setup", "words"),
    [
        ({"share_prompts": True, "padding_free": False}, "full", "padding_free=False"),
        ({"padding_free": True}, "prompt_tuning", "virtual tokens"),
        ({"share_prompts": True}, "lora", "dropout"),
    ],
)
def test_an_option_that_another_option_or_the_adapter_forbids_is_an_error(
    kind: str, options: dict[str, Any], setup: str, words: str, workshop: Workshop, tmp_path: Path
) -> None:
    fields = {"lora": DROPOUT, "disable_dropout": False} if setup == "lora" else {}
    with pytest.raises(ValueError, match=words):
        made(kind, workshop, tmp_path, options, setup=setup, **fields).train()


@pytest.mark.parametrize("kind", ["dpo", "grpo"])
def test_supported_options_give_no_warning(kind: str, workshop: Workshop, tmp_path: Path, caplog: Any) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = made(kind, workshop, tmp_path, {"padding_free": True, "share_prompts": True})
    assert not [x for x in caught if "padding" in str(x.message)]
    assert trainer.args.padding_free is True
    assert trainer.explain()["packing"].action == "run"
    trainer.train()
    assert trainer.args.padding_free is True
    assert not [x for x in caplog.records if x.name.startswith(("trl", "trl_ext")) and x.levelname == "WARNING"]


ROWS = {
    "default": ({}, {}, "run", "computed once"),
    "padded": ({"padding_free": False}, {}, "skip", "`padding_free=False`"),
    "unshared": ({"share_prompts": False}, {}, "run", "prompt of each completion"),
    "dropout": ({}, {"setup": "lora", "lora": DROPOUT, "disable_dropout": False}, "run", "not in training"),
}


@pytest.mark.parametrize("kind", ["dpo", "grpo"])
@pytest.mark.parametrize("name", ROWS)
def test_the_plan_has_a_row_for_packing(name: str, kind: str, workshop: Workshop, tmp_path: Path) -> None:
    options, fields, action, words = ROWS[name]
    plan = made(kind, workshop, tmp_path, options, **fields).explain()
    assert plan["packing"].action == action
    assert words in " ".join(plan["packing"].reason.split())
    assert "packing" in str(plan)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"share_prompts": False}, {"padding_free": False}], ids=str)
@pytest.mark.parametrize("kind", ["dpo", "grpo"])
def test_the_options_decide_which_tokens_are_processed(
    kind: str, options: dict[str, Any], workshop: Workshop, tmp_path: Path
) -> None:
    calls = passes(made(kind, workshop, tmp_path, options))
    for call in calls:
        share = options.get("share_prompts", True)
        padded = call.batch.input_ids.numel()
        assert call.fed == (padded if "padding_free" in options else tokens_needed(call.batch, share))


def passes(trainer: Any) -> list[Call]:
    """Return every scoring forward while `trainer` trains and is evaluated."""
    for scoring in trainer.scoring_forwards:
        scoring.packing.checked = True
        scoring.is_compared = True
    calls: list[Call] = []
    watch(trainer.model.get_base_model() if hasattr(trainer.model, "peft_config") else trainer.model, calls)
    if trainer.ref_model is not None:
        watch(trainer.ref_model, calls)
    trainer.train()
    assert calls
    return calls


@pytest.mark.parametrize("kind", ["dpo", "grpo"])
def test_dropout_turns_sharing_off_in_training_only(kind: str, workshop: Workshop, tmp_path: Path, caplog: Any) -> None:
    fields = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
    trainer = made(kind, workshop, tmp_path, setup="lora", lora=DROPOUT, disable_dropout=False, **fields)
    calls = passes(trainer)
    assert {call.training for call in calls} == {True, False}
    for call in calls:
        # TRL decides in which mode a pass without a gradient runs
        assert call.fed == tokens_needed(call.batch, share=not call.training)
    assert "switch dropout off (`disable_dropout`" in trainer.explain()["packing"].reason
    assert not [x for x in caplog.records if x.name == "trl_ext" and x.levelname == "WARNING"]  # the plan says it


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dpo", "grpo"])
def test_a_model_that_must_be_padded_trains_as_stock_does(
    kind: str, workshop: Workshop, tmp_path: Path, bloom: str
) -> None:
    losses = []
    for trainers in (OURS, STOCK):
        name = f"{kind}_trainer"
        trainers = replace(trainers, **{name: with_model(getattr(trainers, name), bloom)})
        losses.append(train(Case("bloom", kind), trainers, workshop).losses)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5, abs=1e-6)


def test_trls_own_config_packs_too(workshop: Workshop, tmp_path: Path) -> None:
    trainers = replace(OURS, dpo_config=trl.DPOConfig)
    trainer = build(Case("packing", "dpo"), trainers, workshop, str(tmp_path), Record())
    assert trainer.explain()["packing"].action == "run"
    assert all(call.fed == tokens_needed(call.batch) for call in passes(trainer))
