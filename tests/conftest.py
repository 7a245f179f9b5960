"""Settings of all tests: no network, no telemetry, one torch thread, and one workshop of tiny models per session."""

import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Libraries read these when they are imported.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["TQDM_DISABLE"] = "1"
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # for tests that need deterministic results on a GPU
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # TRL's own switch: `rollout_func` warns without it

os.environ["HF_DATASETS_CACHE"] = tempfile.mkdtemp(prefix="trl_ext_tests_")  # not the user's folder

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # for the head's kernels; must be set before a library imports Triton

import datasets
import pytest

from tiny import Workshop
from worker_ranks import WorkerRanks

# Tiny models are faster on one thread, and `pytest -n` has a core for each worker.
torch.set_num_threads(int(os.environ.get("TRL_EXT_TEST_THREADS", "1")))


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """Return the session's tiny models, adapters and tokenizers, each made once."""
    return Workshop(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def ranks() -> Iterator[WorkerRanks]:
    """Return the session's gloo processes, for cases that are too short to start processes for each."""
    workers = WorkerRanks()
    yield workers
    workers.stop()


def pytest_unconfigure() -> None:
    shutil.rmtree(os.environ["HF_DATASETS_CACHE"], ignore_errors=True)


@pytest.fixture(autouse=True)
def own_datasets_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test a new store of reference log-probs."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", help="I/N: of the selected tests only every Nth, from the Ith on; I counts from 0")


def pytest_collection_finish() -> None:
    # Accelerate collects garbage before each training. Visiting every object of the imported libraries takes 0.3 s,
    # three quarters of a tiny run
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)  # of the tests that -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part = config.getoption("--part")
    if part is not None:
        first, step = map(int, part.split("/"))
        config.hook.pytest_deselected(items=[item for i, item in enumerate(items) if i % step != first])
        items[:] = items[first::step]
