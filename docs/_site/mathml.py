"""MkDocs hook: formulas become MathML when the site is built, so that a reader needs neither script nor network."""

import html
import re
from typing import Any

from latex2mathml.converter import convert

# What pymdownx.arithmatex leaves of $...$ and $$...$$
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
# latex2mathml sets no space between a function and its argument
FUNCTION = re.compile(r"(<mi>log</mi>)(?=<m(?:i|sub)>)")


def on_page_content(content: str, **_: Any) -> str:
    def written(match: re.Match[str]) -> str:
        inline = match[2] == "("
        formula = convert(html.unescape(match[3]).strip(), display="inline" if inline else "block")
        formula = FUNCTION.sub(r'\1<mspace width="0.167em"/>', formula)
        return formula if inline else f'<div class="formula">{formula}</div>'

    return FORMULA.sub(written, content)
