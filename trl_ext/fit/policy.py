"""The policy of a run, and its reference model or teacher, from their configs alone: what makes them, and facts."""

import os
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.quantizers import AutoHfQuantizer
from trl import get_peft_config, get_quantization_config

from ..packing.packing import Packing
from ..packing.randomness import randomness_of
from ..packing.support import positions_by_length
from ..scoring.classifier import unknown_class_reason
from .run import ArgumentError, Run


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A policy without weights. Its functions are called on the device "meta"."""

    make: Callable[[], Any]  # the policy with its adapters, in training mode
    make_reference: Callable[[], Any]  # a separate reference model, or the teacher
    has_adapter: bool
    longest_row: int  # tokens for which the model has positions
    dtype: torch.dtype
    config: Any  # the model's
    name: str  # of the model, or of an adapter's base


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What a choice of micro-batches needs to know about the policy."""

    packs: bool  # batches run without padding
    shares_prompts: bool  # rows of a forward share their prompt in training
    has_router_loss: bool
    positions_by_length: bool  # positions depend on the longest row of a forward
    weight_bytes: int
    trained_bytes: int


def is_adapter(name: str) -> bool:
    """Return whether `name` is the folder of a PEFT adapter."""
    return os.path.isfile(os.path.join(name, "adapter_config.json"))


def model_init_arguments(training: Any, model_args: Any) -> dict[str, Any]:
    """Return the arguments that load the model, as in TRL's scripts."""
    return {
        "dtype": model_args.dtype,
        "attn_implementation": model_args.attn_implementation,
        "trust_remote_code": training.trust_remote_code,
        **(training.model_init_kwargs or {}),
    }


def teacher_init_arguments(training: Any, model_args: Any) -> dict[str, Any]:
    """Return the arguments that load the teacher: those of the student's, but not quantized."""
    arguments = {"dtype": model_args.dtype, "attn_implementation": model_args.attn_implementation}
    return {**arguments, **(training.teacher_model_init_kwargs or {})}


def policy_of(run: Run) -> Policy:
    """Return the policy of a run.

    Raises:
        `ArgumentError`: its weights are quantized before they are loaded.
    """
    training = run.training
    name = run.model.model_name_or_path
    adapter = get_peft_config(run.model)
    if is_adapter(name):
        adapter = PeftConfig.from_pretrained(name)
        adapter.inference_mode = False
        name = adapter.base_model_name_or_path
    arguments = model_init_arguments(training, run.model)
    trusts = arguments["trust_remote_code"]
    config = _config_of("model_name_or_path", name, run.model.model_revision, trusts)
    dtype = _dtype_of(arguments, config)

    def make_base() -> Any:
        attention = arguments["attn_implementation"]
        auto_class, config_copy = AutoModelForCausalLM, deepcopy(config)
        if run.method == "reward":
            auto_class = AutoModelForSequenceClassification
            config_copy.num_labels = 1
        return auto_class.from_config(config_copy, dtype=dtype, attn_implementation=attention, trust_remote_code=trusts)

    def make() -> Any:
        model = make_base()
        quantization = get_quantization_config(run.model)
        if quantization is not None:
            quantizer = AutoHfQuantizer.from_config(quantization, pre_quantized=False)
            quantizer.preprocess_model(model, device_map=None)
            quantizer.postprocess_model(model)
        if adapter is not None:
            model = get_peft_model(model, adapter)
        if quantization is not None:
            for parameter_name, parameter in model.named_parameters():  # as TRL does
                if parameter.requires_grad and "lora_magnitude_vector" not in parameter_name:
                    parameter.data = parameter.data.to(torch.bfloat16)
        if training.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=training.gradient_checkpointing_kwargs)
            if adapter is not None:
                model.enable_input_require_grads()
        if getattr(training, "disable_dropout", False):  # SFT has no such argument
            for module in model.modules():
                if isinstance(module, torch.nn.Dropout):
                    module.p = 0
        return model.train()

    def make_reference() -> Any:
        model = _make_teacher(run) if run.method == "distillation" else make_base()
        return model.eval().requires_grad_(False)

    return Policy(
        make=make,
        make_reference=make_reference,
        has_adapter=adapter is not None,
        longest_row=getattr(config.get_text_config(), "max_position_embeddings", None) or 2**20,
        dtype=dtype or torch.float32,
        config=config,
        name=name,
    )


def _make_teacher(run: Run) -> Any:
    """Return the model of `teacher_model_name_or_path`."""
    arguments = teacher_init_arguments(run.training, run.model)
    trusts = arguments.get("trust_remote_code", run.training.trust_remote_code)
    name = run.training.teacher_model_name_or_path
    config = _config_of("teacher_model_name_or_path", name, run.training.teacher_model_revision, trusts)
    return AutoModelForCausalLM.from_config(
        config,
        dtype=_dtype_of(arguments, config),
        attn_implementation=arguments["attn_implementation"],
        trust_remote_code=trusts,
    )


def _config_of(argument: str, name: str, revision: str | None, trust_remote_code: bool) -> Any:
    config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    if getattr(config, "quantization_config", None) is not None:
        raise ArgumentError(
            f"`estimate` does not cover `--{argument} {name}`, whose weights are quantized. Pass the model without "
            "quantization."
        )
    return config


def _dtype_of(arguments: dict[str, Any], config: Any) -> torch.dtype:
    dtype: torch.dtype = config.dtype if arguments["dtype"] == "auto" else getattr(torch, arguments["dtype"])
    return dtype


def facts_of(policy: Policy, router_aux_loss_coef: float | None) -> ModelFacts:
    """Return the facts of a policy. `router_aux_loss_coef` is that of the trainer's config."""
    with torch.device("meta"):
        model = policy.make()
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    packs = Packing(inner, padding_free=True, share_prompts=True).padded_reason is None
    if inner.get_output_embeddings() is None:
        packs = packs and unknown_class_reason(inner) is None
    config = inner.config.get_text_config()
    coefficient = getattr(config, "router_aux_loss_coef", 0.0) if router_aux_loss_coef is None else router_aux_loss_coef
    return ModelFacts(
        packs=packs,
        shares_prompts=packs and randomness_of(model) is None,
        has_router_loss=hasattr(config, "output_router_logits") and coefficient != 0.0,
        positions_by_length=positions_by_length(inner),
        weight_bytes=sum(x.nbytes for x in model.parameters()),
        trained_bytes=sum(x.nbytes for x in model.parameters() if x.requires_grad),
    )
