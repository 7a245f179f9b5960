"""With `keep_sampling_mask`, training equals stock TRL with log-probs over the tokens left to the sampler."""

from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from torch import Tensor
from transformers import GenerationMixin, LogitsProcessorList

import trl_ext
from tiny import Workshop, lora_config, prompts

Contexts = dict[tuple[int, ...], Tensor]
CUTS = {"top_p_and_top_k": {"top_p": 0.9, "top_k": 20}, "top_p": {"top_p": 0.7}, "min_p": {"min_p": 0.1}}
CUTS["generation_kwargs"] = {"generation_kwargs": {"top_k": 3}}


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> Contexts:
    """Return the log-probs (V,) of the sampler for each context of a run, -inf where it could not choose a token."""
    contexts: Contexts = {}
    processors = GenerationMixin._get_logits_processor

    def note(ids: Tensor, scores: Tensor) -> Tensor:
        for row, of_row in zip(ids, scores.log_softmax(-1), strict=True):
            contexts.setdefault(tuple(row[int((row != 0).int().argmax()) :].tolist()), of_row)
        return scores

    def noted(*positional: Any, **keywords: Any) -> LogitsProcessorList:
        return LogitsProcessorList([*processors(*positional, **keywords), note])

    monkeypatch.setattr(GenerationMixin, "_get_logits_processor", noted)
    return contexts


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


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [len(set(ids)) + 0.01 * sum(ids) for ids in completion_ids]


def made(trainer: Any, workshop: Workshop, folder: Path, lora: bool = False, **config: Any) -> Any:
    config = {
        **{"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 6, "max_steps": 3},
        **{
            "learning_rate": 0.05,
            "optim": "sgd",
            "use_cpu": True,
            "bf16": False,
            "report_to": "none",
            "logging_steps": 1,
            "seed": 3,
        },
        **{"save_strategy": "no", "temperature": 0.8, "beta": 0.1},
        **config,
    }
    config_class = trl_ext.GRPOConfig if issubclass(trainer, trl_ext.GRPOTrainer) else trl.GRPOConfig
    return trainer(
        workshop.model("untied"),
        reward_funcs=reward,
        args=config_class(str(folder), **config),
        train_dataset=prompts(32, seed=1),
        peft_config=lora_config() if lora else None,
    )


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
    stock = made(OverKept, workshop, tmp_path, **fields)
    stock.contexts = sampled
    stock.train()
    ours = made(trl_ext.GRPOTrainer, workshop, tmp_path, **fields, **added)
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


def ratios(trainer: Any, contexts: Contexts) -> Tensor:
    """Return the ratio of the old policy to the sampler for each token of the buffer."""
    found = []
    for inputs in trainer._buffered_inputs:
        scored = inputs.get("old_policy_scored", inputs["completion_mask"]).bool()
        for row, step in scored.nonzero().tolist():
            prompt = inputs["prompt_ids"][row][inputs["prompt_mask"][row].bool()].tolist()
            ids = inputs["completion_ids"][row].tolist()
            sampler = contexts[tuple(prompt + ids[:step])][ids[step]]
            found.append((inputs["old_per_token_logps"][row, step] - sampler).exp())
    return torch.stack(found)


@pytest.mark.parametrize("masked", [True, False])
def test_the_ratio_to_the_sampler_is_one_before_the_first_step(
    masked: bool, workshop: Workshop, sampled: Contexts, tmp_path: Path
) -> None:
    fields: dict[str, Any] = {"num_iterations": 2, "max_steps": 1, "beta": 0.0, **CUTS["top_p_and_top_k"]}
    fields["gradient_accumulation_steps"] = 2
    if masked:
        trainer = made(trl_ext.GRPOTrainer, workshop, tmp_path, keep_sampling_mask=True, **fields)
    else:
        trainer = made(trl.GRPOTrainer, workshop, tmp_path, **fields)
    trainer.train()
    found = ratios(trainer, sampled)
    assert len(found) > 40
    if masked:
        assert float((found - 1).abs().max()) < 1e-5
    else:  # stock's is the probability of the tokens that the sampler kept
        assert float(found.mean()) < 0.95
    print(f"{masked=} mean {float(found.mean()):.6f} max |ratio - 1| {float((found - 1).abs().max()):.2e}")
