"""GRPO's and RLOO's part of a checkpoint: the position in the generation cycle, and the completions not yet trained on.

TRL saves neither, so its resumed run samples completions for other prompts.
"""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch

from ..checkpoints.generation import SavedGeneration, position_in_data, read_generation, write_generation
from ..compat.sampled import Buffer
from ..distributed.ranks import Ranks
from ..planning.batch_keys import with_routes_on_host

logger = logging.getLogger("trl_ext")


class Trainer(Protocol):
    """The trainer members that are saved or compared."""

    accelerator: Any
    args: Any
    beta: float
    num_iterations: int
    state: Any


class GenerationCheckpoints:
    def __init__(self, trainer: Trainer, ranks: Ranks, buffer: Buffer) -> None:
        self.trainer = trainer
        self.ranks = ranks
        self.buffer = buffer

    def save(
        self,
        folder: Path,
        *,
        sampled_at_step: int = 0,
        sampler_is_older: bool = False,
        further_prompts: int = 0,
        options: dict[str, int] | None = None,
        lost: str | None = None,
    ) -> None:
        """Write this rank's part of a checkpoint, as described in `SavedGeneration`.

        Args:
            options (`dict[str, int]`, *optional*): more of the schedule, in addition to what both trainers have.
            lost (`str`, *optional*): why the completions of the buffer cannot be trained on later.
        """
        args = self.trainer.args
        if args.save_only_model:
            return
        slices = self.buffer.mid_cycle_slices()
        saved_generation = SavedGeneration(
            micro_batch=self.buffer.trained,
            sampled_at_step=sampled_at_step,
            sampler_is_older=sampler_is_older,
            further_prompts=further_prompts,
            schedule=self._schedule(options),
            slices=slices if lost is None else None,
            lost=lost if slices is not None else None,
        )
        try:
            write_generation(folder, args.process_index, saved_generation)
        except TypeError as error:
            lost = f"they cannot be saved: {error}"
            write_generation(folder, args.process_index, replace(saved_generation, slices=None, lost=lost))

    def read(self, folder: Path, options: dict[str, int] | None = None) -> SavedGeneration | None:
        """Return this rank's part of a checkpoint; `None`, after a warning if completions are lost, if it is unusable.

        Either way, the buffer continues at the same prompt of the data set.
        """
        trainer = self.trainer
        args = trainer.args
        saved_generation = read_generation(folder, args.process_index, trainer.accelerator.device)
        if saved_generation is not None and saved_generation.slices is not None:
            slices = [with_routes_on_host(batch) for batch in saved_generation.slices]
            saved_generation = replace(saved_generation, slices=slices)
        epochs, micro_batch = position_in_data(
            trainer.state.global_step,
            args.gradient_accumulation_steps,
            self.buffer.micro_batches_of_an_epoch,
            epoch_begins_again=args.ignore_data_skip,
        )
        self.buffer.draw_orders_of(epochs)
        lost_reason = self._lost_reason(saved_generation, options)
        # Generation runs collectives, so all ranks continue with their completions, or all sample new ones
        is_lost = torch.tensor(int(lost_reason is not None), device=self.ranks.device)
        losing_ranks = int(self.ranks.world.reduce(is_lost, "sum"))
        if saved_generation is not None and not losing_ranks:
            self.buffer.continue_at(saved_generation.micro_batch, saved_generation.slices)
            return saved_generation
        self.buffer.continue_at(micro_batch, None)
        had_completions = saved_generation is not None and (
            saved_generation.slices is not None or saved_generation.lost is not None
        )
        if (had_completions and not args.ignore_data_skip) or self.buffer.in_mid_cycle:
            logger.warning(
                "Training resumes between two generations, but the completions that were not yet trained on are "
                f"lost: {lost_reason or 'another rank has lost its own'}. New ones are sampled for the same prompts "
                "with the checkpoint's weights."
            )
        return None

    def _schedule(self, options: dict[str, int] | None) -> dict[str, int]:
        args = self.trainer.args
        return (options or {}) | {
            "per_device_train_batch_size": args.per_device_train_batch_size,
            "gradient_accumulation_steps": args.gradient_accumulation_steps,
            "steps_per_generation": args.steps_per_generation,
            "num_iterations": self.trainer.num_iterations,
            "num_generations": args.num_generations,
            "processes": args.world_size,
            "KL term (beta is not 0)": int(self.trainer.beta != 0.0),
        }

    def _lost_reason(self, saved_generation: SavedGeneration | None, options: dict[str, int] | None) -> str | None:
        if self.trainer.args.ignore_data_skip:
            return "with `ignore_data_skip` the epoch starts again"
        if saved_generation is None:
            return "the checkpoint lacks them, for example because stock TRL wrote it, or `save_only_model` was set"
        now = self._schedule(options)
        before = saved_generation.schedule
        names = [x for x in {**now, **before} if now.get(x) != before.get(x)]
        changes = [f"{x} was {before.get(x, 0)} and is {now.get(x, 0)}" for x in names]
        return saved_generation.lost if not changes else "; ".join(changes)
