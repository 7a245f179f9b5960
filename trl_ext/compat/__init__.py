"""Uses TRL's private names; other files only override some. Importing it checks the versions of the libraries."""

from importlib.metadata import version

from packaging.specifiers import SpecifierSet

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
    """Check DeepSpeed's version as that of the other libraries. Its import takes seconds, so only its users pay it."""
    _check({"deepspeed": version("deepspeed")})


def _check(installed: dict[str, str]) -> None:
    if any(installed[name] not in TESTED[name] for name in installed):
        from .moved import check_untested

        check_untested(installed, TESTED)


for name, versions in SUPPORTED.items():
    if not versions.contains(FOUND[name], prereleases=True):
        raise ImportError(
            f"trl_ext works with {name}{versions}, found {name} {FOUND[name]}. Run `pip install '{name}{versions}'`."
        )
_check(FOUND)
