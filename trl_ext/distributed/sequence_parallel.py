"""Sequence parallelism: groups of ranks that split the tokens of one batch, and their collectives.

Accelerate creates such groups for context parallelism (`cp_size`, FSDP2) and Ulysses sequence parallelism (`sp_size`,
DeepSpeed). This module uses its groups, sharded weights and gradient reduction, but neither its splitting of batches
nor its attention; docs/design-notes.md gives the reasons.

Dimensions: T tokens, n ranks, c = ceil(T / n) tokens of each, A heads, D features of a head.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn

from .tensor_parallel import DataParallelAccelerator, TensorParallel, signature


class SequenceGroup:
    """Consecutive ranks that get the same batch, of which each computes a part of the tokens."""

    def __init__(self, accelerator: Any) -> None:
        config = accelerator.parallelism_config
        self.kind = "cp" if config.cp_enabled else "sp"  # as in accelerate's `ParallelismConfig`
        self.size: int = config.cp_size if config.cp_enabled else config.sp_size
        self.rank: int = accelerator.process_index % self.size
        # The gradients of a group must be summed, and those of the groups averaged. FSDP and ZeRO-3 average over all
        # ranks instead (deepspeed 0.19.8, stage3.py:1931), so the factor undoes the division by the group's size.
        # ZeRO-1 and ZeRO-2 reduce correctly (stage_1_and_2.py:1508 and :1688)
        sums = not config.cp_enabled and _zero_stage(accelerator) in (1, 2)
        self.gradient_factor = 1.0 if sums else float(self.size)
        self.deepspeed_group: dist.ProcessGroup | None = None  # for "sp", once DeepSpeed has created it
        self.device: torch.device = accelerator.device
        self._accelerator = accelerator

    @classmethod
    def of(cls, accelerator: Any) -> "SequenceGroup | None":
        """Return the group that the accelerator's `ParallelismConfig` requests, if any."""
        config = accelerator.parallelism_config
        return None if config is None or config.cp_size * config.sp_size == 1 else cls(accelerator)

    @property
    def processes(self) -> "dist.ProcessGroup | None":
        """The process group; `None` until DeepSpeed has created it with its engine."""
        if self.kind == "cp":
            return self._accelerator.torch_device_mesh["cp"].get_group()  # type: ignore[no-any-return]
        return self.deepspeed_group

    @property
    def ranks(self) -> TensorParallel:
        """The group as a tensor-parallel one: outside the forward pass, its ranks all do the same."""
        index = self._accelerator.process_index
        processes = self._accelerator.num_processes
        return TensorParallel(self.processes, self.rank, self.size, index // self.size, processes // self.size)

    def alike(self, *tensors: Tensor | None) -> bool:
        """Return whether all ranks of the group hold the same values. Every rank must call it."""
        hashes = torch.stack([signature(x).to(self.device) for x in tensors if x is not None])
        rank_hashes = hashes.new_empty((self.size, *hashes.shape))
        dist.all_gather(list(rank_hashes.unbind()), hashes, group=self.processes)
        return bool((rank_hashes == hashes).all())

    def shard(self, tokens: int) -> "Shard":
        processes = self.processes
        assert processes is not None
        return Shard(tokens, -(-tokens // self.size), self.rank, self.size, processes)


class Shard(NamedTuple):
    """One rank's tokens of a row. All shards are equally long; padding fills the last."""

    tokens: int  # T, in the whole row
    width: int  # c, in this rank's shard
    rank: int
    size: int  # of the group
    processes: dist.ProcessGroup

    @property
    def first(self) -> int:
        return self.rank * self.width

    def columns(self, row_1T: Tensor) -> Tensor:
        """Return this rank's columns `(1, c)` of a row, padded with 0."""
        row = F.pad(row_1T, (0, self.width * self.size - self.tokens))
        return row[:, self.first : self.first + self.width]

    def to_heads(self, x_cAD: Tensor) -> Tensor:
        """Exchange this rank's tokens of all heads for all tokens of its heads, `(T, A / n, D)`. One all-to-all."""
        return self._exchanged(x_cAD.unflatten(1, (self.size, -1)).transpose(0, 1)).flatten(0, 1)[: self.tokens]

    def to_tokens(self, x_TAD: Tensor) -> Tensor:
        """Invert `to_heads`; returns `(c, A, D)`. One all-to-all."""
        padded = F.pad(x_TAD, (0, 0, 0, 0, 0, self.width * self.size - self.tokens))
        return self._exchanged(padded.unflatten(0, (self.size, -1))).transpose(0, 1).flatten(1, 2)

    def heads(self, x_A: Tensor) -> Tensor:
        """Return the values `(A / n,)` of this rank's heads."""
        return x_A.chunk(self.size)[self.rank]

    def owner(self, at_N: Tensor) -> Tensor:
        """Return the rank `(N,)` that holds the token at each index of `at_N` in the row."""
        return at_N // self.width

    def whole(self, x: Tensor) -> Tensor:
        """Gather `(T, ...)` from the `(c, ...)` of each rank. One all-gather."""
        return self._gathered(x).flatten(0, 1)[: self.tokens]

    def gathered(self, x: Tensor, owner_N: Tensor) -> Tensor:
        """Gather the values `(N, ...)` of N tokens. `x`: those whose `owner_N` is this rank. One all-gather.

        All ranks compute the same from the result, so the backward takes this rank's gradient from its own graph.
        """
        is_owned_nN = owner_N == torch.arange(self.size, device=owner_N.device).unsqueeze(1)
        widest = int(is_owned_nN.sum(dim=1).max())
        rank_values = self._gathered(F.pad(x, (0, 0) * (x.dim() - 1) + (0, widest - x.shape[0])))
        place_N = (is_owned_nN.cumsum(dim=1) - 1).gather(0, owner_N.unsqueeze(0)).squeeze(0)
        return rank_values[owner_N, place_N]

    def _exchanged(self, x: Tensor) -> Tensor:
        return _Exchanged.apply(x, self.processes)  # type: ignore[no-untyped-call, no-any-return]

    def _gathered(self, x: Tensor) -> Tensor:
        return _Gathered.apply(x, self.rank, self.size, self.processes)  # type: ignore[no-untyped-call, no-any-return]


def _all_to_all(x: Tensor, processes: Any) -> Tensor:
    received_parts = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received_parts, x.contiguous(), group=processes)
    return received_parts


class _Exchanged(torch.autograd.Function):
    """All-to-all: sends the i-th part to rank i of the group, and receives the i-th part from it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, processes: Any) -> Tensor:
        ctx.processes = processes
        return _all_to_all(x, processes)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _all_to_all(gradient, ctx.processes), None


class _Gathered(torch.autograd.Function):
    """All-gather: stacks tensors of equal shape. The backward does not sum: every rank has the whole gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rank: int, size: int, processes: Any) -> Tensor:
        ctx.rank = rank
        stacked = x.new_empty((size, *x.shape))
        dist.all_gather(list(stacked.unbind()), x.contiguous(), group=processes)
        return stacked

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return gradient[ctx.rank], None, None, None


def keep_batches_whole(accelerator: Any, group: SequenceGroup) -> None:
    """Turn off accelerate's splitting of batches and its attention, and give all ranks of a group the same data.

    Raises:
        `RuntimeError`: this version of accelerate or DeepSpeed does not have what must be replaced.
    """
    if group.kind == "cp":
        # Its hooks would remove the attention mask from every layer, even in generation, where rows begin with padding
        _check_has(accelerator, "_prepare_cp", "accelerate")
        accelerator._prepare_cp = lambda *args: args
        return
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # Otherwise one process would read a streaming dataset and distribute its rows over all ranks
    accelerator.dataloader_config.dispatch_batches = False
    data_parallel = DataParallelAccelerator(accelerator, group.ranks)
    accelerator.prepare_data_loader = partial(Accelerator.prepare_data_loader, data_parallel)
    _renew_process_groups(accelerator, group)
    name = accelerator.parallelism_config.sp_handler.sp_attn_implementation
    attention = ALL_ATTENTION_FUNCTIONS.get(name)

    def loader_as_it_is(loader: Any, engine: Any) -> Any:
        # Transformers calls this function once the engine exists. By then DeepSpeed has registered as `name` its own
        # attention, which ignores masks and supports only one batch size (ulysses_sp.py:631, :264)
        if attention is None:  # a kernel that transformers loads on first use
            del ALL_ATTENTION_FUNCTIONS[name]
        else:
            ALL_ATTENTION_FUNCTIONS[name] = attention
        leave_model_parallel_group(engine.optimizer)
        return loader

    _check_has(accelerator, "deepspeed_ulysses_dl_adapter", "accelerate")
    accelerator.deepspeed_ulysses_dl_adapter = loader_as_it_is


def leave_model_parallel_group(optimizer: Any) -> None:
    """Make DeepSpeed's optimizer forget the group, which DeepSpeed takes for a tensor-parallel one.

    Its gradient norm would be that of the first rank's partition, times the group's size (stage_1_and_2.py:2682,
    :2690).
    """
    _check_has(optimizer, "model_parallel_group", "DeepSpeed")
    if optimizer.model_parallel_group is not None:
        optimizer.model_parallel_group = None
        optimizer.model_parallel_rank = 0


def _check_has(owner: Any, name: str, library: str) -> None:
    """Check for an internal of a library that is to be replaced. Under another name, it would go on working."""
    if not hasattr(owner, name):
        raise RuntimeError(
            f"The tokens of a batch cannot be split over ranks with this version of {library}: its "
            f"`{type(owner).__name__}` has no `{name}`, which trl_ext replaces. Install a tested version of {library}, "
            "a later trl_ext, or train without `cp_size` and `sp_size`."
        )


def _renew_process_groups(accelerator: Any, group: SequenceGroup) -> None:
    """Make DeepSpeed create new process groups for each engine; it fails if those of an earlier trainer exist."""
    prepare = accelerator._prepare_deepspeed

    def prepared(*args: Any) -> Any:
        if not any(isinstance(x, nn.Module) for x in args):  # a data loader
            return prepare(*args)
        from deepspeed.runtime.sequence_parallel import parallel_state_sp

        parallel_state_sp._SEQUENCE_PARALLEL_GROUP = None
        parallel_state_sp._SEQUENCE_DATA_PARALLEL_GROUP = None
        results = prepare(*args)
        group.deepspeed_group = parallel_state_sp._SEQUENCE_PARALLEL_GROUP
        return results

    accelerator._prepare_deepspeed = prepared


def _zero_stage(accelerator: Any) -> int | None:
    """Return DeepSpeed's stage, 0 to 3; `None` without DeepSpeed."""
    plugin = accelerator.state.deepspeed_plugin if accelerator.distributed_type == DistributedType.DEEPSPEED else None
    return None if plugin is None else int(plugin.zero_stage)


def unsplit_reason(accelerator: Any, group: SequenceGroup, config: Any) -> str | None:
    """Return why the group cannot split the tokens of a batch, for a model with the text `config`; `None` if it can."""
    stage = _zero_stage(accelerator)
    if group.kind == "sp" and stage is None:
        return (
            "`sp_size` needs DeepSpeed, and the processes were launched without it (accelerate 1.15, "
            "accelerator.py:2426). Launch with a DeepSpeed config and ZeRO stage 1, 2 or 3"
        )
    if stage == 0:
        return "it is tested with ZeRO-1, ZeRO-2 and ZeRO-3 only. Set `zero_stage` to 1, 2 or 3"
    if stage == 3:
        zero = accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]
        if not zero.get("reduce_scatter", True):
            return (
                "ZeRO-3 with `reduce_scatter: false` sums the gradients of a group in one bucket and averages them in "
                "another (deepspeed 0.19.8, stage3.py:1673, :1878 and :1931). Set `reduce_scatter` to true"
            )
    if group.kind == "cp" and not accelerator.is_fsdp2:
        return (
            "`cp_size` needs FSDP2 (accelerate 1.15, state.py:998). Launch with an FSDP config that has "
            "`fsdp_version: 2`"
        )
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if heads is not None and heads % group.size:
            return f"the ranks divide the attention heads, and `{name}={heads}` is not a multiple of {group.size}"
    if accelerator.parallelism_config.tp_enabled:
        return "it does not work with tensor parallelism. Set `tp_size=1`"
    return None
