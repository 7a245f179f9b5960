"""The version, here and nowhere else: a clone that is not installed has no metadata."""

__version__ = "0.1.0"
