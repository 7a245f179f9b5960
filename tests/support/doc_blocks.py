"""The blocks of code in the README and the docs: which run, which cannot run here, and why.

A block runs unchanged in the repository's root, unless the line before it gives a reason:

    <!-- not run: installs -->

or says that the demo's model and data replace those of the block:

    <!-- run with the demo's model and data: needs a GPU and a network -->

Only blocks of Python and bash are code to run.
"""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(
    r"(?:^<!-- (?:not run|(?P<demo>run with the demo's model and data)): (?P<why>[^\n]+) -->\n\n?)?"
    r"^```(?P<language>python|bash)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A block of code.

    Args:
        page (`str`): the file, from the root.
        line (`int`): the number of its first line.
        language (`str`): "python" or "bash".
        code (`str`)
        why_not (`str`, *optional*): why it does not run, or does not run unchanged.
        with_demo (`bool`): whether it runs with the demo's model and data.
    """

    page: str
    line: int
    language: str
    code: str
    why_not: str | None
    with_demo: bool = False

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """Return the Markdown files that a user reads."""
    return [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/RESULTS.md")),
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted((ROOT / "examples").rglob("*.md")),
    ]


def blocks() -> list[Block]:
    """Return every block of Python or bash."""
    found = []
    for path in pages():
        text = path.read_text()
        for match in BLOCK.finditer(text):
            line = text.count("\n", 0, match.start("code")) + 1
            page = str(path.relative_to(ROOT))
            found.append(Block(page, line, match["language"], match["code"], match["why"], bool(match["demo"])))
    return found
