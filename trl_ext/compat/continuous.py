"""Transformers' continuous batching, with one request for all completions of a prompt, and with log-probs and routes.

Dimensions of routes: N tokens of a forward, S tokens of a sequence, L routers, k experts of a token.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor

from .replaced import replaced

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


class TokenRuns:
    """Which tokens the forwards of one call of `generate_batch` run, and for which positions of which requests.

    Runs of tokens are numbered through all forwards. At each position, a request reads the keys and values of one run,
    so the routes of that run are those of the position.
    """

    def __init__(self) -> None:
        # Of each forward, without padding, which comes last
        self.token_counts: list[int] = []
        # Request -> the run that it reads at each position; -1 if none is known
        self.request_runs: dict[str, list[int]] = {}
        self._next_run = 0
        self._states: dict[str, Any] = {}

    def record_forward(self, requests: Sequence[Any]) -> None:
        """Record a forward of transformers' `FutureRequestState`s, whose tokens it runs one request after another."""
        first_run = self._next_run
        for request in requests:
            state = request.state
            start = state.position_offset
            stop = start + request.query_length
            runs = self.request_runs.setdefault(state.request_id, [])
            if len(runs) < start:  # the cache has had these tokens, from another request
                runs[:] = self._runs_of_prefix(_tokens_of(state)[:start])
            # When the cache is full, a request may lose its blocks. It runs its tokens again, and later ones read these
            runs[start:stop] = range(self._next_run, self._next_run + request.query_length)
            self._next_run += request.query_length
            self._states[state.request_id] = state
        self.token_counts.append(self._next_run - first_run)

    def record_fork(self, parent: str, child: str) -> None:
        """Record that request `child` goes on from the keys and values that `parent` has now."""
        self.request_runs[child] = [*self.request_runs[parent]]

    def _runs_of_prefix(self, prefix: list[int]) -> list[int]:
        """Return the runs of the first request that has the tokens: a cached block stays that of its first request."""
        for name, state in self._states.items():
            if len(self.request_runs[name]) >= len(prefix) and _tokens_of(state)[: len(prefix)] == prefix:
                return self.request_runs[name][: len(prefix)]
        return [-1] * len(prefix)  # from an earlier call of `generate_batch`


def _tokens_of(state: Any) -> list[int]:
    return state.initial_tokens + state.generated_tokens


@contextmanager
def recorded_runs() -> Iterator[TokenRuns]:
    """Record the tokens of each forward in the `with` block, which calls `generate_batch` once."""
    from transformers.generation.continuous_batching import input_outputs, requests  # may have moved

    token_runs = TokenRuns()
    batch_class = input_outputs.ContinuousBatchingIOs
    prepare_batch_tensors = batch_class.prepare_batch_tensors
    fork = requests.RequestState.fork

    def recorded_batch(ios: Any, requests_in_batch: Sequence[Any], *positional: Any, **options: Any) -> None:
        token_runs.record_forward(requests_in_batch)
        prepare_batch_tensors(ios, requests_in_batch, *positional, **options)

    def recorded_fork(state: Any, new_request_id: str) -> Any:
        token_runs.record_fork(state.request_id, new_request_id)
        return fork(state, new_request_id)

    # `ContinuousBatchingAsyncIOs` prepares each of its batches with a `ContinuousBatchingIOs`
    with (
        replaced(batch_class, prepare_batch_tensors=recorded_batch),
        replaced(requests.RequestState, fork=recorded_fork),
    ):
        yield token_runs


def routes_of_requests(
    outputs: Mapping[str, Any], token_runs: TokenRuns, forwards: Sequence[Tensor], unknown: int
) -> list[Tensor]:
    """Return the routes `(S, L, k)` of the prompt and completion of each output of `complete`, in their order.

    Args:
        forwards (`Sequence[Tensor]`): the routes that each forward chose, `(N, L, k)`, on the host.
        unknown (`int`): each expert of a token that no forward has run, such as the last of a completion.

    Raises:
        `RuntimeError`: the model ran other forwards than those that were recorded.
    """
    counts = token_runs.token_counts
    ran = [len(routes_NLk) for routes_NLk in forwards]
    if len(ran) != len(counts) or any(tokens < count for tokens, count in zip(ran, counts, strict=True)):
        raise RuntimeError(
            f"Continuous batching prepared {len(counts)} forwards of {sum(counts)} tokens, but the routers ran in "
            f"{len(ran)} forwards of {sum(ran)} tokens. They are not seen in CUDA graphs and compiled forwards: set "
            "`use_cuda_graph=False` and no compile config in `transformers_continuous_batching_config`."
        )
    if not forwards:
        return []
    known = [routes_NLk[:count] for routes_NLk, count in zip(forwards, counts, strict=True)]
    # The run -1 is unknown
    runs_NLk = torch.cat([*known, known[0].new_full((1, *known[0].shape[1:]), unknown)])
    rows = []
    for name, output in outputs.items():
        length = len(output.prompt_ids) + len(output.generated_tokens)
        runs = token_runs.request_runs[name]
        rows.append(runs_NLk[torch.tensor(runs + [-1] * (length - len(runs)))])
    return rows
