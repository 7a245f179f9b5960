"""DPO and GRPO train on two ranks as one process does, and never gather the head's weight."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import trl_ext
from head_placement import HeadGatheredError, head_stays_sharded
from ranks import Rank, run_on_ranks, split
from rewards import id_reward
from tiny import Workshop, lora_config, preferences, prompts, scripted_rollout
from trained_weights import trained

COMMON = {
    "max_steps": 2,
    "gradient_accumulation_steps": 2,
    "learning_rate": 0.05,
    "lr_scheduler_type": "constant",
    "optim": "sgd",
    "max_grad_norm": 0.0,
    "seed": 3,
    "gradient_checkpointing": False,
    "bf16": False,
    "report_to": "none",
    "save_strategy": "no",
    "logging_steps": 1,
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}


LOCAL_TP = "each rank scores with its rows of the weight (tensor parallel)"
LOCAL = "each rank scores the tokens of all ranks with its rows of the weight (FSDP2)"
IN_TURN = "the ranks broadcast their rows of the weight in slices (FSDP2)"
WHOLE = "each pass gathers the whole weight"
HEAD = {"modules_to_save": ["lm_head"]}


def trainer_of(
    folder: Path, path: str, kind: str = "dpo", *, rows: int = 2, lora: Any = None, place: Any = None, **options: Any
) -> Any:
    torch.manual_seed(0)
    given = {
        "model": AutoModelForCausalLM.from_pretrained(path, dtype="float32", **(place or {})),
        "processing_class": AutoTokenizer.from_pretrained(path),
        "peft_config": None if lora is None else lora_config(**lora),
    }
    torch.manual_seed(0)
    if kind == "dpo":
        args = trl_ext.DPOConfig(str(folder), per_device_train_batch_size=rows, **{**COMMON, **options})
        return trl_ext.DPOTrainer(args=args, train_dataset=preferences(16, seed=1), **given)
    sizes = {"num_generations": 4, "max_completion_length": 6, "beta": 0.1, "temperature": 1.0}
    args = trl_ext.GRPOConfig(str(folder), per_device_train_batch_size=rows, **{**COMMON, **sizes, **options})
    return trl_ext.GRPOTrainer(
        args=args, reward_funcs=id_reward, rollout_func=scripted_rollout, train_dataset=prompts(16, seed=1), **given
    )


def change(trainer: Any) -> dict[str, torch.Tensor]:
    """Return the change of the trained weights."""
    initial = trained(trainer.model)
    trainer.train()
    return {name: weight - initial[name] for name, weight in trained(trainer.model).items()}


def trainer_on(rank: Rank, model: str, **how: Any) -> Any:
    place = split() if rank.engine == "tp" else None
    return trainer_of(rank.folder / f"run-{rank.index}", torch.load(rank.folder / "models")[model], place=place, **how)


def watched(rank: Rank, model: str, **how: Any) -> tuple[str, dict[str, torch.Tensor]]:
    """Train under the watch, which raises if the head's weight is gathered."""
    trainer = trainer_on(rank, model, **how)
    inner, shape = trainer.train, (trainer.model.config.vocab_size, 32)

    def train() -> None:
        with head_stays_sharded(shape):
            inner()

    trainer.train = train
    changed = change(trainer)
    rank.check(trainer)
    return trainer.scoring_forwards[0].head_rows, changed


def gathered(rank: Rank, model: str, **how: Any) -> tuple[str, dict[str, torch.Tensor]]:
    """Train with a head whose weight is gathered, by the rule or by request. The watch must notice."""
    with pytest.raises(HeadGatheredError):
        watched(rank, model, **how)
    trainer = trainer_on(rank, model, **how)
    changed = change(trainer)
    rank.check(trainer)
    return trainer.scoring_forwards[0].head_rows, changed


# Trainer, model, arguments, and how the rule reads the head
FSDP2: dict[str, tuple[Any, str, dict[str, Any], str]] = {
    "lora, few tokens": (watched, "odd_vocab", {"lora": {}}, LOCAL),
    "lora, many tokens": (watched, "untied", {"lora": {}, "rows": 4}, IN_TURN),
    "trained head, few tokens": (watched, "odd_vocab", {"lora": HEAD}, LOCAL),
    "trained head, many tokens": (gathered, "untied", {"lora": HEAD, "rows": 4}, WHOLE),
    "dense": (gathered, "odd_vocab", {"lora": {}, "head": "dense"}, WHOLE),
    "grpo, lora": (watched, "odd_vocab", {"kind": "grpo", "lora": {}, "rows": 4}, LOCAL),
}
TP: dict[str, tuple[Any, str, dict[str, Any], str]] = {
    "full": (watched, "odd_vocab", {}, LOCAL_TP),
    "lora": (watched, "odd_vocab", {"lora": {}}, LOCAL_TP),
    "tied": (watched, "tied", {}, LOCAL_TP),
    "grpo": (watched, "odd_vocab", {"kind": "grpo", "rows": 4}, LOCAL_TP),
    "dense": (gathered, "odd_vocab", {"head": "dense"}, WHOLE),
}
CASES = {
    f"{engine}: {name}": partial(run, model=model, **how)
    for engine, cases in (("fsdp2", FSDP2), ("tp", TP))
    for name, (run, model, how, _) in cases.items()
}


# Each rank seeds its rollouts by its rank, and draws its own rows of a new adapter
APART = [("fsdp2", "grpo, lora"), ("tp", "lora")]
FAST = ("lora, few tokens", "trained head, few tokens", "lora", "grpo")


@pytest.mark.parametrize(
    ("engine", "names"),
    [
        pytest.param("fsdp2", FAST, id="fsdp2-fast"),
        pytest.param("fsdp2", (*FSDP2, *TP), id="fsdp2-all", marks=pytest.mark.slow),
        pytest.param("tp", (*FSDP2, *TP), id="tp-all", marks=pytest.mark.slow),
    ],
)
def test_the_head_is_not_gathered_and_training_equals_one_process(
    engine: str, names: tuple[str, ...], workshop: Workshop, tmp_path: Path
):
    table = {name: row for name, row in {"fsdp2": FSDP2, "tp": TP}[engine].items() if name in names}
    (tmp_path / "ranks").mkdir()
    paths = {name: workshop.model(name) for name in ("odd_vocab", "untied", "tied")}
    torch.save(paths, tmp_path / "ranks" / "models")
    results = run_on_ranks(__file__, [f"{engine}: {name}" for name in table], engine, tmp_path / "ranks")
    for name, (_, model, how, reason) in table.items():
        (said, ours), (_, other) = results[f"{engine}: {name}"]
        assert said.startswith(reason), (name, said)
        assert far(other, ours) == 0
        if (engine, name) in APART:
            continue
        rows = how.get("rows", 2) * (2 if engine == "fsdp2" else 1)
        one = change(trainer_of(tmp_path / f"one-{name}", paths[model], **{**how, "rows": rows}))
        assert far(ours, one) <= 1e-4, name


def far(ours: dict[str, torch.Tensor], one: dict[str, torch.Tensor]) -> float:
    """Return the relative difference of two changes of the weights."""
    assert ours.keys() == one.keys()
    ours_all, one_all = (torch.cat([x[name].double().flatten() for name in sorted(one)]) for x in (ours, one))
    return ((ours_all - one_all).norm() / one_all.norm()).item()
