"""The ranks that split the tokens of one batch: their group, their collectives, and the engine below.

Accelerate creates such groups for context parallelism (`cp_size`, FSDP2) and Ulysses sequence parallelism (`sp_size`,
DeepSpeed). Its ranks, sharded weights and gradient reduction are used here; its splitting of batches and its attention
are not: docs/sequence-parallel.md gives the reasons.

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
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .tensor_parallel import DataParallelAccelerator, TensorParallel, signature


class SequenceGroup:
    """Consecutive ranks that get the same batch and each compute a share of its tokens."""

    def __init__(self, accelerator: Any) -> None:
        config = accelerator.parallelism_config
        self.kind = "cp" if config.cp_enabled else "sp"  # as in accelerate's `ParallelismConfig`
        self.size: int = config.cp_size if config.cp_enabled else config.sp_size
        self.rank: int = accelerator.process_index % self.size
        # The factor multiplies the sum of the ranks' gradients, since the engine divides it by more than the batches.
        # FSDP takes the mean over all ranks, and so does ZeRO-3 (deepspeed 0.19.8, stage3.py:1931). ZeRO-1 and 2 take
        # the sum over a group and the mean over the groups (stage_1_and_2.py:1508 and :1688)
        sums = not config.cp_enabled and _zero_stage(accelerator) in (1, 2)
        self.gradient_factor = 1.0 if sums else float(self.size)
        self.made: dist.ProcessGroup | None = None  # of "sp", once DeepSpeed has created it
        self.device: torch.device = accelerator.device
        self._accelerator = accelerator

    @classmethod
    def of(cls, accelerator: Any) -> "SequenceGroup | None":
        """The group that the accelerator's `ParallelismConfig` requests, if any."""
        config = accelerator.parallelism_config
        return None if config is None or config.cp_size * config.sp_size == 1 else cls(accelerator)

    @property
    def processes(self) -> "dist.ProcessGroup | None":
        """The process group; `None` until DeepSpeed has created it, together with its engine."""
        if self.kind == "cp":
            return self._accelerator.torch_device_mesh["cp"].get_group()  # type: ignore[no-any-return]
        return self.made

    @property
    def ranks(self) -> TensorParallel:
        """The group as ranks that do the same; outside the forward pass they do."""
        index, processes = self._accelerator.process_index, self._accelerator.num_processes
        return TensorParallel(self.processes, self.rank, self.size, index // self.size, processes // self.size)

    def alike(self, *tensors: Tensor | None) -> bool:
        """Whether all ranks of the group hold the same values. A collective: all of them call it."""
        mine = torch.stack([signature(x).to(self.device) for x in tensors if x is not None])
        every = mine.new_empty((self.size, *mine.shape))
        dist.all_gather(list(every.unbind()), mine, group=self.processes)
        return bool((every == mine).all())

    def shard(self, tokens: int) -> "Shard":
        """This rank's share of a row of `tokens` tokens."""
        processes = self.processes
        assert processes is not None
        return Shard(tokens, -(-tokens // self.size), self.rank, self.size, processes)


class Shard(NamedTuple):
    """One rank's tokens of a row. Every rank has equally many; padding fills up the last."""

    tokens: int  # T, of the whole row
    width: int  # c, of this rank's shard
    rank: int
    size: int  # of the group
    processes: dist.ProcessGroup

    @property
    def first(self) -> int:
        """This rank's first place in the row."""
        return self.rank * self.width

    def columns(self, row_1T: Tensor) -> Tensor:
        """`(1, c)`: this rank's columns of a row, padded with 0."""
        row = F.pad(row_1T, (0, self.width * self.size - self.tokens))
        return row[:, self.first : self.first + self.width]

    def to_heads(self, x_cAD: Tensor) -> Tensor:
        """`(T, A / n, D)`: all tokens of this rank's heads, from this rank's tokens of all heads. One all-to-all."""
        return self._exchanged(x_cAD.unflatten(1, (self.size, -1)).transpose(0, 1)).flatten(0, 1)[: self.tokens]

    def to_tokens(self, x_TAD: Tensor) -> Tensor:
        """`(c, A, D)`: the inverse of `to_heads`. One all-to-all."""
        padded = F.pad(x_TAD, (0, 0, 0, 0, 0, self.width * self.size - self.tokens))
        return self._exchanged(padded.unflatten(0, (self.size, -1))).transpose(0, 1).flatten(1, 2)

    def heads(self, x_A: Tensor) -> Tensor:
        """`(A / n,)`: the values of this rank's heads."""
        return x_A.chunk(self.size)[self.rank]

    def owner(self, at_N: Tensor) -> Tensor:
        """`(N,)`: the rank that has the token at each place in the row."""
        return at_N // self.width

    def whole(self, x: Tensor) -> Tensor:
        """`(T, ...)` of all ranks, from the `(c, ...)` of each. One all-gather."""
        return self._gathered(x).flatten(0, 1)[: self.tokens]

    def gathered(self, x: Tensor, owner_N: Tensor) -> Tensor:
        """`(N, ...)`: from each rank the values of the places that it owns, in order of place. One all-gather.

        Every rank goes on to compute the same from them, so the gradient of this rank's values is the one in its own
        graph.
        """
        of_rank = owner_N == torch.arange(self.size, device=owner_N.device).unsqueeze(1)
        widest = int(of_rank.sum(dim=1).max())
        every = self._gathered(F.pad(x, (0, 0) * (x.dim() - 1) + (0, widest - x.shape[0])))
        place_N = (of_rank.cumsum(dim=1) - 1).gather(0, owner_N.unsqueeze(0)).squeeze(0)
        return every[owner_N, place_N]

    def _exchanged(self, x: Tensor) -> Tensor:
        return _Exchanged.apply(x, self.processes)  # type: ignore[no-untyped-call, no-any-return]

    def _gathered(self, x: Tensor) -> Tensor:
        return _Gathered.apply(x, self.rank, self.size, self.processes)  # type: ignore[no-untyped-call, no-any-return]


def _all_to_all(x: Tensor, processes: Any) -> Tensor:
    received = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, x.contiguous(), group=processes)
    return received


class _Exchanged(torch.autograd.Function):
    """The i-th part goes to rank i of the group, and what comes from rank i becomes the i-th part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, processes: Any) -> Tensor:
        ctx.processes = processes
        return _all_to_all(x, processes)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _all_to_all(gradient, ctx.processes), None


class _Gathered(torch.autograd.Function):
    """Tensors of one shape from all ranks, stacked. The gradient is not summed: every rank has all of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rank: int, size: int, processes: Any) -> Tensor:
        ctx.rank = rank
        every = x.new_empty((size, *x.shape))
        dist.all_gather(list(every.unbind()), x.contiguous(), group=processes)
        return every

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return gradient[ctx.rank], None, None, None


def keep_batches_whole(accelerator: Any, group: SequenceGroup) -> None:
    """Turn off accelerate's own splitting of batches and its attention, and give all ranks of a group the same data."""
    if group.kind == "cp":
        # Its hooks would remove the attention mask from every layer, also in generation, where rows begin with padding
        accelerator._prepare_cp = lambda *args: args
        return
    # Otherwise one process reads a stream and deals it out to all ranks
    accelerator.dataloader_config.dispatch_batches = False
    counted = DataParallelAccelerator(accelerator, group.ranks)
    accelerator.prepare_data_loader = partial(Accelerator.prepare_data_loader, counted)
    _renew_process_groups(accelerator, group)
    name = accelerator.parallelism_config.sp_handler.sp_attn_implementation
    attention = ALL_ATTENTION_FUNCTIONS.get(name)

    def loader_as_it_is(loader: Any, engine: Any) -> Any:
        # Transformers calls it once the engine exists. DeepSpeed has registered its attention as `name`, which ignores
        # every mask and takes one batch size alone (ulysses_sp.py:631, :264)
        if attention is None:  # a kernel that transformers loads at its first use
            del ALL_ATTENTION_FUNCTIONS[name]
        else:
            ALL_ATTENTION_FUNCTIONS[name] = attention
        # It treats the group as tensor parallel, and counts the norm of the first rank's partition alone, times the
        # group's size (stage_1_and_2.py:2682, :2690)
        optimizer = engine.optimizer
        if getattr(optimizer, "model_parallel_group", None) is not None:
            optimizer.model_parallel_group, optimizer.model_parallel_rank = None, 0
        return loader

    accelerator.deepspeed_ulysses_dl_adapter = loader_as_it_is


def _renew_process_groups(accelerator: Any, group: SequenceGroup) -> None:
    """Let DeepSpeed create process groups for each engine: it fails where an earlier trainer's exist."""
    prepare = accelerator._prepare_deepspeed

    def prepared(*args: Any) -> Any:
        if not any(isinstance(x, nn.Module) for x in args):  # a data loader
            return prepare(*args)
        from deepspeed.runtime.sequence_parallel import parallel_state_sp

        parallel_state_sp._SEQUENCE_PARALLEL_GROUP = parallel_state_sp._SEQUENCE_DATA_PARALLEL_GROUP = None
        made = prepare(*args)
        group.made = parallel_state_sp._SEQUENCE_PARALLEL_GROUP
        return made

    accelerator._prepare_deepspeed = prepared


def _zero_stage(accelerator: Any) -> int | None:
    """DeepSpeed's, 0 to 3; `None` without DeepSpeed."""
    plugin = accelerator.state.deepspeed_plugin if accelerator.distributed_type == DistributedType.DEEPSPEED else None
    return None if plugin is None else int(plugin.zero_stage)


def unsplit_reason(accelerator: Any, group: SequenceGroup, config: Any) -> str | None:
    """Why the group cannot split the tokens of a batch of the model with the text `config`; `None` if it can."""
    stage = _zero_stage(accelerator)
    if group.kind == "sp" and stage is None:
        return (
            "`sp_size` is DeepSpeed's, and the processes were launched without it: accelerate 1.15 makes the group "
            "with DeepSpeed's engine only (accelerator.py:2426). Launch with a DeepSpeed config of any ZeRO stage"
        )
    if stage == 0:
        return "it is known to train right under ZeRO-1, ZeRO-2 and ZeRO-3 alone. Set `zero_stage` to 1, 2 or 3"
    if stage == 3:
        zero = accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]
        if not zero.get("reduce_scatter", True):
            return (
                "ZeRO-3 with `reduce_scatter: false` adds the gradients of a group up in one bucket and takes their "
                "mean in another (deepspeed 0.19.8, stage3.py:1673, :1878 and :1931). Leave `reduce_scatter` at true"
            )
    if group.kind == "cp" and not accelerator.is_fsdp2:
        return (
            "`cp_size` needs FSDP2, which shards the model over the same ranks (accelerate 1.15, state.py:998). Launch "
            "with an FSDP config and `fsdp_version: 2`"
        )
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if heads is not None and heads % group.size:
            return f"the ranks share out attention heads, and `{name}={heads}` does not divide by {group.size}"
    if accelerator.parallelism_config.tp_enabled:
        return "it does not work together with tensor parallelism. Set `tp_size=1`"
    return None
