"""Mistakes in Python code, each with the message of our trainers and what stock TRL does."""

from collections.abc import Callable
from typing import Any, NamedTuple

import trl
from datasets import Dataset, Value
from transformers import AutoModelForSequenceClassification, Qwen3Config, Qwen3ForCausalLM, TrainerCallback

from short_training import LABELLED, PAIR, PAIRS, PROMPTS, ROW, TEXTS, Bench, reward, tokenizer
from tiny import lora_config

CHAT = "{% for m in messages %}{{ m.content }} {% endfor %}"  # a template that renders text alone
USER = {"role": "user", "content": "w1"}
PARTS = [{"role": "user", "content": [{"type": "text", "text": "w1"}]}]

# What to do about ShareGPT's messages in a COLUMN: TRL's own conversion keeps their roles
CONVERSION = (
    'Convert messages with `from` and `value`: `dataset.map(lambda row: {"COLUMN": [{"role": {"human": "user"}.get('
    'x["from"], x["from"]), "content": x["value"]} for x in row["COLUMN"]]})`.'
)


class Mistake(NamedTuple):
    """`ours` is our whole message, `stock` a part of TRL's type and message. `…` is a temporary folder.

    `stock` is None if TRL trains, and "no step" if it ends without having trained.

    "A OR B" in `stock`: TRL takes a column from a set, in any order, so it gives one of two messages.
    """

    make: Callable[[Bench], None]
    ours: str
    stock: str | None


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


def in_quotes(trainer: str, name: str, value: str, stock: str, kind: str = "a number") -> Mistake:
    return Mistake(
        lambda b: getattr(b, trainer)(**{name: value}),
        f"`{name}` must be {kind}, got the string '{value}'. Write {value} without quotes.",
        stock,
    )


class OfUser(TrainerCallback):
    pass


SAVES = {"save_strategy": "steps", "save_steps": 1}

MISTAKES: dict[str, Mistake] = {
    # Types of values
    "DPO, beta in quotes": in_quotes("dpo", "beta", "0.1", "only integer tensors of a single element can be converted"),
    "GRPO, beta in quotes": in_quotes(
        "grpo", "beta", "0.1", "only integer tensors of a single element can be converted"
    ),
    "GRPO, temperature in quotes": in_quotes(
        "grpo", "temperature", "0.7", "`temperature` (=0.7) has to be a strictly positive float"
    ),
    "learning rate in quotes": in_quotes(
        "dpo", "learning_rate", "5e-5", "'<=' not supported between instances of 'float'"
    ),
    "generations in quotes": in_quotes(
        "grpo", "num_generations", "4", "unsupported operand type(s) for %", "an integer"
    ),
    "learning rate in a list": Mistake(
        lambda b: b.dpo(learning_rate=[5e-5]),
        "`learning_rate` must be a number, got [5e-05]. Give a number.",
        "'<=' not supported between instances of 'float' and 'list'",
    ),
    "TRL's own config, learning rate in quotes": Mistake(
        lambda b: b.dpo(args=trl.DPOConfig(**b.shortest(), learning_rate="5e-5")),
        "`learning_rate` must be a number, got the string '5e-5'. Write 5e-5 without quotes.",
        "'<=' not supported between instances of 'float' and 'str'",
    ),
    "no generation": Mistake(
        lambda b: b.grpo(num_generations=0), "`num_generations` must be 2 or more, got 0.", "integer modulo by zero"
    ),
    "batch size with a decimal point": Mistake(
        lambda b: b.dpo(per_device_train_batch_size=4.0),
        "`per_device_train_batch_size` must be an integer, got 4.0. Write 4.",
        "batch_size should be a positive integer value, but got batch_size=4.0",
    ),
    "accumulation of 0": Mistake(
        lambda b: b.dpo(gradient_accumulation_steps=0),
        "`gradient_accumulation_steps` must be 1 or more, got 0.",
        "integer division or modulo by zero",
    ),
    "one weight of rewards": Mistake(
        lambda b: b.grpo(reward_weights=1.0),
        "`reward_weights` must be a list of numbers such as [1.0, 0.5], got 1.0.",
        "object of type 'float' has no len()",
    ),
    "weights of rewards in quotes": Mistake(
        lambda b: b.grpo(reward_weights=["1.0"]),
        "`reward_weights` must be a list of numbers such as [1.0, 0.5], got ['1.0'].",
        "too many dimensions 'str'",
    ),
    "one weight of losses": Mistake(
        lambda b: b.dpo(loss_weights=1.0),
        "`loss_weights` must be a list of numbers such as [1.0, 0.5], got 1.0.",
        "object of type 'float' has no len()",
    ),
    # Arguments of earlier versions, and in the wrong place
    "max_prompt_length": Mistake(
        lambda b: b.config("DPO", max_prompt_length=512),
        "`max_prompt_length` is not an argument of `DPOConfig`. Prompts are no longer truncated. Remove "
        "rows with long prompts from the data set. `max_length` limits prompt and completion "
        "together.",
        "DPOConfig.__init__() got an unexpected keyword argument 'max_prompt_length'",
    ),
    "max_prompt_length of GRPO": Mistake(
        lambda b: b.config("GRPO", max_prompt_length=512),
        "`max_prompt_length` is not an argument of `GRPOConfig`. Prompts are no longer truncated. "
        "Remove rows with long prompts from the data set.",
        "GRPOConfig.__init__() got an unexpected keyword argument 'max_prompt_length'",
    ),
    "rpo_alpha": Mistake(
        lambda b: b.config("DPO", rpo_alpha=0.5),
        '`rpo_alpha` is not an argument of `DPOConfig`. Use `loss_type=["sigmoid", "sft"]` and '
        "`loss_weights=[1.0, 0.5]`.",
        "DPOConfig.__init__() got an unexpected keyword argument 'rpo_alpha'",
    ),
    "evaluation_strategy": Mistake(
        lambda b: b.config("GRPO", evaluation_strategy="no"),
        "`evaluation_strategy` is not an argument of `GRPOConfig`. Use `eval_strategy`.",
        "GRPOConfig.__init__() got an unexpected keyword argument 'evaluation_strategy'",
    ),
    "warmup_ratio": Mistake(
        lambda b: b.config("DPO", warmup_ratio=0.1),
        "`warmup_ratio` is not an argument of `DPOConfig`. Use `warmup_steps=0.1`: a number below 1 is a ratio.",
        "DPOConfig.__init__() got an unexpected keyword argument 'warmup_ratio'",
    ),
    "max_new_tokens": Mistake(
        lambda b: b.config("GRPO", max_new_tokens=16),
        "`max_new_tokens` is not an argument of `GRPOConfig`. Use `max_completion_length`.",
        "GRPOConfig.__init__() got an unexpected keyword argument 'max_new_tokens'",
    ),
    "a misspelt field": Mistake(
        lambda b: b.config("DPO", lerning_rate=1e-5),
        "DPOConfig.__init__() got an unexpected keyword argument 'lerning_rate'. Did you mean `learning_rate`?",
        "DPOConfig.__init__() got an unexpected keyword argument 'lerning_rate'",
    ),
    "an unknown field": Mistake(
        lambda b: b.config("DPO", zebra=1),
        "DPOConfig.__init__() got an unexpected keyword argument 'zebra'.",
        "DPOConfig.__init__() got an unexpected keyword argument 'zebra'",
    ),
    "a field that only looks similar": Mistake(
        lambda b: b.config("DPO", lora_rank=8),
        "DPOConfig.__init__() got an unexpected keyword argument 'lora_rank'.",
        "DPOConfig.__init__() got an unexpected keyword argument 'lora_rank'",
    ),
    "another library's name": Mistake(
        lambda b: b.config("GRPO", per_device_batch_size=8),
        "`per_device_batch_size` is not an argument of `GRPOConfig`. Use `per_device_train_batch_size`.",
        "GRPOConfig.__init__() got an unexpected keyword argument 'per_device_batch_size'",
    ),
    "tokenizer": Mistake(
        lambda b: b.dpo(tokenizer=None),
        "`tokenizer` is not an argument of `DPOTrainer`. Use `processing_class`.",
        "DPOTrainer.__init__() got an unexpected keyword argument 'tokenizer'",
    ),
    "beta of the trainer": Mistake(
        lambda b: b.package.DPOTrainer(model=b.workshop.model("tied"), beta=0.1, train_dataset=PAIRS),
        "`beta` is an argument of `DPOConfig`, not of `DPOTrainer`. Pass `args=DPOConfig(beta=0.1, ...)`.",
        "DPOTrainer.__init__() got an unexpected keyword argument 'beta'",
    ),
    "max_prompt_length of the trainer": Mistake(
        lambda b: b.dpo(max_prompt_length=512),
        "`max_prompt_length` is not an argument of `DPOTrainer`. Prompts are no longer truncated. "
        "Remove rows with long prompts from the data set. `max_length` limits prompt and "
        "completion together.",
        "DPOTrainer.__init__() got an unexpected keyword argument 'max_prompt_length'",
    ),
    "ref_model of GRPO": Mistake(
        lambda b: b.grpo(ref_model=None),
        "`ref_model` is not an argument of `GRPOTrainer`. Leave it out. The reference is the model "
        "before training, and is used if `beta` is above 0.",
        "GRPOTrainer.__init__() got an unexpected keyword argument 'ref_model'",
    ),
    "reward_func": Mistake(
        lambda b: b.grpo(reward_func=reward),
        "`reward_func` is not an argument of `GRPOTrainer`. Use `reward_funcs`.",
        "GRPOTrainer.__init__() got an unexpected keyword argument 'reward_func'",
    ),
    "an unknown argument": Mistake(
        lambda b: b.grpo(zebra=1),
        "GRPOTrainer.__init__() got an unexpected keyword argument 'zebra'.",
        "GRPOTrainer.__init__() got an unexpected keyword argument 'zebra'",
    ),
    "a misspelt argument": Mistake(
        lambda b: b.dpo(train_datset=PAIRS),
        "DPOTrainer.__init__() got an unexpected keyword argument 'train_datset'. Did you mean `train_dataset`?",
        "DPOTrainer.__init__() got an unexpected keyword argument 'train_datset'",
    ),
    "no model": Mistake(
        lambda b: b.package.GRPOTrainer(reward_funcs=reward),
        "GRPOTrainer.__init__() missing a required argument: 'model'.",
        "GRPOTrainer.__init__() missing 1 required positional argument: 'model'",
    ),
    "callbacks that are a class": Mistake(
        lambda b: b.dpo(callbacks=OfUser),
        "`callbacks` must be a list, got the class `OfUser`. Write `callbacks=[...]`.",
        'can only concatenate list (not "type") to list',
    ),
    "callbacks that are one": Mistake(
        lambda b: b.grpo(callbacks=OfUser()),
        "`callbacks` must be a list, got a `OfUser`. Write `callbacks=[...]`.",
        'can only concatenate list (not "OfUser") to list',
    ),
    # Data
    "DPO, a prompt without messages": Mistake(
        lambda b: b.dpo(train_dataset=pairs(**messages([])), processing_class=chatting()),
        "`prompt` of `train_dataset` must be text or a list of messages, got [] in its first row. Give "
        "at least one message, or remove the row.",
        "Cannot apply chat template to an empty conversation. Provide at least one message. OR list index out of range",
    ),
    "GRPO, a prompt without messages": Mistake(
        lambda b: b.grpo(train_dataset=asked([]), processing_class=chatting()),
        "`prompt` of `train_dataset` must be text or a list of messages, got [] in its first row. Give "
        "at least one message, or remove the row.",
        "list index out of range",
    ),
    "DPO, a prompt that is a number": Mistake(
        lambda b: b.dpo(train_dataset=pairs(prompt=1)),
        "`prompt` of `train_dataset` must be text or a list of messages, got 1 in its first row. Give "
        "text, or messages such as [{'role': 'user', 'content': '...'}].",
        "text input must be of type `str` (single example), `list[str]` (batch or single pretokeniz",
    ),
    "GRPO, a prompt that is a number": Mistake(
        lambda b: b.grpo(train_dataset=asked(1)),
        "`prompt` of `train_dataset` must be text or a list of messages, got 1 in its first row. Give "
        "text, or messages such as [{'role': 'user', 'content': '...'}].",
        "text input must be of type `str` (single example), `list[str]` (batch or single pretokeniz",
    ),
    "a completion that is a number": Mistake(
        lambda b: b.dpo(train_dataset=pairs(chosen=1.5)),
        "`chosen` of `train_dataset` must be text or a list of messages, got 1.5 in its first row. Give "
        "text, or messages such as [{'role': 'user', 'content': '...'}].",
        "'float' object has no attribute 'endswith'",
    ),
    "DPO, ShareGPT messages": Mistake(
        lambda b: b.dpo(
            train_dataset=pairs(**messages([{"from": "human", "value": "w1"}], "from", "value")),
            processing_class=chatting(),
        ),
        "`prompt` of `train_dataset` must be text or a list of messages, got [{'from': 'human', "
        "'value': 'w1'}] in its first row. " + CONVERSION.replace("COLUMN", "prompt"),
        "'list' object has no attribute 'endswith'",
    ),
    "GRPO, ShareGPT messages": Mistake(
        lambda b: b.grpo(train_dataset=asked([{"from": "human", "value": "w1"}]), processing_class=chatting()),
        "`prompt` of `train_dataset` must be text or a list of messages, got [{'from': 'human', "
        "'value': 'w1'}] in its first row. " + CONVERSION.replace("COLUMN", "prompt"),
        "text input must be of type `str` (single example), `list[str]` (batch or single pretokeniz",
    ),
    "DPO, one message": Mistake(
        lambda b: b.dpo(
            train_dataset=pairs(**messages({"role": "user", "content": "w1"})), processing_class=chatting()
        ),
        "`prompt` of `train_dataset` must be text or a list of messages, got {'content': 'w1', 'role': "
        "'user'} in its first row. Put the message into a list.",
        "text input must be of type `str` (single example), `list[str]` (batch or single pretokeniz"
        " OR 'list' object has no attribute 'endswith'",
    ),
    "DPO, parts and a template of text": Mistake(
        lambda b: b.dpo(train_dataset=pairs(**messages(PARTS)), processing_class=chatting()),
        "`train_dataset` has messages whose `content` is a list of parts, but the chat template of "
        "`processing_class` renders only text. Give the text as `content`, or use a template that "
        "renders parts.",
        None,
    ),
    "GRPO, parts and a template of text": Mistake(
        lambda b: b.grpo(train_dataset=asked(PARTS), processing_class=chatting()),
        "`train_dataset` has messages whose `content` is a list of parts, but the chat template of "
        "`processing_class` renders only text. Give the text as `content`, or use a template that "
        "renders parts.",
        None,
    ),
    "a column that is a keyword": Mistake(
        lambda b: b.grpo(train_dataset=PROMPTS.add_column("completions", ["w1"] * len(PROMPTS))),
        "`train_dataset` has the column `completions`, but TRL passes its own `completions` to rewards. "
        'Rename it: `dataset.rename_column("completions", "...")`.',
        "short_training.reward() got multiple values for keyword argument 'completions'",
    ),
    # SFT
    "SFT, a column by another name": Mistake(
        lambda b: b.sft(train_dataset=TEXTS.rename_column("text", "content")),
        "`train_dataset` has the columns ['content'], but SFT reads `text` (or the column in "
        "`dataset_text_field`), or `messages`, or both `prompt` and `completion`. Set "
        "`dataset_text_field='content'`.",
        "KeyError: 'text'",
    ),
    "SFT, completions by another name": Mistake(
        lambda b: b.sft(train_dataset=Dataset.from_list([{"instruction": "w1", "output": " w2"}] * 4)),
        "`train_dataset` has the columns ['instruction', 'output'], but SFT reads `text` (or the column "
        "in `dataset_text_field`), or `messages`, or both `prompt` and `completion`. Rename what you "
        'have: `dataset.rename_columns({"instruction": "prompt", "output": "completion"})`.',
        "KeyError: 'text'",
    ),
    "SFT, pairs": Mistake(
        lambda b: b.sft(train_dataset=PAIRS),
        "`train_dataset` has the columns ['chosen', 'prompt', 'rejected'], but SFT reads `text` (or the "
        "column in `dataset_text_field`), or `messages`, or both `prompt` and `completion`. Rename what "
        'you have: `dataset.rename_columns({"chosen": "completion"})`.',
        "KeyError: 'completion'",
    ),
    "SFT, a prompt beside the text": Mistake(
        lambda b: b.sft(train_dataset=Dataset.from_list([{"prompt": "w1", "text": "w1 w2"}] * 4)),
        "`train_dataset` has the columns ['prompt', 'text'], but SFT reads `text` (or the column in "
        "`dataset_text_field`), or `messages`, or both `prompt` and `completion`. To train on `text`, "
        'remove the prompt: `dataset.remove_columns("prompt")`.',
        "KeyError: 'completion'",
    ),
    "SFT, other columns alone": Mistake(
        lambda b: b.sft(train_dataset=Dataset.from_list([{"title": "w1", "body": "w2"}] * 4)),
        "`train_dataset` has the columns ['body', 'title'], but SFT reads `text` (or the column in "
        "`dataset_text_field`), or `messages`, or both `prompt` and `completion`. Rename yours.",
        "KeyError: 'text'",
    ),
    "SFT, messages in a column of ShareGPT's name": Mistake(
        lambda b: b.sft(train_dataset=said(USER, "conversations"), processing_class=chatting()),
        "`train_dataset` has the columns ['conversations'], but SFT reads `text` (or the column in "
        "`dataset_text_field`), or `messages`, or both `prompt` and `completion`. Rename the column: "
        '`dataset.rename_column("conversations", "messages")`.',
        "KeyError: 'text'",
    ),
    "SFT, messages in the column of the text": Mistake(
        lambda b: b.sft(train_dataset=said(USER, "text"), processing_class=chatting()),
        "`train_dataset` has the columns ['text'], but SFT reads `text` (or the column in "
        "`dataset_text_field`), or `messages`, or both `prompt` and `completion`. Rename the column: "
        '`dataset.rename_column("text", "messages")`.',
        "'list' object has no attribute 'endswith'",
    ),
    "SFT, text in the column of messages": Mistake(
        lambda b: b.sft(train_dataset=TEXTS.rename_column("text", "messages"), processing_class=chatting()),
        "`messages` of `train_dataset` must be a list of messages, got 'w1 w2 w0' in its first row. "
        'Rename the column: `dataset.rename_column("messages", "text")`.',
        "No columns in the dataset match the model's forward method signature: (input_ids, labels,",
    ),
    "SFT, a text that is None": Mistake(
        lambda b: b.sft(train_dataset=Dataset.from_list([{"text": x} for x in ("w1 w2", None)])),
        "`text` is None in row 1 of `train_dataset`. Fill it in, or remove the row.",
        "'NoneType' object has no attribute 'endswith'",
    ),
    "SFT, a text that is a number": Mistake(
        lambda b: b.sft(train_dataset=texts(1)),
        "`text` of `train_dataset` must be text or a list of messages, got 1 in its first row. Give "
        "text, or messages such as [{'role': 'user', 'content': '...'}].",
        "'int' object has no attribute 'endswith'",
    ),
    "SFT, a text that is None in a stream": Mistake(
        lambda b: b.sft(train_dataset=texts(None).cast_column("text", Value("string")).to_iterable_dataset()),
        "`text` is None in row 0 of `train_dataset`. Fill it in, or remove the row.",
        "'NoneType' object has no attribute 'endswith'",
    ),
    "SFT, ShareGPT messages": Mistake(
        lambda b: b.sft(train_dataset=said({"from": "human", "value": "w1"}), processing_class=chatting()),
        "`messages` of `train_dataset` must be a list of messages, got [{'from': 'human', 'value': "
        "'w1'}] in its first row. " + CONVERSION.replace("COLUMN", "messages"),
        "No columns in the dataset match the model's forward method signature: (input_ids, labels,",
    ),
    "SFT, one message": Mistake(
        lambda b: b.sft(train_dataset=Dataset.from_list([{"messages": USER}] * 4), processing_class=chatting()),
        "`messages` of `train_dataset` must be a list of messages, got {'content': 'w1', 'role': 'user'} "
        "in its first row. Put the message into a list.",
        "No columns in the dataset match the model's forward method signature: (input_ids, labels,",
    ),
    "SFT, no message": Mistake(
        lambda b: b.sft(train_dataset=said([]), processing_class=chatting()),
        "`messages` of `train_dataset` must be a list of messages, got [] in its first row. Give at "
        "least one message, or remove the row.",
        "list index out of range",
    ),
    "SFT, parts and a template of text": Mistake(
        lambda b: b.sft(train_dataset=said(PARTS), processing_class=chatting()),
        "`train_dataset` has messages whose `content` is a list of parts, but the chat template of "
        "`processing_class` renders only text. Give the text as `content`, or use a template that "
        "renders parts.",
        None,
    ),
    "SFT, messages without a template": Mistake(
        lambda b: b.sft(train_dataset=said(USER)),
        "`train_dataset` holds messages, but `processing_class` has no chat template to render them. Use "
        "an instruct model's tokenizer, set `processing_class.chat_template`, or give the rows as text.",
        "Cannot use chat template functions because tokenizer.chat_template is not set and no",
    ),
    "SFT, text and messages": Mistake(
        lambda b: b.sft(
            train_dataset=Dataset.from_list([{"prompt": "w1", "completion": [USER]}] * 4), processing_class=chatting()
        ),
        "`train_dataset` mixes text and messages: `prompt` is text, `completion` is messages in its "
        "first row. Give all columns as text, or all as lists of messages, with the prompt in `prompt` alone.",
        "can only concatenate str (not \"list\") to str OR 'list' object has no attribute 'endswith'",
    ),
    "SFT, a formatting function that returns a list": Mistake(
        lambda b: b.sft(formatting_func=lambda row: [row["text"]]),
        "`formatting_func` must return text, got ['w1 w2 w0']. TRL calls it for each row: return one text.",
        "'list' object has no attribute 'endswith'",
    ),
    "SFT, a formatting function that returns nothing": Mistake(
        lambda b: b.sft(formatting_func=lambda row: None),
        "`formatting_func` must return text, got None. TRL calls it for each row: return one text.",
        "'NoneType' object has no attribute 'endswith'",
    ),
    "SFT, prompts longer than max_length": Mistake(
        lambda b: b.sft(train_dataset=LABELLED, max_length=2),
        "`max_length=2` leaves no row of `train_dataset`: every prompt alone reaches it. Raise it, "
        "shorten the prompts, or set `truncation_mode='keep_end'`.",
        "num_samples should be a positive integer value, but got num_samples=0",
    ),
    "SFT, packing without max_length": Mistake(
        lambda b: b.sft(packing=True, max_length=None),
        "`packing=True` needs `max_length`, the length of packed rows, got None. Set it, or `packing=False`.",
        "When packing is enabled, `max_length` can't be `None`.",
    ),
    "SFT, an empty evaluation set": Mistake(
        lambda b: b.sft(eval_dataset=TEXTS.select([])),
        "`eval_dataset` has no rows. Look at the filter or the split that made it.",
        "StopIteration",
    ),
    "SFT, a collator's name": Mistake(
        lambda b: b.sft(data_collator="completion"),
        "`data_collator` must be a function or an object of a collator's class, got 'completion'.",
        "'str' object is not callable",
    ),
    "SFT, max_seq_length": Mistake(
        lambda b: b.config("SFT", max_seq_length=64),
        "`max_seq_length` is not an argument of `SFTConfig`. Use `max_length`.",
        "SFTConfig.__init__() got an unexpected keyword argument 'max_seq_length'",
    ),
    "SFT, max_seq_length of the trainer": Mistake(
        lambda b: b.sft(max_seq_length=64),
        "`max_seq_length` is not an argument of `SFTTrainer`. Pass `args=SFTConfig(max_length=64, ...)`.",
        "SFTTrainer.__init__() got an unexpected keyword argument 'max_seq_length'",
    ),
    "SFT, a reference": Mistake(
        lambda b: b.sft(ref_model=None),
        "`ref_model` is not an argument of `SFTTrainer`. Leave it out. This method has no reference.",
        "SFTTrainer.__init__() got an unexpected keyword argument 'ref_model'",
    ),
    "SFT, another trainer's config": Mistake(
        lambda b: b.sft(args=b.config("DPO")),
        "`args` of `SFTTrainer` is a `DPOConfig`. Pass a `SFTConfig` with these values.",
        "SFTConfig.__init__() got an unexpected keyword argument 'disable_dropout'",
    ),
    # KTO
    "KTO, labels of -1": Mistake(
        lambda b: b.kto(train_dataset=labelled(1, -1)),
        "`label` of `train_dataset` must be True or False, got -1 in row 1. Convert it: "
        '`dataset.map(lambda row: {"label": row["label"] > 0})`.',
        None,
    ),
    "KTO, ratings": Mistake(
        lambda b: b.kto(train_dataset=labelled(1, 2, 5)),
        "`label` of `train_dataset` must be True or False, got 2 in row 1. Convert it: "
        '`dataset.map(lambda row: {"label": row["label"] > ...})`.',
        None,
    ),
    "KTO, scores": Mistake(
        lambda b: b.kto(train_dataset=labelled(0.2, 0.9)),
        "`label` of `train_dataset` must be True or False, got 0.2 in row 0. Convert it: "
        '`dataset.map(lambda row: {"label": row["label"] > ...})`.',
        None,
    ),
    "KTO, labels of text": Mistake(
        lambda b: b.kto(train_dataset=labelled("good", "bad")),
        "`label` of `train_dataset` must be True or False, got 'good' in row 0. Convert it: "
        '`dataset.map(lambda row: {"label": row["label"] == \'...\'})`.',
        "unsupported operand type(s) for +: 'int' and 'str'",
    ),
    "KTO, labels of text in a stream": Mistake(
        lambda b: b.kto(train_dataset=labelled("good", "bad").to_iterable_dataset()),
        "`label` of `train_dataset` must be True or False, got 'good' in row 0. Convert it: "
        '`dataset.map(lambda row: {"label": row["label"] == \'...\'})`.',
        "too many dimensions 'str'",
    ),
    "KTO, a label that is None": Mistake(
        lambda b: b.kto(train_dataset=labelled(True, None)),
        "`label` is None in row 1 of `train_dataset`. Fill it in, or remove the row.",
        "unsupported operand type(s) for +: 'int' and 'NoneType'",
    ),
    "KTO, labels in lists": Mistake(
        lambda b: b.kto(train_dataset=labelled([True], [False])),
        "`label` of `train_dataset` must be True or False, got [True] in row 0. Give one value for each row.",
        "unsupported operand type(s) for +: 'int' and 'list'",
    ),
    "KTO, no prompt": Mistake(
        lambda b: b.kto(train_dataset=LABELLED.remove_columns("prompt")),
        "`train_dataset` has the columns ['completion', 'label'], but KTO reads `prompt`, `completion` "
        "and `label`, or pairs with `prompt`, `chosen` and `rejected`. Rename what you have: "
        '`dataset.rename_columns({"old_prompt": "prompt"})`.',
        "KeyError: 'chosen'",
    ),
    "KTO, prompts and labels by other names": Mistake(
        lambda b: b.kto(train_dataset=LABELLED.rename_columns({"prompt": "question", "label": "score"})),
        "`train_dataset` has the columns ['completion', 'question', 'score'], but KTO reads `prompt`, "
        "`completion` and `label`, or pairs with `prompt`, `chosen` and `rejected`. Rename what you "
        'have: `dataset.rename_columns({"question": "prompt", "score": "label"})`.',
        "KeyError: 'chosen'",
    ),
    "KTO, evaluation data without labels": Mistake(
        lambda b: b.kto(eval_dataset=LABELLED.remove_columns("label"), eval_strategy="steps", eval_steps=1),
        "`eval_dataset` has the columns ['completion', 'prompt'], but KTO reads `prompt`, `completion` "
        "and `label`, or pairs with `prompt`, `chosen` and `rejected`. Rename what you have: "
        '`dataset.rename_columns({"old_label": "label"})`.',
        "KeyError: 'label'",
    ),
    "KTO, an empty evaluation set": Mistake(
        lambda b: b.kto(eval_dataset=LABELLED.select([])),
        "`eval_dataset` has no rows. Look at the filter or the split that made it.",
        "StopIteration",
    ),
    "KTO, a completion that is None": Mistake(
        lambda b: b.kto(train_dataset=labelled(True, False, completion=None)),
        "`completion` is None in row 0 of `train_dataset`. Fill it in, or remove the row.",
        "'NoneType' object has no attribute 'endswith'",
    ),
    "KTO, a completion that is a number": Mistake(
        lambda b: b.kto(train_dataset=labelled(True, False, completion=2)),
        "`completion` of `train_dataset` must be text or a list of messages, got 2 in its first row. "
        "Give text, or messages such as [{'role': 'user', 'content': '...'}].",
        "'int' object has no attribute 'endswith'",
    ),
    "KTO, ShareGPT messages": Mistake(
        lambda b: b.kto(
            train_dataset=labelled(True, False, prompt=[{"from": "human", "value": "w1"}]), processing_class=chatting()
        ),
        "`prompt` of `train_dataset` must be text or a list of messages, got [{'from': 'human', 'value': "
        "'w1'}] in its first row. " + CONVERSION.replace("COLUMN", "prompt"),
        'can only concatenate list (not "str") to list',
    ),
    "KTO, text and messages": Mistake(
        lambda b: b.kto(train_dataset=labelled(True, False, completion=[USER]), processing_class=chatting()),
        "`train_dataset` mixes text and messages: `prompt` is text, `completion` is messages in its "
        "first row. Give all columns as text, or all as lists of messages, with the prompt in `prompt` alone.",
        "can only concatenate str (not \"list\") to str OR 'list' object has no attribute 'endswith'",
    ),
    "KTO, parts and a template of text": Mistake(
        lambda b: b.kto(
            train_dataset=labelled(True, False, prompt=PARTS, completion=PARTS), processing_class=chatting()
        ),
        "`train_dataset` has messages whose `content` is a list of parts, but the chat template of "
        "`processing_class` renders only text. Give the text as `content`, or use a template that "
        "renders parts.",
        None,
    ),
    "KTO, messages without a template": Mistake(
        lambda b: b.kto(train_dataset=labelled(True, False, prompt=[USER], completion=[USER])),
        "`train_dataset` holds messages, but `processing_class` has no chat template to render them. Use "
        "an instruct model's tokenizer, set `processing_class.chat_template`, or give the rows as text.",
        "Cannot use chat template functions because tokenizer.chat_template is not set and no",
    ),
    "KTO, prompts longer than max_length": Mistake(
        lambda b: b.kto(max_length=2),
        "`max_length=2` leaves no row of `train_dataset`: every prompt alone reaches it. Raise it or "
        "shorten the prompts.",
        "no step",
    ),
    "KTO, both weights 0": Mistake(
        lambda b: b.kto(desirable_weight=0.0, undesirable_weight=0.0),
        "`desirable_weight=0` and `undesirable_weight=0` leave nothing to train. Set one above 0.",
        None,
    ),
    "KTO, one row per batch": Mistake(
        lambda b: b.kto(per_device_train_batch_size=1),
        "`per_device_train_batch_size` must be 2 or more, got 1: the KL term pairs each prompt with the "
        'completion of another row of the batch. Raise it, or use `loss_type="apo_zero_unpaired"`, which '
        "has no KL term.",
        "Actual (not effective) batch size must be > 1. KTO will not work properly because the KL",
    ),
    "KTO, a reference's name": Mistake(
        lambda b: b.kto(ref_model="tiny-reference"),
        "`ref_model='tiny-reference'` is a name, but must be a model. Load it with "
        "`AutoModelForCausalLM.from_pretrained(...)`, or leave it out to use the model before training.",
        "'str' object has no attribute 'modules'",
    ),
    "KTO, beta of 0": Mistake(
        lambda b: b.kto(beta=0.0),
        "`beta` must be above 0, got 0.0. At 0, the loss does not depend on the policy.",
        None,
    ),
    "KTO, truncation_mode": Mistake(
        lambda b: b.config("KTO", truncation_mode="keep_end"),
        "`truncation_mode` is not an argument of `KTOConfig`. Leave it out. `max_length` keeps the beginning of a row.",
        "KTOConfig.__init__() got an unexpected keyword argument 'truncation_mode'",
    ),
    "KTO, reference_free": Mistake(
        lambda b: b.config("KTO", reference_free=True),
        "`reference_free` is not an argument of `KTOConfig`. The loss needs a reference. For one "
        "without, see `trl.experimental.cpo`.",
        "KTOConfig.__init__() got an unexpected keyword argument 'reference_free'",
    ),
    "KTO, max_seq_length": Mistake(
        lambda b: b.config("KTO", max_seq_len=64),
        "`max_seq_len` is not an argument of `KTOConfig`. Use `max_length`.",
        "KTOConfig.__init__() got an unexpected keyword argument 'max_seq_len'",
    ),
    # RLOO
    "RLOO, prompts by another name": Mistake(
        lambda b: b.rloo(train_dataset=PROMPTS.rename_column("prompt", "question")),
        "`train_dataset` has the columns ['question'], but RLOO reads `prompt`. Rename the column of "
        'prompts: `dataset.rename_column("question", "prompt")`.',
        "KeyError: 'prompt'",
    ),
    "RLOO, a prompt that is a number": Mistake(
        lambda b: b.rloo(train_dataset=asked(1)),
        "`prompt` of `train_dataset` must be text or a list of messages, got 1 in its first row. Give "
        "text, or messages such as [{'role': 'user', 'content': '...'}].",
        "text input must be of type `str` (single example), `list[str]` (batch or single",
    ),
    "RLOO, a prompt without messages": Mistake(
        lambda b: b.rloo(train_dataset=asked([]), processing_class=chatting()),
        "`prompt` of `train_dataset` must be text or a list of messages, got [] in its first row. Give "
        "at least one message, or remove the row.",
        "list index out of range",
    ),
    "RLOO, parts and a template of text": Mistake(
        lambda b: b.rloo(train_dataset=asked(PARTS), processing_class=chatting()),
        "`train_dataset` has messages whose `content` is a list of parts, but the chat template of "
        "`processing_class` renders only text. Give the text as `content`, or use a template that "
        "renders parts.",
        None,
    ),
    "RLOO, no reward": Mistake(
        lambda b: b.rloo(reward_funcs=[]),
        "`reward_funcs` is empty. Pass a function, a model or the name of a model.",
        None,
    ),
    "RLOO, a number as reward": Mistake(
        lambda b: b.rloo(reward_funcs=[1.0]),
        "`reward_funcs` contains 1.0. Pass a function, a model or the name of a model.",
        "'float' object has no attribute '__call__'",
    ),
    "RLOO, a language model as reward": Mistake(
        lambda b: b.rloo(reward_funcs=b.workshop.model("tied")),
        "`reward_funcs` has a `Qwen3ForCausalLM` ('…/tied-0'), which has no trained reward head: its "
        "rewards would be random. Pass a sequence classifier, or a function.",
        None,
    ),
    "RLOO, a reversed range of rewards": Mistake(
        lambda b: b.rloo(reward_clip_range=(1.0, -1.0)),
        "`reward_clip_range` must be the lowest and the highest reward, such as (-1.0, 1.0), got (1.0, "
        "-1.0). Change it, or leave it out.",
        None,
    ),
    "RLOO, one bound of rewards": Mistake(
        lambda b: b.rloo(reward_clip_range=10.0),
        "`reward_clip_range` must be the lowest and the highest reward, such as (-1.0, 1.0), got 10.0. "
        "For the command line, write `reward_clip_range: [-1.0, 1.0]` in a YAML file.",
        "'float' object is not subscriptable",
    ),
    "RLOO, one bound of rewards in a tuple": Mistake(
        lambda b: b.rloo(reward_clip_range=(10.0,)),
        "`reward_clip_range` must be the lowest and the highest reward, such as (-1.0, 1.0), got "
        "(10.0,). For the command line, write `reward_clip_range: [-1.0, 1.0]` in a YAML file.",
        "tuple index out of range",
    ),
    "RLOO, bounds of rewards in quotes": Mistake(
        lambda b: b.rloo(reward_clip_range=("-1.0", "1.0")),
        "`reward_clip_range` must be the lowest and the highest reward, such as (-1.0, 1.0), got "
        "('-1.0', '1.0'). For the command line, write `reward_clip_range: [-1.0, 1.0]` in a YAML file.",
        "clamp() received an invalid combination of arguments - got (max=str, min=str, ), but",
    ),
    "RLOO, beta below 0": Mistake(
        lambda b: b.rloo(beta=-0.1),
        "`beta` must be 0 or more, got -0.1. A negative one would drive the policy away from its reference.",
        None,
    ),
    "RLOO, a temperature of 0": Mistake(
        lambda b: b.rloo(temperature=0.0),
        "`temperature` must be above 0, got 0.0. For less random samples, use a small one.",
        "`temperature` (=0.0) has to be a strictly positive float, otherwise your next token",
    ),
    "RLOO, rloo_k": Mistake(
        lambda b: b.config("RLOO", rloo_k=4),
        "`rloo_k` is not an argument of `RLOOConfig`. Use `num_generations`.",
        "RLOOConfig.__init__() got an unexpected keyword argument 'rloo_k'",
    ),
    "RLOO, response_length": Mistake(
        lambda b: b.config("RLOO", response_length=4),
        "`response_length` is not an argument of `RLOOConfig`. Use `max_completion_length`.",
        "RLOOConfig.__init__() got an unexpected keyword argument 'response_length'",
    ),
    "RLOO, kl_coef": Mistake(
        lambda b: b.config("RLOO", kl_coef=4),
        "`kl_coef` is not an argument of `RLOOConfig`. Use `beta`.",
        "RLOOConfig.__init__() got an unexpected keyword argument 'kl_coef'",
    ),
    "RLOO, cliprange": Mistake(
        lambda b: b.config("RLOO", cliprange=4),
        "`cliprange` is not an argument of `RLOOConfig`. Use `epsilon`.",
        "RLOOConfig.__init__() got an unexpected keyword argument 'cliprange'",
    ),
    "RLOO, num_ppo_epochs": Mistake(
        lambda b: b.config("RLOO", num_ppo_epochs=4),
        "`num_ppo_epochs` is not an argument of `RLOOConfig`. Use `num_iterations`.",
        "RLOOConfig.__init__() got an unexpected keyword argument 'num_ppo_epochs'",
    ),
    "RLOO, normalize_reward": Mistake(
        lambda b: b.config("RLOO", normalize_reward=4),
        "`normalize_reward` is not an argument of `RLOOConfig`. Use `normalize_advantages`.",
        "RLOOConfig.__init__() got an unexpected keyword argument 'normalize_reward'",
    ),
    "RLOO, rloo_k of the trainer": Mistake(
        lambda b: b.rloo(rloo_k=4),
        "`rloo_k` is not an argument of `RLOOTrainer`. Pass `args=RLOOConfig(num_generations=4, ...)`.",
        "RLOOTrainer.__init__() got an unexpected keyword argument 'rloo_k'",
    ),
    "RLOO, policy": Mistake(
        lambda b: b.package.RLOOTrainer(policy=b.loaded(), reward_funcs=reward),
        "`policy` is not an argument of `RLOOTrainer`. Use `model`.",
        "RLOOTrainer.__init__() got an unexpected keyword argument 'policy'",
    ),
    "RLOO, ref_policy": Mistake(
        lambda b: b.rloo(ref_policy=None),
        "`ref_policy` is not an argument of `RLOOTrainer`. Leave it out. The reference is the model "
        "before training, and is used if `beta` is above 0.",
        "RLOOTrainer.__init__() got an unexpected keyword argument 'ref_policy'",
    ),
    "RLOO, reward_model": Mistake(
        lambda b: b.rloo(reward_model=None),
        "`reward_model` is not an argument of `RLOOTrainer`. Use `reward_funcs`.",
        "RLOOTrainer.__init__() got an unexpected keyword argument 'reward_model'",
    ),
    "RLOO, max_prompt_length": Mistake(
        lambda b: b.config("RLOO", max_prompt_length=512),
        "`max_prompt_length` is not an argument of `RLOOConfig`. Prompts are no longer truncated. Remove "
        "rows with long prompts from the data set.",
        "RLOOConfig.__init__() got an unexpected keyword argument 'max_prompt_length'",
    ),
    # Models
    "a classifier": Mistake(
        lambda b: b.dpo(model=AutoModelForSequenceClassification.from_pretrained(classifier(b))),
        "`model` is a `Qwen3ForSequenceClassification`, which does not generate text. Pass a causal "
        "language model, such as `AutoModelForCausalLM.from_pretrained(...)`.",
        "'Qwen3ForSequenceClassification' object has no attribute 'generation_config'",
    ),
    "DPO, a classifier's folder": Mistake(
        lambda b: b.dpo(model=classifier(b)),
        "`model` is a `Qwen3ForSequenceClassification`, which does not generate text. Pass a causal "
        "language model, such as `AutoModelForCausalLM.from_pretrained(...)`.",
        "'Qwen3ForSequenceClassification' object has no attribute 'generation_config'",
    ),
    "GRPO, a classifier's folder": Mistake(
        lambda b: b.grpo(model=classifier(b)),
        "`model` is a `Qwen3ForSequenceClassification`, which does not generate text. Pass a causal "
        "language model, such as `AutoModelForCausalLM.from_pretrained(...)`.",
        "'Qwen3ForSequenceClassification' object has no attribute 'generation_config'",
    ),
    "a model's folder that there is not": Mistake(
        lambda b: b.dpo(model="./tiny-modle"),
        "`model='./tiny-modle'` is neither a local folder nor a name on the Hub. Correct the path.",
        "Repo id must use alphanumeric chars, '-', '_' or '.'. The name cannot start or end with '-",
    ),
    "a model's name that there is not": Mistake(
        lambda b: b.dpo(model="tiny-modle"),
        "`model='tiny-modle'` is not a local folder, and the Hub is offline (`HF_HUB_OFFLINE`). Correct "
        "the path, or download it.",
        "We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them ",
    ),
    "an adapter of another task": Mistake(
        lambda b: b.dpo(peft_config=lora_config(task_type="SEQ_CLS")),
        "`peft_config` has `task_type='SEQ_CLS'`, but `model` is a causal language model. Set `task_type='CAUSAL_LM'`.",
        None,
    ),
    "a reference of another vocabulary": Mistake(
        lambda b: b.dpo(ref_model=of_18_tokens()),
        "`processing_class` has 97 tokens, but `ref_model` has only 18, and the data contain the token id 94. Pass a "
        "reference with the policy's vocabulary, or leave `ref_model` out.",
        "index out of range in self",
    ),
    "a reward model's name that there is not": Mistake(
        lambda b: b.grpo(reward_funcs="tiny-rmm"),
        "`reward_funcs='tiny-rmm'` is not a local folder, and the Hub is offline (`HF_HUB_OFFLINE`). "
        "Correct the path, or download it.",
        "We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them ",
    ),
    "a reward model's folder that there is not": Mistake(
        lambda b: b.grpo(reward_funcs=[reward, "./tiny-rmm"]),
        "`reward_funcs='./tiny-rmm'` is neither a local folder nor a name on the Hub. Correct the path.",
        "Repo id must use alphanumeric chars, '-', '_' or '.'. The name cannot start or end with '-",
    ),
    "a language model's folder as reward": Mistake(
        lambda b: b.grpo(reward_funcs=b.workshop.model("tied")),
        "`reward_funcs` has a `Qwen3ForCausalLM` ('…/tied-0'), which has no trained reward head: its "
        "rewards would be random. Pass a sequence classifier, or a function.",
        None,
    ),
    "a language model as reward": Mistake(
        lambda b: b.grpo(reward_funcs=b.loaded()),
        "`reward_funcs` has a `Qwen3ForCausalLM`, which has no trained reward head: its rewards would "
        "be random. Pass a sequence classifier, or a function.",
        "expand(torch.FloatTensor{[4, 97]}, size=[4]): the number of sizes provided (1) must be gre",
    ),
    # Checkpoints
    "an adapter's checkpoint, a whole model": Mistake(
        lambda b: resumed(b, lambda: b.dpo(peft_config=lora_config(), **SAVES), lambda x: b.dpo(resume=x, max_steps=2)),
        "`resume_from_checkpoint`: …/checkpoint-1 holds an adapter, but this run trains the whole "
        "model. Pass the `peft_config` of the run that wrote it.",
        "Can't find a checkpoint index (pytorch_model.bin.index.json or model.safetensors.index.jso",
    ),
    "a whole model's checkpoint, an adapter": Mistake(
        lambda b: resumed(b, lambda: b.dpo(**SAVES), lambda x: b.dpo(resume=x, peft_config=lora_config(), max_steps=2)),
        "`resume_from_checkpoint`: …/checkpoint-1 holds a whole model, but this run trains an adapter. "
        "Leave `peft_config` out, or pass the checkpoint as `model`.",
        "loaded state dict contains a parameter group that doesn't match the size of optimizer's gr",
    ),
    "a checkpoint of GRPO in DPO": Mistake(
        lambda b: resumed(b, lambda: b.grpo(**SAVES), lambda x: b.dpo(resume=x, max_steps=2)),
        "`resume_from_checkpoint`: …/checkpoint-1 is a checkpoint of another trainer (`GRPOConfig`). "
        "Pass it as `model` to start from its weights.",
        None,
    ),
    "a checkpoint of DPO in GRPO": Mistake(
        lambda b: resumed(b, lambda: b.dpo(**SAVES), lambda x: b.grpo(resume=x, max_steps=2)),
        "`resume_from_checkpoint`: …/checkpoint-1 is a checkpoint of another trainer (`DPOConfig`). "
        "Pass it as `model` to start from its weights.",
        None,
    ),
}
