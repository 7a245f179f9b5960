"""The versions of TRL and transformers whose internals these files name."""

from importlib.metadata import version

from packaging.specifiers import SpecifierSet
from packaging.version import Version

SUPPORTED_TRL = SpecifierSet(">=1.15,<2")
# Later ones are taken if the names that `names.py` lists are what they were
TESTED = {"trl": SpecifierSet(">=1.15,<1.17"), "transformers": SpecifierSet(">=5.17,<5.24")}

FOUND = {name: version(name) for name in TESTED}

# Whether a truncated sampler's log-probs (`top_p` and the like) are comparable with those of the whole distribution
CORRECTS_TRUNCATED_SAMPLING = Version(FOUND["trl"]) >= Version("1.17")

if not SUPPORTED_TRL.contains(FOUND["trl"], prereleases=True):
    raise ImportError(
        f"trl_ext works with trl{SUPPORTED_TRL}, found trl {FOUND['trl']}. Run `pip install 'trl{SUPPORTED_TRL}'`."
    )
if any(FOUND[name] not in TESTED[name] for name in TESTED):
    from .moved import check_untested

    check_untested(FOUND, TESTED)
