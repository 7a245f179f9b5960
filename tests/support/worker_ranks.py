"""Gloo ranks that are reused for many cases, so that a case takes milliseconds and hypothesis can draw many."""

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

MOST = 5
_SECONDS = 60.0


class WorkerRanks:
    """`MOST` processes, started on first use, and again after a case that failed or hung."""

    def __init__(self) -> None:
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []

    def run(self, function: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
        """Run `function(group, *args)` on each rank of a group, and return the results of all.

        Rank 0 of a smaller group is not process 0, so that ranks of a group differ from ranks of the world.

        Raises:
            `AssertionError`: a rank raised (with its traceback), or they did not end in time.
        """
        if not self._processes:
            self._start()
        pipes = self._pipes[MOST - ranks :]
        request = pickle.dumps((function, ranks, args))
        for pipe in pipes:
            pipe.send_bytes(request)
        results: dict[int, Any] = {}
        deadline = time.monotonic() + _SECONDS
        while len(results) < ranks:
            open_ones = [pipe for i, pipe in enumerate(pipes) if i not in results]
            for pipe in wait(open_ones, max(0.0, deadline - time.monotonic())) or self._fail("The ranks hang."):
                try:
                    result, failure = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    result, failure = None, f"rank {pipes.index(pipe)} of {ranks} has ended, see its stderr"
                if failure:
                    self._fail(failure)
                results[pipes.index(pipe)] = result
        return [results[i] for i in range(ranks)]

    def stop(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        self._pipes, self._processes = [], []

    def _fail(self, words: str) -> Any:
        self.stop()
        raise AssertionError(words)

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        # Imported once, not by each process
        context.set_forkserver_preload(
            ["hypothesis", "pytest", "torch.distributed.fsdp", "head_adapter_cases", "trl_ext.scoring"]
        )
        address = Path(tempfile.mkdtemp()) / "rendezvous"
        for rank in range(MOST):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, str(address), theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)


def _serve(rank: int, address: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{address}", rank=rank, world_size=MOST, timeout=timedelta(seconds=_SECONDS)
    )
    groups = {ranks: dist.new_group(list(range(MOST - ranks, MOST))) for ranks in range(1, MOST + 1)}
    while True:
        try:
            function, ranks, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            os._exit(0)
        try:
            answer = function(groups[ranks], *args), ""
        except BaseException:
            answer = None, f"rank {groups[ranks].rank()} of {ranks}:\n{traceback.format_exc()}"
        pipe.send_bytes(pickle.dumps(answer))
