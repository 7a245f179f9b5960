"""Decide which log-prob passes run (policy, old policy, reference), on which rows and tokens, and why."""
