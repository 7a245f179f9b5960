"""A count from some of a model's equal layers, and from some of the head's tiles, is that of all of them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2MoeConfig,
    Qwen3Config,
)

from trl_ext.cli.commands import COMMANDS
from trl_ext.cli.estimate import EstimateArguments
from trl_ext.cli.predictions import parse_for_prediction, run_of
from trl_ext.fit import step as counting
from trl_ext.fit.estimate import step_of
from trl_ext.fit.layers import UnequalLayersError, equal_layers
from trl_ext.fit.records import AllocationRecords
from trl_ext.fit.step import Step, memory_of_step

_SHAPE = {
    **{"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, "max_position_embeddings": 512},
    **{"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2},
}
# A head of many tiles
_VOCABULARY = 30_000
_CONFIGS: dict[str, Any] = {
    "untied": lambda layers: LlamaConfig(**_SHAPE, vocab_size=_VOCABULARY, num_hidden_layers=layers),
    "tied": lambda layers: Qwen3Config(
        **_SHAPE, vocab_size=_VOCABULARY, num_hidden_layers=layers, head_dim=16, tie_word_embeddings=True
    ),
    # Every other layer has a sliding window
    "alternating": lambda layers: Gemma2Config(**_SHAPE, vocab_size=500, num_hidden_layers=layers, head_dim=16),
    # The second layer is dense
    "one-dense": lambda layers: Qwen2MoeConfig(
        **_SHAPE, vocab_size=500, num_hidden_layers=layers, num_experts=4, mlp_only_layers=[1]
    ),
}
_LORA = ("--use_peft", "--lora_target_modules", "all-linear")
_BF16 = ("--bf16", "true")
_CHECKPOINTS = ("--gradient_checkpointing", "true")
_ACCUMULATES = ("--gradient_accumulation_steps", "2")
# Model, layers, method and arguments
_CASES: dict[str, tuple[str, int, str, tuple[str, ...]]] = {
    "four-layers": ("untied", 4, "sft", ()),
    "five-layers": ("untied", 5, "sft", ()),
    "nine-layers": ("untied", 9, "sft", ()),
    "sft-cpu": ("untied", 8, "sft", ("--device", "cpu")),
    "sft-checkpoints": ("tied", 8, "sft", _CHECKPOINTS),
    "sft-checkpoints-bf16": ("untied", 8, "sft", (*_CHECKPOINTS, *_BF16, *_ACCUMULATES)),
    "sft-lora": ("tied", 8, "sft", _LORA),
    "sft-lora-checkpoints": ("untied", 8, "sft", (*_LORA, *_CHECKPOINTS, *_BF16)),
    "sft-sgd": ("untied", 8, "sft", ("--optim", "sgd", *_ACCUMULATES)),
    "sft-offloading": ("untied", 16, "sft", ("--activation_offloading",)),
    "sft-offloading-checkpoints": ("untied", 16, "sft", ("--activation_offloading", *_CHECKPOINTS, *_LORA, *_BF16)),
    "dpo-reference": ("untied", 8, "dpo", _BF16),
    "dpo-hosted-reference": ("untied", 8, "dpo", ("--reference_device", "cpu")),
    "dpo-lora": ("tied", 8, "dpo", (*_LORA, *_CHECKPOINTS)),
    "kto-reference": ("tied", 8, "kto", _CHECKPOINTS),
    "grpo-reference": ("untied", 8, "grpo", ("--beta", "0.1", *_BF16)),
    "rloo-lora": ("untied", 8, "rloo", (*_LORA, "--beta", "0.1")),
    "ddp": ("untied", 8, "sft", ("--engine", "ddp", *_BF16, *_ACCUMULATES)),
    "fsdp2": ("untied", 9, "sft", ("--engine", "fsdp2")),
    "fsdp2-checkpoints-bf16": ("tied", 9, "dpo", ("--engine", "fsdp2", *_CHECKPOINTS, *_BF16, *_ACCUMULATES)),
    "fsdp2-lora": ("untied", 9, "dpo", ("--engine", "fsdp2", *_LORA, *_BF16, *_ACCUMULATES)),
    "zero1": ("untied", 8, "sft", ("--engine", "zero1", *_BF16, *_ACCUMULATES)),
    "zero2-lora": ("untied", 8, "dpo", ("--engine", "zero2", *_BF16, *_LORA, *_CHECKPOINTS)),
    "zero2-full": ("untied", 8, "sft", ("--engine", "zero2", *_BF16)),
    "alternating": ("alternating", 8, "sft", ()),
}


def _step(name: str, folder: Path) -> Step:
    model, layers, method, options = _CASES[name]
    _CONFIGS[model](layers).save_pretrained(folder)
    words = [
        *("--model_name_or_path", str(folder), "--dataset_name", "unread", "--output_dir", str(folder / "out")),
        *("--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "1", "--bf16", "false"),
        *("--gradient_checkpointing", "false"),
    ]
    if "--engine" in options:
        words += ["--num_devices", "4"]
    if method in ("grpo", "rloo"):
        words += ["--max_completion_length", "96", "--num_generations", "4", "--reward_funcs", "accuracy_reward"]
    else:
        words += ["--max_length", "96"]
    line = COMMANDS["estimate"].read([method, *words, *options])
    parsed = parse_for_prediction(line, EstimateArguments, "")
    arguments = parsed.command
    run = run_of(method, parsed, device=arguments.device, devices=arguments.num_devices, engine=arguments.engine)
    return step_of(run)


@pytest.mark.parametrize("case", _CASES)
def test_some_layers_and_tiles_count_as_all(case: str, tmp_path: Path):
    step = _step(case, tmp_path)
    memory = memory_of_step(step)
    # No fallback hides a difference
    assert memory == counting._memory(step)
    assert memory == counting._memory(step, all_layers=True, all_tiles=True)


@pytest.mark.parametrize("case", ["dpo-lora", "zero2-full"])
def test_a_count_leaves_nothing_for_the_next_one(case: str, tmp_path: Path):
    step = _step(case, tmp_path)
    steps = [replace(step, tokens=x, scored_tokens=x, accumulates=x == 40) for x in (95, 40, 95)]
    counting._rank_of.cache_clear()
    memories = [memory_of_step(x) for x in steps]
    assert counting._rank_of.cache_info().hits == 2
    assert memories == [counting._memory(x, all_layers=True, all_tiles=True) for x in steps]
    assert memories[0] != memories[1]


def test_buckets_that_fill_up_during_the_backward_pass_need_all_layers(tmp_path: Path):
    step = replace(_step("zero2-full", tmp_path), reduce_bucket_size=2**16)
    assert memory_of_step(step) == counting._memory(step, all_layers=True, all_tiles=True)


def _on_meta(config: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def test_layers_that_differ_are_not_equal():
    assert equal_layers(_on_meta(_CONFIGS["untied"](8))) is not None
    assert equal_layers(_on_meta(_CONFIGS["alternating"](8))) is None
    assert equal_layers(_on_meta(_CONFIGS["one-dense"](8))) is None
    model = _on_meta(_CONFIGS["untied"](8))
    model.model.layers[5].self_attn.scaling = 1.0
    assert equal_layers(model) is None
    model = _on_meta(_CONFIGS["untied"](8))
    model.model.layers[5].mlp = model.model.layers[4].mlp  # shared
    assert equal_layers(model) is None
    lora = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    assert equal_layers(get_peft_model(_on_meta(_CONFIGS["untied"](8)), lora)) is not None
    lora = LoraConfig(target_modules=["q_proj"], layers_to_transform=[0, 3], task_type="CAUSAL_LM")
    assert equal_layers(get_peft_model(_on_meta(_CONFIGS["untied"](8)), lora)) is None

    class Backbone(type(model.model)):  # type: ignore[misc]
        """Code that is not transformers' own."""

    model = _on_meta(_CONFIGS["untied"](8))
    model.model.__class__ = Backbone
    assert equal_layers(model) is None


def test_layers_that_only_look_equal_all_run(tmp_path: Path):
    step = _step("nine-layers", tmp_path)

    def make() -> LlamaForCausalLM:
        model = step.model()
        for layer in model.model.layers[2:]:
            layer.mlp.register_forward_hook(lambda module, args, output: output + torch.zeros(1000, 64).sum())
        return model

    odd = replace(step, model=make)
    with pytest.raises(UnequalLayersError):
        counting._memory(odd)
    assert memory_of_step(odd) == counting._memory(odd, all_layers=True, all_tiles=True)


@pytest.mark.parametrize("left", [-300, 0, 300])
def test_a_repeated_segment_rises_each_time(left: int):
    in_full, repeated = AllocationRecords(), AllocationRecords()
    with in_full, repeated:
        for records, times in ((in_full, 4), (repeated, 1)):
            for _ in range(times):
                records.held_bytes += 1000 + left
                records.peak = max(records.peak, records.held_bytes)
                records._segment_peak = max(records._segment_peak, records.held_bytes)
                records.held_bytes -= 1000
        segment = repeated.next_segment()
        assert segment == (1000 + left, left, 0)
        repeated.repeat(segment, 3)
    assert (repeated.held_bytes, repeated.peak) == (in_full.held_bytes, in_full.peak)
