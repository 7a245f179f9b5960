"""Every name of TRL that is not public API, imported in this one folder."""

# ruff: noqa: I001  # first the versions: an unsupported TRL is told before a name is missed
from .versions import CORRECTS_TRUNCATED_SAMPLING, SUPPORTED
from .choices import (
    ADVANTAGE_CHOICES,
    DPO_CHOICES,
    DPO_LOSS_TYPES,
    GRPO_CHOICES,
    GRPO_LOSS_TYPES,
    REPLACEABLE,
    REWARD_COLUMNS_LEFT_OUT,
    REWARD_KEYWORDS,
    TRUNCATION_MODES,
)
from .building import built_with
from .grpo import sequence_parallelism_hidden
from .outputs import FusedCausalLMOutput
from .replaced import REPLACED, module_of, names_replaced, replaced, unrecorded_pass

from trl.cli.accelerate_config import resolve_accelerate_config_argument
from trl.trainer.utils import maybe_gather_lm_head_ctx

__all__ = [
    "ADVANTAGE_CHOICES",
    "CORRECTS_TRUNCATED_SAMPLING",
    "DPO_CHOICES",
    "DPO_LOSS_TYPES",
    "GRPO_CHOICES",
    "GRPO_LOSS_TYPES",
    "REPLACEABLE",
    "REPLACED",
    "REWARD_COLUMNS_LEFT_OUT",
    "REWARD_KEYWORDS",
    "SUPPORTED",
    "TRUNCATION_MODES",
    "FusedCausalLMOutput",
    "built_with",
    "maybe_gather_lm_head_ctx",
    "module_of",
    "names_replaced",
    "replaced",
    "resolve_accelerate_config_argument",
    "sequence_parallelism_hidden",
    "unrecorded_pass",
]
