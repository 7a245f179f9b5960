"""A user's subclass of our trainer trains as the same subclass of TRL's trainer, or raises an error with the reason."""

import re
from dataclasses import replace

import pytest
import torch
import trl

import trl_ext
from drop_in_cases import Case
from run_losses import Record, Trainers, build, train
from short_training import Bench
from tiny import ROLLOUTS, Workshop, near_sampler_rollout


def plain(trainer):
    return trainer


def with_other_rewards(trainer):
    class Rewards(trainer):
        def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
            bonus = torch.tensor([[sum(ids) % 7 / 7] for ids in completion_ids_list])
            return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list) + bonus

    return Rewards


def with_a_copied_batch(trainer):
    class Copy(trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            return super().compute_loss(model, {**inputs, "extra": torch.ones(1)}, *args, **kwargs)

    return Copy


def with_a_cloned_batch(trainer):
    class Clone(trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            inputs = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
            return super().compute_loss(model, inputs, *args, **kwargs)

    return Clone


def with_a_loss_without_ours(trainer):
    class Without(trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            return self._compute_loss(model, inputs)

    return Without


def with_a_loss_from_logits(trainer):
    class FromLogits(trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
            mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
            log_probs = model(input_ids=ids, attention_mask=mask).logits[:, :-1].log_softmax(-1)
            width = inputs["completion_ids"].size(1)
            log_probs = log_probs.gather(-1, ids[:, 1:, None])[:, -width:, 0] * inputs["completion_mask"]
            return -(log_probs * inputs["advantages"][:, None]).mean()

    return FromLogits


def with_log_probs_changed_at_generation(trainer):
    """Reads and changes the batch that TRL's generation has scored."""

    class Changed(trainer):
        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            if "old_per_token_logps" in batch:
                batch["old_per_token_logps"] = batch["old_per_token_logps"] * 0.9
            if "ref_per_token_logps" in batch:
                batch["advantages"] = batch["advantages"] + batch["ref_per_token_logps"].mean(1)
            return batch

    return Changed


def with_other_log_probs(trainer):
    class Halved(trainer):
        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            log_probs, entropies, aux_loss = super()._get_per_token_logps_and_entropies(*args, **kwargs)
            return log_probs * 0.5, entropies, aux_loss

    return Halved


def with_a_pass_of_its_own(trainer):
    class Own(trainer):
        def _get_per_token_logps_and_entropies(
            self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, compute_entropy=False, **kwargs
        ):
            labels = input_ids.masked_fill(attention_mask == 0, -100)
            labels[:, :-logits_to_keep] = -100
            outputs = model(input_ids=input_ids, attention_mask=attention_mask, labels=labels, fused_lm_head=True)
            entropies = outputs.entropy[:, -logits_to_keep:] if compute_entropy else None
            return outputs.log_probs[:, -logits_to_keep:] / 1.5, entropies, None

    return Own


def with_a_pass_that_asks_the_model(trainer):
    """Checks that TRL passes a model on, which has a config and a mode and can be unwrapped."""

    class Asks(trainer):
        def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
            inner = self.accelerator.unwrap_model(model)
            assert isinstance(inner, torch.nn.Module)
            assert model.config.vocab_size == inner.get_input_embeddings().num_embeddings
            log_probs, entropies, aux_loss = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
            return log_probs * (0.5 if model.training else 1.0), entropies, aux_loss

    return Asks


def with_logits_of_its_own(trainer):
    class Logits(trainer):
        def _get_per_token_logps_and_entropies(
            self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, compute_entropy=False, **kwargs
        ):
            logits = model(input_ids=input_ids, attention_mask=attention_mask).logits[:, -logits_to_keep - 1 : -1]
            log_probs = (logits / 1.5).log_softmax(-1)
            entropies = -(log_probs.exp() * log_probs).sum(-1) if compute_entropy else None
            return log_probs.gather(-1, input_ids[:, -logits_to_keep:, None])[..., 0], entropies, None

    return Logits


def with_a_second_pass(trainer):
    """Adds a term on the completions without their prompts to TRL's loss."""

    class Second(trainer):
        def _compute_loss(self, model, inputs):
            loss = super()._compute_loss(model, inputs)
            ids, mask = inputs["completion_ids"], inputs["completion_mask"]
            log_probs, _, _ = self._get_per_token_logps_and_entropies(model, ids, mask, ids.size(1) - 1)
            mask = mask[:, 1:]
            return loss - 0.1 * (log_probs * mask).sum() / mask.sum()

    return Second


def with_another_gradient(trainer):
    """Adds a term on the log-probs of TRL's loss that has a gradient for zero-advantage rows too."""

    class Gradient(trainer):
        def _compute_loss(self, model, inputs):
            loss = super()._compute_loss(model, inputs)
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
            mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
            width = inputs["completion_ids"].size(1)
            log_probs, _, _ = self._get_per_token_logps_and_entropies(model, ids, mask, width)
            return loss - 0.1 * log_probs.mean()

    return Gradient


def with_passes_of_its_rewards(trainer):
    """Computes rewards with its own pass of the policy."""

    class Scored(trainer):
        def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
            ids = torch.tensor([[5, 6, *completion[:1]] for completion in completion_ids_list])
            with torch.no_grad():
                scored, _, _ = self._get_per_token_logps_and_entropies(self.model, ids, torch.ones_like(ids), 1)
            return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list) + scored

    return Scored


def with_methods_put_on_the_trainer(trainer):
    class Patched(trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            loss, prepare, scored = self.compute_loss, self._prepare_inputs, self._get_per_token_logps_and_entropies

            def decayed(*args, **kwargs):
                return loss(*args, **kwargs) + 0.01 * sum((param**2).sum() for param in self.model.parameters())

            def doubled(inputs):
                prepared = dict(prepare(inputs))
                if self.model.training:
                    prepared["advantages"] = prepared["advantages"] * 2
                return prepared

            def halved(*args, **kwargs):
                log_probs, entropies, aux_loss = scored(*args, **kwargs)
                return log_probs * 0.5, entropies, aux_loss

            self.compute_loss, self._prepare_inputs = decayed, doubled
            self._get_per_token_logps_and_entropies = halved

    return Patched


def with_entropies_of_other_rows(base):
    """Overrides a method that TRL's loss calls, and runs the policy in it."""

    class WithEntropiesOfOtherRows(base):
        def _prepare_inputs(self, batch):
            self.seen = super()._prepare_inputs(batch)
            return self.seen

        def get_high_entropy_mask(self, entropies, mask, threshold):
            ids, attended = (
                torch.cat([self.seen[f"prompt_{name}"], self.seen[f"completion_{name}"]], dim=1).roll(1, 0)
                for name in ("ids", "mask")
            )
            with torch.no_grad():
                found = self._get_per_token_logps_and_entropies(
                    self.model, ids, attended, mask.size(1), compute_entropy=True
                )
            return super().get_high_entropy_mask(found[1], mask, threshold)

    return WithEntropiesOfOtherRows


def case(name, **config):
    chosen = config.pop("rewards", ("id",))
    rollout = config.pop("rollout", "scripted")
    return Case(f"grpo-{name}", "grpo", config=config, rewards=chosen, steps=4, learning_rate=0.01, rollout=rollout)


def updates(case, workshop, library, subclass):
    trainers = Trainers.of(library)
    if library is trl_ext and case.name == "grpo-dropout":  # stock's own random draws
        trainers = trainers.padded()
    trainers = replace(trainers, grpo_trainer=subclass(trainers.grpo_trainer))
    return torch.cat([update.flatten() for update in train(case, trainers, workshop).updates.values()])


ITERATIONS = {"num_iterations": 2}
HALF_DEAD = {"rewards": ("half_dead",)}
SUBCLASSES = [
    (with_other_rewards, HALF_DEAD),
    (with_other_log_probs, ITERATIONS),
    (with_a_pass_of_its_own, {**ITERATIONS, **HALF_DEAD}),
    (with_a_second_pass, HALF_DEAD),
    (with_another_gradient, HALF_DEAD),
    (with_passes_of_its_rewards, {}),
    (with_logits_of_its_own, {**ITERATIONS, **HALF_DEAD}),
    (with_a_cloned_batch, {**ITERATIONS, **HALF_DEAD}),
    (with_a_loss_without_ours, {**ITERATIONS, **HALF_DEAD, "beta": 0.1}),
    (with_log_probs_changed_at_generation, {**ITERATIONS, **HALF_DEAD}),
    (with_entropies_of_other_rows, {"top_entropy_quantile": 0.5}),
]
SLOW_SUBCLASSES = [
    (plain, ITERATIONS),
    (with_a_copied_batch, {**ITERATIONS, **HALF_DEAD}),
    (with_other_log_probs, {"beta": 0.1, "steps_per_generation": 2}),
    (with_another_gradient, {**ITERATIONS, "rollout": "masked"}),
    (with_a_pass_that_asks_the_model, {**ITERATIONS, **HALF_DEAD, "beta": 0.1}),
    (with_a_loss_without_ours, {"steps_per_generation": 2, "per_device_train_batch_size": 4, **HALF_DEAD}),
    (with_a_loss_from_logits, HALF_DEAD),
    (with_log_probs_changed_at_generation, {"beta": 0.1, "rollout": "masked"}),
]


@pytest.mark.parametrize(
    ("subclass", "config"),
    [*SUBCLASSES, *(pytest.param(*row, marks=pytest.mark.slow) for row in SLOW_SUBCLASSES)],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_a_subclass_trains_as_the_same_subclass_of_trls_trainer(workshop: Workshop, subclass, config):
    run = case("subclass", **config)
    ours, stock = (updates(run, workshop, library, subclass) for library in (trl_ext, trl))
    assert stock.norm() > 0
    assert (ours - stock).norm() <= 1e-4 * stock.norm()


def test_a_patched_loss_of_trl_may_run_other_passes(workshop: Workshop, monkeypatch):
    trls = trl.GRPOTrainer._compute_loss

    def patched(self, model, inputs):
        ids, attended = (
            torch.cat([inputs[f"prompt_{name}"], inputs[f"completion_{name}"]], dim=1).roll(1, 0)
            for name in ("ids", "mask")
        )
        columns = inputs["completion_ids"].size(1)
        of_others, *_ = self._get_per_token_logps_and_entropies(model, ids, attended, columns)
        return 0.1 * (of_others * inputs["completion_mask"]).mean() + trls(self, model, inputs)

    monkeypatch.setattr(trl.GRPOTrainer, "_compute_loss", patched)
    ours, stock = (updates(case("patched"), workshop, library, lambda base: base) for library in (trl_ext, trl))
    assert (ours - stock).norm() <= 1e-4 * stock.norm()


@pytest.mark.parametrize("budget", [None, 24])
def test_methods_set_on_the_trainer_stay_set(workshop: Workshop, budget):
    run = case("patched", num_iterations=2, beta=0.1)
    run = replace(run, ours={**run.ours, "max_tokens_per_micro_batch": budget})
    ours, stock = (updates(run, workshop, library, with_methods_put_on_the_trainer) for library in (trl_ext, trl))
    assert stock.norm() > 0
    assert (ours - stock).norm() <= 1e-4 * stock.norm()


def test_with_dropout_the_ratio_is_1_if_it_is_1_in_trl(workshop: Workshop):
    """With two iterations in one accumulation window TRL keeps no log-probs, so no ratio compares two dropout masks."""

    def dropping(trainer):
        class Dropping(trainer):
            def __init__(self, *args, **kwargs):
                super().__init__(*args, **kwargs)
                for module in self.model.modules():
                    if hasattr(module, "attention_dropout"):
                        module.attention_dropout = 0.3

        return Dropping

    run = case("dropout", **ITERATIONS, gradient_accumulation_steps=2, steps_per_generation=1)
    ours, stock = (updates(run, workshop, library, dropping) for library in (trl_ext, trl))
    assert (ours - stock).norm() <= 1e-4 * stock.norm()


def test_bounds_without_1_treat_padding_as_trl_does(workshop: Workshop):
    bounds = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 0.95}
    config = {"loss_type": "vespo", "max_completion_length": 4, "rollout": "sampler", **bounds}
    run = replace(case("vespo-low", **config), vllm=True)
    ours, stock = (updates(run, workshop, library, plain) for library in (trl_ext, trl))
    assert stock.norm() > 1e-4
    assert (ours - stock).norm() <= 1e-4 * stock.norm()


def near_sampler_with_tools(prompts, trainer):
    """Return completions with tool tokens, and log-probs of a sampler near the policy."""
    output = near_sampler_rollout(prompts, trainer)
    output["env_mask"] = [[int(i % 3 != 1) for i in range(len(ids))] for ids in output["completion_ids"]]
    return output


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_truncate"])
def test_a_subclasss_loss_gets_trls_ratio_and_metrics_with_tool_tokens(workshop: Workshop, monkeypatch, mode):
    def with_its_own_loss(trainer):
        class Own(trainer):
            def _compute_loss(self, model, inputs):
                return super()._compute_loss(model, inputs)

        return Own

    monkeypatch.setitem(ROLLOUTS, "near_sampler_with_tools", near_sampler_with_tools)
    config = {"vllm_importance_sampling_mode": mode, "mask_truncated_completions": True, **ITERATIONS}
    run = replace(case("own-loss", rollout="near_sampler_with_tools", **config), vllm=True)
    records = []
    for library in (trl_ext, trl):
        trainers = Trainers.of(library)
        trainers = replace(trainers, grpo_trainer=with_its_own_loss(trainers.grpo_trainer))
        records.append(train(run, trainers, workshop))
    ours, stock = records
    assert ours.losses == pytest.approx(stock.losses, rel=1e-4, abs=1e-6)
    entropies = [[log["entropy"] for log in record.logs if "entropy" in log] for record in records]
    assert entropies[0] == pytest.approx(entropies[1], rel=1e-5)


def plan_after(subclass, workshop, library, folder, case):
    """Train the trainer of `case`; return it and its plan."""
    trainers = Trainers.of(library)
    name = f"{case.trainer}_trainer"
    trainers = replace(trainers, **{name: subclass(getattr(trainers, name))})
    trainer = build(case, trainers, workshop, str(folder), Record())
    trainer.train()
    return trainer.explain()


BYPASSED = r"`(Without|FromLogits)\.compute_loss` does not call `super\(\)\.compute_loss\(\.\.\.\)`"


def test_the_plan_follows_a_compute_loss_that_does_not_call_ours(workshop: Workshop, tmp_path, caplog):
    run = case("without", **HALF_DEAD, **ITERATIONS)
    plan = plan_after(with_a_loss_without_ours, workshop, trl_ext, tmp_path, run)
    assert plan["policy"].reason.endswith(
        "too: this trainer overrides the loss, which may send a gradient through any of them."
    )
    assert plan["old policy"].action == "run"
    assert plan["head"].action == "run"  # TRL's own pass calls our forward
    assert [bool(re.search(BYPASSED, record.getMessage())) for record in caplog.records].count(True) == 1

    plan = plan_after(with_a_loss_from_logits, workshop, trl_ext, tmp_path, case("logits", **HALF_DEAD))
    assert {plan[name].action for name in ("head", "packing")} == {"skip"}
    assert "`FromLogits.compute_loss`" in plan["head"].reason


def test_the_plan_follows_a_pass_that_does_not_use_our_forward(workshop: Workshop, tmp_path, caplog):
    plan = plan_after(with_logits_of_its_own, workshop, trl_ext, tmp_path, case("logits"))
    assert {plan[name].action for name in ("head", "packing")} == {"skip"}
    assert "`Logits._get_per_token_logps_and_entropies`" in plan["head"].reason
    assert sum("The plan has changed" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize(
    ("ours", "config", "error", "message"),
    [
        ({"max_tokens_per_micro_batch": 24}, {}, ValueError, "max_tokens_per_micro_batch=24"),
        ({"keep_groups_together": True}, {"steps_per_generation": 2}, ValueError, "keep_groups_together=True"),
        ({"on_non_finite_loss": "stop"}, {}, ValueError, "on_non_finite_loss='stop'"),
        ({"trust_sampling_log_probs": True}, {"rollout": "sampler"}, ValueError, "trust_sampling_log_probs=True"),
    ],
)
def test_an_option_that_needs_our_compute_loss_is_an_error_without_it(workshop, tmp_path, ours, config, error, message):
    config = dict(config)
    run = replace(case("without", **{k: x for k, x in config.items() if k != "vllm"}), vllm="vllm" in config)
    with pytest.raises(error, match=message):
        plan_after(with_a_loss_without_ours, workshop, trl_ext, tmp_path, replace(run, ours=ours))


def test_the_sampler_ratio_of_changed_log_probs_is_trls(workshop: Workshop):
    run = replace(case("changed", rollout="near_sampler", **ITERATIONS), vllm=True)
    ours, stock = (updates(run, workshop, library, with_log_probs_changed_at_generation) for library in (trl_ext, trl))
    assert stock.norm() > 0
    assert (ours - stock).norm() <= 1e-4 * stock.norm()


def with_a_dpo_loss_from_logits(trainer):
    class FromLogits(trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
            log_probs = logits[:, :-1].log_softmax(-1).gather(-1, inputs["input_ids"][:, 1:, None])[..., 0]
            chosen, rejected = (log_probs * inputs["completion_mask"][:, 1:]).sum(1).chunk(2)
            return -torch.nn.functional.logsigmoid(0.1 * (chosen - rejected)).mean()

    return FromLogits


def test_a_dpo_loss_that_does_not_call_ours_trains_as_in_trl_and_the_plan_says_so(workshop: Workshop, tmp_path, caplog):
    run = Case("dpo-logits", "dpo", steps=3)
    records = []
    for library in (trl_ext, trl):
        trainers = Trainers.of(library)
        trainers = replace(trainers, dpo_trainer=with_a_dpo_loss_from_logits(trainers.dpo_trainer))
        records.append(train(run, trainers, workshop))
    ours, stock = (torch.cat([update.flatten() for update in record.updates.values()]) for record in records)
    assert (ours - stock).norm() <= 1e-6 * stock.norm()
    plan = plan_after(with_a_dpo_loss_from_logits, workshop, trl_ext, tmp_path, run)
    assert {plan[name].action for name in ("head", "packing")} == {"skip"}
    assert all("`FromLogits.compute_loss`" in plan[x].reason for x in ("policy", "reference", "head", "packing"))
    assert any(re.search(BYPASSED, record.getMessage()) for record in caplog.records)


def with_names_of_ours(trainer):
    """Defines methods with names that a user is likely to choose."""

    class Named(trainer):
        def flush(self):
            raise AssertionError("not called by the package")

        ranks = scorer = checkpoints = release = resumed = attach_model = flush

    return Named


@pytest.mark.parametrize("name", ["dpo", "grpo"])
def test_names_that_a_user_chooses_are_free(name: str, workshop: Workshop, tmp_path):
    bench = Bench(workshop, tmp_path)
    getattr(bench, name)(
        subclass=with_names_of_ours, **({"reference_store_dir": str(tmp_path)} if name == "dpo" else {})
    )
    if name == "dpo":
        assert list(tmp_path.rglob("*.safetensors"))


def test_a_class_between_ours_and_trls_is_called(workshop: Workshop, tmp_path):
    asked = []

    class OfUser(trl.DPOTrainer):
        def _compute_loss(self, *args, **kwargs):
            asked.append("loss")
            return super()._compute_loss(*args, **kwargs)

    class OfUserGRPO(trl.GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            asked.append("generation")
            return super()._generate_and_score_completions(inputs)

    bench = Bench(workshop, tmp_path)
    bench.dpo(subclass=lambda ours: type("Both", (ours, OfUser), {}))
    bench.grpo(subclass=lambda ours: type("Both", (ours, OfUserGRPO), {}))
    assert set(asked) == {"loss", "generation"}
