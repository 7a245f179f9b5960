"""The scoring forward of a model: it takes a batch and returns per-token log-probs."""
