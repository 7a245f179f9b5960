"""The model's scoring forward: batch in, per-token log-probs out."""
