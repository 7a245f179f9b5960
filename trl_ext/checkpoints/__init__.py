"""What a checkpoint folder holds beside transformers' files, and whether it is whole."""

from .complete import begin, complete_checkpoints, discard, finish, half_written, is_complete
from .engine import deepspeed_format, fsdp_format, why_not_loaded
from .generation import SavedGeneration, position_in_data, read_generation, write_generation
from .split import load_weights, names_differ, read_optimizer, save_optimizer

__all__ = [
    "SavedGeneration",
    "begin",
    "complete_checkpoints",
    "deepspeed_format",
    "discard",
    "finish",
    "fsdp_format",
    "half_written",
    "is_complete",
    "load_weights",
    "names_differ",
    "position_in_data",
    "read_generation",
    "read_optimizer",
    "save_optimizer",
    "why_not_loaded",
    "write_generation",
]
