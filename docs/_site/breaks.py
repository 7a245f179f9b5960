"""MkDocs hook: names in tables may break after `_`, `/` and `.`, so that a phone shows them whole."""

import re
from typing import Any

CELL = re.compile(r"<t([dh])\b[^>]*>.*?</t\1>", re.DOTALL)
WORDS = re.compile(r"(<[^>]*>)|([\w./]+)")


def on_page_content(content: str, **_: Any) -> str:
    def broken(match: re.Match[str]) -> str:
        return match[1] or re.sub(r"(?<=\w)(_)(?=\w)|(?<=[a-z_])([./])(?=[a-z_])", r"\g<0><wbr>", match[2])

    return CELL.sub(lambda cell: WORDS.sub(broken, cell[0]), content)
