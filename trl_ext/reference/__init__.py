"""Where reference log-probs come from: adapter off, a named adapter, a model, a model on the CPU, or the store."""

from .adapters import (
    OwnReference,
    begins_with_weights_of_base,
    freeze_adapter,
    name_policy,
    trained_beside,
    trl_copies_whole,
)
from .canary import COARSE, EXACT, Canary, Tolerance, tolerance_of
from .columns import CheckedCollator, check_batch, check_column_values, have_columns
from .hosted import HostedReference, host_reference
from .identity import identity_facts, identity_of, write_about
from .moved import load_moved, save_moved
from .store import DiskStore, MemoryStore
from .stored import Answer, StoredReference, random_state_kept
from .variants import Variants
from .weights import ReferenceWeights

__all__ = [
    "COARSE",
    "EXACT",
    "Answer",
    "Canary",
    "CheckedCollator",
    "DiskStore",
    "HostedReference",
    "MemoryStore",
    "OwnReference",
    "ReferenceWeights",
    "StoredReference",
    "Tolerance",
    "Variants",
    "begins_with_weights_of_base",
    "check_batch",
    "check_column_values",
    "freeze_adapter",
    "have_columns",
    "host_reference",
    "identity_facts",
    "identity_of",
    "load_moved",
    "name_policy",
    "random_state_kept",
    "save_moved",
    "tolerance_of",
    "trained_beside",
    "trl_copies_whole",
    "write_about",
]
