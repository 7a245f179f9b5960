"""DPO in parts of so many tokens: the same gradients, losses and metrics, and no larger forward.

Tokens are counted by a hook on the input embedding. The reference is the same trainer without the field, or stock TRL.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from test_micro_batch_parts import assert_same_training, sizes
from transformers import AutoConfig, AutoModelForCausalLM
from trl.trainer.dpo_trainer import DataCollatorForPreference

import trl_ext
from balanced_runs import DPO_CASES
from drop_in_cases import Case
from run_losses import Record, Trainers, build
from tiers import fast_first
from tiny import Workshop, preferences, word_tokenizer
from trained_weights import far
from training_comparison import POLICY_BATCHES

OURS, STOCK = Trainers.of(trl_ext), Trainers.of(trl)
BUDGET = 40
LOSSES = {name: x for name, x in DPO_CASES.items() if "columns" not in x and "max_tokens_per_micro_batch" not in x}


def case_of(**fields: Any) -> Case:
    keys = ("setup", "model", "lora", "steps")
    kwargs = {key: fields.pop(key) for key in keys if key in fields}
    return Case("parts", "dpo", config={"reference_store": "memory", **fields}, learning_rate=0.02, **kwargs)


def run(case: Case, workshop: Workshop, folder: Path, trainers: Trainers = OURS) -> Record:
    record = Record()
    trainer = build(case, trainers, workshop, str(folder), record)
    for scoring in getattr(trainer, "scoring_forwards", []):
        scoring.packing.checked = True  # else the first batch is fed twice more
        scoring.is_compared = True
    trainer.train()
    return record


class Apart(trl_ext.DPOTrainer):
    """Its micro-batches of an optimizer step are not merged, because a method that gets them is overridden."""

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().training_step(*args, **kwargs)


def both(
    workshop: Workshop, folder: Path, budget: int = BUDGET, *, apart: bool = False, **fields: Any
) -> tuple[Record, Record]:
    case, trainers = case_of(**fields), replace(OURS, dpo_trainer=Apart) if apart else OURS
    parts = replace(case, config={**case.config, "max_tokens_per_micro_batch": budget})
    in_parts, whole = run(parts, workshop, folder / "parts", trainers), run(case, workshop, folder / "whole")
    assert_same_training(in_parts, whole)
    return in_parts, whole


@pytest.mark.parametrize("setup", ["ref_model", pytest.param("lora", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", fast_first(LOSSES, "sigmoid", "discopop", "wpo"))
def test_parts_have_the_gradient_of_the_whole(name: str, setup: str, workshop: Workshop, tmp_path: Path) -> None:
    parts, whole = both(workshop, tmp_path, setup=setup, **LOSSES[name])
    assert max(sizes(parts, **POLICY_BATCHES)) <= BUDGET < min(sizes(whole, **POLICY_BATCHES))


SITUATIONS: dict[str, dict[str, Any]] = {
    "accumulation": {"gradient_accumulation_steps": 2, "steps": 3},
    "every-pass": {"reference_store": "off"},
    "no-sharing": {"share_prompts": False},
    "padded": {"padding_free": False},
    "checkpointing": {"gradient_checkpointing": True},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 1},
    "non-finite": {"on_non_finite_loss": "stop"},
    "clipped": {"max_grad_norm": 0.05, "learning_rate": 0.5},
}


@pytest.mark.parametrize("name", fast_first(SITUATIONS, "accumulation", "every-pass", "evaluation", "non-finite"))
def test_parts_in_every_situation(name: str, workshop: Workshop, tmp_path: Path) -> None:
    budget = 80 if name == "padded" else BUDGET
    parts, whole = both(workshop, tmp_path, budget, apart=True, setup="ref_model", **SITUATIONS[name])
    assert max(sizes(parts, grad=True)) <= budget
    assert parts.fed("forwards", **POLICY_BATCHES) > whole.fed("forwards", **POLICY_BATCHES)
    of_reference = [feed.tokens for feed in parts.feeds if not feed.grad and feed.training]
    if name == "every-pass":
        assert max(of_reference) <= budget


def test_the_losses_are_stock_trls(workshop: Workshop, tmp_path: Path) -> None:
    case = case_of(setup="ref_model")
    parts = replace(case, config={**case.config, "max_tokens_per_micro_batch": BUDGET})
    stock = replace(case, config={})
    ours, theirs = run(parts, workshop, tmp_path / "ours"), run(stock, workshop, tmp_path / "stock", STOCK)
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("budget", [30, 100, 10_000])
def test_an_optimizer_step_takes_as_few_forwards_as_the_budget_allows(
    accumulation: int, budget: int, workshop: Workshop, tmp_path: Path
) -> None:
    changes = []
    for limit in (budget, None):
        counts: list[int] = []
        trainer = trl_ext.DPOTrainer(
            model=workshop.model("tied"),
            args=trl_ext.DPOConfig(
                output_dir=str(tmp_path),
                per_device_train_batch_size=2,
                gradient_accumulation_steps=accumulation,
                max_steps=2,
                learning_rate=0.02,
                optim="sgd",
                max_grad_norm=0.0,
                use_cpu=True,
                bf16=False,
                report_to="none",
                save_strategy="no",
                logging_steps=1,
                reference_store="memory",
                include_num_input_tokens_seen=True,
                gradient_checkpointing=False,
                max_tokens_per_micro_batch=limit,
            ),
            train_dataset=preferences(16, seed=1),
        )
        trainer.scoring_forwards[0].packing.checked = True
        trainer.scoring_forwards[0].is_compared = True
        start = {name: x.detach().clone() for name, x in trainer.model.named_parameters()}
        trainer.model.get_input_embeddings().register_forward_pre_hook(
            lambda module, ids, counts=counts: counts.append(ids[0].numel()) if torch.is_grad_enabled() else None
        )
        trainer.train()
        change = {name: x.detach() - start[name] for name, x in trainer.model.named_parameters()}
        logs = [log for log in trainer.state.log_history if "loss" in log]
        changes.append((change, counts, [log["loss"] for log in logs], [log["num_input_tokens_seen"] for log in logs]))
    (ours, in_parts, our_losses, seen), (theirs, whole, losses, _) = changes
    assert far(ours, theirs) <= 1e-5
    assert our_losses == pytest.approx(losses, rel=1e-5)
    longest = 2 * 9 + 7  # a pair, with its prompt once
    assert max(in_parts) <= max(budget, longest)
    assert len(whole) == 2 * accumulation
    fewest = sum(whole) / budget
    assert len(in_parts) == 2 if budget == 10_000 else len(in_parts) <= 2 * fewest + 2
    assert seen[-1] > 0


def test_an_accumulation_window_of_unequal_batches_is_not_merged(workshop: Workshop, tmp_path: Path) -> None:
    """The last of 7 pairs is alone in its micro-batch, and counts twice as much as each of the others, as in TRL."""
    changes = []
    for limit in (10_000, None):
        trainer = trl_ext.DPOTrainer(
            model=workshop.model("tied"),
            args=trl_ext.DPOConfig(
                output_dir=str(tmp_path),
                per_device_train_batch_size=2,
                gradient_accumulation_steps=2,
                num_train_epochs=1,
                learning_rate=0.02,
                lr_scheduler_type="constant",
                optim="sgd",
                max_grad_norm=0.0,
                use_cpu=True,
                bf16=False,
                report_to="none",
                save_strategy="no",
                max_tokens_per_micro_batch=limit,
            ),
            train_dataset=preferences(7, seed=1),
        )
        start = {name: x.detach().clone() for name, x in trainer.model.named_parameters()}
        trainer.train()
        changes.append({name: x.detach() - start[name] for name, x in trainer.model.named_parameters()})
    assert far(*changes) <= 1e-5


def test_losses_over_the_whole_batch_are_refused(workshop: Workshop, tmp_path: Path) -> None:
    for loss_type, words in {"aot": "sorts the pairs", "sft": "a mean over the tokens"}.items():
        case = case_of(loss_type=[loss_type], max_tokens_per_micro_batch=10)
        with pytest.raises(ValueError, match=rf"max_tokens_per_micro_batch=10.*not supported.*'{loss_type}' .*{words}"):
            build(case, OURS, workshop, str(tmp_path), Record()).train()


def trained(workshop: Workshop, folder: Path, limit: int | None, pairs: int, **options: Any) -> tuple[Any, Any, Any]:
    """Train an epoch in micro-batches of 2 pairs. Returns the trainer, its changed weights, its passes' tokens."""
    counts: list[int] = []
    arguments = {name: options.pop(name) for name in ("model", "data_collator") if name in options}
    common = {"learning_rate": 0.02, "optim": "sgd", "max_grad_norm": 0.0, "use_cpu": True, "bf16": False}
    files = {"output_dir": str(folder), "report_to": "none", "save_strategy": "no", "reference_store": "memory"}
    steps = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "num_train_epochs": 1}
    trainer = trl_ext.DPOTrainer(
        args=trl_ext.DPOConfig(max_tokens_per_micro_batch=limit, **{**common, **files, **steps, **options}),
        train_dataset=preferences(pairs, seed=1),
        processing_class=word_tokenizer(),
        **{"model": workshop.model("tied"), **arguments},
    )
    trainer.scoring_forwards[0].packing.checked = True
    trainer.scoring_forwards[0].is_compared = True
    start = {name: x.detach().clone() for name, x in trainer.model.named_parameters()}
    trainer.model.get_input_embeddings().register_forward_pre_hook(
        lambda module, ids: counts.append(ids[0].numel()) if torch.is_grad_enabled() else None
    )
    trainer.train()
    return trainer, {name: x.detach() - start[name] for name, x in trainer.model.named_parameters()}, counts


@pytest.mark.parametrize("pairs", [18, pytest.param(17, marks=pytest.mark.slow)])
def test_a_log_over_an_epochs_end_weighs_micro_batches_as_trl_does(
    pairs: int, workshop: Workshop, tmp_path: Path
) -> None:
    """The last step has fewer micro-batches than the others, and one log covers all."""
    logs = []
    for limit in (60, None):
        trainer, *_ = trained(workshop, tmp_path, limit, pairs, logging_steps=5, learning_rate=0.01)
        logs.append(next(log for log in trainer.state.log_history if "train_runtime" in log))
    ours, theirs = logs
    for name in ("logps/chosen", "logps/rejected", "rewards/margins", "rewards/accuracies", "num_tokens"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-6), name


def _masks_a_token(batch: dict[str, torch.Tensor]) -> None:
    batch["attention_mask"][:, 1] = 0


def _adds_positions(batch: dict[str, torch.Tensor]) -> None:
    batch["position_ids"] = torch.arange(batch["input_ids"].shape[1]).repeat(len(batch["input_ids"]), 1)


@pytest.mark.parametrize("change", [_masks_a_token, _adds_positions])
def test_a_collator_may_mask_tokens_and_add_inputs(change: Any, workshop: Workshop, tmp_path: Path) -> None:
    collator = DataCollatorForPreference(pad_token_id=word_tokenizer().pad_token_id)

    def changed(examples: list[Any]) -> dict[str, torch.Tensor]:
        batch = collator(examples)
        change(batch)
        return batch  # type: ignore[no-any-return]

    ours, theirs = (trained(workshop, tmp_path, limit, 16, data_collator=changed)[1] for limit in (25, None))
    assert far(ours, theirs) <= 1e-5


@pytest.mark.filterwarnings("ignore:.*truncation.*:FutureWarning")  # TRL's, of its argument
def test_prompts_cut_at_different_tokens_count_twice(workshop: Workshop, tmp_path: Path) -> None:
    *_, counts = trained(workshop, tmp_path, 40, 16, max_length=9, truncation_mode="keep_end")
    assert len(counts) > 2
    assert max(counts) <= 40


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_micro_batches_whose_length_sets_the_positions_stay(rope_type: str, workshop: Workshop, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(workshop.model("tied"))
    rope = {"rope_theta": 10000.0, "rope_type": rope_type, "factor": 4.0}
    config.max_position_embeddings = 8
    if rope_type == "longrope":
        half = config.head_dim // 2
        factors = {"short_factor": [1.0] * half, "long_factor": [3.0] * half}
        rope |= {**factors, "original_max_position_embeddings": 8}
        config.max_position_embeddings = 32
    config.rope_parameters = rope
    model = AutoModelForCausalLM.from_config(config)
    model.config._name_or_path = workshop.model("tied")
    with pytest.raises(ValueError, match="rotary embeddings depend on the longest row of each micro-batch"):
        trained(workshop, tmp_path, 60, 16, model=model, precompute_ref_log_probs=True)
