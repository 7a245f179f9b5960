"""In a packed row no sequence sees another: a token changes only the log-probs of its sequences."""

import random
from typing import Any

import pytest
import torch

from packing_batches import Batch, dpo, grpo, tokens_needed, words
from packing_models import FAMILIES, attach, build
from packing_runs import see
from token_counts import as_of_a_library

ROUNDING = 1e-6
# Two groups of three completions; the first two of each have the same start
PROMPTS, COMPLETIONS = (13, 9), (11, 8, 12)
# Rows of other completions in the same group and in the other, and which of the pair it is
ELSEWHERE = {"a sibling": 1, "another group": 4}


def some_fast(names: Any, fast: tuple[str, ...]) -> list[Any]:
    return [pytest.param(name, marks=() if name in fast else pytest.mark.slow) for name in names]


FEW = ("llama", "gemma3", "gpt2", "deepseek_v3")


def groups() -> Batch:
    rng = random.Random(0)
    found = []
    for prompt in PROMPTS:
        alike = words(rng, 4)
        starts = (alike, alike, [])
        lengths = zip(starts, COMPLETIONS, strict=True)
        found.append((words(rng, prompt), [start + words(rng, n - len(start)) for start, n in lengths]))
    return grpo(found)


def pairs() -> Batch:
    """Make two pairs, chosen before rejected; the completions of a pair have the same start."""
    rng = random.Random(1)
    found = []
    for prompt in PROMPTS:
        alike = words(rng, 4)
        found.append((words(rng, prompt), alike + words(rng, 9), alike + words(rng, 7)))
    return dpo(found)


def moved(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).abs().max())


def scored(model: Any, batch: Batch) -> torch.Tensor:
    with torch.no_grad():
        return model(**batch.inputs, fused_lm_head=True).log_probs


def gradients_of(model: Any, batch: Batch, rows: list[int]) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    model(**batch.inputs, fused_lm_head=True).log_probs[rows].sum().backward()
    return {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}


def without_start(batch: Batch, row: int, start: int) -> torch.Tensor:
    """Return the columns of a row's labelled tokens, except the first `start`."""
    return (batch.labels[row] != -100).nonzero()[start:, 0]


@pytest.mark.parametrize("keep", [0, 4], ids=["from its first token", "after the common start"])
@pytest.mark.parametrize("where", ["a sibling", "another group", "the rejected of a pair"])
@pytest.mark.parametrize("name", some_fast(FAMILIES, FEW))
def test_a_completions_tokens_change_no_other_row(name: str, where: str, keep: int) -> None:
    batch, row = (pairs(), 2) if "pair" in where else (groups(), ELSEWHERE[where])
    model = build(name)
    attach(model)
    columns = without_start(batch, row, keep)
    other = batch.with_tokens(row, columns, words(random.Random(5), len(columns)))
    others = [i for i in range(len(batch.labels)) if i != row]
    before, after = scored(model, batch), scored(model, other)
    rounding = ROUNDING * FAMILIES[name].rounding
    # Other tokens share another start, so products have another shape and round in another order
    assert moved(before[others], after[others]) <= rounding * float(before[others].abs().max())
    assert moved(before[row], after[row]) > 0.1
    before, after = gradients_of(model, batch, others), gradients_of(model, other, others)
    scale = max(float(x.abs().max()) for x in before.values())
    assert max(moved(x, after[parameter]) for parameter, x in before.items()) <= rounding * scale


@pytest.mark.parametrize("column", ["first", "last"])
@pytest.mark.parametrize("name", some_fast(FAMILIES, FEW))
def test_a_prompts_token_changes_only_its_group(name: str, column: str) -> None:
    batch = groups()
    model = build(name)
    attach(model)
    first = int((batch.attention_mask[0] == 1).nonzero()[0])
    place = first if column == "first" else first + PROMPTS[0] - 1
    other = batch
    for row in range(3):
        other = other.with_tokens(row, [place], [3 + (int(batch.input_ids[0, place]) + 10) % 90])
    before, after = scored(model, batch), scored(model, other)
    assert moved(before[3:], after[3:]) <= ROUNDING
    for row in range(3):
        # A row's last tokens may be outside of its windows
        assert moved(before[row, : first + PROMPTS[0] + 1], after[row, : first + PROMPTS[0] + 1]) > 1e-4


@pytest.mark.parametrize("name", some_fast(FAMILIES, FEW))
def test_a_rows_gradient_reaches_only_its_own_tokens(name: str) -> None:
    """Exactly the input vectors that the row uses have a gradient. Those of other tokens have 0."""
    batch = groups()
    model = build(name)
    attach(model)
    entered: list[torch.Tensor] = []

    def keep(module: Any, args: Any, output: torch.Tensor) -> None:
        output.retain_grad()
        entered.append(output)

    model.get_input_embeddings().register_forward_hook(as_of_a_library(keep))
    log_probs = model(**batch.inputs, fused_lm_head=True).log_probs
    (vectors,) = entered
    assert vectors.shape[:2] == (1, tokens_needed(batch, in_columns=FAMILIES[name].learned_positions))
    for row in range(len(batch.labels)):
        (gradient,) = torch.autograd.grad(log_probs[row].sum(), vectors, retain_graph=True)
        reached = gradient[0].abs().amax(-1) > 0
        # With windows, a long prompt's first tokens may be outside of them
        own = tokens_needed(batch.rows([row]))
        assert int(reached.sum()) <= own
        if name in ("llama", "gpt2", "qwen3", "deepseek_v3", "qwen3_moe"):
            assert int(reached.sum()) == own


@pytest.mark.parametrize("name", some_fast(FAMILIES, ("llama", "gpt2")))
def test_the_order_of_rows_changes_no_score(name: str) -> None:
    batch = groups()
    order = [4, 0, 5, 2, 1, 3]
    model = build(name)
    attach(model)
    ours, other = see(model, batch), see(model, batch.rows(order))
    assert ours.fed == other.fed
    assert moved(ours.fields["log_probs"][order], other.fields["log_probs"]) <= ROUNDING * 10


@pytest.mark.parametrize("name", some_fast(FAMILIES, ("llama", "gpt2")))
def test_tokens_in_padding_change_nothing(name: str) -> None:
    """Masked tokens are never processed."""
    batch = groups()
    model = build(name)
    attach(model)
    hidden = batch.attention_mask == 0
    filled = Batch(batch.input_ids.masked_fill(hidden, 96), batch.attention_mask, batch.labels)
    assert torch.equal(scored(model, batch), scored(model, filled))
