"""The store of a teacher's hidden states: later epochs and runs equal a run without it, and run no teacher."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from test_distillation import _trainer as build
from test_distillation import _with_completions as with_completions
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, TrainerCallback

import trl_ext
from tiny import REFERENCE_SEED, Workshop
from token_counts import counted, total
from trl_ext.distributed.ranks import Ranks
from trl_ext.reference import teacher_states
from trl_ext.reference.segments import Segment, _header_of_values
from trl_ext.trainers.teacher_store import TeacherStore

_ROWS = 8


def _train(workshop: Workshop, folder: Path, *, store: str = "disk", **changes: Any) -> tuple[Any, int]:
    """Train two epochs. Return the trainer and the tokens that passes without a gradient processed."""
    options = {
        "train_dataset": with_completions(_ROWS),
        "completion_column": "answer",
        "teacher_store": store,
        "max_steps": 4,
        **({"teacher_store_dir": str(folder / "store")} if store == "disk" else {}),
        **changes,
    }
    trainer = build(workshop, folder / "out", **options)
    for forward in trainer.scoring_forwards:
        forward.packing.checked = forward.is_compared = True  # these checks run passes too
    with counted() as counts:
        trainer.train()
    return trainer, total(counts.without)


def _seen(trainer: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    return losses, {name: param.detach() for name, param in trainer.model.named_parameters()}


def _assert_equal_bits(one: Any, other: Any) -> None:
    (losses, weights), (other_losses, other_weights) = _seen(one), _seen(other)
    assert losses == other_losses
    assert all(weight.equal(other_weights[name]) for name, weight in weights.items())


def _assert_close(one: Any, other: Any) -> None:
    (losses, weights), (other_losses, other_weights) = _seen(one), _seen(other)
    assert losses == pytest.approx(other_losses, rel=1e-5)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, other_weights[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_later_run_loads_only_the_head_and_equals_the_first_bit_for_bit(
    dtype: str, workshop: Workshop, tmp_path: Path
) -> None:
    arguments = {"teacher_model_init_kwargs": {"dtype": dtype}}
    without, tokens_of_all = _train(workshop, tmp_path, store="off", **arguments)
    first, tokens = _train(workshop, tmp_path, **arguments)
    assert 0 < tokens <= tokens_of_all / 2  # none in the second epoch
    assert first.explain()["teacher"].reason.startswith("The teacher scores each row once, ")
    later, tokens_of_later = _train(workshop, tmp_path, **arguments)
    assert tokens_of_later == 0
    assert later.teacher_model is None
    assert later.explain()["teacher"].reason == "All hidden states are stored, so only the teacher's head is loaded."
    _assert_equal_bits(first, later)
    if dtype == "float32":
        _assert_close(first, without)


def test_the_logs_count_what_the_store_skips(workshop: Workshop, tmp_path: Path) -> None:
    first, _ = _train(workshop, tmp_path)
    later, _ = _train(workshop, tmp_path)
    passes = [[log["skipped/passes"] for log in x.state.log_history if "loss" in log] for x in (first, later)]
    assert passes == [[0.0, 0.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]]


def test_a_new_row_loads_the_teacher_and_runs_it_on_that_row(workshop: Workshop, tmp_path: Path) -> None:
    _train(workshop, tmp_path)
    rows = with_completions(_ROWS).to_list()
    rows[3]["answer"] = "w5 w6"
    data = Dataset.from_list(rows)
    trainer, tokens = _train(workshop, tmp_path, train_dataset=data, max_steps=4)
    assert trainer.teacher_model is not None
    assert 0 < tokens <= 16
    without, _ = _train(workshop, tmp_path, store="off", train_dataset=data, max_steps=4)
    _assert_close(trainer, without)


@pytest.mark.parametrize("change", ["weights", "arguments", "object"])
def test_another_teacher_is_not_taken_for_the_stored_one(change: str, workshop: Workshop, tmp_path: Path) -> None:
    _train(workshop, tmp_path)
    folder = tmp_path / "teacher"
    model = AutoModelForCausalLM.from_pretrained(workshop.model("untied", seed=REFERENCE_SEED))
    if change == "weights":
        with torch.no_grad():
            model.lm_head.weight[4] += 1e-3
    model.save_pretrained(folder)
    changes: dict[str, Any] = {"teacher_model": str(folder)}
    if change == "arguments":
        changes["teacher_model_init_kwargs"] = {"dtype": "bfloat16"}
    if change == "object":
        changes["teacher_model"] = model
    trainer, tokens = _train(workshop, tmp_path, **changes)
    # A teacher in memory is known by its weights, although its files are not
    assert (tokens == 0) == (change == "object")
    without, _ = _train(workshop, tmp_path, store="off", **changes)
    _assert_close(trainer, without)


@pytest.mark.parametrize("damage", ["truncated states", "flipped states", "flipped head", "no head", "empty source"])
def test_damaged_files_are_computed_again(damage: str, workshop: Workshop, tmp_path: Path) -> None:
    first, _ = _train(workshop, tmp_path)
    (source,) = (tmp_path / "store" / "sources").iterdir()
    folder = tmp_path / "store" / json.loads(source.read_text())["identity"]
    states = next(path for path in folder.iterdir() if path.suffix == ".safetensors")
    head = folder / "head" / "head.safetensors"
    if damage == "truncated states":
        states.write_bytes(states.read_bytes()[:-7])
    elif damage == "flipped states":
        content = bytearray(states.read_bytes())
        content[-40] ^= 1
        states.write_bytes(content)
    elif damage == "flipped head":
        content = bytearray(head.read_bytes())
        content[-3] ^= 1
        head.write_bytes(content)
    elif damage == "no head":
        head.unlink()
    else:
        source.write_text("")
    trainer, _ = _train(workshop, tmp_path)
    assert trainer.teacher_model is not None
    _assert_close(trainer, first)


def test_a_later_run_reads_no_hidden_states_before_its_first_step(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _train(workshop, tmp_path)
    read = []
    entry = Segment.entry
    monkeypatch.setattr(Segment, "entry", lambda segment, i: read.append(i) or entry(segment, i))
    trainer = _build(workshop, tmp_path)
    assert (trainer.teacher_model, read) == (None, [])
    trainer.train()
    assert len(read) == 2 * _ROWS


@pytest.mark.parametrize("is_sharded", [False, True])
def test_damage_is_found_when_the_teacher_can_still_be_loaded(
    is_sharded: bool, workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _train(workshop, tmp_path)
    states = next((tmp_path / "store").glob("*/*.safetensors"))
    content = bytearray(states.read_bytes())
    content[_header_of_values(states)["offset"]] ^= 1
    states.write_bytes(content)
    monkeypatch.setattr(Ranks, "is_sharded", is_sharded)
    trainer = _build(workshop, tmp_path)
    assert (trainer.teacher_model is not None) == is_sharded
    trainer.train()
    assert trainer.teacher_model is not None
    monkeypatch.undo()
    later, tokens = _train(workshop, tmp_path)
    assert (later.teacher_model, tokens) == (None, 0)


def test_a_full_disk_keeps_the_teacher(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from trl_ext.reference import store as store_file

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store_file, "write_segment", full)
    trainer, tokens = _train(workshop, tmp_path)
    without, tokens_of_all = _train(workshop, tmp_path, store="off")
    assert "Cannot write hidden states of the teacher" in caplog.text
    assert tokens == tokens_of_all
    _assert_close(trainer, without)


def test_the_plan_states_the_size_before_it_fills(workshop: Workshop, tmp_path: Path) -> None:
    trainer = build(
        workshop,
        tmp_path,
        train_dataset=with_completions(_ROWS),
        completion_column="answer",
        teacher_store="disk",
        teacher_store_dir=str(tmp_path / "store"),
    )
    reason = trainer.explain()["teacher"].reason
    assert "128 bytes for each token of a completion, about 6.4 KiB for 8 rows" in reason


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"teacher_store": "disk"}, "`teacher_store='disk'` needs `completion_column`"),
        ({"teacher_store_dir": "x"}, "`teacher_store_dir='x'` needs `teacher_store=\"disk\"`"),
        ({"teacher_store": "ram", "completion_column": "a"}, "`teacher_store` must be one of"),
    ],
)
def test_options_of_the_store_that_contradict_each_other(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said.replace("(", r"\(")):
        trl_ext.DistillationConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **options)


def _losses_without(workshop: Workshop, folder: Path, **changes: Any) -> list[float]:
    trainer, _ = _train(workshop, folder, store="off", **changes)
    return _seen(trainer)[0]


def _write(model: Any) -> None:
    with torch.no_grad():
        model.lm_head.weight.mul_(2)


def _write_uncounted(model: Any) -> None:
    model.model.norm.weight.data.mul_(2)


def _set_parameter(model: Any) -> None:
    model.model.norm.weight = torch.nn.Parameter(2 * model.model.norm.weight.detach())


def _set_attribute(model: Any) -> None:
    model.model.norm.variance_epsilon = 5.0


def _write_buffer(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(3)


@pytest.mark.parametrize("change", [_write, _write_uncounted, _set_parameter, _set_attribute, _write_buffer])
def test_a_teacher_changed_after_the_trainer_is_built_does_not_take_the_files_name(
    change: Callable[[Any], None], workshop: Workshop, tmp_path: Path
) -> None:
    class Sharpened(trl_ext.DistillationTrainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            change(self.teacher_model)

    options = {"train_dataset": with_completions(_ROWS), "completion_column": "answer", "max_steps": 4}
    store = {"teacher_store": "disk", "teacher_store_dir": str(tmp_path / "store")}
    sharpened = build(workshop, tmp_path / "out", Sharpened, **options, **store)
    sharpened.train()
    without = build(workshop, tmp_path / "out", Sharpened, **options)
    without.train()
    _assert_close(sharpened, without)
    later, _ = _train(workshop, tmp_path)
    assert later.teacher_model is not None
    assert _seen(later)[0] == pytest.approx(_losses_without(workshop, tmp_path), rel=1e-5)


@pytest.mark.filterwarnings("ignore:Using `torch.compile")  # the tokens are counted by a global hook
@pytest.mark.parametrize("options", [{"bf16": True}, {"torch_compile": True, "torch_compile_backend": "eager"}])
def test_a_teacher_in_a_wrapper_is_the_one_that_was_passed(
    options: dict[str, Any], workshop: Workshop, tmp_path: Path
) -> None:
    first, _ = _train(workshop, tmp_path, **options)
    later, tokens = _train(workshop, tmp_path, **options)
    assert (later.teacher_model, tokens) == (None, 0)
    assert _seen(first)[0] == _seen(later)[0]
    assert _seen(first)[0] == pytest.approx(_losses_without(workshop, tmp_path, **options), rel=1e-2)


def test_a_teacher_whose_files_arrive_while_it_is_loaded_has_its_name(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        calls = iter([None])
        known = TeacherStore._source_of
        patch.setattr(TeacherStore, "_source_of", lambda store, name: next(calls, known(store, name)))
        _train(workshop, tmp_path)
    later, _ = _train(workshop, tmp_path)
    assert later.teacher_model is None


def test_a_teacher_that_changes_during_training_is_an_error(workshop: Workshop, tmp_path: Path) -> None:
    class Changes(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            with torch.no_grad():
                trainer.teacher_model.lm_head.weight.mul_(2)

    trainer = _build(workshop, tmp_path)
    trainer.add_callback(Changes())
    with pytest.raises(RuntimeError, match="The weights or adapters of `teacher_model` have changed during training"):
        trainer.train()


def test_a_teacher_that_changes_after_it_is_loaded_late_is_an_error(workshop: Workshop, tmp_path: Path) -> None:
    _train(workshop, tmp_path)
    others = with_completions(3 * _ROWS)
    trainer = _build(workshop, tmp_path)
    trainer.train()
    trainer.evaluate(others.select(range(_ROWS, 2 * _ROWS)))
    with torch.no_grad():
        trainer.teacher_model.lm_head.weight.mul_(2)
    with pytest.raises(RuntimeError, match="The weights or adapters of `teacher_model` have changed during training"):
        trainer.evaluate(others.select(range(2 * _ROWS, 3 * _ROWS)))


def test_files_of_the_teacher_that_change_before_it_is_loaded_late_are_an_error(
    workshop: Workshop, tmp_path: Path
) -> None:
    files = tmp_path / "teacher"
    shutil.copytree(workshop.model("untied", seed=REFERENCE_SEED), files)
    _build(workshop, tmp_path, teacher_model=str(files)).train()
    other_rows = with_completions(2 * _ROWS).select(range(_ROWS, 2 * _ROWS))
    trainer = _build(workshop, tmp_path, teacher_model=str(files))
    assert trainer.teacher_model is None
    shutil.rmtree(files)
    shutil.copytree(workshop.model("untied", seed=REFERENCE_SEED + 1), files)
    with pytest.raises(RuntimeError, match="The files of `teacher_model` have changed since the trainer was built"):
        trainer.evaluate(other_rows)
    shutil.rmtree(files)
    shutil.copytree(workshop.model("untied", seed=REFERENCE_SEED), files)
    later = _build(workshop, tmp_path, teacher_model=str(files))
    assert later.teacher_model is None
    head = AutoModelForCausalLM.from_pretrained(files).lm_head.weight
    assert later._teacher.store._head.weight.equal(head)


def _build(workshop: Workshop, folder: Path, **changes: Any) -> Any:
    options = {
        "train_dataset": with_completions(_ROWS),
        "completion_column": "answer",
        "teacher_store": "disk",
        "teacher_store_dir": str(folder / "store"),
        "max_steps": 4,
        **changes,
    }
    return build(workshop, folder / "out", **options)


@pytest.mark.parametrize("at", ["first run", "later run"])
def test_a_teacher_set_after_the_trainer_is_built_is_the_teacher(at: str, workshop: Workshop, tmp_path: Path) -> None:
    if at == "later run":
        _train(workshop, tmp_path)
    teacher = AutoModelForCausalLM.from_pretrained(workshop.model("untied", seed=REFERENCE_SEED + 1))
    trainer = _build(workshop, tmp_path)
    trainer.teacher_model = teacher
    trainer.train()
    losses = _losses_without(workshop, tmp_path, teacher_model=teacher)
    assert _seen(trainer)[0] == pytest.approx(losses, rel=1e-5)
    later, _ = _train(workshop, tmp_path)
    assert _seen(later)[0] == pytest.approx(_losses_without(workshop, tmp_path), rel=1e-5)


def test_the_vocabulary_of_a_stored_teacher_is_compared_too(workshop: Workshop, tmp_path: Path) -> None:
    _train(workshop, tmp_path)
    with pytest.raises(ValueError, match=r"has a vocabulary of 97 tokens \(`vocab_size`\), but `model` one of 501"):
        _build(workshop, tmp_path, model=workshop.model("odd_vocab"))


def test_an_evaluation_of_other_rows_loads_the_teacher(
    workshop: Workshop, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _train(workshop, tmp_path)
    others = with_completions(2 * _ROWS).select(range(_ROWS, 2 * _ROWS))
    trainer = _build(workshop, tmp_path)
    assert trainer.teacher_model is None
    said = f"`teacher_model` is loaded now and stays in memory, because {tmp_path / 'store'} lacks a row"
    assert said not in caplog.text
    loss = trainer.evaluate(others)["eval_loss"]
    assert trainer.teacher_model is not None
    assert caplog.text.count(said) == 1
    without = build(workshop, tmp_path / "out", train_dataset=others, completion_column="answer")
    assert loss == pytest.approx(without.evaluate(others)["eval_loss"], rel=1e-5)


@pytest.mark.parametrize(
    "keywords", [{"subfolder": "part"}, {"revision": "v2"}, {"cache_dir": "elsewhere"}, {"variant": "fp16"}]
)
def test_arguments_that_choose_other_files_are_no_name(keywords: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"rms_norm_eps": 1e-6}')
    known = _source(tmp_path, None), _source(tmp_path, {"rms_norm_eps": 0.1}), _source(tmp_path, {"dtype": "float32"})
    assert None not in known
    assert len({*known}) == 3
    assert _source(tmp_path, keywords) is None


def test_an_adapter_is_no_name_because_its_base_model_lies_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "adapter_config.json").write_text("{}")
    assert _source(tmp_path, None) is None


def test_each_file_of_a_saved_model_is_part_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "weights.bin").write_bytes(b"1")
    before = _source(tmp_path, None)
    (tmp_path / "part" / "weights.bin").write_bytes(b"2")
    assert _source(tmp_path, None) not in (None, before)


def _source(folder: Path, keywords: dict[str, str] | None) -> str | None:
    config = trl_ext.DistillationConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        completion_column="answer",
        teacher_store="disk",
        teacher_model_init_kwargs=keywords,
    )
    return TeacherStore(None, None, None, config)._source_of(str(folder))  # type: ignore[arg-type]


def test_a_folder_without_space_for_the_head_keeps_the_teacher(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(teacher_states, "write_file", full)
    trainer, _ = _train(workshop, tmp_path)
    assert "A later run loads the teacher. Free space, or set `teacher_store_dir`." in caplog.text
    monkeypatch.undo()
    later, _ = _train(workshop, tmp_path)
    assert later.teacher_model is not None
    _assert_close(trainer, later)


def test_a_name_is_learned_from_a_store_that_an_object_filled(workshop: Workshop, tmp_path: Path) -> None:
    path = workshop.model("untied", seed=REFERENCE_SEED)
    _train(workshop, tmp_path, teacher_model=AutoModelForCausalLM.from_pretrained(path))
    named, tokens = _train(workshop, tmp_path)
    assert (named.teacher_model is None, tokens) == (False, 0)
    again, _ = _train(workshop, tmp_path)
    assert again.teacher_model is None


def test_hidden_states_that_are_not_finite_are_not_stored(workshop: Workshop, tmp_path: Path) -> None:
    teacher = AutoModelForCausalLM.from_pretrained(workshop.model("untied", seed=REFERENCE_SEED))
    with torch.no_grad():
        teacher.model.norm.weight[3] = torch.inf
    _, tokens = _train(workshop, tmp_path, teacher_model=teacher, on_non_finite_loss="skip")
    _, tokens_of_later = _train(workshop, tmp_path, teacher_model=teacher, on_non_finite_loss="skip")
    assert tokens == tokens_of_later > 0


def test_a_teacher_whose_positions_depend_on_the_batch_is_refused(workshop: Workshop, tmp_path: Path) -> None:
    teacher = AutoModelForCausalLM.from_pretrained(
        workshop.model("untied", seed=REFERENCE_SEED),
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    )
    with pytest.raises(ValueError, match=r'is not supported here: positions \(`rope_type="dynamic"`\) depend'):
        _build(workshop, tmp_path, teacher_model=teacher)


def test_a_teacher_with_learned_positions_is_loaded_again(workshop: Workshop, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=97, n_embd=32, n_layer=1, n_head=2, pad_token_id=0, eos_token_id=1)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "teacher")
    # Rows without padding, whose entries could be found before training
    options = {"teacher_model": str(tmp_path / "teacher"), "per_device_train_batch_size": 1, "max_steps": 2 * _ROWS}
    first, _ = _train(workshop, tmp_path, **options)
    later, _ = _train(workshop, tmp_path, **options)
    assert later.teacher_model is not None
    _assert_close(first, later)
    assert _seen(first)[0] == pytest.approx(_losses_without(workshop, tmp_path, **options), rel=1e-5)
