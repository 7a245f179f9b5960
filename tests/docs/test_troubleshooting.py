"""docs/troubleshooting.md and the package agree: it quotes messages that exist, and each message has a row."""

from collections.abc import Iterable

from doc_messages import ANYTHING, MADE_BY, PASSES_ON, ROOT, Given, given, is_one_of, quoted

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
# No row: a user sees the message that it becomes a part of, which has one
BECOMES_A_REASON = {
    "LayoutNotReadError": "Packing is off: …",
    "reference/canary.py": "in the store of reference log-probs: …. It can be deleted.",
    "reference/segments.py": "in the store of reference log-probs: …. It can be deleted.",
}


def without_row(found: Iterable[Given], quotes: list[str]) -> list[str]:
    """The messages that no row explains."""
    left = []
    for message in found:
        is_passed_on = message.file in PASSES_ON and not message.text.replace(ANYTHING, "").strip()
        is_reason = {message.kind, message.file if message.kind == "ValueError" else ""} & set(BECOMES_A_REASON)
        if not is_passed_on and not is_reason and not any(is_one_of(quote, [message.text]) for quote in quotes):
            left.append(str(message))
    return left


def test_every_quoted_message_is_in_the_code():
    known = [message.text for message in given()]
    assert [quote for quote in quoted(PAGE) if not is_one_of(quote, known)] == []


def test_every_message_of_the_package_has_a_row():
    assert len(given()) > 150
    assert without_row(given(), quoted(PAGE)) == []


def test_what_has_no_row_becomes_a_part_of_what_has_one():
    assert set(BECOMES_A_REASON.values()) <= set(quoted(PAGE))
    assert {*BECOMES_A_REASON, *PASSES_ON, *MADE_BY} <= {x.file for x in given()} | {x.kind for x in given()}


def test_a_new_message_without_a_row_is_noticed():
    new = Given("trainers/new.py", 1, "ValueError", f"The moon is {ANYTHING}.")
    assert without_row([new], quoted(PAGE)) == ["trainers/new.py:1: ValueError: The moon is …."]
    passed_on = Given("trainers/new.py", 1, "ValueError", ANYTHING)
    assert without_row([passed_on], quoted(PAGE)) == ["trainers/new.py:1: ValueError: …"]


def test_every_row_of_the_tables_quotes_a_message():
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| message")]
    assert len(quoted(PAGE)) == len(rows) > 150


def test_a_message_that_has_changed_is_noticed():
    known = [message.text for message in given()]
    assert is_one_of("The loss is not finite in step …", known)
    assert not is_one_of("The loss is not finite at step …", known)
    assert not is_one_of("in step … The loss is not finite", known)
