"""MkDocs hook: where lines may break.

Names in tables may break after `_`, `/` and `.` and before a capital, so that a phone shows them whole. An option of a
command does not break after its hyphens. A comment beside a command gets a class: it moves to a line below as a whole.
"""

import re
from typing import Any

CELL = re.compile(r"<t([dh])\b[^>]*>.*?</t\1>", re.DOTALL)
CODE = re.compile(r"<code\b[^>]*>.*?</code>", re.DOTALL)
WORDS = re.compile(r"(<[^>]*>)|([\w./]+)")
CAPITAL = re.compile(r"(<[^>]*>)|((?<=[a-z])(?=[A-Z]))")
COMMENT = re.compile(r'(?<=\S)((?:<span class="w">)?[ \t]+(?:</span>)?<span class="c1)(?=">)')
OPTION = re.compile(r"(<[^>]*>)|((?<![\w-])--?[A-Za-z]+)")


def on_page_content(content: str, **_: Any) -> str:
    def broken(match: re.Match[str]) -> str:
        return match[1] or re.sub(r"(?<=\w)(_)(?=\w)|(?<=[a-z_])([./])(?=[a-z_])", r"\g<0><wbr>", match[2])

    def cell(match: re.Match[str]) -> str:
        return CODE.sub(lambda code: CAPITAL.sub(lambda x: x[1] or "<wbr>", code[0]), WORDS.sub(broken, match[0]))

    def options(match: re.Match[str]) -> str:
        return OPTION.sub(lambda x: x[1] or f'<span class="option">{x[2]}</span>', match[0])

    content = COMMENT.sub(r"\g<1> beside", content)
    return CODE.sub(options, CELL.sub(cell, content))
