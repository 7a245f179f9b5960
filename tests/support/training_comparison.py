"""Compares losses, metrics, gradients and weights of two training runs, except metrics that may differ."""

import math
from typing import Any

import torch

from drop_in_cases import Case
from metric_table import Situation, has_router_loss, may_differ, skips_zero_advantages
from rewards import NOISY_REWARDS
from run_losses import MicroBatch, Record

TOLERANCE = 1e-5
# The scale of a divergence, which TRL computes as a difference of sums of several nats
DIVERGENCE = 0.05
POLICY_BATCHES = {"model": "policy", "grad": True}


def _close(got: float | None, want: float | None, scale: float) -> bool:
    if got is None or want is None or math.isnan(want):
        return got == want or (want is not None and got is not None and math.isnan(got) and math.isnan(want))
    return abs(got - want) <= TOLERANCE * max(abs(want), scale)  # false for a NaN


def assert_same(case: Case, ours: Record, stock: Record) -> None:
    """Raise AssertionError, naming everything that differs, unless `ours` equals `stock` within `TOLERANCE`.

    Logged metrics may differ if the table of docs/following.md says so. `skipped/*` of GRPO must equal what the
    hooks on the input embeddings counted.
    """
    wrong: list[str] = []
    assert len(ours.losses) == len(stock.losses) > 0, (len(ours.losses), len(stock.losses))
    losses = [ours.losses, stock.losses]
    if case.trainer in ("grpo", "rloo") and case.ours.get("keep_groups_together") is not False:
        losses = [[sum(x)] for x in losses]  # its micro-batches have other rows
    scale = DIVERGENCE if case.trainer == "distillation" else stock.advantage
    for i, (got, want) in enumerate(zip(*losses, strict=True)):
        if not _close(got, want, scale):
            wrong.append(f"loss of micro-batch {i}: ours {got!r}, stock {want!r}, scale {scale:.3g}")
    wrong += metrics_differ(case, ours, stock)

    assert len(ours.gradients) == len(stock.gradients) > 0, (len(ours.gradients), len(stock.gradients))
    for i, (got_grads, want_grads) in enumerate(zip(ours.gradients, stock.gradients, strict=True)):
        wrong += tensors_differ(f"gradient of step {i}", got_grads, want_grads)
    wrong += tensors_differ("weight update", ours.updates, stock.updates)

    # A case without values, or with NaN, would prove nothing.
    assert all(math.isfinite(loss) for loss in stock.losses), f"{case.name}: stock's losses are {stock.losses}"
    assert any(_norm(gradients) > 0 for gradients in stock.gradients), f"{case.name}: stock has no gradient at all"
    assert not wrong, f"{case.name}: {len(wrong)} differences\n" + "\n".join(wrong[:40])


def distance(one: Record, other: Record) -> float:
    """Return the largest difference of a gradient or weight update, relative to the norm of all."""
    pairs = [*zip(one.gradients, other.gradients, strict=True), (one.updates, other.updates)]
    return max(
        float((x[name].double() - want.double()).norm()) / _norm(y)
        for x, y in pairs
        for name, want in y.items()
        if want is not None
    )


def live_rows(case: Case, batch: MicroBatch) -> torch.Tensor:
    """Return the rows of stock's micro-batch that can change the gradient, by advantages and masks: `(B,)`, bool."""
    live = batch.tokens > 0
    if has_router_loss(case):  # it counts every row
        return torch.ones_like(live)
    if skips_zero_advantages(case):
        # TRL's advantages of equal rewards are at most 1e-3, and all others of these cases are larger
        normalized = case.config.get("normalize_advantages", False)  # subtracts a mean that is not exactly 0
        noise = 2e-3 if normalized or not NOISY_REWARDS.isdisjoint(case.rewards) else 0.0
        live = live & (batch.advantages.abs() > noise)
    return live


def metrics_differ(case: Case, ours: Record, stock: Record, counts: bool = True) -> list[str]:
    """Return the differences of the logs that are not allowed, by log entry.

    Args:
        counts (`bool`): whether `skipped/*` must equal what hooks counted. They do not know of passes of a user's code.
    """
    wrong: list[str] = []
    assert len(ours.logs) == len(stock.logs) > 0, (len(ours.logs), len(stock.logs))
    norm = max(log.get("grad_norm", 0.0) for log in stock.logs)
    for i, (got_log, want_log) in enumerate(zip(ours.logs, stock.logs, strict=True)):
        evaluation = is_evaluation(want_log)
        since = logs_since(stock.logs, i)
        mode = {"training": not evaluation}
        not_fed = {what: _not_fed(what, ours, stock, since, **mode) for what in ("rows", "tokens", "forwards")}
        rows_not_fed = _not_fed("rows", ours, stock, since, **mode, **POLICY_BATCHES)
        unscored = any(
            bool((~live_rows(case, batch) | (batch.tokens == 0)).any()) for batch in stock.batches if batch.log in since
        )
        situation = Situation(evaluation, unscored, first=i == 0)
        for key in sorted(want_log.keys() | got_log.keys()):
            if may_differ(key, case, situation):
                continue
            got, want = got_log.get(key, "absent"), want_log.get(key, "absent")
            if "absent" in (got, want):
                wrong.append(f"log {i} {key}: ours {got!r}, stock {want!r}")
                continue
            scale = metric_scale(case, key, want_log, stock.advantage, stock.logit_size)
            if key == "grad_norm":  # where terms cancel, a rounding error
                scale = norm / 100
            if not _close(got, want, scale):
                wrong.append(f"log {i} {key}: ours {got!r}, stock {want!r}, scale {scale:.3g}")
        if counts and case.trainer in ("grpo", "rloo") and not {"loss", "eval_loss"}.isdisjoint(want_log):
            prefix = "eval_" if situation.evaluation else ""
            counted = {"rows": rows_not_fed, "tokens": not_fed["tokens"], "passes": not_fed["forwards"]}
            if ours.packed:
                del counted["rows"]
            if case.ours.get("max_tokens_per_micro_batch"):  # a pass in several parts counts once
                del counted["passes"]
            for what, count in counted.items():
                got = got_log.get(f"{prefix}skipped/{what}", 0)
                if what == "tokens":
                    got += got_log.get(f"{prefix}skipped/generation_tokens", 0)
                if got != count:
                    wrong.append(f"log {i} {prefix}skipped/{what}: ours {got!r}, counted by hooks {count}")
    return wrong


def _not_fed(what: str, ours: Record, stock: Record, logs: range, **where: Any) -> int:
    """Return what only stock fed to its models since the previous log of a mode."""
    return sum(stock.fed(what, log=log, **where) - ours.fed(what, log=log, **where) for log in logs)


def is_evaluation(log: dict[str, float]) -> bool:
    return any(key.startswith("eval_") for key in log)


def logs_since(logs: list[dict[str, float]], i: int) -> range:
    """Return how many logs there were before that which entry `i` counts: since the last one of its mode."""
    evaluation = is_evaluation(logs[i])
    last = max((j for j in range(i) if is_evaluation(logs[j]) == evaluation), default=-1)
    return range(last + 1, i + 1)


def metric_scale(case: Case, key: str, log: dict[str, float], advantage: float, logit_size: float) -> float:
    """Return the scale of a logged value that is a difference or a signed mean of larger values."""
    prefix = "eval_" if key.startswith("eval_") else ""
    key = key.removeprefix("eval_")
    if case.trainer in ("dpo", "kto") and (key.startswith("rewards/") or (case.trainer, key) == ("kto", "kl")):
        logps = [abs(log.get(f"{prefix}logps/{which}", 0.0)) for which in ("chosen", "rejected")]
        return max(logps) * (1.0 if key == "kl" else case.config.get("beta", 0.1))
    if case.trainer == "reward" and key in ("mean_reward", "min_reward", "max_reward", "margin"):
        return max(abs(log[f"{prefix}{which}_reward"]) for which in ("min", "max"))
    if case.trainer in ("dpo", "kto") and key.startswith("logits/"):
        return logit_size
    if (
        case.trainer in ("grpo", "rloo") and key.endswith("loss") and key != "aux_loss"
    ):  # `a_loss` of a data set "a" too
        return advantage
    if case.trainer == "distillation" and key.endswith("loss"):
        return DIVERGENCE
    if case.trainer == "rloo" and key == "kl":  # a difference of log-probs
        return 1.0
    if key == "kl":  # half the squared difference of log-probs, with their rounding errors
        return max(1e-2, 0.2 * math.sqrt(abs(log[f"{prefix}kl"])))
    return 0.0


def _norm(tensors: dict[str, torch.Tensor | None]) -> float:
    return math.sqrt(sum(tensor.double().pow(2).sum().item() for tensor in tensors.values() if tensor is not None))


def tensors_differ(
    what: str, ours: dict[str, torch.Tensor | None], stock: dict[str, torch.Tensor | None], at_least: float = 0.0
) -> list[str]:
    """Return each tensor's difference relative to the norm of all; sums of absolute values would not notice signs.

    Args:
        at_least (`float`): the smallest norm to compare with.
    """
    if ours.keys() != stock.keys():
        return [f"{what}: other names: {sorted(ours.keys() ^ stock.keys())[:6]}"]
    wrong = []
    total = max(_norm(stock), at_least)
    for name, want in stock.items():
        got = ours[name]
        if (got is None) != (want is None):
            wrong.append(f"{what} {name}: ours {'None' if got is None else 'set'}, stock the other")
        elif want is not None:
            difference = (got.double() - want.double()).norm().item()
            if not difference <= TOLERANCE * total:
                wrong.append(f"{what} {name}: |ours - stock| {difference:.3g}, all of stock {total:.3g}")
    return wrong
