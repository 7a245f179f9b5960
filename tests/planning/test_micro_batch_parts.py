"""A micro-batch fed in parts of so many tokens: the same gradients, losses and metrics, and no larger forward.

Tokens are counted by a hook on the input embedding. The reference is the same trainer without the field.
"""

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import trl_ext
from drop_in_cases import GRPO_LOSSES, Case
from metric_table import counts_work
from rewards import id_reward
from run_losses import Record, Trainers, build
from tiers import fast_first
from tiny import ROLLOUTS, Workshop, prompts
from trained_weights import far
from training_comparison import POLICY_BATCHES, tensors_differ
from trl_ext.planning.micro_batches import RowTokens
from trl_ext.planning.parts import Parts
from trl_ext.planning.rows import ScoredTokens

OURS = Trainers.of(trl_ext)
STOCK = Trainers.of(trl)

BUDGET = 24
LOSSES = {name: extra for name, extra in GRPO_LOSSES.items() if name != "bnpo"}
OLD_POLICY = {"model": "policy", "grad": False, "training": True}


def case_of(budget: int | None, **fields: Any) -> Case:
    """Micro-batches of 8 rows in groups of 4; `shape` holds fields of packing."""
    keys = ("setup", "model", "rewards", "prompts", "lora", "rollout", "steps", "vllm")
    kwargs = {key: fields.pop(key) for key in keys if key in fields}
    ours = {"keep_groups_together": False, "max_tokens_per_micro_batch": budget, **fields.pop("shape", {})}
    return Case("parts", "grpo", config=fields, learning_rate=0.02, ours=ours, **kwargs)


def run(case: Case, workshop: Workshop, folder: Path, trainers: Trainers = OURS) -> Record:
    record = Record()
    trainer = build(case, trainers, workshop, str(folder), record)
    for scoring in getattr(trainer, "scoring_forwards", []):
        scoring.packing.checked = True  # else the first batch is fed twice more
        scoring.is_compared = True
    trainer.train()
    return record


def sizes(record: Record, **where: Any) -> list[int]:
    """Tokens of each forward."""
    return [feed.tokens for feed in record.feeds if all(getattr(feed, key) == x for key, x in where.items())]


def both(workshop: Workshop, folder: Path, budget: int = BUDGET, **fields: Any) -> tuple[Record, Record]:
    """With the field and without: the same training, but for the number of forwards."""
    parts = run(case_of(budget, **fields), workshop, folder / "parts")
    whole = run(case_of(None, **fields), workshop, folder / "whole")
    assert_same_training(parts, whole)
    return parts, whole


def assert_same_training(parts: Record, whole: Record) -> None:
    assert len(parts.losses) == len(whole.losses) > 0
    for got, want in zip(parts.losses, whole.losses, strict=True):
        assert math.isclose(got, want, rel_tol=1e-5, abs_tol=1e-6)
    wrong = tensors_differ("weight update", parts.updates, whole.updates)
    for i, (got, want) in enumerate(zip(parts.gradients, whole.gradients, strict=True)):
        assert any(x is not None and x.abs().max() > 0 for x in want.values())
        wrong += tensors_differ(f"gradient of step {i}", got, want)
    assert not wrong, "\n".join(wrong[:20])
    for got, want in zip(parts.logs, whole.logs, strict=True):
        assert got.keys() == want.keys()
        for name, x in want.items():
            if not counts_work(name):
                assert math.isclose(got[name], x, rel_tol=1e-4, abs_tol=1e-6), name


@pytest.mark.parametrize("setup", ["full", pytest.param("lora", marks=pytest.mark.slow)])
@pytest.mark.parametrize("loss_type", fast_first(LOSSES, "grpo", "vespo"))
def test_parts_have_the_gradient_of_the_whole(loss_type: str, setup: str, workshop: Workshop, tmp_path: Path) -> None:
    iterations = 2 if setup == "full" else 1
    fields = {"loss_type": loss_type, **LOSSES[loss_type], "setup": setup, "num_iterations": iterations}
    parts, whole = both(workshop, tmp_path, **fields)
    assert max(sizes(parts, **POLICY_BATCHES)) <= BUDGET < min(sizes(whole, **POLICY_BATCHES))


SITUATIONS: dict[str, dict[str, Any]] = {
    "lora": {"setup": "lora"},
    "accumulation": {"gradient_accumulation_steps": 2, "steps": 3},
    "gspo": {"importance_sampling_level": "sequence", "loss_type": "grpo", "num_iterations": 2},
    "beta": {"setup": "ref_model", "beta": 0.1, "num_iterations": 2},
    "off-policy-mask": {"off_policy_mask_threshold": 0.01, "num_iterations": 2},
    "dead-rows": {"rewards": ("half_dead",), "num_iterations": 2},
    "no-sharing": {"shape": {"share_prompts": False}},
    "checkpointing": {"gradient_checkpointing": True},
    "tools": {"rollout": "masked", "num_iterations": 2},
    "sampler": {"vllm": True, "rollout": "near_sampler", "num_iterations": 2},
    "sampler-sequences": {
        "vllm": True,
        "rollout": "near_sampler",
        "vllm_importance_sampling_mode": "sequence_truncate",
        "vllm_importance_sampling_clip_max": 1.1,
        "loss_type": "vespo",
    },
    "clipped": {"max_grad_norm": 0.05},
}


@pytest.mark.parametrize("name", fast_first(SITUATIONS, "lora", "accumulation", "dead-rows", "sampler"))
def test_parts_in_every_situation(name: str, workshop: Workshop, tmp_path: Path) -> None:
    budget = 12 if name == "dead-rows" else BUDGET
    parts, whole = both(workshop, tmp_path, budget, **SITUATIONS[name])
    assert max(sizes(parts, model="policy", training=True)) <= budget < max(sizes(whole, **POLICY_BATCHES))
    assert parts.fed("forwards", **POLICY_BATCHES) > whole.fed("forwards", **POLICY_BATCHES)


@pytest.mark.parametrize("loss_type", fast_first(LOSSES, "grpo", "dapo"))
def test_the_micro_batches_of_a_step_run_together(loss_type: str, workshop: Workshop, tmp_path: Path) -> None:
    """Four micro-batches of 8 rows for each of two optimizer steps, which a budget for all makes one forward each."""
    step = {"gradient_accumulation_steps": 4, "steps_per_generation": 8, "num_iterations": 2, "steps": 4}
    case = case_of(None, loss_type=loss_type, **LOSSES[loss_type], beta=0.1, prompts=16, **step)
    whole = run(case, workshop, tmp_path / "whole")
    for budget, forwards in ((BUDGET, None), (10_000, 4)):
        ours = {"keep_groups_together": True, "max_tokens_per_micro_batch": budget}
        together = run(replace(case, ours=ours), workshop, tmp_path / str(budget))
        tokens = sizes(together, **POLICY_BATCHES)
        assert len(tokens) == forwards or max(tokens) <= BUDGET
        wrong = tensors_differ("weight update", together.updates, whole.updates)
        for i, (got, want) in enumerate(zip(together.gradients, whole.gradients, strict=True)):
            wrong += tensors_differ(f"gradient of step {i}", got, want)
        assert not wrong, "\n".join(wrong[:20])
        losses = [[sum(x[i : i + 4]) for i in range(0, 16, 4)] for x in (together.losses, whole.losses)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5, abs=1e-6)


def test_the_old_policy_is_scored_in_parts_too(workshop: Workshop, tmp_path: Path) -> None:
    fields = {"gradient_accumulation_steps": 1, "steps_per_generation": 2, "num_iterations": 2, "steps": 4}
    parts, whole = both(workshop, tmp_path, **fields)
    assert len(sizes(whole, **OLD_POLICY)) == 1
    assert len(sizes(parts, **OLD_POLICY)) > 1
    assert max(sizes(parts, **OLD_POLICY)) <= BUDGET < max(sizes(whole, **OLD_POLICY))


def test_a_prompt_counts_once_a_part_or_once_a_row(workshop: Workshop, tmp_path: Path) -> None:
    for budget in (15, 18, 21, 30):
        apart = run(case_of(budget, shape={"share_prompts": False}), workshop, tmp_path)
        shared = run(case_of(budget), workshop, tmp_path)
        assert max(sizes(apart, **POLICY_BATCHES)) <= budget
        assert len(sizes(shared, **POLICY_BATCHES)) <= len(sizes(apart, **POLICY_BATCHES))
        assert shared.fed("tokens", **POLICY_BATCHES) < apart.fed("tokens", **POLICY_BATCHES)


def test_a_padded_batch_is_cut_by_its_rows_and_width(workshop: Workshop, tmp_path: Path) -> None:
    parts, whole = both(workshop, tmp_path, budget=30, shape={"padding_free": False})
    fed = [(feed.rows, feed.tokens) for feed in parts.feeds]
    widths = {tokens // rows for rows, tokens in fed}
    assert all(tokens <= 30 for _, tokens in fed)
    assert {rows for rows, _ in fed} == {2}
    assert all(10 < width <= 15 for width in widths)
    assert parts.fed("tokens") == whole.fed("tokens")


def test_a_row_that_is_longer_than_the_budget_is_alone(workshop: Workshop, tmp_path: Path) -> None:
    parts, whole = both(workshop, tmp_path, budget=1)
    assert len(sizes(parts, **POLICY_BATCHES)) == 8 * len(sizes(whole, **POLICY_BATCHES))


def test_a_batch_in_which_nothing_is_scored_is_one_part(workshop: Workshop, tmp_path: Path) -> None:
    record = run(case_of(1, rewards=("dead",)), workshop, tmp_path)
    assert sizes(record, **POLICY_BATCHES) == [1, 1]


def test_evaluation_is_not_cut(workshop: Workshop, tmp_path: Path) -> None:
    parts, whole = both(workshop, tmp_path, eval_strategy="steps", eval_steps=1, num_generations_eval=2)
    evaluation = {"training": False}
    assert sizes(parts, **evaluation) == sizes(whole, **evaluation) != []
    assert max(sizes(parts, **evaluation)) > BUDGET


def test_the_gradient_is_stock_trls_and_what_is_skipped_is_counted(workshop: Workshop, tmp_path: Path) -> None:
    fields = {"gradient_accumulation_steps": 2, "rewards": ("half_dead",)}
    ours = run(case_of(BUDGET, **fields), workshop, tmp_path / "ours")
    stock = run(case_of(BUDGET, **fields), workshop, tmp_path / "stock", STOCK)
    for got, want in zip(ours.gradients, stock.gradients, strict=True):
        assert not tensors_differ("gradient", got, want)
    for i, log in enumerate(ours.logs[:-1]):
        assert log["skipped/tokens"] == stock.fed("tokens", log=i) - ours.fed("tokens", log=i) > 0


REFUSED = {
    "bnpo": ({"loss_type": "bnpo"}, "bnpo"),
    "entropy bonus": ({"entropy_coef": 0.05}, "entropy bonus"),
    "router loss": ({"model": "experts"}, "router loss"),
    "entropy quantile": ({"top_entropy_quantile": 0.2}, "top_entropy_quantile=0.2"),
    "lomo": ({"optim": "lomo"}, "`lomo` would step after the backward of each part"),
    "adalomo": ({"optim": "adalomo"}, "`adalomo` would step after the backward of each part"),
    "layerwise": (
        {"optim": "galore_adamw_layerwise"},
        "`galore_adamw_layerwise` would step after the backward of each part",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_where_parts_would_train_otherwise(name: str, workshop: Workshop, tmp_path: Path) -> None:
    fields, words = REFUSED[name]
    with pytest.raises(ValueError, match=f"max_tokens_per_micro_batch=24.*{words}"):
        build(case_of(BUDGET, **fields), OURS, workshop, str(tmp_path), Record())


def test_a_loss_of_ones_own_is_refused(workshop: Workshop, tmp_path: Path) -> None:
    class OwnLoss(trl_ext.GRPOTrainer):
        def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
            return super()._compute_loss(model, inputs)

    own = Trainers(OURS.dpo_trainer, OURS.dpo_config, OwnLoss, OURS.grpo_config)
    with pytest.raises(ValueError, match=r"max_tokens_per_micro_batch=24.*overrides the loss"):
        build(case_of(BUDGET), own, workshop, str(tmp_path), Record())


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_a_loss_that_is_changed_afterwards_stops_training(factor: float, workshop: Workshop, tmp_path: Path) -> None:
    @contextmanager
    def expected() -> Iterator[None]:
        if factor == 1.0:
            yield
            return
        with pytest.raises(RuntimeError, match=r"compute_loss.*max_tokens_per_micro_batch"):
            yield

    with expected():
        run(case_of(BUDGET), workshop, tmp_path, OURS.with_loss_times(factor))


@pytest.mark.parametrize("calls", [1, 2])
def test_a_loss_that_is_left_out_stops_training(calls: int, workshop: Workshop, tmp_path: Path) -> None:
    """The gradients of all parts but the last are there already."""

    class Leaving(trl_ext.GRPOTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            losses = [super(Leaving, self).compute_loss(*args, **kwargs) for _ in range(calls)]
            return losses[-1] if calls > 1 else torch.zeros((), requires_grad=True)

    with pytest.raises(RuntimeError, match=r"compute_loss.*max_tokens_per_micro_batch"):
        run(case_of(BUDGET), workshop, tmp_path, replace(OURS, grpo_trainer=Leaving))


def test_a_loss_that_someone_else_asks_for_is_one_forward(workshop: Workshop, tmp_path: Path) -> None:
    """Its gradient goes where he wants it, and nowhere else; so it is where none is wanted."""

    class Probed(trl_ext.GRPOTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            if self._buffered_inputs:
                loss = self.compute_loss(self.model, self._buffered_inputs[0])
                torch.autograd.grad(loss, list(self.model.parameters()), allow_unused=True)
            return super().training_step(*args, **kwargs)

        def compute_loss(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            with torch.no_grad():
                super().compute_loss(*args, **kwargs)
            return super().compute_loss(*args, **kwargs)

    fields = {"num_iterations": 2, "steps": 4}
    parts = run(case_of(BUDGET, **fields), workshop, tmp_path / "parts", replace(OURS, grpo_trainer=Probed))
    whole = run(case_of(None, **fields), workshop, tmp_path / "whole")
    probes = [size for size in sizes(parts, **POLICY_BATCHES) if size > BUDGET]
    assert len(probes) == 3
    for got, want in zip(parts.gradients, whole.gradients, strict=True):
        assert not tensors_differ("gradient", got, want)


@pytest.mark.parametrize("budget", [0, -1, 2.5, True, "many"])
def test_a_budget_that_is_none_is_refused(budget: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"max_tokens_per_micro_batch.*integer"):
        trl_ext.GRPOConfig(output_dir=str(tmp_path), bf16=False, max_tokens_per_micro_batch=budget)


def test_the_plan_says_it(workshop: Workshop, tmp_path: Path) -> None:
    decision = build(case_of(BUDGET), OURS, workshop, str(tmp_path), Record()).explain()["micro-batches"]
    assert decision.action == "run"
    assert "at most 24 tokens" in decision.reason


@st.composite
def micro_batches(draw: st.DrawFn) -> tuple[dict[str, torch.Tensor], ScoredTokens]:
    """Prompts of 1 to 4 tokens that recur, completions of 0 to 5, some rows not fed."""
    rows = draw(st.integers(1, 9))
    kinds = [[7], [7, 8], [9, 8, 7, 7], [1, 2, 3]]
    prompts = [kinds[i] for i in draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows))]
    lengths = torch.tensor(draw(st.lists(st.integers(0, 5), min_size=rows, max_size=rows)))
    prompt_ids = torch.tensor([[0] * (4 - len(prompt)) + prompt for prompt in prompts])
    prompt_mask = torch.tensor([[0] * (4 - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    tokens_BC = torch.arange(5) < lengths[:, None]
    live = draw(st.lists(st.booleans(), min_size=rows, max_size=rows))
    rows_R = torch.tensor([row for row in range(rows) if live[row]] or [draw(st.integers(0, rows - 1))])
    fed_B = torch.zeros(rows, dtype=torch.bool).index_fill(0, rows_R, True)
    batch = {"prompt_ids": prompt_ids, "prompt_mask": prompt_mask, "completion_ids": torch.zeros(rows, 5)}
    return batch, ScoredTokens(rows_R, tokens_BC & fed_B[:, None])


@settings(max_examples=80, deadline=None)
@given(micro_batches(), st.integers(1, 40), st.booleans(), st.booleans(), st.integers(0, 3))
def test_any_micro_batch_is_cut_within_its_budget(
    micro_batch: tuple[dict[str, torch.Tensor], ScoredTokens], budget: int, packed: bool, shared: bool, more: int
) -> None:
    batch, scored = micro_batch
    parts = Parts.of(batch, scored, budget, packed=packed, shared=shared)
    fed = RowTokens.of(batch, scored, packed=packed, shared=shared)
    assert sorted(row for part in parts for row in part.rows_R.tolist()) == scored.rows_R.tolist()
    for part in parts:
        assert len(part.rows_R) == 1 or fed.of_rows(part.rows_R.tolist()) <= budget
        assert torch.equal(part.tokens_BC.any(dim=1), scored.tokens_BC.any(dim=1) & _among(part.rows_R, batch))
    assert torch.equal(torch.stack([part.tokens_BC for part in parts]).sum(dim=0).bool(), scored.tokens_BC)
    for a, b in itertools.combinations(parts.rows, 2):
        assert fed.of_rows(a + b) > budget
    everything = fed.of_rows(scored.rows_R.tolist())
    assert (len(parts) == 1) == (everything <= budget or len(scored.rows_R) == 1)

    filled = parts.at_least(len(parts) + more)
    assert len(filled) == len(parts) + more
    whole_BC = torch.randn(scored.tokens_BC.shape)
    joined = filled.join([whole_BC[part.rows_R] for part in filled])
    assert torch.equal(scored.scatter(joined), scored.scatter(whole_BC[scored.rows_R]))


@pytest.mark.parametrize(
    ("own_tokens", "parts"),
    [([3, 3, 3, 3], [[0, 1], [2, 3]]), ([3, 40, 3, 1, 1], [[1], [0, 2, 3, 4]]), ([2, 2, 2, 2], [[0, 1, 2, 3]])],
    ids=["cut", "beside a row longer than the budget", "whole"],
)
def test_a_prompts_rows_are_cut_into_few_parts(own_tokens: list[int], parts: list[list[int]]) -> None:
    """With a prompt of 4 tokens, of at most 12."""
    prompt_ids = torch.full((len(own_tokens), 4), 7)
    batch = {"prompt_ids": prompt_ids, "prompt_mask": torch.ones_like(prompt_ids)}
    # The last token is scored, and not fed
    scored = ScoredTokens(torch.arange(len(prompt_ids)), torch.arange(41) <= torch.tensor(own_tokens).unsqueeze(1))
    assert Parts.of(batch, scored, 12, packed=True, shared=True).rows == parts


def _among(rows_R: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.isin(torch.arange(len(batch["prompt_ids"])), rows_R)


@pytest.mark.parametrize(("before", "after"), [(10_000, None), pytest.param(None, 10_000, marks=pytest.mark.slow)])
def test_a_run_resumes_with_another_maximum(
    before: int | None, after: int | None, workshop: Workshop, tmp_path: Path
) -> None:
    """The checkpoint lies in the middle of a generation batch, whose micro-batches are merged or not."""
    changes = []
    for limit in (before, after):
        trainer = trl_ext.GRPOTrainer(
            model=workshop.model("tied"),
            reward_funcs=id_reward,
            args=trl_ext.GRPOConfig(
                output_dir=str(tmp_path),
                per_device_train_batch_size=4,
                num_generations=4,
                gradient_accumulation_steps=2,
                steps_per_generation=4,
                max_steps=2,
                save_steps=1,
                max_completion_length=8,
                loss_type="grpo",
                optim="sgd",
                learning_rate=0.05,
                lr_scheduler_type="constant",
                max_grad_norm=0.0,
                use_cpu=True,
                bf16=False,
                report_to="none",
                max_tokens_per_micro_batch=limit,
            ),
            train_dataset=prompts(24, seed=1),
            rollout_func=ROLLOUTS["scripted"],
        )
        trainer.train(resume_from_checkpoint=None if limit == before else str(tmp_path / "checkpoint-1"))
        start = load_file(tmp_path / "checkpoint-1" / "model.safetensors")
        weights = dict(trainer.model.named_parameters())
        changes.append({name: weights[name].detach() - start[name] for name in start})
    whole, resumed = changes
    assert any(x.abs().max() > 0 for x in whole.values())
    assert far(resumed, whole) <= 1e-5
