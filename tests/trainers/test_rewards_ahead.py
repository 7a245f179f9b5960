"""`generation_lag=1` with a sampler in the training process: rewards run beside training, samples are a batch older."""

import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from transformers import AutoModelForCausalLM

import trl_ext
from lagged_sampling import DelayedTurns, Logs, OwnSampler, even_tokens, rows
from tiny import Workshop, word_tokenizer

STEPS = 5
BATCHING = {
    "use_transformers_continuous_batching": True,
    "transformers_continuous_batching_config": {"use_cuda_graph": False, "num_blocks": 64, "max_batch_tokens": 256},
}
ROWS = 16
KL = "sampling/mismatch_kl"


def number_of_words(completions: list[str], answer: list[int], **_: Any) -> list[float]:
    return [right * 0.01 - 0.05 * len(text.split()) for text, right in zip(completions, answer, strict=True)]


def even(completion_ids: list[list[int]], **given: Any) -> list[float]:
    return even_tokens(completion_ids, list(range(len(completion_ids))), given["log_metric"], given["log_extra"])


def trainer_of(workshop: Workshop, folder: Path, kind: Any = trl_ext.GRPOTrainer, **options: Any) -> Any:
    names = ("reward_funcs", "model", "callbacks", "rollout_func")
    parts = {name: options.pop(name) for name in names if name in options}
    arguments = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_steps": STEPS,
        "max_completion_length": 8,
        "learning_rate": 0.1,
        "optim": "sgd",  # Adam's step is nearly a sign, which turns rounding into a full update
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "bf16": False,
        "use_cpu": True,
        "seed": 7,
        "shuffle_dataset": False,
        "disable_tqdm": True,
        "vllm_importance_sampling_correction": False,
        **options,
    }
    config = trl.GRPOConfig if kind is trl.GRPOTrainer else trl_ext.GRPOConfig
    torch.manual_seed(1)
    return kind(
        **{
            "model": AutoModelForCausalLM.from_pretrained(workshop.model("untied")),
            "reward_funcs": [even, number_of_words],
            "args": config(**arguments),
            "train_dataset": rows(ROWS),
            "processing_class": word_tokenizer(),
            "callbacks": [Logs()],
            **parts,
        }
    )


def weights(trainer: Any) -> torch.Tensor:
    return torch.cat([x.detach().flatten().clone() for x in trainer.model.parameters()])


def logged(trainer: Any, name: str) -> list[float]:
    return [log[name] for log in trainer.state.log_history if name in log]


def delay(trainer: Any, batches: int, groups: int) -> None:
    """Make stock TRL sample a batch ahead, for `batches` generation batches of so many groups."""
    order = [rows(ROWS)[i % ROWS]["prompt"] for i in range(batches * groups)]
    of_batches = [order[i : i + groups] for i in range(0, len(order), groups)]
    repeated = [[prompt for prompt in prompts for _ in range(4)] for prompts in of_batches]
    trainer._generate_single_turn = DelayedTurns(trainer, repeated)


@pytest.mark.parametrize(
    ("schedule", "batches", "groups"),
    [
        ({}, 5, 2),
        pytest.param({"num_iterations": 2, "steps_per_generation": 4}, 2, 4, marks=pytest.mark.slow),
        pytest.param({"steps_per_generation": 1}, 10, 1, marks=pytest.mark.slow),
        pytest.param({"loss_type": "grpo", "beta": 0.05}, 5, 2, marks=pytest.mark.slow),
    ],
)
def test_with_generate_training_equals_stock_trl_that_samples_a_batch_ahead(
    schedule: dict[str, Any], batches: int, groups: int, workshop: Workshop, tmp_path: Path
) -> None:
    options = {**schedule, **({"model": workshop.model("untied")} if "beta" in schedule else {})}
    ours = trainer_of(workshop, tmp_path / "a", generation_lag=1, **options)
    start = weights(ours)
    ours.train()
    stock = trainer_of(workshop, tmp_path / "b", trl.GRPOTrainer, **options)
    delay(stock, batches, groups)
    stock.train()
    undelayed = trainer_of(workshop, tmp_path / "c", trl.GRPOTrainer, **options)
    undelayed.train()
    change = float((weights(stock) - start).abs().max())
    assert change > 1e-4
    assert float((weights(ours) - weights(stock)).abs().max()) < 1e-4 * change
    assert float((weights(ours) - weights(undelayed)).abs().max()) > 0.1 * change
    for name in ("loss", "reward", "mean_tokens", "num_tokens", "completions/mean_length"):
        assert logged(ours, name) == pytest.approx(logged(stock, name), abs=1e-5), name
    assert max(logged(ours, "generation_ahead/age_in_steps")) > 0


def test_rewards_run_beside_training_and_generate_does_not(workshop: Workshop, tmp_path: Path) -> None:
    threads: list[str] = []
    generated: list[str] = []

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        threads.append(threading.current_thread().name)
        return [float(sum(ids) % 5) for ids in completion_ids]

    trainer = trainer_of(workshop, tmp_path, generation_lag=1, reward_funcs=reward)
    generate = trainer.model.generate

    def noted(*positional: Any, **keywords: Any) -> Any:
        generated.append(threading.current_thread().name)
        return generate(*positional, **keywords)

    trainer.model.generate = noted
    trainer.train()
    assert threads == ["MainThread", *(f"generation batch {x}" for x in range(1, STEPS))]
    assert set(generated) == {"MainThread"}
    assert "sampled before one trains, with the weights from before" in trainer.explain()["generation"].reason


def test_with_continuous_batching_the_loss_corrects_for_the_age(workshop: Workshop, tmp_path: Path) -> None:
    trainer = trainer_of(workshop, tmp_path, generation_lag=1, vllm_importance_sampling_correction=True, **BATCHING)
    trainer.train()
    assert logged(trainer, "generation_ahead/age_in_steps") == [0, 1, 1, 1, 1]
    first, *later = logged(trainer, KL)
    assert first < 1e-9 < 1e-6 < min(later)
    reason = trainer.explain()["generation"].reason
    assert reason.count("multiplied by the ratio of old policy to sampler") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vllm_importance_sampling_correction": True}, "`generate` returns no log-probs"),
        ({"generation_lag": 0, "sample_ahead": True}, "the sampler draws random numbers between those of training"),
        (
            {**BATCHING, "vllm_importance_sampling_correction": True, "loss_type": "vespo"},
            "does not correct for continuous batching",
        ),
    ],
)
def test_what_would_be_biased_or_differ_is_refused(
    options: dict[str, Any], message: str, workshop: Workshop, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="is not supported here") as caught:
        trainer_of(workshop, tmp_path, **{"generation_lag": 1, **options})
    assert message in str(caught.value)


def test_a_batch_without_log_probs_is_sampled_again_for_a_run_that_corrects(
    workshop: Workshop, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="trl_ext")
    options = {"generation_lag": 1, "save_strategy": "steps", "save_steps": 1, **BATCHING}
    trainer_of(workshop, tmp_path / "a", **options).train()
    resumed = trainer_of(workshop, tmp_path / "b", vllm_importance_sampling_correction=True, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert any("is sampled again: it has no log-probs" in x for x in caplog.messages)
    assert len(logged(resumed, KL)) == STEPS - 2


@pytest.mark.parametrize("sampler", ["process", "rollout_func"])
def test_a_batch_of_another_sampler_is_sampled_again(
    sampler: str, workshop: Workshop, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="trl_ext")
    options = {"generation_lag": 1, "save_strategy": "steps", "save_steps": 1}

    def of_rollout(name: str) -> Any:
        model = AutoModelForCausalLM.from_pretrained(workshop.model("untied"))
        return trainer_of(workshop, tmp_path / name, rollout_func=OwnSampler(model), **options)

    def of_process(name: str) -> Any:
        return trainer_of(workshop, tmp_path / name, **options)

    before, after = (of_rollout, of_process) if sampler == "process" else (of_process, of_rollout)
    before("a").train()
    resumed = after("b")
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert any("is sampled again: " in x and " sampled it, and now " in x for x in caplog.messages)
    assert logged(resumed, "generation_ahead/age_in_steps") == [0, 1, 0, 1, 1]


def test_after_a_run_with_a_lag_the_sampler_is_checked_again(workshop: Workshop, tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 1, "vllm_importance_sampling_correction": True, **BATCHING}
    trainer_of(workshop, tmp_path / "a", generation_lag=1, **options).train()
    resumed = trainer_of(workshop, tmp_path / "b", **options)
    observed: list[float] = []
    resumed._sampled_metrics._sampler_check.observe = lambda difference, step: observed.append(difference)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert len(observed) == 2 * (STEPS - 2)


@pytest.mark.parametrize("step", [1, 3])
def test_a_resumed_run_continues_bit_for_bit(step: int, workshop: Workshop, tmp_path: Path) -> None:
    options = {"generation_lag": 1, "save_strategy": "steps", "save_steps": 1}
    whole = trainer_of(workshop, tmp_path / "a", **options)
    whole.train()
    resumed = trainer_of(workshop, tmp_path / "b", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / f"checkpoint-{step}"))
    assert torch.equal(weights(resumed), weights(whole))
    assert logged(resumed, "loss") == logged(whole, "loss")
