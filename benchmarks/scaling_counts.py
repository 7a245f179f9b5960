"""Runs the head, and whole steps of a tiny model, on gloo processes, and counts the bytes each receives and holds."""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from multiprocessing import set_forkserver_preload
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from scaling_formulas import INT64, Engine, HeadCase, Model, Way
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from traffic import Traffic

from trl_ext.heads.linear_log_probs import run_head
from trl_ext.heads.logits import LogitTransform
from trl_ext.scoring import weight_layout as head_rows
from trl_ext.scoring.forward import ScoringForward, ScoringOptions, attach_scoring_forward
from trl_ext.scoring.head import LinearHead

OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


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


# The tiny model whose steps are counted. 8 divides its sizes
TINY = Model(layers=2, hidden=64, intermediate=128, vocabulary=512, attention=64, key_value=64)
LORA_RANK, ROWS, LENGTH = 8, 2, 12


def llama(lora: bool) -> nn.Module:
    """Return the tiny model in fp32, the same on every rank."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model: nn.Module = LlamaForCausalLM(LlamaConfig(**_SIZES))
    if lora:
        model = get_peft_model(model, LoraConfig(r=LORA_RANK, target_modules="all-linear"))
    return model


_SIZES = {
    "num_hidden_layers": TINY.layers,
    "hidden_size": TINY.hidden,
    "intermediate_size": TINY.intermediate,
    "vocab_size": TINY.vocabulary,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}


def count_step(engine: Engine, lora: bool) -> tuple[Counted, str | None]:
    """Count forward and backward of one micro-batch under an engine, and return how the head's rows were read."""
    model, scoring = _prepared(engine, lora)
    seed = 0 if engine == "TP" else dist.get_rank()
    ids = torch.randint(TINY.vocabulary, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))
    # The first batch checks the head, and DDP rebuilds its buckets after it
    for watched in (False, False, True):
        model.zero_grad()
        with Traffic() if watched else nullcontext() as traffic:
            model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, fused_lm_head=True).loss.backward()
    assert traffic is not None
    return counted(traffic), scoring.head_rows


def _prepared(engine: Engine, lora: bool) -> tuple[nn.Module, ScoringForward]:
    model = _split_over_ranks() if engine == "TP" else llama(lora)
    inner = model.base_model.model if lora else model
    scoring = attach_scoring_forward(inner, ScoringOptions())
    if engine == "DDP":
        # DDP would broadcast buffers, a few hundred bytes of rotary frequencies, in every forward
        buffers = [name for name, _ in model.named_buffers()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, buffers)
        return DistributedDataParallel(model), scoring
    if engine == "FSDP2":
        # The same groups of parameters as accelerate's, which misses the last norm of a model with adapters
        for layer in inner.model.layers:
            fully_shard(layer)
        fully_shard(inner.model.embed_tokens)
        fully_shard([inner.lm_head] if lora else [inner.model.norm, inner.lm_head], reshard_after_forward=False)
        fully_shard(model)
    return model, scoring


def _split_over_ranks() -> nn.Module:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    with tempfile.TemporaryDirectory() as own:
        shared = [own]
        dist.broadcast_object_list(shared)
        llama(lora=False).save_pretrained(shared[0])  # only rank 0 writes
        dist.barrier()
        sizes = DistributedConfig(tp_size=dist.get_world_size(), tp_plan="auto")
        model: nn.Module = AutoModelForCausalLM.from_pretrained(shared[0], dtype="float32", distributed_config=sizes)
        dist.barrier()
    return model


def count_steps(cases: list[tuple[Engine, bool]]) -> list[tuple[Counted, str | None]]:
    """Return `count_step` of each case, on this rank."""
    return [count_step(engine, lora) for engine, lora in cases]


def time_heads(cases: list[HeadCase], ways: tuple[Way, ...], calls: int) -> list[dict[Way, list[float]]]:
    """Return the milliseconds of each call of the head in each way, on this rank. The ways take turns."""
    seconds: list[dict[Way, list[float]]] = []
    for case in cases:
        heads = {way: HeadOfRank(case, way) for way in ways}
        for head in heads.values():
            head.run()
        taken: dict[Way, list[float]] = {way: [] for way in ways}
        for _ in range(calls):
            for way, head in heads.items():
                dist.barrier()
                start = time.perf_counter()
                head.run()
                taken[way].append(1e3 * (time.perf_counter() - start))
        seconds.append(taken)
    return seconds
