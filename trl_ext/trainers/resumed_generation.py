"""GRPO resumed within a cycle of generation: the completions still to be trained on are part of a checkpoint."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from ..checkpoints import SavedGeneration, position_in_data, read_generation, write_generation
from ..passes.visit import with_scored
from .grpo_passes import GRPOPassesMixin

logger = logging.getLogger("trl_ext")


class ResumedGenerationMixin(GRPOPassesMixin):
    """Mixed in before `CompleteCheckpointsMixin` and TRL's `GRPOTrainer`."""

    _resumes_from: Path | None
    _is_finished: Callable[[], bool]

    def __init__(self, *positional: Any, **keywords: Any) -> None:
        super().__init__(*positional, **keywords)
        self.add_callback(_ResumesGeneration(self))  # type: ignore[attr-defined]

    def _save_beside(self, folder: Path) -> None:
        super()._save_beside(folder)  # type: ignore[misc]
        if self.args.save_only_model:
            return
        trainer: Any = self
        slices, lost = self._slices_to_save()
        saved = SavedGeneration(
            micro_batch=self._micro_batches_trained(),
            sampled_at_step=self._sampled_at_step,
            further_prompts=0 if self._further_prompts is None else self._further_prompts.taken,
            schedule=self._schedule(),
            slices=slices,
            lost=lost,
        )
        rank = trainer.args.process_index
        try:
            write_generation(folder, rank, saved)
        except TypeError as error:
            write_generation(folder, rank, replace(saved, slices=None, lost=f"they cannot be saved: {error}"))

    def _slices_to_save(self) -> tuple[list[dict[str, Any]] | None, str | None]:
        """The generation buffer, where it will be visited again; and why it cannot be."""
        slices = self._slices_in_mid_cycle()
        if slices is None:
            return None, None
        unscored = any("old_per_token_logps" not in x for x in self._slices_to_come())
        if unscored and not self.plan.trust_sampler:
            return None, "training had ended, so they were not scored with the weights they were sampled with"
        return slices, None

    def _schedule(self) -> dict[str, int]:
        trainer: Any = self
        args = trainer.args
        return {
            "per_device_train_batch_size": args.per_device_train_batch_size,
            "gradient_accumulation_steps": args.gradient_accumulation_steps,
            "steps_per_generation": args.steps_per_generation,
            "num_iterations": trainer.num_iterations,
            "num_generations": trainer.num_generations,
            "processes": args.world_size,
            "KL term (beta is not 0)": int(trainer.beta != 0.0),
        }

    def _resume_generation(self, folder: Path) -> None:
        """Go on where the checkpoint in `folder` stood. Called on every rank, before the first step."""
        trainer: Any = self
        args = trainer.args
        saved = read_generation(folder, args.process_index, trainer.accelerator.device)
        epochs, micro_batch = position_in_data(
            trainer.state.global_step,
            args.gradient_accumulation_steps,
            self._micro_batches_of_an_epoch(),
            epoch_begins_again=args.ignore_data_skip,
        )
        self._draw_orders_of(epochs)
        problem = self._why_not(saved)
        with self._as_every_rank():
            # Ranks that generate wait for each other
            problems = self._on_all_ranks(torch.tensor(int(problem is not None), device=trainer.accelerator.device))
        if saved is None or problems:
            self._continue_at(micro_batch, None)
            left_over = saved is not None and not (saved.slices is None and saved.lost is None)
            if (left_over and not args.ignore_data_skip) or self._in_mid_cycle():
                logger.warning(
                    "Training resumes between two generations, and the completions that were still to be trained on "
                    f"are lost: {problem or 'they are on another rank'}. For the same prompts others are sampled now, "
                    "from the weights of the checkpoint."
                )
            return
        slices = None if saved.slices is None else [with_scored(inputs) for inputs in saved.slices]
        self._continue_at(saved.micro_batch, slices)
        self._sampled_at_step = saved.sampled_at_step
        self._further_prompts = self._further_prompts_after(saved.further_prompts)

    def _why_not(self, saved: SavedGeneration | None) -> str | None:
        """Why completions cannot be taken from the checkpoint."""
        if self.args.ignore_data_skip:
            return "with `ignore_data_skip` the epoch begins again"
        if saved is None:
            return "the checkpoint lacks them, for example because `save_only_model` or stock TRL wrote it"
        now = self._schedule()
        changed = [f"{x} was {saved.schedule.get(x)} and is {now[x]}" for x in now if now[x] != saved.schedule.get(x)]
        return saved.lost if not changed else "; ".join(changed)


class _ResumesGeneration(TrainerCallback):
    def __init__(self, trainer: ResumedGenerationMixin) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.trainer._resumes_from is not None and not self.trainer._is_finished():
            self.trainer._resume_generation(self.trainer._resumes_from)
