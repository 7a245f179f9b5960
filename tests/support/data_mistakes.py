"""Data that TRL misreads, or fails on with a raw error: each with our whole message and what stock TRL does."""

from typing import Any

from datasets import Dataset

from mistakes import Mistake
from short_training import Bench

KEEPS_ROLES = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
BOTH = ("chosen", "rejected")


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


REMOVAL = 'Remove the column: `dataset.remove_columns("prompt")`. TRL takes the start that both share as prompt.'
REPEATED = "`prompt` of `train_dataset` is also at the start of "
TWICE = ", in row 0, so it would be trained twice. "
ALL_TWICE = ", in row 0 and every other row that was read, so it would be trained twice. "
NO_PROMPT = (
    "but no `prompt`, and `chosen` and `rejected` of row 0 do not start with the same prompt: their common start is "
)
UNRENDERED = ", but the chat template of `processing_class` does not render its messages. "
UNLABELED = (
    "`train_dataset` has no token to train on: every label is -100 in all of its rows. Look at `labels` or the masks "
    "if you made them; else the completions are empty, or the chat template leaves them out."
)

DATA_MISTAKES: dict[str, Mistake] = {
    # The prompt twice
    "DPO, a prompt as text that messages hold": Mistake(
        lambda b: chat(b, "dpo", ultrafeedback()),
        "`train_dataset` mixes text and messages: `prompt` is text, `chosen` is messages, `rejected` is messages in "
        "its first row. `chosen` and `rejected` hold the prompt, too. Remove the column: "
        '`dataset.remove_columns("prompt")`.',
        "'list' object has no attribute 'endswith' OR can only concatenate str (not \"list\") to str",
    ),
    "DPO, a prompt as text that messages lack": Mistake(
        lambda b: chat(b, "dpo", rows({"prompt": "a", "chosen": [assistant("b")], "rejected": [assistant("c")]})),
        "`train_dataset` mixes text and messages: `prompt` is text, `chosen` is messages, `rejected` is messages in "
        'its first row. Make the prompt a message: `dataset.map(lambda row: {"prompt": [{"role": "user", "content": '
        'row["prompt"]}]})`.',
        "'list' object has no attribute 'endswith' OR can only concatenate str (not \"list\") to str",
    ),
    "KTO, a prompt as text that the completion holds": Mistake(
        lambda b: chat(
            b, "kto", rows({"prompt": "a", "completion": [user("a"), assistant("b")], "label": True}, times=2)
        ),
        "`train_dataset` mixes text and messages: `prompt` is text, `completion` is messages in its first row. The "
        'completion holds the prompt, too. Split it: `dataset.map(lambda row: {"prompt": row["completion"][:-1], '
        '"completion": row["completion"][-1:]})`.',
        "'list' object has no attribute 'endswith' OR can only concatenate str (not \"list\") to str",
    ),
    "DPO, messages of the prompt twice": Mistake(
        lambda b: chat(b, "dpo", ultrafeedback(prompt=lambda place: [user(f"How many w{place}?")])),
        f"{REPEATED}`chosen` and `rejected`{TWICE}{REMOVAL}",
        None,
    ),
    "DPO, messages of the prompt twice in a later row": Mistake(
        lambda b: chat(
            b,
            "dpo",
            rows(
                *[{"prompt": [user("a")], "chosen": [assistant("b")], "rejected": [assistant("c")]}] * 3,
                {
                    "prompt": [user("a")],
                    "chosen": [user(" a\n"), assistant("b")],
                    "rejected": [user("a"), assistant("c")],
                },
            ),
        ),
        f"{REPEATED}`chosen` and `rejected`, in row 3, so it would be trained "
        "twice. Leave only the answer in `chosen` and `rejected`.",
        None,
    ),
    "DPO, a system message before the prompt that is there twice": Mistake(
        lambda b: chat(
            b, "dpo", ultrafeedback(prompt=lambda x: [{"role": "system", "content": "Be."}, user(f"How many w{x}?")])
        ),
        f"{REPEATED}`chosen` and `rejected`{TWICE}Leave only the answer in `chosen` and `rejected`.",
        None,
    ),
    "DPO, the last of several turns twice": Mistake(
        lambda b: chat(
            b,
            "dpo",
            rows(
                {
                    "prompt": [user("a"), assistant("b"), user("c")],
                    "chosen": [user("c"), assistant("d")],
                    "rejected": [user("c"), assistant("e")],
                },
                times=2,
            ),
        ),
        f"{REPEATED}`chosen` and `rejected`{TWICE}Leave only the answer in `chosen` and `rejected`.",
        None,
    ),
    "KTO, messages of the prompt twice": Mistake(
        lambda b: chat(
            b,
            "kto",
            rows({"prompt": [user("a")], "completion": [user("a"), assistant("b")], "label": True}, times=2),
        ),
        f'{REPEATED}`completion`{TWICE}Remove it there: `dataset.map(lambda row: {{"completion": '
        'row["completion"][len(row["prompt"]) :]})`.',
        None,
    ),
    "SFT, messages of the prompt twice": Mistake(
        lambda b: chat(b, "sft", rows({"prompt": [user("a")], "completion": [user("a"), assistant("b")]}, times=2)),
        f'{REPEATED}`completion`{TWICE}Remove it there: `dataset.map(lambda row: {{"completion": '
        'row["completion"][len(row["prompt"]) :]})`.',
        None,
    ),
    "DPO, text of the prompt twice": Mistake(
        lambda b: b.dpo(
            train_dataset=Dataset.from_list(
                [
                    {"prompt": f"w1 w{place}", "chosen": f"w1 w{place} w5", "rejected": f"w1 w{place}\nw6"}
                    for place in range(4)
                ]
            )
        ),
        f"{REPEATED}`chosen` and `rejected`{ALL_TWICE}{REMOVAL}",
        None,
    ),
    "DPO, a prompt within a dialogue": Mistake(
        lambda b: b.dpo(
            train_dataset=rows(
                {
                    "prompt": "w1 w2?",
                    "chosen": "\n\nHuman: w1 w2?\n\nAssistant: w3",
                    "rejected": "\n\nHuman: w1 w2?\n\nAssistant: w4",
                },
                times=4,
            )
        ),
        f"{REPEATED}`chosen` and `rejected`{ALL_TWICE}{REMOVAL}",
        None,
    ),
    "SFT, dialogues with the prompt twice": Mistake(
        lambda b: b.sft(
            train_dataset=Dataset.from_list(
                [{"prompt": f"w1 w{x}", "completion": f"### Question: w1 w{x}\n### Answer: w5"} for x in range(5)]
            )
        ),
        f"{REPEATED}`completion`{ALL_TWICE}Leave only the answer in `completion`.",
        None,
    ),
    # The prompt in another column
    "DPO, answers that begin with the same words": Mistake(
        lambda b: b.dpo(
            train_dataset=rows({"question": "Which color?", "chosen": "It is red", "rejected": "It is blue"}, times=4)
        ),
        f"`train_dataset` has the columns ['chosen', 'question', 'rejected'] {NO_PROMPT}'It is '. Rename the column: "
        '`dataset.rename_column("question", "prompt")`.',
        None,
    ),
    "DPO, answers that all begin with the same line": Mistake(
        lambda b: b.dpo(
            train_dataset=Dataset.from_list(
                [{"query": f"w{place} w2", "chosen": "Answer:\nw5", "rejected": "Answer:\nw6"} for place in range(4)]
            )
        ),
        f"`train_dataset` has the columns ['chosen', 'query', 'rejected'] {NO_PROMPT}'Answer:\\nw'. Rename the column: "
        '`dataset.rename_column("query", "prompt")`.',
        None,
    ),
    "DPO, prompts by another name in all rows but the first": Mistake(
        lambda b: b.dpo(
            train_dataset=rows(
                {"instruction": "w1 w2", "chosen": "w1 w2 w3", "rejected": "w1 w2 w4"},
                *[{"instruction": "w1 w2", "chosen": "It is red", "rejected": "It is blue"}] * 3,
            )
        ),
        "`train_dataset` has the columns ['chosen', 'instruction', 'rejected'] but no `prompt`, and `chosen` and "
        "`rejected` of row 1 do not start with the same prompt: their common start is 'It is '. Rename the column: "
        '`dataset.rename_column("instruction", "prompt")`.',
        None,
    ),
    "KTO, pairs with prompts by another name": Mistake(
        lambda b: b.kto(
            train_dataset=rows({"input": "Which color?", "chosen": "It is red", "rejected": "It is blue"}, times=4)
        ),
        f"`train_dataset` has the columns ['chosen', 'input', 'rejected'] {NO_PROMPT}'It is '. Rename the column: "
        '`dataset.rename_column("input", "prompt")`.',
        None,
    ),
    "DPO, a question beside messages": Mistake(
        lambda b: chat(
            b, "dpo", rows({"question": "Which?", "chosen": [assistant("b")], "rejected": [assistant("c")]}, times=2)
        ),
        f"`train_dataset` has the columns ['chosen', 'question', 'rejected'] {NO_PROMPT}empty. Make it of what you "
        'have: `dataset.map(lambda row: {"prompt": [{"role": "user", "content": row["question"]}]})`.',
        "Cannot apply chat template to an empty conversation. Provide at least one message. OR list index out of range",
    ),
    "DPO, an instruction with an input": Mistake(
        lambda b: b.dpo(
            train_dataset=rows({"instruction": "Add", "input": "w1 w2", "chosen": "w5", "rejected": "w6"}, times=4)
        ),
        f"`train_dataset` has the columns ['chosen', 'input', 'instruction', 'rejected'] {NO_PROMPT}'w'. Make it of "
        'what you have: `dataset.map(lambda row: {"prompt": row["instruction"] + "\\n\\n" + row["input"]})`.',
        None,
    ),
    "DPO, messages without a prompt": Mistake(
        lambda b: chat(
            b,
            "dpo",
            rows(
                {"chosen": [user("a"), assistant("b")], "rejected": [user("a"), assistant("c")]},
                {"chosen": [assistant("b")], "rejected": [assistant("c")]},
            ),
        ),
        "`train_dataset` has no `prompt`, and `chosen` and `rejected` do not start with the same message in row 1. Add "
        "the messages of the prompt as a column `prompt`, or remove the row.",
        "Cannot apply chat template to an empty conversation. Provide at least one message. OR list index out of range",
    ),
    "DPO, a space that TRL takes for the end of a prompt": Mistake(
        lambda b: b.dpo(train_dataset=rows({"chosen": "w1 w2 ", "rejected": "yes"}, times=4)),
        "`chosen` and `rejected` of `train_dataset` have no common start in row 0, and `chosen` ends with a space: TRL "
        'would make a prompt of all that precedes it. Remove the space: `dataset.map(lambda row: {"chosen": '
        'row["chosen"].rstrip()})`.',
        None,
    ),
    # Roles
    "SFT, roles of ShareGPT": Mistake(
        lambda b: chat(
            b,
            "sft",
            rows(
                {"messages": [{"role": "human", "content": "a"}, {"role": "gpt", "content": "b"}]},
                times=2,
            ),
        ),
        f"`messages` of `train_dataset` has the role 'human' in row 0{UNRENDERED}Rename the roles: `dataset.map(lambda "
        'row: {"messages": [{**x, "role": {"gpt": "assistant", "human": "user"}.get(x["role"], x["role"])} for x in '
        'row["messages"]]})`.',
        "num_samples should be a positive integer value, but got num_samples=0",
    ),
    "SFT, ShareGPT's conversations": Mistake(
        lambda b: chat(
            b,
            "sft",
            rows(
                {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
                times=2,
            ),
        ),
        f"`conversations` of `train_dataset` has the role 'human' in row 0{UNRENDERED}Convert messages with `from` and "
        '`value`: `dataset.map(lambda row: {"messages": [{"role": {"gpt": "assistant", "human": "user"}.get(x["from"], '
        'x["from"]), "content": x["value"]} for x in row["conversations"]]}, remove_columns="conversations")`.',
        "num_samples should be a positive integer value, but got num_samples=0",
    ),
    "SFT, completions by a role that the template leaves out": Mistake(
        lambda b: chat(
            b, "sft", rows({"prompt": [user("a")], "completion": [{"role": "gpt", "content": "b"}]}, times=2)
        ),
        f"`completion` of `train_dataset` has the role 'gpt' in row 0{UNRENDERED}Rename the roles: `dataset.map(lambda "
        'row: {"completion": [{**x, "role": {"gpt": "assistant"}.get(x["role"], x["role"])} for x in '
        'row["completion"]]})`.',
        "num_samples should be a positive integer value, but got num_samples=0",
    ),
    "GRPO, a capital role": Mistake(
        lambda b: chat(b, "grpo", rows({"prompt": [{"role": "User", "content": "a"}]}, times=4)),
        f"`prompt` of `train_dataset` has the role 'User' in row 0{UNRENDERED}Rename the roles: `dataset.map(lambda "
        'row: {"prompt": [{**x, "role": {"User": "user"}.get(x["role"], x["role"])} for x in row["prompt"]]})`.',
        None,
    ),
    "DPO, answers that begin with thoughts": Mistake(
        lambda b: b.dpo(
            train_dataset=rows(
                *[
                    {
                        "problem": f"Is {x} a prime?",
                        "chosen": f"<think>\nOkay, so I need to see if {x} is one: yes",
                        "rejected": f"<think>\nOkay, so I need to see if {x} is one: no",
                    }
                    for x in range(4)
                ]
            )
        ),
        "`train_dataset` has the columns ['chosen', 'problem', 'rejected'] "
        + NO_PROMPT
        + "'<think>\\nOkay, so I need to "
        'see if 0 is one: \'. Rename the column: `dataset.rename_column("problem", "prompt")`.',
        None,
    ),
    "DPO, answers that begin with code": Mistake(
        lambda b: b.dpo(
            train_dataset=rows(
                *[
                    {
                        "instruction": f"Write f{x} in Python.",
                        "chosen": f"```python\ndef f{x}(x): return x\n```",
                        "rejected": f"```python\ndef f{x}(x): pass\n```",
                    }
                    for x in range(4)
                ]
            )
        ),
        "`train_dataset` has the columns ['chosen', 'instruction', 'rejected'] "
        + NO_PROMPT
        + "'```python\\ndef f0(x): '. "
        'Rename the column: `dataset.rename_column("instruction", "prompt")`.',
        None,
    ),
    # Labels
    "SFT, completion_only_loss on messages": Mistake(
        lambda b: chat(b, "sft", rows({"messages": [user("a"), assistant("b")]}, times=2), completion_only_loss=True),
        "`completion_only_loss=True` has no effect on `train_dataset`, which has the columns ['messages']: its "
        "loss would be of every token. Set `assistant_only_loss=True`, which scores the assistant's messages alone.",
        None,
    ),
    "SFT, completion_only_loss on text": Mistake(
        lambda b: b.sft(completion_only_loss=True),
        "`completion_only_loss=True` has no effect on `train_dataset`, which has the columns ['text']: its "
        "loss would be of every token. Give `prompt` and `completion`, or leave it out.",
        None,
    ),
    "SFT, completion_only_loss on token ids": Mistake(
        lambda b: b.sft(train_dataset=rows({"input_ids": [3, 4, 5]}, times=2), completion_only_loss=True),
        "`completion_only_loss=True` has no effect on `train_dataset`, which has the columns ['input_ids']: its "
        "loss would be of every token. Add `completion_mask` or `labels`, or leave it out.",
        None,
    ),
    "SFT, text with the labels of a classifier": Mistake(
        lambda b: b.sft(train_dataset=rows({"text": "w1 w2", "labels": 1}, times=2)),
        "`labels` of `train_dataset` would be the labels of its tokens, which TRL makes of the text or messages. "
        'Remove the column: `dataset.remove_columns("labels")`.',
        "'int' object is not subscriptable",
    ),
    "SFT, a function of rows with a prompt": Mistake(
        lambda b: b.sft(
            train_dataset=rows({"prompt": "w1", "response": "w2"}, times=2),
            formatting_func=lambda row: row["prompt"] + " " + row["response"],
        ),
        "`train_dataset` has the column `prompt`, so TRL reads `prompt` and `completion`, not the text of "
        "`formatting_func`. Rename the column, and read it there by the new name.",
        "KeyError: 'completion'",
    ),
    "SFT, prepared rows with too few labels": Mistake(
        lambda b: b.sft(
            train_dataset=rows({"input_ids": [3, 4, 5], "labels": [3, 4]}, {"input_ids": [3, 4], "labels": [3, 4]})
        ),
        "`labels` of `train_dataset` must be a list with a label for each token of `input_ids`, got [3, 4] for "
        "[3, 4, 5]. Give -100 to tokens without a label, and each mask one value for each token.",
        "The size of tensor a (2) must match the size of tensor b (4) at non-singleton dimension 0",
    ),
    "SFT, a mask that is too short": Mistake(
        lambda b: b.sft(
            train_dataset=rows(
                {"input_ids": [3, 4, 5], "completion_mask": [0, 1]},
                {"input_ids": [3, 4, 5], "completion_mask": [1] * 3},
            ),
            completion_only_loss=True,
        ),
        "`labels` of `train_dataset` must be a list with a label for each token of `input_ids`, got [-100, 4] for "
        "[3, 4, 5]. Give -100 to tokens without a label, and each mask one value for each token.",
        None,
    ),
    "SFT, prepared rows without a label": Mistake(
        lambda b: b.sft(train_dataset=rows({"input_ids": [3, 4, 5], "labels": [-100] * 3}, times=4)),
        UNLABELED,
        "num_samples should be a positive integer value, but got num_samples=0",
    ),
    "SFT, prepared rows without a label that nothing limits": Mistake(
        lambda b: b.sft(train_dataset=rows({"input_ids": [3, 4, 5], "labels": [-100] * 3}, times=4), max_length=None),
        UNLABELED,
        None,
    ),
    "SFT, packed rows without a label": Mistake(
        lambda b: b.sft(train_dataset=rows({"input_ids": [3, 4, 5], "labels": [-100] * 3}, times=4), packing=True),
        UNLABELED,
        None,
    ),
    "SFT, rows without a label that are not prepared": Mistake(
        lambda b: b.sft(
            train_dataset=rows({"input_ids": [3, 4, 5], "labels": [-100] * 3}, times=4),
            dataset_kwargs={"skip_prepare_dataset": True},
        ),
        UNLABELED,
        None,
    ),
    "SFT, masks without a token": Mistake(
        lambda b: b.sft(
            train_dataset=rows({"input_ids": [3, 4, 5], "completion_mask": [0, 0, 0]}, times=4),
            completion_only_loss=True,
        ),
        UNLABELED,
        "num_samples should be a positive integer value, but got num_samples=0",
    ),
    "SFT, evaluation rows without a label": Mistake(
        lambda b: b.sft(
            eval_dataset={"a": rows({"input_ids": [3, 4], "labels": [-100, -100]}, times=4)}, max_length=None
        ),
        UNLABELED.replace("`train_dataset`", "`eval_dataset['a']`"),
        None,
    ),
    "SFT, an instruction with an input": Mistake(
        lambda b: b.sft(train_dataset=rows({"instruction": "w1", "input": "w2", "output": "w3"}, times=2)),
        "`train_dataset` has the columns ['input', 'instruction', 'output'], but SFT reads `text` (or the column in "
        "`dataset_text_field`), or `messages`, or both `prompt` and `completion`. Make them of what you have: "
        '`dataset.map(lambda row: {"prompt": row["instruction"] + "\\n\\n" + row["input"], "completion": '
        'row["output"]})`.',
        "KeyError: 'text'",
    ),
    "DPO, a role of the prompt": Mistake(
        lambda b: chat(
            b,
            "dpo",
            rows(
                {
                    "prompt": [{"role": "human", "content": "a"}],
                    "chosen": [assistant("b")],
                    "rejected": [assistant("c")],
                },
                times=2,
            ),
        ),
        f"`prompt` of `train_dataset` has the role 'human' in row 0{UNRENDERED}Rename the roles: `dataset.map(lambda "
        'row: {"prompt": [{**x, "role": {"human": "user"}.get(x["role"], x["role"])} for x in row["prompt"]]})`.',
        None,
    ),
    "SFT, a message without a role": Mistake(
        lambda b: chat(
            b,
            "sft",
            rows({"messages": [user("a"), assistant("b")]}, {"messages": [user("a"), {"role": None, "content": "b"}]}),
        ),
        "`messages` of `train_dataset` has a message without a role in row 1. Add `role`, such as 'user'.",
        None,
    ),
    # Values that TRL cannot read in a later row
    "DPO, template options that are None": Mistake(
        lambda b: chat(
            b,
            "dpo",
            Dataset.from_list(
                [
                    {
                        "prompt": [user("a")],
                        "chosen": [assistant("b")],
                        "rejected": [assistant("c")],
                        "chat_template_kwargs": options,
                    }
                    for options in ({"enable_thinking": False}, None)
                ]
            ),
        ),
        "`chat_template_kwargs` is None in row 1 of `train_dataset`. Give the options of the chat template as a "
        "dictionary in each row, or remove the column.",
        "'NoneType' object is not a mapping",
    ),
    "SFT, tools that are an empty text": Mistake(
        lambda b: chat(
            b,
            "sft",
            Dataset.from_list([{"messages": [user("a"), assistant("b")], "tools": x} for x in ("[]", "[]", "")]),
        ),
        "`tools` is '' in row 2 of `train_dataset`. Give None: `dataset.map(lambda row: "
        '{"tools": row["tools"] or None})`.',
        "Expecting value: line 1 column 1 (char 0)",
    ),
    "KTO, tools that are not JSON": Mistake(
        lambda b: b.kto(
            train_dataset=rows({"prompt": "a", "completion": "b", "label": True, "tools": "f(x)"}, times=2)
        ),
        "`tools` is 'f(x)' in row 0 of `train_dataset`. Give a list of tools, as it is or as JSON, or None for no "
        "tools.",
        "Expecting value: line 1 column 1 (char 0)",
    ),
    "SFT, no message in a later row": Mistake(
        lambda b: chat(b, "sft", rows(*[{"messages": [user("a"), assistant("b")]}] * 199, {"messages": []})),
        "`messages` of `train_dataset` must be a list of messages, got [] in row 199. Give at least one message, or "
        "remove the row.",
        "list index out of range",
    ),
    "GRPO, no message in a later row": Mistake(
        lambda b: chat(b, "grpo", rows(*[{"prompt": [user("a")]}] * 7, {"prompt": []})),
        "`prompt` of `train_dataset` must be text or a list of messages, got [] in row 7. Give at least one message, "
        "or remove the row.",
        None,
    ),
    "DPO, an empty completion without a prompt": Mistake(
        lambda b: b.dpo(
            train_dataset=rows(*[{"chosen": "w1 w2", "rejected": "w1 w3"}] * 3, {"chosen": "w1", "rejected": ""})
        ),
        "`rejected` is empty in row 3 of `train_dataset`, so it has no prompt: there is no column `prompt`. Remove the "
        "row, or add the column.",
        "cannot access local variable 'idx' where it is not associated with a value",
    ),
    "GRPO, arrays of messages": Mistake(
        lambda b: chat(b, "grpo", rows({"prompt": [user("a")]}, times=4).with_format("numpy")),
        "`train_dataset` has the format 'numpy', which makes arrays of messages. Remove it: "
        "`dataset.with_format(None)`.",
        "text input must be of type `str` (single example), `list[str]` (batch or single pretokeniz",
    ),
}
