"""Every name of TRL that is not public API, imported in this one folder."""

# ruff: noqa: I001  # first the versions: an unsupported TRL is told before a name is missed
from .versions import CORRECTS_TRUNCATED_SAMPLING, SUPPORTED
from .choices import (
    ADVANTAGE_CHOICES,
    DPO_CHOICES,
    DPO_LOSS_TYPES,
    GRPO_CHOICES,
    GRPO_LOSS_TYPES,
    REWARD_COLUMNS_LEFT_OUT,
    REWARD_KEYWORDS,
    TRUNCATION_MODES,
)
from .data import DataInternals
from .checkpoints import PolicyInFolder, rotation_put_off
from .dpo import DPOLossInternals, Recorded
from .grpo import GRPOInternals, sequence_parallelism_hidden
from .head import FusedCausalLMOutput, head_attached_by
from .ranks import TensorParallelInternals, WholeBatches, adapters_made_by, gathered_by
from .reference import ReferenceGiven, loaded_models_recorded, no_adapter_copied_by, unrecorded_pass

from trl.cli.accelerate_config import resolve_accelerate_config_argument
from trl.trainer.utils import maybe_gather_lm_head_ctx

__all__ = [
    "ADVANTAGE_CHOICES",
    "CORRECTS_TRUNCATED_SAMPLING",
    "DPO_CHOICES",
    "DPO_LOSS_TYPES",
    "GRPO_CHOICES",
    "GRPO_LOSS_TYPES",
    "REWARD_COLUMNS_LEFT_OUT",
    "REWARD_KEYWORDS",
    "SUPPORTED",
    "TRUNCATION_MODES",
    "DPOLossInternals",
    "DataInternals",
    "FusedCausalLMOutput",
    "GRPOInternals",
    "PolicyInFolder",
    "Recorded",
    "ReferenceGiven",
    "TensorParallelInternals",
    "WholeBatches",
    "adapters_made_by",
    "gathered_by",
    "head_attached_by",
    "loaded_models_recorded",
    "maybe_gather_lm_head_ctx",
    "no_adapter_copied_by",
    "resolve_accelerate_config_argument",
    "rotation_put_off",
    "sequence_parallelism_hidden",
    "unrecorded_pass",
]
