"""The messages that the package can give, read from its source, and those that the documentation quotes."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
ANYTHING = "\0"  # stands where a message has what depends on the run
QUOTED = re.compile(r"^\| (`{2,3}) ?(.+?) ?\1 \|", re.MULTILINE)


def messages() -> list[str]:
    """Every string of the package that is long enough to be a sentence."""
    found: list[str] = []
    for path in sorted((ROOT / "trl_ext").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr | ast.Constant | ast.BinOp):
                text = _text(node)
                if len(text) > 12:
                    found.append(text)
    return found


def quoted(page: str) -> list[str]:
    """The messages in the first column of a page's tables."""
    return [match[2] for match in QUOTED.finditer(page)]


def is_one_of(quote: str, known: list[str]) -> bool:
    """Whether a message has the parts of `quote` between its ellipses, in their order."""
    wanted = re.compile(".*".join(re.escape(part) for part in quote.split("…")), re.DOTALL)
    return any(wanted.search(message) for message in known)


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value.replace("%s", ANYTHING)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return ANYTHING
