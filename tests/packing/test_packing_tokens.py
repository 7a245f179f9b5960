"""Exactly the needed tokens are processed: no padding, no prompt twice, nothing after the last label.

Tokens are counted where they enter the model, and compared with stock TRL's head on the same batch.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trl.trainer.utils import add_fused_lm_head

import trl_ext
from drop_in_cases import Case
from packing_batches import (
    FIRST,
    Batch,
    any_batches,
    dpo,
    dpo_batches,
    dpo_example,
    grpo,
    grpo_batches,
    grpo_example,
    tokens_needed,
    words,
)
from packing_models import attach, build
from packing_runs import Call, see, watch
from run_losses import Record, Trainers, train
from run_losses import build as build_trainer
from tiny import Workshop

STOCK, OURS = Trainers.of(trl), Trainers.of(trl_ext)


def _words(count: int, seed: int = 0) -> list[int]:
    """Draw words. Those of two seeds differ from the first word on."""
    return [FIRST + seed, *words(random.Random(seed), count)][:count]


def _one_group(prompt: int, completions: list[int], more: tuple[int, int] = (0, 0)) -> Batch:
    return grpo([(_words(prompt), [_words(n, seed + 1) for seed, n in enumerate(completions)])], more=more)


def _few_shot() -> Batch:
    shots = _words(20)
    return grpo([(shots + _words(n, n), [_words(3, 50 + n), _words(4, 60 + n)]) for n in (2, 7, 5)])


def _turns() -> Batch:
    """Each prompt is the previous one with an answer and another question."""
    talk = _words(30)
    return grpo([(talk[:n], [_words(4, n)]) for n in (10, 20, 30)])


def _masked_whole() -> Batch:
    batch = _one_group(6, [5, 5])
    return Batch(batch.input_ids, batch.attention_mask, batch.labels.index_fill(0, torch.tensor([1]), -100))


def _no_label() -> Batch:
    batch = _one_group(6, [5, 5])
    return Batch(batch.input_ids, batch.attention_mask, torch.full_like(batch.labels, -100))


def _nothing_real() -> Batch:
    """The last row has only padding."""
    batch = _one_group(6, [5, 5])
    mask, labels = batch.attention_mask.clone(), batch.labels.clone()
    mask[1], labels[1] = 0, -100
    return Batch(batch.input_ids, mask, labels)


def _tool_at_the_end() -> Batch:
    return grpo([(_words(6), [_words(8, 1), _words(8, 2)])], unscored={(0, 0): [5, 6, 7], (0, 1): [2, 3]})


@dataclass(frozen=True)
class TokenCounts:
    """A batch, and how many of its tokens are processed."""

    batch: Callable[[], Batch]
    tokens: int | None = None  # counted by hand, for batches where that is easy
    model: str = "llama"
    share: bool = True
    router: bool = False


TABLE = {
    # The prompt once, and all but the last token of each completion
    "a group of eight": TokenCounts(lambda: _one_group(32, [4] * 8), 32 + 8 * 3),
    "a ragged group": TokenCounts(lambda: _one_group(32, [4, 1, 9, 2]), 32 + 3 + 0 + 8 + 1),
    "one row": TokenCounts(lambda: _one_group(5, [4]), 5 + 3),
    "one row of a wide generation batch": TokenCounts(lambda: _one_group(5, [4], more=(20, 30)), 5 + 3),
    "equal rows": TokenCounts(lambda: grpo([(_words(7), [_words(5, 1)] * 6)]), 7 + 4),
    "completions with the same start": TokenCounts(
        lambda: grpo([(_words(7), [_words(4, 1) + _words(3, 2), _words(4, 1) + _words(3, 3)])]), 7 + 4 + 2 + 2
    ),
    "a completion that another continues": TokenCounts(
        lambda: grpo([(_words(7), [_words(4, 1), _words(4, 1) + _words(3, 2)])]), 7 + 4 + 2
    ),
    "an empty completion": TokenCounts(lambda: _one_group(7, [0, 3]), 7 + 2),
    "empty completions alone": TokenCounts(lambda: grpo([(_words(7), [[], []])], more=(0, 2)), 1),
    "a row masked whole": TokenCounts(_masked_whole, 6 + 4),
    "no label at all": TokenCounts(_no_label, 1),
    "a row without a real token": TokenCounts(_nothing_real, 6 + 4),
    "an environment's tokens at the end": TokenCounts(_tool_at_the_end, 6 + 4 + 7),
    "prompts that differ in their last token": TokenCounts(
        lambda: grpo([(_words(9) + [last], [_words(3, last)]) for last in (5, 6)]), 9 + 2 * 3
    ),
    "prompts that differ in their first token": TokenCounts(
        lambda: grpo([([first] + _words(9), [_words(3)]) for first in (5, 6)]), 2 * (10 + 2)
    ),
    "few-shot prompts of unequal length": TokenCounts(_few_shot, 20 + (2 + 2 + 3) + (7 + 2 + 3) + (5 + 2 + 3)),
    "a conversation's turns": TokenCounts(_turns, 30 + 3 * 3),
    "few-shot prompts, learned positions": TokenCounts(_few_shot, 22 + 27 + 25 + 3 * (2 + 3), model="gpt2"),
    "a group, learned positions": TokenCounts(lambda: _one_group(32, [4] * 8, more=(3, 2)), 32 + 8 * 3, model="gpt2"),
    "each row its own prompt": TokenCounts(lambda: _one_group(32, [4] * 8), 8 * (32 + 3), share=False),
    "a router loss": TokenCounts(
        lambda: _one_group(32, [4, 1, 9, 2]), 32 + 4 + 1 + 9 + 2, model="qwen3_moe", router=True
    ),
    "a router loss and a row masked whole": TokenCounts(_masked_whole, 6 + 5 + 5, model="mixtral", router=True),
    "a router loss, no label at all": TokenCounts(_no_label, 6 + 5 + 5, model="mixtral", router=True),
    "shuffled groups": TokenCounts(grpo_example),
    "shuffled groups, windows": TokenCounts(grpo_example, model="gemma3"),
    "shuffled groups, a latent attention": TokenCounts(grpo_example, model="deepseek_v3"),
    "a pair": TokenCounts(lambda: dpo([(_words(384), _words(16, 1), _words(128, 2))]), 384 + 15 + 127),
    "a pair with the same start": TokenCounts(
        lambda: dpo([(_words(9), _words(3, 1) + _words(4, 2), _words(3, 1) + _words(6, 3))]), 9 + 3 + 3 + 5
    ),
    "a pair whose rejected is empty": TokenCounts(lambda: dpo([(_words(9), _words(3, 1), [])]), 9 + 2),
    "two pairs of one prompt": TokenCounts(
        lambda: dpo([(_words(9), _words(3, 1), _words(4, 2)), (_words(9), _words(5, 3), _words(6, 4))]), 9 + 14
    ),
    "pairs": TokenCounts(dpo_example),
    "pairs, learned positions": TokenCounts(dpo_example, model="gpt2"),
    "pairs, each row its own prompt": TokenCounts(dpo_example, share=False),
}


@pytest.mark.parametrize("name", TABLE)
def test_exactly_the_needed_tokens_are_processed(name: str) -> None:
    case = TABLE[name]
    batch = case.batch()
    call = {"output_router_logits": True} if case.router else {}
    expected = tokens_needed(batch, case.share, in_columns=case.model == "gpt2", router=case.router)
    assert case.tokens in (None, expected)
    ours, stock = build(case.model), build(case.model)
    attach(ours, share_prompts=case.share)
    add_fused_lm_head(stock, outputs=("log_probs", "entropy"))
    seen, theirs = see(ours, batch, **call), see(stock, batch, **call)
    assert theirs.fed == batch.input_ids.numel()
    assert seen.fed == expected < theirs.fed
    assert float((seen.fields["log_probs"] - theirs.fields["log_probs"]).abs().max()) < 1e-4


@pytest.mark.parametrize("kind", ["grpo", "dpo", "any"])
def test_exactly_the_needed_tokens_of_any_batch_are_processed(kind: str) -> None:
    batches = {"grpo": grpo_batches(), "dpo": dpo_batches(), "any": any_batches()}[kind]
    models = {name: build(name) for name in ("llama", "gpt2")}
    scored = {(name, share): build(name) for name in models for share in (True, False)}
    for (_, share), model in scored.items():
        attach(model, share_prompts=share)

    @settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(batch=batches, which=st.sampled_from(sorted(scored)))
    def check(batch: Batch, which: tuple[str, bool]) -> None:
        name, share = which
        seen = see(scored[which], batch, grad=False)
        assert seen.fed == tokens_needed(batch, share, in_columns=name == "gpt2")

    check()


def trained(case: Case, workshop: Workshop, folder: Path) -> tuple[list[Call], list[dict[str, Any]], Record]:
    """Train ours, and return the scoring forwards of policy and reference, the inputs of its losses, and the rest."""
    record, given_to_loss = Record(), []

    def noting(trainer: type) -> type:
        class Noting(trainer):
            def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
                if self.model.training:
                    given_to_loss.append(dict(inputs))
                return super().compute_loss(model, inputs, *args, **kwargs)

        return Noting

    trainers = replace(OURS, dpo_trainer=noting(OURS.dpo_trainer), grpo_trainer=noting(OURS.grpo_trainer))
    trainer = build_trainer(case, trainers, workshop, str(folder), record)
    for scoring in trainer.scoring_forwards:
        scoring.packing.checked = True
        scoring.is_compared = True
    policy = trainer.model.get_base_model() if hasattr(trainer.model, "peft_config") else trainer.model
    calls: list[Call] = []
    for model in (policy, trainer.ref_model):
        if model is not None:
            watch(model, calls)
    trainer.train()
    return calls, given_to_loss, record


def whole(inputs: dict[str, Any]) -> Batch:
    """Return the padded batch of the loss with the labels that it needs."""
    if "completion_ids" not in inputs:
        ids = inputs["input_ids"]
        return Batch(ids, inputs["attention_mask"], ids.masked_fill(inputs["completion_mask"] == 0, -100))
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    completion_mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    wanted = torch.cat([torch.zeros_like(inputs["prompt_mask"]), completion_mask], dim=1)
    return Batch(ids, mask, ids.masked_fill(wanted == 0, -100))


# With a KL term every row is scored. Some micro-batches use other weights than those that sampled them.
GRPO = {"beta": 0.1, "gradient_accumulation_steps": 3, "steps_per_generation": 4, "per_device_train_batch_size": 4}
# Name -> case, and whether some pass runs without a gradient
TRAINED = {
    "grpo": (Case("tokens-grpo", "grpo", "ref_model", config=GRPO), True),
    "grpo-lora": (Case("tokens-grpo-lora", "grpo", "lora", config=GRPO), True),
    "grpo-masked": (Case("tokens-grpo-masked", "grpo", "ref_model", config=GRPO, rollout="masked"), True),
    "grpo-router": (Case("tokens-grpo-router", "grpo", model="experts"), False),
    "grpo-checkpointing": (
        Case("tokens-grpo-checkpointing", "grpo", "lora", config={**GRPO, "gradient_checkpointing": True}),
        True,
    ),
    "dpo": (Case("tokens-dpo", "dpo", "ref_model"), True),
    "dpo-lora": (Case("tokens-dpo-lora", "dpo", "lora"), True),
}
FAST = ("grpo-lora", "dpo-lora")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in TRAINED])
def test_every_pass_of_a_trainer_processes_exactly_the_needed_tokens(
    name: str, workshop: Workshop, tmp_path: Path
) -> None:
    case, passes_without_gradient = TRAINED[name]
    calls, given_to_loss, ours = trained(case, workshop, tmp_path)
    assert any(not call.grad for call in calls) == passes_without_gradient
    for call in calls:
        assert call.fed == tokens_needed(call.batch, router=call.router)
    # Counted from TRL's batches, not from what our code made of them
    policy = [call.fed for call in calls if call.grad]
    assert policy == [tokens_needed(whole(inputs), router=case.model == "experts") for inputs in given_to_loss]
    stock = train(case, STOCK, workshop)
    assert ours.losses == pytest.approx(stock.losses, rel=1e-4, abs=1e-5)
    assert sum(policy) < stock.fed(grad=True)
    if passes_without_gradient:
        assert ours.fed(grad=False) < stock.fed(grad=False)
