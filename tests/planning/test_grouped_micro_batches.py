"""A group's rows share micro-batches, within one optimizer step only: fewer prompts, stock TRL's gradients and draws.

Rows are told apart, and prompts counted, by the tokens that TRL's loss is given; windows by a hook on the optimizer.
"""

import itertools
import math
import sys
from collections import Counter
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from transformers import TrainerCallback

import trl_ext
from drop_in_cases import GRPO_LOSSES, Case
from metric_table import counts_work
from metric_table import rows as metric_rows
from run_losses import Record, Trainers, build
from tiers import fast_first
from tiny import Workshop
from training_comparison import tensors_differ

STOCK = Trainers.of(trl)
OURS = Trainers.of(trl_ext)
LIBRARIES = {"stock": STOCK, "ours": OURS}

Row = tuple[int, ...]


@dataclass
class Seen:
    """What a training run showed: rows as (prompt, completion)."""

    micro_batches: list[list[tuple[Row, Row]]] = field(default_factory=list)
    windows: list[Counter[tuple[Row, Row]]] = field(default_factory=list)  # of each optimizer step
    record: Record = field(default_factory=Record)
    random_state: torch.Tensor = field(default_factory=torch.Tensor)

    @property
    def prompts(self) -> list[int]:
        """Different prompts in each micro-batch."""
        return [len({prompt for prompt, _ in rows}) for rows in self.micro_batches]


class _Windows(TrainerCallback):
    def __init__(self, seen: Seen):
        self.seen = seen

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any, **kwargs: Any) -> None:
        first = len(self.seen.micro_batches)

        def stepped(*_: Any) -> None:
            nonlocal first
            rows = self.seen.micro_batches[first:]
            self.seen.windows.append(Counter(itertools.chain.from_iterable(rows)))
            first = len(self.seen.micro_batches)

        getattr(optimizer, "optimizer", optimizer).register_step_post_hook(stepped)


def _watching(trainer: type, seen: Seen) -> type:
    class Watching(trainer):
        def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
            if self.model.training:
                seen.micro_batches.append(
                    [
                        tuple(
                            tuple(ids[mask.bool()].tolist())
                            for ids, mask in ((prompt, prompt_mask), (completion, completion_mask))
                        )
                        for prompt, prompt_mask, completion, completion_mask in zip(
                            *(inputs[f"{of}_{what}"] for of in ("prompt", "completion") for what in ("ids", "mask")),
                            strict=True,
                        )
                    ]
                )
            return super().compute_loss(model, inputs, *args, **kwargs)

    Watching.__name__ = trainer.__name__
    return Watching


def run(case: Case, trainers: Trainers, workshop: Workshop, folder: Path, **resume: Any) -> Seen:
    seen = Seen()
    trainers = replace(trainers, grpo_trainer=_watching(trainers.grpo_trainer, seen))
    trainer = build(case, trainers, workshop, str(folder), seen.record)
    trainer.add_callback(_Windows(seen))
    trainer.train(**resume)
    seen.random_state = torch.random.get_rng_state()
    return seen


def case_of(
    accumulation: int,
    generation: int,
    iterations: int = 1,
    steps: int = 2,
    rows: int = 4,
    keep: bool | None = True,
    **fields: Any,
) -> Case:
    """Micro-batches of `rows` rows in groups of 4; `steps` of -1 trains for the epochs of the config."""
    keys = ("setup", "model", "rewards", "prompts", "streaming", "lora", "rollout")
    kwargs = {key: fields.pop(key) for key in keys if key in fields}
    config = {
        "per_device_train_batch_size": rows,
        "num_generations": 4,
        "gradient_accumulation_steps": accumulation,
        "steps_per_generation": generation,
        "num_iterations": iterations,
        **fields,
    }
    ours = {"keep_groups_together": keep}
    name = f"groups-{accumulation}-{generation}-{iterations}"
    return Case(name, "grpo", config=config, steps=steps, learning_rate=0.02, ours=ours, **kwargs)


def both(case: Case, workshop: Workshop, folder: Path) -> tuple[Seen, Seen]:
    """Ours and stock's run: the same rows for each optimizer step, the same gradients, weights and random draws."""
    stock = run(case, STOCK, workshop, folder / "stock")
    ours = run(case, OURS, workshop, folder / "ours")
    assert_same_steps(ours, stock)
    return ours, stock


def assert_same_steps(ours: Seen, stock: Seen) -> None:
    assert ours.windows == stock.windows
    assert stock.windows
    assert torch.equal(ours.random_state, stock.random_state)
    assert len(ours.micro_batches) == len(stock.micro_batches)
    assert len(ours.record.gradients) == len(stock.record.gradients) == len(stock.windows)
    wrong = tensors_differ("weight update", ours.record.updates, stock.record.updates)
    for i, (got, want) in enumerate(zip(ours.record.gradients, stock.record.gradients, strict=True)):
        assert any(x is not None and x.abs().max() > 0 for x in want.values())
        wrong += tensors_differ(f"gradient of step {i}", got, want)
    assert not wrong, "\n".join(wrong[:20])


TOGETHER = {name: extra for name, extra in GRPO_LOSSES.items() if name != "bnpo"}


@pytest.mark.parametrize("level", ["token", pytest.param("sequence", marks=pytest.mark.slow)])
@pytest.mark.parametrize("loss_type", fast_first(TOGETHER, "grpo", "dapo", "vespo"))
def test_the_gradient_of_a_window_is_stock_trls(loss_type: str, level: str, workshop: Workshop, tmp_path: Path) -> None:
    off_policy = {"iterations": 2} if loss_type in ("grpo", "vespo") else {}
    case = case_of(
        2,
        2,
        **off_policy,
        loss_type=loss_type,
        importance_sampling_level=level,
        **TOGETHER[loss_type],
    )
    ours, stock = both(case, workshop, tmp_path)
    assert ours.prompts == [1] * 4
    assert sum(stock.prompts) > 4


OF_ROWS: dict[str, dict[str, Any]] = {
    "gspo-beta": {"importance_sampling_level": "sequence", "beta": 0.1, "setup": "ref_model"},
    "lora": {"beta": 0.1, "setup": "lora", "iterations": 2},
    "off-policy-mask": {"off_policy_mask_threshold": 0.01, "iterations": 2},
}


@pytest.mark.parametrize("name", fast_first(OF_ROWS, "gspo-beta"))
def test_terms_of_single_rows_do_not_matter(name: str, workshop: Workshop, tmp_path: Path) -> None:
    ours, _ = both(case_of(2, 2, **OF_ROWS[name]), workshop, tmp_path)
    assert set(ours.prompts) == {1}


# Accumulation, slices of a generation batch, iterations -> slices in a unit. 4 rows a slice, groups of 4.
UNITS = {
    (4, 4, 1): 4,
    (2, 4, 1): 2,
    (4, 2, 1): 2,
    (6, 4, 1): 2,
    (4, 2, 2): 2,
    (2, 4, 2): 2,
    (3, 6, 1): 3,
}


@pytest.mark.parametrize(
    "schedule",
    fast_first(UNITS, (2, 4, 1), (6, 4, 1), (4, 2, 2)),
    ids=lambda schedule: "-".join(map(str, schedule)),
)
def test_rows_change_places_within_one_optimizer_step(
    schedule: tuple[int, int, int], workshop: Workshop, tmp_path: Path
) -> None:
    """Two epochs, each with a last window that is short, where the schedule makes one."""
    accumulation, generation, iterations = schedule
    case = case_of(
        accumulation,
        generation,
        iterations,
        steps=-1,
        prompts=2 * generation if generation > 2 else 6,
        num_train_epochs=2,
        max_completion_length=3,
    )
    ours, stock = both(case, workshop, tmp_path)
    unit = UNITS[schedule]
    # In each unit few prompts, as fewer groups are cut than there are slices. Or stock's order, where memory wants it
    for i in range(0, len(ours.prompts), unit):
        ours_of_unit, stock_of_unit = (seen.micro_batches[i : i + unit] for seen in (ours, stock))
        if ours_of_unit != stock_of_unit:
            groups = Counter(prompt for rows in ours_of_unit for prompt, _ in rows)
            whole = sum(math.ceil(rows / len(ours_of_unit[0])) for rows in groups.values())
            assert sum(ours.prompts[i : i + unit]) <= min(whole + unit - 1, sum(stock.prompts[i : i + unit]))
    assert sum(ours.prompts) < sum(stock.prompts)


def _cut_short(trainers: Trainers, micro_batches: int) -> Trainers:
    """The same trainers, whose own sampler ends an epoch in the middle of a generation batch."""

    class CutShort(trainers.grpo_trainer):
        def _get_train_sampler(self, dataset: Any = None) -> list[int]:
            rows = self.args.generation_batch_size
            return list(super()._get_train_sampler(dataset))[: micro_batches * rows]

    CutShort.__name__ = trainers.grpo_trainer.__name__
    return replace(trainers, grpo_trainer=CutShort)


@pytest.mark.parametrize("micro_batches", fast_first([5, 6], 5))
def test_an_epoch_that_ends_within_a_generation_batch_moves_the_windows(
    micro_batches: int, workshop: Workshop, tmp_path: Path
) -> None:
    case = case_of(4, 4, steps=-1, num_train_epochs=3, prompts=8)
    stock, ours = (
        run(case, _cut_short(trainers, micro_batches), workshop, tmp_path / name)
        for name, trainers in (("stock", STOCK), ("ours", OURS))
    )
    assert len(stock.micro_batches) == 3 * micro_batches
    assert len(stock.windows) == 6
    # Not the gradients: slices meet other weights than sampled them, which stock does not notice
    assert ours.windows == stock.windows
    assert torch.equal(ours.random_state, stock.random_state)
    assert (ours.micro_batches == stock.micro_batches) == (micro_batches == 5)


class _EndAfter(TrainerCallback):
    """Ends the epoch in the middle of a window: the next window begins with an odd micro-batch."""

    def __init__(self, micro_batches: int):
        self.left = micro_batches

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.left -= 1
        control.should_epoch_stop = self.left == 0


@pytest.mark.parametrize("micro_batches", fast_first([1, 2], 1))
def test_an_epoch_that_a_callback_ends_moves_the_windows(
    micro_batches: int, workshop: Workshop, tmp_path: Path
) -> None:
    case = case_of(4, 4, steps=-1, num_train_epochs=3, prompts=8)
    seen = []
    for name, trainers in (("stock", STOCK), ("ours", OURS)):

        class Ended(trainers.grpo_trainer):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                self.add_callback(_EndAfter(micro_batches))

        Ended.__name__ = trainers.grpo_trainer.__name__
        seen.append(run(case, replace(trainers, grpo_trainer=Ended), workshop, tmp_path / name))
    stock, ours = seen
    assert len(stock.micro_batches) == micro_batches + 16
    assert ours.windows == stock.windows
    assert torch.equal(ours.random_state, stock.random_state)


@pytest.mark.slow
@pytest.mark.parametrize("saved_at", [2, 3])  # between two generations, and within the use of one
def test_training_that_is_resumed_within_an_epoch_meets_the_same_rows(
    saved_at: int, workshop: Workshop, tmp_path: Path
) -> None:
    """Those of ours that ran through: what stock TRL resumes with in mid-cycle it has sampled anew."""
    case = case_of(2, 4, steps=5, prompts=8, save_strategy="steps", save_steps=saved_at)
    ours, stock = both(case, workshop, tmp_path)
    checkpoint = {name: str(tmp_path / name / f"checkpoint-{saved_at}") for name in LIBRARIES}
    resumed = run(case, OURS, workshop, tmp_path / "ours", resume_from_checkpoint=checkpoint["ours"])
    assert resumed.windows == ours.windows[saved_at:]
    assert resumed.micro_batches == ours.micro_batches[2 * saved_at :]
    assert torch.equal(resumed.random_state, ours.random_state)
    for got, want in zip(resumed.record.gradients, ours.record.gradients[saved_at:], strict=True):
        assert not tensors_differ("gradient", got, want)
    stock_resumed = run(case, STOCK, workshop, tmp_path / "stock", resume_from_checkpoint=checkpoint["stock"])
    assert (stock_resumed.windows == stock.windows[saved_at:]) is (saved_at == 2)


# Why rows stay where they are, beside the words of the plan
STAY = {
    "bnpo": ({"loss_type": "bnpo"}, "bnpo"),
    "entropy bonus": ({"entropy_coef": 0.05}, "entropy bonus"),
    "adaptive entropy": ({"use_adaptive_entropy": True, "entropy_target": 10.0}, "entropy bonus"),
    "router loss": ({"model": "experts"}, "router loss"),
    "entropy quantile": ({"top_entropy_quantile": 0.2}, "top_entropy_quantile=0.2"),
    "dropout": ({"setup": "lora", "lora": {"lora_dropout": 0.1}}, "not shared in training"),
    "no step in common": (
        {"gradient_accumulation_steps": 3, "steps_per_generation": 4},
        "`gradient_accumulation_steps=3`, `steps_per_generation=4`",
    ),
    "streaming": ({"streaming": True, "prompts": 8}, "streaming data set"),
}


@pytest.mark.parametrize("name", fast_first(STAY, "bnpo", "dropout", "no step in common", "streaming"))
def test_trls_order_stays_where_rows_cannot_move(name: str, workshop: Workshop, tmp_path: Path) -> None:
    fields, words = STAY[name]
    with pytest.raises(ValueError, match=f"keep_groups_together=True.*{words}"):
        build(case_of(2, 2, **fields), OURS, workshop, str(tmp_path), Record())
    trainer = plain(build(case_of(2, 2, keep=None, **fields), OURS, workshop, str(tmp_path), Record()))
    decision = trainer.explain()["micro-batches"]
    assert decision.action == "skip"
    assert words in decision.reason
    batch: dict[str, Any] = {}
    assert trainer._grpo_generation.reorder(batch) is batch


def plain(trainer: Any) -> Any:
    """The trainer without what the tests record with: then `None` is decided for our class itself."""
    trainer.__class__ = OURS.grpo_trainer
    return trainer


def _same(method: Any, *args: Any, **kwargs: Any) -> Any:
    return method(*args, **kwargs)


def _of_its_own(method: str) -> type:
    def same(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(subclass, self), method)(*args, **kwargs)

    subclass = type("GRPOTrainer", (OURS.grpo_trainer,), {method: same})
    return subclass


@pytest.mark.parametrize("method", ["compute_loss", "_prepare_inputs", "training_step"])
@pytest.mark.parametrize("where", ["subclass", "instance"])
def test_trls_order_stays_where_other_code_is_given_micro_batches(
    where: str, method: str, workshop: Workshop, tmp_path: Path
) -> None:
    def decided(keep: bool | None) -> tuple[str, str]:
        trainer = plain(build(case_of(2, 2, keep=keep), OURS, workshop, str(tmp_path), Record()))
        assert trainer._make_plan().keeps_groups_together
        if where == "subclass":
            trainer.__class__ = _of_its_own(method)
        else:
            setattr(trainer, method, partial(_same, getattr(trainer, method)))
        decision = trainer._make_plan()["micro-batches"]
        return decision.action, decision.reason

    action, reason = decided(None)
    assert action == "skip"
    assert f"overrides `{method}`" in reason
    assert decided(True)[0] == "run"


def test_a_loss_scaled_by_micro_batch_trains_as_with_stock_trl(workshop: Workshop, tmp_path: Path) -> None:
    """Its gradient depends on which rows share a micro-batch, which no argument says."""

    def scaled(trainer: type) -> type:
        class Scaled(trainer):
            def compute_loss(self, *args: Any, **kwargs: Any) -> torch.Tensor:
                loss = super().compute_loss(*args, **kwargs)
                return loss * (1 + loss.detach().abs())

        Scaled.__name__ = trainer.__name__
        return Scaled

    stock, ours = (
        run(
            case_of(2, 2, keep=None, loss_type="grpo"),
            replace(trainers, grpo_trainer=scaled(trainers.grpo_trainer)),
            workshop,
            tmp_path / name,
        )
        for name, trainers in LIBRARIES.items()
    )
    assert ours.micro_batches == stock.micro_batches
    assert_same_steps(ours, stock)


def _with_own_loss(trainer: type) -> type:
    class OwnLoss(trainer):
        def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
            return super()._compute_loss(model, inputs)

    return OwnLoss


def test_the_plan_says_what_becomes_of_the_order(workshop: Workshop, tmp_path: Path) -> None:
    def decided(case: Case, trainers: Trainers = OURS) -> tuple[str, str]:
        decision = build(case, trainers, workshop, str(tmp_path), Record()).explain()["micro-batches"]
        return decision.action, decision.reason

    action, reason = decided(case_of(4, 2))
    assert action == "run"
    assert "kept together" in reason
    order = "Completions stay in TRL's order"
    assert decided(case_of(4, 2, keep=False)) == ("skip", f"{order}: `keep_groups_together=False`.")
    assert decided(case_of(2, 1)) == ("skip", f"{order}: a generation batch is one micro-batch.")
    own = replace(OURS, grpo_trainer=_with_own_loss(OURS.grpo_trainer))
    action, reason = decided(case_of(4, 2, keep=None), own)
    assert action == "skip"
    assert "overrides the loss" in reason
    with pytest.raises(ValueError, match=r"keep_groups_together=True.*overrides the loss"):
        decided(case_of(4, 2), own)
    trainer = build(case_of(4, 2), OURS, workshop, str(tmp_path), Record())
    trainer._compute_loss = partial(_same, trainer._compute_loss)
    with pytest.raises(ValueError, match=r"keep_groups_together=True.*overrides the loss"):
        trainer.explain()


def test_rows_that_are_not_fed_fill_up(workshop: Workshop, tmp_path: Path) -> None:
    """Two live groups of 4 and two dead ones, in two micro-batches of 8: each has one live prompt."""
    case = case_of(2, 2, rows=8, rewards=("half_dead",), shuffle_dataset=False)
    ours, stock = both(case, workshop, tmp_path)
    live = [[len(_live(rows)) for rows in seen.micro_batches] for seen in (ours, stock)]
    assert live[0] == [1, 1] * 2
    assert sum(live[1]) > 4


def _live(rows: list[tuple[Row, Row]]) -> set[Row]:
    """The prompts of even rows of the data set, whose first token is the row's number and 3."""
    return {prompt for prompt, _ in rows if (prompt[0] - 3) % 2 == 0}


def test_metrics_of_micro_batches_are_those_that_the_page_names(workshop: Workshop, tmp_path: Path) -> None:
    """What the logs show with the groups kept together: the page names every metric that is another."""
    patterns = [metric for metric, when in metric_rows() if when == WHEN]
    differ: set[str] = set()
    for fields in (
        {"beta": 0.1, "setup": "ref_model", "iterations": 2, "epsilon": 0.001},
        {"loss_type": "cispo", "iterations": 2, "epsilon_high": 1.0},
        {"loss_type": "vespo", "iterations": 2},
        {"importance_sampling_level": "sequence", "iterations": 2, "epsilon": 1e-5},
    ):
        ours, stock = both(case_of(2, 2, **fields), workshop, tmp_path)
        for got, want in zip(ours.record.logs, stock.record.logs, strict=True):
            assert {name for name in got if not counts_work(name)} == want.keys()
            differ |= {name for name, x in want.items() if not math.isclose(got[name], x, rel_tol=1e-5, abs_tol=1e-6)}
    assert all(any(fnmatchcase(name, pattern) for pattern in patterns) for name in differ), differ
    assert all(any(fnmatchcase(name, pattern) for name in differ) for pattern in patterns), differ


WHEN = "training, groups kept together"


def test_a_batch_with_images_stays_as_it_is(workshop: Workshop, tmp_path: Path) -> None:
    trainer = build(case_of(2, 2), OURS, workshop, str(tmp_path), Record())
    batch = {"pixel_values": torch.zeros(8)}
    assert trainer._grpo_generation.reorder(batch) is batch


def test_trls_shuffle_is_put_back(workshop: Workshop, tmp_path: Path) -> None:
    module = sys.modules[trl.GRPOTrainer.__module__]
    original = module.shuffle_sequence_dict
    run(case_of(2, 2, steps=1), OURS, workshop, tmp_path)
    assert module.shuffle_sequence_dict is original


def test_fewer_tokens_are_fed(workshop: Workshop, tmp_path: Path) -> None:
    """On its own, too."""
    fed = {}
    for keep in (None, True, False):
        record = Record()
        plain(build(case_of(2, 2, keep=keep), OURS, workshop, str(tmp_path), record)).train()
        fed[keep] = sum(feed.tokens for feed in record.feeds if feed.grad)
    assert fed[None] == fed[True] < fed[False]
