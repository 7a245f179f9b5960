"""Code of the user that reads or changes a batch gets TRL's: the same entries, with the same values, at the same time.

Each case runs over stock TRL's trainer and over ours, and compares losses, weight updates and what the code has read.
"""

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import pytest
import torch
import trl
from transformers import TrainerCallback

import trl_ext
from drop_in_cases import Case
from run_losses import Record, Trainers, build
from tiny import ROLLOUTS, Workshop, scripted_rollout

PASS = "_get_per_token_logps_and_entropies"
Readings = list[Any]

# Schedules of GRPO and RLOO; in the first, TRL scores no old policy
ALIGNED: dict[str, Any] = {
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 2,
    "per_device_train_batch_size": 4,
}
ITERATIONS = {"num_iterations": 2}
SLICES = {"steps_per_generation": 2, "per_device_train_batch_size": 4}
BOTH = {**ITERATIONS, **SLICES}
MISALIGNED = {"gradient_accumulation_steps": 3, **SLICES}


def case(trainer: str = "grpo", **config: Any) -> Case:
    rewards = config.pop("rewards", ("half_dead",))
    rollout = config.pop("rollout", "scripted")
    vllm = config.pop("vllm", False)
    steps = config.pop("steps", 4)
    model = config.pop("model", "tied")
    rate = config.pop("rate", 0.02)
    setup = config.pop("setup", "full")
    if trainer == "rloo":
        config = {"beta": 0.0, **config}
    return Case(
        "read",
        trainer,
        setup,
        model,
        config,
        rewards=rewards,
        steps=steps,
        learning_rate=rate,
        rollout=rollout,
        vllm=vllm,
    )


def summary_of(batch: dict[str, Any]) -> dict[str, Any]:
    """What a reader can see: the names, and for each tensor its shape and two numbers."""
    seen: dict[str, Any] = {}
    for name, value in batch.items():
        if isinstance(value, torch.Tensor):
            x = value.detach().double().flatten()
            weights = torch.linspace(1, 2, len(x), dtype=torch.float64)
            seen[name] = (tuple(value.shape), x.sum().item(), (x * weights).sum().item())
        elif value is None:
            seen[name] = None
    return seen


def assert_same_readings(ours: Any, stock: Any, where: str = "") -> None:
    assert type(ours) is type(stock), (where, ours, stock)
    if isinstance(stock, dict):
        assert ours.keys() == stock.keys(), (where, sorted(ours.keys() ^ stock.keys()))
        for name in stock:
            assert_same_readings(ours[name], stock[name], f"{where}.{name}")
    elif isinstance(stock, list | tuple):
        assert len(ours) == len(stock), (where, ours, stock)
        for i, (mine, theirs) in enumerate(zip(ours, stock, strict=True)):
            assert_same_readings(mine, theirs, f"{where}[{i}]")
    elif isinstance(stock, float):
        same = (math.isnan(ours) and math.isnan(stock)) or ours == pytest.approx(stock, rel=2e-5, abs=2e-4)
        assert same, (where, ours, stock)
    else:
        assert ours == stock, (where, ours, stock)


@dataclass
class Change:
    """Code of a user: a subclass, or a change of the trainer or of its classes. `seen` gets its readings."""

    seen: Readings

    def trainer_class(self, base: Any, trls: Any) -> Any:
        return base

    @contextmanager
    def patched(self, trls: Any) -> Iterator[None]:
        yield

    def built(self, trainer: Any) -> None:
        pass


def run(change: Callable[[Readings], Change], of: Case, workshop: Workshop, tmp_path: Any, library: Any) -> Any:
    """Train `of` with the change. Returns the record, the readings and the trainer."""
    seen: Readings = []
    record, trainers = Record(), Trainers.of(library)
    name, made = f"{of.trainer}_trainer", change(seen)
    trls = getattr(Trainers.of(trl), name)
    with made.patched(trls):
        trainers = replace(trainers, **{name: made.trainer_class(getattr(trainers, name), trls)})
        trainer = build(of, trainers, workshop, str(tmp_path / library.__name__), record)
        made.built(trainer)
        trainer.train()
    return record, seen, trainer


def assert_as_trl(change: Callable[[Readings], Change], of: Case, workshop: Workshop, tmp_path: Any) -> Any:
    stock, stock_seen, _ = run(change, of, workshop, tmp_path, trl)
    ours, seen, trainer = run(change, of, workshop, tmp_path, trl_ext)
    updates = [torch.cat([x.flatten() for x in record.updates.values()]) for record in (ours, stock)]
    assert updates[1].norm() > 0
    assert ours.losses == pytest.approx(stock.losses, rel=1e-4, abs=1e-5 * max(stock.advantage, 0.1))
    assert (updates[0] - updates[1]).norm() <= 1e-5 * updates[1].norm()
    assert_same_readings(seen, stock_seen)
    return trainer


def subclass(make: Callable[[Any, Readings], Any]) -> Callable[[Readings], Change]:
    """A user's class over the trainer."""

    class Subclass(Change):
        def trainer_class(self, base: Any, trls: Any) -> Any:
            return make(base, self.seen)

    Subclass.__name__ = f"Subclass-{make.__name__}"
    return Subclass


def between(make: Callable[[Any, Readings], Any]) -> Callable[[Readings], Change]:
    """The same class over TRL's trainer, below ours."""

    class Between(Change):
        def trainer_class(self, base: Any, trls: Any) -> Any:
            middle = make(trls, self.seen)
            return middle if base is trls else type("Mine", (base, middle), {})

    Between.__name__ = f"Between-{make.__name__}"
    return Between


def in_place_of_trls(make: Callable[[Any, Readings], Any]) -> Callable[[Readings], Change]:
    """The methods of that class put into TRL's class."""

    class InPlace(Change):
        @contextmanager
        def patched(self, trls: Any) -> Iterator[None]:
            # A class like TRL's, over which the methods find the original with `super()`
            original = type(trls.__name__, trls.__mro__[1:2], dict(vars(trls)))
            made = {name: x for name, x in vars(make(original, self.seen)).items() if callable(x)}
            before = {name: vars(trls)[name] for name in made}
            for name, method in made.items():
                setattr(trls, name, _rebound(method, before[name]))
            try:
                yield
            finally:
                for name, method in before.items():
                    setattr(trls, name, method)

    InPlace.__name__ = f"InPlace-{make.__name__}"
    return InPlace


def _rebound(method: Any, original: Any) -> Any:
    """Return `method` as a function that calls `original` in place of `super()`'s."""

    @functools.wraps(original)
    def patched(self: Any, *args: Any, **kwargs: Any) -> Any:
        class Instead:
            def __getattr__(self, _: str) -> Any:
                return lambda *a, **k: original(this, *a, **k)

        this = self
        return method.body(self, Instead(), *args, **kwargs)

    return patched


def method(name: str) -> Callable[[Any], Any]:
    """Turn `body(self, original, *args)` into a maker of a class with this method, whose `original` is `super()`."""

    def decorated(body: Any) -> Callable[[Any, Readings], Any]:
        def make(base: Any, seen: Readings) -> Any:
            def overridden(self: Any, *args: Any, **kwargs: Any) -> Any:
                return body(self, super(made, self), seen, *args, **kwargs)

            overridden.body = lambda self, original, *a, **k: body(self, original, seen, *a, **k)
            made = type("Changed", (base,), {name: overridden})
            return made

        make.__name__ = body.__name__
        return make

    return decorated


@method("compute_loss")
def loss_with_old_log_probs_after(self, original, seen, model, inputs, *args, **kwargs):
    loss = original.compute_loss(model, inputs, *args, **kwargs)
    seen.append(summary_of(inputs))
    for name in ("old_per_token_logps", "old_logps"):
        if name in inputs:
            loss = loss * (1 - inputs[name].mean() / 20)
    return loss


@method("compute_loss")
def loss_with_old_log_probs_before(self, original, seen, model, inputs, *args, **kwargs):
    seen.append(summary_of(inputs))
    old = inputs.get("old_per_token_logps")
    weight = 1.0 if old is None else 1 - old.mean().item() / 20
    return weight * original.compute_loss(model, inputs, *args, **kwargs)


@method("compute_loss")
def shifted_advantages(self, original, seen, model, inputs, *args, **kwargs):
    inputs = {**inputs, "advantages": inputs["advantages"] + 0.1 * (1 + self.state.global_step)}
    return original.compute_loss(model, inputs, *args, **kwargs)


@method("compute_loss")
def without_old_log_probs(self, original, seen, model, inputs, *args, **kwargs):
    inputs = {name: x for name, x in inputs.items() if name != "old_per_token_logps"}
    return original.compute_loss(model, inputs, *args, **kwargs)


@method("compute_loss")
def old_log_probs_removed_in_place(self, original, seen, model, inputs, *args, **kwargs):
    inputs.pop("old_per_token_logps", None)
    return original.compute_loss(model, inputs, *args, **kwargs)


@method("compute_loss")
def in_halves(self, original, seen, model, inputs, *args, **kwargs):
    rows = len(inputs["advantages"])
    halves = (slice(0, rows // 2), slice(rows // 2, rows))
    parts = [{name: x[half] if getattr(x, "ndim", 0) else x for name, x in inputs.items()} for half in halves]
    return sum(original.compute_loss(model, part, *args, **kwargs) for part in parts) / 2


@method("compute_loss")
def batch_seen_before_and_after(self, original, seen, model, inputs, *args, **kwargs):
    seen.append(summary_of(inputs))
    loss = original.compute_loss(model, inputs, *args, **kwargs)
    seen.append(summary_of(inputs))
    return loss


@method("_prepare_inputs")
def rows_of_the_last_batch(self, original, seen, generation_batch):
    batch = original._prepare_inputs(generation_batch)
    if not self.model.training:
        return batch
    seen.append(summary_of(batch))
    last, self.last = getattr(self, "last", batch), batch
    if any(len(last[name][0]) != len(x[0]) for name, x in batch.items() if getattr(x, "ndim", 0) == 2):
        return batch
    half = len(batch["advantages"]) // 2
    return {name: torch.cat([x[:half], last[name][half:]]) if getattr(x, "ndim", 0) else x for name, x in batch.items()}


@method("_prepare_inputs")
def repeated_rows(self, original, seen, generation_batch):
    batch = original._prepare_inputs(generation_batch)
    rows = batch["advantages"].abs().topk(len(batch["advantages"]) // 2).indices.repeat(2)
    return {name: x[rows] if getattr(x, "ndim", 0) else x for name, x in batch.items()}


@method("training_step")
def buffer_read_after_the_step(self, original, seen, *args, **kwargs):
    loss = original.training_step(*args, **kwargs)
    seen.append([summary_of(x) for x in self._buffered_inputs])
    return loss


@method("log")
def buffer_read_in_the_log(self, original, seen, logs, *args, **kwargs):
    if self._buffered_inputs is not None:
        seen.append([summary_of(x) for x in self._buffered_inputs])
    return original.log(logs, *args, **kwargs)


@method("_compute_loss")
def stale_if_there_are_old_log_probs(self, original, seen, model, inputs):
    seen.append(summary_of(inputs))
    loss = original._compute_loss(model, inputs)
    return loss * (0.5 if inputs.get("old_per_token_logps") is not None else 1.0)


@method("_compute_loss")
def loss_of_other_rows_too(self, original, seen, model, inputs):
    other = {name: x.roll(1, 0)[:3] if getattr(x, "ndim", 0) else x for name, x in inputs.items()}
    other["advantages"] = other["advantages"] + 0.3
    return original._compute_loss(model, inputs) + 0.5 * original._compute_loss(model, other)


@method("_compute_loss")
def other_rows_first(self, original, seen, model, inputs):
    other = {name: x.flip(0) if getattr(x, "ndim", 0) else x for name, x in inputs.items()}
    first = original._compute_loss(model, {**other, "advantages": other["advantages"] - 0.2})
    return first + original._compute_loss(model, inputs)


@method("_compute_loss")
def without_the_first_prompt_token(self, original, seen, model, inputs):
    mask = inputs["prompt_mask"].clone()
    longer = mask.sum(1) > 1
    first = mask.argmax(1)
    mask[longer, first[longer]] = 0
    return original._compute_loss(model, {**inputs, "prompt_mask": mask})


@method("_compute_loss")
def without_the_last_token(self, original, seen, model, inputs, return_outputs):
    """Masks the last token of each completion, for the policy and for the reference."""
    mask = inputs["completion_mask"].clone()
    last = mask.size(1) - 1 - mask.flip(1).argmax(1)
    mask[torch.arange(len(mask)), last] = 0
    return original._compute_loss(model, {**inputs, "completion_mask": mask}, return_outputs)


@method("_compute_loss")
def a_pass_without_gradient(self, original, seen, model, inputs):
    ids, mask = (torch.cat([inputs[f"prompt_{x}"], inputs[f"completion_{x}"]], dim=1) for x in ("ids", "mask"))
    with torch.no_grad():
        found = getattr(self, PASS)(model, ids, mask, inputs["completion_ids"].size(1))
    seen.append([summary_of({"log_probs": found[0]}), found[1] is None, found[0].requires_grad])
    return original._compute_loss(model, inputs) + 0.1 * found[0].mean()


@method("_generate_and_score_completions")
def advantages_after_generation(self, original, seen, inputs):
    batch = original._generate_and_score_completions(inputs)
    seen.append(summary_of(batch))
    # Exactly 0 for equal rewards also where TRL gives rounding noise
    batch["advantages"] = batch["advantages"] + 0.1 * batch["completion_mask"].sum(1) / 8
    return batch


@method("_generate_and_score_completions")
def log_probs_after_generation(self, original, seen, inputs):
    batch = original._generate_and_score_completions(inputs)
    for name in ("old_per_token_logps", "old_logps", "ref_per_token_logps"):
        if name in batch:
            batch["advantages"] = batch["advantages"] + batch[name].reshape(len(batch[name]), -1).mean(1) / 10
    if "old_per_token_logps" in batch:
        batch["old_per_token_logps"] = batch["old_per_token_logps"] * 0.95
    return batch


@method("_generate_and_score_completions")
def no_old_log_probs_after_generation(self, original, seen, inputs):
    batch = original._generate_and_score_completions(inputs)
    batch.pop("old_per_token_logps", None)
    return batch


@method(PASS)
def centred_log_probs(self, original, seen, model, *args, **kwargs):
    assert model.config.vocab_size
    log_probs, entropies, aux_loss = getattr(original, PASS)(model, *args, **kwargs)
    return log_probs - 0.1 * log_probs.mean().detach(), entropies, aux_loss


@method(PASS)
def other_log_probs_with_entropy(self, original, seen, *args, **kwargs):
    log_probs, entropies, aux_loss = getattr(original, PASS)(*args, **kwargs)
    seen.append(tuple(log_probs.shape))
    return log_probs * (1.0 if entropies is None else 0.9), entropies, aux_loss


def entropies_of(trainer: Any, model: Any, inputs: Any) -> Any:
    ids, mask = (torch.cat([inputs[f"prompt_{x}"], inputs[f"completion_{x}"]], dim=1) for x in ("ids", "mask"))
    return getattr(trainer, PASS)(model, ids, mask, inputs["completion_ids"].size(1), compute_entropy=True)[1]


@method("compute_loss")
def entropy_bonus(self, original, seen, model, inputs, *args, **kwargs):
    return original.compute_loss(model, inputs, *args, **kwargs) - 0.1 * entropies_of(self, model, inputs).mean()


@method(PASS)
def entropy_in_log_probs(self, original, seen, *args, **kwargs):
    log_probs, entropies, aux_loss = getattr(original, PASS)(*args, **kwargs)
    return log_probs if entropies is None else log_probs + 0.05 * entropies, entropies, aux_loss


@method("compute_loss")
def entropy_of_a_hook(self, original, seen, model, inputs, *args, **kwargs):
    outputs = []
    hook = self.accelerator.unwrap_model(self.model).register_forward_hook(lambda *given: outputs.append(given[-1]))
    loss = original.compute_loss(model, inputs, *args, **kwargs)
    hook.remove()
    return loss - 0.5 * outputs[-1].entropy.mean()


class EntropyInBackward(Change):
    """Accelerate's `backward` adds a pass's entropy to the loss."""

    def built(self, trainer: Any) -> None:
        accelerator = trainer.accelerator
        backward = accelerator.backward
        inputs = {}

        def before(module: Any, args: Any, given: Any) -> None:
            if given.get("fused_lm_head"):
                inputs.update({x: y for x, y in given.items() if x not in ("use_cache", "labels")})
                inputs["labels"] = given["input_ids"]

        self.hook = trainer.model.register_forward_pre_hook(before, with_kwargs=True)

        def backward_with_entropy(loss: Any, **kwargs: Any) -> None:
            backward(loss + 0.5 * trainer.model(**{**inputs, "fused_lm_head": True}).entropy.mean(), **kwargs)

        accelerator.backward = backward_with_entropy


def bonus_on_the_trainer(original: Any, seen: Readings, model: Any, inputs: Any) -> Any:
    return original(model, inputs) - 0.1 * entropies_of(original.__self__, model, inputs).mean()


@method("get_off_policy_mask")
def every_sequence(self, original, seen, **given):
    seen.append(summary_of(given))
    return torch.ones_like(given["per_token_logps"][:, :1])


def callback(read: Callable[[Any, Readings], None], event: str) -> Callable[[Readings], Change]:
    """A user's callback that holds the trainer."""

    class WithCallback(Change):
        def built(self, trainer: Any) -> None:
            seen = self.seen

            class Reads(TrainerCallback):
                holder: Any = None

            def called(self: Any, *args: Any, **kwargs: Any) -> None:
                read(self.holder["trainer"], seen)

            setattr(Reads, event, called)
            added = Reads()
            added.holder = {"trainer": trainer}
            trainer.add_callback(added)

    WithCallback.__name__ = f"WithCallback-{read.__name__}"
    return WithCallback


def read_buffer(trainer: Any, seen: Readings) -> None:
    if trainer._buffered_inputs is not None:
        seen.append([summary_of(x) for x in trainer._buffered_inputs])


def on_the_trainer(name: str, body: Any) -> Callable[[Readings], Change]:
    """A function put on the trainer."""

    class OnTrainer(Change):
        def built(self, trainer: Any) -> None:
            setattr(trainer, name, functools.partial(body, getattr(trainer, name), self.seen))

    OnTrainer.__name__ = f"OnTrainer-{body.__name__}"
    return OnTrainer


class LogOnTrainer(Change):
    """A method put on the trainer, which reads the buffer."""

    def built(self, trainer: Any) -> None:
        original = trainer.log

        def log(self_: Any, logs: Any, *args: Any, **kwargs: Any) -> Any:
            read_buffer(self_, self.seen)
            return original(logs, *args, **kwargs)

        trainer.log = MethodType(log, trainer)


def hook_of(owner: str) -> Callable[[Readings], Change]:
    """A forward hook of the model, or a hook of the optimizer, that reads the buffer."""

    class Hook(Change):
        def built(self, trainer: Any) -> None:
            def read(*args: Any) -> None:
                if trainer.model.training and torch.is_grad_enabled():
                    read_buffer(trainer, self.seen)

            if owner == "model":
                trainer.model.register_forward_pre_hook(read)
            else:
                trainer.create_optimizer().register_step_pre_hook(read)

    Hook.__name__ = f"Hook-{owner}"
    return Hook


def read_after(original: Any, seen: Readings, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    loss = original(model, inputs, *args, **kwargs)
    seen.append(summary_of(inputs))
    return loss


def helper(trainer: Any, seen: Readings) -> None:
    read_buffer(trainer, seen)


def rollout_that_reads(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
    """Reads the generation batch before this one."""
    read_buffer(trainer, trainer.readings)
    return scripted_rollout(prompts, trainer)


class WithRollout(Change):
    def trainer_class(self, base: Any, trls: Any) -> Any:
        return type("WithReadings", (base,), {"readings": self.seen})


SAMPLER = {"vllm": True, "rollout": "near_sampler"}
KL = {"beta": 0.2}
READ = (loss_with_old_log_probs_after, loss_with_old_log_probs_before)
LOSSES = (stale_if_there_are_old_log_probs, loss_of_other_rows_too, other_rows_first, a_pass_without_gradient)
ROWS = (shifted_advantages, without_old_log_probs, old_log_probs_removed_in_place, in_halves, repeated_rows)
MIXED = (rows_of_the_last_batch, buffer_read_after_the_step, buffer_read_in_the_log)
GENERATED = (advantages_after_generation, log_probs_after_generation, no_old_log_probs_after_generation)
PASSES = (centred_log_probs, other_log_probs_with_entropy)
ENTROPIES = (entropy_bonus, entropy_in_log_probs)
EVERY = (*READ, *LOSSES, without_the_first_prompt_token, *ROWS, *MIXED, *GENERATED, *PASSES)
OF_RLOO = (*READ, a_pass_without_gradient, shifted_advantages, in_halves, repeated_rows, rows_of_the_last_batch)
OF_RLOO = (*OF_RLOO, loss_of_other_rows_too, advantages_after_generation, log_probs_after_generation, *PASSES)
EVENTS = ("on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_log")

CASES = [
    (subclass(loss_with_old_log_probs_after), case(**ITERATIONS)),
    (subclass(loss_with_old_log_probs_before), case(**BOTH)),
    (subclass(rows_of_the_last_batch), case(**BOTH)),
    (subclass(stale_if_there_are_old_log_probs), case(**ALIGNED)),
    (subclass(loss_of_other_rows_too), case(**ALIGNED)),
    (subclass(without_the_first_prompt_token), case(**ALIGNED)),
    (subclass(every_sequence), case(**ITERATIONS, off_policy_mask_threshold=0.5)),
    (subclass(loss_with_old_log_probs_before), case(**SAMPLER)),
    (callback(read_buffer, "on_step_end"), case(**BOTH)),
    (on_the_trainer("compute_loss", read_after), case(**ITERATIONS)),
    (between(advantages_after_generation), case(**ALIGNED, rewards=("half_tenths",))),
    (between(log_probs_after_generation), case(**SAMPLER, **KL)),
    (in_place_of_trls(centred_log_probs), case(**ITERATIONS)),
    (subclass(loss_with_old_log_probs_after), case("rloo")),
    (between(centred_log_probs), case("rloo")),
    (subclass(entropy_bonus), case(**ALIGNED, steps=2)),
    (between(entropy_bonus), case(**ALIGNED, steps=2)),
    (LogOnTrainer, case(**ITERATIONS)),
    (hook_of("model"), case(**ITERATIONS)),
    (on_the_trainer("_compute_loss", bonus_on_the_trainer), case(**ALIGNED, steps=2)),
    (subclass(entropy_of_a_hook), case("sft", steps=2)),
    *((subclass(batch_seen_before_and_after), case(x, precompute_ref_log_probs=True, steps=2)) for x in ("dpo", "kto")),
    *((subclass(without_the_last_token), case(x, steps=2)) for x in ("dpo", "kto")),
]
SLOW = [
    *((kind(x), case(**BOTH)) for kind in (subclass, between, in_place_of_trls) for x in EVERY),
    *((subclass(x), case(**MISALIGNED)) for x in EVERY),
    *((subclass(x), case(**ALIGNED, **KL)) for x in EVERY),
    *((kind(x), case(**ITERATIONS, **KL, setup="lora")) for kind in (subclass, between) for x in (*READ, *GENERATED)),
    *((kind(x), case(**SAMPLER, **ITERATIONS)) for kind in (subclass, between) for x in EVERY),
    *((subclass(x), case(**BOTH, rollout="masked", loss_type="grpo")) for x in (*READ, *LOSSES, *PASSES)),
    *((kind(x), case("rloo", **ALIGNED)) for kind in (subclass, between) for x in OF_RLOO),
    # Centred log-probs of other batches give ratios that TRL clips in every row
    *((subclass(x), case("rloo", **BOTH, beta=0.05)) for x in OF_RLOO if x is not centred_log_probs),
    *((subclass(x), case(trainer, **ALIGNED)) for x in ENTROPIES for trainer in ("grpo", "rloo")),
    *((kind(entropy_bonus), case("rloo", **ALIGNED, steps=2)) for kind in (between, in_place_of_trls)),
    (in_place_of_trls(entropy_bonus), case(**ALIGNED, steps=2)),
    *((subclass(entropy_of_a_hook), case(x, steps=2)) for x in ("dpo", "kto")),
    (hook_of("optimizer"), case(**ITERATIONS)),
    *((EntropyInBackward, case(x, steps=2)) for x in ("sft", "dpo", "kto")),
    *((callback(helper, event), case(**BOTH)) for event in EVENTS),
    *((callback(read_buffer, event), case("rloo", **ALIGNED)) for event in EVENTS),
    (WithRollout, case(**BOTH, rollout="reads")),
    *((kind(batch_seen_before_and_after), case(x)) for kind in (subclass, between) for x in ("dpo", "kto", "sft")),
    *((between(without_the_last_token), case(x, steps=2)) for x in ("dpo", "kto")),
    *((kind(without_the_last_token), case(x, setup="lora")) for kind in (subclass, between) for x in ("dpo", "kto")),
]


def name_of(value: Any) -> str:
    return value.trainer if isinstance(value, Case) else getattr(value, "__name__", "")


@pytest.mark.parametrize(
    ("change", "of"), [*CASES, *(pytest.param(*x, marks=pytest.mark.slow) for x in SLOW)], ids=name_of
)
def test_code_that_reads_batches_trains_as_in_trl(
    change: Any, of: Case, workshop: Workshop, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ROLLOUTS, "reads", rollout_that_reads)
    assert_as_trl(change, of, workshop, tmp_path)


class _Logs(TrainerCallback):
    """Holds the trainer, but reads no batch."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.trainer.log({"lengths": float(len(self.trainer.state.log_history))})


def test_code_that_reads_no_batch_costs_nothing(workshop: Workshop, tmp_path: Any) -> None:
    class Named(trl_ext.GRPOTrainer):
        def _calculate_rewards(self, *args: Any) -> Any:
            return super()._calculate_rewards(*args)

        def log(self, logs: Any, *args: Any) -> None:
            super().log({**logs, "seen": 1.0}, *args)

        def helper(self) -> int:
            return len(self.train_dataset)

    trainers = replace(Trainers.of(trl_ext), grpo_trainer=Named)
    trainer = build(case(**BOTH), trainers, workshop, str(tmp_path), Record())
    trainer.add_callback(_Logs(trainer))
    plan = trainer._make_plan()
    assert plan["old policy"].action == "reuse"
    assert plan.skips_zero_advantages
    assert not plan.gives_trls_batches
