"""The version is in one place, and wheel and sdist contain all files of the package and no others."""

import os
import re
import runpy
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

import trl_ext

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
README = (ROOT / "README.md").read_text()
EXTRAS = PROJECT["project"]["optional-dependencies"]
OF_TRAINERS = {Requirement(x).name for x in EXTRAS["trl"]}
# The extra's range of a package is within that of the package without it
DEPENDENCIES = [x for x in PROJECT["project"]["dependencies"] if Requirement(x).name not in OF_TRAINERS]
DEPENDENCIES += EXTRAS["trl"]
RANGES = dict(re.findall(r"([a-z]+)(\S*)", " ".join(DEPENDENCIES)))


def test_the_version_is_in_one_place():
    assert "version" not in PROJECT["project"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "trl_ext.version.__version__"}
    assert re.fullmatch(r"\d+\.\d+\.\d+", trl_ext.__version__)


def test_the_changelog_begins_with_the_version():
    first = re.search(r"^## (\S+?),? ", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first is not None
    assert first[1] == trl_ext.__version__


def test_the_version_ranges_are_the_same_everywhere():
    from trl_ext.version import SUPPORTED

    for name, versions in SUPPORTED.items():
        (of_project,) = [x.removeprefix(name) for x in DEPENDENCIES if re.match(rf"{name}\W", x)]
        assert {str(x) for x in versions} == set(of_project.split(","))


def test_a_dependency_may_be_newer_than_the_tested_one_but_not_of_the_next_major_version():
    from trl_ext.version import TESTED

    requirements = {x.name: x.specifier for x in map(Requirement, [*DEPENDENCIES, *EXTRAS["dev"]])}
    for name, tested in TESTED.items():
        (first_untested,) = [Version(x.version) for x in tested if x.operator == "<"]
        assert str(first_untested) in requirements[name], f"{name}: users could not install {first_untested}"
        assert str(first_untested.major + 1) not in requirements[name], f"{name} has no upper bound"


def test_the_pages_name_the_ranges_that_can_be_installed():
    ranges = {**RANGES, "Python": PROJECT["project"]["requires-python"]}
    least = [f"{name}{ranges[name].split(',')[0]}" for name in ("Python", "torch", "transformers", "trl")]
    install = f"Requires {', '.join(least)}."
    # TRL installs the newest torch, and a narrower upper bound would take it away again
    assert RANGES["torch"].split(",")[1] == "<3"
    assert install in " ".join((ROOT / "README.md").read_text().split()), f"README.md does not say: {install}"


def test_badges_and_citation_agree_with_the_project():
    badges = {path.stem: path.read_text() for path in (ROOT / "docs" / "images").glob("badge-*.svg")}
    assert PROJECT["project"]["license"] in badges["badge-license"]
    assert PROJECT["project"]["requires-python"].removeprefix(">=") + "+" in badges["badge-python"]
    assert RANGES["trl"].split(",")[0].removeprefix(">=") in badges["badge-trl"]
    assert {f"docs/images/{name}.svg" for name in badges} <= set(re.findall(r"\((\S+?)\)", README))
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (trl_ext.__version__, PROJECT["project"]["license"])


def test_what_pypi_shows_links_to_the_repository_that_publishes_it():
    release = runpy.run_path(str(ROOT / ".ci" / "release_metadata.py"))
    here = "https://example.org/owner/name"
    project = tomllib.loads(release["with_urls"]((ROOT / "pyproject.toml").read_text(), here, "v1.0.0"))
    assert set(project["project"]["urls"]) == {"Source", "Documentation", "Changelog", "Issues"}
    assert {**project, "project": {k: v for k, v in project["project"].items() if k != "urls"}} == PROJECT
    readme = release["absolute_links"](README, here, "v1.0.0")
    assert "OWNER" in README
    assert "OWNER" not in readme.replace("Replace OWNER", "")
    assert f"git clone {here} trl-ext" in readme
    targets = re.findall(r"\]\(([^)]+)\)", readme)
    assert f"{here}/raw/v1.0.0/docs/images/badge-license.svg" in targets
    assert f"{here}/blob/v1.0.0/docs/differences.md" in targets
    assert [target for target in targets if not target.startswith(("https://", "#"))] == []


@pytest.mark.parametrize("workflow", ["ci", "publish"])
def test_workflows_run_what_make_has(workflow: str):
    text = (ROOT / ".github" / "workflows" / f"{workflow}.yml").read_text()
    jobs = yaml.safe_load(text)["jobs"]
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    lines = [step["run"] for job in jobs.values() for step in job["steps"] if step.get("run", "").startswith("make ")]
    matrix = [x for job in jobs.values() for x in job.get("strategy", {}).get("matrix", {}).get("target", [])]
    asked = {word for line in (*lines, *matrix) for word in line.split() if re.fullmatch(r"[a-z-]+", word)} - {"make"}
    assert asked
    assert asked <= targets
    if workflow == "ci":
        ran = re.findall(r"^make (.+)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
        assert {word for line in ran for word in line.split()} & targets <= asked


def test_the_table_of_versions_has_those_of_the_tests():
    pins = dict(re.findall(r"^([a-z]+)==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    page = (ROOT / "docs" / "supported.md").read_text()
    rows = dict(re.findall(r"^\| (TRL|transformers|torch|PEFT.*?) \| ([^|]+) \|", page, re.MULTILINE))
    for name in ("trl", "transformers", "torch", "peft", "accelerate", "deepspeed"):
        (row,) = [tested for names, tested in rows.items() if name in names.lower().split(", ")]
        assert pins[name] in row


def test_the_hooks_run_what_make_runs():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [repo["repo"] for repo in hooks] == ["local"]  # no download
    entries = {hook["entry"].replace(" --force-exclude", "") for repo in hooks for hook in repo["hooks"]}
    recipes = re.search(r"^lint:.*?(?=^bench:)", (ROOT / "Makefile").read_text(), re.MULTILINE | re.DOTALL)
    assert recipes is not None
    made = re.findall(r"\$\(PYTHON\) (-m .+)", recipes[0])
    assert {f"python {re.sub(r'( --check)? [.]$', '', command)}" for command in made} <= entries
    (tests,) = [entry for entry in entries if "pytest" in entry]
    assert all((ROOT / word).exists() for word in tests.split() if word.startswith("tests/"))


def test_ci_runs_every_required_target():
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
    package = {str(path.relative_to(ROOT)) for path in (ROOT / "trl_ext").rglob("*.py")}
    package |= {"trl_ext/py.typed", "trl_ext/compat/names.json"}
    with zipfile.ZipFile(wheel) as file:
        of_wheel = set(file.namelist())
    assert {name for name in of_wheel if ".dist-info/" not in name} == package
    assert any(name.endswith("licenses/LICENSE") for name in of_wheel)
    with tarfile.open(sdist) as file:
        of_sdist = {name.split("/", 1)[1] for name in file.getnames() if "/" in name}
    assert package | {"LICENSE", "README.md", "pyproject.toml"} <= of_sdist
    assert not [name for name in of_sdist if name.startswith(("tests/", "benchmarks/", "docs/", "examples/"))]
