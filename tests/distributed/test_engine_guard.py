"""The trainer stops before the first step if, and only if, another engine would run than was requested."""

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trl
import yaml
from accelerate import ParallelismConfig
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env, prepare_simple_launcher_cmd_env
from transformers import AutoModelForCausalLM

import launch
from engine_runs import CONFIGS, trainer_of
from tiny import Workshop
from trl_ext.distributed.detect import DetectedEngine, engine_mismatch, requested_engine

CPU = {"ACCELERATE_USE_CPU": "true"}
LIKE_GPUS = {"ACCELERATE_TORCH_DEVICE": "cpu"}  # for CPU ranks that accelerate takes for GPUs: `launch.ENGINES`

# Real launches


def refused(rank: launch.LaunchedRank, words: str, **run: Any) -> None:
    """Check that building the trainer raises `ValueError`."""
    with pytest.raises(ValueError, match=words):
        trainer_of(rank.folder, **run)
    rank.checked = True  # there is no trainer to show


ALONE = r"2 processes were requested \(by `WORLD_SIZE=2`\), but each trains alone \(cpu\)"
NO_SYNC = r"2 processes were requested .* share the data, but each trains a separate model \(cpu\)"
FSDP_ON_CPU = r"FSDP2 was requested .*`FSDP_VERSION=2`\).* engine is DDP, 2 processes .* does not use FSDP when"
ZERO_ON_CPU = r"DeepSpeed ZeRO-3 was requested .*STAGE=3`\).* engine is DDP, 2 processes .* does not use DeepSpeed when"
NOT_LOADED = r"FSDP2 was requested \(by `distributed_config.fsdp_size=2`\).* engine is DDP.* `model` is already loaded"
NOT_SPLIT = r"Tensor parallelism was requested \(by `parallelism_config.tp_size=2`\).* engine is DDP"
NOT_SHARDED = r"Sharding of parameters was requested \(by `parallelism_config.dp_shard_size=2`\).* engine is DDP"
TWICE = r"The model was sharded when it was loaded .* would shard it again"
UNWRAPPED = r"The engine is DDP, 2 processes .* wrapped in nothing"


def loaded_model(rank: launch.LaunchedRank) -> None:
    model = AutoModelForCausalLM.from_pretrained(os.environ["TINY_MODEL"])
    refused(rank, NOT_LOADED, model=model, model_init_kwargs={"distributed_config": {"fsdp_size": 2}})


def not_wrapped(rank: launch.LaunchedRank) -> None:
    """A mismatch that only the wrapped model shows stops training before the first step."""
    trainer = trainer_of(rank.folder)
    trainer.model._is_accelerate_prepared = True  # accelerate does not prepare a model with this mark again
    with pytest.raises(ValueError, match=UNWRAPPED):
        trainer.train()
    assert trainer.state.global_step == 0
    rank.checked = True


def case(words: str, **run: Any) -> Callable[[launch.LaunchedRank], None]:
    return lambda rank: refused(rank, words, **run)


CASES = {
    "alone": case(ALONE),
    "alone-grpo": case(ALONE, kind="grpo"),
    "gloo-alone": case(NO_SYNC, ddp_backend="gloo"),
    "fsdp-on-cpu": case(FSDP_ON_CPU, use_cpu=True),
    "zero-on-cpu": case(ZERO_ON_CPU),
    "loaded-model": loaded_model,
    "not-wrapped": not_wrapped,
    "not-split": lambda rank: refused(rank, NOT_SPLIT, parallelism_config=ParallelismConfig(tp_size=2)),
    "not-sharded": lambda rank: refused(rank, NOT_SHARDED, parallelism_config=ParallelismConfig(dp_shard_size=2)),
    "twice": case(TWICE, model_init_kwargs={"distributed_config": {"fsdp_size": 2}}),
}


@pytest.mark.parametrize(
    ("config", "engine", "environment", "cases"),
    [
        # No GPU, and the CPU not requested: unrelated runs; with a backend, no gradient sync; then DDP for FSDP2
        pytest.param("fsdp2", "ddp", {}, ["alone", "alone-grpo", "gloo-alone", "fsdp-on-cpu"], marks=pytest.mark.slow),
        pytest.param("ddp", "ddp", CPU, ["loaded-model", "not-wrapped"], marks=pytest.mark.slow),
        pytest.param("fsdp2", "ddp", CPU, ["fsdp-on-cpu"], marks=pytest.mark.slow),
        pytest.param("zero3", "zero3", CPU, ["zero-on-cpu"], marks=pytest.mark.slow),
        pytest.param("ddp", "tp", LIKE_GPUS, ["not-split", "not-sharded"], marks=pytest.mark.slow),
        pytest.param("fsdp2", "fsdp2", LIKE_GPUS, ["twice"], marks=pytest.mark.slow),
    ],
)
def test_two_processes_stop_where_another_engine_would_train(
    config: str,
    engine: str,
    environment: dict[str, str],
    cases: list[str],
    workshop: Workshop,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    if config == "zero3":
        environment = {**environment, "DS_ACCELERATOR": "cpu"}
    monkeypatch.setenv("TINY_MODEL", workshop.model("untied"))
    shipped = yaml.safe_load((CONFIGS / f"{config}.yaml").read_text()) | {"num_processes": 2}
    how = dataclasses.replace(launch.ENGINES[engine], config=shipped, environment=environment)
    monkeypatch.setitem(launch.ENGINES, engine, how)
    launch.launch(__file__, cases, engine, tmp_path)


@pytest.mark.parametrize("kind", ["dpo", "grpo"])
def test_one_process_stops_where_another_engine_would_train(
    kind: str, workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name, value in {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "TINY_MODEL": workshop.model("untied"),
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="FSDP2 was requested"):
        trainer_of(tmp_path, kind=kind, use_cpu=True)
    assert not (tmp_path / "run").exists()


def launched_simply(workshop: Workshop, folder: Path, *flags: str) -> "subprocess.CompletedProcess[str]":
    """Launch this file so that accelerate gives its one process no rank."""
    environment = os.environ | {"TINY_MODEL": workshop.model("untied"), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = launch.ranks.python_path()
    command = [sys.executable, "-m", "accelerate.commands.launch", *flags, __file__, str(folder)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_one_process_for_two_on_the_cpu_stops(workshop: Workshop, tmp_path: Path):
    run = launched_simply(workshop, tmp_path, "--cpu", "--num_processes", "2")
    assert run.returncode != 0
    assert "ValueError: Several processes were requested (by `num_processes` of `accelerate launch`)" in run.stderr
    assert not (tmp_path / "run").exists()


# Every way to launch, by the environment that accelerate makes for it


def launched(*flags: str) -> dict[str, str]:
    """Return what `accelerate launch` with these flags, and then torchrun, add to the environment of a process."""
    args, _, _ = _validate_launch_command(
        launch_command_parser().parse_args(["--main_process_port", "0", *flags, "script.py"])
    )
    if args.use_deepspeed and not args.cpu:
        args.deepspeed_fields_from_accelerate_config = ""
        environment, ranked = prepare_deepspeed_cmd_env(args)[1], True
    elif (args.use_fsdp or args.multi_gpu) and not args.cpu:
        environment, ranked = prepare_multi_gpu_env(args), True
    else:
        environment, ranked = prepare_simple_launcher_cmd_env(args)[1], False
    own = {name: value for name, value in environment.items() if os.environ.get(name) != value}
    if ranked:
        own |= {"WORLD_SIZE": str(args.num_processes), "RANK": "0", "LOCAL_RANK": "0"}
    return own


def arguments(tmp_path: Path, **given: Any) -> trl.DPOConfig:
    return trl.DPOConfig(str(tmp_path), report_to="none", bf16=False, **given)


def config(name: str, *flags: str) -> tuple[str, ...]:
    return ("--config_file", str(CONFIGS / f"{name}.yaml"), *flags)


ONE = DetectedEngine(distributed_type="NO", processes=1, in_group=1, backend=None, device="cuda")
DDP = DetectedEngine(distributed_type="MULTI_GPU", processes=4, in_group=4, backend="nccl", device="cuda")
FSDP2 = dataclasses.replace(DDP, distributed_type="FSDP", fsdp_version=2)
FSDP1 = dataclasses.replace(FSDP2, fsdp_version=1)
ZERO2 = dataclasses.replace(DDP, distributed_type="DEEPSPEED", zero_stage=2)
ZERO3 = dataclasses.replace(ZERO2, zero_stage=3)
SPLIT = dataclasses.replace(DDP, model_axes={"tp": 2, "fsdp": 2}, sizes={"tp": 2, "dp_shard": 2})
LOADED = {"model_init_kwargs": {"distributed_config": {"tp_size": 2, "fsdp_size": 2}}}
OWN_ZERO2 = {"zero_optimization": {"stage": 2}, "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}


@pytest.mark.parametrize(
    ("flags", "runs"),
    [
        (config("one_gpu"), ONE),
        (config("cpu"), dataclasses.replace(ONE, device="cpu")),
        (config("ddp", "--num_processes", "4"), DDP),
        (config("fsdp2", "--num_processes", "4"), FSDP2),
        (config("fsdp2", "--num_processes", "1"), dataclasses.replace(FSDP2, processes=1, in_group=1)),
        (("--use_fsdp", "--num_processes", "4", "--num_machines", "1"), FSDP1),  # no version requested
        (config("zero2", "--num_processes", "4"), ZERO2),
        (config("zero3", "--num_processes", "4"), ZERO3),
        (config("zero3", "--num_processes", "1"), dataclasses.replace(ZERO3, processes=1, in_group=1)),
        (("--cpu", "--num_processes", "1"), dataclasses.replace(ONE, device="cpu")),
    ],
)
def test_the_requested_engine_is_not_stopped(flags: tuple[str, ...], runs: DetectedEngine, tmp_path: Path):
    assert engine_mismatch(requested_engine(launched(*flags), arguments(tmp_path)), runs) is None


RANKS = {"WORLD_SIZE": "4", "RANK": "0", "LOCAL_RANK": "0"}
USERS_OWN = {"MASTER_ADDR": "node-1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environment", "given", "runs"),
    [
        ({}, {}, ONE),
        (USERS_OWN, {}, ONE),  # as a cluster's script exports it
        (launched("--num_processes", "1", "--num_machines", "1") | USERS_OWN, {}, ONE),
        (launched("--cpu", "--num_processes", "1") | USERS_OWN | {"WORLD_SIZE": "1", "RANK": "0"}, {}, ONE),
        ({"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}, {}, ONE),
        (RANKS, {}, DDP),
        (RANKS, {}, dataclasses.replace(DDP, wrapping="DDP")),
        (RANKS, LOADED, SPLIT),
        (RANKS, LOADED, dataclasses.replace(SPLIT, wrapping="DTensor")),
        (RANKS, {}, dataclasses.replace(SPLIT, model_axes={"tp": 2, "dp_replicate": 2}, wrapping="DTensor")),
        (RANKS, {}, dataclasses.replace(ZERO3, autotp_size=1)),
        (RANKS, {"fsdp": True}, dataclasses.replace(FSDP2, wrapping="DTensor")),
        (RANKS, {"parallelism_config": ParallelismConfig(dp_shard_size=2, cp_size=2)}, FSDP2),
        (RANKS | {"ACCELERATE_USE_CPU": "true"}, {}, dataclasses.replace(DDP, distributed_type="MULTI_CPU")),
        (RANKS, {}, dataclasses.replace(DDP, distributed_type="XLA", wrapping="nothing")),
    ],
)
def test_no_correct_setup_is_stopped(
    environment: dict[str, str], given: dict[str, Any], runs: DetectedEngine, tmp_path: Path
):
    plugin = {"fsdp_version": 2} if given.pop("fsdp", False) else None
    args = arguments(tmp_path, **given)
    args.fsdp_plugin_args = plugin
    assert engine_mismatch(requested_engine(environment, args), runs) is None


@pytest.mark.parametrize(
    ("environment", "given", "runs", "words"),
    [
        (launched(*config("ddp"), "--cpu"), {}, ONE, "Several processes were requested"),
        (RANKS, {}, ONE, r"4 processes .*`WORLD_SIZE=4`.* each trains alone"),
        ({}, {}, dataclasses.replace(ONE, in_group=2), "2 processes were requested, but each trains alone"),
        (launched("--use_deepspeed", "--zero_stage", "3", "--num_processes", "4", "--num_machines", "1"), {}, ZERO2,
         r"DeepSpeed ZeRO-3 was requested .* engine is DeepSpeed ZeRO-2"),
        (launched(*config("fsdp2", "--num_processes", "4")), {}, FSDP1, "FSDP2 was requested .* engine is FSDP1"),
        (launched(*config("fsdp2", "--num_processes", "1")), {}, ONE, "FSDP2 was requested .* engine is one process"),
        (RANKS | {"ACCELERATE_USE_FSDP": "1"}, {}, DDP, "FSDP was requested .* engine is DDP"),
        (RANKS | {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_TP_SIZE": "2"}, {}, FSDP2,
         r"Tensor parallelism was requested \(by `PARALLELISM_CONFIG_TP_SIZE=2`\).*tp_fsdp2.yaml"),
        (RANKS, {"parallelism_config": ParallelismConfig(tp_size=2)}, ZERO2, "Tensor parallelism was .* ZeRO-2"),
        (RANKS, {}, dataclasses.replace(ZERO2, autotp_size=2), r"`tensor_parallel.autotp_size=2`\).* would be wrong"),
        (RANKS, LOADED, DDP, "Tensor parallelism was requested .* engine is DDP"),
        (RANKS, {}, dataclasses.replace(FSDP2, wrapping="nothing"), "wrapped in nothing"),
        (RANKS, {}, dataclasses.replace(ZERO3, wrapping="DeepSpeed ZeRO-2"), "The engine is DeepSpeed ZeRO-3"),
    ],
)  # fmt: skip
def test_every_other_engine_is_stopped(
    environment: dict[str, str], given: dict[str, Any], runs: DetectedEngine, words: str, tmp_path: Path
):
    reason = engine_mismatch(requested_engine(environment, arguments(tmp_path, **given)), runs)
    assert re.search(words, reason or ""), reason


if __name__ == "__main__":
    trainer_of(Path(sys.argv[1]))
