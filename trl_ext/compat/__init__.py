"""Uses TRL's private names; other files only override some. Importing it checks TRL's and transformers' versions."""

from importlib.metadata import version

from packaging.specifiers import SpecifierSet

SUPPORTED = {"trl": SpecifierSet(">=1.15,<2"), "transformers": SpecifierSet(">=5.17,<6")}
# Later versions work too, unless a name in `names.py` has changed
TESTED = {"trl": SpecifierSet(">=1.15,<1.17"), "transformers": SpecifierSet(">=5.17,<5.24")}

FOUND = {name: version(name) for name in TESTED}

for name, versions in SUPPORTED.items():
    if not versions.contains(FOUND[name], prereleases=True):
        raise ImportError(
            f"trl_ext works with {name}{versions}, found {name} {FOUND[name]}. Run `pip install '{name}{versions}'`."
        )
if any(FOUND[name] not in TESTED[name] for name in TESTED):
    from .moved import check_untested

    check_untested(FOUND, TESTED)
