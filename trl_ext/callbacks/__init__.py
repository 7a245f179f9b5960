"""What a run shows: its progress bar and its model card."""
