"""Uses TRL's private names; other files only override some. Importing it checks the versions of the libraries."""

from importlib.metadata import version
from typing import TYPE_CHECKING

from ..version import SUPPORTED, TESTED

if TYPE_CHECKING:
    from .moved import Moved

FOUND = {name: version(name) for name in TESTED if name != "deepspeed"}


def check_deepspeed() -> None:
    """Check DeepSpeed's version as that of the other libraries. Its import takes seconds, so only its users pay it.

    Raises:
        `ImportError`: an internal of DeepSpeed has moved.
    """
    for name in _check({"deepspeed": version("deepspeed")}):
        raise ImportError(
            f"trl_ext does not train with deepspeed {version('deepspeed')}, because {name.change}. Run `pip install "
            f"'deepspeed{TESTED['deepspeed']}'`, or install a later trl_ext."
        )


def _check(installed: dict[str, str]) -> list["Moved"]:
    if all(installed[name] in TESTED[name] for name in installed):
        return []
    from .moved import check_untested

    return check_untested(installed, TESTED)


for name, versions in SUPPORTED.items():
    if not versions.contains(FOUND[name], prereleases=True):
        raise ImportError(
            f"trl_ext works with {name}{versions}, found {name} {FOUND[name]}. Run `pip install '{name}{versions}'`."
        )
# What has moved in untested versions: `features.py` says what trains without it
MOVED = _check(FOUND)
