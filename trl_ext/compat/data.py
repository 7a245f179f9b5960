"""The tokenizer and the tokenised data sets of TRL's trainers, and what a subclass has replaced, by names of ours."""

from collections.abc import Iterator
from typing import Any

import pyarrow.compute as pc
from datasets import Dataset

_TOKEN_COLUMNS = ("prompt_ids", "chosen_ids", "rejected_ids")

# Parts of a trainer, and the methods that a subclass replaces one by
REPLACEABLE = {
    "loss": ("_compute_loss", "compute_loss"),
    "rollouts": ("_generate",),
    "generation": ("_generate", "_generate_single_turn"),
    "rendering": ("_tokenize_prompts",),
    "rewards": ("_calculate_rewards", "_generate_and_score_completions"),
    "batches": ("_generate_and_score_completions",),
    "pass": ("_get_per_token_logps_and_entropies",),
    "sampler": ("_get_train_sampler", "get_train_dataloader"),
}


class DataInternals:
    """Mixed in before a TRL trainer."""

    args: Any
    model: Any
    ref_model: Any
    train_dataset: Any
    eval_dataset: Any

    def _text_tokenizer(self) -> Any:
        """The tokenizer, also where it is a part of a processor."""
        return self._tokenizer  # type: ignore[attr-defined]

    def _replaces(self, part: str) -> bool:
        """Whether a subclass of the public trainer, or this instance, has one of its own, of `REPLACEABLE`."""
        ours = next(cls for cls in type(self).__mro__ if "_trl_trainer" in vars(cls))
        return any(x in vars(self) or getattr(type(self), x) is not getattr(ours, x) for x in REPLACEABLE[part])

    def _largest_token_ids(self, rows: int) -> Iterator[int | None]:
        """Of each column of DPO's tokenised training data, in the first `rows`; `None` where they are empty."""
        if not isinstance(self.train_dataset, Dataset):
            return
        columns = [x for x in _TOKEN_COLUMNS if x in self.train_dataset.column_names]
        if columns:
            first = self.train_dataset.select_columns(columns).with_format("arrow")[:rows]
            yield from (pc.max(pc.list_flatten(first[column])).as_py() for column in columns)
