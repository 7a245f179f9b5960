"""The check that completions are samples of the policy: log-probs of sampler and policy stay as close as at first."""

import logging
import math
from statistics import median
from typing import Any, Protocol

import torch
from accelerate.utils import gather_object

logger = logging.getLogger("trl_ext")

# Of the median of the first micro-batches. Measured on a tiny model in bf16: rounding gives at most 1.4 times in 400
# steps, one optimizer step that does not reach the sampler gives 6 times, and in fp32 100,000 times
_FACTOR = 3.0
_FACTOR_OF_EQUAL_WEIGHTS = 4.0
_SUSPECT = 1.25  # then the weights in vLLM are compared
_FIRST = 4
_LEAST = 1e-5  # rounding of fp32 in a deep model
# Before there is a median: 1,000 (fp32) and 20 (bf16) times what was measured
_MOST_OF_FP32 = 1e-3
_MOST = 0.3


class Trainer(Protocol):
    """The trainer members that the check reads."""

    accelerator: Any
    args: Any
    model: Any
    state: Any


class SamplerCheck:
    """Implements `sampler_check`: compares the mean difference of the log-probs with that of the first micro-batches.

    Both sides must come from the same weights, so only micro-batches count whose old policy sampled them. Rounding
    explains a difference that stays of one size; weights or cached keys and values of an earlier step make it grow. In
    half precision it may grow little. So if the difference is only suspect, vLLM's weights decide.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._first: list[float] = []
        self._cleared = 0.0  # the largest difference with which vLLM had the policy's weights
        self._never_equal: set[str] = set()  # parameters that vLLM holds in another form
        self._reported = False

    def observe(self, difference: float, sampled_at: int) -> None:
        """Take the largest mean difference of a rank in a micro-batch, and the step that sampled the micro-batch.

        Every rank must call it, with the same numbers.

        Raises:
            `RuntimeError`: the difference is not rounding, and `sampler_check` is "stop".
        """
        action = getattr(self.trainer.args, "sampler_check", "warn")
        generation = getattr(self.trainer, "vllm_generation", None)  # None: continuous batching
        if self._reported or action == "off" or getattr(self.trainer, "rollout_func", None) is not None:
            return
        if not math.isfinite(difference):
            return
        is_policy = sampled_at == self.trainer.state.global_step  # otherwise the weights have changed since
        if not self._first:
            most = self._most_of_rounding(generation)
            is_suspect = True
        else:
            most = max(_LEAST, _FACTOR * median(self._first))
            is_suspect = difference > max(_LEAST, _SUSPECT * median(self._first), _SUSPECT * self._cleared)
        stale = self._stale_weights(generation) if is_policy and is_suspect else None
        if not self._first and difference <= most:
            self._never_equal = set(stale or ())
            stale = None
        elif stale == []:
            self._cleared = max(self._cleared, difference)
            most *= _FACTOR_OF_EQUAL_WEIGHTS / _FACTOR
        if difference <= most and not stale:
            self._first += [difference] if len(self._first) < _FIRST else []
            return
        self._reported = True
        message = self._message(stale, difference, sampled_at)
        if action == "stop":
            raise RuntimeError(message)
        if self.trainer.accelerator.is_main_process:
            logger.warning(message)

    def _stale_weights(self, generation: Any) -> list[str] | None:
        """Return the parameters that vLLM holds with other values than the policy, on any rank; `None` if unknown."""
        names = None if generation is None else generation.stale_weights()
        if names is None:
            return None
        return [name for name in dict.fromkeys(gather_object(names)) if name not in self._never_equal]

    def _most_of_rounding(self, generation: Any) -> float:
        """Return the largest difference that rounding can explain, before there is another to compare with."""
        trainer = self.trainer
        computes_fp32 = trainer.accelerator.mixed_precision == "no" and trainer.model.dtype == torch.float32
        samples_in_fp32 = generation is None or generation.dtype == torch.float32
        return _MOST_OF_FP32 if computes_fp32 and samples_in_fp32 else _MOST

    def _message(self, stale: list[str] | None, difference: float, sampled_at: int) -> str:
        is_vllm = getattr(self.trainer, "vllm_generation", None) is not None
        sampler = "vLLM" if is_vllm else "continuous batching"
        usual = f"At first, the difference was {median(self._first):.1e}. " if self._first else ""
        if not is_vllm:
            finding = "Look for code that copies or replaces the model before it generates."
        elif stale is None:
            finding = "The weights that vLLM holds cannot be read here."
        elif stale:
            finding = f"vLLM has other weights than the policy: {', '.join(stale[:5])}"
            finding += f" and {len(stale) - 5} more." if len(stale) > 5 else "."
        else:
            finding = (
                "All weights that can be compared equal the policy's, so look at vLLM's prefix cache and its sampling "
                "options."
            )
        return (
            f"Completions are not samples of the policy: since step {sampled_at}, {sampler}'s log-probs differ "
            f"from the policy's by {difference:.1e} per token. {usual}{finding} (`sampler_check`)"
        )
