"""Callbacks that show a run: what its progress bar says, and plots of its logs."""
