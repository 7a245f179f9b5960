"""What GRPO and RLOO do with a generation batch: check its first rewards, find equal ones, and order its rows."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..compat.sampled import Buffer
from ..planning.micro_batches import micro_batches_per_step
from ..planning.non_finite import check_first_rewards
from ..planning.rows import rows_of_equal_rewards


def check_rewards_of_first_step(trainer: Any, rewards_BF: Tensor, bounds: Sequence[float | None] | None = None) -> None:
    """Raise `ValueError` if a completion of the first step has an infinite reward."""
    # Infinite rewards of any batch are the business of `on_non_finite_loss`, if it is set
    if trainer.state.global_step == 0 and trainer._non_finite.action is None:
        check_first_rewards(rewards_BF, trainer.reward_weights, trainer.reward_func_names, bounds=bounds)


def equal_rewards(trainer: Any, rewards_BF: Tensor, *, normalized_apart: bool) -> Tensor:
    """Return which of this rank's rows are in groups with identical rewards, `(B,)` bool, from those of all ranks."""
    is_equal = rows_of_equal_rewards(  # on the host: on a device these are a dozen tiny kernels
        rewards_BF.cpu(), trainer.reward_weights.cpu(), trainer.num_generations, normalized_apart=normalized_apart
    )
    is_equal_B = is_equal.view(trainer.accelerator.num_processes, -1)[trainer.accelerator.process_index]
    return is_equal_B.to(rewards_BF.device, non_blocking=True)


def micro_batches_of_a_step(args: Any, buffer: Buffer) -> int:
    """Return how many micro-batches of the generation batch that begins now are certain to share an optimizer step."""
    return micro_batches_per_step(
        steps_per_generation=args.steps_per_generation,
        accumulation_steps=args.gradient_accumulation_steps,
        micro_batches_of_an_epoch=buffer.micro_batches_of_an_epoch,
        window_began=buffer.window_began,
    )
