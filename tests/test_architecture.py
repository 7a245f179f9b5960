"""The rules of docs/architecture.md: which package may import which, and where TRL's internals may be named."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "trl_ext"
PAGE = PACKAGE.parent / "docs" / "architecture.md"

# Package -> the packages of trl_ext that it may import, and third-party packages that it may not
MAY_IMPORT = {
    "heads": set(),
    "compat": {"version", "functions", "scoring", "routing"},
    "version": set(),
    "functions": set(),
    "packing": {"functions"},
    "distributed": set(),
    "scoring": {"heads", "packing", "distributed", "routing"},
    "routing": set(),
    "core": {"distributed", "packing", "reference", "scoring"},
    "axolotl": {"core", "packing", "reference"},
    "host": set(),
    "fit": {"heads", "packing", "scoring", "host", "planning", "losses"},
    "planning": {"losses"},
    "checkpoints": set(),
    "reference": {"version", "packing", "functions"},
    "losses": set(),
    "sampler": {"compat"},
    "callbacks": set(),
    "checks": {"compat", "distributed", "functions", "losses", "planning", "reference", "scoring"},
    "config": {"checks", "compat", "heads", "losses", "planning"},
    "trainers": {
        *("heads", "packing", "distributed", "scoring", "planning", "checkpoints", "reference", "losses", "callbacks"),
        *("checks", "compat", "config", "sampler", "host", "functions", "routing"),
    },
    "cli": {
        *("checks", "config", "trainers", "fit", "heads", "distributed", "scoring", "losses", "compat", "version"),
        "planning",
    },
}
HEADS_KNOW_TORCH_ONLY = {"transformers", "peft", "trl", "accelerate", "datasets", "deepspeed", "numpy"}


def package_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path):
    """Return (module, names) of every import in the file, with relative ones resolved to `trl_ext.…`."""
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
def test_a_package_imports_only_packages_below_it(path):
    for module, names in imports(path):
        assert module != "trl_ext", f"{path.name} imports the public package: {names}"
        if module.startswith("trl_ext."):
            other = module.split(".")[1]
            assert other == package_of(path) or other in MAY_IMPORT[package_of(path)], f"{path} imports {module}"
        elif package_of(path) == "heads":
            assert module.split(".")[0] not in HEADS_KNOW_TORCH_ONLY, f"{path} imports {module}"


@pytest.mark.parametrize("path", [f for f in FILES if package_of(f) != "compat"], ids=str)
def test_only_compat_names_trls_internals(path):
    for module, _ in imports(path):
        assert not module.startswith("trl."), f"{path} imports {module}"


@pytest.mark.parametrize("path", FILES, ids=str)
def test_the_first_line_of_every_file_is_a_docstring(path):
    assert ast.get_docstring(ast.parse(path.read_text()))


def test_the_page_has_these_packages_and_imports():
    rows = re.findall(r"^\| `([a-z]+)(?:/|\.py)` \| .+ \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    for name, cell in rows:
        named = set(re.findall(r"`([a-z]+)(?:/|\.py)`", cell))
        imported = MAY_IMPORT.keys() - named - {name} if cell.startswith("all except") else named
        assert MAY_IMPORT[name] == imported, name
    assert {name for name, _ in rows} == MAY_IMPORT.keys() == {package_of(f) for f in FILES} - {"__init__"}
