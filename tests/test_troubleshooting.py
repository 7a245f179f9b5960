"""Every message that docs/troubleshooting.md quotes is one that the package gives."""

from doc_messages import ROOT, is_one_of, messages, quoted

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()


def test_every_quoted_message_is_in_the_code():
    known = messages()
    assert [quote for quote in quoted(PAGE) if not is_one_of(quote, known)] == []


def test_every_row_of_the_tables_quotes_a_message():
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| message")]
    assert len(quoted(PAGE)) == len(rows) > 50


def test_a_message_that_has_changed_is_noticed():
    known = messages()
    assert is_one_of("The loss is not finite in step …", known)
    assert not is_one_of("The loss is not finite at step …", known)
    assert not is_one_of("in step … The loss is not finite", known)
