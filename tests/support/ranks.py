"""Runs cases of a test on several gloo processes, under an engine, and returns the results.

A test file has `CASES`, which maps names to functions that take a [`Rank`], and runs some of them with
[`run_on_ranks`]. One launch of the ranks runs all of these in turn, because starting Python takes far longer than a
tiny training run. Run as a script, this file is one rank:
`python ranks.py --script FILE --engine ddp --folder DIR CASE ...`, with the environment that [`run_on_ranks`] sets.
"""

import argparse
import builtins
import faulthandler
import gc
import importlib.util
import os
import signal
import subprocess
import sys
import time
import tomllib
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

SUPPORT = Path(__file__).parent
ROOT = SUPPORT.parents[1]

# What `accelerate launch` sets. Some settings silently start another engine than the requested one,
# so each case must call `Rank.check` with its trainer.
ENGINES: dict[str, dict[str, str]] = {
    "ddp": {"ACCELERATE_USE_CPU": "true"},
    "fsdp2": {
        "ACCELERATE_TORCH_DEVICE": "cpu",
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
        "FSDP_OFFLOAD_PARAMS": "false",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
        "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
        "FSDP_ACTIVATION_CHECKPOINTING": "false",
    },
    # Synchronizing module states needs a GPU
    "fsdp1": {
        "ACCELERATE_TORCH_DEVICE": "cpu",
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "1",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
        "FSDP_SYNC_MODULE_STATES": "false",
    },
    # The case loads its model with a `DistributedConfig` of transformers, which splits it over two ranks
    "tp": {"ACCELERATE_TORCH_DEVICE": "cpu"},
}


class Rank:
    """The argument of a case: its rank, the number of ranks, and the engine.

    Attributes:
        index (`int`): index of this process, from 0.
        processes (`int`): number of ranks.
        engine (`str`): a name in `ENGINES`.
        folder (`Path`): shared by the ranks and by the cases of one launch.
    """

    def __init__(self, engine: str, folder: Path):
        self.index, self.processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.engine = engine
        self.folder = folder
        self.checked = False

    def prepare(self) -> None:
        """Prepare this process for the first case."""
        if self.engine != "ddp":
            be_like_gpus()

    def check(self, trainer: Any) -> None:
        """Assert that `trainer`, which has trained, did so under this engine, on this many ranks."""
        import torch.distributed as dist
        from accelerate.utils import DistributedType
        from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
        from torch.distributed.tensor import DTensor
        from torch.nn.parallel import DistributedDataParallel

        accelerator, wrapped = trainer.accelerator, trainer.model_wrapped
        assert dist.get_backend() == "gloo"
        assert accelerator.device.type == "cpu"
        assert dist.get_world_size() == accelerator.state.num_processes == self.processes
        assert dist.get_rank() == accelerator.state.process_index == self.index
        if self.engine == "ddp":
            assert accelerator.distributed_type == DistributedType.MULTI_CPU, accelerator.distributed_type
            assert type(wrapped) is DistributedDataParallel, type(wrapped)
        elif self.engine == "tp":
            assert accelerator.distributed_type == DistributedType.MULTI_GPU, accelerator.distributed_type
            assert accelerator.parallelism_config.tp_size == 2
            meshes = {param.device_mesh for param in wrapped.parameters() if isinstance(param.data, DTensor)}
            assert meshes
            assert any("tp" in mesh.mesh_dim_names for mesh in meshes), meshes  # only FSDP2 shards norms
            assert not isinstance(wrapped, DistributedDataParallel)
        elif self.engine == "fsdp1":
            assert accelerator.distributed_type == DistributedType.FSDP, accelerator.distributed_type
            assert isinstance(wrapped, FullyShardedDataParallel), type(wrapped)
        else:
            assert accelerator.distributed_type == DistributedType.FSDP, accelerator.distributed_type
            assert accelerator.is_fsdp2
            assert isinstance(wrapped, FSDPModule), type(wrapped)
            assert all(isinstance(param.data, DTensor) for param in wrapped.parameters())
        self.checked = True


def split(fsdp_size: int = 1) -> dict[str, Any]:
    """Return the arguments that split a model over two ranks when it is loaded, for the engine "tp"."""
    from transformers.distributed import DistributedConfig

    sizes = {"fsdp_size": fsdp_size} if fsdp_size > 1 else {}
    return {"distributed_config": DistributedConfig(tp_size=2, tp_plan="auto", **sizes)}


def run_on_ranks(
    script: Path | str, cases: Sequence[str], engine: str, folder: Path, processes: int = 2, timeout: float = 300.0
) -> dict[str, list[Any]]:
    """Run `cases` of the file `script` on new processes, and return what each rank returned.

    Args:
        script (`Path`): file with a dict `CASES` of functions `(rank: Rank) -> Any`.
        cases (`Sequence[str]`): names in `CASES`, run in this order on every rank.
        engine (`str`): a name in `ENGINES`.
        folder (`Path`): an empty folder for files of this launch, `Rank.folder` of its cases.
        processes (`int`): number of ranks.
        timeout (`float`): seconds that the launch may take.

    Returns:
        `dict[str, list]`: for each case, what rank 0, 1, ... returned (anything `torch.save` writes).

    Raises:
        `AssertionError`: a rank failed (with the traceback of the one that failed first), or the ranks did not end in
        time (with the stack of each). No process is left behind.
    """
    with _launched(script, cases, engine, folder, processes, timeout) as ranks:
        _wait(ranks, folder, time.monotonic() + timeout)
    import torch

    results = [torch.load(file_of(folder, rank, "results"), weights_only=False) for rank in range(processes)]
    return {case: [of_rank[case] for of_rank in results] for case in cases}


def python_path() -> str:
    """Return the path on which each process finds these modules and the package."""
    return os.pathsep.join([str(SUPPORT), str(ROOT), os.environ.get("PYTHONPATH", "")])


class End(NamedTuple):
    """The end of a rank.

    Args:
        status (`int`): its exit status, negative if a signal ended it.
        seconds (`float`): time since the first rank ended.
        failure (`str`): its traceback, or "" if it did not fail.
    """

    status: int
    seconds: float
    failure: str


def ends_of_ranks(
    script: Path | str,
    case: str,
    engine: str,
    folder: Path,
    processes: int = 2,
    timeout: float = 300.0,
    stopped: int | None = None,
) -> list[End]:
    """Run a case that is meant to fail, as [`run_on_ranks`] does; return how each rank ended.

    Args:
        stopped (`int`, *optional*): a rank that stops itself. The call neither waits for it nor returns it.
    """
    ends: dict[int, End] = {}
    first = None
    deadline = time.monotonic() + timeout
    with _launched(script, [case], engine, folder, processes, timeout) as ranks:
        while len(ends) < processes - (stopped is not None):
            if time.monotonic() > deadline:
                stacks = _stacks(ranks, folder, [rank for rank in range(processes) if rank not in (*ends, stopped)])
                raise AssertionError(f"The ranks hang. Those that ended: {ends}\n{stacks}")
            time.sleep(0.05)
            for rank, process in enumerate(ranks):
                if process.poll() is not None and rank not in ends:
                    first = time.monotonic() if first is None else first
                    failure = file_of(folder, rank, "failure")
                    words = failure.read_text() if failure.exists() else ""
                    ends[rank] = End(process.poll(), time.monotonic() - first, words)
    return [ends[rank] for rank in sorted(ends)]


@contextmanager
def _launched(
    script: Path | str,
    cases: Sequence[str],
    engine: str,
    folder: Path,
    processes: int,
    timeout: float,
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start the ranks, and end all of them after the `with` block."""
    from torch.distributed import TCPStore

    # This process hosts the store, on a port that the system chose, so no other process can take the port
    store = TCPStore("127.0.0.1", 0, processes, True, timedelta(seconds=timeout), wait_for_workers=False)
    rendezvous = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONPATH": python_path(),
    }
    command = [sys.executable, __file__, "--script", str(script), "--engine", engine, "--folder", str(folder), *cases]
    ranks = []
    try:
        for rank in range(processes):
            environment = {**os.environ, **ENGINES[engine], **rendezvous, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            with file_of(folder, rank, "output").open("wb") as output:
                ranks.append(subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT))
        yield ranks
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
            process.wait()


def file_of(folder: Path, rank: int, what: str) -> Path:
    return folder / f"rank{rank}.{what}"


def _wait(ranks: list[subprocess.Popen[bytes]], folder: Path, deadline: float) -> None:
    """Wait until every rank has ended successfully. Raise as soon as one fails."""
    while any(process.poll() is None for process in ranks):
        if any(process.poll() for process in ranks) or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    if all(process.poll() == 0 for process in ranks):
        return
    timed_out = time.monotonic() > deadline
    hanging = [rank for rank, process in enumerate(ranks) if process.poll() is None]
    stacks = _stacks(ranks, folder, hanging) if timed_out else ""
    if not timed_out:  # ranks that wait for a failed one in a collective soon fail, or hang
        time.sleep(1)
    failures = sorted(folder.glob("rank*.failure"), key=lambda path: path.stat().st_mtime_ns)
    ended = [process.poll() for process in ranks]
    report = [f"exit status of each rank, None where it still ran: {ended}"]
    if failures:
        report.append(f"{failures[0].stem} failed first:\n{failures[0].read_text()}")
    report += [stacks] if stacks else []
    for rank in range(len(ranks)):
        if not failures and not (timed_out and rank in hanging):
            report.append(f"the end of rank {rank}'s output:\n{file_of(folder, rank, 'output').read_text()[-4000:]}")
    raise AssertionError(("The ranks hang. " if timed_out else "A rank failed. ") + "\n\n".join(report))


def _stacks(ranks: list[subprocess.Popen[bytes]], folder: Path, hanging: list[int]) -> str:
    for rank in hanging:
        ranks[rank].send_signal(signal.SIGUSR1)
    time.sleep(1)
    return "\n\n".join(f"stack of rank {rank}:\n{file_of(folder, rank, 'stack').read_text()}" for rank in hanging)


def be_like_gpus() -> None:
    """Make accelerate take these gloo ranks for GPUs, because it supports FSDP and tensor parallelism only there."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    PartialState._prepare_backend = lambda self, *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)


def _as_pytest_does() -> None:
    """Turn warnings into errors, except those that pyproject.toml lists."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for line in settings["tool"]["pytest"]["ini_options"]["filterwarnings"]:
        action, message, category = (line.split(":") + ["", "Warning"])[:3] if ":" in line else (line, "", "Warning")
        action = {"error": "default"}.get(action, action) if os.environ.get("EXPLORE") else action
        warnings.filterwarnings(action, message, getattr(builtins, category))


def _one_rank() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--script", type=Path, required=True)
    parser.add_argument("--engine", choices=ENGINES, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("cases", nargs="+")
    arguments = parser.parse_args()
    serve(Rank(arguments.engine, arguments.folder), arguments.script, arguments.cases)


def serve(rank: Rank, script: Path, cases: list[str]) -> NoReturn:
    """Run `cases` of `script` as this rank, write the results or the failure into its folder, and end the process."""
    faulthandler.register(signal.SIGUSR1, file=file_of(rank.folder, rank.index, "stack").open("w"), all_threads=True)
    try:
        results = _run(rank, script, cases)
        import torch

        torch.save(results, file_of(rank.folder, rank.index, "results"))
        status = 0
    except BaseException:
        file_of(rank.folder, rank.index, "failure").write_text(traceback.format_exc())
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Skip the interpreter's shutdown, where about one process in 40 aborts because gloo's threads still run
    os._exit(status)


def _run(rank: Rank, script: Path, cases: list[str]) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from accelerate.state import AcceleratorState

    torch.set_num_threads(1)
    rank.prepare()
    spec = importlib.util.spec_from_file_location(script.stem, script)
    module = importlib.util.module_from_spec(spec)
    sys.modules[script.stem] = module
    spec.loader.exec_module(module)
    results = {}
    gc.freeze()  # accelerate collects garbage at each training, which would visit everything that was imported
    with warnings.catch_warnings():
        _as_pytest_does()
        for case in cases:
            rank.checked = False
            results[case] = module.CASES[case](rank)
            assert rank.checked, f"{case} did not show its trainer to `rank.check`, so its engine may be another"
            dist.barrier()
            AcceleratorState._reset_state()  # the next model's layers must be wrapped by their own class
    return results


if __name__ == "__main__":
    _one_rank()
