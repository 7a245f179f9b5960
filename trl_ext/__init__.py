"""trl_ext: TRL's trainers with exact per-token log-probs."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .version import NEEDS_TRL, __version__

if TYPE_CHECKING:
    from .config import DistillationConfig, DPOConfig, GRPOConfig, KTOConfig, RewardConfig, RLOOConfig, SFTConfig
    from .heads.linear_log_probs import linear_log_probs
    from .heads.logits import LinearLogProbs
    from .trainers.distillation import DistillationTrainer
    from .trainers.dpo import DPOTrainer
    from .trainers.grpo import GRPOTrainer
    from .trainers.kto import KTOTrainer
    from .trainers.reward import RewardTrainer
    from .trainers.rloo import RLOOTrainer
    from .trainers.sft import SFTTrainer

__all__ = [
    "DPOConfig",
    "DPOTrainer",
    "DistillationConfig",
    "DistillationTrainer",
    "GRPOConfig",
    "GRPOTrainer",
    "KTOConfig",
    "KTOTrainer",
    "LinearLogProbs",
    "RLOOConfig",
    "RLOOTrainer",
    "RewardConfig",
    "RewardTrainer",
    "SFTConfig",
    "SFTTrainer",
    "__version__",
    "linear_log_probs",
]

# Imported on first use, as in TRL, because importing torch and transformers takes seconds
_DEFINED_IN = {
    "DPOConfig": ".config",
    "DPOTrainer": ".trainers.dpo",
    "DistillationConfig": ".config",
    "DistillationTrainer": ".trainers.distillation",
    "GRPOConfig": ".config",
    "GRPOTrainer": ".trainers.grpo",
    "KTOConfig": ".config",
    "KTOTrainer": ".trainers.kto",
    "LinearLogProbs": ".heads.logits",
    "RLOOConfig": ".config",
    "RLOOTrainer": ".trainers.rloo",
    "RewardConfig": ".config",
    "RewardTrainer": ".trainers.reward",
    "SFTConfig": ".config",
    "SFTTrainer": ".trainers.sft",
    "linear_log_probs": ".heads.linear_log_probs",
}


def __getattr__(name: str) -> Any:
    if name not in _DEFINED_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(_DEFINED_IN[name], __name__)
    except ModuleNotFoundError as error:
        if error.name != "trl":
            raise
        raise ImportError(NEEDS_TRL) from error
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
