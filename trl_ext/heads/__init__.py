"""Compute per-token log-probs and statistics of the logits from hidden states. Imports only torch and Triton."""
