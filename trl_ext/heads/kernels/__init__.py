"""The work on one tile of logits, in torch and in Triton."""
