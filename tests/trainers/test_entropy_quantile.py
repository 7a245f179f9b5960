"""With `top_entropy_quantile`, tokens with the same context tie as in stock TRL, so it picks the same tokens."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import trl
from transformers import AutoModelForCausalLM

import trl_ext
from drop_in_cases import Case
from run_losses import Trainers, train
from tiers import fast_first
from tiny import Workshop
from trl_ext.scoring.forward import ScoringOptions, attach_scoring_forward

STOCK, OURS = Trainers.of(trl), Trainers.of(trl_ext)


def drawn(seed: int) -> Case:
    """The first tokens of a group share their context: with few tokens the quantile often lies among them."""
    rng = random.Random(seed)
    config: dict[str, Any] = {
        "top_entropy_quantile": round(rng.uniform(0.1, 0.9), 2),
        "max_completion_length": rng.choice([2, 3, 5, 8]),
        "num_generations": rng.choice([4, 8]),
        "per_device_train_batch_size": 8,
        "seed": seed,
        "num_iterations": rng.choice([1, 2]),
    }
    if rng.random() < 0.3:
        config["entropy_coef"] = 0.05
    setup, model = rng.choice(["full", "lora"]), rng.choice(["tied", "untied"])
    return Case(f"quantile-{seed}", "grpo", setup, model, config, steps=3, learning_rate=0.02)


def distance(case: Case, ours: Trainers, workshop: Workshop) -> float:
    updates = [
        torch.cat([update.flatten() for update in train(case, trainers, workshop).updates.values()])
        for trainers in (ours, STOCK)
    ]
    return float((updates[0] - updates[1]).norm() / updates[1].norm())


# 16: a tie at the threshold; without our rule, not all of its tokens are picked
@pytest.mark.parametrize("seed", fast_first(range(40), 0, 1, 2, 16))
def test_the_quantile_picks_the_tokens_that_trl_picks(seed: int, workshop: Workshop) -> None:
    assert distance(drawn(seed), OURS, workshop) <= 1e-4


@pytest.mark.parametrize("ours", [{"share_prompts": False}, {"padding_free": False}, {"head_chunk_size": 3}], ids=str)
@pytest.mark.parametrize("seed", [pytest.param(x, marks=() if x < 1 else pytest.mark.slow) for x in range(12)])
def test_every_layout_picks_the_same_tokens(seed: int, ours: dict[str, Any], workshop: Workshop) -> None:
    case = drawn(seed)
    assert distance(replace(case, ours={**case.ours, **ours}), OURS, workshop) <= 1e-4


def test_tokens_with_the_same_context_have_equal_entropies_and_gradients(workshop: Workshop) -> None:
    """They are bitwise equal, although each token has another target, which is summed separately."""
    model = AutoModelForCausalLM.from_pretrained(workshop.model("untied"))
    attach_scoring_forward(model, ScoringOptions(outputs=("log_probs", "entropy"), entropy_requires_grad=True))
    torch.manual_seed(0)
    prompt, completions = torch.randint(3, 97, (1, 6)).expand(32, -1), torch.randint(3, 97, (32, 3))
    ids = torch.cat([prompt, completions], dim=1)
    labels = ids.clone()
    labels[:, :6] = -100
    entropies = model(input_ids=ids, labels=labels, fused_lm_head=True).entropy[:, -3:]
    assert entropies[:, 0].unique().numel() == 1
    assert entropies[:, 1].unique().numel() > 1

    def gradient(of: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(of, model.model.embed_tokens.weight, retain_graph=True)[0]

    torch.testing.assert_close(gradient(entropies[:, 0].sum()), 32 * gradient(entropies[0, 0]), rtol=1e-5, atol=1e-7)
