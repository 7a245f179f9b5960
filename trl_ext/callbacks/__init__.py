"""Callbacks that show a run: what its progress bar says, and plots of its logs."""

from .curves import CurvesCallback
from .progress import ThroughputProgress, with_throughput

__all__ = ["CurvesCallback", "ThroughputProgress", "with_throughput"]
