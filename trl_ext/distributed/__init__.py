"""Which engine runs (DDP, FSDP2, DeepSpeed, tensor parallelism), its groups of ranks, and what each rank holds."""
