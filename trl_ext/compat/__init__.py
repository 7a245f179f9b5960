"""Uses TRL's private names; other files only override some. Importing it checks the versions of the libraries."""

from importlib.metadata import version
from typing import TYPE_CHECKING

from packaging.specifiers import SpecifierSet

if TYPE_CHECKING:
    from .moved import Moved

SUPPORTED = {"trl": SpecifierSet(">=1.15,<2"), "transformers": SpecifierSet(">=5.17,<6")}
# Other versions work too, unless a name in `names.json` has changed
TESTED = {
    "trl": SpecifierSet(">=1.15,<1.17"),
    "transformers": SpecifierSet(">=5.17,<5.25"),
    "torch": SpecifierSet(">=2.11,<2.16"),
    "peft": SpecifierSet(">=0.21,<0.22"),
    "accelerate": SpecifierSet(">=1.15,<1.16"),
    "datasets": SpecifierSet(">=5.2,<5.3"),
    "deepspeed": SpecifierSet(">=0.19.8,<0.20"),
}
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
