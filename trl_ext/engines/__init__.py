"""What the processes run on: DDP, FSDP2, DeepSpeed, tensor parallel; who holds which part of what."""

from .shards import ShardedWeight, is_zero3, parameter_of, sharded_weight

__all__ = ["ShardedWeight", "is_zero3", "parameter_of", "sharded_weight"]
