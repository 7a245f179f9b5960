"""The versions of TRL whose internals these files name."""

from importlib.metadata import version

from packaging.specifiers import SpecifierSet

SUPPORTED_TRL = SpecifierSet(">=1.15,<1.17")

if version("trl") not in SUPPORTED_TRL:
    raise ImportError(
        f"trl_ext works with trl{SUPPORTED_TRL}, found trl {version('trl')}. Run `pip install 'trl{SUPPORTED_TRL}'`."
    )
