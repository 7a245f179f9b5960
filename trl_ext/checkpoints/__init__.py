"""What a checkpoint folder holds beside transformers' files, and whether it is whole."""

from .complete import begin, complete_checkpoints, discard, finish, half_written, is_complete
from .generation import SavedGeneration, position_in_data, read_generation, write_generation

__all__ = [
    "SavedGeneration",
    "begin",
    "complete_checkpoints",
    "discard",
    "finish",
    "half_written",
    "is_complete",
    "position_in_data",
    "read_generation",
    "write_generation",
]
