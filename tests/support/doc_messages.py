"""The messages that the package can give, read from its source, and those that the documentation quotes."""

import ast
import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "trl_ext"
ANYTHING = "\0"  # stands where a message has what depends on the run
QUOTED = re.compile(r"^\| (`{2,3}) ?(.+?) ?\1 \|", re.MULTILINE)
# The calls by which a warning is given; the last one is packing's own, which gives each message once
WARNS = ("logger.warning", "warnings.warn", "self._say")
# Messages that are made in another function than the one that gives them
MADE_IN = {
    "checkpoints/engine.py": ("why_not_loaded",),
    "engines/rank_failures_reported.py": ("_call",),
    "engines/fallback.py": ("_unrelated", "_other_engine", "_twice", "_other_wrapping", "_split_by_deepspeed"),
    "passes/grpo.py": ("plan_grpo",),
    "passes/packing.py": ("plan_packing",),
    "trainers/loss_arguments.py": ("ignored_smoothing",),
}
# Who gives them, with no word of its own
GIVES_ANOTHERS = {
    "cli/__main__.py",  # the exit status
    "engines/rank_failures_reported.py",
    "packing/packing.py",  # what it was given to say
    "trainers/complete_checkpoints.py",
    "trainers/guarded_engine.py",
    "trainers/loss_terms.py",
    "trainers/planned.py",
}


@dataclass(frozen=True)
class Given:
    """A message that the package raises or warns with.

    Args:
        file (`str`): from the package.
        line (`int`): where it is given.
        kind (`str`): the exception, or the call that warns.
        text (`str`): with `ANYTHING` for what depends on the run.
    """

    file: str
    line: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.kind}: {self.text.replace(ANYTHING, '…')}"


@functools.cache
def given() -> tuple[Given, ...]:
    """Every error and warning of the package, where it is written."""
    return tuple(_given())


def _given() -> Iterator[Given]:
    for path in sorted(PACKAGE.rglob("*.py")):
        file, tree = str(path.relative_to(PACKAGE)), ast.parse(path.read_text())
        names = _named_strings(tree)
        for node in ast.walk(tree):
            call = node.exc if isinstance(node, ast.Raise) else node
            if not isinstance(call, ast.Call) or not call.args:
                continue
            kind = ast.unparse(call.func)
            if isinstance(node, ast.Raise) or kind in WARNS:
                yield Given(file, node.lineno, kind, _text(call.args[0], names))
        for function in ast.walk(tree) if file in MADE_IN else ():
            if isinstance(function, ast.FunctionDef) and function.name in MADE_IN[file]:
                yield from (Given(file, x.lineno, "made", _text(x, names)) for x in _sentences(function))


@functools.cache
def messages() -> tuple[str, ...]:
    """Every string of the package that is long enough to be a sentence."""
    found: list[str] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr | ast.Constant | ast.BinOp):
                text = _text(node)
                if len(text) > 12:
                    found.append(text)
    return tuple(found)


def quoted(page: str) -> list[str]:
    """The messages in the first column of a page's tables."""
    return [match[2] for match in QUOTED.finditer(page)]


def is_one_of(quote: str, known: Iterable[str]) -> bool:
    """Whether a message has the parts of `quote` between its ellipses, in their order."""
    wanted = re.compile(".*".join(re.escape(part) for part in quote.split("…")), re.DOTALL)
    return any(wanted.search(message) for message in known)


def _sentences(function: ast.FunctionDef) -> Iterator[ast.expr]:
    """What it returns, appends, or names `warnings`, as far as that is written there."""
    for node in ast.walk(function):
        parts: list[ast.expr | None] = []
        if isinstance(node, ast.Return):
            parts = list(node.value.elts) if isinstance(node.value, ast.Tuple) else [node.value]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".append"):
            parts = list(node.args)
        elif isinstance(node, ast.keyword) and node.arg == "warnings" and isinstance(node.value, ast.Tuple):
            parts = list(node.value.elts)
        yield from (x for x in parts if isinstance(x, ast.JoinedStr))


def _named_strings(tree: ast.Module) -> dict[str, str]:
    """The strings that have a name of their own in a file."""
    return {
        target.id: _text(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and isinstance(node.value, ast.Constant | ast.JoinedStr)
    }


def _text(node: ast.AST, names: dict[str, str] | None = None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value.replace("%s", ANYTHING)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part, names) for part in node.values)
    if isinstance(node, ast.FormattedValue) or (isinstance(node, ast.Name) and names is not None):
        name = node.value if isinstance(node, ast.FormattedValue) else node
        return (names or {}).get(name.id, ANYTHING) if isinstance(name, ast.Name) else ANYTHING
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left, names) + _text(node.right, names)
    return ANYTHING
