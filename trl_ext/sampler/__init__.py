"""GRPO's sampler: vLLM's engine, the weights that reach it, a check of both, and which tokens it could choose."""
