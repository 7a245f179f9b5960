"""People read plain English: none of the phrases that reviews of earlier texts had to replace is back."""

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    *ROOT.glob("*.md"),
    *(x for folder in ("docs", "benchmarks", "examples") for x in (ROOT / folder).rglob("*.md")),
]
SOURCES = [path for folder in ("trl_ext", "examples", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
# Phrase -> what to write
TRANSLATED = {
    r"\b(is|are|was|were|be|been|being|not|tokens?|rows?|padding) fed\b": "processed",
    r"\bfed (once|as|padded|whole|by|for|to|beside)\b": "processed",
    r"\brewarded alike\b": "with equal rewards",
    r"\bwhich there is not\b": "Unknown ... Choose from: ...",
    r"\b[Cc]hoose of\b": "choose from",
    r"\b[Mm]end(s|ed|ing)?\b": "fix",
    r"\boverruled by\b": "override",
    r"\bof its own accord\b|\ba word of\b": "plain words",
    r"\bin sum over\b": "summed over",
    r"\bstands? (in|for) (the|a) (file|line|place)\b": "is in, replaces",
    r"\bthe same of\b": "the same for",
}


def prose() -> Iterator[tuple[str, str]]:
    """Yield (file, text) of what people read: pages without code, and comments and strings of the sources."""
    for path in PAGES:
        yield str(path.relative_to(ROOT)), re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    kinds = (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))
    for path in SOURCES:
        tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
        yield str(path.relative_to(ROOT)), "\n".join(token.string for token in tokens if token.type in kinds)


TEXTS = list(prose())


@pytest.mark.parametrize("phrase", TRANSLATED)
def test_no_translated_phrase_is_back(phrase: str):
    found = [
        f"{file}: ...{text[max(m.start() - 40, 0) : m.end() + 20]!r}"
        for file, text in TEXTS
        for m in re.finditer(phrase, text)
    ]
    assert found == [], f"write {TRANSLATED[phrase]!r} instead"


def test_the_phrases_are_found():
    assert len(TEXTS) > 120
    examples = (
        "no padding is fed",
        "rows fed once",
        "rewarded alike",
        "'simpo', which there is not",
        "Choose of",
        "Mend the path",
    )
    assert all(any(re.search(phrase, example) for phrase in TRANSLATED) for example in examples)
