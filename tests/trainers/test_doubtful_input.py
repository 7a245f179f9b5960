"""What only looks like a mistake trains; what may be one is a warning; every numeric field is checked."""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import trl
from datasets import Dataset

import trl_ext
from mistakes import PARTS, asked, labelled, messages, pairs, said
from short_training import LABELLED, PAIR, PAIRS, TEXTS, Bench, tokenizer
from tiny import Workshop, lora_config
from trl_ext.checks.values import check_numbers
from trl_ext.compat.replaced import replaced

GROUPS: dict[str, Any] = {"GRPO": {"num_generations": 2}, "RLOO": {"num_generations": 2}}


@pytest.fixture
def bench(workshop: Workshop, tmp_path: Path) -> Bench:
    return Bench(workshop, tmp_path)


@pytest.mark.parametrize("kind", ["SFT", "DPO", "KTO", "GRPO", "RLOO", "Reward"])
def test_each_numeric_field_refuses_text_and_takes_its_default(kind: str, bench: Any) -> None:
    config = bench.config(kind, **GROUPS.get(kind, {}))
    check_numbers(config)
    names = {x.name for x in fields(config)} - {"vllm_server_port"}
    numeric = [x for x in names if type(getattr(config, x)) in (int, float)]
    assert len(numeric) > 20
    for name in numeric:
        with replaced(config, **{name: "one"}), pytest.raises(TypeError, match=f"`{name}` must be .* the string 'one'"):
            check_numbers(config)


def changed(rows: Dataset) -> Dataset:
    return rows.map(trl.maybe_convert_to_chatml)


PART_TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %} {% endfor %}"
)
# What looks like a mistake and is none
ACCEPTED: dict[str, Callable[[Any], None]] = {
    "a path, DPO": lambda b: b.dpo(model=Path(b.workshop.model("tied"))),
    "a path, GRPO": lambda b: b.grpo(model=Path(b.workshop.model("tied"))),
    "parts and a template that renders them": lambda b: b.dpo(
        train_dataset=pairs(**messages(PARTS)), processing_class=tokenizer(chat_template=PART_TEMPLATE)
    ),
    "ShareGPT messages, converted as the message says": lambda b: b.grpo(
        train_dataset=changed(asked([{"from": "user", "value": "w1"}])),
        processing_class=tokenizer(chat_template=PART_TEMPLATE),
    ),
    "whole numbers with a decimal point that TRL takes": lambda b: b.grpo(max_completion_length=4.0),
    "labels of -1, converted as the message says": lambda b: b.kto(
        train_dataset=labelled(1, -1).map(lambda row: {"label": row["label"] > 0})
    ),
    "labels of text, converted as the message says": lambda b: b.kto(
        train_dataset=labelled("good", "bad").map(lambda row: {"label": row["label"] == "good"})
    ),
    "labels of 0 and 1": lambda b: b.kto(train_dataset=labelled(0.0, 1.0)),
    "ShareGPT conversations": lambda b: b.sft(
        train_dataset=said({"from": "human", "value": "w1"}, "conversations"),
        processing_class=tokenizer(chat_template=PART_TEMPLATE),
    ),
    "messages beside text, where the text is read": lambda b: b.sft(
        train_dataset=TEXTS.add_column("messages", ["w1"] * 6)
    ),
    "a formatting function": lambda b: b.sft(
        train_dataset=LABELLED.rename_column("prompt", "question"), formatting_func=lambda row: row["question"]
    ),
    "one bound of rewards": lambda b: b.rloo(reward_clip_range=(None, 1.0)),
    "one row per batch without a KL term": lambda b: b.kto(
        loss_type="apo_zero_unpaired", per_device_train_batch_size=1
    ),
    "an adapter of no task": lambda b: b.dpo(peft_config=lora_config(task_type=None)),
    "an adapter resumed": lambda b: (
        b.dpo(peft_config=lora_config(), save_strategy="steps", save_steps=1),
        b.dpo(peft_config=lora_config(), max_steps=2, resume=str(b.folder / "checkpoint-1")),
    ),
    "prompts of any kind that a rollout reads": lambda b: b.grpo(train_dataset=asked(7), rollout_func=of_numbers),
}


def of_numbers(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    return {
        "prompt_ids": [[3 + prompt] for prompt in prompts],
        "completion_ids": [[3, 4 + place, 1] for place, _ in enumerate(prompts)],
        "logprobs": None,
    }


@pytest.mark.parametrize("what", [pytest.param(x, marks=[pytest.mark.slow] * ("DPO" not in x)) for x in ACCEPTED])
@pytest.mark.parametrize("package", [trl_ext, pytest.param(trl, marks=pytest.mark.slow)], ids=["ours", "stock"])
def test_what_looks_like_a_mistake_and_is_none_trains(what: str, package: Any, bench: Any) -> None:
    if package is trl and "path" in what:
        pytest.skip("TRL reads the config of a `Path`, which has none")
    bench.package = package
    ACCEPTED[what](bench)
    assert bench.trainer.state.global_step


@pytest.mark.parametrize("kind", ["dpo", "kto"])
@pytest.mark.parametrize(
    ("rows", "warned"), [(pairs(chosen=" w5"), True), (pairs(chosen="", rejected=""), True), (PAIRS, False)]
)
def test_pairs_that_are_all_equal_are_a_warning(
    kind: str, rows: Dataset, warned: bool, bench: Any, caplog: pytest.LogCaptureFixture
) -> None:
    getattr(bench, kind)(train_dataset=rows)
    text = "`chosen` and `rejected` are equal in the first 4 rows of `train_dataset`. Equal pairs have no preference"
    assert (text in caplog.text) is warned
    unlearned = {"dpo": 0.6931, "kto": 0.5}[kind]
    assert (abs(bench.trainer.state.log_history[-1]["train_loss"] - unlearned) < 1e-4) or not warned


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_rewards_that_are_all_none_are_a_warning(kind: str, bench: Any, caplog: pytest.LogCaptureFixture) -> None:
    getattr(bench, kind)(
        reward_funcs=lambda completions, **_: [None for _ in completions], max_steps=2, logging_steps=1
    )
    assert "So far, no reward function returned a number" in caplog.text


def test_one_pair_that_differs_is_no_warning(bench: Any, caplog: pytest.LogCaptureFixture) -> None:
    same = {**PAIR, "rejected": PAIR["chosen"]}
    bench.dpo(train_dataset=Dataset.from_list([same, same, PAIR]))
    assert "are equal" not in caplog.text


def test_a_subclass_of_a_config_keeps_its_own_arguments(bench: Any) -> None:
    class Own(trl_ext.DPOConfig):
        def __init__(self, *positional: Any, mine: int = 0, **keywords: Any) -> None:
            super().__init__(*positional, **keywords)
            self.mine = mine

    assert Own(**bench.shortest(), mine=3).mine == 3
    with pytest.raises(TypeError, match=r"^`rpo_alpha` is not an argument of `Own`\. Use `loss_type"):
        Own(**bench.shortest(), rpo_alpha=1.0)


def test_show_plan_is_a_field_of_both_configs(bench: Any) -> None:
    assert bench.config("DPO").show_plan
    assert not bench.config("GRPO", **GROUPS["GRPO"], show_plan=False).show_plan
    with pytest.raises(ValueError, match=r"`show_plan` must be True or False, got 'no'\."):
        bench.config("DPO", show_plan="no")
