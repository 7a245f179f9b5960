"""A group of ranks that do the same is one process to TRL, and still so many to whoever writes a checkpoint."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from ..engines.tensor_parallel import OncePerCopy, TensorParallel


class CountedOnceMixin:
    """Mixed in before a TRL trainer.

    Accelerate asks the accelerator it is handed which rank this is and how many there are, to say who writes a file
    and who is sent what was read (accelerate 1.15, utils/fsdp_utils.py). There a group is no rank.
    """

    accelerator: Any

    def _count_once(self, ranks: TensorParallel) -> None:
        """From here on the group `ranks` counts as one process. Called when transformers has made the accelerator."""
        self.accelerator = OncePerCopy(self.accelerator, ranks)
        # Transformers has bound the other's already, for the first evaluation
        by_objects = self.args.eval_use_gather_object  # type: ignore[attr-defined]
        self.gather_function = partial(self.accelerator.gather_for_metrics, use_gather_object=by_objects)

    def _ranks_in_step(self) -> TensorParallel | None:
        """The group of ranks with which this one must do the same; None where it is alone, or as long as it is."""
        return None

    def _same_hits(self, found: Any) -> Any:
        """What the store of reference log-probs holds: as the first rank found it, so that a group is of one mind."""
        ranks = self._ranks_in_step()
        return found if ranks is None else ranks.shared(found, self.accelerator.device)

    @contextmanager
    def _as_every_rank(self) -> Iterator[None]:
        held = self.accelerator
        if isinstance(held, OncePerCopy):
            self.accelerator = held.of_every_rank
        try:
            yield
        finally:
            self.accelerator = held

    def save_model(self, *positional: Any, **keywords: Any) -> None:
        """Transformers' own."""
        with self._as_every_rank():
            super().save_model(*positional, **keywords)  # type: ignore[misc]

    def _save_checkpoint(self, *positional: Any, **keywords: Any) -> None:
        with self._as_every_rank():
            super()._save_checkpoint(*positional, **keywords)  # type: ignore[misc]

    def _load_from_checkpoint(self, *positional: Any, **keywords: Any) -> None:
        with self._as_every_rank():
            super()._load_from_checkpoint(*positional, **keywords)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, *positional: Any, **keywords: Any) -> None:
        with self._as_every_rank():
            super()._load_optimizer_and_scheduler(*positional, **keywords)  # type: ignore[misc]

    def _load_best_model(self, *positional: Any, **keywords: Any) -> None:
        with self._as_every_rank():
            super()._load_best_model(*positional, **keywords)  # type: ignore[misc]


def count_generation_batch(args: Any, ranks: TensorParallel, asked: str) -> None:
    """Have GRPO's `args` count the groups that `asked` for: TRL's config takes every rank for one with its own prompts.

    Raises:
        `ValueError`: the completions of a prompt do not fit into a generation batch.
    """
    args.generation_batch_size = args.per_device_train_batch_size * ranks.copies * args.steps_per_generation
    sizes = [("train", args.generation_batch_size, args.num_generations)]
    if args.eval_strategy != "no":
        evaluated = args.per_device_eval_batch_size * ranks.copies
        sizes.append(("eval", evaluated, args.num_generations_eval or args.num_generations))
    for mode, rows, generations in sizes:
        if rows % generations:
            raise ValueError(
                f"With {asked} each {ranks.size} ranks form a group and get the same prompts. A generation batch has "
                f"{rows} rows then (`per_device_{mode}_batch_size` on {ranks.copies} groups), and must be a multiple "
                f"of `num_generations`, which is {generations}. Multiply `per_device_{mode}_batch_size` by "
                f"{ranks.size} to have as many rows as the config asks for."
            )
