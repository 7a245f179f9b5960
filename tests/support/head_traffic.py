"""Runs the head on gloo processes, and counts the bytes that each receives and holds."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import set_forkserver_preload
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from traffic import Traffic
from trl_ext.heads.linear_log_probs import run_head
from trl_ext.heads.logits import LogitTransform
from trl_ext.scoring import weight_layout as head_rows
from trl_ext.scoring.head import LinearHead

Way = Literal["local", "in turn", "whole", "tensor parallel"]
INT64 = 8  # bytes
OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


@dataclass(frozen=True)
class HeadCase:
    """One pass of the head in fp32.

    Args:
        ranks (`int`): number of ranks that share the weight's rows.
        tokens (`int`): scored tokens of each rank; under tensor parallelism, all ranks have the same tokens.
        hidden (`int`): hidden size.
        vocabulary (`int`): number of classes.
        trained (`bool`): whether the weight gets a gradient.
        gradient (`bool`): whether the hidden states get a gradient.
        more_outputs (`int`): number of outputs besides log_probs.
        entropy_grad (`bool`): whether the entropy has a gradient.
    """

    ranks: int
    tokens: int
    hidden: int
    vocabulary: int
    trained: bool = False
    gradient: bool = True
    more_outputs: int = 0
    entropy_grad: bool = False

    @property
    def weight(self) -> int:
        """Bytes of the whole weight."""
        return self.vocabulary * self.hidden * 4


GRADIENTS: tuple[dict[str, Any], ...] = (
    {"gradient": False},
    {"gradient": True},
    {"entropy_grad": True, "more_outputs": 4},
    {"trained": True},
    {"trained": True, "entropy_grad": True, "more_outputs": 1},
)
WAYS: tuple[Way, ...] = ("local", "in turn", "whole", "tensor parallel")


def head_cases(ranks: int) -> list[tuple[HeadCase, Way]]:
    """Return every combination of a way and gradients that it supports."""
    case = HeadCase(ranks, tokens=24, hidden=32, vocabulary=128 * ranks)
    return [
        (replace(case, **gradient), way)
        for gradient in GRADIENTS
        for way in WAYS
        if not (way == "in turn" and gradient.get("trained"))
    ]


@dataclass(frozen=True)
class Counted:
    """The counts of one rank.

    Args:
        payloads (`dict[str, int]`): bytes of the tensors of each kind of collective.
        received (`float`): bytes that the rank received, if the ranks form a ring.
        peak (`int`): peak bytes of the tensors that were made during the run.
        largest (`int`): bytes of the largest of these tensors, or of the largest collective.
        predicted (`int`, *optional*): bytes that the head's rule predicted for the way it chose.
        values (`tuple[Tensor, ...]`): log-probs, and gradients of hidden states and of this rank's rows.
    """

    payloads: dict[str, int]
    received: float
    peak: int
    largest: int
    predicted: int | None = None
    values: tuple[Tensor | None, ...] = ()


def on_ranks(ranks: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `work(*args)` on `ranks` new processes with a gloo group, and return the results of all."""
    # The fork server imports once, for all ranks
    set_forkserver_preload(["trl_ext.scoring", "torch.distributed.fsdp", "transformers.models.llama.modeling_llama"])
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, (ranks, folder, work, args), nprocs=ranks, start_method="forkserver")
        with torch.serialization.safe_globals([Counted]):
            return [torch.load(Path(folder, f"{rank}.pt"), weights_only=True) for rank in range(ranks)]


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
    """Make the rule choose `way`, "local" or another. Yields the list of byte counts that the rule itself computes."""
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
    """A head whose rows are spread over the ranks, with the hidden states and targets of this rank's tokens."""

    def __init__(self, case: HeadCase, way: Way, tokens: int | None = None) -> None:
        self.case, self.way = case, way
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(case.vocabulary, case.hidden, generator=generator) / case.hidden**0.5
        mesh = init_device_mesh("cpu", (case.ranks,), mesh_dim_names=("tp",) if way == "tensor parallel" else None)
        self.head = nn.Linear(1, 1, bias=False)
        self.head.weight = nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)]), requires_grad=case.trained)
        generator.manual_seed(0 if way == "tensor parallel" else 1 + dist.get_rank())
        N = case.tokens if tokens is None else tokens
        self.hidden = torch.randn(N, case.hidden, generator=generator).requires_grad_(case.gradient)
        self.targets = torch.randint(case.vocabulary, (N,), generator=generator)
        self.outputs = OUTPUTS[: 1 + case.more_outputs]

    def run(self) -> tuple[Tensor | None, ...]:
        """Run the forward, and the backward if there is a gradient."""
        self.hidden.grad = self.head.weight.grad = None
        with torch.set_grad_enabled(self.case.gradient), the_rule_says(self.way) as self.found:
            rows = head_rows.weight_layout_of(
                LinearHead(self.head),
                self.hidden,
                whole=self.way == "whole",
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
        of_rows = grad.to_local() if isinstance(grad, DTensor) else grad
        return scored.log_probs.detach(), self.hidden.grad, of_rows


def count_head(case: HeadCase, way: Way, tokens: list[int] | None = None) -> Counted:
    """Count one pass of the head on this rank, without the exchange of token counts.

    Args:
        tokens (`list[int]`, *optional*): number of tokens of each rank; by default that of the case.
    """
    head = HeadOfRank(case, way, None if tokens is None else tokens[dist.get_rank()])
    head.run()  # the first collective of a group opens its connections
    with Traffic() as traffic:
        values = head.run()
    seen = replace(counted(traffic), values=values)
    if not head.found:
        return seen
    tokens_move, weight_moves = head.found[0]
    # The ranks exchanged their token counts before they applied the rule
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
    """Return `count_head` of each case, on this rank."""
    return [count_head(case, way) for case, way in cases]
