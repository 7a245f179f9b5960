"""Runs the head, and whole steps of a tiny model, on real gloo processes, and counts what each receives and holds."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import set_forkserver_preload
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from scaling_formulas import INT64, HeadCase, Way
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from traffic import Traffic

from trl_ext.heads import LogitTransform, run_head
from trl_ext.scoring import head_rows

OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


@dataclass(frozen=True)
class Counted:
    """What one rank of a run saw.

    Args:
        payloads (`dict[str, int]`): bytes of the tensors of each kind of collective.
        received (`float`): bytes that reached the rank, if the ranks form a ring.
        peak (`int`): most bytes in what was made meanwhile and alive at one time.
        largest (`int`): bytes of the largest of these tensors, or of one that a collective brought.
        predicted (`int`, *optional*): bytes that the rule of the head expected for the way it took.
        values (`tuple[Tensor, ...]`): log-probs, and gradients of hidden states and of this rank's rows.
    """

    payloads: dict[str, int]
    received: float
    peak: int
    largest: int
    predicted: int | None = None
    values: tuple[Tensor | None, ...] = ()


def on_ranks(ranks: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """What `work(*args)` returns on each of so many new processes with a gloo group."""
    # The server imports once; ranks are forked from it
    set_forkserver_preload(["scaling_counts", "torch.distributed.fsdp", "transformers.models.llama.modeling_llama"])
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, (ranks, folder, work, args), nprocs=ranks, start_method="forkserver")
        return [torch.load(Path(folder, f"{rank}.pt"), weights_only=False) for rank in range(ranks)]


def _rank(rank: int, ranks: int, folder: str, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    try:
        torch.save(work(*args), Path(folder, f"{rank}.pt"))
        dist.barrier()
    finally:
        dist.destroy_process_group()


@contextmanager
def the_rule_says(way: Way) -> Iterator[list[tuple[int, int]]]:
    """Make the rule choose `way` where both are open; yields what it had found itself, once it was asked."""
    rule, found = head_rows.bytes_moved, []

    def says(*args: Any, **kwargs: Any) -> tuple[int, int]:
        found.append(rule(*args, **kwargs))
        return (0, 1) if way == "local" else (1, 0)

    head_rows.bytes_moved = says
    try:
        yield found
    finally:
        head_rows.bytes_moved = rule


class HeadOfRank:
    """A head whose rows are spread over the ranks, and hidden states and targets of this rank's tokens."""

    def __init__(self, case: HeadCase, way: Way, tokens: int | None = None) -> None:
        self.case, self.way = case, way
        dtype = {2: torch.bfloat16, 4: torch.float32}[case.item]
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(case.vocabulary, case.hidden, generator=generator) / case.hidden**0.5
        mesh = init_device_mesh("cpu", (case.ranks,), mesh_dim_names=("tp",) if way == "tensor parallel" else None)
        self.head = nn.Linear(1, 1, bias=False)
        rows = weight.to(dtype) if way == "here" else distribute_tensor(weight.to(dtype), mesh, [Shard(0)])
        self.head.weight = nn.Parameter(rows, requires_grad=case.trained)
        generator.manual_seed(0 if way == "tensor parallel" else 1 + dist.get_rank())
        N = case.tokens if tokens is None else tokens
        self.hidden = torch.randn(N, case.hidden, generator=generator).to(dtype).requires_grad_(case.gradient)
        self.targets = torch.randint(case.vocabulary, (N,), generator=generator)
        self.outputs = OUTPUTS[: 1 + case.more_outputs]

    def run(self) -> tuple[Tensor | None, ...]:
        """Score, and go back where there is a gradient."""
        self.hidden.grad = self.head.weight.grad = None
        with torch.set_grad_enabled(self.case.gradient), the_rule_says(self.way) as self.found:
            rows = head_rows.rows_of_head(
                self.head,
                self.hidden,
                whole=self.way == "whole",
                gradient=self.case.gradient,
                entropy_grad=self.case.entropy_grad,
                outputs=self.outputs,
            )
            scored = run_head(
                *("tiled", self.hidden, rows.weight, self.targets),
                bias=None,
                transform=LogitTransform(),
                outputs=self.outputs,
                entropy_requires_grad=self.case.entropy_grad,
                readable=rows.readable,
                shard=rows.shard,
            )
        if self.case.gradient:
            (scored.log_probs.sum() + (scored.entropy.sum() if self.case.entropy_grad else 0)).backward()
        grad = self.head.weight.grad
        return (
            scored.log_probs.detach(),
            self.hidden.grad,
            grad if grad is None else getattr(grad, "_local_tensor", grad),
        )


def count_head(case: HeadCase, way: Way, tokens: list[int] | None = None) -> Counted:
    """One pass of the head on this rank, without the exchange of how many tokens each has.

    Args:
        tokens (`list[int]`, *optional*): of each rank. `None`: as many as the case says.
    """
    head = HeadOfRank(case, way, None if tokens is None else tokens[dist.get_rank()])
    head.run()  # the first collective of a group makes its connections
    with Traffic() as traffic:
        values = head.run()
    seen = replace(counted(traffic), values=values)
    if not head.found:
        return seen
    tokens_move, weight_moves = head.found[0]
    # How many tokens each rank has was exchanged before the rule was asked
    payloads = {**seen.payloads, "all_gather": seen.payloads["all_gather"] - INT64 * case.ranks}
    return replace(
        seen,
        payloads={kind: count for kind, count in payloads.items() if count},
        received=seen.received - INT64 * (case.ranks - 1),
        predicted=tokens_move if way == "local" else weight_moves,
    )


def counted(traffic: Traffic) -> Counted:
    kinds = {x.kind for x in traffic.collectives}
    largest = max([traffic.largest, *(x.payload for x in traffic.collectives)])
    return Counted({kind: traffic.of_kind(kind) for kind in kinds}, traffic.received, traffic.peak, largest)


def count_heads(cases: list[tuple[HeadCase, Way]]) -> list[Counted]:
    """`count_head` of each, on this rank."""
    return [count_head(case, way) for case, way in cases]
