"""Runs cases of a test under `accelerate launch` on the CPU with any engine, and checks that the engine ran.

It is like `ranks.py`, whose cases and reports it uses, but accelerate starts the processes. Run as a script, this file
is one rank: `accelerate launch --config_file FILE launch.py --script FILE --engine zero3 --folder DIR CASE ...`.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ranks

_MULTI_GPU: dict[str, Any] = {
    "distributed_type": "MULTI_GPU",
    "mixed_precision": "no",
}  # accelerate's word for torch.distributed.run
_FSDP: dict[str, Any] = {
    "distributed_type": "FSDP",
    "mixed_precision": "no",
    "fsdp_config": {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": True,
        "fsdp_offload_params": False,
        "fsdp_cpu_ram_efficient_loading": False,
        "fsdp_state_dict_type": "FULL_STATE_DICT",
        "fsdp_activation_checkpointing": False,
    },
}


SMALL_BUCKET = 2**19  # elements


def _zero(stage: int, **settings: Any) -> dict[str, Any]:
    optimization = {"stage": stage, **settings}
    automatic = ("gradient_accumulation_steps", "gradient_clipping", "train_batch_size")
    deepspeed = {
        "zero_optimization": optimization,
        "train_micro_batch_size_per_gpu": "auto",
        **dict.fromkeys(automatic, "auto"),
        "bf16": {"enabled": "auto"},
    }
    return {"distributed_type": "DEEPSPEED", "deepspeed": deepspeed}


@dataclass(frozen=True)
class Engine:
    """The settings that launch an engine.

    Args:
        config (`dict[str, Any]`): for `accelerate launch --config_file`; its `"deepspeed"` goes into a separate file.
        environment (`dict[str, str]`): set for the launch.
        as_accelerators (`bool`): whether accelerate must take the ranks for GPUs, as some engines require.
        distributed (`tuple[str, ...]`): the sizes of transformers' `DistributedConfig` that are the number of ranks.
        replicates_tokens (`bool`): whether all ranks get the same batch.
    """

    config: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)
    as_accelerators: bool = False
    distributed: tuple[str, ...] = ()
    replicates_tokens: bool = False


_CPU = {"ACCELERATE_USE_CPU": "true"}
_DEEPSPEED = {"DS_ACCELERATOR": "cpu"}
_LIKE_GPUS = {"ACCELERATE_TORCH_DEVICE": "cpu"}
ENGINES = {
    "ddp": Engine(_MULTI_GPU, _CPU),
    "fsdp2": Engine(_FSDP, _LIKE_GPUS, as_accelerators=True),
    "fsdp2_native": Engine(_MULTI_GPU, _CPU, distributed=("fsdp_size",)),
    "zero1": Engine(_zero(1), _DEEPSPEED),
    "zero2": Engine(_zero(2), _DEEPSPEED),
    # Parameters below the threshold stay whole on every rank, which would be all of a tiny model
    "zero3": Engine(_zero(3, stage3_param_persistence_threshold=0, stage3_prefetch_bucket_size=0), _DEEPSPEED),
    # With DeepSpeed's default, the bucket would be larger than all else
    "small_buckets_zero1": Engine(_zero(1, reduce_bucket_size=SMALL_BUCKET), _DEEPSPEED),
    "small_buckets_zero2": Engine(_zero(2, reduce_bucket_size=SMALL_BUCKET), _DEEPSPEED),
    "tp": Engine(_MULTI_GPU, _LIKE_GPUS, as_accelerators=True, distributed=("tp_size",), replicates_tokens=True),
}


class LaunchedRank(ranks.Rank):
    """The argument of a case: its rank, the number of ranks, and the engine, a name in [`ENGINES`]."""

    @property
    def replicates_tokens(self) -> bool:
        return ENGINES[self.engine].replicates_tokens

    @property
    def is_zero(self) -> bool:
        return "zero" in self.engine

    def prepare(self) -> None:
        if ENGINES[self.engine].as_accelerators:
            ranks.be_like_gpus()
        if self.is_zero:
            # Otherwise DeepSpeed compiles an all-reduce over shared memory, which only inference uses. If it cannot be
            # compiled, DeepSpeed uses gloo (deepspeed/comm/torch.py: build_shm_op)
            import deepspeed.ops

            deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}

    def training_arguments(self) -> dict[str, Any]:
        """Return fields of the trainer's config that this engine needs on the CPU."""
        return {"ddp_backend": "gloo"} if self.is_zero else {}

    def model_arguments(self) -> dict[str, Any]:
        """Return keyword arguments of `from_pretrained` that this engine needs."""
        from transformers.distributed import DistributedConfig

        sizes = dict.fromkeys(ENGINES[self.engine].distributed, self.processes)
        if "tp_size" in sizes:
            sizes["tp_plan"] = "auto"
        return {"distributed_config": DistributedConfig(**sizes)} if sizes else {}

    def check(self, trainer: Any) -> None:
        """Assert that `trainer`, which has trained, did so under this engine, on this many ranks."""
        import torch.distributed as dist
        from torch.distributed.fsdp import FSDPModule
        from torch.distributed.tensor import DTensor

        accelerator, wrapped = trainer.accelerator, trainer.model_wrapped
        assert dist.get_backend() == "gloo"
        assert accelerator.device.type == "cpu"
        # The trainer's accelerator may count a tensor-parallel group as one process
        assert dist.get_world_size() == accelerator.state.num_processes == self.processes > 1
        assert dist.get_rank() == accelerator.state.process_index == self.index
        kind = (accelerator.distributed_type.value, *[of.__name__ for of in type(wrapped).__mro__])
        params = list(wrapped.parameters())
        if self.engine == "ddp":
            assert kind[:2] == ("MULTI_CPU", "DistributedDataParallel"), kind
        elif self.engine == "fsdp2":
            assert kind[0] == "FSDP" and accelerator.is_fsdp2 and "FSDPModule" in kind, kind  # noqa: PT018
            assert all(isinstance(param.data, DTensor) for param in params)
        elif self.engine == "fsdp2_native":
            assert any(isinstance(module, FSDPModule) for module in wrapped.modules()), kind  # within PEFT's
            # Parameters of PEFT that are whole on each rank, which must still sum their gradients
            base = [param for name, param in wrapped.named_parameters() if "lora_" not in name]
            assert base and all(isinstance(param.data, DTensor) for param in base), kind  # noqa: PT018
        elif self.engine == "tp":
            model = trainer.accelerator.unwrap_model(wrapped)
            head = model.get_output_embeddings().weight
            assert isinstance(head, DTensor)
            assert head.device_mesh.mesh_dim_names == ("tp",)
            assert head.to_local().shape[0] < head.shape[0]
            assert "DistributedDataParallel" not in kind
        else:
            assert kind[:2] == ("DEEPSPEED", "DeepSpeedEngine"), kind
            assert wrapped.zero_optimization_stage() == int(self.engine[-1])
            if self.engine == "zero3":
                assert all(param.numel() == 0 and param.ds_numel > 0 for param in params)
        self.checked = True

    def whole(self, params: dict[str, Any]) -> dict[str, Any]:
        """Return whole copies of `params`, gathered by the engine. Every rank must call it with the same."""
        from torch.distributed.tensor import DTensor

        gathered: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self.engine == "zero3":
            import deepspeed

            gathered = deepspeed.zero.GatheredParameters(list(params.values()))
        with gathered:
            return {
                name: (param.full_tensor() if isinstance(param, DTensor) else param).detach().clone()
                for name, param in params.items()
            }

    def without_gradient_sync(self, trainer: Any) -> None:
        """Make `trainer`, whose engine is prepared, use only this rank's gradients, as if all ranks had them."""
        from torch.distributed.fsdp import FSDPModule

        wrapped = trainer.model_wrapped
        if self.engine == "ddp":
            wrapped.register_comm_hook(None, _own_bucket)
            return
        for module in wrapped.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(_OwnReduceScatter())
        # Tensor parallelism, DeepSpeed, and transformers for an adapter on native FSDP2 sum during the backward. For
        # DeepSpeed, only its own backward is replaced, because accelerate's also takes the optimizer step
        owner = wrapped if self.is_zero else trainer.accelerator
        backward = owner.backward

        def alone(*args: Any, **kwargs: Any) -> Any:
            with _own_sums(self.processes, self.is_zero):
                return backward(*args, **kwargs)

        owner.backward = alone


def _own_bucket(state, bucket):  # DDP requires its own class as the annotation of the bucket
    import torch

    own = torch.futures.Future()
    own.set_result(bucket.buffer())
    return own


class _OwnReduceScatter:
    """Replaces FSDP2's reduce-scatter: each rank takes its part of its own gradient."""

    def allocate(self, size: Sequence[int], *, dtype: Any, device: Any) -> Any:
        import torch

        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> None:
        output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])


@contextlib.contextmanager
def _own_sums(processes: int, deepspeed: bool) -> Iterator[None]:
    """Make a sum over ranks return this rank's tensor times their number, and a mean the tensor, in the block."""
    import torch.distributed as dist
    from torch.distributed import _functional_collectives as functional

    def in_place(tensor: Any, *args: Any, op: Any = dist.ReduceOp.SUM, **kwargs: Any) -> None:
        if op == dist.ReduceOp.SUM:
            tensor.mul_(processes)

    def reduce_scatter_tensor(output_tensor: Any, input_tensor: Any, *args: Any, **kwargs: Any) -> None:
        output_tensor.copy_(input_tensor.chunk(processes)[dist.get_rank()] * processes)

    if deepspeed:
        from deepspeed.comm.comm import cdb as backend

        names = {"all_reduce": in_place, "reduce": in_place, "reduce_scatter_tensor": reduce_scatter_tensor}
        patches = [patch.object(backend, name, own) for name, own in names.items()]
    else:
        patches = [
            patch.object(dist, "all_reduce", in_place),
            patch.object(functional, "all_reduce", lambda tensor, *args, **kwargs: tensor * processes),
        ]
    with contextlib.ExitStack() as stack:
        for own in patches:
            stack.enter_context(own)
        yield


def launch(
    script: Path | str, cases: Sequence[str], engine: str, folder: Path, processes: int = 2, timeout: float = 300.0
) -> dict[str, list[Any]]:
    """`accelerate launch` the `cases` of the file `script` under `engine`, and return what each rank returned.

    Args:
        script (`Path`): file with a dict `CASES` of functions `(rank: LaunchedRank) -> Any`.
        cases (`Sequence[str]`): names in `CASES`, run in this order on every rank.
        engine (`str`): a name in `ENGINES`.
        folder (`Path`): an empty folder for files of this launch, `LaunchedRank.folder` of its cases.
        processes (`int`): number of ranks.
        timeout (`float`): seconds that the launch may take.

    Returns:
        `dict[str, list]`: for each case, what rank 0, 1, ... returned (anything `torch.save` writes).

    Raises:
        `AssertionError`: a rank failed, or the ranks did not end in time. No process is left behind.
    """
    import torch

    how = ENGINES[engine]
    environment = (
        os.environ
        | how.environment
        | {
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "PYTHONPATH": ranks.python_path(),
        }
    )
    command = [
        *(sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(_config(how, folder, processes))),
        *(__file__, "--script", str(script), "--engine", engine, "--folder", str(folder), *cases),
    ]
    output = folder / "launcher.output"
    with output.open("wb") as stream:
        launcher = subprocess.Popen(command, env=environment, stdout=stream, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + timeout
    try:
        while launcher.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if launcher.poll() != 0:
            raise AssertionError(_report(launcher, folder, output, processes))
    finally:
        _end(launcher, folder)
    results = [torch.load(ranks.file_of(folder, rank, "results"), weights_only=False) for rank in range(processes)]
    return {case: [of_rank[case] for of_rank in results] for case in cases}


def _config(how: Engine, folder: Path, processes: int) -> Path:
    """Write accelerate's config file (JSON is YAML), and DeepSpeed's if there is one."""
    config = {
        "compute_environment": "LOCAL_MACHINE",
        "num_machines": 1,
        "machine_rank": 0,
        "num_processes": processes,
        "main_process_port": 0,
        **how.config,
    }
    if "deepspeed" in config:
        file, deepspeed = folder / "deepspeed.json", config.pop("deepspeed")
        file.write_text(json.dumps(deepspeed))
        taken_apart = deepspeed["zero_optimization"]["stage"] == 3  # while the model is loaded
        config["deepspeed_config"] = {"deepspeed_config_file": str(file), "zero3_init_flag": taken_apart}
    path = folder / "accelerate.json"
    path.write_text(json.dumps(config))
    return path


def _report(launcher: "subprocess.Popen[bytes]", folder: Path, output: Path, processes: int) -> str:
    """Return the failure of the rank that failed first, or the stack of each rank if they hang."""
    report = []
    if launcher.poll() is None:
        report.append("The ranks hang.")
        for process in _pids(folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGUSR1)
        time.sleep(1)
        stacks = [ranks.file_of(folder, rank, "stack") for rank in range(processes)]
        report += [f"stack of rank {rank}:\n{path.read_text()}" for rank, path in enumerate(stacks) if path.exists()]
    failures = sorted(folder.glob("rank*.failure"), key=lambda path: path.stat().st_mtime_ns)
    report += [f"{path.stem} failed first:\n{path.read_text()}" for path in failures[:1]]
    return "\n\n".join([*report, f"the end of the output:\n{output.read_text()[-4000:]}"])


def _pids(folder: Path) -> list[int]:
    return [int(path.read_text()) for path in folder.glob("rank*.pid")]


def _end(launcher: "subprocess.Popen[bytes]", folder: Path) -> None:
    """End the ranks one by one, because the launcher's agent starts each in a separate session."""
    for kill in (launcher.kill, *(lambda pid=pid: os.kill(pid, signal.SIGKILL) for pid in _pids(folder))):
        with contextlib.suppress(ProcessLookupError):
            kill()
    launcher.wait()


def _one_rank() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--script", type=Path, required=True)
    parser.add_argument("--engine", choices=ENGINES, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("cases", nargs="+")
    arguments = parser.parse_args()
    rank = LaunchedRank(arguments.engine, arguments.folder)
    ranks.file_of(rank.folder, rank.index, "pid").write_text(str(os.getpid()))
    ranks.serve(rank, arguments.script, arguments.cases)


if __name__ == "__main__":
    _one_rank()
