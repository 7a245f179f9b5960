"""Settings every test shares: no network, no telemetry, one torch thread, and one workshop of tiny models a session."""

import os

# Read by the libraries when they are imported, so set before any of them is.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["TQDM_DISABLE"] = "1"
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # TRL's own switch: `rollout_func` warns without it

import pytest
import torch

from tiny import Workshop

# Tiny models run faster on one thread, and `pytest -n` then has a core for each worker.
torch.set_num_threads(int(os.environ.get("TRL_EXT_TEST_THREADS", "1")))


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """The session's tiny models, adapters and tokenizers, each made once."""
    return Workshop(tmp_path_factory.mktemp("tiny"))
