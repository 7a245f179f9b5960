"""Which log-prob passes run, and why: policy, old policy, reference; and which rows and tokens of them."""

from .plan import Decision, Plan

__all__ = ["Decision", "Plan"]
