"""No pickle is read, nothing sets `trust_remote_code`, and the dependencies are those that SECURITY.md reviews."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(path for folder in ("trl_ext", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py"))
UNSAFE_MODULES = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}


def unsafe(source: str) -> list[str]:
    """Return the calls of a file that could execute the data they read."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            named = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            found += [f"line {node.lineno}: imports {x}" for x in named if x.split(".")[0] in UNSAFE_MODULES]
        elif isinstance(node, ast.Call):
            called, keywords = ast.unparse(node.func), {x.arg: ast.unparse(x.value) for x in node.keywords}
            if called in ("eval", "exec", "os.system") or (called in ("np.load", "numpy.load") and keywords):
                found.append(f"line {node.lineno}: {called}")
            if called == "torch.load" and keywords.get("weights_only") != "True":
                found.append(f"line {node.lineno}: torch.load without weights_only=True")
            if called == "yaml.load":
                found.append(f"line {node.lineno}: yaml.load")
            if keywords.get("trust_remote_code") == "True":
                found.append(f"line {node.lineno}: trust_remote_code=True")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_executes_data_that_it_reads(path: Path):
    assert unsafe(path.read_text()) == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from dill import load",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "yaml.load(file)",
        "eval(text)",
    ],
)
def test_a_call_that_could_execute_data_is_noticed(line: str):
    assert len(unsafe(line)) == 1


def test_the_reviewed_dependencies_are_those_of_the_package():
    review = (ROOT / "SECURITY.md").read_text().split("## Dependencies")[1]
    rows = re.findall(r"^\| ([a-z]+) \| ([^|]+) \| ([^|]+) \|", review, re.MULTILINE)
    reviewed = {name: spec.strip().replace(", ", ",").replace("any", "") for name, spec, _ in rows if name != "package"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [*project["optional-dependencies"]["trl"], *project["dependencies"]]
    wanted = dict(re.fullmatch(r"([a-z]+)(.*)", x).groups() for x in requirements)
    assert reviewed == wanted
    pins = dict(re.findall(r"^([a-z]+)==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert {name: pin.strip() for name, _, pin in rows if pin.strip() not in ("-", "pinned for tests")} == {
        name: pins[name] for name in reviewed if name in pins
    }
