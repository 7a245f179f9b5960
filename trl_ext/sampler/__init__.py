"""The sampler beside the trainer: which tokens it could choose."""
