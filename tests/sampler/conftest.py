"""Tests with a real vLLM on the CPU: `make test-sampler` makes the environment. Without vLLM they are not collected."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ranks import python_path
from tiny import Workshop

NEED_VLLM = ["test_check.py", "test_colocated.py", "test_server.py", "test_truncated.py"]
collect_ignore = [] if find_spec("vllm") else NEED_VLLM

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "MASTER_ADDR": "127.0.0.1",
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of vLLM's compiled kernels; they take half a minute."""
    return os.environ.get("TORCHINDUCTOR_CACHE_DIR") or str(tmp_path_factory.mktemp("inductor"))


@pytest.fixture(scope="session")
def train(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory, compiled: str) -> Callable[..., dict[str, Any]]:
    """Return a function that trains GRPO with vLLM in a process of its own: `run_vllm.py` says with which options."""

    def run(model: str = "sampled", **case: Any) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("run")
        case = {"model": workshop.model(model), "output": str(folder), **case}
        script = Path(__file__).with_name("run_vllm.py")
        ended = subprocess.run(
            [sys.executable, script, json.dumps(case)],
            env={
                **os.environ,
                **SETTINGS,
                "TORCHINDUCTOR_CACHE_DIR": compiled,
                "MASTER_PORT": str(free_port()),
                "PYTHONPATH": python_path(),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert ended.returncode == 0, ended.stdout[-8000:]
        return {**json.loads((folder / "result.json").read_text()), "printed": ended.stdout}

    return run
