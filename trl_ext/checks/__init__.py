"""Checks of arguments, data sets and subclasses: a mistake is one error before training."""
