"""GRPO with vLLM in a server: weights arrive without NCCL, and the server samples from the policy to rounding."""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from trl.generation.vllm_client import VLLMClient

import trl_ext
from launch import LaunchedRank, launch
from tiny import Workshop
from trl_ext.compat.replaced import names_replaced
from trl_ext.sampler import client as client_module
from trl_ext.sampler.client import FileClient
from trl_ext.sampler.engine import EngineGeneration

# One worker starts the servers, and has all tests of them
pytestmark = pytest.mark.xdist_group("server")

SETTINGS = {
    **{"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"},
    **{"VLLM_NO_USAGE_STATS": "1", "VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"},
}
# `vllm serve` of the wheel for CPUs looks for a distribution called "vllm"
SERVE = (
    *("-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", "64"),
    *("--enforce-eager", "--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"),
    *("--max-num-seqs", "16", "--block-size", "32"),
)
BY_FILES = ("--weight-transfer-config", '{"backend": "trl_ext"}')
LORA = ("--enable-lora", "--max-lora-rank", "8")
SERVERS = {
    "tied": ("sampled_tied", BY_FILES),
    "untied": ("sampled", (*BY_FILES, *LORA)),
    "adapter only": ("sampled", LORA),  # no test changes its base model
    "to be killed": ("sampled", BY_FILES),
}
KL = "sampling/mismatch_kl"  # only ours
AGREES = {KL: 1e-9, "sampling/sampling_logp_difference/max": 5e-5}
CONFIG = {
    **{"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 12, "max_steps": 6},
    **{"learning_rate": 1e-2, "lr_scheduler_type": "constant", "bf16": False, "use_cpu": True, "report_to": "none"},
    **{"logging_steps": 1, "save_strategy": "no", "use_vllm": True, "vllm_mode": "server"},
    "generation_kwargs": {"seed": 7},  # the server draws the same completions for each trainer
}
PROCESSES: dict[str, int] = {}  # the servers that run
LORA_4 = {"lora": LoraConfig(r=4, target_modules="all-linear")}


def _free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


@pytest.fixture(scope="module")
def server(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """Return a function from a name of `SERVERS` to the URL of its server, which is started at the first call."""
    urls: dict[str, str] = {}
    processes: list[subprocess.Popen] = []
    PROCESSES.clear()
    folder = tmp_path_factory.mktemp("server")
    compiled = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or str(folder / "compiled")

    def start(name: str) -> str:
        if name in urls:
            return urls[name]
        (model, options), url, log = SERVERS[name], f"http://127.0.0.1:{_free_port()}", folder / f"{name}.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, *SERVE, "--model", workshop.model(model), "--port", url.rpartition(":")[2], *options],
                env={**os.environ, **SETTINGS, "TORCHINDUCTOR_CACHE_DIR": compiled},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # the server and its workers are one group
            )
        processes.append(process)
        PROCESSES[name] = process.pid
        until = time.monotonic() + 240
        while process.poll() is None and time.monotonic() < until:
            with suppress(OSError), urlopen(f"{url}/health"):
                urls[name] = url
                return url
            time.sleep(0.5)
        raise AssertionError(log.read_text()[-8000:])

    yield start
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait(60)


def distinct(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [len(set(ids)) + 0.01 * sum(ids) for ids in completion_ids]


def of_url(
    url: str,
    output: Path,
    used: type = trl_ext.GRPOTrainer,
    lora: LoraConfig | None = None,
    reward: Callable[..., Any] = distinct,
    **config: Any,
) -> Any:
    """Return a trainer whose vLLM is the server at `url`. TRL's gets our client."""

    model = VLLMClient(base_url=url)._get(f"{url}/v1/models")["data"][0]["root"]
    of_config = trl_ext.GRPOConfig if used is trl_ext.GRPOTrainer else trl.GRPOConfig
    with names_replaced(trl.GRPOTrainer, VLLMGeneration=EngineGeneration):
        return used(
            model=model,
            reward_funcs=reward,
            peft_config=lora,
            args=of_config(str(output), vllm_server_base_url=url, **{**CONFIG, **config}),
            # More than a block of the prefix cache, and few prompts: later steps find the blocks of earlier ones
            train_dataset=Dataset.from_list(
                [{"prompt": " ".join(f"w{(3 * (i % 2) + j) % 90}" for j in range(40))} for i in range(64)]
            ),
        )


def column(trainer: Any, name: str) -> list[float]:
    return [float(entry[name]) for entry in trainer.state.log_history if name in entry]


def assert_agrees(trainer: Any, steps: int = 6) -> None:
    before = {name: x.detach().clone() for name, x in trainer.model.named_parameters()}
    trainer.train()
    for name, most in AGREES.items():
        assert len(column(trainer, name)) == (steps if name != KL or isinstance(trainer, trl_ext.GRPOTrainer) else 0)
        assert max(column(trainer, name), default=0) <= most
    assert any(not torch.equal(x, before[name]) for name, x in trainer.model.named_parameters())
    assert len(set(column(trainer, "entropy"))) == steps  # the policy moved at each step


@pytest.mark.parametrize("model", ["tied", "untied"])
def test_full_fine_tuning_agrees_with_the_server_and_equals_stock_trl(server, model, tmp_path):
    ours = of_url(server(model), tmp_path)
    assert_agrees(ours)
    sent = sum(x.numel() * x.element_size() for x in ours.model.parameters())
    assert ours.vllm_generation.bytes_sent == sent
    stock = of_url(server(model), tmp_path, trl.GRPOTrainer)
    assert_agrees(stock)
    for name in ("loss", "reward", "grad_norm"):
        assert column(ours, name) == pytest.approx(column(stock, name), rel=1e-4, abs=1e-5), name


def test_a_layer_may_be_split_over_files(server, tmp_path, monkeypatch):
    monkeypatch.setattr(client_module, "FILE_BYTES", 30_000)
    assert_agrees(of_url(server("tied"), tmp_path, max_steps=2), steps=2)


def test_merged_adapter_agrees_with_the_server(server, tmp_path, caplog):
    trainer = of_url(server("untied"), tmp_path, lora=LoraConfig(r=16, target_modules="all-linear"))
    assert "so each update sends all weights: vLLM was started with `--max-lora-rank 8`" in caplog.text
    assert_agrees(trainer)


@pytest.mark.parametrize(
    "options", [{}, {"use_rslora": True, "lora_alpha": 16, "target_modules": ["q_proj", "up_proj"]}]
)
def test_the_adapter_alone_agrees_with_the_server(server, tmp_path, options):
    trainer = of_url(
        server("adapter only"), tmp_path, lora=LoraConfig(**{"r": 4, "target_modules": "all-linear", **options})
    )
    client = trainer.vllm_generation.vllm_client
    # The prefix cache is not reset: each adapter has a new name, so that the blocks of an earlier one are not found
    assert client.sends_adapter
    assert_agrees(trainer)
    assert trainer.vllm_generation.bytes_sent == sum(
        x.numel() * x.element_size() for name, x in trainer.model.named_parameters() if "lora_" in name
    )
    assert [path.name for path in client.folder.iterdir()] == [client.model]


@pytest.mark.parametrize(
    ("name", "method", "options"), [("tied", "_send", {}), ("adapter only", "send_adapter", LORA_4)]
)
def test_a_sync_that_is_left_out_is_reported_at_its_step(server, tmp_path, caplog, name, method, options):
    trainer = of_url(server(name), tmp_path, max_steps=5, **options)
    client = trainer.vllm_generation.vllm_client
    sent = getattr(client, method)
    setattr(client, method, lambda *given: sent(*given) if trainer.state.global_step < 3 else None)
    trainer.train()
    said = [record.message for record in caplog.records if "not samples of the policy" in record.message]
    assert len(said) == 1
    assert "since step 3, " in said[0]
    assert "cannot be read here" in said[0]


def test_stock_trl_cannot_sync_with_a_cpu(server):
    with pytest.raises(NotImplementedError, match="needs a CUDA device"):
        VLLMClient(base_url=server("tied")).init_communicator("cpu")


def test_a_server_without_the_backend_is_refused(server):
    client = FileClient(base_url=server("adapter only"))
    with pytest.raises(ValueError, match=r"no weight-transfer backend.* Start it with .*\"backend\": \"trl_ext\""):
        client.init_communicator("cpu")


def test_a_folder_that_the_server_does_not_see_is_named(server, monkeypatch):
    client = FileClient(base_url=server("tied"))
    monkeypatch.setattr(Path, "touch", lambda path: None)  # as if it had been made in another container
    with pytest.raises(
        ValueError, match=rf"does not see the trainer's folder {client.folder}\. Run server and trainer on one host"
    ):
        client.init_communicator("cpu")


def unknown_to_the_server() -> Iterator[tuple[str, torch.Tensor]]:
    yield "no.such.weight", torch.ones(1)


def fails() -> Iterator[tuple[str, torch.Tensor]]:
    yield "model.norm.weight", torch.ones(64)
    raise OSError("the disk is full")


@pytest.mark.parametrize(
    ("weights", "error"),
    [(unknown_to_the_server, "refused `/update_weights`: .*There is no module"), (fails, "the disk is full")],
)
def test_after_a_failed_update_the_next_one_succeeds(server, tmp_path, weights, error):
    trainer = of_url(server("tied"), tmp_path, max_steps=2)
    with pytest.raises((RuntimeError, OSError), match=error):
        trainer.vllm_generation.vllm_client.update_named_params([], weights())
    assert_agrees(trainer, steps=2)


def delay_weights(trainer: Any) -> None:
    """Make a trainer of TRL send the weights of the sync before."""
    sync = trainer.vllm_generation.sync_weights
    params = dict(trainer.model.named_parameters())
    before = {name: x.detach().clone() for name, x in params.items()}

    def sync_older() -> None:
        nonlocal before
        now = {name: x.detach().clone() for name, x in params.items()}
        load(before)
        sync()
        load(now)
        before = now

    @torch.no_grad()
    def load(weights: dict[str, torch.Tensor]) -> None:
        for name, x in params.items():
            x.copy_(weights[name])

    trainer.vllm_generation.sync_weights = sync_older


def test_with_a_lag_training_equals_stock_trl_with_older_weights(server, tmp_path, caplog):
    ours = of_url(server("untied"), tmp_path, generation_lag=1, show_plan=False)
    ours.train()
    stock = of_url(server("untied"), tmp_path, trl.GRPOTrainer)
    delay_weights(stock)
    stock.train()
    for name in ("loss", "reward", "grad_norm", "num_tokens"):
        assert column(ours, name) == pytest.approx(column(stock, name), rel=1e-4, abs=1e-5), name
    assert column(ours, "generation_ahead/age_in_steps") == [0, 1, 1, 1, 1, 1]
    assert column(ours, KL)[0] < 1e-9 < 1e-5 < min(column(ours, KL)[1:])
    assert "not samples of the policy" not in caplog.text


def test_with_a_lag_a_sync_that_is_left_out_is_reported_at_its_step(server, tmp_path, caplog):
    trainer = of_url(server("untied"), tmp_path, generation_lag=1, max_steps=5)
    client = trainer.vllm_generation.vllm_client
    send = client._send
    client._send = lambda *given: send(*given) if trainer.state.global_step < 3 else None
    trainer.train()
    said = [record.message for record in caplog.records if "not samples of the policy" in record.message]
    assert len(said) == 1
    assert "since step 3, " in said[0]


def test_within_a_step_the_next_batch_is_sampled_ahead_and_training_equals_stock_trl(server, tmp_path):
    options = {"gradient_accumulation_steps": 3, "steps_per_generation": 1, "max_steps": 3}
    ours = of_url(server("untied"), tmp_path, **options)
    ours.train()
    assert "share an optimizer step" in ours.explain()["generation"].reason
    assert column(ours, "generation_ahead/age_in_steps") == [0, 0, 0]
    stock = of_url(server("untied"), tmp_path, trl.GRPOTrainer, **options)
    stock.train()
    for name in ("loss", "reward", "grad_norm", "num_tokens"):
        assert column(ours, name) == pytest.approx(column(stock, name), rel=1e-4, abs=1e-5), name


def train_on_rank(rank: LaunchedRank, used: str) -> dict[str, Any]:
    """Train with a lag, ours or stock TRL that sends older weights; return the logs and the threads of the rewards."""
    threads: list[str] = []

    def reward(completion_ids: list[list[int]], **given: Any) -> list[float]:
        threads.append(threading.current_thread().name)
        return distinct(completion_ids, **given)

    url = (rank.folder / "url").read_text()
    options = {"reward": reward, "max_steps": 4, "dataloader_pin_memory": False, "per_device_train_batch_size": 4}
    if used == "ours":
        trainer = of_url(url, rank.folder / used, generation_lag=1, show_plan=False, **options)
    else:
        trainer = of_url(url, rank.folder / used, trl.GRPOTrainer, **options)
        delay_weights(trainer)
    trainer.train()
    rank.check(trainer)
    names = ("loss", "reward", "grad_norm", "num_tokens")
    return {"logs": {name: column(trainer, name) for name in names}, "threads": threads}


CASES = {used: partial(train_on_rank, used=used) for used in ("ours", "stock")}


def test_on_two_ranks_rewards_run_beside_training_and_training_equals_stock_trl(server, tmp_path):
    (tmp_path / "url").write_text(server("untied"))
    results = launch(__file__, list(CASES), "ddp", tmp_path)
    for ours, stock in zip(results["ours"], results["stock"], strict=True):
        assert ours["threads"] == ["MainThread", *(f"generation batch {x}" for x in (1, 2, 3))]
        assert stock["threads"] == ["MainThread"] * 4
    ours, stock = results["ours"][0]["logs"], results["stock"][0]["logs"]
    for name, values in stock.items():
        assert len(values) == 4
        assert ours[name] == pytest.approx(values, rel=1e-4, abs=1e-5), name


def before_a_request_beside_training(trainer: Any, number: int, call: Callable[[], None]) -> None:
    """Call a function in the thread that samples generation batch `number`, before it sends its request."""
    client = trainer.vllm_generation.vllm_client
    generate = client.generate

    def call_and_generate(**request: Any) -> Any:
        if threading.current_thread().name == f"generation batch {number}":
            call()
        return generate(**request)

    client.generate = call_and_generate


def threads_left() -> list[str]:
    time.sleep(0.1)
    return [x.name for x in threading.enumerate() if x.name.startswith("generation batch")]


def test_a_server_that_hangs_is_named_and_training_goes_on_once_it_answers(server, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("trl_ext.trainers.generation_ahead._NEWS", 0.2)
    caplog.set_level(logging.WARNING, logger="trl_ext")
    url = server("to be killed")
    usual = of_url(url, tmp_path / "a", generation_lag=1)
    usual.train()
    assert not any("training has waited for 1 s" in x for x in caplog.messages)
    trainer = of_url(url, tmp_path / "b", generation_lag=1)

    def hang() -> None:
        os.killpg(PROCESSES["to be killed"], signal.SIGSTOP)
        threading.Timer(2.0, os.killpg, (PROCESSES["to be killed"], signal.SIGCONT)).start()

    before_a_request_beside_training(trainer, 3, hang)
    trainer.train()
    assert any("training has waited for 1 s" in x for x in caplog.messages)
    assert column(trainer, "loss") == pytest.approx(column(usual, "loss"), rel=1e-4, abs=1e-5)


def test_a_server_that_dies_ends_the_step_that_needs_it(server, tmp_path):
    trainer = of_url(server("to be killed"), tmp_path, generation_lag=1)
    kill = partial(os.killpg, PROCESSES["to be killed"], signal.SIGKILL)
    before_a_request_beside_training(trainer, 3, kill)
    with pytest.raises(OSError, match="Connection"):  # after the retries of TRL's client
        trainer.train()
    assert trainer.state.global_step == 3
    assert threads_left() == []
