"""A padded batch as one row without padding or repeated prompts, and back."""
