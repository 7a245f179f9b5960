"""Trains random combinations of options and overrides with our trainers and with stock TRL's, and compares the results.

Run with `make fuzz N=400` or `python tests/support/fuzz.py --draws 400 --first 0`. A draw depends only on its number:
to repeat draw 37, run `make fuzz N=1 FIRST=37`. `fuzz_fields.py` has the fields that are drawn, `fuzz_overrides.py`
what a user's code does. Compared are the gradients of each step, the final weights, all logged metrics and what the
user's code read.
"""

import argparse
import functools
import gc
import importlib.metadata
import logging
import math
import os
import re
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
import trl

import training_comparison
import trl_ext
from drop_in_cases import Case
from fuzz_fields import draw_case
from fuzz_overrides import OfUser, Override, Seen, draw_override, overridden
from run_losses import Record, Trainers, train
from tiny import Workshop
from training_comparison import metrics_differ, tensors_differ

STOCK = Trainers.of(trl)
# Our trainers without a subclass that records, which the plan would respect as a user's
OURS = replace(Trainers.of(trl_ext), records_batches=False)
# Rounding errors grow over a few steps; a wrong loss differs by much more
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Draw:
    case: Case
    override: OfUser

    @property
    def compared(self) -> Case:
        """The case by which metrics are compared: with the value that the user's code sets in training."""
        if "sets `mask_truncated_completions`" not in str(self.override):
            return self.case
        return replace(self.case, config={**self.case.config, "mask_truncated_completions": True})

    def __str__(self) -> str:
        default = Case("", "")
        changed = {name: x for name, x in vars(self.case).items() if name != "name" and x != getattr(default, name)}
        return f"{changed}; {self.override or 'no override'}"


def draw(seed: int) -> Draw:
    case = draw_case(seed)
    return Draw(case, draw_override(seed, case.trainer))


# Errors that ours may raise although TRL trains: a part of the message, and whether the draw explains it
REFUSED: dict[str, Callable[[Draw], Any]] = {
    "`max_tokens_per_micro_batch=": lambda drawn: drawn.case.ours.get("max_tokens_per_micro_batch"),
    "`padding_free=True` is not supported here": lambda drawn: (
        drawn.case.ours.get("padding_free") or drawn.case.config.get("padding_free")
    ),
    "`precompute_ref_log_probs=True` fills the store, so `reference_store`": lambda drawn: drawn.case.ours.get(
        "reference_store"
    ),
    ".compute_ref_log_probs`, because trl_ext stores": lambda drawn: (
        drawn.case.config.get("precompute_ref_log_probs") and "`compute_ref_log_probs`" in str(drawn.override)
    ),
}


def _without_second_train(drawn: Draw) -> Draw:
    """Return a draw without what follows a training that ends within GRPO's generation cycle.

    A second `train` then starts with new completions (docs/differences.md).
    """
    case = drawn.case
    accumulation = case.config.get("gradient_accumulation_steps", 1)
    cycle = case.config.get("steps_per_generation", accumulation) * case.config.get("num_iterations", 1)
    if case.trainer != "grpo" or (case.steps > 0 and case.steps * accumulation % cycle == 0):
        return drawn
    return replace(drawn, case=replace(case, calls=case.calls[: 1 + case.calls.index("train")]))


def _for_stock(drawn: Draw) -> Draw:
    """Return the draw for stock: without what docs/differences.md says that the user's code finds otherwise in ours.

    The reference's sums follow a mask that the code changes, and SFT's batches have rows with `padding_free=True`.
    """
    if drawn.case.trainer == "sft" and drawn.override is not None:
        config = {name: x for name, x in drawn.case.config.items() if name != "padding_free"}
        return replace(drawn, case=replace(drawn.case, config=config))
    changes_batch = isinstance(drawn.override, Override) and drawn.override.method.name in (
        "data_collator",
        "_prepare_inputs",
        "training_step",
        "compute_loss",
        "_compute_loss",
    )
    if not changes_batch or "masks the last tokens" not in str(drawn.override):
        return drawn
    config = {name: x for name, x in drawn.case.config.items() if name != "precompute_ref_log_probs"}
    return replace(drawn, case=replace(drawn.case, config=config))


@dataclass
class Result:
    """A training, and what the user's code read."""

    record: Record
    seen: Seen


def outcome(drawn: Draw, workshop: Workshop, fault: AbstractContextManager[Any] | None = None) -> list[str] | str:
    """Return the differences in a draw, or one word that says why nothing was compared.

    Args:
        fault (`AbstractContextManager`, *optional*): breaks our trainers, to check that a difference is found.
    """
    drawn = _without_second_train(drawn)
    with fault or nullcontext():
        ours = _run(drawn, OURS, workshop)
    drawn = _for_stock(drawn)
    stock = _run(drawn, STOCK, workshop)
    stock_is_finite = isinstance(stock, Result) and _is_finite(stock.record)
    if isinstance(ours, FloatingPointError) and isinstance(stock, Result) and _has_overflowed(stock.record, str(ours)):
        return "stock is not finite, and ours stops"
    if isinstance(ours, Exception):
        if any(text in str(ours) and explains(drawn) for text, explains in REFUSED.items()):
            return f"refused: {str(ours)[:90]}"
        if isinstance(stock, Exception):
            return f"both raise: {str(ours)[:90]} | {str(stock)[:60]}"
        return [f"ours raises {type(ours).__name__}: {ours}"]
    if isinstance(stock, Exception):
        return f"stock raises: {type(stock).__name__}: {str(stock)[:90]}"
    if not stock_is_finite:
        return "stock is not finite"
    wrong = _differences(drawn, ours, stock)
    if not wrong:
        return "no gradient" if _has_no_gradient(stock.record, 0.0) else []
    if all("grad" in x for x in wrong) and _has_no_gradient(stock.record, 0.0) and _has_no_gradient(ours.record, 1e-5):
        return "no gradient"
    # Some trainings change completely by rounding; a mistake of ours still changes them by more than this
    rounding = min(_rounding_of_stock(drawn, stock, workshop), 1e-2)
    if not _differences(drawn, ours, stock, tolerance=3 * rounding):
        return f"rounding: {len(wrong)} differences, within 3 times those of stock, rounded elsewhere ({rounding:.0e})"
    return wrong


def _has_no_gradient(record: Record, rounding: float) -> bool:
    return all(training_comparison._norm(gradients) <= rounding for gradients in record.gradients)


def _rounding_of_stock(drawn: Draw, stock: Result, workshop: Workshop) -> float:
    """Return the smallest tolerance within which stock agrees with itself, rounded elsewhere; infinite if none does."""
    nudged = _run(drawn, STOCK, workshop, prepare=_nudged)
    if isinstance(nudged, Exception):
        return math.inf
    within = [lambda x: not _differences(drawn, nudged, stock, x, counts=False) and _within(nudged, stock, x)]
    if "neftune_noise_alpha" not in drawn.case.config:  # its noise depends on the width
        padding = {**drawn.case.config, "pad_to_multiple_of": 32}
        wider = _run(replace(drawn, case=replace(drawn.case, config=padding)), STOCK, workshop)
        within += [] if isinstance(wider, Exception) else [lambda x: _within(wider, stock, x)]
    tolerances = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
    return next((x for x in tolerances if all(is_within(x) for is_within in within)), math.inf)


def _nudged(trainer: Any) -> None:
    """Change each trained weight by about its rounding error."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in trainer.model.parameters():
            if param.requires_grad:
                param.mul_(1 + 1e-7 * torch.randn(param.shape, generator=generator))


def _run(
    drawn: Draw, trainers: Trainers, workshop: Workshop, prepare: Callable[[Any], None] = lambda trainer: None
) -> Any:
    """Return the `Result` of one training, or the error that it raised."""
    case, kind, seen = drawn.case, drawn.case.trainer, []
    trainer_class, config_class = getattr(trainers, f"{kind}_trainer"), getattr(trainers, f"{kind}_config")
    if trainers.records_batches:
        case = replace(case, ours={})
    else:
        config_class = partial(config_class, **case.ours)
    try:
        with overridden(drawn.override, trainer_class, seen) as (of_user, change):
            changed = {f"{kind}_trainer": of_user, f"{kind}_config": config_class}

            def prepared(trainer: Any) -> None:
                prepare(trainer)
                change(trainer)

            record = train(case, replace(trainers, **changed), workshop, prepare=prepared)
    except Exception as error:
        return error
    return Result(record, seen)


def _within(rounded: Result, stock: Result, tolerance: float) -> bool:
    """Return whether two runs of stock agree, also in the gradient norm, which is a rounding error if terms cancel."""
    runs = (rounded.record, stock.record)
    norms = [[training_comparison._norm(gradients) for gradients in record.gradients] for record in runs]
    floor = max(norms[1], default=0.0) / 100
    return not _tensors_differ(*runs, tolerance) and all(
        abs(a - b) <= tolerance * max(a, b, floor) for a, b in zip(*norms, strict=True)
    )


def _is_finite(record: Record) -> bool:
    updates_are = all(bool(update.isfinite().all()) for update in record.updates.values())
    return updates_are and all(math.isfinite(x) for x in record.losses)


def _has_overflowed(stock: Record, error: str) -> bool:
    """Whether a loss of stock is not finite by the step that our error names."""
    steps = 1 + next((i for i, x in enumerate(stock.losses) if not math.isfinite(x)), len(stock.losses))
    named_step = re.search(r"not finite in step (\d+)", error)
    return steps <= len(stock.losses) and named_step is not None and int(named_step[1]) * _per_step(stock) >= steps


def _per_step(record: Record) -> int:
    return -(-len(record.losses) // max(len(record.gradients), 1))


def _differences(
    drawn: Draw, ours: Result, stock: Result, tolerance: float = TOLERANCE, counts: bool = True
) -> list[str]:
    """Return the differences of two runs.

    Args:
        counts (`bool`): whether to compare `skipped/*` with what hooks count, where they can.
    """
    lengths = [(len(x.record.logs), len(x.record.gradients)) for x in (ours, stock)]
    if lengths[0] != lengths[1]:
        return [f"numbers of logs and steps: ours {lengths[0]}, stock {lengths[1]}"]
    # TRL's log at the end of an epoch is one of evaluation if an evaluation came before it
    counts = counts and drawn.override is None and drawn.case.config.get("logging_strategy") != "epoch"
    with patch.object(training_comparison, "TOLERANCE", tolerance):
        wrong = metrics_differ(drawn.compared, ours.record, stock.record, counts=counts)
    if ours.record.best[1] != stock.record.best[1]:
        wrong.append(f"best metric and its step: ours {ours.record.best}, stock {stock.record.best}")
    return (
        wrong + _reads_differ(ours.seen, stock.seen, tolerance) + _tensors_differ(ours.record, stock.record, tolerance)
    )


def _reads_differ(ours: Seen, stock: Seen, tolerance: float) -> list[str]:
    """Return the first difference in what the user's code read."""
    if [what for what, _ in ours] != [what for what, _ in stock]:
        return [f"the user's code read {len(ours)} values, with stock {len(stock)}"]
    for place, ((what, got), (_, want)) in enumerate(zip(ours, stock, strict=True)):
        found = _values_differ(got, want, tolerance)
        if found:
            return [f"{what} {place} that the user's code read: {found}"]
    return []


def _values_differ(got: Any, want: Any, tolerance: float) -> str | None:
    """Return where two values differ: numbers, sums of an entry and of its absolute values, or containers of them."""
    if isinstance(got, dict) and isinstance(want, dict):
        if got.keys() != want.keys():
            return (
                f"entries {sorted(got.keys() - want.keys())} of ours alone, {sorted(want.keys() - got.keys())} of TRL's"
            )
        inner = ((name, _values_differ(got[name], want[name], tolerance)) for name in want)
        return next((f"{name}: {found}" for name, found in inner if found), None)
    if isinstance(got, list) and isinstance(want, list):
        if len(got) != len(want):
            return f"{len(got)} values for {len(want)}"
        return next((x for x in (_values_differ(a, b, tolerance) for a, b in zip(got, want, strict=True)) if x), None)
    if isinstance(got, tuple) and isinstance(want, tuple):
        return (
            f"{got} for {want}"
            if not all(abs(a - b) <= tolerance * (1 + want[1]) for a, b in zip(got, want, strict=True))
            else None
        )
    is_near = got == want if got is None or want is None else abs(got - want) <= tolerance * (1 + abs(want))
    return None if is_near else f"{got} for {want}"


def _tensors_differ(ours: Record, stock: Record, tolerance: float) -> list[str]:
    wrong = []
    largest = max((training_comparison._norm(gradients) for gradients in stock.gradients), default=0.0)
    with patch.object(training_comparison, "TOLERANCE", tolerance):
        for i, (got, want) in enumerate(zip(ours.gradients, stock.gradients, strict=True)):
            # Without an advantage, the gradient of a step is a rounding error
            wrong += tensors_differ(f"gradient of step {i}", got, want, at_least=largest / 100)
        # 1e-7 is the rounding of a weight
        return wrong + tensors_differ("weight update", ours.updates, stock.updates, at_least=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=40)
    parser.add_argument("--first", type=int, default=0, help="number of the first draw")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    # A quarter of the time: each training collects garbage, and looks packages up
    gc.freeze()
    importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)
    counts: Counter[str] = Counter()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        workshop = Workshop(Path(folder))
        for seed in range(arguments.first, arguments.first + arguments.draws):
            with open(os.devnull, "w") as nowhere, patch.object(sys, "stdout", nowhere):
                found = outcome(draw(seed), workshop)
            word = found.split(":")[0] if isinstance(found, str) else "differs" if found else "same"
            counts[word] += 1
            if word == "differs":
                print(f"draw {seed}: {draw(seed)}")
                print("\n".join(f"    {line}" for line in found[:8]), flush=True)
            elif isinstance(found, str):
                print(f"draw {seed}: {found}", flush=True)
    summary = ", ".join(f"{count} {word}" for word, count in counts.most_common())
    print(f"{arguments.draws} draws from {arguments.first}: {summary}; {time.monotonic() - began:.0f} s")
    sys.exit(bool(counts["differs"]))


if __name__ == "__main__":
    main()
