"""The version, here and nowhere else: a clone that is not installed has no metadata. And what its trainers need."""

__version__ = "0.1.0"

NEEDS_TRL = "trl_ext's trainers need TRL. Run `pip install 'trl_ext[trl]'`. `trl_ext.core` works without it."
