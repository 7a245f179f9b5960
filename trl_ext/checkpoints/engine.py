"""Which engine wrote a checkpoint, by its files, and what the one that runs now cannot load of it."""

import re
from pathlib import Path

_FSDP = "pytorch_model_fsdp"  # accelerate's name
_WHOLE_WEIGHTS = re.compile(r"(model|adapter_model|pytorch_model|adapter)\.(safetensors|bin)(\.index\.json)?")
_PARTITIONED_WEIGHTS = re.compile(r"zero_pp_rank_\d+_mp_rank_\d+_model_states\.pt")
_OPTIMIZER_OF_RANK = re.compile(r"(bf16_)?zero_pp_rank_\d+_mp_rank_\d+_optim_states\.pt")


def format_of(folder: Path) -> str:
    """The engine that wrote a checkpoint, and in which form; empty for one process, DDP and tensor parallelism."""
    if (folder / f"{_FSDP}.bin").exists():
        return fsdp_format("FULL_STATE_DICT")
    if (folder / f"{_FSDP}_0").is_dir():
        return fsdp_format("SHARDED_STATE_DICT")
    if not any(folder.glob("global_step*")):
        return ""
    tag = folder / "latest"
    step = folder / tag.read_text().strip() if tag.exists() else max(folder.glob("global_step*"))
    names = [path.name for path in step.iterdir()] if step.is_dir() else []
    processes = sum(_OPTIMIZER_OF_RANK.fullmatch(name) is not None for name in names)
    return deepspeed_format(3 if any(map(_PARTITIONED_WEIGHTS.fullmatch, names)) else 2 if processes else 0, processes)


def fsdp_format(state_dict_type: str) -> str:
    """What accelerate's FSDP writes with a `state_dict_type`."""
    return f"FSDP with {state_dict_type}"


def deepspeed_format(stage: int, processes: int) -> str:
    """What DeepSpeed writes."""
    if stage == 0:
        return "DeepSpeed"
    return f"DeepSpeed {'ZeRO-3' if stage == 3 else 'ZeRO-1 or ZeRO-2'} on {processes} processes"


def why_not_loaded(folder: Path, runs: str, engine: str) -> str | None:
    """Why what runs cannot resume from a checkpoint; `None` where it can.

    Args:
        folder (`Path`): the checkpoint.
        runs (`str`): the engine that runs now, as `format_of` names it.
        engine (`str`): its name in the message, such as `"DDP"`.
    """
    written = format_of(folder)
    names = [path.name for path in folder.iterdir()]
    has_weights = any(map(_WHOLE_WEIGHTS.fullmatch, names))
    if written == runs or (not runs and has_weights and written.startswith("DeepSpeed")):
        return None
    if written and runs and (written.startswith(runs) or runs.startswith(written)):
        return None  # DeepSpeed without ZeRO, of which the files say less
    if not written and runs.startswith("FSDP") and "optimizer.pt" not in names and "adapter_config.json" in names:
        return None  # an adapter without an optimizer, which transformers loads under FSDP too
    anew = "start a new run from its weights."
    if not has_weights and written.startswith("DeepSpeed"):
        anew = "put its weights together for a new run: `zero_to_fp32.py` in it does."
    elif not has_weights:
        anew = "put its weights together for a new run: `accelerate merge-weights` does."
    return (
        f"{folder} was written under {written or 'neither FSDP nor DeepSpeed'}, and {runs or engine} runs now, which "
        f"cannot resume from it. Launch training as it was launched then; or {anew}"
    )
