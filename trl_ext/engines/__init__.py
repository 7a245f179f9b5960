"""What the processes run on: DDP, FSDP2, DeepSpeed, tensor parallel; who holds which part of what."""

from .gradient_factor import with_gradient_times
from .shards import ShardedWeight, is_zero3, parameter_of, sharded_weight, whole_tensor

__all__ = ["ShardedWeight", "is_zero3", "parameter_of", "sharded_weight", "whole_tensor", "with_gradient_times"]
