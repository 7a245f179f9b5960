"""Each package imports only those that docs/architecture.md lists, and only compat/ names TRL's internals."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "trl_ext"
PAGE = PACKAGE.parent / "docs" / "architecture.md"

# Room -> the rooms of trl_ext it may import, and third-party packages it may not
ROOMS = {
    "heads": set(),
    "compat": {"version"},
    "version": set(),
    "packing": set(),
    "distributed": set(),
    "scoring": {"heads", "packing", "distributed", "compat"},
    "memory": {"heads", "packing", "scoring"},
    "planning": set(),
    "checkpoints": set(),
    "reference": {"version", "packing"},
    "losses": set(),
    "callbacks": set(),
    "config": {"compat", "heads", "losses", "planning"},
    "trainers": {
        *("heads", "packing", "distributed", "scoring", "planning", "checkpoints", "reference", "losses", "callbacks"),
        *("compat", "config"),
    },
    "cli": {"config", "trainers", "memory", "heads", "distributed", "scoring", "losses", "compat", "version"},
}
HEADS_KNOW_TORCH_ONLY = {"transformers", "peft", "trl", "accelerate", "datasets", "deepspeed", "numpy"}


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path):
    """(package, names) of every import of the file, with relative ones resolved to `trl_ext.…`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                package = ("trl_ext", *path.relative_to(PACKAGE).parts[:-1])
                module = ".".join((*package[: len(package) - node.level + 1], *filter(None, [module])))
            yield module, tuple(alias.name for alias in node.names)


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", [f for f in FILES if f.parent != PACKAGE], ids=str)
def test_a_room_knows_only_the_rooms_below_it(path):
    for module, names in imports(path):
        assert module != "trl_ext", f"{path.name} imports the public package: {names}"
        if module.startswith("trl_ext."):
            other = module.split(".")[1]
            assert other == room(path) or other in ROOMS[room(path)], f"{path} imports {module}"
        elif room(path) == "heads":
            assert module.split(".")[0] not in HEADS_KNOW_TORCH_ONLY, f"{path} imports {module}"


@pytest.mark.parametrize("path", [f for f in FILES if room(f) != "compat"], ids=str)
def test_only_compat_names_trls_internals(path):
    for module, _ in imports(path):
        assert not module.startswith("trl."), f"{path} imports {module}"


@pytest.mark.parametrize("path", FILES, ids=str)
def test_every_file_says_its_one_job_in_its_first_line(path):
    assert ast.get_docstring(ast.parse(path.read_text()))


def test_the_page_has_these_rooms_and_imports():
    rows = re.findall(r"^\| `([a-z]+)(?:/|\.py)` \| .+ \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    for name, cell in rows:
        named = set(re.findall(r"`([a-z]+)(?:/|\.py)`", cell))
        assert ROOMS[name] == (ROOMS.keys() - named - {name} if cell.startswith("all except") else named), name
    assert {name for name, _ in rows} == ROOMS.keys() == {room(f) for f in FILES} - {"__init__"}
