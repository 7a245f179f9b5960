"""What a run shows: its progress bar, its model card, and plots of its logs."""
