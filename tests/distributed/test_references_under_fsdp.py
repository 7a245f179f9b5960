"""Under FSDP, moving and copied references equal those of one process, or are an error before the first step."""

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import AutoModelForCausalLM

import trl_ext
from adapter_cases import COMMON
from ranks import ENGINES, Rank, run_on_ranks
from rewards import id_reward
from tiny import Workshop, lora_config, preferences, prompts, scripted_rollout
from trained_weights import far, trained

MOVES = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.6}


def build(rank: Rank | None, folder: Path, kind: str = "dpo", lora: str | None = None, **config: Any) -> Any:
    args = {**COMMON, "per_device_train_batch_size": 8 if rank is None else 4, "max_steps": 3, "learning_rate": 0.05}
    if rank is not None:
        del args["use_cpu"]
    args |= config
    model, options = Workshop(folder.parent).model("untied"), {}
    if lora == "fresh":
        options["peft_config"] = lora_config()
    elif lora is not None:
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(model), lora_config(), adapter_name=lora)
    if kind == "dpo":
        args = trl_ext.DPOConfig(str(folder / "run"), reference_store="off", beta=0.3, **args)
        return trl_ext.DPOTrainer(model, args=args, train_dataset=preferences(24, seed=1), **options)
    args = trl_ext.GRPOConfig(str(folder / "run"), num_generations=4, max_completion_length=6, beta=0.3, **args)
    return trl_ext.GRPOTrainer(
        model, id_reward, args=args, train_dataset=prompts(8, seed=1), rollout_func=scripted_rollout, **options
    )


def change(rank: Rank | None, folder: Path | None = None, **options: Any) -> dict[str, torch.Tensor]:
    """Return the change of the trained weights, gathered, after three steps."""
    torch.manual_seed(0)
    trainer = build(rank, folder or rank.folder, **options)
    before = trained(trainer.model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1's own
        trainer.train()
    if rank is None:
        return {name: x - before[name] for name, x in trained(trainer.model).items()}
    rank.check(trainer)
    wrapped = trainer.model_wrapped
    if isinstance(wrapped, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(wrapped):
            after = {name.replace("_fsdp_wrapped_module.", ""): x for name, x in trained(wrapped).items()}
    else:
        after = trained(trainer.model)
    return {name: x - before[name] for name, x in after.items()}


def refused(rank: Rank, words: str, **options: Any) -> None:
    with pytest.raises(ValueError, match=words):
        change(rank, **options)
    rank.checked = True


COPIED = r"needs a copy of the trained weight `.*lora_A.*`, which FSDP1 would partition\. Use ZeRO-2 or FSDP2"
STALE = r"`sync_ref_model=True` does not work under FSDP1.* \(`fsdp_version: 2`\)"
TRAINS: dict[str, dict[str, Any]] = {
    "dpo-full": {},
    "dpo-lora": {"lora": "fresh"},
    "grpo-full": {"kind": "grpo"},
    "grpo-lora": {"kind": "grpo", "lora": "fresh"},
}
CASES: dict[str, Any] = {
    "full": partial(change, **MOVES),
    **{f"trains-{name}": partial(change, **options) for name, options in TRAINS.items()},
    "refused-fresh": partial(refused, words=COPIED, lora="fresh", **MOVES),
    "refused-grpo": partial(refused, words=COPIED, kind="grpo", lora="fresh", **MOVES),
    "refused-named": partial(refused, words=COPIED, lora="mine"),
    "refused-full": partial(refused, words=STALE, **MOVES),
    "refused-full-grpo": partial(refused, words=STALE, kind="grpo", **MOVES),
}


@pytest.mark.slow
def test_fsdp1_refuses_references_that_would_not_move_and_trains_the_rest(tmp_path: Path):
    Workshop(tmp_path).model("untied")
    (tmp_path / "ranks").mkdir()
    found = run_on_ranks(__file__, [case for case in CASES if case != "full"], "fsdp1", tmp_path / "ranks")
    for name, options in TRAINS.items():
        alone = change(None, tmp_path / "alone", **options)
        assert max(far(of_rank, alone) for of_rank in found[f"trains-{name}"]) <= 1e-5, name


@pytest.mark.slow
@pytest.mark.parametrize("reshard", ["true", "false"])
def test_a_reference_model_moves_under_fsdp2_as_on_one_process(
    reshard: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(ENGINES["fsdp2"], "FSDP_RESHARD_AFTER_FORWARD", reshard)
    Workshop(tmp_path).model("untied")
    (tmp_path / "ranks").mkdir()
    found = run_on_ranks(__file__, ["full"], "fsdp2", tmp_path / "ranks")
    alone = change(None, tmp_path / "alone", **MOVES)
    assert max(far(of_rank, alone) for of_rank in found["full"]) <= 1e-5
