"""A group's rows share micro-batches, within one optimizer step only: fewer prompts, stock TRL's gradients and draws.

Rows are told apart, and prompts counted, by the tokens that TRL's loss is given; windows by a hook on the optimizer.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TrainerCallback

import trl_ext
from drop_in_cases import GRPO_LOSSES, Case
from metric_table import rows as metric_rows
from run_losses import Record, Trainers, build
from same_training import tensors_differ
from tiny import Workshop
from trl_ext.passes.micro_batches import FedTokens, grouped_order, slices_of_a_unit

STOCK = Trainers.of(trl)
OURS = Trainers.of(trl_ext)

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
@pytest.mark.parametrize("loss_type", TOGETHER)
def test_the_gradient_of_a_window_is_stock_trls(
    loss_type: str, level: str, workshop: Workshop, tmp_path: Path
) -> None:
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


@pytest.mark.parametrize(
    "fields",
    [
        {"importance_sampling_level": "sequence", "beta": 0.1, "setup": "ref_model"},
        {"beta": 0.1, "setup": "lora", "iterations": 2},
        {"off_policy_mask_threshold": 0.01, "iterations": 2},
    ],
    ids=["gspo-beta", "lora", "off-policy-mask"],
)
def test_terms_of_single_rows_do_not_matter(fields: dict[str, Any], workshop: Workshop, tmp_path: Path) -> None:
    ours, _ = both(case_of(2, 2, **fields), workshop, tmp_path)
    assert set(ours.prompts) == {1}


# Accumulation, slices of a generation batch, iterations -> slices in a unit. 4 rows a slice, groups of 4.
UNITS = {
    (4, 4, 1): 4,
    (2, 4, 1): 2,
    (4, 2, 1): 2,
    (6, 4, 1): 2,
    (3, 4, 1): 1,
    (4, 2, 2): 2,
    (2, 4, 2): 2,
    (3, 6, 1): 3,
}


@pytest.mark.parametrize("schedule", UNITS, ids=lambda schedule: "-".join(map(str, schedule)))
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
    assert (ours.micro_batches == stock.micro_batches) == (unit == 1)
    # The fewest that are possible, in each unit: of c groups in s slices
    for seen in (ours, stock):
        of_units = [
            (sum(seen.prompts[i : i + unit]), _fewest(seen.micro_batches[i : i + unit]))
            for i in range(0, len(seen.prompts), unit)
        ]
        if seen is ours:
            assert all(met == fewest for met, fewest in of_units)
        elif unit > 1:
            assert any(met > fewest for met, fewest in of_units)


def _fewest(slices: list[list[tuple[Row, Row]]]) -> int:
    """Fewest (slice, prompt) pairs: with c groups in s slices, c + s less the most sets that fill slices exactly."""
    capacity = len(slices[0])
    sizes = list(Counter(prompt for rows in slices for prompt, _ in rows).values())
    return len(sizes) + len(slices) - _most_sets(tuple(size % capacity for size in sizes), capacity)


def _most_sets(residues: tuple[int, ...], capacity: int) -> int:
    """The most sets into which `residues` can be parted so that `capacity` divides each sum."""
    if not residues:
        return 0
    first, others = residues[0], residues[1:]
    best = 0
    for count in range(len(others) + 1):
        for chosen in itertools.combinations(range(len(others)), count):
            if (first + sum(others[i] for i in chosen)) % capacity == 0:
                rest = tuple(x for i, x in enumerate(others) if i not in chosen)
                best = max(best, 1 + _most_sets(rest, capacity))
    return best
