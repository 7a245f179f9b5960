"""A checkpoint counts once all of it is written: which one training resumes from, and which ones are deleted."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import trl_ext
from resumable_runs import build, optimizer_steps
from tiny import Workshop
from trl_ext.checkpoints.complete import begin, complete_checkpoints, finish, half_written, is_complete
from trl_ext.checkpoints.engine import load_weights, names_differ, why_not_loaded
from trl_ext.checkpoints.generation import SavedGeneration, position_in_data, read_generation, write_generation


def checkpoint(run: Path, step: int, ended: bool = True) -> Path:
    folder = run / f"checkpoint-{step}"
    begin(folder)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    if ended:
        finish(folder)
    return folder


def test_the_last_complete_checkpoint_is_not_the_highest_number(tmp_path: Path):
    checkpoint(tmp_path, 9)
    checkpoint(tmp_path, 10)
    checkpoint(tmp_path, 11, ended=False)
    empty = tmp_path / "checkpoint-12"
    empty.mkdir()  # stock TRL, killed before it wrote its state
    torn = tmp_path / "checkpoint-13"
    torn.mkdir()
    (torn / "trainer_state.json").write_text('{"global_step": 1')
    (tmp_path / "checkpoint-best").mkdir()
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["checkpoint-9", "checkpoint-10"]
    assert [path.name for path in half_written(tmp_path)] == ["checkpoint-11", "checkpoint-12", "checkpoint-13"]


def test_rewriting_an_incomplete_checkpoint_starts_with_an_empty_folder(tmp_path: Path):
    folder = checkpoint(tmp_path, 2, ended=False)
    (folder / "rng_state_7.pth").write_text("of a rank that is no more")
    begin(folder)
    assert [path.name for path in folder.iterdir()] == ["_incomplete"]
    whole = checkpoint(tmp_path, 4)
    begin(whole)  # a second run into the same folder
    assert not is_complete(whole)
    assert (whole / "trainer_state.json").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-4"]


def test_resuming_names_incomplete_checkpoints(workshop: Workshop, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    trainer = build("dpo", trl_ext, workshop.model("untied"), tmp_path, max_steps=2, save_total_limit=1)
    half = checkpoint(tmp_path, 9, ended=False)
    with pytest.raises(ValueError, match=r"no complete checkpoint .*incomplete: checkpoint-9"):
        trainer.train(resume_from_checkpoint=True)
    trainer.train()
    # Rotation keeps the last complete one, not the incomplete one with a higher number
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    assert trainer.args.save_total_limit == 1
    half = checkpoint(tmp_path, 9, ended=False)
    with pytest.raises(ValueError, match=r"is not a complete checkpoint.*\. The last complete one .* is checkpoint-2"):
        trainer.train(resume_from_checkpoint=str(half))
    with caplog.at_level("WARNING", logger="trl_ext"):
        trainer.train(resume_from_checkpoint=True)
    assert "checkpoint-9 was not completely written and is ignored. Training resumes from checkpoint-2" in caplog.text


@settings(max_examples=200, deadline=None)
@given(epoch=st.integers(1, 12), accumulation=st.integers(1, 5), step=st.integers(0, 40))
def test_position_in_data_counts_accumulation_windows(epoch: int, accumulation: int, step: int):
    epochs, begun = 0, 0
    for _ in range(step):
        begun = min(begun + accumulation, epoch)
        if begun == epoch:
            epochs, begun = epochs + 1, 0
    assert position_in_data(step, accumulation, epoch) == (epochs, epochs * epoch + begun)
    assert position_in_data(step, accumulation, epoch, epoch_begins_again=True) == (epochs, epochs * epoch)
    assert position_in_data(step, accumulation, None) == (0, step * accumulation)


def test_a_generation_file_is_read_as_written(tmp_path: Path):
    rows = torch.randn(4, 3)
    slices = [
        {"a": rows[:2], "n": torch.tensor(5), "none": None, "images": [1, 2]},
        {"a": rows[2:].T, "n": torch.tensor(5), "none": None, "images": [3, 0]},
    ]
    slices[0]["a"][0, 0] = torch.nan
    saved = SavedGeneration(micro_batch=7, sampled_at_step=3, further_prompts=2, schedule={"x": 1}, slices=slices)
    write_generation(tmp_path, 1, saved)
    assert [path.name for path in tmp_path.iterdir()] == ["generation_1.safetensors"]
    assert read_generation(tmp_path, 0, torch.device("cpu")) is None
    read = read_generation(tmp_path, 1, torch.device("cpu"))
    assert read is not None
    assert (read.micro_batch, read.sampled_at_step, read.further_prompts, read.schedule) == (7, 3, 2, {"x": 1})
    assert read.slices is not None
    for got, want in zip(read.slices, slices, strict=True):
        assert got.keys() == want.keys()
        assert (got["none"], got["images"]) == (None, want["images"])
        assert got["n"] == 5
        torch.testing.assert_close(got["a"], want["a"], rtol=0, atol=0, equal_nan=True)
    with pytest.raises(TypeError):
        write_generation(tmp_path, 2, SavedGeneration(**{**vars(saved), "slices": [{"x": object()}]}))
    assert not (tmp_path / "generation_2.safetensors").exists()


def test_auto_resumes_from_a_complete_checkpoint_or_starts_from_the_beginning(
    workshop: Workshop, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    run = tmp_path / "run"

    def trained(until: int, asked: str = "auto") -> tuple[int, list[str]]:
        """Return how many steps the trainer took, and the messages that say where it started."""
        # A schedule that has ended in the checkpoint would give the next step a learning rate of 0
        constant = {"lr_scheduler_type": "constant"}
        trainer = build("dpo", trl_ext, workshop.model("untied"), run, max_steps=until, **constant)
        caplog.clear()
        with caplog.at_level("INFO", logger="trl_ext"), optimizer_steps() as steps:
            trainer.train(resume_from_checkpoint=asked)
        assert trainer.state.global_step == until
        return len(steps), [x for x in caplog.messages if "checkpoint" in x and not x.startswith("Training took")]

    run.mkdir()
    checkpoint(run, 1, ended=False)  # the first one was cut short
    steps, (line,) = trained(1)
    assert steps == 1
    assert re.fullmatch(
        r'`resume_from_checkpoint="auto"`: no complete checkpoint is in `output_dir` \(\S+/run; incomplete: '
        r"checkpoint-1\)\. Training starts from the beginning\.",
        line,
    )
    assert is_complete(run / "checkpoint-1")
    steps, (line,) = trained(2)
    assert steps == 1
    assert re.fullmatch(r'`resume_from_checkpoint="auto"`: training resumes from \S+/run/checkpoint-1\.', line)
    checkpoint(run, 9, ended=False)
    steps, (line,) = trained(3, "AUTO")
    assert steps == 1
    assert line == "checkpoint-9 was not completely written and is ignored. Training resumes from checkpoint-2."
    # A user's folder of that name comes first, and must be a checkpoint
    monkeypatch.chdir(tmp_path)
    (tmp_path / "auto").mkdir()
    with pytest.raises(ValueError, match="`resume_from_checkpoint='auto'` is not a complete checkpoint"):
        trained(4)
    (run / "checkpoint-3").rename(tmp_path / "whole")
    (tmp_path / "auto").rmdir()
    (tmp_path / "whole").rename(tmp_path / "auto")
    assert trained(4) == (1, [])
    shutil.rmtree(run)
    with pytest.raises(ValueError, match=r'no complete checkpoint.*"auto"` to do so only if there is no checkpoint'):
        trained(4, "true")


# Files of a checkpoint, the format of the current engine, and the format in the error; "" if it can resume
WRITTEN: dict[str, list[str]] = {
    "": ["model.safetensors", "optimizer.pt"],
    "FSDP with FULL_STATE_DICT": ["model.safetensors", "pytorch_model_fsdp.bin", "optimizer.bin"],
    "FSDP with SHARDED_STATE_DICT": ["pytorch_model_fsdp_0/.metadata", "optimizer_0/.metadata"],
    "DeepSpeed": ["model.safetensors", "global_step5/mp_rank_00_model_states.pt"],
    "DeepSpeed ZeRO-1 or ZeRO-2 on 1 processes": [
        *("model.safetensors", "global_step5/mp_rank_00_model_states.pt"),
        "global_step5/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
    ],
    "DeepSpeed ZeRO-3 on 2 processes": [
        f"global_step5/zero_pp_rank_{rank}_mp_rank_00_{what}_states.pt"
        for rank in range(2)
        for what in ("model", "optim")
    ],
}
RESUMES = {("", "DeepSpeed"), ("", "DeepSpeed ZeRO-1 or ZeRO-2 on 1 processes")}  # what runs, and what was written


@pytest.mark.parametrize("written", WRITTEN)
def test_the_files_of_a_checkpoint_tell_its_engine(written: str, tmp_path: Path):
    for name in WRITTEN[written]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    if "global_step" in WRITTEN[written][-1]:
        (tmp_path / "global_step9").mkdir()  # of another checkpoint; `latest` names the valid one
        (tmp_path / "latest").write_text("global_step5\n")
    for runs in WRITTEN:
        said = why_not_loaded(tmp_path, runs, "DDP")
        deepspeed = written.startswith("DeepSpeed") and runs.startswith("DeepSpeed")
        if runs == written or (runs, written) in RESUMES or (deepspeed and "DeepSpeed" in (runs, written)):
            assert said is None, runs
            continue
        named = f"{written or 'an engine other than FSDP and DeepSpeed'}, and {runs or 'DDP'} cannot resume from it."
        assert said is not None
        assert f"{tmp_path} was written under {named}" in said
        advice = {
            "FSDP with SHARDED_STATE_DICT": "accelerate merge-weights",
            "DeepSpeed ZeRO-3 on 2 processes": "fp32.py",
        }
        assert advice.get(written, "or start a new run from its weights.") in said


def test_one_process_refuses_what_it_cannot_load_and_warns_of_what_is_missing(
    workshop: Workshop, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    model = workshop.model("untied")
    build("dpo", trl_ext, model, tmp_path, max_steps=1).train()
    folder = tmp_path / "checkpoint-1"
    again = build("dpo", trl_ext, model, tmp_path, max_steps=2)
    (folder / "pytorch_model_fsdp.bin").touch()
    with pytest.raises(ValueError, match=r"checkpoint-1 was written under FSDP.* and one process cannot resume"):
        again.train(resume_from_checkpoint="auto")
    assert again.state.global_step == 0
    (folder / "pytorch_model_fsdp.bin").unlink()
    (folder / "optimizer.pt").unlink()
    with caplog.at_level("WARNING", logger="trl_ext"):
        again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 2
    assert caplog.text.count("checkpoint-1 has no optimizer state that can be loaded here") == 1


def test_a_weight_that_is_not_in_the_checkpoint_stays_unchanged(workshop: Workshop, tmp_path: Path):
    model = AutoModelForCausalLM.from_pretrained(workshop.model("untied"))
    was = {name: x.clone() for name, x in model.state_dict().items()}
    model.save_pretrained(tmp_path)
    assert not names_differ(model, tmp_path)
    saved = {name: x + 1 for name, x in load_file(tmp_path / "model.safetensors").items()}
    lacks = "model.layers.1.mlp.up_proj.weight"
    del saved[lacks]
    save_file(saved, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert names_differ(model, tmp_path)
    load_weights(model, tmp_path)
    for name, x in model.state_dict().items():
        assert torch.equal(x, was[name] + (name != lacks)), name


@pytest.mark.parametrize("name", ["tied", "untied", "experts"])
def test_names_differ_if_the_files_lack_a_name_of_the_model(name: str, workshop: Workshop, tmp_path: Path):
    model = AutoModelForCausalLM.from_pretrained(workshop.model(name))
    for size in ("1GB", "20KB"):  # one file, and several with an index
        model.save_pretrained(tmp_path / size, max_shard_size=size)
        assert names_differ(model, tmp_path / size) is (name == "experts")
    assert (tmp_path / "20KB" / "model.safetensors.index.json").exists()
    assert not names_differ(model, tmp_path)
