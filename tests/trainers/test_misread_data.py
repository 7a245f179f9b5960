"""Checks of data are silent for shapes of public data sets that TRL trains rightly, and warn of what is doubtful."""

import copy
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from tokenizers import processors
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

import trl_ext
from mistakes import KEEPS_ROLES, assistant, read_table, rows, user
from public_data import SHAPES, TOOL_CALL, Shape
from short_training import LABELLED, PAIRS, ROW, TEXTS, Bench, tokenizer
from tiny import Workshop, chat_tokenizer
from trl_ext.checks.data import _check_prompts, checked_rows, kto_columns, pair_columns, reward_columns, sft_columns

COLUMNS: dict[str, Any] = {
    "dpo": pair_columns,
    "kto": kto_columns,
    "sft": partial(sft_columns, text_field="text"),
    "reward": reward_columns,
}


def check(method: str, dataset: Any, processing_class: Any = None) -> None:
    """Run the checks of data alone, with a tokenizer with Qwen3's template."""
    processing_class = processing_class or chat_tokenizer()
    if method in ("grpo", "distillation"):
        _check_prompts(dataset, "train_dataset", processing_class, "GRPO")
    else:
        checked = checked_rows(dataset, "train", processing_class, COLUMNS[method], has_end=True)
        next(iter(checked))  # of a stream, the first row


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("streams", [False, True], ids=["rows", "stream"])
def test_public_data_is_refused_only_if_trl_does_not_train_it_rightly(
    name: str, streams: bool, caplog: pytest.LogCaptureFixture
) -> None:
    shape = SHAPES[name]
    dataset = shape.dataset.to_iterable_dataset() if streams else shape.dataset
    if shape.error is None:
        check(shape.method, dataset)
    else:
        with pytest.raises(ValueError) as raised:  # noqa: PT011 - the message is compared
            check(shape.method, dataset)
        assert shape.error in str(raised.value)
    assert caplog.text == ""


def trained(shape: Shape, workshop: Workshop, folder: Path, package: Any) -> tuple[float, list[torch.Tensor]]:
    bench = Bench(workshop, folder, package)
    model = workshop.model("chat" if shape.is_chat else "tied")
    # Adam would make whole steps of the rounding noise in gradients that are 0
    getattr(bench, shape.method)(model=model, train_dataset=shape.dataset, learning_rate=0.1, optim="sgd")
    return bench.trainer.state.log_history[-1]["train_loss"], list(bench.trainer.model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("name", [x for x in SHAPES if SHAPES[x].error is None and SHAPES[x].method != "grpo"])
def test_public_data_trains_as_in_trl(name: str, workshop: Workshop, tmp_path: Path) -> None:
    theirs, ours = (trained(SHAPES[name], workshop, tmp_path, package) for package in (trl, trl_ext))
    assert ours[0] == pytest.approx(theirs[0], abs=1e-5)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ours[1], theirs[1], strict=True))


@pytest.mark.parametrize(
    ("method", "dataset", "kind"),
    [
        ("dpo", PAIRS, "torch"),
        ("kto", LABELLED, "numpy"),
        *(
            pytest.param(method, dataset, kind, marks=pytest.mark.slow)
            for method, dataset in (("dpo", PAIRS), ("kto", LABELLED), ("sft", TEXTS))
            for kind in ("torch", "numpy", "pandas", "arrow")
            if (method, kind) not in (("dpo", "torch"), ("kto", "numpy"))
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_format_of_rows_changes_nothing(
    method: str, dataset: Dataset, kind: str, workshop: Workshop, tmp_path: Path
) -> None:
    losses = []
    for given in (dataset, dataset.with_format(kind)):
        bench = Bench(workshop, tmp_path)
        getattr(bench, method)(train_dataset=given, eval_dataset=given)
        losses.append((bench.trainer.state.log_history[-1]["train_loss"], bench.trainer.evaluate()["eval_loss"]))
    assert losses[0] == losses[1]


def test_a_format_that_leaves_out_columns_still_does() -> None:
    chosen = PAIRS.add_column("tools", [""] * 6).with_format("torch", columns=["prompt", "chosen", "rejected"])
    checked = checked_rows(chosen, "train", tokenizer(), pair_columns, has_end=True)
    assert checked[0] == PAIRS[0]


def formatted_before(**changes: Any) -> Any:
    """Return a tokenizer that begins each text with "<s>", as Llama's does."""
    made = tokenizer(bos_token="<s>", **changes)
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", made.convert_tokens_to_ids("<s>"))]
    )
    return made


def adds_both_ends() -> Any:
    made = tokenizer()
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", made.eos_token_id)]
    )
    return made


def keeps_roles(**changes: Any) -> Any:
    made = tokenizer()
    made.chat_template = KEEPS_ROLES
    return made


def begins_messages_with_bos() -> Any:
    """Return a tokenizer with the special tokens of SmolLM2."""
    made = chat_tokenizer()
    made.bos_token = "<|im_start|>"
    return made


HUMAN = {"messages": [{"role": "human", "content": "a"}, {"role": "gpt", "content": "b"}]}
DOUBTFUL: dict[str, tuple[str, Callable[[], Dataset], Callable[[], Any], str]] = {
    "a completion that begins with its prompt in some rows": (
        "sft",
        lambda: rows(
            *[{"prompt": f"w1 w{x}", "completion": f"w1 w{x} w3"} for x in range(3)],
            *[{"prompt": "w1 w2", "completion": "w3"}] * 9,
        ),
        tokenizer,
        "`prompt` of `train_dataset` is also at the start of `completion`, in row 0 and in 3 of the 12 rows that were "
        "read. Such a row has its prompt twice, which is right only if the answer should repeat it. Remove it from ",
    ),
    "completions that all begin with their prompts": (
        "sft",
        lambda: rows(*[{"prompt": f"w1 w{x}", "completion": f"w1 w{x} w5"} for x in range(5)]),
        tokenizer,
        "`prompt` of `train_dataset` is also at the start of `completion`, in row 0 and in 5 of the 5 rows",
    ),
    "pairs that begin with their prompt in some rows": (
        "dpo",
        lambda: rows(
            {"prompt": "w1 w2", "chosen": "w1 w2 w3", "rejected": "w1 w2 w4"},
            {"prompt": "w1 w2", "chosen": "w3", "rejected": "w4"},
        ),
        tokenizer,
        "in row 0 and in 1 of the 2 rows that were read. Such a row has its prompt twice, which is right only if the "
        "answer should repeat it. Leave only the answer in `chosen` and `rejected`.",
    ),
    "pairs that begin with the headline that they continue": (
        "dpo",
        lambda: rows(
            *[{"prompt": f"w1 w{x}", "chosen": f"w1 w{x}\n\nw5", "rejected": f"w1 w{x}\n\nw6"} for x in range(5)]
        ),
        tokenizer,
        "`prompt` of `train_dataset` is also at the start of `chosen`, in row 0 and in 5 of the 5 rows",
    ),
    "completions that repeat the question before they answer": (
        "sft",
        lambda: rows(*[{"prompt": f"w1 w{x}", "completion": f"w1 w{x}\nAnswer: w5"} for x in range(5)]),
        tokenizer,
        "`prompt` of `train_dataset` is also at the start of `completion`, in row 0 and in 5 of the 5 rows",
    ),
    "a transcript that goes on": (
        "sft",
        lambda: rows(*[{"prompt": f"Bot: w1 w{x}", "completion": f"Bot: w1 w{x}. w5"} for x in range(5)]),
        tokenizer,
        "`prompt` of `train_dataset` is also at the start of `completion`, in row 0 and in 5 of the 5 rows",
    ),
    "code that goes on with its prompt": (
        "dpo",
        lambda: rows(
            {"prompt": "def add(a, b):\n", "chosen": "def add(a, b):\n  w1", "rejected": "def add(a, b):\n  w2"},
            times=4,
        ),
        tokenizer,
        "`prompt` of `train_dataset` is also at the start of `chosen`, in row 0 and in 4 of the 4 rows",
    ),
    "SQL that goes on with its prompt": (
        "dpo",
        lambda: rows(
            {"prompt": "SELECT w1 FROM w2", "chosen": "SELECT w1 FROM w2 WHERE", "rejected": "SELECT w1 FROM w2 LIMIT"}
        ),
        tokenizer,
        "`prompt` of `train_dataset` is also at the start of `chosen`, in row 0 and in 1 of the 1 rows",
    ),
    "a chosen completion that begins with its prompt": (
        "dpo",
        lambda: rows({"prompt": "w1 w2", "chosen": "w1 w2 w3", "rejected": "w4"}, times=4),
        tokenizer,
        "`prompt` of `train_dataset` is also at the start of `chosen`, in row 0 and in 4 of the 4 rows",
    ),
    "prompts by another name in some rows": (
        "dpo",
        lambda: rows(
            *[{"question": "w1 w2", "chosen": "w1 w2 w3", "rejected": "w1 w2 w4"}] * 7,
            *[{"question": "w1 w2", "chosen": "It is red", "rejected": "It is blue"}] * 3,
        ),
        tokenizer,
        "`train_dataset` has no `prompt`, and in 3 of the 10 rows that were read, such as row 7, the common start of "
        "`chosen` and `rejected` is not the prompt but 'It is '. Rename the column:",
    ),
    "pairs without prompts": (
        "dpo",
        lambda: rows({"chosen": "w1 w2", "rejected": " w3"}, times=4),
        tokenizer,
        "`train_dataset` has no `prompt`, and `chosen` and `rejected` of row 0 do not start with the same text",
    ),
    "roles that the template renders as they are": (
        "sft",
        lambda: rows(HUMAN, times=2),
        keeps_roles,
        "`messages` of `train_dataset` has the role 'human' in row 0, and the chat template of `processing_class` "
        "renders this name as it is, although models know 'user'. Rename the roles:",
    ),
    "a role that the template leaves out": (
        "sft",
        lambda: rows({"messages": [{"role": "developer", "content": "Be brief."}, user("a"), assistant("b")]}, times=2),
        chat_tokenizer,
        "has the role 'developer' in row 0, but the chat template of `processing_class` does not render messages with "
        "this role. Give such messages a role that the template renders, or remove them.",
    ),
    "BOS in text that was formatted before": (
        "sft",
        lambda: rows({"text": "<s> w1 w2 </s>"}, times=2),
        formatted_before,
        "`text` of `train_dataset` would have '<s>' twice at its start, in 2 of the 2 rows that were read, such as row "
        "0",
    ),
    "BOS in prompts that were formatted before": (
        "grpo",
        lambda: rows({"prompt": "<s> w1 w2"}, times=4),
        formatted_before,
        "`prompt` of `train_dataset` would have '<s>' twice at its start",
    ),
    "BOS in completions that were formatted before": (
        "dpo",
        lambda: rows({"prompt": "w1 w2", "chosen": "<s> w3", "rejected": "<s> w4"}, times=4),
        formatted_before,
        "`chosen` of `train_dataset` has '<s>' at its start, which would follow the prompt",
    ),
    "EOS before the end of a line": (
        "sft",
        lambda: rows({"text": "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"}, times=2),
        chat_tokenizer,
        "`text` of `train_dataset` would have '<|im_end|>' twice at its end",
    ),
    "EOS in messages": (
        "sft",
        lambda: rows({"messages": [user("a"), assistant("b<|im_end|>")]}, times=2),
        chat_tokenizer,
        "`messages` of `train_dataset` would have '<|im_end|>' twice at its end",
    ),
    "EOS that the tokenizer adds": (
        "kto",
        lambda: LABELLED,
        adds_both_ends,
        "If the tokenizer adds it, set `processing_class.add_eos_token=False`.",
    ),
}


@pytest.mark.parametrize("what", DOUBTFUL)
def test_doubtful_data_is_one_warning(what: str, caplog: pytest.LogCaptureFixture) -> None:
    method, dataset, processing_class, words = DOUBTFUL[what]
    check(method, dataset(), processing_class())
    assert words in caplog.text
    assert len(caplog.records) == 1


# What looks like a mistake and is none
SILENT: dict[str, tuple[str, Callable[[], Dataset], Callable[[], Any]]] = {
    "completions that begin with a word of the prompt": (
        "sft",
        lambda: rows(*[{"prompt": f"w{x}", "completion": f"w{x} w3"} for x in range(8)]),
        tokenizer,
    ),
    "a few completions that restate the question": (
        "sft",
        lambda: rows({"prompt": "w1 w2", "completion": "w1 w2 w3"}, *[{"prompt": "w1 w2", "completion": "w3"}] * 15),
        tokenizer,
    ),
    "completions that copy the prompt": (
        "sft",
        lambda: rows(*[{"prompt": f"w1 w{x}", "completion": f"w1 w{x}"} for x in range(8)]),
        tokenizer,
    ),
    "completions whose first word continues the prompt": (
        "dpo",
        lambda: rows(*[{"prompt": f"Ask: w{x}", "chosen": f"Ask: w{x}0", "rejected": f"Ask: w{x}1"} for x in range(8)]),
        tokenizer,
    ),
    "rejected completions that repeat the prompt": (
        "dpo",
        lambda: rows({"prompt": "w1 w2", "chosen": "w4", "rejected": "w1 w2 w3"}, times=4),
        tokenizer,
    ),
    "a system prompt, and turns in the completion": (
        "sft",
        lambda: rows(
            {"prompt": [{"role": "system", "content": "Be."}], "completion": [user("a"), assistant("b")]}, times=2
        ),
        chat_tokenizer,
    ),
    "a later turn that asks the same again": (
        "dpo",
        lambda: rows(
            {
                "prompt": [user("go on")],
                "chosen": [assistant("a"), user("go on"), assistant("b")],
                "rejected": [assistant("a"), user("go on"), assistant("c")],
            },
            times=2,
        ),
        chat_tokenizer,
    ),
    "a user who says again what he said before": (
        "sft",
        lambda: rows({"prompt": [user("go on"), assistant("a")], "completion": [user("go on"), assistant("b")]}),
        chat_tokenizer,
    ),
    "a user who says again what he said before, in pairs": (
        "dpo",
        lambda: rows(
            {
                "prompt": [user("yes"), assistant("a")],
                "chosen": [user("yes"), assistant("b")],
                "rejected": [user("yes"), assistant("c")],
            }
        ),
        chat_tokenizer,
    ),
    "a translated question beside Chinese pairs with a prompt": (
        "dpo",
        lambda: rows(
            {
                "question": "Where is it?",
                "chosen": "问\uff1a它在哪里\uff1f答\uff1a这里",
                "rejected": "问\uff1a它在哪里\uff1f答\uff1a那里",
            },
            times=4,
        ),
        tokenizer,
    ),
    "a translated question beside Arabic pairs with a prompt": (
        "dpo",
        lambda: rows({"question": "Where is it?", "chosen": "أين هو؟ هنا", "rejected": "أين هو؟ هناك"}, times=4),
        tokenizer,
    ),
    "a translated question beside Japanese pairs with a prompt": (
        "dpo",
        lambda: rows(
            {
                "question": "Where is Mt. Fuji?",
                "chosen": "富士山がどこにあるか教えてください。静岡県です。",
                "rejected": "富士山がどこにあるか教えてください。大阪です。",
            },
            times=4,
        ),
        tokenizer,
    ),
    "a user who always says the same": (
        "dpo",
        lambda: rows(
            *[
                {
                    "context": f"of joke {x}",
                    "chosen": [user("Tell me a joke."), assistant(f"w{x}")],
                    "rejected": [user("Tell me a joke."), assistant(f"w1 w{x}")],
                }
                for x in range(6)
            ]
        ),
        chat_tokenizer,
    ),
    "code and a question about it, beside a title": (
        "dpo",
        lambda: rows(
            *[
                {
                    "question": f"What f{x} does",
                    "chosen": f"```\nf{x}()\n```\nExplain it. It adds.",
                    "rejected": f"```\nf{x}()\n```\nExplain it. It waits.",
                }
                for x in range(4)
            ]
        ),
        tokenizer,
    ),
    "BOS that begins each message": (
        "sft",
        lambda: rows(
            {"prompt": "<|im_start|>user\na<|im_end|>\n", "completion": "<|im_start|>assistant\nb<|im_end|>"}, times=2
        ),
        begins_messages_with_bos,
    ),
    "a prompt that an answer begins": (
        "sft",
        lambda: rows({"prompt": [user("a"), assistant("It is")], "completion": [assistant("It is b")]}, times=2),
        chat_tokenizer,
    ),
    "a question that the common start holds": (
        "dpo",
        lambda: rows({"question": "w1?", "chosen": "Q: w1?\nA: w2", "rejected": "Q: w1?\nA: w3"}, times=4),
        tokenizer,
    ),
    "a context beside dialogues": (
        "dpo",
        lambda: rows(
            *[
                {
                    "context": f"a topic {x}",
                    "chosen": f"Human: w{x} Assistant: w2",
                    "rejected": f"Human: w{x} Assistant: w3",
                }
                for x in range(8)
            ]
        ),
        tokenizer,
    ),
    "a category beside short prompts": (
        "dpo",
        lambda: rows({"context": "sky", "chosen": "The sky is blue.", "rejected": "The sky is green."}, times=4),
        tokenizer,
    ),
    "tools that are an empty object": (
        "sft",
        lambda: rows({"messages": [user("a"), assistant("b")], "tools": "{}"}, times=2),
        chat_tokenizer,
    ),
    "an input that is empty": (
        "dpo",
        lambda: rows({"input": "", "chosen": "w1 w2 w3", "rejected": "w1 w2 w4"}, times=4),
        tokenizer,
    ),
    "a shortened question beside messages": (
        "dpo",
        lambda: rows(
            {
                "question": "Mali",
                "chosen": [user("What?"), assistant("b")],
                "rejected": [user("What?"), assistant("c")],
            },
            times=2,
        ),
        chat_tokenizer,
    ),
    "a chosen answer with a space at its end": (
        "dpo",
        lambda: rows({"prompt": "w1", "chosen": "w1 w2 ", "rejected": "yes"}, times=4),
        tokenizer,
    ),
    "roles that a template knows": (
        "sft",
        lambda: rows(HUMAN, times=2),
        lambda: tokenizer(
            chat_template="{% for m in messages %}{{ 'Q' if m.role == 'human' else 'A' }} {{ m.content }} {% endfor %}"
        ),
    ),
    "roles that a template does not read": (
        "sft",
        lambda: rows(HUMAN, times=2),
        lambda: tokenizer(chat_template="{% for m in messages %}{{ m.content }} {% endfor %}"),
    ),
    "a role in a template that renders parts alone": (
        "sft",
        lambda: rows({"messages": [user("a"), {"role": "tool", "content": "b"}, assistant("c")]}, times=2),
        lambda: tokenizer(
            chat_template="{% for m in messages %}{{ m.role }}{% if m.content is not string %}{% endif %}{% endfor %}"
        ),
    ),
    "roles of one's own": (
        "sft",
        lambda: rows({"messages": [{"role": "narrator", "content": "a"}, assistant("b")]}, times=2),
        keeps_roles,
    ),
    "text with EOS": ("sft", lambda: rows({"text": "w1 w2 </s>"}, times=2), tokenizer),
    "text without BOS": ("sft", lambda: rows({"text": "w1 w2"}, times=2), formatted_before),
    "text with a BOS that the tokenizer does not add": (
        "dpo",
        lambda: rows({"prompt": "<s> w1", "chosen": "w2", "rejected": "w3"}, times=2),
        lambda: tokenizer(bos_token="<s>"),
    ),
    "tools that are None": (
        "sft",
        lambda: Dataset.from_list([{"messages": [user("a"), assistant("b")], "tools": x} for x in ("[]", None)]),
        chat_tokenizer,
    ),
    "template options in each row": (
        "dpo",
        lambda: rows(
            {
                "prompt": [user("a")],
                "chosen": [assistant("b")],
                "rejected": [assistant("c")],
                "chat_template_kwargs": {"enable_thinking": False},
            },
            times=2,
        ),
        chat_tokenizer,
    ),
    "token ids beside tools that TRL does not read": (
        "sft",
        lambda: rows({"input_ids": [3, 4], "labels": [3, 4], "tools": ""}, times=2),
        tokenizer,
    ),
    "a call without content": (
        "sft",
        lambda: rows(
            {
                "messages": [
                    {**user("a"), "tool_calls": None},
                    {
                        "role": "assistant",
                        "content": None,
                        "tool_calls": TOOL_CALL,
                    },
                ]
            },
            times=2,
        ),
        chat_tokenizer,
    ),
    "an empty text": ("sft", lambda: rows({"text": "w1"}, {"text": ""}), tokenizer),
    "an empty prompt": ("dpo", lambda: rows({"prompt": "", "chosen": "w1", "rejected": "w1 w2"}, times=2), tokenizer),
}


@pytest.mark.parametrize("what", SILENT)
def test_what_looks_like_a_mistake_and_is_none_is_silent(what: str, caplog: pytest.LogCaptureFixture) -> None:
    method, dataset, processing_class = SILENT[what]
    check(method, dataset(), processing_class())
    assert caplog.text == ""


def labels_of_ids(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    ids = torch.tensor([row["input_ids"] for row in rows])
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}


class Recorded:
    """A bench that keeps what it would train on."""

    method = ""
    dataset: Any = None
    processing_class: Any = None

    def __getattr__(self, name: str) -> Any:
        if name == "workshop":
            return SimpleNamespace(model=lambda name: name)

        def record(train_dataset: Any, model: str = "", **arguments: Any) -> None:
            self.method, self.dataset = name, train_dataset
            self.processing_class = chat_tokenizer() if model == "chat" else tokenizer()

        return record


DATA_MISTAKES = {name: mistake for name, mistake in read_table().items() if mistake.section.startswith("Data: ")}
REMEDIES = {name: re.findall(r"`(dataset\.[^`]+)`", mistake.message) for name, mistake in DATA_MISTAKES.items()}


@pytest.mark.parametrize("name", [name for name, code in REMEDIES.items() if code])
def test_data_that_is_changed_as_an_error_says_is_accepted(name: str) -> None:
    bench: Any = Recorded()
    DATA_MISTAKES[name].make(bench)
    changed = eval(REMEDIES[name][-1], {"dataset": bench.dataset})
    check(bench.method, changed, bench.processing_class)


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        ({"train_dataset": LABELLED.remove_columns("label")}, {"completion_only_loss": True}),
        (
            {"train_dataset": rows({"input_ids": [3, 4], "completion_mask": [0, 1]}, times=4)},
            {"completion_only_loss": True},
        ),
        ({"train_dataset": rows({"input_ids": [3, 4], "labels": [-100, 4]}, times=4)}, {"completion_only_loss": True}),
        (
            {
                "train_dataset": rows(
                    {"input_ids": [3, 4], "labels": [-100, -100]}, {"input_ids": [3, 4], "labels": [-100, 4]}
                )
            },
            {},
        ),
        ({"data_collator": "own"}, {"completion_only_loss": True}),
        (
            {"train_dataset": rows({"input_ids": [3, 4], "assistant_masks": [0, 1]}, times=4)},
            {"completion_only_loss": True},
        ),
        (
            {"train_dataset": rows({"messages": [user("a"), assistant("b")]}, times=4), "model": "chat"},
            {"completion_only_loss": True, "assistant_only_loss": True},
        ),
        (
            {"train_dataset": rows({"input_ids": [3, 4], "labels": 1}, times=4), "data_collator": "ids"},
            {"dataset_kwargs": {"skip_prepare_dataset": True}},
        ),
        (
            {"train_dataset": rows({"input_ids": [3, 4], "labels": [-100, -100]}, times=4), "data_collator": "ids"},
            {"dataset_kwargs": {"skip_prepare_dataset": True}},
        ),
    ],
    ids=[
        "completions",
        "masks",
        "labels",
        "some labels",
        "a collator",
        "masks of the assistant",
        "messages of the assistant",
        "classes that a collator does not read",
        "labels that a collator does not read",
    ],
)
def test_labels_that_train_rightly_are_silent(
    arguments: dict[str, Any], fields: dict[str, Any], workshop: Workshop, tmp_path: Path, caplog: Any
) -> None:
    if arguments.get("data_collator") == "own":
        arguments = {"data_collator": DataCollatorForLanguageModeling(pad_token_id=0)}
    elif arguments.get("data_collator") == "ids":
        arguments = {**arguments, "data_collator": labels_of_ids}
    if "model" in arguments:
        arguments = {**arguments, "model": workshop.model(arguments["model"])}
    bench = Bench(workshop, tmp_path)
    bench.sft(**arguments, **fields, max_length=None)
    assert bench.trainer.state.global_step == 1
    assert "label" not in caplog.text
    assert "completion" not in caplog.text


@pytest.mark.parametrize(
    ("dataset", "fields", "words"),
    [
        (
            rows({"prompt": "w1", "completion": " w2", "text": "w1 w2"}, times=4),
            {},
            "`train_dataset` has the column `text` beside `prompt` and `completion`. TRL trains on `prompt` and "
            "`completion`, but adds '</s>' only to `text`, so completions have no end. Remove that column: "
            '`dataset.remove_columns("text")`.',
        ),
        (
            rows({"prompt": "w1", "completion": " w2"}, times=4),
            {"formatting_func": lambda row: row["prompt"], "completion_only_loss": False},
            "`formatting_func` has no effect on `train_dataset`: TRL trains on `prompt` and `completion`. Leave it "
            "out, or rename these columns.",
        ),
        (
            rows({"messages": [user("a"), assistant("b")]}, times=4),
            {"formatting_func": lambda row: "w1 w2"},
            "`formatting_func` has no effect on `train_dataset`: TRL trains on `messages`.",
        ),
        (
            rows({"body": "w1 w2"}, times=4),
            {"formatting_func": lambda row: "w3 w4", "dataset_text_field": "body"},
            "`formatting_func` has no effect on `train_dataset`: TRL trains on `body`.",
        ),
        (rows({"prompt": "w1", "completion": " w2</s>", "text": "w1 w2"}, times=4), {}, None),
        (rows({"prompt": "w1", "completion": " w2", "text": "w1 w2 </s>"}, times=4), {}, None),
        (rows({"instruction": "w1", "output": "w2"}, times=4), {"formatting_func": lambda row: row["output"]}, None),
        (rows({"text": "w1"}, times=4), {"formatting_func": lambda row: row["text"]}, None),
    ],
    ids=[
        "text beside completions",
        "a function beside completions",
        "a function beside messages",
        "a function beside text",
        "completions that end",
        "text that ends",
        "a function of other columns",
        "a function of text",
    ],
)
def test_a_column_that_is_read_instead_of_another_is_a_warning(
    dataset: Dataset, fields: dict[str, Any], words: str | None, workshop: Workshop, tmp_path: Path, caplog: Any
) -> None:
    bench = Bench(workshop, tmp_path)
    model = workshop.model("chat" if "messages" in dataset.column_names else "tied")
    bench.sft(train_dataset=dataset, model=model, **fields)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == (words is not None)
    assert words is None or words in warnings[0]


def test_rows_for_evaluation_without_a_label_are_a_warning(
    workshop: Workshop, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = rows({"input_ids": [3, 4, 5], "labels": [-100, 4, 5]}, {"input_ids": [3, 4], "labels": [-100, -100]})
    bench = Bench(workshop, tmp_path)
    bench.sft(eval_dataset={"a": given, "b": given.select([0])}, max_length=None, per_device_eval_batch_size=1)
    words = "`eval_dataset['a']` has rows in which every label is -100, such as row 1. A batch of such rows counts as a"
    assert words in caplog.text
    assert "eval_dataset['b']" not in caplog.text
    whole, labeled = bench.trainer.evaluate(), bench.trainer.evaluate(bench.trainer.eval_dataset["b"])
    assert whole["eval_a_loss"] == pytest.approx(labeled["eval_loss"] / 2)  # as in TRL


def test_a_mask_that_is_not_read_is_a_warning(
    workshop: Workshop, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(workshop, tmp_path)
    bench.sft(train_dataset=rows({"input_ids": [3, 4, 5], "completion_mask": [0, 0, 1]}, times=4))
    assert "`completion_mask` of `train_dataset` is not read, so the loss also counts prompts." in caplog.text
    assert bench.trainer.train_dataset[0]["labels"] == [3, 4, 5]


def test_completion_only_loss_without_completions_in_evaluation_is_a_warning(
    workshop: Workshop, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(workshop, tmp_path)
    bench.sft(train_dataset=LABELLED.remove_columns("label"), eval_dataset=TEXTS, completion_only_loss=True)
    assert "`completion_only_loss=True` has no effect on `eval_dataset`, which has the columns ['text']" in caplog.text


@pytest.mark.parametrize(
    ("text", "processing_class", "words"),
    [
        ("<s> w1 w2", formatted_before, "text for `train_dataset` that already has the '<s>' at its start"),
        ("w1 w2 w3 </s> w4", tokenizer, "text for `train_dataset` that already has the '</s>' at its end"),
        ("w1 w2 w3 </s>", tokenizer, None),
    ],
)
def test_special_tokens_of_a_formatting_function_are_a_warning(
    text: str, processing_class: Any, words: str | None, workshop: Workshop, tmp_path: Path, caplog: Any
) -> None:
    made = processing_class()
    model = Bench(workshop, tmp_path).loaded()
    model.resize_token_embeddings(len(made))
    Bench(workshop, tmp_path).sft(model=model, processing_class=made, formatting_func=lambda row: text)
    assert (words or "") in caplog.text
    assert ("formatting_func" in caplog.text) is (words is not None)


@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_template_options_that_are_not_read_are_a_warning(
    method: str, workshop: Workshop, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = rows({"prompt": [user("a")], "chat_template_kwargs": {"enable_thinking": False}}, times=4)
    for options in (None, {"enable_thinking": False}):
        caplog.clear()
        bench = Bench(workshop, tmp_path)
        getattr(bench, method)(model=workshop.model("chat"), train_dataset=prompts, chat_template_kwargs=options)
        assert ("does not read the column `chat_template_kwargs` of `train_dataset`." in caplog.text) is (
            options is None
        )


def test_a_later_row_of_a_stream_is_named(workshop: Workshop, tmp_path: Path) -> None:
    turns = [user("a"), assistant("b")]
    given = [{"messages": turns, "chat_template_kwargs": {"a": 1}}] * 3 + [
        {"messages": turns, "chat_template_kwargs": None}
    ]
    bench = Bench(workshop, tmp_path)
    with pytest.raises(ValueError, match=r"^`chat_template_kwargs` is None in row 3 of `train_dataset`\."):
        bench.sft(
            model=workshop.model("chat"), train_dataset=Dataset.from_list(given).to_iterable_dataset(), max_steps=3
        )
    empty = Dataset.from_list([{"messages": turns}] * 2 + [{"messages": []}]).to_iterable_dataset()
    with pytest.raises(ValueError, match=r"^`messages` of `train_dataset` must be .*, got \[\] in row 2"):
        list(checked_rows(empty, "train", chat_tokenizer(), COLUMNS["sft"], has_end=True))
    labels = Dataset.from_list([{**ROW, "label": x} for x in (1, 0, 1, 0, 2)])
    with pytest.raises(ValueError, match=r"got 2 in row 4\."):
        list(checked_rows(labels.to_iterable_dataset(), "train", tokenizer(), kto_columns, has_end=True))


TEMPLATES = sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))


@pytest.mark.parametrize("role", ["gpt", "model", "Assistant"])
def test_no_template_of_trl_drops_a_role_of_the_assistant_silently(role: str, caplog: pytest.LogCaptureFixture) -> None:
    """Where a template drops the message, or prints a role that it does not name, something is said."""
    for path in TEMPLATES:
        template, caplog_text = tokenizer(chat_template=path.read_text()), caplog.text
        conversation = [user("some-text"), {"role": role, "content": "some-answer"}]
        try:
            rendered = template.apply_chat_template(conversation, tokenize=False)
        except Exception:  # TRL raises it, too
            continue
        usual = template.apply_chat_template([conversation[0], assistant("some-answer")], tokenize=False)
        if "some-answer" not in usual:  # a template of parts
            continue
        error = None
        try:
            check("sft", rows({"messages": conversation}, times=2), template)
        except ValueError as raised:
            error = str(raised)
        if "some-answer" not in rendered:
            assert f"has the role {role!r}" in str(error), path.name
        elif rendered != usual and f"'{role}'" not in path.read_text():
            assert caplog.text != caplog_text, path.name
        else:
            assert (error, caplog.text) == (None, caplog_text), path.name


@pytest.mark.parametrize("path", TEMPLATES, ids=[x.stem for x in TEMPLATES])
def test_usual_roles_are_silent_with_every_template_of_trl(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    template = tokenizer(chat_template=path.read_text())
    turns = [user("a"), assistant("b"), user("c"), assistant("d")]
    check("sft", rows({"messages": turns}, times=2), template)
    check(
        "dpo", rows({"prompt": turns[:3], "chosen": [assistant("d")], "rejected": [assistant("e")]}, times=2), template
    )
    assert caplog.text == ""


def test_each_evaluation_set_is_named() -> None:
    repeated = rows({"prompt": [user("a")], "chosen": [user("a"), assistant("b")], "rejected": [assistant("c")]})
    with pytest.raises(
        ValueError, match=r"^`prompt` of `eval_dataset\['second'\]` is also at the start of `chosen`, in"
    ):
        checked_rows(repeated, "second", chat_tokenizer(), pair_columns, has_end=True)


def test_rows_stay_as_they_are() -> None:
    given = copy.deepcopy(SHAPES["teknium/OpenHermes-2.5"].rows)
    dataset = Dataset.from_list(given)
    with pytest.raises(ValueError, match="the role 'human'"):
        check("sft", dataset)
    assert dataset.to_list() == given
