"""The lengths of the rows that `plan` reads: tokens of prompts and completions, tokenized and truncated as in training.

TRL's trainer tokenizes the data, around a small model that never runs. The cache of `datasets` keeps the result.
"""

import copy
import tempfile
from typing import Any

import numpy as np
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoProcessor, LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, ProcessorMixin
from trl import is_conversational

from ..fit.lengths import Array
from . import CommandError
from .arguments import Parsed
from .line import class_name
from .training import data_sets, trainer_class_of

# Arguments that would load, write or report something, and have no effect on the tokens
_OFF: dict[str, Any] = {
    "push_to_hub": False,
    "sync_ref_model": False,
    "precompute_ref_log_probs": False,
    "gradient_checkpointing": False,
    "activation_offloading": False,
    "model_init_kwargs": None,
    "reference_device": None,
    "policy_adapter_name": None,
    "ref_adapter_name": None,
    "report_to": [],
    "eval_strategy": "no",
    "show_plan": False,
    "reference_store": "memory",
    "reference_store_dir": None,
    "bf16": False,
    "fp16": False,
    "use_cpu": True,
}


def lengths_of(method: str, parsed_arguments: Parsed, model: str) -> tuple[Array, Array]:
    """Return the tokens of each prompt, `(U,)`, and of its completions, `(U, C)`; of prompts alone, `(U, 0)`.

    `model` is the name of the model whose tokenizer is used.
    """
    data, _ = data_sets(parsed_arguments.script, parsed_arguments.training, parsed_arguments.mixture, None)
    if not isinstance(data, Dataset):
        raise CommandError("`--dataset_streaming` is true, but `plan` reads the lengths of all rows. Leave it out.")
    trusts = parsed_arguments.training.trust_remote_code
    processor = AutoProcessor.from_pretrained(
        model, revision=parsed_arguments.model.model_revision, trust_remote_code=trusts
    )
    if isinstance(processor, ProcessorMixin) or {"image", "images"} & {*data.column_names}:
        raise CommandError("`plan` does not cover images. Use a model and data without images.")
    options: dict[str, Any] = {
        "num_proc": getattr(parsed_arguments.training, "dataset_num_proc", None),
        "desc": "Reading lengths",
    }
    if method in ("grpo", "rloo", "distillation"):
        keywords = parsed_arguments.training.chat_template_kwargs or {}
        options["fn_kwargs"] = {"tokenizer": processor, "keywords": keywords}
        if "prompt" not in data.column_names:
            raise CommandError(
                f"The data set has the columns {data.column_names}, but `{class_name(method, 'Trainer')}` reads "
                "`prompt`. Rename the column of prompts."
            )
        rows = data.map(_of_prompts, batched=True, remove_columns=data.column_names, **options)
        return np.array(rows["prompt"]), np.zeros((len(rows), 0), np.int64)
    rows = _tokenized(method, parsed_arguments.training, data, processor)
    options["fn_kwargs"] = {
        "longest": getattr(parsed_arguments.training, "max_length", None),
        "keeps_end": getattr(parsed_arguments.training, "truncation_mode", "") == "keep_end",
    }
    count_tokens = {"sft": _of_text, "reward": _of_pairs}.get(method, _of_completions)
    counts = rows.map(count_tokens, remove_columns=rows.column_names, **options)
    return np.array(counts["prompt"]), np.array(counts["completions"]).reshape(len(counts), -1)


def _tokenized(method: str, training: Any, data: Dataset, processor: Any) -> Dataset:
    """Return the rows as the trainer of `method` prepares them."""
    config = LlamaConfig(
        vocab_size=len(processor),
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=2**20,
        tie_word_embeddings=True,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    quiet = copy.copy(training)
    for name, value in _OFF.items():
        if hasattr(quiet, name):
            setattr(quiet, name, value)
    model_class, task_type = LlamaForCausalLM, "CAUSAL_LM"
    if method == "reward":
        model_class, task_type = LlamaForSequenceClassification, "SEQ_CLS"
        config.num_labels = 1
    with tempfile.TemporaryDirectory() as folder:
        quiet.output_dir = folder
        trainer = trainer_class_of(method)(
            model=model_class(config),
            args=quiet,
            train_dataset=data,
            processing_class=processor,
            peft_config=LoraConfig(r=1, target_modules=["q_proj"], task_type=task_type),  # needs no reference model
        )
    rows: Dataset = trainer.train_dataset
    if len(rows) == 0:
        raise CommandError(f"No row is left within `--max_length {training.max_length}`. Set it to a higher number.")
    return rows


def _of_prompts(batch: dict[str, Any], tokenizer: Any, keywords: dict[str, Any]) -> dict[str, list[int]]:
    prompts = batch["prompt"]
    if is_conversational({"prompt": prompts[0]}):
        keywords = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, **keywords}
        ids = tokenizer.apply_chat_template(conversation=prompts, **keywords)["input_ids"]
    else:
        ids = tokenizer(text=prompts)["input_ids"]
    return {"prompt": [len(x) for x in ids]}


def _of_text(row: dict[str, Any], longest: int | None, keeps_end: bool) -> dict[str, Any]:
    """Count the tokens before the first label, and the others. TRL has truncated them."""
    labels = row["labels"]
    prompt = next((i for i, label in enumerate(labels) if label != -100), len(labels) - 1)
    return {"prompt": prompt, "completions": [len(labels) - prompt]}


def _of_pairs(row: dict[str, Any], longest: int | None, keeps_end: bool) -> dict[str, Any]:
    """Count the tokens with which both rows of a pair begin, and the others.

    One more counts in each row, because the last one is not only predicted, as that of a language model, but scored.
    """
    chosen, rejected = row["chosen_ids"], row["rejected_ids"]
    prompt = next((i for i, (x, y) in enumerate(zip(chosen, rejected, strict=False)) if x != y), None)
    prompt = min(len(chosen), len(rejected)) if prompt is None else prompt
    return {"prompt": prompt, "completions": [len(x) - prompt + 1 for x in (chosen, rejected)]}


def _of_completions(row: dict[str, Any], longest: int | None, keeps_end: bool) -> dict[str, Any]:
    """Truncate as the collator of DPO and KTO does: prompt and completion together."""
    prompt = len(row["prompt_ids"])
    completions = [len(row[name]) for name in ("chosen_ids", "rejected_ids", "completion_ids") if name in row]
    if longest is None:
        return {"prompt": prompt, "completions": completions}
    if not keeps_end:
        return {"prompt": min(prompt, longest), "completions": [min(x, longest - prompt) for x in completions]}
    ends = [min(x, longest) for x in completions]
    return {"prompt": min(prompt, longest - min(ends)), "completions": ends}
