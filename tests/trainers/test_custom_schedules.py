"""A subclass that decides when our loss gets which batches trains as TRL's does, or stops with a reason."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from transformers import AutoModelForCausalLM

import trl_ext
from drop_in_cases import Case
from run_losses import Trainers, train
from short_training import PAIRS, Bench
from tiny import Workshop, preferences, prompts


def case(**config: Any) -> Case:
    rewards = config.pop("rewards", ("half_dead",))
    return Case("grpo-own", "grpo", config=config, rewards=rewards, steps=4, learning_rate=0.01)


def assert_trains_as_trl(workshop: Workshop, run: Case, subclass: Callable[[type], type]) -> None:
    name, updates = f"{run.trainer}_trainer", []
    for library in (trl, trl_ext):
        trainers = Trainers.of(library)
        record = train(run, replace(trainers, **{name: subclass(getattr(trainers, name))}), workshop)
        updates.append(torch.cat([update.flatten() for update in record.updates.values()]))
    stock, ours = updates
    assert stock.norm() > 0
    assert (ours - stock).norm() <= 1e-5 * stock.norm()


def log_probs_of(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    completion = inputs["completion_ids"]
    ids = torch.cat([inputs["prompt_ids"], completion], dim=1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    logits = model(input_ids=ids, attention_mask=mask).logits[:, -completion.size(1) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, completion.unsqueeze(-1)).squeeze(-1)


def own_loss(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """A clipped ratio to the old policy, from the log-probs in the batch."""
    log_probs, mask = log_probs_of(model, inputs), inputs["completion_mask"]
    ratio = (log_probs - inputs.get("old_per_token_logps", log_probs.detach())).exp().clamp(max=3)
    return -(ratio * inputs["advantages"].unsqueeze(1) * mask).sum() / mask.sum()


def in_halves(trainer: Any) -> Any:
    class Halves(trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            losses = []
            for rows in (slice(0, 4), slice(4, 8)):
                half = {name: x[rows] if getattr(x, "ndim", 0) else x for name, x in inputs.items()}
                losses.append(super().compute_loss(model, half, *args, **kwargs))
            return sum(losses) / 2

    return Halves


def now_and_then(trainer: Any) -> Any:
    class Sometimes(trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if self.state.global_step % 3 == 1:
                return log_probs_of(model, inputs).pow(2).mean()
            return super().compute_loss(model, inputs, *args, **kwargs)

    return Sometimes


@pytest.mark.parametrize("subclass", [in_halves, now_and_then])
@pytest.mark.parametrize("slices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_old_log_probs_of_other_weights_are_never_used(subclass: Any, slices: int, workshop: Workshop):
    run = case(num_iterations=2, steps_per_generation=slices)
    assert_trains_as_trl(workshop, replace(run, steps=8), subclass)


def ours_at_first(trainer: Any) -> Any:
    class Stages(trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if self.state.global_step < 2:
                return super().compute_loss(model, inputs, *args, **kwargs)
            assert inputs["old_per_token_logps"].isfinite().all()
            return own_loss(model, inputs)

    return Stages


def test_a_later_stage_reads_the_old_log_probs_that_our_loss_kept(workshop: Workshop):
    assert_trains_as_trl(workshop, case(num_iterations=2, steps_per_generation=2), ours_at_first)


def with_a_buffer(trainer: Any, name: str = "_buffered_inputs") -> Any:
    class Buffered(trainer):
        def _prepare_inputs(self, generation_batch: Any) -> Any:
            if not self.model.training:
                return super()._prepare_inputs(generation_batch)
            slices, size = self.args.steps_per_generation, self.args.per_device_train_batch_size
            if self._step % (slices * self.num_iterations) == 0:
                batch = self._generate_and_score_completions(generation_batch)
                buffer = [
                    {key: x[i * size :][:size] if getattr(x, "ndim", 0) else x for key, x in batch.items()}
                    for i in range(slices)
                ]
                setattr(self, name, buffer)
            return getattr(self, name)[self._step % slices]

    return Buffered


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize(("iterations", "slices"), [(1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize("name", ["_buffered_inputs", pytest.param("_kept", marks=pytest.mark.slow)])
def test_a_subclass_that_buffers_its_batches_has_all_log_probs(
    name: str, iterations: int, slices: int, beta: float, workshop: Workshop
):
    run = case(beta=beta, num_iterations=iterations, steps_per_generation=slices)
    assert_trains_as_trl(workshop, run, partial(with_a_buffer, name=name))


def test_the_plan_says_that_a_subclass_buffers_its_batches(workshop: Workshop, tmp_path: Path):
    bench = Bench(workshop, tmp_path)
    bench.grpo(subclass=with_a_buffer, num_iterations=2, max_steps=3)
    assert "overrides `_prepare_inputs`" in bench.trainer.explain()["old policy"].reason


def with_trls_entries_alone(trainer: Any) -> Any:
    """Passes on only the entries that it knows, and changes advantages from step to step."""
    known = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "num_items_in_batch")

    class Filters(trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            given = {name: inputs[name] for name in (*known, "old_per_token_logps") if name in inputs}
            given["advantages"] = inputs["advantages"] + self.shift * self.state.global_step
            return super().compute_loss(model, given, *args, **kwargs)

        shift = 0.0

    return Filters


@pytest.mark.parametrize("shift", [0.0, 0.3])
def test_a_subclass_may_leave_out_entries_that_it_does_not_know(shift: float, workshop: Workshop):
    def shifted(trainer: Any) -> Any:
        subclass = with_trls_entries_alone(trainer)
        subclass.shift = shift
        return subclass

    assert_trains_as_trl(workshop, case(num_iterations=2), shifted)


def own_in_training(trainer: Any) -> Any:
    class OwnInTraining(trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if not model.training:
                return super().compute_loss(model, inputs, *args, **kwargs)
            return own_loss(model, inputs)

    return OwnInTraining


@pytest.mark.parametrize("evaluates_first", [False, True])
def test_the_plan_follows_the_loss_of_training(evaluates_first: bool, workshop: Workshop, tmp_path: Path):
    weights = []
    for package in (trl, trl_ext):
        bench = Bench(workshop, tmp_path, package)
        evaluation = {"eval_strategy": "steps", "eval_steps": 9, "eval_on_start": True}
        bench.grpo(
            subclass=own_in_training,
            train_dataset=prompts(12, seed=1),
            eval_dataset=prompts(4, seed=2),
            per_device_eval_batch_size=4,
            gradient_checkpointing=False,
            optim="sgd",
            learning_rate=0.1,
            num_iterations=2,
            steps_per_generation=2,
            max_steps=6,
            seed=7,
            **(evaluation if evaluates_first else {}),
        )
        weights.append(torch.cat([x.detach().flatten() for x in bench.trainer.model.parameters()]))
    assert (weights[1] - weights[0]).norm() <= 1e-5 * weights[0].norm()
    plan = bench.trainer.explain()
    assert plan["policy"].reason.endswith(
        "too: this trainer overrides the loss, which may send a gradient through any of them."
    )
    assert plan["old policy"].action == "run"


def logits_in_training(trainer: Any) -> Any:
    class LogitsInTraining(trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if not model.training:
                return super().compute_loss(model, inputs, *args, **kwargs)
            return model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits.pow(2).mean()

    return LogitsInTraining


def test_an_evaluation_before_training_does_not_hide_another_dpo_loss(workshop: Workshop, tmp_path: Path):
    bench = Bench(workshop, tmp_path)
    evaluation = {"eval_strategy": "steps", "eval_steps": 9, "eval_on_start": True}
    bench.dpo(subclass=logits_in_training, eval_dataset=preferences(5, seed=2), **evaluation)
    plan = bench.trainer.explain()
    assert {plan[name].action for name in ("head", "packing")} == {"skip"}


def reads_a_wrong_column(completions: list[Any], **columns: Any) -> list[float]:
    return [float(x) for x in columns["answre"]]


def with_a_wrong_key(trainer: Any) -> Any:
    class Wrong(trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(model, {**inputs, "more": inputs["answre"]}, *args, **kwargs)

    return Wrong


@pytest.mark.parametrize(
    "mistake", [{"reward_funcs": reads_a_wrong_column}, {"subclass": with_a_wrong_key}], ids=lambda x: next(iter(x))
)
def test_a_key_error_of_the_users_code_is_raised_unchanged(mistake: dict[str, Any], workshop: Workshop, tmp_path: Path):
    with pytest.raises(KeyError, match="answre"):
        Bench(workshop, tmp_path).grpo(**mistake)


def with_its_own_generation(trainer: Any) -> Any:
    class Generates(trainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            return super()._generate_and_score_completions(inputs)

    return Generates


def test_the_token_budget_holds_if_a_subclass_reads_generated_batches(workshop: Workshop, tmp_path: Path):
    seen: list[tuple[bool, int]] = []

    class Watched(with_its_own_generation(trl_ext.GRPOTrainer)):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.scoring_forwards[0].packing.checked = True  # the check scores a few more rows
            self.scoring_forwards[0].is_compared = True
            self.model.get_input_embeddings().register_forward_hook(self.count)

        def count(self, module: Any, inputs: Any, output: Any) -> None:
            if not self.generating:
                seen.append((torch.is_grad_enabled(), inputs[0].numel()))

        generating = False

        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            self.generating = True
            try:
                return super()._generate(*args, **kwargs)
            finally:
                self.generating = False

    Bench(workshop, tmp_path).grpo(
        subclass=lambda _: Watched,
        train_dataset=prompts(12, seed=1),
        per_device_train_batch_size=8,
        max_completion_length=8,
        num_iterations=2,
        max_steps=2,
        max_tokens_per_micro_batch=30,
    )
    assert {grad for grad, _ in seen} == {True, False}
    assert max(tokens for _, tokens in seen) <= 30


def test_a_policy_with_experts_can_have_a_reference_without(workshop: Workshop, tmp_path: Path):
    weights = []
    for package in (trl, trl_ext):
        bench = Bench(workshop, tmp_path, package)
        bench.dpo(
            model=workshop.model("experts"),
            ref_model=AutoModelForCausalLM.from_pretrained(workshop.model("untied", seed=5)),
            train_dataset=preferences(12, seed=1),
            model_init_kwargs={"output_router_logits": True},
            router_aux_loss_coef=0.05,
            gradient_checkpointing=False,
            optim="sgd",
            learning_rate=0.1,
            max_steps=3,
        )
        assert bench.trainer.aux_loss_enabled
        weights.append(torch.cat([x.detach().flatten() for x in bench.trainer.model.parameters()]))
    assert (weights[1] - weights[0]).norm() <= 1e-6 * weights[0].norm()


def test_the_plan_of_a_dpo_loss_that_is_not_ours_claims_no_reference_columns(workshop: Workshop, tmp_path: Path):
    class Own(trl_ext.DPOTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return model(inputs["input_ids"], inputs["attention_mask"]).logits.square().mean()

    rows = PAIRS.map(lambda row: {"ref_chosen_logps": -1.0, "ref_rejected_logps": -2.0})
    bench = Bench(workshop, tmp_path)
    bench.dpo(subclass=lambda base: Own, train_dataset=rows, loss_type=["sigmoid"])
    assert "`Own.compute_loss`" in bench.trainer.explain()["reference"].reason
    assert "ref_chosen_logps" not in bench.trainer.explain()["reference"].reason
