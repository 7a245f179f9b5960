"""The version, here and nowhere else. Rooms read it, as a clone that is not installed has no metadata."""

__version__ = "0.1.0"
