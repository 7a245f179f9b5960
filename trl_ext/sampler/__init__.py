"""GRPO's sampler: vLLM's engine, the weights that reach it, and the check that it samples from the policy."""
