"""The check that vLLM samples from the policy: its log-probs must stay as close to the trainer's as they were."""

import logging
from collections import deque
from statistics import median
from typing import Any, Protocol

import torch
from accelerate.utils import gather_object

logger = logging.getLogger("trl_ext")

# Of the median of the last 32. Measured on a tiny model in bf16: rounding gives at most 1.4 times in 400 steps, one
# optimizer step that does not reach the sampler gives 6 times, and in fp32 100,000 times
_FACTOR = 3.0
_SUSPECT = 1.25  # then the weights in vLLM are compared
_REMEMBERED = 32
_LEAST = 1e-5  # rounding of fp32 in a deep model
_MOST_OF_FP32, _MOST = 1e-3, 0.3  # before there is a median: 1,000 (fp32) and 20 (bf16) times what was measured


class Trainer(Protocol):
    """The trainer members that the check reads."""

    accelerator: Any
    args: Any
    model: Any
    state: Any
    rollout_func: Any


class SamplerCheck:
    """Implements `sampler_check`: compares the mean difference of the log-probs with that of earlier micro-batches.

    Both sides must come from the same weights, so only micro-batches count whose old policy sampled them. Rounding
    explains a difference that stays of one size; weights or cached keys and values of an earlier step make it jump. In
    half precision a jump may be small. So if the difference is only suspect, vLLM's weights decide.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._usual: deque[float] = deque(maxlen=_REMEMBERED)
        self._never_equal: set[str] = set()  # parameters that vLLM holds in another form
        self._reported = False

    def observe(self, difference: float, sampled_at: int) -> None:
        """Take a micro-batch's mean difference over all ranks, and the step that sampled it. Every rank must call it.

        Raises:
            `RuntimeError`: the difference is not rounding, and `sampler_check` is "stop".
        """
        action = getattr(self.trainer.args, "sampler_check", "warn")
        generation = getattr(self.trainer, "vllm_generation", None)
        if self._reported or action == "off" or generation is None or self.trainer.rollout_func is not None:
            return
        is_rounding = difference <= self._limit(generation)
        is_usual = bool(self._usual) and difference <= _SUSPECT * median(self._usual)
        is_policy = sampled_at == self.trainer.state.global_step  # otherwise the weights have changed since
        stale = self._stale(generation) if is_policy and not (is_rounding and is_usual) else None
        if not self._usual and is_rounding:
            self._never_equal, stale = {*(stale or ())}, None
        if is_rounding and not stale:
            self._usual.append(difference)
            return
        self._reported = True
        message = self._message(stale, difference, sampled_at)
        if action == "stop":
            raise RuntimeError(message)
        if self.trainer.accelerator.is_main_process:
            logger.warning(message)

    def _stale(self, generation: Any) -> list[str] | None:
        """Return the parameters that vLLM holds with other values than the policy, on any rank; `None` if unknown."""
        found = generation.stale_weights()
        if found is None:
            return None
        return [name for name in dict.fromkeys(gather_object(found)) if name not in self._never_equal]

    def _limit(self, generation: Any) -> float:
        if self._usual:
            return max(_LEAST, _FACTOR * median(self._usual))
        trainer = self.trainer
        computes_fp32 = trainer.accelerator.mixed_precision == "no" and trainer.model.dtype == torch.float32
        samples_fp32 = generation.dtype == torch.float32
        return _MOST_OF_FP32 if computes_fp32 and samples_fp32 else _MOST

    def _message(self, stale: list[str] | None, difference: float, sampled_at: int) -> str:
        usual = f"Until then it was {median(self._usual):.1e}. " if self._usual else ""
        if stale is None:
            known = "The weights that vLLM holds cannot be read here."
        elif stale:
            known = f"vLLM has other weights than the policy: {', '.join(stale[:5])}"
            known += f" and {len(stale) - 5} more." if len(stale) > 5 else "."
        else:
            known = (
                "The weights that vLLM holds are the policy's, so look at its prefix cache and its sampling options."
            )
        return (
            f"Completions are not samples of the policy: since step {sampled_at}, vLLM's log-probs differ from the "
            f"policy's by {difference:.1e} per token. {usual}{known} (`sampler_check`)"
        )
