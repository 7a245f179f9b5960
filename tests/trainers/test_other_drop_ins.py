"""The trainers other than those of DPO and GRPO equal stock TRL's, and the comparison notices a wrong loss."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import trl

import trl_ext
from drop_in_cases import Case
from other_drop_in_cases import CASES, KTO_LOSSES, SFT_LOSSES
from run_losses import Record, Trainers, build, train
from tiny import Workshop, prompts
from token_counts import counted, total
from training_comparison import assert_same

STOCK, OURS = Trainers.of(trl), Trainers.of(trl_ext)
WATCHED = (
    "sft-nll-full",
    "sft-dft-lora",
    "kto-kto-full",
    "kto-apo_zero_unpaired-ref_model",
    "rloo-defaults-full",
    "reward-defaults-full",
)


@functools.cache
def _stock(name: str, workshop: Workshop) -> Record:
    return train(CASES[name], STOCK, workshop)


@pytest.mark.filterwarnings("ignore:`label_smoothing_factor` is deprecated:FutureWarning")  # TRL's, of its argument
@pytest.mark.filterwarnings("ignore:Position ids are not supported:UserWarning")  # PEFT's, when it generates
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=() if case.fast else pytest.mark.slow) for case in CASES.values()],
)
def test_training_equals_stock_trl(case: Case, workshop: Workshop) -> None:
    assert_same(case, train(case, OURS, workshop), _stock(case.name, workshop))


@pytest.mark.parametrize("factor", [-1.0, pytest.param(1.01, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", WATCHED)
def test_the_comparison_notices_a_wrong_loss(name: str, factor: float, workshop: Workshop) -> None:
    wrong = train(CASES[name], OURS.with_loss_times(factor), workshop)
    with pytest.raises(AssertionError, match=f"{name}: [0-9]+ differences"):
        assert_same(CASES[name], wrong, _stock(name, workshop))


def test_the_table_names_every_loss_type() -> None:
    names = {f"sft-{loss}-{setup}" for loss in SFT_LOSSES for setup in ("full", "lora")}
    assert names | {f"kto-{loss}-{setup}" for loss in KTO_LOSSES for setup in ("full", "lora")} <= CASES.keys()


@pytest.mark.parametrize(
    "name",
    ["sft-nll-lora", "kto-kto-lora", "rloo-without-kl-lora", "reward-score-saved", "distillation-biases-lora_of_base"],
)
def test_a_run_is_saved_and_resumed_and_has_a_model_card(name: str, workshop: Workshop, tmp_path: Path) -> None:
    saves = {"save_strategy": "steps", "save_steps": 1}
    case = replace(CASES[name], config={**CASES[name].config, **saves}, steps=3)
    whole, resumed = (build(case, OURS, workshop, str(tmp_path / "out"), Record()) for _ in range(2))
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1"))
    for (what, weight), other in zip(whole.model.named_parameters(), resumed.model.parameters(), strict=True):
        torch.testing.assert_close(other, weight, rtol=1e-5, atol=1e-7, msg=lambda text, what=what: f"{what}: {text}")
    whole.create_model_card()
    card = (tmp_path / "out" / "README.md").read_text()
    settings = [setting for setting in ("loss_type", "beta") if f"- `{setting}`: " in card]
    of_method = {
        "sft": ["loss_type"],
        "kto": ["loss_type", "beta"],
        "rloo": ["beta"],
        "reward": [],
        "distillation": ["beta"],
    }
    assert settings == of_method[case.trainer]


@pytest.mark.filterwarnings("ignore:`label_smoothing_factor` is deprecated:FutureWarning")  # TRL's, of its argument
def test_the_plan_of_sft_speaks_of_rows_and_of_its_own_fields(workshop: Workshop, tmp_path: Path) -> None:
    def row(name: str, of: str, **changes: Any) -> str:
        case = replace(CASES[name], **changes)
        return str(build(case, OURS, workshop, str(tmp_path), Record()).explain()[of].reason)

    assert row("sft-nll-full", "packing") == "Padding is dropped, and leading tokens that rows share are computed once."
    assert "(`lora_dropout`, `attention_dropout`)" in row("sft-nll-lora", "packing", lora={"lora_dropout": 0.1})
    assert row("sft-label_smoothing", "policy") == row("sft-nll-full", "policy")


@pytest.mark.filterwarnings("ignore:`label_smoothing_factor` is deprecated:FutureWarning")  # TRL's, of its argument
def test_smoothed_labels_take_no_more_tokens(workshop: Workshop) -> None:
    tokens = []
    for factor in (0.0, 0.1):
        case = replace(CASES["sft-nll-full"], config={"label_smoothing_factor": factor})
        with counted() as counts:
            train(case, OURS, workshop)
        tokens.append((total(counts.with_gradient), total(counts.without)))
    assert tokens[0] == tokens[1]


@pytest.mark.filterwarnings("ignore:`label_smoothing_factor` is deprecated:FutureWarning")  # TRL's, of its argument
@pytest.mark.filterwarnings("ignore:.return_outputs=True.:FutureWarning")  # TRL's, of logits for metrics
def test_metrics_of_the_user_get_logits_with_smoothed_labels(workshop: Workshop, tmp_path: Path) -> None:
    evaluates = {"label_smoothing_factor": 0.1, "eval_strategy": "steps", "eval_steps": 1}
    case = replace(CASES["sft-evaluation"], config={**CASES["sft-evaluation"].config, **evaluates})
    trainer = build(case, OURS, workshop, str(tmp_path), Record())
    trainer.compute_metrics = lambda seen: {"classes": seen.predictions.shape[-1]}
    trainer.train()
    vocabulary = trainer.model.config.vocab_size
    assert {log["eval_classes"] for log in trainer.state.log_history if "eval_classes" in log} == {vocabulary}


@pytest.mark.parametrize("beta", [0.05, 0.0])
def test_an_entropy_of_no_token_is_absent(beta: float, workshop: Workshop) -> None:
    """All completions are truncated, so masked: TRL logs 0. With a KL term, the other passes still score tokens."""
    config = {"mask_truncated_completions": True, "max_completion_length": 2, "beta": beta}
    case = replace(CASES["rloo-masked"], name="rloo-all-masked", config=config, steps=1)
    ours, stock = train(case, OURS, workshop), train(case, STOCK, workshop)
    assert [log["entropy"] for log in stock.logs if "loss" in log] == [0.0] * case.steps
    assert not any("entropy" in log for log in ours.logs)


def test_a_reward_function_may_score_with_the_policy(workshop: Workshop, tmp_path: Path) -> None:
    """The pass that the plan skips is only TRL's."""
    seen: list[float] = []

    def likely(completion_ids: list[list[int]], **_: Any) -> list[float]:
        ids = torch.tensor([[5, 6, 7]])
        seen.append(trainer._get_per_token_logps_and_entropies(trainer.model, ids, ids > 0, 2)[0].sum().item())
        return [float(len(x)) for x in completion_ids]

    trainer = trl_ext.RLOOTrainer(
        workshop.model("tied"),
        reward_funcs=likely,
        args=trl_ext.RLOOConfig(
            output_dir=str(tmp_path),
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=4,
            beta=0.0,
            max_steps=2,
            use_cpu=True,
            bf16=False,
            report_to="none",
            save_strategy="no",
        ),
        train_dataset=prompts(4, seed=1),
    )
    trainer.train()
    assert trainer.plan.reuses_old_policy
    assert len(seen) == 2
    assert all(x < -1 for x in seen)
