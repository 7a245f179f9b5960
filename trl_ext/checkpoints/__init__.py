"""What a checkpoint folder holds beside transformers' files, and whether it is whole."""
