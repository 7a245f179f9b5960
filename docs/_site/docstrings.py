"""MkDocs hook: types in docstrings, which TRL's form writes in Markdown and mkdocstrings shows as code.

That form names a default among the types, where mkdocstrings adds the one of the signature.
"""

import re
from typing import Any

MARKED = re.compile(r"<code>([^<]*(?:`|\*optional\*)[^<]*)</code>")
DEFAULT = re.compile(r"(?:, optional)?, defaults to [^<]*(?=</code>)")
REFERRED = re.compile(r"\[<code>~?([^<]+)</code>\]")


def on_page_content(content: str, page: Any, **_: Any) -> str:
    if page.file.src_uri != "api.md":
        return content
    content = MARKED.sub(lambda match: f"<code>{re.sub(r'[`*]', '', match[1])}</code>", content)
    content = DEFAULT.sub("", content)
    return REFERRED.sub(r"<code>\1</code>", content)
