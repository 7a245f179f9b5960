"""Starts processes that have already imported torch, transformers and TRL, for tests that kill them.

Forking a process that has imported them takes milliseconds; a new process would need seconds for the imports.
"""

import gc
import importlib
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any


class ProcessPool:
    """A process that forks one child at a time. Use it as a context manager."""

    def __enter__(self) -> "ProcessPool":
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        assert self._ask() == "ready"
        return self

    def __exit__(self, *_: Any) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()

    def start(self, function: str, output: Path, *args: str) -> int:
        """Start a child that calls `function` ("module:name"), with its output in `output`; return its process id."""
        return int(self._ask("start", function, str(output), *args))

    def ended(self, pid: int) -> int:
        """Wait until a child has ended; return its exit status, negative if a signal killed it."""
        return int(self._ask("wait", str(pid)))

    def _ask(self, *words: str) -> str:
        assert self._process.stdin
        assert self._process.stdout
        if words:
            self._process.stdin.write(json.dumps(words) + "\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the process pool has ended, see its stderr"
        return answer.strip()


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # ignore what libraries print
    import torch
    import trl

    import trl_ext

    for trainer in ("DPOTrainer", "GRPOTrainer"):  # TRL imports its trainers on first use
        assert issubclass(getattr(trl_ext, trainer), getattr(trl, trainer))
    torch.set_num_threads(1)
    gc.freeze()  # see conftest.py
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        order, *words = json.loads(line)
        if order == "wait":
            print(os.waitstatus_to_exitcode(os.waitpid(int(words[0]), 0)[1]), file=answers, flush=True)
            continue
        pid = os.fork()
        if not pid:
            _child(*words)
        print(pid, file=answers, flush=True)
    os._exit(0)


def _child(function: str, output: str, *args: str) -> None:
    status = 1
    try:
        into = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(into, 1)
        os.dup2(into, 2)
        module, name = function.split(":")
        getattr(importlib.import_module(module), name)(*args)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


if __name__ == "__main__":
    _serve()
