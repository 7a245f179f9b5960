"""`DPOTrainer`, `GRPOTrainer` and their parts."""
