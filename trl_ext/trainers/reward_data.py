"""DPO's data sets with rewards: their two columns are checked, and reach the loss."""

from typing import Any

from torch.utils.data import get_worker_info

from ..compat import DPOLossInternals
from ..losses import READ_REWARDS, REWARD_COLUMNS, RewardCollator, check_reward, check_reward_columns
from .released_reference import is_map_style


class RewardDataMixin(DPOLossInternals):
    """Mixed in before TRL's `DPOTrainer`."""

    data_collator: Any

    def _take_rewards(self, loss_types: list[str]) -> None:
        """Called before TRL's `__init__`."""
        if not READ_REWARDS.isdisjoint(loss_types):
            self._extra_columns = REWARD_COLUMNS

    def _collate_rewards(self) -> None:
        """Called after it."""
        if self._extra_columns:
            self.data_collator = RewardCollator(self.data_collator)

    def _before_preparing(self, dataset: Any, name: str, processing_class: Any) -> Any:
        """Called with each data set, whose rows are still numbered as the user has them.

        Raises:
            `ValueError`: a column or a reward is missing. Of a streaming data set each row is looked at when it is met.
        """
        if not self._extra_columns:
            return dataset
        where = f"the {name} data set"
        check_reward_columns(dataset.column_names or next(iter(dataset)).keys(), where)
        if is_map_style(dataset):
            for column in self._extra_columns:
                for row, value in enumerate(dataset[column]):
                    check_reward(value, column, f"row {row} of {where}")
            return dataset
        return dataset.map(_checked, with_indices=True, fn_kwargs={"where": where})


def _checked(example: dict[str, Any], row: int, where: str) -> dict[str, Any]:
    worker = get_worker_info()
    if worker is not None and worker.num_workers > 1:  # each counts the rows of its own shards
        where = f"those that worker {worker.id} reads of {where}"
    for column in REWARD_COLUMNS:
        check_reward(example.get(column), column, f"row {row} of {where}")
    return example
