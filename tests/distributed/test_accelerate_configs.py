"""The configs of examples/accelerate_configs: accelerate reads them, and each launches the engine it is named for."""

import dataclasses
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser

import launch
from engine_runs import CONFIGS, trainer_of
from tiny import Workshop

FILES = sorted(CONFIGS.glob("*.yaml"))
NAMES = ["cpu", "ddp", "fsdp2", "one_gpu", "tp_fsdp2", "zero1", "zero2", "zero3"]
# What the row `engine` says. FSDP2 and tensor parallelism over gloo need ranks that pass for GPUs: `launch.ENGINES`
ROWS = {
    "ddp": "DDP, 2 processes (gloo): each holds the whole model, and gradients are averaged, asked for by "
    "`WORLD_SIZE=2`.",
    "fsdp2": "FSDP2, 2 processes (gloo): parameters sharded over 2, asked for by `ACCELERATE_USE_FSDP`, "
    "`FSDP_VERSION=2`.",
    "zero1": "DeepSpeed ZeRO-1, 2 processes (gloo): optimizer states sharded over 2, asked for by "
    "`ACCELERATE_DEEPSPEED_ZERO_STAGE=1`.",
    "zero2": "DeepSpeed ZeRO-2, 2 processes (gloo): optimizer states and gradients sharded over 2, asked for by "
    "`ACCELERATE_DEEPSPEED_ZERO_STAGE=2`.",
    "zero3": "DeepSpeed ZeRO-3, 2 processes (gloo): optimizer states, gradients and parameters sharded over 2, asked "
    "for by `ACCELERATE_DEEPSPEED_ZERO_STAGE=3`.",
    "tp_fsdp2": "tensor parallelism x FSDP2, 4 processes (gloo): layers split over 2, parameters sharded over 2 as "
    "they were loaded, asked for by `distributed_config.tp_size=2` and `distributed_config.fsdp_size=2`.",
}


def shipped(name: str, processes: int = 2) -> dict[str, Any]:
    """What the file says, for `processes` on the CPU."""
    return yaml.safe_load((CONFIGS / f"{name}.yaml").read_text()) | {"num_processes": processes}


def command_of(text: str) -> str:
    """The command line in the comment of a config."""
    lines = [line.lstrip("# ") for line in text.splitlines() if line.startswith("#     ")]
    return " ".join(line.rstrip("\\") for line in lines)


def test_every_engine_has_its_config_and_its_row_in_the_table():
    assert [path.stem for path in FILES] == NAMES
    table = (CONFIGS / "README.md").read_text()
    assert all(f"| [{name}.yaml]({name}.yaml) |" in table for name in NAMES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_accelerate_reads_every_key(path: Path):
    config = load_config_from_file(str(path))  # which refuses unknown keys of the file itself
    known = vars(launch_command_parser().parse_args(["script.py"])).keys()
    for group in ("fsdp_config", "deepspeed_config"):
        assert set(getattr(config, group)) <= known


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_line_that_launches_it_is_one_that_accelerate_takes(path: Path):
    command = command_of(path.read_text())
    script, *_ = re.findall(r"examples/\w+\.py", command)
    assert (CONFIGS.parents[1] / script).is_file()
    before, _, after = command.partition(script)
    flags = before.replace("accelerate launch", "").replace(f"examples/accelerate_configs/{path.name}", str(path))
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args([*flags.split(), script]))
    processes = {"cpu": 1, "one_gpu": 1}.get(path.stem, 4)
    assert args.num_processes == processes
    assert args.use_fsdp == (path.stem == "fsdp2")
    assert args.use_deepspeed == path.stem.startswith("zero")
    assert args.multi_gpu == (path.stem in ("ddp", "tp_fsdp2"))
    if path.stem == "one_gpu":
        assert args.gpu_ids == "0"  # else every GPU is this process's own: `nn.DataParallel`
    if path.stem == "tp_fsdp2":
        sizes = json.loads(re.search(r"'(.*)'", after).group(1))["distributed_config"]
        assert sizes["tp_size"] * sizes["fsdp_size"] == processes


def trains(rank: launch.LaunchedRank, **config: Any) -> str:
    """One step of DPO; the row `engine`, the same before and after it."""
    trainer = trainer_of(rank.folder, **rank.training_arguments(), **config)
    row = trainer.explain()["engine"].reason
    trainer.train()
    assert trainer.explain()["engine"].reason == row
    if rank.is_zero:  # tiny parameters are below ZeRO-3's threshold, so `check` would find them whole
        assert trainer.model_wrapped.zero_optimization_stage() == int(rank.engine[-1])
        rank.checked = True
    elif rank.processes == 4:
        axes = {param.data.device_mesh.mesh_dim_names for param in trainer.model.parameters()}
        assert axes <= {("fsdp", "tp"), ("fsdp",), ("tp",)}
        rank.checked = ("fsdp", "tp") in axes
    else:
        rank.check(trainer)
    return row


def trains_split_and_sharded(rank: launch.LaunchedRank) -> str:
    # torch, of the embedding that transformers splits; what it fears, nobody does: to change that output in place
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
    return trains(rank, model_init_kwargs={"distributed_config": {"tp_size": 2, "fsdp_size": 2}})


CASES = {"trains": trains, "trains-split-and-sharded": trains_split_and_sharded}


@pytest.mark.parametrize(
    ("name", "engine", "case", "processes"),
    [
        pytest.param("ddp", "ddp", "trains", 2, marks=pytest.mark.slow),
        pytest.param("fsdp2", "fsdp2", "trains", 2, marks=pytest.mark.slow),
        pytest.param("zero1", "zero1", "trains", 2, marks=pytest.mark.slow),
        pytest.param("zero2", "zero2", "trains", 2, marks=pytest.mark.slow),
        pytest.param("zero3", "zero3", "trains", 2, marks=pytest.mark.slow),
        pytest.param("tp_fsdp2", "tp", "trains-split-and-sharded", 4, marks=pytest.mark.slow),
    ],
)
def test_a_config_launches_the_engine_that_it_is_named_for(
    name: str,
    engine: str,
    case: str,
    processes: int,
    workshop: Workshop,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("TINY_MODEL", workshop.model("untied"))
    how = dataclasses.replace(launch.ENGINES[engine], config=shipped(name, processes))
    monkeypatch.setitem(launch.ENGINES, engine, how)
    rows = launch.launch(__file__, [case], engine, tmp_path, processes)[case]
    assert rows == [ROWS[name]] * processes


@pytest.mark.slow
def test_one_process_says_so(workshop: Workshop, tmp_path: Path):
    environment = os.environ | {"TINY_MODEL": workshop.model("untied"), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = launch.ranks.python_path()
    config = str(CONFIGS / "one_gpu.yaml")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config, __file__, str(tmp_path)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-4000:]
    assert run.stdout.splitlines()[-1] == "one process (cpu)."


if __name__ == "__main__":
    alone = trainer_of(Path(sys.argv[1]))
    alone.train()
    print(alone.explain()["engine"].reason)
