"""Sources of reference log-probs: adapter off, a named adapter, a copy, a model, a model on the CPU, or the store."""
