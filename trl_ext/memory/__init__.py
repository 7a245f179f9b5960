"""How much memory a training step takes, by running the model's own code on tensors that hold no numbers."""
