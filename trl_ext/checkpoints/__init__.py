"""The files that trl_ext adds to a checkpoint folder, and the check that a checkpoint is complete."""
