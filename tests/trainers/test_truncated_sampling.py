"""With `keep_sampling_mask`, training equals stock TRL with log-probs over the tokens left to the sampler."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from torch import Tensor

import trl_ext
from tiny import Workshop, prompts
from truncated_runs import Contexts, made, ratios, reward, sampler_noted

CUTS = {"top_p_and_top_k": {"top_p": 0.9, "top_k": 20}, "top_p": {"top_p": 0.7}, "min_p": {"min_p": 0.1}}
CUTS["generation_kwargs"] = {"generation_kwargs": {"top_k": 3}}


@pytest.fixture
def sampled() -> Iterator[Contexts]:
    with sampler_noted() as contexts:
        yield contexts


class OverKept(trl.GRPOTrainer):
    """Stock TRL, whose log-prob pass is the definition over the tokens that the sampler could choose."""

    contexts: Contexts

    def _get_per_token_logps_and_entropies(  # type: ignore[no-untyped-def]
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, compute_entropy=False, **_: Any
    ):
        logits = model(input_ids=input_ids, attention_mask=attention_mask).logits[:, :-1] / self.temperature
        logits, targets = logits[:, -logits_to_keep:].double(), input_ids[:, -logits_to_keep:]
        first = input_ids.size(1) - logits_to_keep
        absent = torch.zeros_like(logits, dtype=torch.bool)
        for row, (ids, mask) in enumerate(zip(input_ids, attention_mask, strict=True)):
            for step in range(logits_to_keep):
                context = tuple(ids[: first + step][mask[: first + step].bool()].tolist())
                if mask[first + step]:
                    absent[row, step] = self.contexts[context].isinf()
        log_p = logits.masked_fill(absent, -1e300).log_softmax(-1)
        log_probs = log_p.gather(-1, targets[..., None])[..., 0].float()
        return log_probs, -(log_p.exp() * log_p).sum(-1).detach().float() if compute_entropy else None, None


def logged(trainer: Any) -> dict[str, list[float]]:
    names = ("loss", "grad_norm", "kl", "entropy", "reward")
    return {name: [x[name] for x in trainer.state.log_history if name in x] for name in names}


SCHEDULES: dict[str, dict[str, Any]] = {
    "on_policy": {},
    "iterations": {"num_iterations": 2, "max_steps": 4},
    "accumulation": {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 4, "num_generations": 4},
    "misaligned": {
        **{"gradient_accumulation_steps": 2, "steps_per_generation": 4, "per_device_train_batch_size": 4},
        **{"num_iterations": 2, "max_steps": 4},
    },
    "without_kl": {"beta": 0.0},
    "lora": {"lora": True},
    "in_parts": {"ours": {"max_tokens_per_micro_batch": 24}},
    "dense": {"ours": {"head": "dense"}},
    "padded": {"ours": {"padding_free": False}},
}
FAST = {("top_p_and_top_k", "misaligned"), ("generation_kwargs", "lora"), ("top_p", "in_parts"), ("min_p", "padded")}
TABLE = [
    pytest.param(cut, name, marks=() if (cut, name) in FAST else pytest.mark.slow) for cut in CUTS for name in SCHEDULES
]


@pytest.mark.parametrize(("cut", "schedule"), TABLE)
def test_training_equals_stock_over_the_tokens_left_to_the_sampler(
    cut: str, schedule: str, workshop: Workshop, sampled: Contexts, tmp_path: Path
) -> None:
    fields = {**CUTS[cut], **SCHEDULES[schedule]}
    added = {"keep_sampling_mask": True, "zero_advantages_of_equal_rewards": False, **fields.pop("ours", {})}
    stock = made(OverKept, workshop.model("untied"), tmp_path, **fields)
    stock.contexts = sampled
    stock.train()
    ours = made(trl_ext.GRPOTrainer, workshop.model("untied"), tmp_path, **fields, **added)
    sampled.clear()
    ours.train()
    want, found = logged(stock), logged(ours)
    assert want["reward"] == found["reward"]
    # Ours moves rows between micro-batches, and skips rows, so its averages over a micro-batch differ
    averages = () if fields.get("gradient_accumulation_steps") or "beta" in fields else ("kl", "entropy")
    for name in ("loss", "grad_norm", *averages):
        assert found[name] == pytest.approx(want[name], rel=1e-4, abs=2e-5), name
    for (name, a), b in zip(ours.model.named_parameters(), stock.model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=2e-6), name


@pytest.mark.parametrize("masked", [True, False])
def test_the_ratio_to_the_sampler_is_one_before_the_first_step(
    masked: bool, workshop: Workshop, sampled: Contexts, tmp_path: Path
) -> None:
    fields: dict[str, Any] = {"num_iterations": 2, "max_steps": 1, "beta": 0.0, **CUTS["top_p_and_top_k"]}
    fields["gradient_accumulation_steps"] = 2
    if masked:
        trainer = made(trl_ext.GRPOTrainer, workshop.model("untied"), tmp_path, keep_sampling_mask=True, **fields)
    else:
        trainer = made(trl.GRPOTrainer, workshop.model("untied"), tmp_path, **fields)
    trainer.train()
    found = ratios(trainer, sampled)
    assert len(found) > 40
    if masked:
        assert float((found - 1).abs().max()) < 1e-5
    else:  # stock's is the probability of the tokens that the sampler kept
        assert float(found.mean()) < 0.95
    print(f"{masked=} mean {float(found.mean()):.6f} max |ratio - 1| {float((found - 1).abs().max()):.2e}")


def updates(trainer: Any) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in trainer.model.named_parameters()}


def test_a_resumed_run_keeps_the_tokens_of_completions_that_are_left(workshop: Workshop, tmp_path: Path) -> None:
    fields: dict[str, Any] = {**CUTS["top_p"], "keep_sampling_mask": True, "save_strategy": "steps", "save_steps": 1}
    fields |= {"num_iterations": 2, "steps_per_generation": 2, "gradient_accumulation_steps": 1, "max_steps": 4}
    whole = made(trl_ext.GRPOTrainer, workshop.model("untied"), tmp_path / "whole", **fields)
    whole.train()
    resumed = made(trl_ext.GRPOTrainer, workshop.model("untied"), tmp_path / "resumed", **fields)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert all(torch.equal(x, y) for x, y in zip(updates(whole).values(), updates(resumed).values(), strict=True))


def test_completions_sampled_without_the_option_are_sampled_again(
    workshop: Workshop, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fields: dict[str, Any] = {**CUTS["top_p"], "save_strategy": "steps", "save_steps": 1, "num_iterations": 2}
    fields |= {"steps_per_generation": 2, "gradient_accumulation_steps": 1, "max_steps": 4}
    made(trl_ext.GRPOTrainer, workshop.model("untied"), tmp_path / "off", **fields).train()
    resumed = made(trl_ext.GRPOTrainer, workshop.model("untied"), tmp_path / "on", **fields, keep_sampling_mask=True)
    resumed.train(resume_from_checkpoint=str(tmp_path / "off" / "checkpoint-3"))
    assert "keep_sampling_mask was 0 and is 1" in caplog.text


def test_groups_drawn_later_bring_their_tokens(workshop: Workshop, sampled: Contexts, tmp_path: Path) -> None:
    def of_some(completion_ids: list[list[int]], prompts: list[str], **_: Any) -> list[float]:
        pairs = zip(completion_ids, prompts, strict=True)
        return [float(len(set(ids))) if len(text) % 2 else 0.5 for ids, text in pairs]

    trainer = made(
        *(trl_ext.GRPOTrainer, workshop.model("untied"), tmp_path),
        **{**CUTS["top_p_and_top_k"], "keep_sampling_mask": True, "dynamic_sampling": True, "num_iterations": 2},
        **{"max_steps": 1, "beta": 0.0, "gradient_accumulation_steps": 2},
    )
    trainer.reward_funcs = [of_some]
    trainer.train()
    (draws,) = [x["dynamic_sampling/draws"] for x in trainer.state.log_history if "dynamic_sampling/draws" in x]
    assert draws > 1
    assert float((ratios(trainer, sampled) - 1).abs().max()) < 1e-5


class DropsEntries(trl_ext.GRPOTrainer):
    def compute_loss(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        inputs = {name: x for name, x in inputs.items() if not name.startswith("kept_")}
        return super().compute_loss(model, inputs, *rest, **named)


def test_a_subclass_that_drops_the_tokens_is_told(workshop: Workshop, tmp_path: Path) -> None:
    trainer = made(
        DropsEntries, workshop.model("untied"), tmp_path, **CUTS["top_p"], keep_sampling_mask=True, max_steps=1
    )
    with pytest.raises(RuntimeError, match=r"they are gone: this trainer overrides `compute_loss`"):
        trainer.train()


def sampled_elsewhere(prompts: list[str], **_: Any) -> dict[str, Any]:
    ids = [[3, 4, 1] for _ in prompts]
    return {"prompt_ids": [[5, 6] for _ in prompts], "completion_ids": ids, "logprobs": None}


class OwnPass(trl_ext.GRPOTrainer):
    def _get_per_token_logps_and_entropies(self, *positional: Any, **named: Any) -> Any:
        return super()._get_per_token_logps_and_entropies(*positional, **named)


UNKNOWN: dict[str, tuple[type, dict[str, Any], str]] = {
    "own pass": (OwnPass, {}, "this trainer overrides TRL's log-prob pass"),
    "beams": (trl_ext.GRPOTrainer, {"generation_kwargs": {"num_beams": 2}}, "beam search (`num_beams`)"),
    "continuous": (trl_ext.GRPOTrainer, {"use_transformers_continuous_batching": True}, "continuous batching"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_the_plan_says_why_the_tokens_are_not_known(name: str, workshop: Workshop, tmp_path: Path) -> None:
    trainer, fields, reason = UNKNOWN[name]
    plan = made(trainer, workshop.model("untied"), tmp_path, top_k=5, keep_sampling_mask=True, **fields).explain()
    (warning,) = plan.warnings
    assert warning.startswith("`keep_sampling_mask=True` has no effect, because ")
    assert reason in warning
    assert not plan.keeps_sampling_mask


def test_a_rollout_function_does_not_tell_the_tokens(workshop: Workshop, tmp_path: Path) -> None:
    trainer = trl_ext.GRPOTrainer(
        workshop.model("untied"),
        reward_funcs=reward,
        args=trl_ext.GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, top_k=5, keep_sampling_mask=True),
        train_dataset=prompts(32, seed=1),
        rollout_func=sampled_elsewhere,
    )
    assert "`rollout_func`" in trainer.explain().warnings[0]


def test_without_truncation_the_option_changes_nothing(workshop: Workshop, tmp_path: Path) -> None:
    found = []
    for fields in ({}, {"keep_sampling_mask": True}):
        trainer = made(trl_ext.GRPOTrainer, workshop.model("untied"), tmp_path, **fields)
        trainer.train()
        assert not trainer.explain().warnings
        found.append(updates(trainer))
    assert all(torch.equal(x, found[1][name]) for name, x in found[0].items())


def test_in_evaluation_the_loss_is_over_the_same_tokens(workshop: Workshop, sampled: Contexts, tmp_path: Path) -> None:
    found = []
    for trainer, fields in ((OverKept, {}), (trl_ext.GRPOTrainer, {"keep_sampling_mask": True})):
        evaluated = made(
            trainer, workshop.model("untied"), tmp_path, **CUTS["top_p"], **fields, per_device_eval_batch_size=8
        )
        sampled.clear()
        if trainer is OverKept:
            evaluated.contexts = sampled
        found.append(evaluated.evaluate(prompts(2, seed=2)))
    for name in ("eval_loss", "eval_entropy", "eval_kl"):
        assert found[1][name] == pytest.approx(found[0][name], rel=1e-4, abs=2e-5), name
