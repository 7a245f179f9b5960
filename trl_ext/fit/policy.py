"""The policy of a run, and its reference model or teacher, from their configs alone: what makes them, and facts."""

import os
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from peft import PeftConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.quantizers import AutoHfQuantizer
from trl import get_peft_config, get_quantization_config

from ..packing.packing import Packing
from ..packing.randomness import randomness_of
from ..packing.support import positions_by_length
from ..scoring.classifier import unknown_class_reason
from ..scoring.model_inputs import has_position_table
from .run import ArgumentError, Run


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A policy without weights. Its functions are called on the device "meta"."""

    make: Callable[[], Any]  # the policy with its adapters, in training mode
    make_reference: Callable[[], Any]  # a separate reference model, or the teacher
    has_adapter: bool
    has_teacher: bool  # the teacher is a separate model
    longest_row: int  # tokens for which the model, and a teacher, has positions
    dtype: torch.dtype
    config: Any  # the model's
    name: str  # of the model, or of an adapter's base


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What a choice of micro-batches needs to know about the policy."""

    packs: bool  # batches run without padding
    teacher_packs: bool  # those of a separate teacher, too
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
        `ArgumentError`: weights are quantized before they are loaded, a `dtype` is unknown, or the teacher is missing,
            is the folder of an adapter, or has another vocabulary.
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
    longest_row = _positions(config)
    teacher = _teacher_of(run)
    if teacher is not None:
        longest_row = min(longest_row, _rows_of_table(teacher))
        _check_vocabulary(teacher.config, config)

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
        model = make_base() if teacher is None else teacher.make()
        return model.eval().requires_grad_(False)

    return Policy(
        make=make,
        make_reference=make_reference,
        has_adapter=adapter is not None,
        has_teacher=teacher is not None,
        longest_row=longest_row,
        dtype=dtype or torch.float32,
        config=config,
        name=name,
    )


class _Teacher(NamedTuple):
    config: Any
    make: Callable[[], Any]


def _teacher_of(run: Run) -> _Teacher | None:
    """Return the model of `teacher_model_name_or_path`, if there is one."""
    if run.method != "distillation":
        return None
    training = run.training
    name = training.teacher_model_name_or_path
    if name is None:
        if not run.model.use_peft and not is_adapter(run.model.model_name_or_path):
            raise ArgumentError(
                "`--teacher_model_name_or_path` is not set. Set it, or pass `--use_peft`: then the base model is the "
                "teacher."
            )
        return None
    if is_adapter(name) and not os.path.isfile(os.path.join(name, "config.json")):
        raise ArgumentError(
            f"`--teacher_model_name_or_path` is '{name}', the folder of an adapter. Merge the adapter into its base "
            "model."
        )
    arguments = teacher_init_arguments(training, run.model)
    trusts = arguments.get("trust_remote_code", training.trust_remote_code)
    config = _config_of("teacher_model_name_or_path", name, training.teacher_model_revision, trusts)
    make = partial(
        AutoModelForCausalLM.from_config,
        config,
        dtype=_dtype_of(arguments, config),
        attn_implementation=arguments["attn_implementation"],
        trust_remote_code=trusts,
    )
    return _Teacher(config, make)


def _positions(config: Any) -> int:
    return getattr(config.get_text_config(), "max_position_embeddings", None) or 2**20


def _rows_of_table(teacher: _Teacher) -> int:
    """Return the tokens for which a teacher has learned positions. Other positions do not limit its rows."""
    positions = _positions(teacher.config)
    with torch.device("meta"):
        model = teacher.make()
    return positions if has_position_table(model, positions) else 2**20


def _check_vocabulary(teacher_config: Any, student_config: Any) -> None:
    teacher_size = teacher_config.get_text_config().vocab_size
    student_size = student_config.get_text_config().vocab_size
    if teacher_size != student_size:
        raise ArgumentError(
            f"`--teacher_model_name_or_path` has a vocabulary of {teacher_size:,} tokens (`vocab_size`), but "
            f"`--model_name_or_path` one of {student_size:,}. Use a teacher with the student's vocabulary."
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
    name = arguments["dtype"]
    is_auto = name in ("auto", None)
    dtype: Any = config.dtype if is_auto else getattr(torch, str(name), None)
    if not is_auto and not isinstance(dtype, torch.dtype):
        raise ArgumentError(f"The `dtype` of a model must be 'auto' or the name of a torch dtype, got {name!r}.")
    return dtype  # type: ignore[no-any-return]


def facts_of(policy: Policy, router_aux_loss_coef: float | None) -> ModelFacts:
    """Return the facts of a policy. `router_aux_loss_coef` is that of the trainer's config."""
    with torch.device("meta"):
        model = policy.make()
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    packs = _packs(inner)
    if inner.get_output_embeddings() is None:
        packs = packs and unknown_class_reason(inner) is None
    with torch.device("meta"):
        teacher = policy.make_reference() if policy.has_teacher else None
    config = inner.config.get_text_config()
    coefficient = getattr(config, "router_aux_loss_coef", 0.0) if router_aux_loss_coef is None else router_aux_loss_coef
    return ModelFacts(
        packs=packs,
        teacher_packs=teacher is None or _packs(teacher),
        shares_prompts=packs and randomness_of(model) is None,
        has_router_loss=hasattr(config, "output_router_logits") and coefficient != 0.0,
        positions_by_length=positions_by_length(inner),
        weight_bytes=sum(x.nbytes for x in model.parameters()),
        trained_bytes=sum(x.nbytes for x in model.parameters() if x.requires_grad),
    )


def _packs(model: Any) -> bool:
    return Packing(model, padding_free=True, share_prompts=True).padded_reason is None
