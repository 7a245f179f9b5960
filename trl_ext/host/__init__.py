"""Host memory: activations between forward and backward, and the weights of a reference model. Knows only torch."""
