"""Every class of `AutoModelForCausalLM`, built tiny, does what the table of docs/supported.md says, and exactly."""

import pytest

from class_support import PAGE, expected, page_with_table, recorded, support_of
from model_classes import MODEL_TYPES

COMMAND = "run `python tests/support/class_support.py`, and read what changes"


@pytest.mark.slow
@pytest.mark.parametrize("model_class", sorted(MODEL_TYPES))
def test_the_class_does_what_was_recorded(model_class: str) -> None:
    assert model_class in recorded(), f"{model_class} is new: {COMMAND}"
    types, support = expected(model_class)
    assert MODEL_TYPES[model_class] == types, COMMAND
    assert support_of(model_class) == support, COMMAND


def test_most_classes_are_packed() -> None:
    supports = [support for _, support in recorded().values()]
    assert sum(support.packed != "no" for support in supports) >= 115
    assert sum(support.head == "not run" for support in supports) <= 5


def test_the_page_has_the_table_of_what_was_recorded() -> None:
    assert PAGE.read_text() == page_with_table(), COMMAND
