"""docs/errors.md quotes messages that exist, and every message of the package has the form of a message."""

from doc_messages import ANYTHING, MADE_BY, PARTS, PASSES_ON, ROOT, Given, given, is_one_of, quoted, wrong_form

PAGE = (ROOT / "docs" / "errors.md").read_text()


def test_every_quoted_message_is_in_the_code():
    known = [message.text for message in given()]
    assert [quote for quote in quoted(PAGE) if not is_one_of(quote, known)] == []


def test_every_row_of_the_tables_quotes_a_message():
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| message")]
    assert len(quoted(PAGE)) == len(rows) > 15


def test_every_message_has_the_form_of_one():
    assert len(given()) > 150
    assert [f"{message} ({wrong})" for message in given() if (wrong := wrong_form(message))] == []


def test_what_is_read_for_messages_is_in_the_code():
    assert {*PARTS, *PASSES_ON, *MADE_BY} <= {x.file for x in given()} | {x.kind for x in given()}


def test_a_message_of_another_form_is_noticed():
    def wrong(text: str) -> str | None:
        return wrong_form(Given("trainers/new.py", 1, "ValueError", text))

    assert wrong("`beta` must be a number, got the string '0.1'. Write 0.1 without quotes.") is None
    assert wrong(f"Unknown `loss_type` {ANYTHING}. Choose from: {ANYTHING}") is None
    assert wrong(ANYTHING) is None
    assert wrong("the head is wrong.") == "starts with 't'"
    assert wrong("The head is wrong") == "ends with 'g'"
    assert wrong("The head is wrong. Choose of: 'a'.") == "has 'Choose of'"
    assert wrong("The batch is fed padded.") == "has 'fed'"


def test_a_message_that_has_changed_is_noticed():
    known = [message.text for message in given()]
    assert is_one_of("The loss is not finite in step …", known)
    assert not is_one_of("The loss is not finite at step …", known)
    assert not is_one_of("in step … The loss is not finite", known)
