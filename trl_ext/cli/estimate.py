"""The command `estimate`: the memory of a training step with these arguments, and the longest sequence that fits."""

import warnings
from collections.abc import Callable, Container
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
from peft import PeftConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, Trainer
from transformers.quantizers import AutoHfQuantizer
from trl import get_peft_config, get_quantization_config

from ..config import with_help
from ..losses.loss_types import kto_loss_type
from ..memory.step import Engine, Step, StepMemory, memory_of_step
from ..trainers.checked_arguments import check_arguments_of
from . import CommandError, wrapped
from .arguments import OneLineParser, Parsed, asks_for_one_process, dataclasses_of, parse
from .line import Line
from .training import is_adapter, model_init_arguments


def longest_that_fits(bytes_of: Callable[[int], int], limit: int, first: int, most: int, step: int = 64) -> int:
    """Return the largest multiple of `step`, up to `most`, for which `bytes_of` is at most `limit`; 0 if there is none.

    Each call takes seconds, and memory is nearly linear in the length. So the search begins at `first`, follows the
    line through the two lengths nearest to `limit`, and bisects if that does not converge.
    """
    fits, exceeds = 0, most // step + 1
    known: dict[int, int] = {}
    count = max(1, min(first, most) // step)
    while exceeds - fits > 1:
        known[count] = bytes_of(count * step)
        fits, exceeds = (count, exceeds) if known[count] <= limit else (fits, count)
        if len(known) < 2:
            count = fits * 2 if fits else exceeds // 2
        elif len(known) > 8:
            count = (fits + exceeds) // 2
        else:
            (x0, y0), (x1, y1) = sorted(sorted(known.items(), key=lambda item: abs(item[1] - limit))[:2])
            count = int(x0 + (limit - y0) * (x1 - x0) / max(1, y1 - y0))
        count = min(max(count, fits + 1), exceeds - 1)
    return fits * step


# The engines and optimizers whose estimates have been compared with measurements. `step_of` refuses others
ENGINES = {"one_process": "one process", "ddp": "DDP", "fsdp2": "FSDP2", "zero1": "ZeRO-1", "zero2": "ZeRO-2"}
_ON_SHARDS = ("adamw_torch_fused", "adamw_torch", "sgd")
_ON_WHOLE_WEIGHTS = (
    *("adafactor", "adagrad", "rmsprop", "adamw_8bit", "adamw_bnb_8bit", "ademamix", "ademamix_8bit", "lion_8bit"),
    *("lion_32bit", "rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit", "paged_adamw_8bit", "paged_adamw_32bit"),
    *("paged_lion_8bit", "paged_lion_32bit"),
)
OF_WHOLE_WEIGHTS = ("one_process", "ddp")  # the engines that keep each weight as a whole
OPTIMIZERS = {x: _ON_SHARDS + _ON_WHOLE_WEIGHTS * (x in OF_WHOLE_WEIGHTS) for x in ENGINES}
_GIB = 2**30
_MOST_MEMORY = 2**20  # of a device, in GiB
# Of a micro-batch. An operator runs for each row and layer, in minutes for these rows in a large model
MOST_ROWS = 1024
_MOST_TOKENS = 2**26
_MOST_DEVICES = 2**16
# The `model_init_kwargs` that `estimate` reads, or that change no memory
_OF_MODEL = {"dtype", "attn_implementation", "trust_remote_code", "use_cache"}
# Arguments of which `estimate` refuses some values
_WITH_WHOLE_WEIGHTS = ("activation_offloading", "load_in_4bit", "reference_device")
_WATCHED = (
    *("optim", "model_init_kwargs", "load_in_8bit", "deepspeed", "fsdp", "torch_compile", *_WITH_WHOLE_WEIGHTS),
    *("use_liger_kernel", "cast_lm_head_to_fp32", "label_smoothing_factor"),
)
# Methods that sample completions, and what the head computes of each token besides log-probs and entropy
_SAMPLES = ("grpo", "rloo")
_OUTPUTS = {"sft": ("is_top1",), "dpo": ("mean_logits", "is_top1"), "kto": ("mean_logits",)}
_NOT_COVERED = (
    "The estimate is for the longest rows without shared prompts, so no batch takes more. It leaves out workspaces of "
    "operators, the device's context, fragmentation, evaluation, and generation (its key-value cache, vLLM)."
)


@with_help
@dataclass
class EstimateArguments:
    """The arguments of `estimate` alone."""

    device_memory: float | None = None
    """Memory of a device in GiB, to find the longest sequence that fits. `None`: that of this machine's GPU, if any."""

    device: str = field(default="cuda", metadata={"choices": ["cuda", "cpu"]})
    """Where training will run, `"cuda"` or `"cpu"`. This machine need not have the device."""

    prompt_length: int = 0
    """Tokens of a prompt. `max_length` includes them; `max_completion_length` does not."""

    engine: str = field(default="one_process", metadata={"choices": [*ENGINES, "zero3"]})
    """How training will run: `"one_process"`, `"ddp"`, or `"fsdp2"`, `"zero1"`, `"zero2"` as in
    `examples/accelerate_configs`. `"zero3"` is not covered."""

    num_devices: int = 1
    """Number of devices, with one process each. The estimate is for one of them."""


def run(line: Line) -> int:
    """Print the parts of the memory, the peak and the longest sequence that fits."""
    parsed, asked = arguments_of(line, EstimateArguments, "Remove it, and pass `--engine` and `--num_devices` instead")
    if asked.device_memory is not None:
        check_memory(asked.device_memory)
    step, policy = step_of(line.method, parsed, asked), policy_of(parsed)
    training = parsed.training
    print(_table(line.method, step, policy, memory_of_step(step)))
    limit = None if asked.device_memory is None else int(asked.device_memory * _GIB)
    if limit is None and asked.device == "cuda" and torch.cuda.is_available():
        limit = torch.cuda.get_device_properties(0).total_memory
    unknown = "Pass `--device_memory` in GiB: there is no GPU to read it from."
    print(wrapped(unknown if limit is None else _longest(step, policy, limit), f"{'longest':<13}"))
    notes = [_NOT_COVERED]
    if line.method in _SAMPLES and not asked.prompt_length:
        notes.insert(0, "Prompts count as 0 tokens: set `--prompt_length` to that of the longest.")
    asked_for, most = _longest_row(line.method, training, asked), policy.positions
    if asked_for > most:
        cut = f"The arguments allow rows of {asked_for:,} tokens, but the model has {most:,} positions"
        notes.insert(0, f"{cut}, so the estimate is for rows of {most:,} tokens.")
    print("", *map(wrapped, notes), sep="\n")
    return 0


def arguments_of(line: Line, asked: type, instead: str, ignored: Container[str] = ()) -> tuple[Parsed, Any]:
    """Return a run's arguments, for a machine that may be another one, and the dataclass `asked` of the command.

    Arguments of the file for `accelerate launch` that are in `ignored` have no effect.

    Raises:
        `CommandError`: an argument is for `accelerate launch`; `instead` says what to do.
    """
    script_class, config_class, *others = dataclasses_of(line.method)
    # GRPO's config checks the batch of all processes
    devices = str(line.value("num_devices"))
    world_size = max(1, int(devices)) if devices.isdigit() else 1
    on_devices = type(config_class.__name__, (config_class,), {"world_size": world_size})
    parser = OneLineParser((script_class, on_devices, *others, asked), prog=line.prog)
    parser.set_defaults(use_cpu=True)  # the run may be meant for another machine
    script, training, model_args, mixture, found, launch_of_file, launch = parse(parser, line, may_launch=True)
    check_arguments_of(line.method, training)
    of_file = [x for x in launch_of_file if x.startswith("--") and x.removeprefix("--") not in ignored]
    for_launch = [] if asks_for_one_process([*launch_of_file, *launch]) else [*of_file, *launch]
    if for_launch:
        command = line.prog.split()[1]
        raise CommandError(f"`{for_launch[0]}` is for `accelerate launch`, which `{command}` does not run. {instead}.")
    return Parsed(script, training, model_args, mixture, [], []), found


def check_memory(device_memory: float) -> None:
    """Raise `CommandError` unless `device_memory` is a positive number of GiB, and not one of bytes."""
    if not 0 < device_memory <= _MOST_MEMORY:
        raise CommandError(
            f"`--device_memory` must be a number above 0, in GiB, and at most {_MOST_MEMORY:,}, got {device_memory}."
        )


def _check_size(rows: int, longest: int, given: int) -> None:
    """Raise `CommandError` for a micro-batch that is too large to be counted: each row takes time, each token memory.

    Args:
        given (`int`): `per_device_train_batch_size`.
    """
    what = f"`--per_device_train_batch_size {given}` makes micro-batches of"
    lower = "Lower it, and raise `--gradient_accumulation_steps`."
    if rows > MOST_ROWS:
        raise CommandError(f"{what} {rows:,} rows, but `estimate` counts at most {MOST_ROWS:,}. {lower}")
    if rows * longest > _MOST_TOKENS:
        raise CommandError(f"{what} {rows * longest:,} tokens, but `estimate` counts at most {_MOST_TOKENS:,}. {lower}")


def check_covered(parsed: Parsed, asked: EstimateArguments) -> None:
    """Raise `CommandError` if the memory of these arguments, or of this engine, is not estimated."""
    _check_devices(asked)
    _refuse_what_is_not_covered(parsed.training, parsed.model, asked.engine)


def _longest_row(method: str, training: Any, asked: EstimateArguments) -> int:
    """Return the number of tokens in the longest row that the arguments allow."""
    if method in _SAMPLES:
        if training.max_completion_length < 1:
            raise CommandError(f"`--max_completion_length` must be 1 or more, got {training.max_completion_length}.")
        return int(asked.prompt_length + training.max_completion_length)
    if training.max_length is None:
        raise CommandError("`--max_length` is None, so the longest row is unknown. Set it to a number.")
    return int(training.max_length)


def step_of(method: str, parsed: Parsed, asked: EstimateArguments) -> Step:
    """Return the training step with these arguments, on one device, with the longest rows.

    Raises:
        `CommandError`: `estimate` does not cover an argument.
    """
    training = parsed.training
    check_covered(parsed, asked)
    prompt_length, policy = asked.prompt_length, policy_of(parsed)
    longest = min(_longest_row(method, training, asked), policy.positions)
    if longest < 2:
        name = "max_completion_length" if method in _SAMPLES else "max_length"
        raise CommandError(f"`--{name}` leaves rows of {longest} tokens. Set it so that they have 2 or more.")
    if not 0 <= prompt_length < longest:
        raise CommandError(f"`--prompt_length` must be from 0 to {longest - 1}, got {prompt_length}.")
    adapted = parsed.model.use_peft or is_adapter(parsed.model.model_name_or_path)
    has_reference = _has_reference(method, training)
    offloads = bool(getattr(training, "activation_offloading", False))
    hosts = getattr(training, "reference_device", None) is not None
    _check_host_memory(training, asked, adapted)
    tokens = longest - 1  # the model predicts nothing from a row's last token
    rows = training.per_device_train_batch_size * (2 if method == "dpo" else 1)
    _check_size(rows, longest, training.per_device_train_batch_size)
    return Step(
        model=policy.make,
        rows=rows,
        tokens=tokens,
        scored=tokens - max(prompt_length - 1, 0),
        outputs=("log_probs", "entropy", *_OUTPUTS.get(method, ())),
        head=training.head,
        chunk_size=training.head_chunk_size,
        device=torch.device(asked.device),
        engine=cast(Engine, asked.engine),
        devices=asked.num_devices,
        autocast=torch.bfloat16 if training.bf16 else torch.float16 if training.fp16 else None,
        accumulates=training.gradient_accumulation_steps > 1,
        optimizer=partial(_optimizer, training),
        reference=policy.make_reference if has_reference and not adapted else None,
        shares=training.share_prompts is not False,
        offloads=offloads,
        hosts_reference=hosts,
        reference_batches=has_reference
        * (2 if method == "kto" and kto_loss_type(training.loss_type).has_kl_term else 1),
    )


def _check_host_memory(training: Any, asked: EstimateArguments, adapted: bool) -> None:
    """Raise `CommandError` for options of host memory that the trainer refuses, or that save nothing."""
    given = {
        "activation_offloading": getattr(training, "activation_offloading", False),
        "reference_device": getattr(training, "reference_device", None),
    }
    name = next((name for name, value in given.items() if value), None)
    if name is not None and asked.device == "cpu":
        raise CommandError(f"`--{name}` saves nothing on a CPU, whose memory is host memory. Leave it out.")
    if given["reference_device"] is None:
        return
    if adapted and training.beta != 0:
        raise CommandError(
            "`--reference_device` is for a separate reference model, but an adapter's policy and reference share their "
            "weights. Leave it out."
        )
    if training.sync_ref_model:
        raise CommandError(
            "`--reference_device` needs a reference that does not change, but `--sync_ref_model` changes it. Leave one "
            "of the two out."
        )


def _has_reference(method: str, training: Any) -> bool:
    if method == "sft":
        return False
    return bool(training.beta != 0 if method in _SAMPLES else not training.precompute_ref_log_probs)


def _optimizer(training: Any, model: Any) -> torch.optim.Optimizer:
    """Return the optimizer that the trainer makes for `model`."""
    trainer: Any = SimpleNamespace(args=training, model=model, optimizer=None, optimizer_cls_and_kwargs=None)
    trainer.get_decay_parameter_names = partial(Trainer.get_decay_parameter_names, trainer)
    trainer.get_optimizer_cls_and_kwargs = Trainer.get_optimizer_cls_and_kwargs
    with warnings.catch_warnings():  # of a log line with the number of weights that have states of 32 bits
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        return Trainer.create_optimizer(trainer)


class Policy(NamedTuple):
    make: Callable[[], Any]
    make_reference: Callable[[], Any]
    positions: int  # in the config
    dtype: torch.dtype
    config: Any
    name: str  # of the model, or of an adapter's base


def policy_of(parsed: Parsed) -> Policy:
    """Return a function that makes the policy from its config alone, and the policy's longest row and dtype."""
    _, training, model_args, *_ = parsed
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
            f"`estimate` does not cover `--model_name_or_path {name}`, whose weights are quantized. Pass the "
            "model without quantization."
        )
    dtype = config.dtype if given["dtype"] == "auto" else getattr(torch, given["dtype"])

    def load() -> Any:
        attention = given["attn_implementation"]
        return AutoModelForCausalLM.from_config(deepcopy(config), dtype=dtype, attn_implementation=attention, **trust)

    def make() -> Any:
        model, quantization = load(), get_quantization_config(model_args)
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

    positions = getattr(config.get_text_config(), "max_position_embeddings", None) or 2**20

    def make_reference() -> Any:
        return load().eval().requires_grad_(False)

    return Policy(make, make_reference, positions, dtype or torch.float32, config, name)


def _refuse_what_is_not_covered(training: Any, model_args: Any, engine: str) -> None:
    given = {x: getattr(training, x, None) or getattr(model_args, x, None) for x in _WATCHED}
    covered = {
        "optim": given["optim"] in OPTIMIZERS[engine],
        "model_init_kwargs": set(given["model_init_kwargs"] or ()) <= _OF_MODEL,
        **dict.fromkeys(_WITH_WHOLE_WEIGHTS, engine in OF_WHOLE_WEIGHTS),
    }
    for name, value in given.items():
        if value and not covered.get(name):
            value = getattr(value, "value", value)  # of an enumeration
            if name in _WITH_WHOLE_WEIGHTS or (name == "optim" and value in OPTIMIZERS["one_process"]):
                value = f"{value}` with `--engine {engine}"
            allowed = f"one of {', '.join(_ON_SHARDS)}" if name == "optim" else "its default"
            raise CommandError(
                f"`estimate` does not cover `--{name} {value}`. Set it to {allowed} to estimate everything else."
            )
    if getattr(training, "packing", False) and training.packing_strategy != "wrapped":
        raise CommandError(
            f"`estimate` does not cover `--packing` with `--packing_strategy {training.packing_strategy}`, which joins "
            "the rows of a batch into one. Leave `--packing` out, or pass `--packing_strategy wrapped`."
        )


def _check_devices(asked: EstimateArguments) -> None:
    if asked.engine == "zero3":
        raise CommandError(
            "`estimate` does not cover `--engine zero3`, which keeps gathered weights for a time that depends on the "
            "order of the layers. Pass `--engine fsdp2`, which also shards the weights."
        )
    alone = asked.engine == "one_process"
    if asked.num_devices > _MOST_DEVICES:
        raise CommandError(f"`--num_devices` must be at most {_MOST_DEVICES:,}, got {asked.num_devices}.")
    if asked.num_devices < 1 or alone != (asked.num_devices == 1):
        several = ", ".join(x for x in ENGINES if x != "one_process")
        wanted = f"1, or `--engine` to one of {several}" if alone else "2 or more, or leave `--engine` out"
        raise CommandError(
            f"`--num_devices` is {asked.num_devices} with `--engine {asked.engine}`. Set `--num_devices` to {wanted}."
        )


def _longest(step: Step, policy: Policy, limit: int) -> str:
    prompt = step.tokens - step.scored

    def bytes_of(length: int) -> int:
        tokens = length - 1
        return memory_of_step(replace(step, tokens=tokens, scored=max(1, tokens - prompt))).peak

    most = min(policy.positions, _MOST_TOKENS // step.rows)
    longest = longest_that_fits(bytes_of, limit, step.tokens + 1, most)
    whole = ", the longest that the model takes" if longest + 64 > policy.positions else ""
    if not whole and longest + 64 > most:
        whole = ", the longest that `estimate` counts"
    rows = f"rows of {longest:,} tokens fit" if longest else "no row of 64 tokens fits"
    return f"{rows} in {limit / _GIB:.4g} GiB{whole}"


def _table(method: str, step: Step, policy: Policy, memory: StepMemory) -> str:
    rows = f"{step.rows} rows" + f" ({step.rows // 2} pairs)" * (method == "dpo")
    on_host = f", without {readable(memory.offloaded)} in host memory" if step.offloads else ""
    reference = "a separate model" if step.reference else "no separate model"
    if memory.hosted:
        reference += f", with {readable(memory.hosted)} in host memory"
    gathered = ", and gathered weights" if step.engine == "fsdp2" else ""
    copies = ", and fp32 copies of trained parameters" if step.engine.startswith("zero") else ""
    where = "one process" if step.devices == 1 else f"one of {step.devices} devices under {ENGINES[step.engine]}"
    autocast = "" if step.autocast is None else f" with {_name(step.autocast)} autocast"
    lines = [
        ("weights", memory.weights, "of the policy, with its adapters if any"),
        ("reference", memory.reference, reference),
        ("optimizer", memory.optimizer, "its states" + copies if memory.optimizer else "no states"),
        ("gradients", memory.gradients, "after the backward pass"),
        *[("buckets", memory.buckets, "in which the engine averages gradients")] * (memory.buckets > 0),
        ("activations", memory.activations, "after the forward pass of the backbone" + gathered + on_host),
        ("head", memory.head, "added by the LM head's forward pass"),
        ("peak", memory.peak, "at once, in a forward, backward or optimizer step"),
    ]
    title = wrapped(
        f"{rows} of {step.tokens + 1:,} tokens per micro-batch, {_name(policy.dtype)} weights{autocast}, "
        f"{where} on {step.device.type}"
    )
    return "\n".join([title, "", *(wrapped(text, f"{name:<13}{readable(size):>12}   ") for name, size, text in lines)])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def readable(size: int) -> str:
    """Return a number of bytes in GiB, or in MiB if it is below one."""
    return f"{size / _GIB:.3f} GiB" if size >= _GIB else f"{size / 2**20:.1f} MiB"
