"""What a checkpoint folder holds in addition to transformers' files, and whether it is complete."""
