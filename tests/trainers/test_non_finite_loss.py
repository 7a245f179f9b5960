"""If a loss is not finite, its rows and pass are named, and training stops or skips one optimizer step."""

import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from transformers import TrainerCallback

import trl_ext
from ranks import Rank, run_on_ranks
from resumable_runs import build
from tiny import Workshop, preferences, scripted_rollout
from trl_ext.planning.non_finite import not_finite_rows, why_not_skipped

WORD = {"dpo": 3 + 13, "grpo": 3 + 2}  # of one pair; of one prompt, and of few completions


def spoil(trainer: Any, name: str) -> None:
    """A policy that gives NaN to rows with a certain word."""
    with torch.no_grad():
        trainer.model.get_input_embeddings().weight[WORD[name]] = math.nan


class Weights(TrainerCallback):
    """Record the weights at the start and after each optimizer step, and how many of them are NaN."""

    def __init__(self) -> None:
        self.after: list[dict[str, torch.Tensor]] = []
        self.look: Callable[[], None] = lambda: None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.look()
        self.on_step_end(args, state, control, **kwargs)

    def on_step_end(self, args: Any, state: Any, control: Any, model: torch.nn.Module, **kwargs: Any) -> None:
        whole = {name: getattr(x, "full_tensor", lambda x=x: x)() for name, x in model.named_parameters()}
        self.after.append({name: x.detach().clone() for name, x in whole.items()})

    def stood_still(self) -> list[bool]:
        """Return, for each step, whether it left all weights unchanged."""
        return [
            all(torch.equal(now[name].nan_to_num(9.0), before[name].nan_to_num(9.0)) for name in now)
            for before, now in zip(self.after, self.after[1:], strict=False)
        ]

    def are_nan(self) -> int:
        """Count the weights that are NaN in the end, except the word's own."""
        return sum(int(x.isnan().sum()) for name, x in self.after[-1].items() if "embed" not in name)


def trained(name: str, library: Any, model: str, output: Path, rank: Rank | None = None, **changes: Any) -> Weights:
    weights = Weights()
    if name == "grpo":
        changes["rollout_func"] = scripted_rollout  # a policy that gives NaN cannot be sampled from
    trainer = build(name, library, model, output, save_strategy="no", **changes)
    trainer.add_callback(weights)
    spoil(trainer, name)
    if rank is not None:
        weights.look = lambda: rank.check(trainer)
    trainer.train()
    return weights


APART = {"padding_free": False, "share_prompts": False}  # in a packed row, a NaN spreads to the others


@pytest.mark.parametrize("name", ["dpo", "grpo"])
def test_skip_skips_the_optimizer_step_and_continues(
    name: str, workshop: Workshop, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = workshop.model("untied")
    with caplog.at_level("WARNING", logger="trl_ext"):
        weights = trained(name, trl_ext, model, tmp_path, on_non_finite_loss="skip", **APART)
    still = weights.stood_still()
    warned = [line.getMessage() for line in caplog.records if "All ranks skip this optimizer step" in line.getMessage()]
    assert 0 < sum(still) < len(still)
    assert len(warned) >= sum(still)
    assert all("(policy" in line and "of the prompt" in line for line in warned)
    assert weights.are_nan() == 0


@pytest.mark.parametrize("name", ["dpo", "grpo"])
def test_stock_trl_ends_with_nan_weights(name: str, workshop: Workshop, tmp_path: Path) -> None:
    assert trained(name, trl, workshop.model("untied"), tmp_path).are_nan() > 1000


def test_stop_names_row_and_pass(workshop: Workshop, tmp_path: Path) -> None:
    with pytest.raises(FloatingPointError, match=r"in step \d+\. Rank 0: row \d \(policy.*\) of the prompt 'w\d+"):
        trained("dpo", trl_ext, workshop.model("untied"), tmp_path, on_non_finite_loss="stop", **APART)


def test_compute_metrics_still_gets_logits(workshop: Workshop, tmp_path: Path) -> None:
    trainer = build("dpo", trl_ext, workshop.model("untied"), tmp_path, on_non_finite_loss="stop", save_strategy="no")
    trainer.compute_metrics = lambda seen: {"classes": seen.predictions.shape[-1]}
    with pytest.warns(FutureWarning, match="return_outputs"):
        found = trainer.evaluate(preferences(4, seed=3))
    assert found["eval_classes"] == trainer.model.config.vocab_size


def unbounded(completions: list[str], **_: Any) -> list[float]:
    return [math.inf if i % 4 == 1 else float(i) for i, _ in enumerate(completions)]


def test_a_reward_is_named(workshop: Workshop, tmp_path: Path) -> None:
    changes = {"reward_funcs": unbounded, "scale_rewards": "none", "beta": 0.0, "loss_type": "grpo"}
    trainer = build("grpo", trl_ext, workshop.model("untied"), tmp_path, on_non_finite_loss="stop", **changes)
    with pytest.raises(FloatingPointError, match=r"row \d \(reward\) of the prompt"):
        trainer.train()


def test_rows_are_named_by_the_pass_that_came_first() -> None:
    tokens = torch.tensor([[True, True], [True, False], [True, True], [True, True]])
    policy = torch.tensor([[0.0, math.nan], [0.0, math.nan], [0.0, 0.0], [0.0, 0.0]])
    reference = torch.tensor([[0.0, math.nan], [0.0, 0.0], [-math.inf, 0.0], [0.0, 0.0]])
    advantages = torch.tensor([1.0, 2.0, 3.0, torch.finfo(torch.float32).max])
    values = {"policy": policy, "none": None, "reference": reference, "reward": advantages}
    assert not_finite_rows(values, tokens) == {0: ["policy"], 2: ["reference"], 3: ["reward"]}


def test_an_engine_that_cannot_skip_a_step_is_refused(workshop: Workshop, tmp_path: Path) -> None:
    assert why_not_skipped(engine=None, precision="bf16", optimizer="adamw_torch") is None
    assert why_not_skipped(engine="FSDP2", precision="no", optimizer="adamw_torch") is None
    assert "DeepSpeed ZeRO-2" in str(why_not_skipped(engine="DeepSpeed ZeRO-2", precision="no", optimizer="sgd"))
    assert "lomo" in str(why_not_skipped(engine=None, precision="no", optimizer="lomo"))
    assert "fp16" in str(why_not_skipped(engine="DDP", precision="fp16", optimizer="sgd"))
    model = workshop.model("untied")
    with pytest.raises(ValueError, match=r"'skip'. is not supported here: the optimizer `galore_adamw_layerwise`"):
        build("dpo", trl_ext, model, tmp_path, on_non_finite_loss="skip", optim="galore_adamw_layerwise")
    with pytest.raises(ValueError, match="`on_non_finite_loss` must be None or one of"):
        build("dpo", trl_ext, model, tmp_path, on_non_finite_loss="warn")


# Only one of several ranks has the word


def on_ranks(rank: Rank, name: str, asked: str) -> tuple[list[bool], int, str]:
    output = rank.folder / f"{name}-{asked}-{rank.index}"
    try:
        changes: dict[str, Any] = {"use_cpu": False, "on_non_finite_loss": asked, "num_train_epochs": 1, **APART}
        if name == "grpo":
            changes |= {"steps_per_generation": 2, "num_iterations": 1}
        weights = trained(name, trl_ext, os.environ["TINY_MODEL"], output, rank, **changes)
    except FloatingPointError as error:
        return [], 0, str(error)
    return weights.stood_still(), weights.are_nan(), ""


CASES = {
    f"{name}-{asked}": partial(on_ranks, name=name, asked=asked)
    for name in ("dpo", "grpo")
    for asked in ("skip", "stop")
}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_all_ranks_skip_the_step_if_one_loss_is_not_finite(
    engine: str, workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINY_MODEL", workshop.model("untied"))
    for case, (first, second) in run_on_ranks(
        __file__, ["dpo-skip", "grpo-skip", "dpo-stop"], engine, tmp_path
    ).items():
        assert first == second, case
        still, nan, error = first
        if case.endswith("skip"):
            assert any(still), case
            assert nan == 0, case
        else:
            assert "Rank " in error, case
