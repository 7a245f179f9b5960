"""A reference that is changed in memory: no log-prob of another model is used or stored for it."""

import itertools
from contextlib import nullcontext

import pytest
import torch
import trl
from transformers import AutoModelForCausalLM

import trl_ext
from fp32_precision import fewer_digits
from reference_changes import BY_FUNCTIONS, LISTED, norm, plain, unnoticed
from reference_runs import trainer
from tiny import lora_config, preferences
from token_counts import counted
from trl_ext.reference.canary import COARSE, EXACT, Canary, Tolerance

WARNS = "Stored reference log-probs are not used, because the reference now computes other values"
NAMES = itertools.count()
COMPARED = "loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "grad_norm"


SHORT = ["buffer", "norm"]


# Ways to change a process or a model that the identity does not list
HIDDEN = {
    "object of a library": (unnoticed(1.0), unnoticed(0.5), None),
    "function of torch": (plain, plain, (torch, "rsqrt", torch.reciprocal)),
}


def run(workshop, tmp_path, library, change, role="lora", data=None, late=plain, **config):
    """Train with a reference after `change`, and return the logs and the passes without a gradient."""
    config |= {"data": preferences(12, 1) if data is None else data}
    model = AutoModelForCausalLM.from_pretrained(workshop.model("untied"))
    change(model)
    if library is trl_ext:
        config["reference_store_dir"] = str(tmp_path / "store")
    if role == "streaming":
        config |= {"data": config["data"].to_iterable_dataset(), "max_steps": 3}
    config |= {
        "lora": {"policy": model, "peft_config": lora_config()},
        "streaming": {"policy": model, "peft_config": lora_config()},
        "model": {"ref_model": model},
        "precomputed": {"policy": model, "precompute_ref_log_probs": True},
    }[role]
    with counted() as tokens:
        subject = trainer(workshop, tmp_path, library, **config)
        late(model)
        subject.train()
    return subject.state.log_history[:-1], tokens.without


@pytest.fixture
def stock(workshop, tmp_path):
    """Return stock TRL's logs. New names of the data prevent that it reuses precomputed values."""

    def logs(change, role="lora", **config):
        name = next(NAMES)
        data = preferences(12, 1).add_column("name", [name] * 12)
        return run(workshop, tmp_path, trl, change, role, data=data, **config)[0]

    return logs


def assert_same(ours, stock):
    assert len(ours) == len(stock) == 3
    for got, wanted in zip(ours, stock, strict=True):
        for key in COMPARED:
            assert got[key] == pytest.approx(wanted[key], rel=1e-4, abs=1e-4), key


def assert_differ(logs, others):
    assert any(one["loss"] != pytest.approx(other["loss"], abs=1e-3) for one, other in zip(logs, others, strict=True))


ROLES = ("model", "precomputed", "streaming")
SLOW = [
    pytest.param(name, role, marks=pytest.mark.slow)
    for name in LISTED
    for role in (ROLES if name in SHORT else ("lora", *ROLES))
]


@pytest.mark.parametrize(("name", "role"), [*((name, "lora") for name in SHORT), *SLOW])
def test_a_change_that_the_identity_lists_makes_another_reference(name, role, workshop, tmp_path, stock, caplog):
    change, again = LISTED[name], ([] if name in SHORT else [LISTED[name]])
    of_stock = {plain: stock(plain, role), change: stock(change, role)}
    assert_differ(*of_stock.values())
    known = set()
    for model in (plain, change, plain, *again):
        ours, passes = run(workshop, tmp_path, trl_ext, model, role)
        assert_same(ours, of_stock[model])
        assert len(passes) == (1 if model in known else 3)
        known.add(model)
    assert WARNS not in caplog.text


@pytest.mark.parametrize("name", ["hook", pytest.param("forward", marks=pytest.mark.slow)])
@pytest.mark.parametrize("role", ["lora", pytest.param("model", marks=pytest.mark.slow)])
def test_a_function_of_a_user_lets_the_reference_run_where_trl_runs_it(name, role, workshop, tmp_path, stock):
    of_stock = stock(BY_FUNCTIONS[name], role)
    for _ in range(2):
        ours, passes = run(workshop, tmp_path, trl_ext, BY_FUNCTIONS[name], role)
        assert_same(ours, of_stock)
        assert len(passes) == 3


SLOW = [pytest.param(name, role, marks=pytest.mark.slow) for name in HIDDEN for role in ROLES]


@pytest.mark.parametrize(("name", "role"), [*((name, "lora") for name in HIDDEN), *SLOW])
def test_a_change_that_the_identity_misses_is_detected_by_the_canary(
    name, role, workshop, tmp_path, stock, caplog, monkeypatch
):
    first, second, patch = HIDDEN[name]
    known = []
    for changed in (False, True, False, True):
        with monkeypatch.context() as patched:
            if changed and patch:
                patched.setattr(*patch)
            model = second if changed else first
            wanted = stock(model, role)
            caplog.clear()
            ours, passes = run(workshop, tmp_path, trl_ext, model, role)
        assert_same(ours, wanted)
        checks = passes[:-3] if changed not in known else passes
        assert len(checks) == len(known) if changed not in known else 1 <= len(checks) <= 2
        assert all(0 < rows <= 4 for rows, _ in checks)
        assert caplog.text.count(WARNS) == int(bool(known) and changed not in known)
        known.append(changed)
    folders = [path for path in (tmp_path / "store").iterdir() if path.is_dir()]
    assert len(folders) == 2
    assert len({path.name.split("-")[0] for path in folders}) == 1


@pytest.mark.slow
def test_stock_reuses_old_values_after_such_a_change(workshop, tmp_path):
    data = preferences(12, 1).add_column("name", [next(NAMES)] * 12)
    of_plain, of_changed = (run(workshop, tmp_path, trl, x, "precomputed", data=data)[0] for x in (plain, norm))
    assert of_plain[0]["rewards/margins"] == pytest.approx(0, abs=1e-4)  # the policy is the reference
    assert of_changed[0]["rewards/margins"] != pytest.approx(0, abs=1e-2)


def test_a_change_after_the_trainer_is_built_is_detected(workshop, tmp_path, stock, caplog):
    known = set()
    for late, checks in ((norm, 0), (plain, 1), (norm, 2)):
        ours, passes = run(workshop, tmp_path, trl_ext, plain, late=late)
        assert_same(ours, stock(plain, late=late))
        assert len(passes) == checks + (0 if late in known else 3)
        known.add(late)
    assert caplog.text.count(WARNS) == 1


@pytest.mark.parametrize("store", ["disk", pytest.param("memory", marks=pytest.mark.slow)])
def test_a_released_reference_that_was_changed_in_memory_is_not_reloaded(store, workshop, tmp_path):
    subject = trainer(workshop, tmp_path, num_train_epochs=2, reference_store=store)
    norm(subject.ref_model)
    subject.train()
    assert subject.ref_model is None
    with pytest.raises(ValueError, match="is no longer the same model"):
        subject.evaluate(preferences(4, seed=9))
    assert subject.ref_model is None


def test_a_reference_that_is_loaded_again_is_the_same_variant(workshop, tmp_path):
    """It is released before any folder is checked, because the training data have reference log-probs."""
    pairs = preferences(12, seed=1)
    changed = trainer(workshop, tmp_path, data=pairs)
    unnoticed(0.5)(changed.ref_model)
    changed.train()
    given = pairs.add_column("ref_chosen_logps", [-20.0] * 12).add_column("ref_rejected_logps", [-21.0] * 12)
    losses = []
    for folder in ("store", "empty"):
        options = {} if folder == "store" else {"reference_store_dir": str(tmp_path / folder)}
        options |= {"data": given, "eval_dataset": preferences(4, seed=9), "num_train_epochs": 2}
        subject = trainer(workshop, tmp_path, **options)
        subject.train()
        assert subject.ref_model is None
        losses.append(subject.evaluate(preferences(4, seed=9))["eval_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_the_canary_check_runs_padded_and_does_not_replace_the_first_batch_check(workshop, tmp_path):
    packed = {"padding_free": None, "num_train_epochs": 2}
    _, first = run(workshop, tmp_path, trl_ext, plain, **packed)
    _, again = run(workshop, tmp_path, trl_ext, plain, **packed)
    (folder,) = (tmp_path / "store").iterdir()
    check = Canary.read(folder, folder.name.split("-")[0]).arrays["input_ids"].shape
    # In both runs, the forwards that compare packed and padded rows of the first batch are the policy's
    assert again[0] == check
    assert again[1:] == first[: len(again) - 1]
    assert len(again) == len(first) - 3 + 1


def test_a_value_that_changed_on_disk_is_scored_again(workshop, tmp_path, caplog):
    logs, _ = run(workshop, tmp_path, trl_ext, plain)
    (path,) = (tmp_path / "store").glob("*/*.safetensors")
    content = bytearray(path.read_bytes())
    content[-24 * (16 + 8) - 1] ^= 1  # a byte of the last value, before 24 checksums and keys
    path.write_bytes(content)
    again, passes = run(workshop, tmp_path, trl_ext, plain)
    assert_same(again, logs)
    assert [rows for rows, _ in passes] == [4, 1]
    assert "has a wrong checksum and is scored again" in caplog.text
    again, passes = run(workshop, tmp_path, trl_ext, plain)
    assert_same(again, logs)
    assert len(passes) == 1


@pytest.mark.parametrize(("bf16", "way"), [(True, None), (False, "fp32_precision")])  # torch warns about its switches
def test_low_precision_products_in_another_batch_are_the_same_reference(bf16, way, workshop, tmp_path, caplog):
    with fewer_digits(way) if way else nullcontext():
        run(workshop, tmp_path, trl_ext, unnoticed(1.0), bf16=bf16, padding_free=None)
        # In other batches, with padding
        _, passes = run(workshop, tmp_path, trl_ext, unnoticed(1.0), bf16=bf16, seed=5, per_device_train_batch_size=3)
        _, of_another = run(workshop, tmp_path, trl_ext, unnoticed(30.0), bf16=bf16)
    assert len(passes) == 1
    assert len(of_another) == 1 + 3
    assert caplog.text.count(WARNS) == 1


@pytest.mark.parametrize(
    ("model", "dtype", "config", "tolerance"),
    [
        ("untied", torch.float32, {}, EXACT),
        ("untied", torch.float32, {"bf16": True}, COARSE),
        ("untied", torch.bfloat16, {}, COARSE),
        ("experts", torch.float32, {}, Tolerance(EXACT.off, COARSE.share)),
    ],
)
def test_the_tolerance_depends_on_the_precision_of_the_reference(model, dtype, config, tolerance, workshop, tmp_path):
    reference = AutoModelForCausalLM.from_pretrained(workshop.model(model), dtype=dtype)
    subject = trainer(workshop, tmp_path, model=model, ref_model=reference, **config)
    assert subject._source.stored._variants.tolerance == tolerance
