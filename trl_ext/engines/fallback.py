"""Whether the engine that runs is another than the one asked for, and what to do.

Nobody says so but this file. Where it comes about, in accelerate 1.15:

- `commands/launch.py`, `launch_command`: for `--cpu` and `MULTI_CPU`, `simple_launcher` starts one process.
- `state.py`, `PartialState._prepare_backend`: a process that finds no accelerator and is not told to use the CPU is of
  type NO; the others are nothing to it, whether or not they are in one process group.
- `state.py`, `AcceleratorState.__init__`: with `cpu=True` neither FSDP nor DeepSpeed is looked at.
- `accelerator.py`, `Accelerator.__init__`: `fsdp` and `deepspeed` of the arguments stand before the launcher's.
- `accelerator.py`, `_prepare_tp`, `prepare_model`: sizes of a `ParallelismConfig` that nothing is split by.
"""

from .asked import SHARDED_PARAMETERS, TENSOR_PARALLEL, Asked, Wish
from .running import Running

_CONFIGS = "examples/accelerate_configs"
_FIND_GPU = (
    "accelerate found no GPU and was not told to use the CPU. Make the GPUs visible (`CUDA_VISIBLE_DEVICES`); or set "
    f"`ACCELERATE_USE_CPU=true`, which trains with DDP on the CPU (`{_CONFIGS}/ddp.yaml`)."
)
# What averages the gradients under an engine; else the engine's own name
_WRAPPING = {"FSDP2": "DTensor", None: "DTensor"}


def fallback(asked: Asked, running: Running) -> str | None:
    """What was asked for, what runs, and what to do; `None` where the two agree.

    Of accelerate's types for TPU and Megatron-LM nothing is known here, and nothing said.
    """
    known = running.distributed_type in ("NO", "FSDP", "DEEPSPEED") or running.distributed_type.startswith("MULTI_")
    if not known:
        return None
    return (
        _unrelated(asked, running)
        or _other_engine(asked, running)
        or _twice(running)
        or _other_wrapping(running)
        or _split_by_deepspeed(running)
    )


def _unrelated(asked: Asked, running: Running) -> str | None:
    """Of processes that should train together, and do not."""
    if asked.processes is None and running.processes == 1:
        return (
            f"Several processes were asked for (by {asked.processes_by}), but one runs: for `--cpu`, and for "
            "`MULTI_CPU` in its config, `accelerate launch` starts one. For several on the CPU, set "
            f"`ACCELERATE_USE_CPU=true` and launch with `{_CONFIGS}/ddp.yaml`. For one, say `--num_processes 1`, and "
            "unset `MASTER_ADDR` and `MASTER_PORT` if they are your own."
        )
    together = max(running.in_group, asked.processes or 1)
    if together > running.processes:
        by = f" (by {asked.processes_by})" if asked.processes_by else ""
        return (
            f"{together} processes were asked for{by}, but what runs is this one alone ({running.device}), unrelated "
            f"to the others: {_FIND_GPU}"
        )
    if running.distributed_type == "NO" and running.processes > 1:
        return (
            f"{running.processes} processes were asked for (by {asked.processes_by}), and they share the data, but "
            f"each trains a model of its own ({running.device}): {_FIND_GPU} `ddp_backend` says neither."
        )
    return None


def _other_engine(asked: Asked, running: Running) -> str | None:
    """Of an engine that was asked for and does not run."""
    for wish in asked.wishes:
        if wish.engine not in running.provides:
            what = wish.engine[0].upper() + wish.engine[1:]
            return f"{what} was asked for (by {wish.by}), but what runs is {running}. {_remedy(wish, asked, running)}"
    return None


def _remedy(wish: Wish, asked: Asked, running: Running) -> str:
    if "distributed_config" in wish.by:
        return (
            "The model was not loaded with it: TRL leaves `model_init_kwargs` out where it is given a model. Give it "
            "the model's name or path, or load the model with `from_pretrained(..., distributed_config=...)`."
        )
    if wish.engine == TENSOR_PARALLEL:
        return (
            "`parallelism_config` splits no layer. Give the sizes in `model_init_kwargs`, as `distributed_config`, "
            f"with a model's name or path, as `{_CONFIGS}/tp_fsdp2.yaml` shows."
        )
    if wish.engine == SHARDED_PARAMETERS:
        return f"`parallelism_config` shards nothing without FSDP2: launch with `{_CONFIGS}/fsdp2.yaml`."
    other = next((x for x in asked.wishes if x.engine in running.provides), None)
    if other is not None:
        return f"That is what {other.by} asks for. Ask for one engine, in one place."
    name = "FSDP" if wish.engine.startswith("FSDP") else "DeepSpeed"
    if asked.cpu:
        on_cpu = (
            "" if name == "FSDP" else ", where `DS_ACCELERATOR=cpu` and `ddp_backend='gloo'` have it run on the CPU"
        )
        return (
            f"accelerate leaves {name} out where it is told to use the CPU (`ACCELERATE_USE_CPU`, `use_cpu`): do not "
            f"tell it{on_cpu}; or launch with `{_CONFIGS}/ddp.yaml` for DDP on the CPU."
        )
    if running.device == "cpu" and running.processes == 1:
        return _FIND_GPU
    return f"Launch with `accelerate launch` and a config of `{_CONFIGS}`."


def _twice(running: Running) -> str | None:
    """Of a model that transformers has sharded, and accelerate is to shard again."""
    if running.fsdp_version is not None and running.sharded_at_loading:
        return (
            "The model was sharded as it was loaded (`distributed_config`), and the config of `accelerate launch`, or "
            f"the argument `fsdp`, asks to shard it again. Leave out one: launch with `{_CONFIGS}/tp_fsdp2.yaml`."
        )
    return None


def _split_by_deepspeed(running: Running) -> str | None:
    """Of layers that DeepSpeed splits: its head holds a share of the vocabulary, and nothing on it says so."""
    if running.autotp_size > 1:
        return (
            f"DeepSpeed's config splits layers over {running.autotp_size} processes "
            f"(`tensor_parallel.autotp_size={running.autotp_size}`). The head's weight is then a plain tensor with a "
            "share of the vocabulary's rows, and log-probs formed from it would be wrong. Leave `autotp_size` out; for "
            f"tensor parallelism give `model_init_kwargs` a `distributed_config`, with `{_CONFIGS}/ddp.yaml`."
        )
    return None


def _other_wrapping(running: Running) -> str | None:
    """Of a model that is not wrapped as its engine wraps it, once that is known."""
    if running.wrapping is None or running.name == "one process":
        return None
    if running.wrapping != _WRAPPING.get(running.data_engine, running.data_engine):
        return (
            f"The engine is {running}; but the model that trains is wrapped in {running.wrapping}, so gradients are "
            "not averaged as that engine does it. Something has replaced `trainer.model_wrapped` or "
            "`accelerator.prepare`."
        )
    return None
