"""The command `doctor`: versions, devices, the engine, and a self-test of the LM head on each device."""

import platform
import sys
import tomllib
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import torch
from accelerate import Accelerator
from packaging.requirements import Requirement

from ..distributed.detect import detect_engine
from ..heads.kernels.work import triton_unavailable_reason
from ..scoring.checks import self_test
from ..version import NEEDS_TRL, TESTED, __version__
from . import one_line, wrapped

_OPTIONAL = ("triton", "bitsandbytes", "deepspeed", "flash-attn", "kernels", "vllm")


def run() -> int:
    """Print a row for each check; return 1 if one fails."""
    rows = [("trl_ext", f"{__version__}, Python {platform.python_version()}, {platform.platform()}", True)]
    if is_shadowed_in(Path.cwd()):
        rows.append(("this folder", _SHADOWED, False))
    optional = {name: _version(name) for name in _OPTIONAL}
    rows += _required()
    rows += _moved()
    rows += [(name, f"{number} (optional)", True) for name, number in optional.items() if number]
    accelerator = Accelerator()
    rows.append(("engine", f"{detect_engine(accelerator, torch.nn.Linear(1, 1))}", True))
    for device in (torch.device("cpu"), *(torch.device("cuda", x) for x in range(torch.cuda.device_count()))):
        rows += _head_on(device)
    for name, words, is_fine in rows:
        print(wrapped(words, f"{name:<15}{'ok' if is_fine else 'WRONG':<7}"))
    return 0 if all(is_fine for _, _, is_fine in rows) else 1


_SHADOWED = (
    "Scripts here would import the folder `trl_ext`, which is no package, and fail with `cannot import name ... "
    "(unknown location)`. Rename the folder, for example to `trl-ext`. If it is the clone that you installed, install "
    "it again afterwards."
)


def is_shadowed_in(folder: Path) -> bool:
    """Return whether a script in `folder` imports a folder there in place of the package.

    Python looks through all of its path before it asks the finder of an editable install. A folder without an
    `__init__.py`, such as a clone that is called `trl_ext`, is then taken for a package in several parts.
    """
    spec = PathFinder.find_spec("trl_ext", [str(folder), *sys.path])
    return spec is not None and spec.origin is None and (folder / "trl_ext").is_dir()


def _required() -> list[tuple[str, str, bool]]:
    """Return a row for each required package."""
    requirements = _requirements()
    if requirements is None:
        return [("packages", "trl_ext has no metadata and no pyproject.toml. Run `pip install .` in its clone.", False)]
    trainer_requirements = [
        x for x in map(Requirement, requirements) if x.marker is None or x.marker.evaluate({"extra": "trl"})
    ]
    rows = []
    # The last range of a package is the extra's, which is within that of the package without it
    for requirement in {x.name: x for x in trainer_requirements}.values():
        installed_version = _version(requirement.name)
        is_fine = installed_version is not None and requirement.specifier.contains(installed_version, prereleases=True)
        state = "not installed" if installed_version is None else f"found {installed_version}"
        tested_versions = TESTED.get(requirement.name)
        is_tested = tested_versions is None or installed_version is None or installed_version in tested_versions
        untested = "" if is_tested else f", not tested: the tests ran with {requirement.name}{tested_versions}"
        remedy = f"Run `pip install '{requirement.name}{requirement.specifier}'`."
        words = f"{installed_version}{untested}" if is_fine else f"{state}. {remedy}"
        if requirement.name == "trl" and installed_version is None:
            words, is_fine = NEEDS_TRL, True
        rows.append((requirement.name, words, is_fine))
    return rows


def _moved() -> list[tuple[str, str, bool]]:
    """Return a row for each internal of an untested version that has moved."""
    try:
        from ..compat import MOVED  # here, because it raises an error where the trainers cannot be used
        from ..compat.features import features_of
    except ImportError:  # of which the row of TRL or transformers says why
        return []
    rows = []
    for name in MOVED:
        features = features_of(name.place, name.name)
        lost = f"Off: {', '.join(features)}." if features else "Trainers that need it do not work."
        rows.append((f"  {name.package}", f"{name.change}. {lost}", bool(features)))
    return rows


def _requirements() -> list[str] | None:
    """Return the requirements in the package's metadata, or in pyproject.toml of a checkout that is not installed."""
    try:
        return requires("trl_ext") or []
    except PackageNotFoundError:
        project = Path(__file__).parents[2] / "pyproject.toml"
        if not project.exists():
            return None
        stated = tomllib.loads(project.read_text())["project"]
        return [*stated["dependencies"], *stated["optional-dependencies"]["trl"]]


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _head_on(device: torch.device) -> list[tuple[str, str, bool]]:
    """Return rows for a device: its name, whether the LM head is exact on it, and which kernels the head uses."""
    threads = torch.get_num_threads()
    description = f"{threads} {'thread' if threads == 1 else 'threads'}"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        capability = f"{properties.major}.{properties.minor}"
        description = f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB, capability {capability}"
    rows = [(str(device), description, True)]
    reason = triton_unavailable_reason(device)
    kernels = "Triton" if reason is None else f"torch, because {reason}"
    try:
        tested_cases = self_test(device)
    except Exception as error:  # a device may raise anything
        return [*rows, ("  head", one_line(error), False)]
    return [*rows, ("  head", f"agrees with its definition: {', '.join(tested_cases)}. Kernels: {kernels}.", True)]
