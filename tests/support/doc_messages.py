"""The package's errors and warnings, as its source has them; a check of their form; and those in docs/errors.md."""

import ast
import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "trl_ext"
ANYTHING = "\0"  # stands for what depends on the run
QUOTED = re.compile(r"^\| (`{2,3}) ?(.+?) ?\1 \|", re.MULTILINE)
# The calls that give a warning; packing's own gives each one once
WARNS = ("logger.warning", "warnings.warn", "self._warn_once")
# Functions that return, or collect, messages that another function gives
MADE_BY = {
    *("why_not_loaded", "plan_grpo", "warnings"),
    *("_separate_processes", "_missing_engine", "_wrong_engine"),
}
# Files that give such a message, with no words of their own; `cli/__main__.py` gives the exit status
PASSES_ON = {
    *("cli/__main__.py", "packing/packing.py"),
    *("trainers/base.py", "trainers/checkpointing.py"),
}

# Exceptions whose message a user sees as a part of another one
PARTS = {"LayoutNotReadError", "UnknownCodeError", "UnknownRoutersError", "UnprovenError", "UnusableFileError"}
# Words that a message does without
_BANNED = re.compile(
    r"\b(fed|feeds?|alike|apart|mend|in sum|of (?:its|their) own|the same of|stands? in|Choose of|(?:which|that) there "
    r"(?:is|are) not|(?:which|that) is not there)\b"
)


class Given(NamedTuple):
    """A message, with `ANYTHING` for what depends on the run. `kind`: the exception, or the call that warns."""

    file: str
    line: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.kind}: {self.text.replace(ANYTHING, '…')}"


@functools.cache
def given() -> tuple[Given, ...]:
    """Return every error and warning of the package."""
    return tuple(x for path in sorted(PACKAGE.rglob("*.py")) for x in _given_in(path))


def _given_in(path: Path) -> Iterator[Given]:
    file, tree = str(path.relative_to(PACKAGE)), ast.parse(path.read_text())
    named = {
        target.id: _text(node.value, {})
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant | ast.JoinedStr)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        call = node.exc if isinstance(node, ast.Raise) else node
        if isinstance(call, ast.Call) and call.args:
            kind = ast.unparse(call.func)
            # An unknown attribute of the package is Python's own error
            if kind in WARNS or (isinstance(node, ast.Raise) and kind != "AttributeError"):
                yield Given(file, call.lineno, kind, _text(call.args[0], named))
        if isinstance(node, ast.FunctionDef) and node.name in MADE_BY:
            made = (x for part in ast.walk(node) if _gives_back(part) for x in ast.walk(part))
            yield from (Given(file, x.lineno, node.name, _text(x, named)) for x in made if isinstance(x, ast.JoinedStr))


def _gives_back(node: ast.AST) -> bool:
    """Whether a part of a function returns or collects messages. A plan that it returns names them `warnings`."""
    if isinstance(node, ast.Return):
        return not (isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name))
    collects = isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".append")
    assigns = isinstance(node, ast.Assign) and any(isinstance(x, ast.Name) and x.id == "warnings" for x in node.targets)
    return collects or assigns or (isinstance(node, ast.keyword) and node.arg == "warnings")


def _text(node: ast.AST, named: dict[str, str]) -> str:
    """The text of an expression, with strings that have a name in its file."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value.replace("%s", ANYTHING)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part, named) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left, named) + _text(node.right, named)
    name = node.value if isinstance(node, ast.FormattedValue) else node
    return named.get(name.id, ANYTHING) if isinstance(name, ast.Name) else ANYTHING


def quoted(page: str) -> list[str]:
    """Return the messages in the first column of a page's tables."""
    return [match[2] for match in QUOTED.finditer(page)]


def is_one_of(quote: str, known: Iterable[str]) -> bool:
    """Return whether a known message has the parts of `quote` between ellipses, in the same order."""
    wanted = re.compile(".*".join(re.escape(part) for part in quote.split("…")), re.DOTALL)
    return any(wanted.search(message) for message in known)


def wrong_form(message: Given) -> str | None:
    """Return what is wrong with a message, or None. It must be whole sentences in plain words."""
    if message.kind in PARTS:
        return None
    first, last = message.text[0], message.text.rstrip()[-1]
    if not (first.isupper() or first in ("`", ANYTHING) or message.text.startswith("trl_ext ")):
        return f"starts with {first!r}"
    if last not in (".", ANYTHING):
        return f"ends with {last!r}"
    banned = _BANNED.search(message.text)
    return f"has {banned[0]!r}" if banned else None
