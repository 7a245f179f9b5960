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

import trl_ext

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_version_stands_in_one_place():
    assert "version" not in PROJECT["project"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "trl_ext.__version__"}
    assert re.fullmatch(r"\d+\.\d+\.\d+", trl_ext.__version__)


def test_the_changelog_begins_with_the_version():
    first = re.search(r"^## (\S+?),? ", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first is not None
    assert first[1] == trl_ext.__version__


def test_the_range_of_trl_is_the_same_everywhere():
    from trl_ext.compat import SUPPORTED_TRL

    (of_project,) = [x.removeprefix("trl") for x in PROJECT["project"]["dependencies"] if re.match(r"trl\W", x)]
    assert {str(x) for x in SUPPORTED_TRL} == set(of_project.split(","))


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
