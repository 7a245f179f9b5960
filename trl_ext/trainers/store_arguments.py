"""The config fields of the store of reference log-probs."""

from dataclasses import dataclass, field
from pathlib import Path

import datasets

from .added_fields import AddedFields

_STORES = ("disk", "memory", "off")


@dataclass
class StoreArguments(AddedFields):
    """Fields that choose where reference log-probs are kept; every default trains as TRL does, with fewer passes."""

    reference_store: str = field(
        default="disk",
        metadata={
            "help": "Where per-token reference log-probs are kept, so that each sequence is scored once. `'disk'` lets "
            "later runs with the same reference use them too; `'memory'` keeps them in this process; `'off'` runs the "
            "reference on every micro-batch, as TRL does.",
            "choices": list(_STORES),
        },
    )
    reference_store_dir: str | None = field(
        default=None,
        metadata={
            "help": "Folder of the store on disk. `None` is `trl_ext_reference_log_probs` in the cache of `datasets` "
            "(`HF_DATASETS_CACHE`)."
        },
    )

    def __post_init__(self) -> None:
        if self.reference_store not in _STORES:
            raise ValueError(f"`reference_store` must be one of {list(_STORES)}, got {self.reference_store!r}.")
        if self.reference_store_dir is not None and self.reference_store != "disk":
            raise ValueError(
                f'`reference_store_dir={self.reference_store_dir!r}` needs `reference_store="disk"`, got '
                f"{self.reference_store!r}. Remove one of the two."
            )
        if self.reference_store == "off" and getattr(self, "precompute_ref_log_probs", False):
            raise ValueError(
                "`precompute_ref_log_probs=True` fills the store, so `reference_store` must be 'disk' or 'memory', got "
                "'off'."
            )
        super().__post_init__()

    @property
    def folder(self) -> Path:
        """The folder of the store on disk, with one folder a reference in it."""
        if self.reference_store_dir is not None:
            return Path(self.reference_store_dir).expanduser()
        return Path(datasets.config.HF_DATASETS_CACHE) / "trl_ext_reference_log_probs"
