"""The sampling mask: which tokens a sampler with `top_k`, `top_p` or `min_p` could choose at each step.

Dimensions: B completions, C steps, K ids of a completion, E pairs of a step of a completion and an id.
"""

import logging
import math
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger("trl_ext")

# More log-probs than `top_k` are asked of vLLM, because tokens that tie with the last kept one are kept too
_TIES = 8


class SamplingMask:
    """Collects the tokens that one generation could choose: (completion, step, token id), `(E, 3)` in total."""

    def __init__(self) -> None:
        self._found: list[Tensor] = []
        self._steps = 0
        self._lengths: list[int] = []
        self.missing = 0.0  # the largest probability of a step's kept tokens that vLLM did not return

    def record(self, _: Tensor, scores_BV: Tensor) -> Tensor:
        """Note the finite scores of one step of transformers' `generate`; waits for the device. Returns the scores."""
        kept_BV = scores_BV > -torch.inf
        kept_BV &= ~kept_BV.all(dim=1, keepdim=True)  # a token without ids keeps every one
        completion_E, id_E = kept_BV.nonzero().unbind(1)
        self._found.append(torch.stack([completion_E, torch.full_like(id_E, self._steps), id_E], 1).int())
        self._steps += 1
        return scores_BV

    def finished(self, completion_ids: list[list[int]]) -> None:
        """Note the completions, because `generate` goes on with rows that have ended."""
        self._lengths = [len(ids) for ids in completion_ids]

    def of_vllm(self, generated: tuple[Any, ...]) -> tuple[Any, ...]:
        """Note the log-probs that vLLM returns of the most likely tokens; return those of the sampled tokens alone.

        Args:
            generated (`tuple`): what `VLLMGeneration.generate` returns.
        """
        prompt_ids, completion_ids, log_probs, token_ids = generated
        found: list[tuple[int, int, int]] = []
        sampled: list[list[list[float | None]]] = []
        for completion, ids in enumerate(completion_ids):
            sampled.append([])
            for step, token in enumerate(ids):
                pairs = dict(zip(token_ids[completion][step], log_probs[completion][step], strict=True))
                sampled[-1].append([pairs[token]])
                # vLLM gives -inf to the others, and its server a number below -1000
                kept = {id_: x for id_, x in pairs.items() if x is not None and x > -1000.0}
                found += [(completion, step, id_) for id_ in kept]
                if kept:
                    self.missing = max(self.missing, 1.0 - sum(map(math.exp, kept.values())))
        self._found.append(torch.tensor(found, dtype=torch.int32).view(-1, 3))
        self.finished(completion_ids)
        return prompt_ids, completion_ids, sampled, [[[token] for token in ids] for ids in completion_ids]

    def entries(self, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the ids `(B, K)`, one step after another, padded with -1, and how many each step has `(B, C)`, int32.

        Args:
            width (`int`): C.
        """
        B = len(self._lengths)
        lengths_B = torch.tensor(self._lengths, device=device)
        found = torch.cat([x.to(device).long() for x in self._found])
        completion_E, step_E, id_E = found[found[:, 1] < lengths_B[found[:, 0]]].unbind(1)
        place_E = completion_E * width + step_E
        counts_BC = torch.bincount(place_E, minlength=B * width).view(B, width)
        of_row_B = counts_BC.sum(dim=1)
        ids_BK = torch.full((B, int(of_row_B.max())), -1, dtype=torch.int32, device=device)
        inside_BK = torch.arange(ids_BK.size(1), device=device) < of_row_B[:, None]
        ids_BK[inside_BK] = id_E[place_E.argsort(stable=True)].int()
        return ids_BK, counts_BC.int()


def log_probs_to_ask(top_k: int, most: int) -> int:
    """Return how many log-probs to ask of vLLM, which returns at most `most`."""
    return min(top_k + max(_TIES, top_k), most)


def warn_of_missing(mask: SamplingMask, top_k: int) -> None:
    """Warn if vLLM kept more tokens than it returned log-probs for."""
    if mask.missing > 1e-3:
        logger.warning(
            f"`top_k={top_k}` kept more tokens than vLLM returned log-probs for, because logits tie: up to "
            f"{mask.missing:.1%} of a step's probability is missing. Raise vLLM's `max_logprobs`."
        )
