"""Memory on the device: what a training step takes, and activations kept on the host."""
