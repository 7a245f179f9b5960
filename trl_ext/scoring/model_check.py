"""The check of the first batch: log-probs of a few tokens must be those of the model's own logits.

Each model's forward is compared, not its config. The tokens do not depend on the batch, so that all ranks, which run
the same forwards, find the same.
"""

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..packing.first_batch import is_coarse, undisturbed
from ..packing.support import backbone_of, placeholder_ids
from .model_logits import ModelForward, accepted

logger = logging.getLogger("trl_ext")

_TOKENS = 8
_CLASSES = 32
# Tolerances of the root mean square of the differences, relative to that of logits and log-probs. In bf16 a logit is
# rounded to 1e-3 of its size, up to four times; in fp32, products of 4096 numbers are exact to 5e-6
TOLERANCE = 1e-4
COARSE_TOLERANCE = 2e-2


@dataclass(frozen=True)
class ModelSample:
    """What the model's own code computes on N tokens."""

    hidden_NH: Tensor  # the last hidden states of the backbone
    logits_NV: Tensor  # float64
    classes_K: Tensor  # the classes whose log-probs are compared
    is_coarse: bool  # whether logits are less precise than fp32

    @classmethod
    def of(
        cls, model: Any, forward: ModelForward, vocabulary: int, device: torch.device, *, has_mask: bool
    ) -> "ModelSample | None":
        """Run the backbone, then the whole forward, without gradients and dropout. None if the forward does not run."""
        ids_1N = torch.tensor([token_ids(model.config, vocabulary)], device=device)
        inputs: dict[str, Any] = {"input_ids": ids_1N, "use_cache": False}
        if has_mask:
            inputs["attention_mask"] = torch.ones_like(ids_1N)
        try:
            with undisturbed(model, device):
                hidden_1NH = backbone_of(model)(**inputs).last_hidden_state
            with undisturbed(model, device):
                logits_1NV = forward(model, **accepted(model, inputs)).logits
        except Exception as error:  # of any model's code, which may need more inputs, or know the batch, as aLoRA does
            logger.warning(
                f"The log-probs of {type(model).__name__} were not compared with its own logits, because its forward "
                f"raised {type(error).__name__}: {error}"
            )
            return None
        if isinstance(logits_1NV, DTensor):
            logits_1NV = logits_1NV.full_tensor()
        V = logits_1NV.shape[-1]
        return cls(
            hidden_NH=hidden_1NH[0],
            logits_NV=logits_1NV[0].double(),
            classes_K=torch.linspace(0, V - 1, min(_CLASSES, V), device=logits_1NV.device).long(),
            is_coarse=is_coarse(model, hidden_1NH) or logits_1NV.dtype in (torch.bfloat16, torch.float16),
        )

    @property
    def processed_tokens(self) -> int:
        return 2 * len(self.hidden_NH)  # of the backbone alone, and of the whole forward

    @property
    def tolerance(self) -> float:
        return COARSE_TOLERANCE if self.is_coarse else TOLERANCE

    def repeats(self, other: "ModelSample") -> bool:
        """Whether both runs gave the same logits."""
        difference = (self.logits_NV - other.logits_NV).norm()
        return bool(difference <= self.tolerance * other.logits_NV.norm()) or not bool(difference.isfinite())


def token_ids(config: Any, vocabulary: int) -> list[int]:
    """Return ids of different tokens, none of which stands for an image or a sound."""
    placeholders = placeholder_ids(config)
    spread = [vocabulary * number // 64 for number in range(64)]
    usual = [token for token in spread if token not in placeholders] or spread
    return [usual[len(usual) * number // _TOKENS] for number in range(_TOKENS)]


def difference_reason(log_probs_M: Tensor, sample: ModelSample, temperature: float) -> str | None:
    """Return how far log-probs are from those of the model's logits, or None if they agree.

    Args:
        log_probs_M: of each class of `sample.classes_K`, token by token.
    """
    logits_NV = sample.logits_NV / temperature
    expected_M = logits_NV.log_softmax(-1)[:, sample.classes_K].flatten()
    logits_M = logits_NV[:, sample.classes_K].flatten()
    # A class that the model excludes has a logit of -inf, or the lowest number of its dtype
    is_compared_M = expected_M.isfinite() & (logits_M > -1e4 * logits_NV.median().abs().clamp(min=1))
    if not is_compared_M.any():
        return None
    difference_M = (log_probs_M.detach().to(expected_M) - expected_M)[is_compared_M].abs()
    size = sum(float(x[is_compared_M].square().mean()) for x in (expected_M, logits_M)) ** 0.5
    off = float(difference_M.square().mean()) ** 0.5 / size
    return None if off <= sample.tolerance else f"on the first batch, by up to {float(difference_M.max()):.2g}"
