"""What a user's code does to a training: the grammar of overrides that the fuzzer draws.

An override is a place, a method that TRL calls, and an action before, after or around that method. `METHODS` says what
goes into a method and comes out of it, and `ACTIONS` what code may do with a batch, a loss, examples, tensors or logs.
What the code reads goes into `seen`, so that both trainers can be compared in what they show it. An event is a callback
that reads or changes the trainer, and a hook changes what the model computes.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import TrainerCallback

from fuzz_fields import ALL, GROUPED, GRPO, KTO, ROWS, STORING

# Where a user writes a method
PLACES = ("subclass", "subclass", "class between", "instance", "TRL's class", "TRL's class, once built")

Batch = dict[str, Any]
Seen = list[tuple[str, Any]]


@dataclass(frozen=True)
class Method:
    """A method that TRL calls, and what its argument and its result are."""

    name: str
    trainers: tuple[str, ...]
    takes: str | None = None  # "batch" or "examples", or None if nobody would change it
    place: int = 0  # of that argument
    gives: str | None = None  # "batch", "batches", "examples", "loss", "tensors" or "logs"


METHODS = (
    Method("training_step", ROWS, takes="batch", place=1, gives="number"),
    Method("training_step", GROUPED, takes="examples", place=1, gives="number"),
    Method("_prepare_inputs", ROWS, takes="batch", gives="batch"),
    Method("_prepare_inputs", GROUPED, takes="examples", gives="batch"),
    Method("compute_loss", ALL, takes="batch", place=1, gives="loss"),
    Method("_compute_loss", STORING + GROUPED, takes="batch", place=1, gives="loss"),
    Method("get_batch_samples", ALL, gives="batches"),
    Method("prediction_step", ROWS, takes="batch", place=1),
    Method("_generate_and_score_completions", GROUPED, takes="examples", gives="batch"),
    Method("_calculate_rewards", GROUPED, takes="examples", gives="tensors"),
    Method("_get_per_token_logps_and_entropies", GROUPED, gives="tensors"),
    Method("get_high_entropy_mask", GRPO, gives="tensors"),
    Method("compute_ref_log_probs", STORING, takes="batch", place=1, gives="tensors"),
    Method("_compute_kl_logps", KTO, takes="batch", place=1, gives="tensors"),
    Method("log", ALL, takes="logs"),
    Method("data_collator", ROWS, takes="examples", gives="batch"),
)


@dataclass
class Call:
    """One call of an overridden method: `run` calls the next one."""

    trainer: Any
    run: Callable[..., Any]
    seen: Seen


# What a value is -> name of an action -> function of the call and that value, which returns the value to go on with
ACTIONS: dict[str, dict[str, Callable[[Call, Any], Any]]] = {
    "batch": {
        "reads": lambda call, batch: call.seen.append(("batch", summary(batch))) or batch,
        "copies": lambda call, batch: dict(batch),
        "clones": lambda call, batch: {name: x.clone() if _is_tensor(x) else x for name, x in batch.items()},
        "takes every second row": lambda call, batch: rows_of(batch, lambda rows: range(0, rows, 2)),
        "repeats the first row": lambda call, batch: rows_of(batch, lambda rows: [0, *range(rows)]),
        "reverses the rows": lambda call, batch: rows_of(batch, lambda rows: reversed(range(rows))),
        "doubles advantages": lambda call, batch: _changed(batch, "advantages", lambda x: 2 * x),
        "lifts advantages": lambda call, batch: _changed(batch, "advantages", lambda x: x + 0.3),
        "turns advantages": lambda call, batch: _changed(batch, "advantages", lambda x: -x),
        "masks the last tokens": lambda call, batch: _masked(batch, "completion_mask", -1),
        "masks the first prompt tokens": lambda call, batch: _masked(batch, "prompt_mask", 0),
        "drops the old policy": lambda call, batch: _without(batch, "old_per_token_logps"),
        "drops the reference": lambda call, batch: _without(batch, "ref_per_token_logps", "ref_logps"),
        "adds an entry": lambda call, batch: {**batch, "of_user": torch.ones(_rows(batch))},
    },
    "batches": {
        "reads": lambda call, given: call.seen.append(("batches", [summary(x) for x in given[0]])) or given,
        "reverses": lambda call, given: (given[0][::-1], given[1]),
    },
    "examples": {
        "reads": lambda call, rows: call.seen.append(("examples", _size(rows))) or rows,
        "copies": lambda call, rows: [dict(row) for row in rows] if isinstance(rows, list) else rows,
    },
    "loss": {
        "halves": lambda call, loss: _with(loss, lambda x: 0.5 * x),
        "adds a norm": lambda call, loss: _with(loss, lambda x: x + 1e-3 * _norm(call.trainer.model)),
    },
    "number": {"reads": lambda call, loss: call.seen.append(("loss", float(loss))) or loss},
    "tensors": {
        "scales": lambda call, found: _each(found, lambda x: 1.01 * x if x.is_floating_point() else x),
        "shifts": lambda call, found: _each(found, lambda x: x + 0.1 * x.detach() if x.is_floating_point() else x),
    },
    "logs": {"reads": lambda call, logs: call.seen.append(("logs", float(logs.get("loss", 0.0)))) or logs},
}


# Actions of a loss's method that need the batch too: functions of the call, the loss's arguments and the batch
def _reads_into_loss(call: Call, arguments: list[Any], *, later: bool, key: str | None = None) -> Any:
    model, batch = arguments[0], arguments[1]
    before = weight_of(batch)
    loss = call.run(model, batch, *arguments[2:])
    return _with(loss, lambda x: x * (1 + 0.1 * (weight_of(batch) if later else before)))


def _twice(call: Call, arguments: list[Any]) -> Any:
    first, second = (call.run(*arguments) for _ in range(2))
    return _with(first, lambda x: 0.5 * x + 0.5 * _loss_of(second))


def _in_halves(call: Call, arguments: list[Any]) -> Any:
    model, batch = arguments[0], arguments[1]
    halves = [rows_of(batch, lambda rows, start=start: range(start, rows, 2)) for start in (0, 1)]
    losses = [call.run(model, half, *arguments[2:]) for half in halves if _rows(half)]
    return _with(losses[0], lambda x: x + _loss_of(losses[-1]))


def _second_pass(call: Call, arguments: list[Any]) -> Any:
    model, batch = arguments[0], arguments[1]
    loss = call.run(*arguments)
    return _with(loss, lambda x: x + 0.01 * _own_term(call.trainer, model, batch))


def _own_loss(call: Call, arguments: list[Any]) -> Any:
    term = _own_term(call.trainer, arguments[0], arguments[1])
    return (term, {}) if True in arguments[2:3] else term


LOSS_ACTIONS: dict[str, Callable[[Call, list[Any]], Any]] = {
    "reads the batch into the loss": partial(_reads_into_loss, later=False),
    "reads the batch into the loss, afterwards": partial(_reads_into_loss, later=True),
    "calls it twice": _twice,
    "calls it for half of the rows, twice": _in_halves,
    "adds a second pass": _second_pass,
    "does not call it": _own_loss,
}


@dataclass(frozen=True)
class Override:
    """A method written by a user."""

    place: str
    method: Method
    when: str  # "before", "after" or "around" the method of TRL
    action: str

    def __str__(self) -> str:
        return f"{self.place}: `{self.method.name}` {self.action} ({self.when})"

    def function(self, next_method: Callable[[Any], Callable[..., Any]], seen: Seen) -> Callable[..., Any]:
        """Return the user's function. `next_method` of the trainer is what it calls in place of `super()`."""
        method, when, action = self.method, self.when, self.action

        def written(trainer: Any, *positional: Any, **keywords: Any) -> Any:
            call = Call(trainer, next_method(trainer), seen)
            given = list(positional)
            if when == "around":  # transformers and TRL pass these by position or by name
                names = ("model", "inputs", "return_outputs", "num_items_in_batch")
                count = max((i + 1 for i, name in enumerate(names) if name in keywords), default=0)
                given += [keywords.get(name, False) for name in names[len(given) : count]]
                return LOSS_ACTIONS[action](call, given)
            if when == "before" and len(given) > method.place:
                given[method.place] = ACTIONS[method.takes][action](call, given[method.place])
            result = call.run(*given, **keywords)
            return ACTIONS[method.gives][action](call, result) if when == "after" else result

        return written


@dataclass(frozen=True)
class Event:
    """A callback of a user."""

    event: str
    action: str

    def __str__(self) -> str:
        return f"callback: `{self.event}` {self.action}"


EVENTS = (
    "on_step_begin",
    "on_substep_end",
    "on_pre_optimizer_step",
    "on_optimizer_step",
    "on_step_end",
    "on_log",
    "on_evaluate",
    "on_epoch_begin",
    "on_epoch_end",
)


def _sets(name: str, value: Any) -> Callable[[Any, Any, Seen], None]:
    def action(trainer: Any, control: Any, seen: Seen) -> None:
        if hasattr(trainer, name):
            setattr(trainer, name, value)

    return action


def _scaled(model: Any, factor: float) -> None:
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.mul_(factor)


def _asks_for_evaluation(trainer: Any, control: Any, seen: Seen) -> None:
    control.should_evaluate = trainer.eval_dataset is not None


def _doubles_reward_weights(trainer: Any, control: Any, seen: Seen) -> None:
    trainer.reward_weights = 2 * trainer.reward_weights


CALLBACK_ACTIONS: dict[str, Callable[[Any, Any, Seen], None]] = {
    "reads the buffer": lambda trainer, control, seen: seen.append(("buffer", _buffer(trainer))),
    "reads the weights": lambda trainer, control, seen: seen.append(("weights", float(_norm(trainer.model)))),
    "asks for a log": lambda trainer, control, seen: setattr(control, "should_log", True),
    "asks for an evaluation": _asks_for_evaluation,
    "stops": lambda trainer, control, seen: setattr(control, "should_training_stop", trainer.state.global_step >= 2),
    "shrinks the weights": lambda trainer, control, seen: _scaled(trainer.model, 0.98),
    "sets `beta`": _sets("beta", 0.3),
    "sets `temperature`": _sets("temperature", 1.3),
    "sets `epsilon_low`": _sets("epsilon_low", 0.02),
    "sets `loss_type`": _sets("loss_type", "bnpo"),
    "sets `num_iterations`": _sets("num_iterations", 2),
    "sets `scale_rewards`": _sets("scale_rewards", "none"),
    "sets `top_entropy_quantile`": _sets("top_entropy_quantile", 0.5),
    "sets `mask_truncated_completions`": _sets("mask_truncated_completions", True),
    "doubles `reward_weights`": _doubles_reward_weights,
}
_OF_GRPO = ("`loss_type`", "`scale_rewards`", "`top_entropy_quantile`")
_OF_GROUPED = ("buffer", "`temperature`", "`epsilon_low`", "`num_iterations`", "`mask_", "`reward_weights`", *_OF_GRPO)


@dataclass(frozen=True)
class Hook:
    """A forward hook of a user on the input embedding."""

    action: str

    def __str__(self) -> str:
        return f"hook: {self.action}"

    def register(self, trainer: Any) -> None:
        trainer.model.get_input_embeddings().register_forward_hook(HOOK_ACTIONS[self.action])


def _counts_calls(module: Any, inputs: Any, output: Tensor) -> Tensor:
    module.calls = getattr(module, "calls", 0) + 1
    return output * (1 + 0.05 * (module.calls % 3))


def _draws_in_training(module: Any, inputs: Any, output: Tensor) -> Tensor:
    return output + 0.05 * torch.randn_like(output) if module.training else output


# docs/differences.md says what is not seen to differ from call to call
HOOK_ACTIONS: dict[str, Callable[[Any, Any, Tensor], Tensor]] = {
    "scales": lambda module, inputs, output: 1.1 * output,
    "scales in training": lambda module, inputs, output: 1.1 * output if module.training else output,
    "draws": lambda module, inputs, output: output + 0.05 * torch.randn_like(output),
    "draws in training": _draws_in_training,
    "counts its calls": _counts_calls,
}

OfUser = Override | Event | Hook | None


def draw_override(seed: int, trainer: str) -> OfUser:
    """Return what a user's code does in a draw, if anything."""
    rng = random.Random(f"override {seed}")
    kind = rng.choice(("none", "none", "none", "method", "method", "method", "method", "callback", "callback", "hook"))
    if kind == "none":
        return None
    if kind == "hook":
        return Hook(rng.choice(list(HOOK_ACTIONS)))
    if kind == "callback":
        barred = () if trainer == "grpo" else _OF_GRPO if trainer == "rloo" else _OF_GROUPED
        actions = [x for x in CALLBACK_ACTIONS if not any(part in x for part in barred)]
        return Event(rng.choice(EVENTS), rng.choice(actions))
    method = rng.choice([x for x in METHODS if trainer in x.trainers])
    choices = [("before", x) for x in ACTIONS.get(method.takes or "", ())]
    choices += [("after", x) for x in ACTIONS.get(method.gives or "", ())]
    choices += [("around", x) for x in LOSS_ACTIONS] if method.gives == "loss" else []
    if trainer not in GROUPED:
        choices = [x for x in choices if not any(y in x[1] for y in ("advantages", "prompt tokens", "old policy"))]
    when, action = rng.choice(choices)
    place = "instance" if method.name == "data_collator" else rng.choice(PLACES)
    return Override(place, method, when, action)


@contextmanager
def overridden(override: OfUser, trainer_class: type, seen: Seen) -> Iterator[tuple[type, Callable[[Any], None]]]:
    """Yield the user's class, and a function that changes the trainer once it is built, for the `with` block."""
    trls = next(x for x in trainer_class.__mro__ if x.__module__.startswith("trl.trainer"))
    if override is None:
        yield trainer_class, lambda trainer: None
        return
    if isinstance(override, Hook):
        yield trainer_class, override.register
        return
    if isinstance(override, Event):
        yield trainer_class, lambda trainer: trainer.add_callback(_callback(override, trainer, seen))
        return
    name = override.method.name

    def written(next_class: type) -> Callable[..., Any]:
        return override.function(lambda trainer: getattr(super(next_class, trainer), name), seen)

    def of_instance(trainer: Any) -> None:
        bound = getattr(trainer, name)
        function = override.function(lambda _: bound, seen)
        setattr(trainer, name, partial(function, trainer) if name == "data_collator" else MethodType(function, trainer))

    original = getattr(trls, name, None)
    patched = patch.object(trls, name, override.function(lambda trainer: partial(original, trainer), seen), create=True)
    if override.place == "instance":
        yield trainer_class, of_instance
    elif override.place == "TRL's class":
        with patched:
            yield trainer_class, lambda trainer: None
    elif override.place == "TRL's class, once built":
        try:
            yield trainer_class, lambda trainer: patched.start()
        finally:
            patched.stop()
    elif override.place == "class between":
        between = type("Between", (trls,), {})
        setattr(between, name, written(between))
        yield between if trainer_class is trls else type("OfUser", (trainer_class, between), {}), lambda trainer: None
    else:
        subclass = type("OfUser", (trainer_class,), {})
        setattr(subclass, name, written(subclass))
        yield subclass, lambda trainer: None


def _callback(override: Event, trainer: Any, seen: Seen) -> TrainerCallback:
    def on_event(self: Any, args: Any, state: Any, control: Any, **_: Any) -> None:
        CALLBACK_ACTIONS[override.action](trainer, control, seen)

    return type("OfUser", (TrainerCallback,), {override.event: on_event})()


# Batches


# TRL's columns of `precompute_ref_log_probs`. Ours come from the store, and are in the batch only after the loss
_STORED = ("ref_chosen_logps", "ref_rejected_logps", "ref_logps", "ref_KL_logps")


def summary(batch: Any) -> dict[str, tuple[float, float]]:
    """Return the sum of each entry and of its absolute values, without what is masked."""
    if not isinstance(batch, dict):
        return {"rows": (_size(batch), 0.0)}
    numbers = {name: x for name, x in batch.items() if _is_tensor(x) or isinstance(x, int | float)}
    return {name: _sums(_unmasked(batch, x)) for name, x in numbers.items() if name not in _STORED}


def weight_of(batch: Batch) -> float:
    """Return a number that depends on each entry of the batch."""
    sums = [total / (1.0 + absolute) for total, absolute in summary(batch).values()]
    return sum(sums) / max(len(sums), 1)


def rows_of(batch: Batch, choose: Callable[[int], Any]) -> Batch:
    """Return the rows that `choose` picks out of a number of rows. Pairs of DPO stay together."""
    size = _rows(batch)
    pairs = size // 2 if _is_dpo(batch) else size
    chosen = list(choose(pairs))
    index = torch.tensor([*chosen, *(row + pairs for row in chosen)] if _is_dpo(batch) else chosen, dtype=torch.long)
    of_pairs = torch.tensor(chosen, dtype=torch.long)

    def taken(value: Any) -> Any:
        if not _is_tensor(value) or not value.dim():
            return [value[row] for row in chosen] if isinstance(value, list) and len(value) == size else value
        if len(value) == size:
            return value[index]
        return value[of_pairs] if len(value) == pairs else value

    return {name: taken(x) for name, x in batch.items()}


def _is_dpo(batch: Batch) -> bool:
    """Whether the second half of the rows are the rejected completions."""
    return "input_ids" in batch and "label" not in batch and "labels" not in batch


def _rows(batch: Batch) -> int:
    return len(batch["completion_ids" if "completion_ids" in batch else "input_ids"])


def _size(rows: Any) -> int:
    return len(rows)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _unmasked(batch: Batch, value: Any) -> Tensor:
    value = torch.as_tensor(value).detach().double()
    mask = batch.get("completion_mask")
    return value * mask if mask is not None and value.shape == mask.shape else value


def _sums(value: Tensor) -> tuple[float, float]:
    value = value.nan_to_num(nan=0.0)
    return value.sum().item(), value.abs().sum().item()


def _changed(batch: Batch, name: str, change: Callable[[Tensor], Tensor]) -> Batch:
    return {**batch, name: change(batch[name])} if name in batch else batch


def _masked(batch: Batch, name: str, place: int) -> Batch:
    """Return the batch with a token of each row less, if the row has more than one."""

    def change(mask: Tensor) -> Tensor:
        changed = mask.clone()
        for row in changed:
            tokens = row.nonzero().flatten()
            if len(tokens) > 1:
                row[tokens[place]] = 0
        return changed

    return _changed(batch, name, change)


def _without(batch: Batch, *names: str) -> Batch:
    return {name: x for name, x in batch.items() if name not in names}


# Losses


def _loss_of(loss: Any) -> Tensor:
    return loss[0] if isinstance(loss, tuple) else loss


def _with(loss: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return (change(loss[0]), *loss[1:]) if isinstance(loss, tuple) else change(loss)


def _own_term(trainer: Any, model: Any, batch: Batch) -> Tensor:
    """Return a loss from a pass of the user's code."""
    if "completion_ids" not in batch:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch.get("attention_mask")).logits
        return logits.pow(2).mean()
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask_BC = batch["completion_mask"]
    mask = torch.cat([batch["prompt_mask"], mask_BC], dim=1)
    new = trainer._get_per_token_logps_and_entropies(model, ids, mask, mask_BC.size(1))[0]
    old = batch.get("old_per_token_logps")
    if old is None:
        old = torch.zeros_like(new) + (batch["old_logps"] / mask_BC.sum(1)).unsqueeze(1) if "old_logps" in batch else 0
    return ((new - old).pow(2) * mask_BC).sum() / mask_BC.sum().clamp(min=1)


def _each(found: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(found, tuple | list):
        return type(found)(_each(x, change) for x in found)
    return change(found) if _is_tensor(found) else found


def _norm(model: Any) -> Tensor:
    return sum(param.pow(2).sum() for param in model.parameters() if param.requires_grad)


def _buffer(trainer: Any) -> list[dict[str, tuple[float, float]]] | None:
    buffered = getattr(trainer, "_buffered_inputs", None)
    return None if buffered is None else [summary(batch) for batch in buffered]
