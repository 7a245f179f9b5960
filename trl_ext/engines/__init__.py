"""What the processes run on: DDP, FSDP2, DeepSpeed, tensor parallel; who holds which part of what."""

from .shards import ShardedWeight, averaged, is_zero3, parameter_of, sharded_weight, whole_tensor

__all__ = ["ShardedWeight", "averaged", "is_zero3", "parameter_of", "sharded_weight", "whole_tensor"]
