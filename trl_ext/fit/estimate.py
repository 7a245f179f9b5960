"""The training step of a run, whose memory `step.py` counts, and the longest rows that fit."""

import itertools
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
from transformers import Trainer

from ..losses.loss_types import kto_loss_type
from .coverage import check_covered
from .policy import policy_of
from .run import ArgumentError, Run
from .search import counted_near
from .step import DIVERGENCE_HEAD, SCORE_HEAD, Engine, Step, memory_of_step

# Of a micro-batch. An operator runs for each row and layer, in minutes for these rows in a large model
MOST_ROWS = 1024
_MOST_TOKENS = 2**26
PAIR_METHODS = ("dpo", "reward")  # two rows for each of a batch
_LENGTH_STEP = 64  # tokens between the lengths of rows that are tried
# What the head computes of each token besides log-probs and entropy
_HEAD_OUTPUTS = {"sft": ("is_top1",), "dpo": ("mean_logits", "is_top1"), "kto": ("mean_logits",)}


def step_of(run: Run) -> Step:
    """Return the training step of a run, on one device, with the longest rows.

    Raises:
        `ArgumentError`: an estimate does not cover an argument.
    """
    training = run.training
    check_covered(run)
    policy = policy_of(run)
    longest = min(run.longest_row, policy.longest_row)
    if longest < 2:
        name = "max_completion_length" if run.samples else "max_length"
        raise ArgumentError(f"`--{name}` leaves rows of {longest} tokens. Set it so that rows have 2 tokens or more.")
    if not 0 <= run.prompt_length < longest:
        raise ArgumentError(f"`--prompt_length` must be from 0 to {longest - 1}, got {run.prompt_length}.")
    rows = training.per_device_train_batch_size * (2 if run.method in PAIR_METHODS else 1)
    _check_size(rows, longest, training.per_device_train_batch_size)
    is_scored = run.method == "reward"
    is_distilled = run.method == "distillation"
    tokens = longest if is_scored else longest - 1  # an LM predicts nothing from a row's last token
    has_reference = _has_reference(run)
    has_model = policy.has_teacher if is_distilled else has_reference and not policy.has_adapter
    reference_batches = 0
    if has_reference:
        # KTO's KL term scores the rows again, with completions of other rows
        reference_batches = 2 if run.method == "kto" and kto_loss_type(training.loss_type).has_kl_term else 1
    return Step(
        model=policy.make,
        rows=rows,
        tokens=tokens,
        scored_tokens=1 if is_scored else tokens - max(run.prompt_length - 1, 0),
        outputs=("log_probs", "entropy", *_HEAD_OUTPUTS.get(run.method, ())),
        head=SCORE_HEAD if is_scored else DIVERGENCE_HEAD if is_distilled else training.head,
        beta=training.beta if is_distilled else 0.0,
        chunk_size=None if is_scored else training.head_chunk_size,
        device=torch.device(run.device),
        engine=cast(Engine, run.engine),
        devices=run.devices,
        autocast=_autocast(run),
        accumulates=training.gradient_accumulation_steps > 1,
        optimizer=partial(_optimizer, training),
        reference=policy.make_reference if has_model else None,
        shares=training.share_prompts is not False,
        offloads=bool(getattr(training, "activation_offloading", False)),
        hosts_reference=getattr(training, "reference_device", None) is not None,
        reference_batches=reference_batches,
    )


def longest_rows(
    step: Step, most_tokens: int, limit: int, on_count: Callable[[int], None] = lambda number: None
) -> tuple[int, int]:
    """Return the tokens of the longest rows with which `step` fits into `limit` bytes, and the most that are counted.

    They have at most `most_tokens`. The first is 0 if no row of 64 tokens fits. `on_count` is called before each count.
    """
    counts = itertools.count(1)
    prompt = step.tokens - step.scored_tokens

    def bytes_of(number: int) -> int:
        on_count(next(counts))
        is_scored = step.head == SCORE_HEAD
        tokens = (number + 1) * _LENGTH_STEP - (not is_scored)
        scored_tokens = 1 if is_scored else max(1, tokens - prompt)
        return memory_of_step(replace(step, tokens=tokens, scored_tokens=scored_tokens)).peak

    most = min(most_tokens, _MOST_TOKENS // step.rows)
    count = most // _LENGTH_STEP
    first = min(step.tokens + 1, most) // _LENGTH_STEP - 1
    peaks = counted_near(limit, bytes_of, count, first)
    longest = max((number + 1 for number, peak in peaks.items() if peak <= limit), default=0)
    return longest * _LENGTH_STEP, most


def _check_size(rows: int, longest: int, batch_size: int) -> None:
    """Raise `ArgumentError` for a micro-batch that is too large to count: each row takes time, each token memory."""
    beginning = f"`--per_device_train_batch_size {batch_size}` makes micro-batches of"
    remedy = "Lower it, and raise `--gradient_accumulation_steps`."
    if rows > MOST_ROWS:
        raise ArgumentError(f"{beginning} {rows:,} rows, but `estimate` counts at most {MOST_ROWS:,}. {remedy}")
    tokens = rows * longest
    if tokens > _MOST_TOKENS:
        raise ArgumentError(f"{beginning} {tokens:,} tokens, but `estimate` counts at most {_MOST_TOKENS:,}. {remedy}")


def _autocast(run: Run) -> torch.dtype | None:
    if run.method == "distillation":  # TRL calls its loss outside of autocast
        return None
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(run.mixed_precision)


def _has_reference(run: Run) -> bool:
    """Return whether a reference or a teacher scores rows in a step."""
    if run.method in ("sft", "reward"):
        return False
    if run.method == "distillation":
        return True
    if run.samples:
        return bool(run.training.beta != 0)
    return not run.training.precompute_ref_log_probs


def _optimizer(training: Any, model: Any) -> torch.optim.Optimizer:
    """Return the optimizer that the trainer makes for `model`."""
    trainer: Any = SimpleNamespace(args=training, model=model, optimizer=None, optimizer_cls_and_kwargs=None)
    trainer.get_decay_parameter_names = partial(Trainer.get_decay_parameter_names, trainer)
    trainer.get_optimizer_cls_and_kwargs = Trainer.get_optimizer_cls_and_kwargs
    with warnings.catch_warnings():  # of a log line with the number of weights that have states of 32 bits
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        return Trainer.create_optimizer(trainer)
