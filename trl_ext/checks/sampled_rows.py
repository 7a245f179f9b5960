"""Rows spread over a data set, and the first row of a column with a certain value, without reading all rows."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, IterableDataset

_SAMPLED = 66  # rows that a check reads


def columns_of(dataset: Any) -> list[str] | None:
    """Return the names of the columns; `None` if they are not known without reading a row."""
    if isinstance(dataset, Dataset):
        if dataset.format["type"] == "custom":  # a transform may make other columns, or draw random numbers
            return None
        if not dataset.format["output_all_columns"]:
            return list(dataset.format["columns"])
    return getattr(dataset, "column_names", None)


def as_python(dataset: Any) -> Any:
    """Return the data set with rows of Python objects, unless a transform makes its rows.

    In rows of tensors or arrays, TRL would add prompt and completion where it joins lists.
    """
    if isinstance(dataset, IterableDataset):
        formatting = getattr(dataset, "_formatting", None)
        return dataset if formatting is None or formatting.format_type is None else dataset.with_format(None)
    if dataset.format["type"] in (None, "custom"):
        return dataset
    all_columns = dataset.format["output_all_columns"]
    return dataset.with_format(None, columns=dataset.format["columns"], output_all_columns=all_columns)


def sampled_rows(dataset: Dataset, columns: Iterable[str]) -> dict[int, dict[str, Any]]:
    """Return row number -> row, for up to 66 rows at even distances, the first and the last among them.

    Of `columns`, those that the data set has are read. No row is read through a transform: it may be slow, or random.
    """
    read_columns = [x for x in dict.fromkeys(columns) if x in (columns_of(dataset) or ())]
    if not read_columns:
        return {}
    places = np.unique(np.linspace(0, len(dataset) - 1, min(_SAMPLED, len(dataset))).round().astype(int)).tolist()
    rows = as_python(dataset).select_columns(read_columns).select(places)
    return dict(zip(places, rows, strict=True))


def first_none(dataset: Dataset, column: str) -> int | None:
    """Return the first row whose value is None; `None` if there is none. Reads Arrow's null counts, not the values."""
    if not _has(dataset, column) or not dataset.data.column(column).null_count:
        return None
    return _first(dataset, column, pc.is_null)


def first_empty(dataset: Dataset, column: str) -> int | None:
    """Return the first row whose value is an empty text or list; `None` if there is none. Reads lengths alone."""
    if not _has(dataset, column):
        return None
    kind = dataset.data.column(column).type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _first(dataset, column, lambda values: pc.equal(pc.list_value_length(values), 0))
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return _first(dataset, column, lambda values: pc.equal(pc.binary_length(values), 0))
    return None


def _has(dataset: Dataset, column: str) -> bool:
    return column in (columns_of(dataset) or ())


def _first(dataset: Dataset, column: str, test: Callable[[Any], Any]) -> int | None:
    matches = pc.fill_null(test(dataset.data.column(column)), False).to_numpy()
    if dataset._indices is not None:  # rows were selected
        matches = matches[dataset._indices.column(0).to_numpy()]
    return int(matches.argmax()) if matches.any() else None
