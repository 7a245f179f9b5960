"""The version, here and nowhere else: a clone that is not installed has no metadata. And what its trainers need."""

from packaging.specifiers import SpecifierSet

__version__ = "0.1.0"

NEEDS_TRL = "trl_ext's trainers need TRL. Run `pip install 'trl_ext[trl]'`. `trl_ext.core` works without it."
# Versions that the trainers and commands need
SUPPORTED = {"trl": SpecifierSet(">=1.15,<2"), "transformers": SpecifierSet(">=5.17,<6")}
# Others within these work too, unless a name in `compat/names.json` has changed
TESTED = {
    "trl": SpecifierSet(">=1.15,<1.17"),
    "transformers": SpecifierSet(">=5.17,<5.25"),
    "torch": SpecifierSet(">=2.11,<2.16"),
    "peft": SpecifierSet(">=0.21,<0.22"),
    "accelerate": SpecifierSet(">=1.15,<1.16"),
    "datasets": SpecifierSet(">=5.2,<5.3"),
    "deepspeed": SpecifierSet(">=0.19.8,<0.20"),
}
