"""The version stands in one place, wheel and sdist hold what they should, and no file of the package is missing."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

import trl_ext

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
RANGES = dict(re.findall(r"([a-z]+)(\S*)", " ".join(PROJECT["project"]["dependencies"])))


def test_the_version_stands_in_one_place():
    assert "version" not in PROJECT["project"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "trl_ext.version.__version__"}
    assert re.fullmatch(r"\d+\.\d+\.\d+", trl_ext.__version__)


def test_the_changelog_begins_with_the_version():
    first = re.search(r"^## (\S+?),? ", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first is not None
    assert first[1] == trl_ext.__version__


def test_the_ranges_of_trl_and_transformers_are_the_same_everywhere():
    from trl_ext.compat import SUPPORTED

    for name, versions in SUPPORTED.items():
        (of_project,) = [x.removeprefix(name) for x in PROJECT["project"]["dependencies"] if re.match(rf"{name}\W", x)]
        assert {str(x) for x in versions} == set(of_project.split(","))


def test_the_pages_name_the_ranges_that_install():
    ranges = {**RANGES, "Python": PROJECT["project"]["requires-python"]}
    least = [
        f"{name} {ranges[name].split(',')[0].removeprefix('>=')}" for name in ("torch", "transformers", "trl", "Python")
    ]
    install = f"{', '.join(least)}, or newer"
    assert RANGES["torch"].count(",") == 0  # TRL installs the newest, and an upper bound would take it away again
    for page in ("README.md", "docs/quick-start.md"):
        assert install in " ".join((ROOT / page).read_text().split()), f"{page} does not say: {install}"


def test_the_table_of_the_readme_has_the_versions_of_the_tests():
    pins = dict(re.findall(r"^([a-z]+)==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    readme = (ROOT / "README.md").read_text()
    rows = dict(re.findall(r"^\| (TRL|transformers|torch|PEFT.*?) \| ([^|]+) \|", readme, re.MULTILINE))
    for name in ("trl", "transformers", "torch", "peft", "accelerate", "deepspeed"):
        (row,) = [tested for names, tested in rows.items() if name in names.lower().split(", ")]
        assert pins[name] in row


def test_the_hooks_run_what_make_runs():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [repo["repo"] for repo in hooks] == ["local"]  # nothing is fetched
    entries = {hook["entry"].replace(" --force-exclude", "") for repo in hooks for hook in repo["hooks"]}
    recipes = re.search(r"^lint:.*?(?=^bench:)", (ROOT / "Makefile").read_text(), re.MULTILINE | re.DOTALL)
    assert recipes is not None
    made = re.findall(r"\$\(PYTHON\) (-m .+)", recipes[0])
    assert {f"python {re.sub(r'( --check)? [.]$', '', command)}" for command in made} <= entries
    (tests,) = [entry for entry in entries if "pytest" in entry]
    assert all((ROOT / word).exists() for word in tests.split() if word.startswith("tests/"))


def test_ci_runs_what_the_judged_lines_need():
    ran = re.findall(r"^make (.+)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert {"lint", "types", "docs", "dist-check", "test"} <= {word for line in ran for word in line.split()}


@pytest.mark.slow
@pytest.mark.skipif(find_spec("build") is None, reason="the package `build` makes wheel and sdist; `make dist` has it")
def test_wheel_and_sdist_hold_the_package_and_nothing_else(tmp_path: Path):
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (wheel,), (sdist,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    assert {wheel.name, sdist.name} == {
        f"trl_ext-{trl_ext.__version__}-py3-none-any.whl",
        f"trl_ext-{trl_ext.__version__}.tar.gz",
    }
    package = {str(path.relative_to(ROOT)) for path in (ROOT / "trl_ext").rglob("*.py")} | {"trl_ext/py.typed"}
    with zipfile.ZipFile(wheel) as file:
        of_wheel = set(file.namelist())
    assert {name for name in of_wheel if ".dist-info/" not in name} == package
    assert any(name.endswith("licenses/LICENSE") for name in of_wheel)
    with tarfile.open(sdist) as file:
        of_sdist = {name.split("/", 1)[1] for name in file.getnames() if "/" in name}
    assert package | {"LICENSE", "README.md", "pyproject.toml"} <= of_sdist
    assert not [name for name in of_sdist if name.startswith(("tests/", "benchmarks/", "docs/", "examples/"))]
