"""Selects the parameters of a test that the fast tier runs."""

from collections.abc import Iterable
from typing import Any

import pytest


def fast_first(names: Iterable[Any], *fast: Any) -> list[Any]:
    """Return `names` as parameters of a test; all except `fast` are marked slow."""
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]
