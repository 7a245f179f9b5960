"""Hidden states to per-token log-probs and statistics of the logits. Knows torch only."""
