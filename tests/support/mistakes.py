"""Reads the table of mistakes, `tests/trainers/mistakes.txt`, and has what its code uses."""

# ruff: noqa: F401 - the code of the table uses these names

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trl
from datasets import Dataset, DatasetDict, Value
from peft import LoraConfig, PeftModel
from transformers import (
    AutoModelForSequenceClassification,
    Qwen3Config,
    Qwen3ForCausalLM,
    TrainerCallback,
    TrainingArguments,
)
from trl.rewards import accuracy_reward, think_format_reward

from short_training import (
    LABELLED,
    PAIR,
    PAIRS,
    PROMPTS,
    ROW,
    TEXTS,
    Bench,
    of_answers,
    of_completions,
    reward,
    tokenizer,
    with_more_tokens,
)
from tiny import lora_config, preferences, prompts

TABLE = Path(__file__).parents[1] / "trainers" / "mistakes.txt"
TRAINS, NO_STEP = "TRL trains", "TRL ends without a step"


@dataclass(frozen=True)
class Mistake:
    """One mistake of the table.

    Args:
        section (`str`): the heading above it.
        code (`str`): an expression with the bench `b`.
        message (`str`): of our error.
        stock (`str`, *optional*): what stock TRL does: a part of its error, `TRAINS` or `NO_STEP`.
        is_fast (`bool`): whether the fast tier runs it.
    """

    section: str
    code: str
    message: str
    stock: str | None
    is_fast: bool

    def make(self, bench: Any) -> None:
        eval(self.code, {**globals(), "b": bench})


def read_table() -> dict[str, Mistake]:
    """Return the mistakes of the table by name."""
    mistakes: dict[str, Mistake] = {}
    section = ""
    for block in TABLE.read_text().split("\n\n")[1:]:
        name, *lines = block.strip().splitlines()
        if name.startswith("== "):
            section = name.removeprefix("== ")
            continue
        code = [line[4:] for line in lines if line.startswith((">>> ", "... "))]
        message, *stock = lines[len(code) :]
        mistakes[name.removeprefix("# ").removesuffix(" [fast]")] = Mistake(
            section,
            "\n".join(code),
            message,
            stock[0].removeprefix("TRL: ") if stock else None,
            name.endswith(" [fast]"),
        )
    return mistakes


# What the code uses

CHAT = "{% for m in messages %}{{ m.content }} {% endfor %}"  # a template that renders text alone
USER = {"role": "user", "content": "w1"}
PARTS = [{"role": "user", "content": [{"type": "text", "text": "w1"}]}]

KEEPS_ROLES = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
BOTH = ("chosen", "rejected")
MESSAGES = Dataset.from_list([{"prompt": [{"role": "user", "content": "w1"}], "solution": "w2"}] * 4)


def pairs(**changes: Any) -> Dataset:
    return Dataset.from_list([{**PAIR, **changes}] * 4)


def texts(text: Any) -> Dataset:
    return Dataset.from_list([{"text": text}] * 4)


def said(first: Any, column: str = "messages") -> Dataset:
    """Return rows for SFT with one message, or `first` if it is a list."""
    return Dataset.from_list([{column: first if isinstance(first, list) else [first]}] * 4)


def labelled(*labels: Any, **changes: Any) -> Dataset:
    return Dataset.from_list([{**ROW, **changes, "label": label} for label in (*labels, *labels)])


def asked(prompt: Any) -> Dataset:
    return Dataset.from_list([{"prompt": prompt}] * 4)


def messages(prompt: Any, role: str = "role", content: str = "content") -> dict[str, Any]:
    return {
        "prompt": prompt,
        "chosen": [{role: "assistant", content: "w2"}],
        "rejected": [{role: "assistant", content: "w3"}],
    }


def chatting() -> Any:
    return tokenizer(chat_template=CHAT)


def classifier(bench: Bench) -> str:
    """Return a folder with a sequence classifier that has the weights of the policy."""
    path = bench.workshop.root / "classifier"
    if not path.exists():
        AutoModelForSequenceClassification.from_pretrained(bench.workshop.model("tied"), num_labels=1).save_pretrained(
            path
        )
        tokenizer().save_pretrained(path)
    return str(path)


def of_18_tokens() -> Any:
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=18, num_key_value_heads=2, head_dim=8, **shape))


def resumed(bench: Bench, first: Callable[[], None], second: Callable[[str], None]) -> None:
    """Train twice, the second time from the checkpoint of the first. Count only forward passes of the second run."""
    first()
    bench.trainer = None
    bench.passes = 0
    second(str(bench.folder / "checkpoint-1"))


class OfUser(TrainerCallback):
    pass


SAVES = {"save_strategy": "steps", "save_steps": 1}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def rows(*given: dict[str, Any], times: int = 1) -> Dataset:
    return Dataset.from_list([*given] * times)


def ultrafeedback(**changes: Any) -> Dataset:
    """Return rows like those of `HuggingFaceH4/ultrafeedback_binarized`: the first message is the prompt, too."""
    return Dataset.from_list(
        [
            {
                "prompt": f"How many w{place}?",
                "prompt_id": str(place),
                "chosen": [user(f"How many w{place}?"), assistant("w1 w2")],
                "rejected": [user(f"How many w{place}?"), assistant("w3")],
                "messages": [user(f"How many w{place}?"), assistant("w1 w2")],
                "score_chosen": 8.0,
                "score_rejected": 6.5,
                **{name: change(place) for name, change in changes.items()},
            }
            for place in range(6)
        ]
    )


def chat(bench: Bench, method: str, dataset: Any, **arguments: Any) -> None:
    """Train the model with Qwen3's template."""
    getattr(bench, method)(model=bench.workshop.model("chat"), train_dataset=dataset, **arguments)


def infinite(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [math.inf if place == 2 else 1.0 for place, _ in enumerate(completion_ids)]


def as_text(completion_ids: list[list[int]], **_: Any) -> list[str]:
    return ["1" for _ in completion_ids]


def one_for_all(**_: Any) -> float:
    return 1.0


def one_too_few(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [1.0 for _ in completion_ids[1:]]


def same_as_reference(bench: Bench) -> None:
    model = bench.loaded()
    bench.dpo(model=model, ref_model=model)


def loaded_for_inference(bench: Bench) -> None:
    bench.dpo(model=PeftModel.from_pretrained(bench.loaded(), bench.workshop.adapter("tied")))
