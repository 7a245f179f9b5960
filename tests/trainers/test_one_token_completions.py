"""With completions of one token, metrics are means over the tokens of the loss; TRL's also count masked rows.

TRL takes a tensor of shape (B, 1) for one value per sequence. With `pad_to_multiple_of=2` it has (B, 2), and its
means are those that are expected here.
"""

from dataclasses import replace

import pytest
import trl

import trl_ext
from drop_in_cases import Case
from run_losses import Trainers, train
from tiny import Workshop
from training_comparison import tensors_differ

STOCK, OURS = Trainers.of(trl), Trainers.of(trl_ext)
CASE = Case(
    "one-token",
    "grpo",
    config={
        "max_completion_length": 1,
        "num_iterations": 2,
        "epsilon": 1e-3,  # most ratios of the second iteration are clipped
        "beta": 0.1,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "per_device_eval_batch_size": 4,
    },
    steps=4,
    learning_rate=0.02,
    rollout="masked_whole",
)
METRICS = ("entropy", "kl", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean")


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_metrics_are_means_over_the_tokens_of_the_loss(level: str, workshop: Workshop) -> None:
    case = replace(CASE, config={**CASE.config, "importance_sampling_level": level})
    padded = replace(case, config={**case.config, "pad_to_multiple_of": 2})
    ours, stock, wanted = train(case, OURS, workshop), train(case, STOCK, workshop), train(padded, STOCK, workshop)
    names = [f"{prefix}{name}" for prefix in ("", "eval_") for name in METRICS]
    differs = set()
    for got_log, stock_log, want_log in zip(ours.logs, stock.logs, wanted.logs, strict=True):
        for name in want_log.keys() & names:
            assert got_log[name] == pytest.approx(want_log[name], rel=1e-5, abs=1e-6), name
            if stock_log[name] != pytest.approx(want_log[name], rel=1e-3, abs=1e-6):
                differs.add(name)
    assert {"entropy", "eval_entropy"} <= differs, "no row is masked: the case proves nothing"
    assert not tensors_differ("weight update", ours.updates, stock.updates)
