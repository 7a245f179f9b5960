"""Mistakes in Python code, each with the message of our trainers and what stock TRL does."""

from collections.abc import Callable
from typing import Any, NamedTuple

import trl
from datasets import Dataset
from transformers import AutoModelForSequenceClassification, Qwen3Config, Qwen3ForCausalLM, TrainerCallback

from short_training import PAIR, PAIRS, PROMPTS, Bench, reward, tokenizer
from tiny import lora_config

CHAT = "{% for m in messages %}{{ m.content }} {% endfor %}"  # a template that renders text alone
PARTS = [{"role": "user", "content": [{"type": "text", "text": "w1"}]}]


class Mistake(NamedTuple):
    """`ours` is our whole message, `stock` a part of TRL's, or None if TRL trains. `…` is a temporary folder.

    "A OR B" in `stock`: TRL takes a column from a set, in any order, so it gives one of two messages.
    """

    make: Callable[[Bench], None]
    ours: str
    stock: str | None


def pairs(**changes: Any) -> Dataset:
    return Dataset.from_list([{**PAIR, **changes}] * 4)


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
        "rows with long prompts from the data set. In DPO, `max_length` limits prompt and completion "
        "together.",
        "DPOConfig.__init__() got an unexpected keyword argument 'max_prompt_length'",
    ),
    "max_prompt_length of GRPO": Mistake(
        lambda b: b.config("GRPO", max_prompt_length=512),
        "`max_prompt_length` is not an argument of `GRPOConfig`. Prompts are no longer truncated. "
        "Remove rows with long prompts from the data set. In DPO, `max_length` limits prompt and "
        "completion together.",
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
    "a name for two fields": Mistake(
        lambda b: b.config("GRPO", per_device_batch_size=8),
        "GRPOConfig.__init__() got an unexpected keyword argument 'per_device_batch_size'.",
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
        "Remove rows with long prompts from the data set. In DPO, `max_length` limits prompt and "
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
        "'value': 'w1'}] in its first row. Convert messages with `from` and `value`: "
        "`train_dataset.map(trl.maybe_convert_to_chatml)`.",
        "'list' object has no attribute 'endswith'",
    ),
    "GRPO, ShareGPT messages": Mistake(
        lambda b: b.grpo(train_dataset=asked([{"from": "human", "value": "w1"}]), processing_class=chatting()),
        "`prompt` of `train_dataset` must be text or a list of messages, got [{'from': 'human', "
        "'value': 'w1'}] in its first row. Convert messages with `from` and `value`: "
        "`train_dataset.map(trl.maybe_convert_to_chatml)`.",
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
