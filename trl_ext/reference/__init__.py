"""Where reference log-probs come from: adapter off, a named adapter, a model, a model on the CPU, or the store."""
