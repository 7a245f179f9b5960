"""The routes of completions that transformers or a `rollout_func` samples.

Dimensions: B rows, S columns, P prompt tokens, C completion tokens, L routers, k experts of a token.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..distributed.ranks import Ranks
from ..planning.batch_keys import COMPLETION_ROUTES, PROMPT_ROUTES
from ..routing.routers import Routers, by_forward
from ..routing.routes import RUNS_AGAIN, RowRoutes, RowsOfForward, padded, routes_of_columns

if TYPE_CHECKING:
    from ..compat.continuous import TokenRuns

# What a `rollout_func` returns for each row, as vLLM calls it
ROLLOUT_KEY = "routed_experts"


class SampledRoutes:
    """Collects the routes of a generation batch while it is sampled.

    Args:
        routers (`Callable`): returns the policy's routers.
    """

    def __init__(self, routers: Callable[[], Routers], ranks: Ranks) -> None:
        self._routers = routers
        self._ranks = ranks
        self.rows: list[RowRoutes] | None = None  # of the last completions, until `take_entries`
        self._columns_BSLk: Tensor | None = None  # of the last call of `generate`
        self._prompt_width = 0  # of that call
        self._token_runs: TokenRuns | None = None  # of the last call of continuous batching
        self._forwards: list[Tensor] = []  # of that call: the routes `(N, L, k)` of each forward

    @contextmanager
    def generating(self, input_ids: Tensor, forwards: list[RowsOfForward]) -> Iterator[None]:
        """Record a call of `generate` in the `with` block, after which `forwards` lists its forward passes.

        If the call is repeated in another way, the last one counts.
        """
        with self._routers().recording() as calls:
            yield
        batch_size, self._prompt_width = input_ids.shape
        self._columns_BSLk = routes_of_columns(by_forward(calls), forwards, (batch_size, self._prompt_width))

    def end_turn(
        self, prompt_ids: list[list[int]], completion_ids: list[list[int]], *, waits_for_ranks: bool = False
    ) -> None:
        """Note which of the columns that `generate` ran are the tokens of each row.

        Args:
            waits_for_ranks (`bool`): whether the model goes on until all ranks have finished.

        Raises:
            `RuntimeError`: the model ran more columns than it sampled.
        """
        assert self._columns_BSLk is not None
        columns = self._prompt_width + max(map(len, completion_ids)) - 1
        if self._columns_BSLk.size(1) > columns and not waits_for_ranks:
            raise RuntimeError(RUNS_AGAIN)
        self.rows = [
            RowRoutes.of(columns_SLk[self._prompt_width - len(prompt) :], len(prompt), len(completion))
            for columns_SLk, prompt, completion in zip(self._columns_BSLk, prompt_ids, completion_ids, strict=True)
        ]
        self._columns_BSLk = None

    @contextmanager
    def batching(self) -> Iterator[None]:
        """Record a call of continuous batching's `generate_batch` in the `with` block."""
        from ..compat.continuous import recorded_runs  # internals that may have moved

        with self._routers().recording() as calls, recorded_runs() as token_runs:
            yield
        self._token_runs = token_runs
        self._forwards = [routes_NLk.cpu() for routes_NLk in by_forward(calls)]

    def end_batching(self, outputs: dict[str, Any]) -> None:
        """Note which of the tokens that `generate_batch` ran are those of each output, one for each row."""
        from ..compat.continuous import routes_of_requests

        assert self._token_runs is not None
        rows = routes_of_requests(outputs, self._token_runs, self._forwards, self._routers().unknown)
        self.rows = [
            RowRoutes.of(routes_SLk, len(output.prompt_ids), len(output.generated_tokens))
            for routes_SLk, output in zip(rows, outputs.values(), strict=True)
        ]
        self._forwards = []

    def recorded_rollout(self, rollout_func: Callable[..., Any]) -> Callable[..., Any]:
        """Return a `rollout_func` that keeps the routes of its output, which TRL would give to reward functions."""

        def call_and_record(*positional: Any) -> Any:
            output = dict(rollout_func(*positional))
            if not output.keys() >= {"prompt_ids", "completion_ids"}:  # TRL names the missing keys
                return output
            if output.get(ROLLOUT_KEY) is None:
                raise ValueError(
                    f'`replay_routes="sampler"` needs the routes of each row, but `rollout_func` returned no '
                    f"`{ROLLOUT_KEY}`. Return an integer array (tokens of prompt and completion, routers, experts of a "
                    "token) for each row, or leave `replay_routes` unset."
                )
            routes = output.pop(ROLLOUT_KEY)
            lengths = [
                (len(prompt), len(completion))
                for prompt, completion in zip(output["prompt_ids"], output["completion_ids"], strict=True)
            ]
            if len(routes) != len(lengths):
                raise ValueError(f"`rollout_func` returned `{ROLLOUT_KEY}` for {len(routes)} rows of {len(lengths)}.")
            self.rows = [
                RowRoutes.of(self._checked(row, row_routes, sum(row_lengths)), *row_lengths)
                for row, (row_routes, row_lengths) in enumerate(zip(routes, lengths, strict=True))
            ]
            return output

        return call_and_record

    def _checked(self, row: int, row_routes: Any, tokens: int) -> Tensor:
        """Return the routes `(S, L, k)` of one row of a `rollout_func`; negative experts are unknown."""
        routers = self._routers()
        if isinstance(row_routes, Tensor):
            row_routes = (row_routes.float() if row_routes.is_floating_point() else row_routes).cpu().numpy()
        try:
            array = np.asarray(row_routes)
        except ValueError:  # rows of different lengths
            array = np.asarray(None)
        shape = (len(routers.routers), routers.chosen)
        if array.ndim != 3 or array.shape[1:] != shape or not np.issubdtype(array.dtype, np.integer):
            raise ValueError(
                f"`rollout_func` returned `{ROLLOUT_KEY}` of shape {array.shape} and dtype {array.dtype} in row {row}. "
                f"Return integers of shape (tokens, {shape[0]}, {shape[1]}): the model has {shape[0]} routers, each of "
                f"which chooses {shape[1]} experts."
            )
        largest = int(array.max()) if array.size else -1
        if array.shape[0] > tokens or largest >= routers.experts:
            raise ValueError(
                f"`rollout_func` returned `{ROLLOUT_KEY}` of {array.shape[0]} tokens with experts up to "
                f"{largest} in row {row}, which has {tokens} tokens. The model has {routers.experts} "
                "experts, counted from 0."
            )
        routes_SLk = torch.from_numpy(array.astype(np.int64))
        is_unknown_S11 = (routes_SLk < 0).flatten(1).any(dim=1)[:, None, None]
        sorted_SLk = routes_SLk.sort(dim=-1).values
        repeats_SLk = (sorted_SLk[..., 1:] == sorted_SLk[..., :-1]) & ~is_unknown_S11
        if repeats_SLk.any():
            raise ValueError(
                f"`rollout_func` returned `{ROLLOUT_KEY}` with an expert twice for a token in row {row}. A router "
                "chooses different experts. Return -1 where they are unknown."
            )
        return routes_SLk.masked_fill(is_unknown_S11, routers.unknown).to(routers.dtype)

    def take_entries(self, batch: dict[str, Any]) -> tuple[dict[str, Tensor], float]:
        """Return the entries of the batch with its routes, on the host, and the share of tokens that have none.

        Raises:
            `RuntimeError`: the rows of the batch are not those that were sampled.
        """
        rows, self.rows = self.rows, None
        prompt_lengths = batch["prompt_mask"].sum(dim=1).tolist()
        if rows is None or [len(row.prompt) for row in rows] != prompt_lengths:
            raise RuntimeError(
                '`replay_routes="sampler"`: the rows of the generation batch are not those that were sampled. Leave '
                "`replay_routes` unset, or do not change the rows."
            )
        entries = {
            PROMPT_ROUTES: padded([row.prompt for row in rows], batch["prompt_ids"].size(1), pads_left=True),
            COMPLETION_ROUTES: padded(
                [row.completion for row in rows], batch["completion_ids"].size(1), pads_left=False
            ),
        }
        unknown = self._routers().unknown
        routes_NLk = torch.cat([part for row in rows for part in (row.prompt, row.completion)])
        unknown_tokens = int((routes_NLk == unknown).flatten(1).any(dim=1).sum())
        unknown_tokens, tokens = self._ranks.sum_counts([unknown_tokens, len(routes_NLk)])
        return entries, unknown_tokens / max(1, tokens)
