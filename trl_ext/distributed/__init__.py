"""Detects the engine (DDP, FSDP2, DeepSpeed, tensor parallelism), its groups of ranks, and the shards of each rank."""
