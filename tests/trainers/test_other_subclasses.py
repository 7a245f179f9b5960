"""A user's subclass of `DPOTrainer`, `KTOTrainer` or `RLOOTrainer` trains as the same subclass of TRL's trainer."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import trl

import trl_ext
from drop_in_cases import Case
from run_losses import ALL_CASES, Trainers, train
from tiny import Workshop
from training_comparison import assert_same, tensors_differ

STOCK, OURS = Trainers.of(trl), Trainers.of(trl_ext)


def completions_cut_by_the_policy(trainer: Any) -> Any:
    """Scores while it generates; TRL's own pass of the old policy comes later."""

    class Cut(trainer):
        def _generate_single_turn(self, prompt_ids: Any, *others: Any) -> Any:
            cut = []
            for prompt, completion in zip(prompt_ids, super()._generate_single_turn(prompt_ids, *others), strict=True):
                ids = torch.tensor([[*prompt, *completion]])
                with torch.no_grad():
                    found = self._get_per_token_logps_and_entropies(
                        self.model, ids, torch.ones_like(ids), len(completion)
                    )
                cut.append(completion[: max(1, int((found[0] > -4.5).sum()))])
            return cut

    return Cut


def entropies_of_other_rows(trainer: Any) -> Any:
    class Others(trainer):
        def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
            loss = super()._compute_loss(model, inputs)
            ids, attended = (
                torch.cat([inputs[f"prompt_{name}"], inputs[f"completion_{name}"]], dim=1).roll(1, 0)
                for name in ("ids", "mask")
            )
            columns = inputs["completion_ids"].size(1)
            found = self._get_per_token_logps_and_entropies(model, ids, attended, columns, compute_entropy=True)
            return loss - 0.1 * (found[1] * inputs["completion_mask"].roll(1, 0)).mean()

    return Others


def log_probs_of_the_reference(trainer: Any) -> Any:
    class Reference(trainer):
        def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
            ids, attended = (
                torch.cat([inputs[f"prompt_{name}"], inputs[f"completion_{name}"]], dim=1) for name in ("ids", "mask")
            )
            columns = inputs["completion_ids"].size(1)
            with torch.no_grad():
                found = self._get_per_token_logps_and_entropies(self.ref_model, ids, attended, columns)
            inputs = {**inputs, "advantages": inputs["advantages"] + found[0].mean(dim=1)}
            return super()._compute_loss(model, inputs)

    return Reference


def old_log_probs_read_after_the_loss(trainer: Any) -> Any:
    class Reads(trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            return loss * (1 - inputs["old_logps"].mean().detach() / 100)

    return Reads


def old_log_probs_read_before_the_loss(trainer: Any) -> Any:
    class Reads(trainer):
        def _prepare_inputs(self, inputs: Any) -> Any:
            batch = super()._prepare_inputs(inputs)
            return {**batch, "advantages": batch["advantages"] * (1 - batch["old_logps"].mean() / 100)}

    return Reads


def kl_rows_of_mean_log_probs(trainer: Any) -> Any:
    class Mean(trainer):
        def _compute_kl_logps(self, model: Any, batch: Any) -> torch.Tensor:
            return super()._compute_kl_logps(model, batch) / batch["KL_completion_mask"].sum(dim=1)

    return Mean


def kl_rows_of_another_number(trainer: Any) -> Any:
    class More(trainer):
        def _compute_kl_logps(self, model: Any, batch: Any) -> torch.Tensor:
            return super()._compute_kl_logps(model, {name: torch.cat([x[:1], x]) for name, x in batch.items()})

    return More


def kl_rows_that_count_calls(trainer: Any) -> Any:
    """TRL calls it for the policy, then for the reference."""

    class Counts(trainer):
        calls = 0

        def _compute_kl_logps(self, model: Any, batch: Any) -> torch.Tensor:
            self.calls += 1
            return super()._compute_kl_logps(model, batch) + self.calls % 3

    return Counts


def a_reference_scored_in_the_loss(trainer: Any) -> Any:
    """The reference model must not be freed after the first epoch."""

    class Scores(trainer):
        def _compute_loss(self, model: Any, inputs: Any, return_outputs: bool) -> Any:
            loss = super()._compute_loss(model, inputs, return_outputs)
            return loss * (1 - self.compute_ref_log_probs(self.ref_model, inputs)[0].mean() / 100)

    return Scores


def a_loss_that_runs_the_policy_itself(trainer: Any) -> Any:
    """Also in evaluation. It calls nothing of TRL's loss."""

    class Runs(trainer):
        def _compute_loss(self, model: Any, inputs: Any, return_outputs: bool) -> Any:
            outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
            loss = outputs.logits.pow(2).mean()
            return (loss, outputs) if return_outputs else loss

    return Runs


@pytest.mark.parametrize(
    ("subclass", "name", "changes"),
    [
        (completions_cut_by_the_policy, "rloo-without-kl-full", {}),
        (entropies_of_other_rows, "rloo-without-kl-full", {}),
        (log_probs_of_the_reference, "rloo-defaults-full", {}),
        (old_log_probs_read_after_the_loss, "rloo-without-kl-full", {}),
        (old_log_probs_read_before_the_loss, "rloo-without-kl-full", {}),
        (kl_rows_of_mean_log_probs, "kto-kto-full", {"beta": 1.0}),
        (kl_rows_of_mean_log_probs, "kto-kto-ref_model", {"beta": 1.0}),
        (kl_rows_of_mean_log_probs, "kto-precompute", {}),
        (kl_rows_of_another_number, "kto-kto-full", {"beta": 1.0}),
        (kl_rows_that_count_calls, "kto-kto-full", {"beta": 1.0}),
        (kl_rows_that_count_calls, "kto-kto-lora", {"beta": 1.0}),
        (a_reference_scored_in_the_loss, "kto-epochs", {}),
        (a_loss_that_runs_the_policy_itself, "kto-evaluation", {}),
        (a_loss_that_runs_the_policy_itself, "kto-precompute", {}),
        (a_loss_that_runs_the_policy_itself, "dpo-precompute-batch-eval", {}),
        (a_loss_that_runs_the_policy_itself, "dpo-accumulation", {}),
    ],
    ids=lambda x: getattr(x, "__name__", None) or (x if isinstance(x, str) else "+".join(x) or "as_is"),
)
def test_a_subclass_trains_as_in_trl(
    subclass: Callable[[Any], Any], name: str, changes: dict[str, Any], workshop: Workshop
) -> None:
    case = replace(ALL_CASES[name], config={**ALL_CASES[name].config, **changes}, steps=max(3, ALL_CASES[name].steps))
    attribute = f"{case.trainer}_trainer"

    def named(trainers: Trainers) -> Trainers:
        made = subclass(getattr(trainers, attribute))
        made.__name__ = getattr(trainers, attribute).__name__
        return replace(trainers, **{attribute: made})

    ours, stock = (train(case, named(trainers), workshop) for trainers in (OURS, STOCK))
    assert_same(case, ours, stock)


@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_precomputed_log_probs_follow_the_mask_that_a_collator_changes(kind: str, workshop: Workshop) -> None:
    """The sums that TRL has precomputed keep the tokens that the loss no longer has."""

    def mask_last_tokens(trainer: Any) -> None:
        collate = trainer.data_collator

        def masked(examples: Any) -> Any:
            batch = collate(examples)
            last = batch["completion_mask"].cumsum(dim=1) == batch["completion_mask"].sum(dim=1, keepdim=True)
            return {**batch, "completion_mask": batch["completion_mask"] * ~last}

        trainer.data_collator = masked

    case = Case("masked", kind, "lora", steps=3, learning_rate=0.05, ours={})
    precomputed = replace(case, config={"precompute_ref_log_probs": True})
    # A subclass that records batches would read TRL's sums
    ours = train(precomputed, replace(OURS, records_batches=False), workshop, prepare=mask_last_tokens)
    stock, stock_precomputed = (train(x, STOCK, workshop, prepare=mask_last_tokens) for x in (case, precomputed))
    assert not tensors_differ("weight update", ours.updates, stock.updates)
    assert tensors_differ("weight update", stock_precomputed.updates, stock.updates)
    for got, want in zip(ours.logs[:3], stock.logs[:3], strict=True):
        assert got["rewards/chosen"] == pytest.approx(want["rewards/chosen"], abs=1e-5)


def test_a_reference_of_code_below_ours_is_the_model(workshop: Workshop) -> None:
    """Code between ours and TRL's may do with `self.ref_model` what it does in TRL."""

    class Between(trl.DPOTrainer):
        def _compute_loss(self, model: Any, inputs: Any, return_outputs: bool) -> Any:
            assert not self.ref_model.eval().training
            with torch.no_grad():
                logits = self.ref_model(inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
            loss = super()._compute_loss(model, inputs, return_outputs)
            return loss * (1 + logits.pow(2).mean())

    ours = replace(OURS, dpo_trainer=type("OfUser", (trl_ext.DPOTrainer, Between), {}))
    case = Case("below", "dpo", "ref_model", steps=3, learning_rate=0.05, ours={})
    assert_same(case, train(case, ours, workshop), train(case, replace(STOCK, dpo_trainer=Between), workshop))


@pytest.mark.parametrize("kind", ["dpo", "kto"])
@pytest.mark.parametrize("passes", ["half of the rows", "fewer columns", "nothing", "embeddings"])
def test_a_loss_of_other_shapes_that_is_not_finite_stops_training(kind: str, passes: str, workshop: Workshop) -> None:
    class Infinite(getattr(trl_ext, f"{kind.upper()}Trainer")):  # type: ignore[misc]
        def _compute_loss(self, model: Any, inputs: Any, return_outputs: bool) -> Any:
            if passes == "nothing":
                return model(inputs["input_ids"]).logits.mean() * torch.inf
            if passes == "embeddings":
                embeddings = self.model.get_input_embeddings()(inputs["input_ids"])
                outputs = model(inputs_embeds=embeddings, labels=inputs["input_ids"], fused_lm_head=True)
                return outputs.log_probs.mean() * torch.inf
            part = {name: x[::2] for name, x in inputs.items()}
            if passes == "fewer columns":
                part = {name: x[:, :-1] if x.dim() > 1 else x for name, x in inputs.items()}
            return super()._compute_loss(model, part, return_outputs) * torch.inf

    config = {"per_device_train_batch_size": 4, **({"loss_type": "apo_zero_unpaired"} if kind == "kto" else {})}
    case = Case("infinite", kind, "lora", config=config, ours={"on_non_finite_loss": "stop"})
    ours = replace(OURS, records_batches=False, **{f"{kind}_trainer": Infinite})
    with pytest.raises(FloatingPointError, match=r"not finite in step 1. Rank 0: .*the loss is "):
        train(case, ours, workshop)


@pytest.mark.parametrize("action", ["stop", "skip"])
def test_a_loss_of_a_user_that_is_not_finite_is_noticed_in_sft(action: str, workshop: Workshop) -> None:
    def infinite(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        return outputs.logits.mean() * torch.inf

    def set_loss(trainer: Any) -> None:
        trainer.compute_loss_func = infinite

    case = Case("infinite", "sft", ours={"on_non_finite_loss": action})
    expected = pytest.raises(FloatingPointError, match="not finite in step 1") if action == "stop" else nullcontext()
    with expected:
        ours = train(case, replace(OURS, records_batches=False), workshop, prepare=set_loss)
    if action == "skip":
        assert not any(update.any() for update in ours.updates.values())


def test_a_reference_of_code_below_ours_gets_other_inputs(workshop: Workshop) -> None:
    class Between(trl.DPOTrainer):
        def _compute_loss(self, model: Any, inputs: Any, return_outputs: bool) -> Any:
            ids, mask = inputs["input_ids"], inputs["attention_mask"]
            labels = ids.masked_fill(inputs["completion_mask"] == 0, -100)
            positions = torch.arange(3, 3 + ids.shape[1]).expand_as(ids) ** 2
            with torch.no_grad():
                scores = self.ref_model(
                    input_ids=ids, attention_mask=mask, labels=labels, position_ids=positions, fused_lm_head=True
                )
            loss = super()._compute_loss(model, inputs, return_outputs)
            return loss + scores.log_probs.mean()

    ours = replace(OURS, dpo_trainer=type("OfUser", (trl_ext.DPOTrainer, Between), {}))
    case = Case("below", "dpo", "ref_model", steps=2, learning_rate=0.05, ours={})
    assert_same(case, train(case, ours, workshop), train(case, replace(STOCK, dpo_trainer=Between), workshop))


@pytest.mark.parametrize("loss", [{"loss_type": "cdpo"}, {"loss_type": "sft", "sft_label_smoothing": 0.1}])
def test_a_term_that_an_override_below_ours_would_not_reach_is_an_error(
    loss: dict[str, Any], workshop: Workshop
) -> None:
    class Between(trl.DPOTrainer):
        def _compute_loss(self, model: Any, inputs: Any, return_outputs: bool) -> Any:
            return 0.5 * super()._compute_loss(model, inputs, return_outputs)

    ours = replace(OURS, dpo_trainer=type("OfUser", (trl_ext.DPOTrainer, Between), {}))
    case = Case("below", "dpo", config={"loss_type": loss["loss_type"]}, ours=loss)
    with pytest.raises(ValueError, match="in a class between trl_ext's `DPOTrainer` and TRL's would not get that term"):
        train(case, ours, workshop)
