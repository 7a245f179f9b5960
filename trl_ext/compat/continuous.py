"""Transformers' continuous batching, with one request for all completions of a prompt, and with log-probs."""

import copy
import math
from collections.abc import Callable
from typing import Any

import transformers
from packaging.version import Version

RETURNS_ALL_COMPLETIONS = Version(transformers.__version__) >= Version("5.18")


def complete(
    generate_batch: Callable[..., dict[str, Any]],
    prompt_ids: list[list[int]],
    generation_config: Any,
    continuous_batching_config: Any,
    *,
    shares_prompts: bool = True,
    **options: Any,
) -> tuple[dict[str, Any], list[list[float]]]:
    """Run `generate_batch` on each distinct prompt of `prompt_ids`, which repeats a prompt for each of its completions.

    Transformers computes the keys and values of a request once for all its completions. It returns the completions of
    a request one after another, and the requests in order.

    Args:
        shares_prompts (`bool`): whether a request has several completions.

    Returns:
        outputs in the order of `prompt_ids`, and for each output the log-probs of its tokens in the distribution that
        they were drawn from.

    Raises:
        `RuntimeError`: a completion is missing or incomplete.
    """
    rows_of: dict[tuple[int, ...], list[int]] = {}
    for row, ids in enumerate(map(tuple, prompt_ids)):
        rows_of.setdefault(ids, []).append(row)
    # All requests have the same number of completions, even if the data repeats some prompts
    completions = math.gcd(*map(len, rows_of.values()))
    # The prompt's last token runs later if a request has several completions. A prompt of one token might then give
    # the first forward pass no token
    if not shares_prompts or any(len(ids) == 1 for ids in rows_of):
        completions = 1
    requests = [list(ids) for ids, rows in rows_of.items() for _ in range(len(rows) // completions)]
    config = copy.deepcopy(generation_config)
    config.num_return_sequences = completions
    batching_config = copy.copy(continuous_batching_config)
    batching_config.return_logprobs = True
    outputs = generate_batch(requests, generation_config=config, continuous_batching_config=batching_config, **options)
    error = next((output.error for output in outputs.values() if output.error is not None), None)
    lengths = [(len(output.generated_tokens), len(output.logprobs)) for output in outputs.values()]
    if len(outputs) != len(prompt_ids) or error is not None or any(tokens != values for tokens, values in lengths):
        cause = "" if error is None else f" The first error is: {error}"
        raise RuntimeError(
            f"`use_transformers_continuous_batching=True`: some of the {len(prompt_ids)} completions of a generation "
            f"batch are missing or incomplete. Transformers has logged why.{cause}"
        )
    rows = [row for rows in rows_of.values() for row in rows]
    of_row = dict(zip(rows, outputs.items(), strict=True))
    ordered = [of_row[row] for row in range(len(prompt_ids))]
    return dict(ordered), [list(output.logprobs) for _, output in ordered]
