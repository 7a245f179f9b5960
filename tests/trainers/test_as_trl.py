"""With `as_trl=True`, all five trainers are stock TRL's, to the bit."""

import functools
import os
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import trl

import trl_ext
from drop_in_cases import Case
from ranks import Rank, run_on_ranks
from run_losses import ALL_CASES, Record, Trainers, build, train
from tiny import Workshop
from trl_ext.config import ADDED_FIELDS

STOCK = Trainers.of(trl)
OURS = Trainers.of(trl_ext)


def as_trl(trainers: Trainers) -> Trainers:
    configs = {name: x for name, x in vars(trainers).items() if name.endswith("_config")}
    return replace(trainers, **{name: partial(x, as_trl=True) for name, x in configs.items()})


AS_TRL = as_trl(OURS)
NAMES = [
    *("sft-nll-full", "sft-nll-lora", "sft-packing", "sft-padding_free"),
    *("dpo-sigmoid-full", "dpo-sigmoid-lora", "dpo-precompute-batch-eval", "dpo-sync_ref_model"),
    *("kto-kto-full", "kto-kto-lora"),
    *("grpo-generation", "grpo-generation-lora", "grpo-dead-group", "grpo-evaluation"),
    *("rloo-defaults-full", "rloo-defaults-lora"),
    *("reward-defaults-full", "reward-evaluation"),
]


@functools.cache
def stock(name: str, workshop: Workshop) -> Record:
    return train(ALL_CASES[name], STOCK, workshop)


def differences(ours: Record, stock: Record) -> list[str]:
    """Return what is not equal to the last bit."""
    parts = ("losses", "logs", "feeds", "best")
    different = [part for part in parts if getattr(ours, part) != getattr(stock, part)]
    for part in ("gradients", "updates"):
        pairs = [*zip(*(_tensors(getattr(record, part)) for record in (ours, stock)), strict=True)]
        if not all(name == other and torch.equal(x, y) for (name, x), (other, y) in pairs):
            different.append(part)
    return different


def _tensors(value: Any) -> list[tuple[str, torch.Tensor]]:
    steps = value if isinstance(value, list) else [value]
    return [(name, x) for step in steps for name, x in step.items() if x is not None]


@pytest.mark.filterwarnings("ignore:Position ids are not supported:UserWarning")  # PEFT's, when it generates
@pytest.mark.parametrize("name", NAMES)
def test_training_is_trls_to_the_bit(name: str, workshop: Workshop):
    ours = train(ALL_CASES[name], AS_TRL, workshop)
    assert ours.feeds
    assert any(x.abs().sum() > 0 for _, x in _tensors(ours.updates))
    assert differences(ours, stock(name, workshop)) == []


@pytest.mark.parametrize("name", ["sft-nll-full", "dpo-sigmoid-full", "kto-kto-full", "grpo-dead-group"])
def test_without_it_the_same_comparison_differs(name: str, workshop: Workshop):
    ours = train(ALL_CASES[name], OURS, workshop)
    assert {"logs", "feeds"} <= set(differences(ours, stock(name, workshop)))
    assert ours.fed() < stock(name, workshop).fed()


def doubled(trainers: Trainers) -> Trainers:
    """Return trainers of a user's subclass, whose `super()` is the trainer's."""
    return trainers.with_loss_times(2.0)


def between(base: type) -> type:
    """Return a class between ours and TRL's, whose `super()` is TRL's."""

    class Between(trl.DPOTrainer):
        def compute_loss(self, *positional: Any, **keywords: Any) -> Any:
            return 3.0 * super().compute_loss(*positional, **keywords)

    return type("DPOTrainer", (base, Between) if base is not trl.DPOTrainer else (Between,), {})


def test_code_of_the_user_still_runs_around_trls(workshop: Workshop):
    case = ALL_CASES["dpo-sigmoid-lora"]
    twice = train(case, doubled(STOCK), workshop)
    assert differences(train(case, doubled(AS_TRL), workshop), twice) == []
    assert "losses" in differences(twice, stock(case.name, workshop))
    classes = [replace(x, dpo_trainer=between(x.dpo_trainer)) for x in (AS_TRL, STOCK)]
    ours, thrice = (train(case, x, workshop) for x in classes)
    assert differences(ours, thrice) == []
    assert "losses" in differences(thrice, twice)


@pytest.mark.parametrize("kind", ["sft", "dpo", "kto", "grpo", "rloo", "reward"])
def test_no_method_of_trl_is_ours(kind: str, workshop: Workshop, tmp_path: Path):
    """A method that a later change overrides must give way, too."""
    name = next(name for name in NAMES if name.startswith(kind))
    trainer_class = getattr(OURS, f"{kind}_trainer")
    trainer = build(ALL_CASES[name], replace(AS_TRL, records_batches=False), workshop, str(tmp_path), Record())
    assert isinstance(trainer, trainer_class)
    assert type(trainer).__name__ == trainer_class.__name__
    of_trl = getattr(STOCK, f"{kind}_trainer")
    names = [name for name in dir(of_trl) if not name.startswith("__")]
    others = {name for name in names if getattr(type(trainer), name) != getattr(of_trl, name)}
    assert others == {"train", "save_model"}
    assert type(trainer).__init__ is of_trl.__init__
    assert len(names) > 100


def test_the_plan_says_so_in_one_row(workshop: Workshop, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    case = replace(ALL_CASES["dpo-sigmoid-full"], ours={"balance": False, "head_chunk_size": 7, "padding_free": False})
    trainer = build(case, AS_TRL, workshop, str(tmp_path), Record())
    (row,) = trainer.explain(verbose=True).decisions
    without = (
        "These arguments have no effect: `balance`, `head_chunk_size`."  # `padding_free` is an argument of TRL's, too
    )
    assert row.reason == f"As stock TRL, because `as_trl` is True. {without}"
    trainer.train()
    assert [x.getMessage() for x in caplog.records if "what runs" in x.getMessage()] == [
        f"DPOTrainer: what runs, and why\n{trainer.explain()}"
    ]
    trainer.save_model()
    assert caplog.messages[-1] == f"The model is in {tmp_path}."


FEATURES = {
    "policy_adapter_name": "a",
    "ref_adapter_name": "b",
    "on_non_finite_loss": "stop",
    "reward_scale": 2.0,
    "rpo_average_log_probs": True,
    "sft_label_smoothing": 0.1,
    "trust_sampling_log_probs": True,
    "keep_sampling_mask": True,
    "replay_routes": "sampler",
    "generation_lag": 1,
    "dynamic_sampling": True,
    "vllm_engine_args": {"dtype": "float32"},
    "completion_column": "answer",
}


# What changes passes, speed or memory, but not what is trained, rounding apart
WITHOUT_EFFECT = {
    *("head", "head_chunk_size", "head_kernels", "padding_free", "share_prompts", "balance", "reference_device"),
    *("reference_store", "reference_store_dir", "max_tokens_per_micro_batch", "activation_offloading"),
    *(
        "generate_fewer_rows",
        "zero_advantages_of_equal_rewards",
        "keep_groups_together",
        "force_on_policy_ratio",
        "sampler_check",
        "sample_ahead",
    ),
    # Of a feature
    *(
        "sft_label_smoothing_convention",
        "dynamic_sampling_max_draws",
        "teacher_store",
        "teacher_store_dir",
        "teacher_device",
    ),
}


def test_each_field_is_a_feature_or_without_effect():
    names = {field.name for added in ADDED_FIELDS.values() for field in fields(added)}
    assert names - {"as_trl", "show_plan"} == FEATURES.keys() | WITHOUT_EFFECT


@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_that_trl_lacks_is_an_error(name: str, tmp_path: Path):
    configs = [x for x in ADDED_FIELDS if name in [field.name for field in fields(x)]]
    assert configs
    for config in configs:
        value = FEATURES[name]
        with pytest.raises(
            ValueError, match=rf"`as_trl=True` trains as stock TRL, which has no `{name}=.*`\. Leave it "
        ):
            config(output_dir=str(tmp_path), bf16=False, use_cpu=True, as_trl=True, **{name: value})


def test_a_loss_that_trl_lacks_is_an_error(tmp_path: Path):
    with pytest.raises(ValueError, match=r"has no loss type 'cdpo'\. Remove one of the two\."):
        trl_ext.DPOConfig(
            output_dir=str(tmp_path), bf16=False, use_cpu=True, as_trl=True, loss_type=["sigmoid", "cdpo"]
        )


def test_it_resumes_from_the_last_checkpoint(workshop: Workshop, tmp_path: Path):
    saves = {"save_strategy": "steps", "save_steps": 1}
    case = replace(ALL_CASES["sft-nll-full"], steps=3)
    case = replace(case, config={**case.config, **saves})
    whole = build(case, AS_TRL, workshop, str(tmp_path), Record())
    assert whole.train("auto").global_step == 3  # there is none
    record = Record()
    resumed = build(case, AS_TRL, workshop, str(tmp_path), record)
    resumed.train(str(tmp_path / "checkpoint-2"))
    assert len(record.losses) == 1
    for weight, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(weight, other)
    record = Record()
    build(case, AS_TRL, workshop, str(tmp_path), record).train("auto")
    assert not record.losses  # the last one is that of step 3


def of_ranks(rank: Rank, trainers: Trainers, name: str) -> dict[str, Any]:
    # Several data-parallel ranks with rows of different lengths, which ours would move between them
    case = ALL_CASES[name]
    case = replace(case, config={**case.config, "per_device_train_batch_size": 2})
    record = Record()
    folder = str(rank.folder / f"{name}-{trainers is AS_TRL}")
    trainer = build(case, trainers, Workshop(Path(os.environ["TINY_ROOT"])), folder, record)
    trainer.train()
    rank.check(trainer)
    return {"logs": record.logs, "updates": record.updates, "tokens": [x.tokens for x in record.feeds]}


OF_RANKS: list[Case] = [ALL_CASES["dpo-sigmoid-lora"], ALL_CASES["kto-kto-full"]]
CASES = {
    f"{case.name}-{name}": partial(of_ranks, trainers=trainers, name=case.name)
    for case in OF_RANKS
    for name, trainers in (("as_trl", AS_TRL), ("stock", STOCK), ("ours", OURS))
}


def test_two_ranks_train_as_trls(workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    workshop.model("tied")
    monkeypatch.setenv("TINY_ROOT", str(workshop.root))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "of_ranks"))
    results = run_on_ranks(__file__, list(CASES), "ddp", tmp_path, 2)
    for case in OF_RANKS:
        for ours, theirs, packed in zip(
            *(results[f"{case.name}-{x}"] for x in ("as_trl", "stock", "ours")), strict=True
        ):
            assert ours["logs"] == theirs["logs"]
            assert ours["tokens"] == theirs["tokens"] != packed["tokens"]
            assert ours["updates"].keys() == theirs["updates"].keys()
            assert all(torch.equal(x, theirs["updates"][name]) for name, x in ours["updates"].items())
