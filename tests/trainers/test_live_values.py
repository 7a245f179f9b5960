"""Values that TRL reads at each use may change: between two trainings, and during one by a callback."""

import functools
import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import trl
from transformers import TrainerCallback

import trl_ext
from drop_in_cases import Case
from run_losses import Record, Trainers, build
from tiny import Workshop
from training_comparison import tensors_differ

STOCK, OURS = Trainers.of(trl), Trainers.of(trl_ext)
HALF_DEAD = {"rewards": ("half_dead",)}
OFF_POLICY = {"num_iterations": 2}


class Change(TrainerCallback):
    """Changes a trainer after its step `after`, at an event."""

    def __init__(self, trainer: Any, change: Callable[[Any], None], after: int, event: str) -> None:
        self.trainer, self.change, self.after = trainer, change, after
        setattr(self, event, self.at_event)

    def at_event(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.after:
            self.change(self.trainer)


def to(**values: Any) -> Callable[[Any], None]:
    """Return a change that sets attributes of the trainer."""

    def change(trainer: Any) -> None:
        for name, value in values.items():
            setattr(trainer, name, value)

    return change


def with_arguments(**values: Any) -> Callable[[Any], None]:
    return lambda trainer: to(**values)(trainer.args)


def noisy(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output + 0.1 * torch.randn_like(output) if module.training else output


def with_hook(trainer: Any) -> None:
    trainer.model.get_input_embeddings().register_forward_hook(noisy)


def with_frozen_layer(trainer: Any) -> None:
    first = next(module for name, module in trainer.model.named_modules() if name.endswith("layers.0"))
    first.requires_grad_(False)


def with_hook_of_reference(trainer: Any) -> None:
    """Draw in evaluation mode, too."""
    trainer.ref_model.get_input_embeddings().register_forward_hook(lambda *x: x[-1] + 0.1 * torch.randn_like(x[-1]))


def with_policy_as_reference(trainer: Any) -> None:
    trainer.ref_model.load_state_dict(trainer.model.state_dict())


def grpo(**fields: Any) -> Case:
    fields = {"steps": 4, "learning_rate": 0.01, "setup": "full", **fields}
    config = {name: fields.pop(name) for name in list(fields) if name not in Case.__dataclass_fields__}
    return Case("live", fields.pop("trainer", "grpo"), config=config, **fields)


rloo = functools.partial(grpo, trainer="rloo", beta=0.0)
dpo = functools.partial(grpo, trainer="dpo")
kto = functools.partial(grpo, trainer="kto")
sft = functools.partial(grpo, trainer="sft")
ACCUMULATES = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}

# Name -> case, change, after which step
CHANGES: dict[str, tuple[Case, Callable[[Any], None], int]] = {
    "grpo-loss_type": (grpo(**HALF_DEAD, **ACCUMULATES), to(loss_type="bnpo"), 2),
    "grpo-loss_type-off-policy": (grpo(**HALF_DEAD, **OFF_POLICY, loss_type="grpo"), to(loss_type="cispo"), 1),
    "grpo-quantile": (grpo(**HALF_DEAD), to(top_entropy_quantile=0.5), 2),
    "grpo-quantile-in-cycle": (grpo(**HALF_DEAD, **OFF_POLICY), to(top_entropy_quantile=0.5), 1),
    "grpo-quantile-off": (grpo(**HALF_DEAD, **OFF_POLICY, top_entropy_quantile=0.5), to(top_entropy_quantile=1.0), 1),
    "grpo-more-iterations": (grpo(**HALF_DEAD), to(num_iterations=2), 2),
    "grpo-more-iterations-in-cycle": (grpo(**HALF_DEAD), to(num_iterations=2), 1),
    "grpo-fewer-iterations": (grpo(**HALF_DEAD, **OFF_POLICY), to(num_iterations=1), 2),
    "grpo-fewer-iterations-in-cycle": (grpo(**HALF_DEAD, **OFF_POLICY), to(num_iterations=1), 1),
    "grpo-kl": (grpo(setup="lora", **HALF_DEAD), to(beta=0.1), 2),
    "grpo-less-kl": (grpo(setup="lora", beta=0.2, **HALF_DEAD), to(beta=0.1), 2),
    "grpo-no-kl": (grpo(setup="lora", beta=0.1, **HALF_DEAD), to(beta=0.0), 2),
    "grpo-no-kl-in-cycle": (grpo(setup="lora", beta=0.1, **OFF_POLICY, **HALF_DEAD), to(beta=0.0), 1),
    "grpo-level": (grpo(**OFF_POLICY), to(importance_sampling_level="sequence"), 1),
    "grpo-scale": (grpo(**OFF_POLICY), to(scale_rewards="none"), 2),
    "grpo-clip": (grpo(**OFF_POLICY, learning_rate=0.1), to(epsilon_low=0.01, epsilon_high=0.02), 1),
    "grpo-reward-weights": (grpo(rewards=("id", "half_dead")), to(reward_weights=torch.tensor([0.5, 2.0])), 2),
    "grpo-hook": (grpo(**HALF_DEAD), with_hook, 2),
    "rloo-more-iterations": (rloo(**HALF_DEAD), to(num_iterations=2), 2),
    "rloo-more-iterations-in-cycle": (rloo(**HALF_DEAD, learning_rate=0.1), to(num_iterations=2), 1),
    "rloo-fewer-iterations": (rloo(**HALF_DEAD, **OFF_POLICY), to(num_iterations=1), 2),
    "rloo-kl": (rloo(setup="lora", **HALF_DEAD), to(beta=0.1), 2),
    "rloo-no-kl": (grpo(trainer="rloo", setup="lora", beta=0.1, **HALF_DEAD), to(beta=0.0), 2),
    "rloo-hook": (rloo(**HALF_DEAD), with_hook, 2),
    "dpo-losses": (dpo(setup="lora"), to(loss_types=["hinge", "sft"], loss_weights=[1.0, 0.5]), 2),
    "dpo-to-pairs": (dpo(setup="ref_model", loss_type=["sft"]), to(loss_types=["sigmoid"]), 2),
    "dpo-beta": (dpo(setup="ref_model"), to(beta=0.5, f_divergence_type="forward_kl"), 2),
    "dpo-hook": (dpo(setup="lora"), with_hook, 2),
    "dpo-frozen": (dpo(setup="full"), with_frozen_layer, 2),
    "dpo-reference-hook": (dpo(setup="ref_model"), with_hook_of_reference, 2),
    "dpo-reference-weights": (dpo(setup="ref_model", steps=6), with_policy_as_reference, 3),
    "kto-reference-weights": (kto(setup="ref_model", steps=6), with_policy_as_reference, 3),
    "kto-loss": (kto(setup="ref_model"), to(loss_type="apo_zero_unpaired", beta=0.3), 2),
    "kto-hook": (kto(setup="lora"), with_hook, 2),
    "sft-loss": (sft(), to(loss_type="dft"), 2),
    "sft-hook": (sft(), with_hook, 2),
}
FAST = {
    *("grpo-loss_type", "grpo-quantile-in-cycle", "grpo-more-iterations-in-cycle", "grpo-kl", "grpo-hook"),
    *("rloo-more-iterations-in-cycle", "rloo-kl", "dpo-losses", "dpo-hook", "kto-loss", "sft-hook"),
    *("dpo-reference-hook", "kto-reference-weights"),
}


def trained(
    case: Case,
    trainers: Trainers,
    workshop: Workshop,
    change: Callable[[Any], None],
    after: int,
    event: str,
) -> Record:
    record = Record()
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(case, trainers, workshop, folder, record)
        if event == "before":
            change(trainer)
        else:
            trainer.add_callback(Change(trainer, change, after, event))
        trainer.train()
        if event == "between":
            change(trainer)
            trainer.train()
    return record


def differences(ours: Record, stock: Record) -> list[str]:
    names = ("loss", "rewards/margins", "kl", "clip_ratio/region_mean")
    found = [
        f"step {step}: {name} is {mine[name]}, in TRL {log[name]}"
        for step, (mine, log) in enumerate(zip(ours.logs, stock.logs, strict=True), 1)
        for name in names
        if name in mine and name in log and not abs(mine[name] - log[name]) <= 1e-4 * max(1.0, abs(log[name]))
    ]
    return [*found, *tensors_differ("weight update", ours.updates, stock.updates)]


def assert_follows(name: str, event: str, workshop: Workshop) -> None:
    case, change, after = CHANGES[name]
    if case.trainer in ("grpo", "rloo"):
        case = replace(case, ours={"keep_groups_together": False, "zero_advantages_of_equal_rewards": False})
    ours, stock = (trained(case, trainers, workshop, change, after, event) for trainers in (OURS, STOCK))
    assert any(abs(loss) > 0 for loss in stock.losses)
    assert not differences(ours, stock)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in CHANGES]
)
def test_a_callback_may_change_what_trl_reads_at_each_step(name: str, workshop: Workshop) -> None:
    assert_follows(name, "on_step_end", workshop)


@pytest.mark.parametrize(
    ("name", "event"),
    [
        ("grpo-loss_type", "on_step_begin"),
        ("grpo-loss_type-off-policy", "before"),
        ("rloo-hook", "before"),
        ("grpo-kl", "before"),
        *(pytest.param(name, "on_step_begin", marks=pytest.mark.slow) for name in ("rloo-kl", "dpo-hook", "sft-hook")),
        *(pytest.param(name, "before", marks=pytest.mark.slow) for name in ("dpo-losses", "kto-hook", "rloo-kl")),
        *(pytest.param(name, "between", marks=pytest.mark.slow) for name in ("grpo-quantile", "dpo-losses", "rloo-kl")),
    ],
)
def test_a_change_is_seen_whenever_it_is_made(name: str, event: str, workshop: Workshop) -> None:
    assert_follows(name, event, workshop)


def test_a_change_within_an_optimizer_step_holds_from_the_next_micro_batch(workshop: Workshop) -> None:
    case = grpo(**HALF_DEAD, **ACCUMULATES, steps=2, ours={"keep_groups_together": False})
    ours, stock = (
        trained(case, trainers, workshop, to(top_entropy_quantile=0.5), 1, "on_substep_end")
        for trainers in (OURS, STOCK)
    )
    assert not differences(ours, stock)


def with_override(method: str, change: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return what makes a trainer's class one that overrides `method`, and changes the trainer in its third call."""

    def give(trainer: Any) -> None:
        parent: Any = type(trainer)
        calls: list[int] = []

        def override(self: Any, *positional: Any, **keywords: Any) -> Any:
            calls.append(len(calls))
            if method == "_prepare_inputs":  # our own may run before the change
                batch = super(Changing, self)._prepare_inputs(*positional, **keywords)
            if len(calls) == 3:
                change(self)
            return (
                batch
                if method == "_prepare_inputs"
                else getattr(super(Changing, self), method)(*positional, **keywords)
            )

        Changing = type(parent.__name__, (parent,), {method: override})
        trainer.__class__ = Changing

    return give


OVERRIDES = [
    ("grpo-quantile", "compute_loss"),
    ("grpo-quantile", "_prepare_inputs"),
    ("grpo-loss_type-off-policy", "compute_loss"),
    ("grpo-no-kl", "compute_loss"),
    ("grpo-reward-weights", "compute_loss"),
    ("rloo-kl", "compute_loss"),
    ("dpo-to-pairs", "compute_loss"),
    ("dpo-losses", "_prepare_inputs"),
    ("kto-loss", "compute_loss"),
    ("sft-loss", "compute_loss"),
]
FAST_OVERRIDES = {
    ("grpo-quantile", "compute_loss", 2),
    ("grpo-reward-weights", "compute_loss", 1),
    ("dpo-to-pairs", "compute_loss", 1),
}


@pytest.mark.parametrize(
    ("name", "method", "accumulation"),
    [
        pytest.param(*override, size, marks=() if (*override, size) in FAST_OVERRIDES else pytest.mark.slow)
        for override in OVERRIDES
        for size in (1, 2)
    ],
)
def test_an_override_may_change_what_the_loss_reads(
    name: str, method: str, accumulation: int, workshop: Workshop
) -> None:
    case, change, _ = CHANGES[name]
    config = {**case.config, "gradient_accumulation_steps": accumulation, "per_device_train_batch_size": 4}
    case = replace(case, config=config)
    if case.trainer in ("grpo", "rloo"):
        case = replace(case, ours={"keep_groups_together": False, "zero_advantages_of_equal_rewards": False})
    ours, stock = (
        trained(case, trainers, workshop, with_override(method, change), 0, "before") for trainers in (OURS, STOCK)
    )
    assert not differences(ours, stock)


def test_a_reward_function_may_change_what_the_loss_reads(workshop: Workshop, monkeypatch: Any) -> None:
    records = []
    for trainers in (OURS, STOCK):
        record = Record()
        with tempfile.TemporaryDirectory() as folder:
            case = grpo(**HALF_DEAD, steps=2, ours={"zero_advantages_of_equal_rewards": False})
            trainer = build(case, trainers, workshop, folder, record)
            function = trainer.reward_funcs[0]

            @functools.wraps(function)
            def changing(*positional: Any, trainer: Any = trainer, function: Any = function, **keywords: Any) -> Any:
                trainer.top_entropy_quantile = 0.5
                return function(*positional, **keywords)

            trainer.reward_funcs[0] = changing
            trainer.train()
        records.append(record)
    assert not differences(*records)


def test_the_plan_says_what_has_changed(workshop: Workshop, caplog: Any) -> None:
    caplog.set_level("INFO", logger="trl_ext")
    case = grpo(setup="lora", steps=3)
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(case, OURS, workshop, folder, Record())
        trainer.add_callback(Change(trainer, to(beta=0.1), 1, "on_step_end"))
        trainer.train()
        assert trainer.plan["reference"].action == "run"
    said = [record.getMessage() for record in caplog.records if "plan has changed" in record.getMessage()]
    assert len(said) == 1
    assert "`beta` changed from 0.0 to 0.1" in said[0]


def test_a_training_without_changes_keeps_its_plan(workshop: Workshop) -> None:
    """Also where the first batch finds that rows cannot be shared or packed."""
    for case in (grpo(**HALF_DEAD, **OFF_POLICY), rloo(), dpo(setup="lora"), kto(setup="ref_model"), sft()):
        plans = []
        with tempfile.TemporaryDirectory() as folder:
            trainer = build(replace(case, steps=3), OURS, workshop, folder, Record())
            trainer.add_callback(
                Change(trainer, lambda trainer, plans=plans: plans.append(trainer.plan), 1, "on_step_end")
            )
            trainer.train()
            assert trainer.plan is plans[0]


def test_a_change_that_needs_lost_log_probs_is_named(workshop: Workshop) -> None:
    """Micro-batches wait, and those that were trained on once did not keep the log-probs of a second time."""
    case = grpo(**ACCUMULATES, steps_per_generation=4, steps=6)
    with pytest.raises(RuntimeError, match="`num_iterations` changed from 1 to 2 during training"):
        trained(case, OURS, workshop, to(num_iterations=2), 1, "on_step_end")


def test_a_kl_term_without_a_reference_is_named(workshop: Workshop) -> None:
    with pytest.raises(ValueError, match=r"`beta` was changed to 0\.1 after the trainer was built with `beta=0`"):
        trained(grpo(), OURS, workshop, to(beta=0.1), 1, "on_step_end")
