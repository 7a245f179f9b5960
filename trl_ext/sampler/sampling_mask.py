"""The sampling mask: which tokens a sampler with `top_k`, `top_p` or `min_p` could choose at each step.

Dimensions: B completions, C steps, K ids of a completion, E pairs of a step of a completion and an id.
"""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger("trl_ext")

# More log-probs than `top_k` are asked of vLLM, because tokens that tie with the last allowed one are allowed too
_TIES = 8


class SamplingMaskRecorder:
    """Collects the tokens that a sampler could choose in one generation: (completion, step, id), `(E, 3)` in total."""

    def __init__(self) -> None:
        self._entries: list[Tensor] = []
        self._steps = 0
        self._is_paused = False
        self._lengths: list[int] = []
        self.missing_probability = 0.0  # the largest probability of a step's allowed tokens that vLLM did not return

    def clear(self) -> None:
        """Forget what was recorded, because `generate` begins again."""
        self._entries = []
        self._steps = 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing in the `with` block."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def record(self, _: Tensor, scores_BV: Tensor) -> Tensor:
        """Note the finite scores of one step of transformers' `generate`; waits for the device. Returns the scores."""
        if self._is_paused:
            return scores_BV
        allowed_BV = scores_BV > -torch.inf
        allowed_BV &= ~allowed_BV.all(dim=1, keepdim=True)  # a token without ids may be any
        completion_E, id_E = allowed_BV.nonzero().unbind(1)
        self._entries.append(torch.stack([completion_E, torch.full_like(id_E, self._steps), id_E], 1).int())
        self._steps += 1
        return scores_BV

    def record_completions(self, completion_ids: list[list[int]]) -> None:
        """Note the completions, because `generate` goes on with rows that have ended."""
        self._lengths = [len(ids) for ids in completion_ids]

    def record_vllm(self, generation: tuple[Any, ...]) -> tuple[Any, ...]:
        """Note the log-probs that vLLM returns of the most likely tokens; return those of the sampled tokens alone.

        Args:
            generation (`tuple`): what `VLLMGeneration.generate` returns.
        """
        prompt_ids, completion_ids, log_probs, token_ids = generation
        entries: list[tuple[int, int, int]] = []
        sampled: list[list[list[float | None]]] = []
        for completion, ids in enumerate(completion_ids):
            sampled.append([])
            for step, token in enumerate(ids):
                pairs = dict(zip(token_ids[completion][step], log_probs[completion][step], strict=True))
                sampled[-1].append([pairs[token]])
                # vLLM gives -inf to the other tokens, and its server a number below -1000
                allowed_tokens = {id_: x for id_, x in pairs.items() if x is not None and x > -1000.0}
                entries += [(completion, step, id_) for id_ in allowed_tokens]
                if allowed_tokens:
                    missing_probability = 1.0 - sum(map(math.exp, allowed_tokens.values()))
                    self.missing_probability = max(self.missing_probability, missing_probability)
        self._entries.append(torch.tensor(entries, dtype=torch.int32).view(-1, 3))
        self.record_completions(completion_ids)
        return prompt_ids, completion_ids, sampled, [[[token] for token in ids] for ids in completion_ids]

    def entries(self, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the ids `(B, K)`, one step after another, padded with -1, and how many each step has `(B, C)`, int32.

        Args:
            width (`int`): C.
        """
        B = len(self._lengths)
        lengths_B = torch.tensor(self._lengths, device=device)
        entries = torch.cat([x.to(device).long() for x in self._entries])
        is_in_completion = entries[:, 1] < lengths_B[entries[:, 0]]
        completion_E, step_E, id_E = entries[is_in_completion].unbind(1)
        place_E = completion_E * width + step_E
        counts_BC = torch.bincount(place_E, minlength=B * width).view(B, width)
        row_count_B = counts_BC.sum(dim=1)
        ids_BK = torch.full((B, int(row_count_B.max())), -1, dtype=torch.int32, device=device)
        inside_BK = torch.arange(ids_BK.size(1), device=device) < row_count_B[:, None]
        ids_BK[inside_BK] = id_E[place_E.argsort(stable=True)].int()
        return ids_BK, counts_BC.int()


def log_probs_to_ask(top_k: int, most: int) -> int:
    """Return how many log-probs to ask of vLLM, which returns at most `most`."""
    return min(top_k + max(_TIES, top_k), most)


def warn_of_missing(mask: SamplingMaskRecorder, top_k: int) -> None:
    """Warn if vLLM kept more tokens than it returned log-probs for."""
    if mask.missing_probability > 1e-3:
        logger.warning(
            f"`top_k={top_k}` kept more tokens than vLLM returned log-probs for, because logits tie: up to "
            f"{mask.missing_probability:.1%} of a step's probability is missing. Raise vLLM's `max_logprobs`."
        )
