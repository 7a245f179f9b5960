"""The arguments and engines whose memory is estimated: those whose estimates were compared with measurements."""

from .run import ArgumentError, Run

ENGINES = {"one_process": "one process", "ddp": "DDP", "fsdp2": "FSDP2", "zero1": "ZeRO-1", "zero2": "ZeRO-2"}
ENGINES_OF_CPU = ("one_process", "ddp")  # accelerate runs no others on a CPU
WHOLE_WEIGHT_ENGINES = ("one_process", "ddp")
_SHARDED_OPTIMIZERS = ("adamw_torch_fused", "adamw_torch", "sgd")
_WHOLE_WEIGHT_OPTIMIZERS = (
    "adafactor",
    "adagrad",
    "rmsprop",
    "adamw_8bit",
    "adamw_bnb_8bit",
    "ademamix",
    "ademamix_8bit",
    "lion_8bit",
    "lion_32bit",
    "rmsprop_bnb",
    "rmsprop_bnb_8bit",
    "rmsprop_bnb_32bit",
    "paged_adamw_8bit",
    "paged_adamw_32bit",
    "paged_lion_8bit",
    "paged_lion_32bit",
)
OPTIMIZERS = {
    engine: _SHARDED_OPTIMIZERS + _WHOLE_WEIGHT_OPTIMIZERS * (engine in WHOLE_WEIGHT_ENGINES) for engine in ENGINES
}
_MOST_DEVICES = 2**16
# The keywords for models that an estimate reads, or that change no memory
_MODEL_KEYWORDS = {"dtype", "attn_implementation", "trust_remote_code", "use_cache"}
_MODEL_ARGUMENTS = ("model_init_kwargs", "teacher_model_init_kwargs")
_WHOLE_WEIGHT_ARGUMENTS = ("activation_offloading", "load_in_4bit", "reference_device")
# Arguments of which some values are not covered
_CHECKED_ARGUMENTS = (
    "optim",
    *_MODEL_ARGUMENTS,
    "load_in_8bit",
    "deepspeed",
    "fsdp",
    "torch_compile",
    *_WHOLE_WEIGHT_ARGUMENTS,
    "use_liger_kernel",
    "cast_lm_head_to_fp32",
    "label_smoothing_factor",
    "teacher_device",
    "as_trl",
)


def check_covered(run: Run) -> None:
    """Raise `ArgumentError` if the memory of these arguments, or of this engine, is not estimated."""
    _check_devices(run)
    values = {name: getattr(run.training, name, None) or getattr(run.model, name, None) for name in _CHECKED_ARGUMENTS}
    has_whole_weights = run.engine in WHOLE_WEIGHT_ENGINES
    is_covered = {
        "optim": values["optim"] in OPTIMIZERS[run.engine],
        **{name: set(values[name] or ()) <= _MODEL_KEYWORDS for name in _MODEL_ARGUMENTS},
        **dict.fromkeys(_WHOLE_WEIGHT_ARGUMENTS, has_whole_weights),
    }
    for name, value in values.items():
        if value and not is_covered.get(name):
            value = getattr(value, "value", value)  # of an enumeration
            if name in _WHOLE_WEIGHT_ARGUMENTS or (name == "optim" and value in OPTIMIZERS["one_process"]):
                value = f"{value}` with `--engine {run.engine}"
            allowed_values = f"one of {', '.join(_SHARDED_OPTIMIZERS)}" if name == "optim" else "its default"
            raise ArgumentError(
                f"`estimate` does not cover `--{name} {value}`. Set it to {allowed_values} to estimate everything else."
            )
    if getattr(run.training, "packing", False) and run.training.packing_strategy != "wrapped":
        raise ArgumentError(
            f"`estimate` does not cover `--packing` with `--packing_strategy {run.training.packing_strategy}`, which "
            "joins the rows of a batch into one. Leave `--packing` out, or pass `--packing_strategy wrapped`."
        )


def _check_devices(run: Run) -> None:
    if run.method == "distillation" and run.engine not in WHOLE_WEIGHT_ENGINES:
        raise ArgumentError(
            f"`estimate` does not cover distillation with `--engine {run.engine}`, which shards the teacher too. Pass "
            "`--engine ddp`."
        )
    if run.engine == "zero3":
        raise ArgumentError(
            "`estimate` does not cover `--engine zero3`, which keeps gathered weights for a time that depends on the "
            "order of the layers. Pass `--engine fsdp2`, which also shards the weights."
        )
    is_one_process = run.engine == "one_process"
    if run.devices > _MOST_DEVICES:
        raise ArgumentError(f"`--num_devices` must be at most {_MOST_DEVICES:,}, got {run.devices}.")
    if run.devices < 1 or is_one_process != (run.devices == 1):
        several = ", ".join(engine for engine in ENGINES if engine != "one_process")
        remedy = f"1, or `--engine` to one of {several}" if is_one_process else "2 or more, or leave `--engine` out"
        raise ArgumentError(
            f"`--num_devices` is {run.devices} with `--engine {run.engine}`. Set `--num_devices` to {remedy}."
        )
