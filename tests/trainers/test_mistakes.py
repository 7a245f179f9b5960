"""Mistakes that users make: each stops before the first step, in one line with what was given and what to do."""

import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trl
from datasets import Dataset, DatasetDict
from peft import LoraConfig, PeftModel
from transformers import TrainingArguments
from trl.rewards import accuracy_reward, think_format_reward

import trl_ext
from short_training import PAIR, PAIRS, PROMPTS, Bench, of_answers, of_completions, tokenizer, with_more_tokens
from tiny import Workshop, lora_config, preferences, prompts
from trl_ext.compat.arguments import check_numbers
from trl_ext.compat.choices import (
    ADVANTAGE_CHOICES,
    DPO_CHOICES,
    GRPO_CHOICES,
    TRUNCATION_MODES,
    compared_values,
)
from trl_ext.trainers.checked_arguments import (
    check_dpo_arguments,
    check_grpo_arguments,
    check_kto_arguments,
    check_rloo_arguments,
    check_sft_arguments,
)
from trl_ext.trainers.checked_data import check_rewards

MESSAGES = Dataset.from_list([{"prompt": [{"role": "user", "content": "w1"}], "solution": "w2"}] * 4)


USER = {"role": "user", "content": "w1"}


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


# What is done; then what the one line holds: the argument, what was given, what to do
MISTAKES: dict[str, tuple[Callable[[Bench], None], tuple[str, str, str]]] = {
    # Data
    "a column by another name": (
        lambda b: b.dpo(train_dataset=PAIRS.rename_column("chosen", "accepted")),
        ("`train_dataset`", "'accepted'", 'rename_columns({"old_chosen": "chosen"})'),
    ),
    "prompts by another name, DPO": (
        lambda b: b.dpo(train_dataset=Dataset.from_list([{"question": "w1", "chosen": "w2 w3", "rejected": "w4"}] * 4)),
        ("`train_dataset`", "'question'", 'rename_column("question", "prompt")'),
    ),
    "a stream's column by another name": (
        lambda b: b.dpo(train_dataset=PAIRS.rename_column("chosen", "accepted").to_iterable_dataset()),
        ("`train_dataset`", "'accepted'", 'rename_columns({"old_chosen": "chosen"})'),
    ),
    "prompts by another name, GRPO": (
        lambda b: b.grpo(train_dataset=PROMPTS.rename_column("prompt", "question")),
        ("`train_dataset`", "'question'", 'rename_column("question", "prompt")'),
    ),
    "evaluation data by another name": (
        lambda b: b.dpo(eval_dataset=PAIRS.rename_column("rejected", "worse")),
        ("`eval_dataset`", "'worse'", 'rename_columns({"old_rejected": "rejected"})'),
    ),
    "one of several evaluation sets by another name": (
        lambda b: b.dpo(eval_dataset={"first": PAIRS, "second": PAIRS.rename_column("rejected", "worse")}),
        ("`eval_dataset['second']`", "'worse'", 'rename_columns({"old_rejected": "rejected"})'),
    ),
    "data with labels": (
        lambda b: b.dpo(train_dataset=Dataset.from_list([{"prompt": "w1", "completion": "w2", "label": True}] * 4)),
        ("`train_dataset`", "'label'", "These are columns for KTO (`KTOTrainer`, `trl-ext kto`). Train with it"),
    ),
    "prompts with answers": (
        lambda b: b.kto(train_dataset=Dataset.from_list([{"prompt": "w1", "answer": "w2"}] * 4)),
        ("`train_dataset`", "'answer'", "These are columns for GRPO (`GRPOTrainer`, `trl-ext grpo`) or RLOO."),
    ),
    "an empty data set, DPO": (
        lambda b: b.dpo(train_dataset=PAIRS.select([])),
        ("`train_dataset`", "no rows", "Look at the filter"),
    ),
    "an empty data set, GRPO": (
        lambda b: b.grpo(train_dataset=PROMPTS.select([])),
        ("`train_dataset`", "no rows", "Look at the filter"),
    ),
    "all splits": (
        lambda b: b.dpo(train_dataset=DatasetDict({"train": PAIRS})),
        ("`train_dataset`", "`DatasetDict`", "`dataset['train']`"),
    ),
    "a list": (
        lambda b: b.grpo(train_dataset=PROMPTS.to_list()),
        ("`train_dataset`", "`list`", "`datasets.Dataset.from_list(rows)`"),
    ),
    "a completion that is None": (
        lambda b: b.dpo(train_dataset=Dataset.from_list([PAIR, PAIR, {**PAIR, "rejected": None}])),
        ("`rejected`", "None in row 2 of `train_dataset`", "Fill it in"),
    ),
    "a prompt that is None": (
        lambda b: b.grpo(train_dataset=Dataset.from_list([{"prompt": x} for x in ("w1", None, "w2", None)])),
        ("`prompt`", "None in row 1 of `train_dataset`", "Fill it in"),
    ),
    "messages and text": (
        lambda b: b.dpo(
            train_dataset=Dataset.from_list([{**PAIR, "prompt": [{"role": "user", "content": "w1"}]}] * 4),
        ),
        ("`train_dataset`", "`prompt` is messages, `chosen` is text", "Give all columns as text"),
    ),
    "fewer prompts than a generation batch": (
        lambda b: b.grpo(train_dataset=PROMPTS.select([0]), per_device_train_batch_size=8),
        ("`train_dataset`", "1 prompts", "lower `per_device_train_batch_size`"),
    ),
    "RPO without rewards": (
        lambda b: b.dpo(loss_type="rpo_squared"),
        ("`chosen_reward`", "the train data set", "Add a number for each row"),
    ),
    "half of the reference's columns": (
        lambda b: b.dpo(train_dataset=PAIRS.add_column("ref_chosen_logps", [0.0] * 6)),
        ("`train_dataset`", "`ref_chosen_logps`", "Add the missing column"),
    ),
    # Tokenizers
    "no pad token": (
        lambda b: b.dpo(processing_class=tokenizer(pad_token=None, eos_token=None)),
        ("`processing_class`", "neither", "Set one"),
    ),
    "no end of a completion": (
        lambda b: b.dpo(processing_class=tokenizer(eos_token=None)),
        ("`processing_class`", "no `eos_token`", "Set it"),
    ),
    "no chat template, DPO": (
        lambda b: b.dpo(train_dataset=preferences(6, seed=1, conversational=True)),
        ("`processing_class`", "`train_dataset` holds messages", "set `processing_class.chat_template`"),
    ),
    "no chat template, GRPO": (
        lambda b: b.grpo(train_dataset=prompts(6, seed=1, conversational=True)),
        ("`processing_class`", "`train_dataset` holds messages", "set `processing_class.chat_template`"),
    ),
    "a vocabulary that is not the model's, DPO": (
        lambda b: b.dpo(
            processing_class=with_more_tokens(), train_dataset=Dataset.from_list([PAIR, PAIR, {**PAIR, "chosen": "x2"}])
        ),
        ("`processing_class`", "the token id 98", "`model.resize_token_embeddings(len(tokenizer))`"),
    ),
    "a vocabulary that is not the model's, GRPO": (
        lambda b: b.grpo(
            processing_class=with_more_tokens(), train_dataset=Dataset.from_list([{"prompt": "w1 x2"}] * 4)
        ),
        ("`processing_class`", "the token id 98", "`model.resize_token_embeddings(len(tokenizer))`"),
    ),
    # Models and adapters
    "no model": (lambda b: b.dpo(model=None), ("`model`", "None", "Pass a model")),
    "a folder that there is not": (
        lambda b: b.dpo(model="examples/demo/modell"),
        ("`model='examples/demo/modell'`", "neither a local folder nor", "Correct the path"),
    ),
    "a tokenizer by its old name": (
        lambda b: b.dpo(tokenizer=None),
        ("`tokenizer`", "`DPOTrainer`", "`processing_class`"),
    ),
    "a reference that is the model": (same_as_reference, ("`ref_model`", "the same object", "omit `ref_model`")),
    "a reference by its name": (
        lambda b: b.dpo(ref_model=b.workshop.model("tied")),
        ("`ref_model='/", "is a name", "`AutoModelForCausalLM.from_pretrained(...)`"),
    ),
    "an adapter's name": (
        lambda b: b.dpo(model=b.adapted(), policy_adapter_name="polcy"),
        ("Unknown `policy_adapter_name` 'polcy'", "['default']", "Choose from"),
    ),
    "an adapter of no PeftModel": (
        lambda b: b.dpo(ref_adapter_name="first"),
        ("`ref_adapter_name='first'`", "`str`", "leave `ref_adapter_name` unset"),
    ),
    "a second wrap with PEFT, DPO": (
        lambda b: b.dpo(model=b.adapted(), peft_config=lora_config()),
        ("`peft_config`", "a `PeftModel` instance", "merge and unload"),
    ),
    "a second wrap with PEFT, GRPO": (
        lambda b: b.grpo(model=b.adapted(), peft_config=lora_config()),
        ("`peft_config`", "a `PeftModel` instance", "merge and unload"),
    ),
    "an adapter loaded for inference": (loaded_for_inference, ("requires_grad", '"default"', "`is_trainable=True`")),
    "layers that there are not": (
        lambda b: b.dpo(peft_config=lora_config(target_modules=["qkv"])),
        ("Unknown `target_modules` 'qkv'", "'q_proj'", "Choose from"),
    ),
    # Rewards
    "no reward": (lambda b: b.grpo(reward_funcs=None), ("`reward_funcs`", "No reward source", "Pass")),
    "a reward that is none": (lambda b: b.grpo(reward_funcs=3), ("`reward_funcs`", "3", "Pass a function")),
    "a reward that is infinite": (
        lambda b: b.grpo(reward_funcs=infinite),
        ("`reward_funcs`", "[inf] from ['infinite']", "Return a finite number"),
    ),
    "a reward that is text": (
        lambda b: b.grpo(reward_funcs=as_text),
        ("`reward_funcs`", "`as_text` returned ['1',", "Return a list with a number"),
    ),
    "one reward for all": (
        lambda b: b.grpo(reward_funcs=one_for_all),
        ("`reward_funcs`", "`one_for_all` returned 1.0 for", "Return a list with a number"),
    ),
    "a reward too few": (
        lambda b: b.grpo(reward_funcs=one_too_few),
        ("`reward_funcs`", "`one_too_few` returned [", "Return a list with a number"),
    ),
    "a reward of a column that there is not": (
        lambda b: b.grpo(reward_funcs=of_answers),
        ("`reward_funcs`", "`of_answers` requires `answer`", "Add or rename the column"),
    ),
    "a reward without keywords": (
        lambda b: b.grpo(reward_funcs=of_completions),
        ("`reward_funcs`", "`of_completions` does not take `prompts`", "Add `**kwargs`"),
    ),
    # Values
    "beta below 0, DPO": (lambda b: b.dpo(beta=-0.1), ("`beta`", "-0.1", "must be 0 or more")),
    "beta below 0, GRPO": (lambda b: b.grpo(beta=-0.1), ("`beta`", "-0.1", "must be 0 or more")),
    "beta of 0, DPO": (lambda b: b.dpo(beta=0.0), ("`beta=0`", "['sigmoid']", "Set it above 0")),
    "beta that is NaN": (lambda b: b.dpo(beta=math.nan), ("`beta`", "nan", "must be a finite number")),
    "a loss type, DPO": (lambda b: b.dpo(loss_type="sigmiod"), ("`loss_type`", "'sigmiod'", "'sigmoid'")),
    "a loss type of ours": (lambda b: b.dpo(loss_type=["sft", "ipo-sum"]), ("`loss_type`", "'ipo-sum'", "'ipo_sum'")),
    "a loss type, GRPO": (lambda b: b.grpo(loss_type="drgrpo"), ("`loss_type`", "'drgrpo'", "'dr_grpo'")),
    "a loss type, KTO": (lambda b: b.kto(loss_type="bco"), ("`loss_type`", "'bco'", "'apo_zero_unpaired'")),
    "a way to pack, SFT": (
        lambda b: b.sft(packing=True, packing_strategy="ffd"),
        ("`packing_strategy`", "'ffd'", "'bfd_split'"),
    ),
    "a divergence": (lambda b: b.dpo(f_divergence_type="kl"), ("`f_divergence_type`", "'kl'", "'reverse_kl'")),
    "where to cut": (lambda b: b.dpo(truncation_mode="end"), ("`truncation_mode`", "'end'", "'keep_end'")),
    "a level of the ratio": (
        lambda b: b.grpo(importance_sampling_level="row"),
        ("`importance_sampling_level`", "'row'", "'sequence'"),
    ),
    "weights of fewer losses": (
        lambda b: b.dpo(loss_type=["sigmoid", "sft"], loss_weights=[1.0]),
        ("`loss_weights`", "1 weights for 2 loss types", "must have the same length"),
    ),
    "prompts longer than max_length": (
        lambda b: b.dpo(max_length=2, train_dataset=Dataset.from_list([PAIR] * 4)),
        ("`max_length=2`", "no row of `train_dataset`", "Raise it"),
    ),
    "completions longer than the model's table of positions": (
        lambda b: b.grpo(model=b.with_position_table(), processing_class=tokenizer(), max_completion_length=64),
        ("`max_completion_length=64`", "positions for 64 tokens", "Lower it"),
    ),
    "arguments of vLLM without it": (
        lambda b: b.grpo(vllm_engine_args={"dtype": "float32"}),
        ("`vllm_engine_args={'dtype': 'float32'}`", "is for vLLM in this process", "Set `use_vllm=True`"),
    ),
    "arguments of vLLM that are no dictionary": (
        lambda b: b.grpo(use_vllm=True, vllm_engine_args="dtype=float32"),
        ("`vllm_engine_args`", "'dtype=float32'", "must be a dictionary", "give JSON"),
    ),
    "an action of the sampler's check": (
        lambda b: b.grpo(sampler_check="error"),
        ("`sampler_check`", "'error'", "one of ['warn', 'stop', 'off']"),
    ),
    "a temperature of 0": (lambda b: b.grpo(temperature=0.0), ("`temperature`", "0.0", "must be above 0")),
    "no number, in place of one": (
        lambda b: b.sft(max_grad_norm=math.nan),
        ("`max_grad_norm`", "got nan", "must be a finite number"),
    ),
    "an infinite beta": (lambda b: b.dpo(beta=math.inf), ("`beta`", "got inf", "must be a finite number")),
    "a negative learning rate": (
        lambda b: b.kto(learning_rate=-1e-5),
        ("`learning_rate`", "got -1e-05", "must be 0 or more"),
    ),
    "a decay of more than 1": (lambda b: b.dpo(adam_beta2=2.0), ("`adam_beta2`", "got 2.0", "must be below 1")),
    "negative epochs": (
        lambda b: b.dpo(num_train_epochs=-1, max_steps=-1),
        ("`num_train_epochs`", "got -1", "must be 0 or more"),
    ),
    "a weight that is no number": (
        lambda b: b.dpo(loss_type=["sigmoid", "sft"], loss_weights=[1.0, math.nan]),
        ("`loss_weights`", "nan", "finite numbers"),
    ),
    "a seed below 0": (lambda b: b.dpo(seed=-1), ("`seed`", "got -1", "must be 0 or more")),
    "a label smoothing by which the loss divides": (
        lambda b: b.dpo(loss_type="robust", label_smoothing=0.5),
        ("`label_smoothing`", "got 0.5", "must be below 0.5"),
    ),
    "more than all labels": (lambda b: b.dpo(label_smoothing=2.0), ("`label_smoothing`", "got 2.0", "in [0, 1]")),
    "a top_p above 1": (lambda b: b.grpo(top_p=2.0), ("`top_p`", "got 2.0", "in [0, 1]")),
    "a negative top_k": (lambda b: b.rloo(top_k=-5), ("`top_k`", "got -5", "must be 0 or more")),
    "no penalty as 0": (
        lambda b: b.grpo(repetition_penalty=0.0),
        ("`repetition_penalty`", "got 0.0", "must be above 0"),
    ),
    "JSON with an error": (
        lambda b: b.dpo(model_init_kwargs="{dtype: float32"),
        ("`model_init_kwargs`", "'{dtype: float32'", "must be a dictionary", "give JSON"),
    ),
    "a list in place of a dictionary": (
        lambda b: b.grpo(chat_template_kwargs=[1]),
        ("`chat_template_kwargs`", "got [1]", "must be a dictionary"),
    ),
    "a file of DeepSpeed that is not there": (
        lambda b: b.dpo(deepspeed="nope.json"),
        ("`deepspeed`", "'nope.json'", "no such file"),
    ),
    "a store that is a file": (
        lambda b: b.dpo(reference_store_dir=__file__),
        ("`reference_store_dir=", "is a file", "Pass a folder"),
    ),
    "a reward that reads messages, for text": (
        lambda b: b.grpo(reward_funcs=think_format_reward),
        ("`reward_funcs`: `think_format_reward`", "`prompt` of `train_dataset` is text", "list of messages"),
    ),
    "a reward that reads messages, for text to evaluate": (
        lambda b: b.rloo(reward_funcs=[accuracy_reward], eval_dataset={"one": PROMPTS}, train_dataset=MESSAGES),
        ("`reward_funcs`: `accuracy_reward`", "`prompt` of `eval_dataset['one']` is text", "list of messages"),
    ),
    "weights of fewer rewards": (
        lambda b: b.grpo(reward_weights=[1.0, 2.0]),
        ("`reward_weights`", "got [1.0, 2.0]", "for each of the 1 `reward_funcs`"),
    ),
    "a slip in a layer's name": (
        lambda b: b.dpo(peft_config=LoraConfig(target_modules=["q_prjo"], task_type="CAUSAL_LM")),
        ("Unknown `target_modules` 'q_prjo'", "'q_proj'", "Choose from"),
    ),
    "no iteration": (lambda b: b.grpo(num_iterations=0), ("`num_iterations`", "got 0", "must be 1 or more")),
    "a reference that moves every 0 steps": (
        lambda b: b.dpo(sync_ref_model=True, ref_model_sync_steps=0),
        ("`ref_model_sync_steps`", "got 0", "must be 1 or more"),
    ),
    "an adapter, and a whole model to move": (
        lambda b: b.dpo(model=b.adapted(), ref_model=b.loaded(), sync_ref_model=True),
        ("`sync_ref_model=True`", "cannot be used with `ref_model`", "Remove `ref_model`"),
    ),
    "a reference that moves too far": (
        lambda b: b.grpo(beta=0.1, sync_ref_model=True, ref_model_mixup_alpha=2.0),
        ("`ref_model_mixup_alpha`", "2.0", "in [0, 1]"),
    ),
    "yes for True": (lambda b: b.dpo(padding_free="yes"), ("`padding_free`", "'yes'", "None, True or False")),
    "yes for True, of prompts": (
        lambda b: b.grpo(share_prompts="yes"),
        ("`share_prompts`", "'yes'", "None, True or False"),
    ),
    "another trainer's config": (
        lambda b: b.dpo(args=trl.GRPOConfig(str(b.folder), use_cpu=True, bf16=False)),
        ("`args`", "`GRPOConfig`", "Pass a `DPOConfig`"),
    ),
    "transformers' config": (
        lambda b: b.grpo(args=TrainingArguments(str(b.folder), use_cpu=True)),
        ("`args`", "`TrainingArguments`", "Pass a `GRPOConfig`"),
    ),
    # Devices and folders
    "an accelerator's option on the CPU, DPO": (
        lambda b: b.dpo(activation_offloading=True),
        ("`activation_offloading=True`", "without an accelerator", "Leave it off"),
    ),
    "an accelerator's option on the CPU, GRPO": (
        lambda b: b.grpo(activation_offloading=True),
        ("`activation_offloading=True`", "without an accelerator", "Leave it off"),
    ),
    "no checkpoint to resume from": (
        lambda b: b.dpo(resume="true"),
        ("`resume_from_checkpoint=True`", "no complete checkpoint", "Leave it off"),
    ),
    "no evaluation data": (
        lambda b: b.dpo(eval_strategy="steps", eval_steps=1),
        ("`eval_dataset`", "STEPS", "or pass an `eval_dataset`"),
    ),
}


# A representative of their kind is among the others
SLOW = {
    *("no checkpoint to resume from", "an adapter loaded for inference", "half of the reference's columns"),
    *("a vocabulary that is not the model's, GRPO", "a reward that is infinite", "no evaluation data"),
    *("one of several evaluation sets by another name", "a second wrap with PEFT, GRPO"),
}


@pytest.mark.parametrize("mistake", [pytest.param(x, marks=[pytest.mark.slow] * (x in SLOW)) for x in MISTAKES])
def test_a_mistake_is_one_line_that_says_what_to_do(mistake: str, workshop: Workshop, tmp_path: Path) -> None:
    make, words = MISTAKES[mistake]
    bench = Bench(workshop, tmp_path)
    with pytest.raises((ValueError, TypeError)) as raised:
        make(bench)
    message = str(raised.value)
    assert "\n" not in message
    for word in words:
        assert word in message
    assert bench.trainer is None or bench.trainer.state.global_step == 0


# Values that look like mistakes, with which TRL trains
RIGHT: dict[str, tuple[str, dict[str, Any]]] = {
    "no bound on the gradient": ("DPO", {"max_grad_norm": math.inf}),
    "a gradient that is only measured": ("SFT", {"max_grad_norm": 0.0}),
    "steps in place of epochs": ("KTO", {"num_train_epochs": -1, "max_steps": 3}),
    "a whole run of evaluations": ("DPO", {"num_train_epochs": 0, "max_steps": -1}),
    "no momentum": ("DPO", {"adam_beta1": 0.0, "adam_epsilon": 0.0, "learning_rate": 0.0}),
    "checkpoints at the end alone": ("DPO", {"save_steps": -1}),
    "JSON": ("DPO", {"model_init_kwargs": '{"dtype": "float32"}', "accelerator_config": '{"split_batches": false}'}),
    "a dictionary": ("GRPO", {"chat_template_kwargs": {}, "generation_kwargs": None}),
    "all tokens, vLLM's way": ("GRPO", {"top_k": -1, "use_vllm": True}),
    "all tokens": ("RLOO", {"top_k": 0, "top_p": 1.0, "min_p": None}),
    "an override of a value": ("GRPO", {"top_p": 2.0, "generation_kwargs": {"top_p": 0.9}}),
    "no bound above": ("GRPO", {"epsilon_high": math.inf, "vllm_importance_sampling_clip_max": math.inf}),
    "labels that are as often right as wrong": ("DPO", {"loss_type": "aot", "label_smoothing": 0.5}),
}
CHECKS: dict[str, Callable[[Any], None]] = {
    "SFT": lambda config: check_sft_arguments(config, own_loss=False),
    "DPO": lambda config: check_dpo_arguments(config, own_loss=False),
    "KTO": lambda config: check_kto_arguments(config, own_loss=False),
    "GRPO": lambda config: check_grpo_arguments(config, own_loss=False, own_advantages=False, own_generation=False),
    "RLOO": lambda config: check_rloo_arguments(config, own_loss=False, own_advantages=False, own_generation=False),
}


@pytest.mark.parametrize("case", RIGHT)
@pytest.mark.parametrize("library", [trl_ext, trl])
def test_what_trl_trains_is_no_mistake(case: str, library: Any, tmp_path: Path) -> None:
    method, fields = RIGHT[case]
    config = getattr(library, f"{method}Config")(str(tmp_path), use_cpu=True, bf16=False, report_to="none", **fields)
    check_numbers(config)
    CHECKS[method](config)


def as_messages(rows: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": [[USER] for _ in rows["prompt"]]}


@pytest.mark.parametrize("data", [MESSAGES, MESSAGES.to_iterable_dataset(), PROMPTS.with_transform(as_messages)])
def test_a_reward_that_reads_messages_takes_them(data: Any, tmp_path: Path) -> None:
    given = {"reward_funcs": [accuracy_reward, think_format_reward], "train_dataset": data}
    config = trl_ext.GRPOConfig(str(tmp_path), use_cpu=True, bf16=False)
    check_rewards(given, config, has_environments=False, columns_are_added=True)


def test_another_version_of_trl_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / "trl-2.0.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: trl\nVersion: 2.0.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    file = Path(trl_ext.__file__).parent / "compat" / "__init__.py"
    spec = importlib.util.spec_from_file_location("versions_again", file)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ImportError, match=r"works with trl\S+, found trl 2\.0\.0\. Run `pip install 'trl\S+'`\.$"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_choices_are_those_of_trl() -> None:
    of_dpo = {**DPO_CHOICES, "truncation_mode": TRUNCATION_MODES}
    of_trainers = {trl.DPOTrainer: of_dpo, trl.GRPOTrainer: {**GRPO_CHOICES, **ADVANTAGE_CHOICES}}
    for trainer, choices in of_trainers.items():
        for name, allowed in choices.items():
            assert compared_values(trainer, name) == set(allowed), name
