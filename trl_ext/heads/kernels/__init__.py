"""The operations on a tile of logits between the matrix products, in torch and in Triton."""
