"""The command `estimate`: the memory of a training step with these arguments, and the longest sequence that fits."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from peft import PeftConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM
from trl import get_peft_config

from ..config import with_help
from ..memory.step import Engine, Step, StepMemory, memory_of_step
from . import CommandError
from .arguments import OneLineParser, Parsed, dataclasses_of, method_of, parse
from .training import is_adapter, model_init_arguments, require_model

# Lengths at which memory is taken for a straight line before the rest is halved
_STRAIGHT = 8


def longest_that_fits(bytes_of: Callable[[int], int], limit: int, first: int, most: int, step: int = 64) -> int:
    """The largest multiple of `step`, up to `most`, of which `bytes_of` is at most `limit`; 0 if none is.

    Each call takes seconds, and memory is nearly a straight line in the length, so the search follows from `first` on
    the line through the two lengths nearest to `limit`, and bisects where that does not converge.
    """
    fits, exceeds = 0, most // step + 1
    known: dict[int, int] = {}
    count = max(1, min(first, most) // step)
    while exceeds - fits > 1:
        known[count] = bytes_of(count * step)
        fits, exceeds = (count, exceeds) if known[count] <= limit else (fits, count)
        if len(known) < 2:
            count = fits * 2 if fits else exceeds // 2
        elif len(known) > _STRAIGHT:
            count = (fits + exceeds) // 2
        else:
            (x0, y0), (x1, y1) = sorted(sorted(known.items(), key=lambda item: abs(item[1] - limit))[:2])
            count = int(x0 + (limit - y0) * (x1 - x0) / max(1, y1 - y0))
        count = min(max(count, fits + 1), exceeds - 1)
    return fits * step


# Their estimates have been compared with measurements
_ENGINES = {"one_process": "one process", "ddp": "DDP", "fsdp2": "FSDP2"}
# Numbers that an optimizer keeps for each trained one; other optimizers also take memory while they step
_STATES = {"adamw_torch_fused": 2, "sgd": 0}
_GIB = 2**30
# The `model_init_kwargs` that are read, or change no memory
_OF_MODEL = {"dtype", "attn_implementation", "trust_remote_code", "use_cache"}
_NOT_COVERED = (
    "Not covered: what an operator allocates for itself, the device's own context, fragments, and under GRPO the "
    "generation (its key-value cache, vLLM). Rows are as long as they may be and share nothing: no batch takes more."
)


@with_help
@dataclass
class EstimateArguments:
    """The arguments of `estimate` alone."""

    device_memory: float | None = None
    """GiB of a device, for the longest sequence that fits. `None`: those of the GPU, if any."""

    device: str = field(default="cuda", metadata={"choices": ["cuda", "cpu"]})
    """Where training will run, `"cuda"` or `"cpu"`; the device need not be present."""

    prompt_length: int = 0
    """Tokens of a prompt: part of DPO's `max_length`, and before GRPO's completions."""

    engine: str = "one_process"
    """How training will run: `"one_process"`, `"ddp"`, or `"fsdp2"` as in
    `examples/accelerate_configs/fsdp2.yaml`."""

    num_devices: int = 1
    """On how many devices, with one process each. The output is for one of them."""


def run(arguments: list[str]) -> int:
    """Print the parts of the memory, the peak and the longest sequence that fits."""
    method, rest = method_of(arguments, "estimate")
    parser = OneLineParser((*dataclasses_of(method), EstimateArguments), prog=f"trl-ext estimate {method}")
    parser.set_defaults(use_cpu=True)  # the run may be meant for another machine
    script, training, model_args, mixture, asked, launch_of_file, _ = parse(parser, rest, may_launch=False)
    if launch_of_file:
        raise CommandError(
            f"`{launch_of_file[0]}` in the file of `--config` is not covered by `estimate`, but read by `accelerate "
            "launch`: leave it out, and give `--engine` and `--num_devices`."
        )
    _refuse_what_is_not_covered(training, model_args)
    _check_devices(method, asked)
    step = step_of(method, Parsed(script, training, model_args, mixture, [], []), asked)
    memory = memory_of_step(step)
    print(_table(step, memory))
    limit = None if asked.device_memory is None else int(asked.device_memory * _GIB)
    if limit is None and asked.device == "cuda" and torch.cuda.is_available():
        limit = torch.cuda.get_device_properties(0).total_memory
    if limit is not None:
        print(f"longest      {_longest(step, limit)}")
    print(f"\n{_NOT_COVERED}")
    return 0


def step_of(method: str, parsed: Parsed, asked: EstimateArguments) -> Step:
    """The training step with these arguments, on one device, with the longest rows."""
    training, dpo = parsed.training, method == "dpo"
    if dpo and training.max_length is None:
        raise CommandError("`--max_length` is None, so rows may be of any length: give `--max_length`.")
    prompt_length = asked.prompt_length
    longest = training.max_length if dpo else prompt_length + training.max_completion_length
    if not 0 <= prompt_length < longest:
        raise CommandError(f"`--prompt_length` must be from 0 to {longest - 1}, got {prompt_length}.")
    tokens = longest - 1  # nothing is scored after a row's last token
    half = torch.bfloat16 if training.bf16 else torch.float16 if training.fp16 else None
    adapted = parsed.model.use_peft or is_adapter(parsed.model.model_name_or_path)
    return Step(
        model=_policy(method, parsed),
        rows=training.per_device_train_batch_size * (2 if dpo else 1),
        tokens=tokens,
        scored=tokens - max(prompt_length - 1, 0),
        outputs=("log_probs", "entropy", "mean_logits", "is_top1") if dpo else ("log_probs", "entropy"),
        head=training.head,
        chunk_size=training.head_chunk_size,
        device=torch.device(asked.device),
        engine=cast(Engine, asked.engine),
        devices=asked.num_devices,
        autocast=half,
        accumulates=training.gradient_accumulation_steps > 1,
        states=_STATES[training.optim],
        reference_model=not adapted and (not training.precompute_ref_log_probs if dpo else training.beta != 0),
    )


def _policy(method: str, parsed: Parsed) -> Callable[[], Any]:
    """A function that makes the policy as the trainer does, from its config alone."""
    _, training, model_args, *_ = parsed
    require_model(model_args)
    name, adapter = model_args.model_name_or_path, get_peft_config(model_args)
    if is_adapter(name):
        adapter = PeftConfig.from_pretrained(name)
        adapter.inference_mode = False
        name = adapter.base_model_name_or_path
    given = model_init_arguments(training, model_args)
    trust = {"trust_remote_code": given["trust_remote_code"]}
    config = AutoConfig.from_pretrained(name, revision=model_args.model_revision, **trust)
    if getattr(config, "quantization_config", None) is not None:
        raise CommandError(
            f"`--model_name_or_path {name}`, whose weights are quantized, is not covered by `estimate`: name the model "
            "that they were made of."
        )
    dtype = config.dtype if given["dtype"] == "auto" else getattr(torch, given["dtype"])

    def make() -> Any:
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=given["attn_implementation"], **trust
        )
        if adapter is not None:
            model = get_peft_model(model, adapter)
        if training.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=training.gradient_checkpointing_kwargs)
            if adapter is not None:
                model.enable_input_require_grads()
        if training.disable_dropout:
            for module in model.modules():
                if isinstance(module, torch.nn.Dropout):
                    module.p = 0
        return model.train()

    return make


def _refuse_what_is_not_covered(training: Any, model_args: Any) -> None:
    asked = {
        "optim": training.optim not in _STATES,
        "load_in_4bit": model_args.load_in_4bit,
        "load_in_8bit": model_args.load_in_8bit,
        "deepspeed": training.deepspeed,
        "fsdp": training.fsdp,
        "torch_compile": training.torch_compile,
        "activation_offloading": training.activation_offloading,
        "reference_device": training.reference_device,
        "use_liger_kernel": training.use_liger_kernel,
        "cast_lm_head_to_fp32": getattr(training, "cast_lm_head_to_fp32", False),
        "model_init_kwargs": set(training.model_init_kwargs or ()) - _OF_MODEL,
    }
    for name, given in asked.items():
        if given:
            value = getattr(training, name, None) or getattr(model_args, name, None)
            value = getattr(value, "value", value)  # of an enumeration
            allowed = f"one of {', '.join(_STATES)}" if name == "optim" else "its default"
            raise CommandError(f"`--{name} {value}` is not covered by `estimate`: set it to {allowed} to see the rest.")


def _check_devices(method: str, asked: EstimateArguments) -> None:
    if asked.engine not in _ENGINES:
        raise CommandError(
            f"`--engine {asked.engine}` is not covered by `estimate`, since no measurement was compared with it: give "
            f"one of {', '.join(_ENGINES)}."
        )
    if (method, asked.engine) == ("grpo", "fsdp2"):
        raise CommandError(
            "`--engine fsdp2` is covered by `estimate dpo` alone: GRPO took a fifth less than was estimated. Give "
            "`--engine ddp` to see the rest."
        )
    alone = asked.engine == "one_process"
    if asked.num_devices < 1 or alone != (asked.num_devices == 1):
        wanted = "1, or give `--engine ddp` or `--engine fsdp2`" if alone else "2 or more, or leave `--engine` out"
        raise CommandError(
            f"`--num_devices` is {asked.num_devices} with `--engine {asked.engine}`: set `--num_devices` to {wanted}."
        )


def _longest(step: Step, limit: int) -> str:
    with torch.device("meta"):
        config = step.model().config
    most = getattr(config.get_text_config(), "max_position_embeddings", None) or 2**20
    prompt = step.tokens - step.scored

    def bytes_of(length: int) -> int:
        tokens = length - 1
        return memory_of_step(replace(step, tokens=tokens, scored=max(1, tokens - prompt))).peak

    longest = longest_that_fits(bytes_of, limit, step.tokens + 1, most)
    positions = ", the most that the model's config knows" if longest + 64 > most else ""
    return f"rows of {longest:,} tokens fit in {limit / _GIB:.4g} GiB{positions}"


def _table(step: Step, memory: StepMemory) -> str:
    gathered = ", with weights that are gathered then" if step.engine == "fsdp2" else ""
    where = "one process" if step.devices == 1 else f"one of {step.devices} devices under {_ENGINES[step.engine]}"
    lines = [
        ("weights", memory.weights, "adapters too"),
        ("reference", memory.reference, "a model of its own" if step.reference_model else "none beside the policy"),
        ("optimizer", memory.optimizer, f"{step.states} numbers for each trained one"),
        ("gradients", memory.gradients, "when the backward has ended"),
        ("buckets", memory.buckets, "of DDP, in which gradients are summed"),
        ("activations", memory.activations, "when the backbone has run" + gathered),
        ("head", memory.head, "beside the activations"),
        ("peak", memory.peak, "below the sum: gradients come while activations go"),
    ]
    shown = [line for line in lines if line[0] != "buckets" or step.engine == "ddp"]
    title = f"{step.rows} rows of {step.tokens + 1:,} tokens a micro-batch, {where}, on {step.device.type}\n\n"
    return title + "\n".join(f"{name:<13}{_readable(size):>12}   {remark}" for name, size, remark in shown)


def _readable(size: int) -> str:
    return f"{size / _GIB:.3f} GiB" if size >= _GIB else f"{size / 2**20:.1f} MiB"
