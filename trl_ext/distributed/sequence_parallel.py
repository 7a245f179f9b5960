"""The ranks that split the tokens of one batch among them: their group, its exchanges, and the engine below it.

Accelerate starts such groups as context parallelism (`cp_size`, FSDP2) and as Ulysses sequence parallelism (`sp_size`,
DeepSpeed). Taken from it are the ranks, the sharded weights and the reduction of gradients. Its own splitting of
batches and its attention are not used: docs/sequence-parallel.md says why, line by line.

Dimensions: T tokens, n ranks, c = ceil(T / n) tokens of each, A heads, D features of a head.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import DistributedType
from torch import Tensor, nn

from .tensor_parallel import TensorParallel, signature


class SequenceGroup:
    """A group of ranks that are fed the same batch, and each run their share of its tokens.

    Attributes:
        size (`int`): ranks in it.
        rank (`int`): of this process in it; consecutive ranks form a group.
        kind (`str`): `"cp"` or `"sp"`, as accelerate's `ParallelismConfig` names it.
        made (`dist.ProcessGroup`, *optional*): the process group of `"sp"`, once DeepSpeed has made it.
        gradient_factor (`float`): what the sum of the ranks' gradients has to be multiplied by, because the engine
            divides it by more than the number of batches.
    """

    def __init__(self, accelerator: Any) -> None:
        config = accelerator.parallelism_config
        self.kind = "cp" if config.cp_enabled else "sp"
        self.size: int = config.cp_size if config.cp_enabled else config.sp_size
        self.rank: int = accelerator.process_index % self.size
        # FSDP takes the mean over all ranks, and so does ZeRO-3 (deepspeed 0.19.8, stage3.py:1931). ZeRO-1 and 2 take
        # the sum over a group and the mean over the groups (stage_1_and_2.py:1508 and :1688)
        sums = not config.cp_enabled and zero_stage(accelerator) in (1, 2)
        self.gradient_factor = 1.0 if sums else float(self.size)
        self.made: dist.ProcessGroup | None = None
        self._accelerator = accelerator

    @classmethod
    def of(cls, accelerator: Any) -> "SequenceGroup | None":
        """The group that accelerate was asked for; None without one."""
        config = accelerator.parallelism_config
        return None if config is None or config.cp_size * config.sp_size == 1 else cls(accelerator)

    @property
    def processes(self) -> "dist.ProcessGroup | None":
        """The process group; None as long as DeepSpeed has not made it, which it does with its engine."""
        if self.kind == "cp":
            return self._accelerator.torch_device_mesh["cp"].get_group()  # type: ignore[no-any-return]
        return self.made

    @property
    def ranks(self) -> TensorParallel:
        """The group as one of ranks that do the same; which such a group is outside the forward."""
        index, processes = self._accelerator.process_index, self._accelerator.num_processes
        return TensorParallel(self.processes, self.rank, self.size, index // self.size, processes // self.size)

    @property
    def device(self) -> torch.device:
        """Of this process."""
        return self._accelerator.device  # type: ignore[no-any-return]

    def alike(self, *tensors: Tensor | None) -> bool:
        """Whether every rank of the group holds the same values. All of them call it."""
        given = [x for x in tensors if x is not None]
        mine = torch.stack([signature(x).to(self.device) for x in given])
        others = torch.empty((self.size, *mine.shape), dtype=mine.dtype, device=mine.device)
        dist.all_gather(list(others.unbind()), mine, group=self.processes)
        return bool((others == mine).all())

    def shard(self, tokens: int) -> "Shard":
        """What of a row of `tokens` tokens is this rank's."""
        processes = self.processes
        assert processes is not None
        return Shard(tokens, -(-tokens // self.size), self.rank, self.size, processes)


def _zero_config(accelerator: Any) -> dict[str, Any]:
    config: dict[str, Any] = accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]
    return config


def zero_stage(accelerator: Any) -> int | None:
    """DeepSpeed's, 0 to 3; None without DeepSpeed."""
    plugin = accelerator.state.deepspeed_plugin if accelerator.distributed_type == DistributedType.DEEPSPEED else None
    return None if plugin is None else int(plugin.zero_stage)


class Shard(NamedTuple):
    """One rank's tokens of a row: as many as every other's, and the last ones are padding where that does not divide.

    Args:
        tokens (`int`): T, of the whole row.
        width (`int`): c, of this rank's shard.
        rank, size (`int`): of this rank in the group, and of the group.
        processes (`dist.ProcessGroup`): the group.
    """

    tokens: int
    width: int
    rank: int
    size: int
    processes: dist.ProcessGroup

    @property
    def first(self) -> int:
        """The first place in the row that is this rank's."""
        return self.rank * self.width

    def columns(self, row_1T: Tensor) -> Tensor:
        """`(1, c)`: this rank's columns of a row, filled up with 0."""
        row = F.pad(row_1T, (0, self.width * self.size - self.tokens))
        return row[:, self.first : self.first + self.width]

    def to_heads(self, x_cAD: Tensor) -> Tensor:
        """`(T, A / n, D)`: all tokens of this rank's heads, for all heads of this rank's tokens."""
        sent = x_cAD.unflatten(1, (self.size, -1)).transpose(0, 1)
        received: Tensor = _Exchanged.apply(sent, self.processes)  # type: ignore[no-untyped-call]
        return received.flatten(0, 1)[: self.tokens]

    def to_tokens(self, x_TAD: Tensor) -> Tensor:
        """`(c, A, D)`: the inverse of `to_heads`."""
        padded = F.pad(x_TAD, (0, 0, 0, 0, 0, self.width * self.size - self.tokens))
        received: Tensor = _Exchanged.apply(padded.unflatten(0, (self.size, -1)), self.processes)  # type: ignore[no-untyped-call]
        return received.transpose(0, 1).flatten(1, 2)

    def heads(self, x_A: Tensor) -> Tensor:
        """`(A / n,)`: what of one value a head is of this rank's heads."""
        return x_A.chunk(self.size)[self.rank]

    def owner(self, at_N: Tensor) -> Tensor:
        """`(N,)`: the rank that has the token of each place in the row."""
        return at_N // self.width

    def whole(self, x: Tensor) -> Tensor:
        """`(T, ...)` of all ranks, from the `(c, ...)` of each."""
        every: Tensor = _Gathered.apply(x, self.rank, self.size, self.processes)  # type: ignore[no-untyped-call]
        return every.flatten(0, 1)[: self.tokens]

    def gathered(self, x: Tensor, owner_N: Tensor) -> Tensor:
        """`(N, ...)`: from each rank the values of the places that it owns, in order of place.

        Every rank goes on to compute the same from them, so the gradient of what this rank gave is what its own
        graph says.
        """
        of_rank = owner_N == torch.arange(self.size, device=owner_N.device).unsqueeze(1)
        widest = int(of_rank.sum(dim=1).max())
        padded = F.pad(x, (0, 0) * (x.dim() - 1) + (0, widest - x.shape[0]))
        every: Tensor = _Gathered.apply(padded, self.rank, self.size, self.processes)  # type: ignore[no-untyped-call]
        place_N = (of_rank.cumsum(dim=1) - 1).gather(0, owner_N.unsqueeze(0)).squeeze(0)
        return every[owner_N, place_N]


class _Exchanged(torch.autograd.Function):
    """The i-th part goes to rank i of the group, and what comes from rank i becomes the i-th part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, processes: Any) -> Tensor:
        ctx.processes = processes
        received = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, x.contiguous(), group=processes)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        received = torch.empty_like(gradient, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, gradient.contiguous(), group=ctx.processes)
        return received, None


class _Gathered(torch.autograd.Function):
    """Equal shapes of all ranks, stacked. The gradient is not summed: every rank has the whole of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rank: int, size: int, processes: Any) -> Tensor:
        ctx.rank = rank
        every = x.new_empty((size, *x.shape))
        dist.all_gather(list(every.unbind()), x.contiguous(), group=processes)
        return every

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return gradient[ctx.rank], None, None, None


def batches_stay_whole(accelerator: Any, group: SequenceGroup) -> None:
    """Leave the splitting of batches and the attention to us, of all that accelerate does for such a group."""
    if group.kind == "cp":
        # Its hooks would take the attention mask from every layer, also in generation, where rows begin with padding
        accelerator._prepare_cp = lambda *args: args
        return
    _loaders_are_of_groups(accelerator, group)
    _groups_are_made_again(accelerator, group)
    name = accelerator.parallelism_config.sp_handler.sp_attn_implementation
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attention: Callable[..., Any] | None = ALL_ATTENTION_FUNCTIONS.get(name)

    def loader_as_it_is(loader: Any, engine: Any) -> Any:
        # Called by transformers once the engine is there. DeepSpeed has put its attention in the place of `name`, which
        # leaves out every mask and takes one batch size alone (ulysses_sp.py:631, :264)
        if attention is None:  # a kernel that transformers loads when it is first used
            del ALL_ATTENTION_FUNCTIONS[name]
        else:
            ALL_ATTENTION_FUNCTIONS[name] = attention
        # It takes the group for one of tensor parallelism, and counts the norm of the first rank's partition alone,
        # times the group's size (stage_1_and_2.py:2682, :2690)
        optimizer = engine.optimizer
        if getattr(optimizer, "model_parallel_group", None) is not None:
            optimizer.model_parallel_group, optimizer.model_parallel_rank = None, 0
        return loader

    accelerator.deepspeed_ulysses_dl_adapter = loader_as_it_is


def _loaders_are_of_groups(accelerator: Any, group: SequenceGroup) -> None:
    """Have accelerate prepare data loaders that give every rank of a group the same, as for context parallelism."""
    ranks = group.ranks

    def prepared(loader: Any, device_placement: Any = None, slice_fn_for_dispatch: Any = None) -> Any:
        if getattr(loader, "_is_accelerate_prepared", False):
            return loader
        placed = prepare_data_loader(
            loader,
            accelerator.device,
            num_processes=ranks.copies,
            process_index=ranks.copy,
            split_batches=accelerator.split_batches,
            put_on_device=accelerator.device_placement if device_placement is None else device_placement,
            rng_types=accelerator.rng_types.copy(),
            dispatch_batches=False,  # else one process reads a stream, and deals it out to all ranks alike
            even_batches=accelerator.even_batches,
            slice_fn_for_dispatch=slice_fn_for_dispatch,
            use_seedable_sampler=accelerator.use_seedable_sampler,
            data_seed=accelerator.dataloader_config.data_seed,
            non_blocking=accelerator.non_blocking,
            use_stateful_dataloader=accelerator.use_stateful_dataloader,
        )
        accelerator._dataloaders.append(placed)
        return placed

    accelerator.prepare_data_loader = prepared


def _groups_are_made_again(accelerator: Any, group: SequenceGroup) -> None:
    """Have DeepSpeed make process groups for each engine: it stops where those of an earlier trainer are."""
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


def why_not_split(accelerator: Any, group: SequenceGroup, config: Any) -> str | None:
    """Why the tokens of a batch cannot be split over the group; None where they can.

    Args:
        config (`PreTrainedConfig`): of the text model.
    """
    if group.kind == "sp" and accelerator.distributed_type != DistributedType.DEEPSPEED:
        return (
            "`sp_size` is DeepSpeed's, and the processes were launched without it: accelerate 1.15 makes the group "
            "with DeepSpeed's engine only (accelerator.py:2426). Launch with a DeepSpeed config of any ZeRO stage"
        )
    stage = zero_stage(accelerator)
    if stage == 0:
        return "it is known to train right under ZeRO-1, ZeRO-2 and ZeRO-3 alone. Set `zero_stage` to 1, 2 or 3"
    if stage == 3 and not _zero_config(accelerator).get("reduce_scatter", True):
        return (
            "ZeRO-3 with `reduce_scatter: false` adds the gradients of a group up in one bucket and takes their mean "
            "in another (deepspeed 0.19.8, stage3.py:1673, :1878 and :1931). Leave `reduce_scatter` at true"
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
        return "it cannot be had together with tensor parallelism. Set `tp_size=1`"
    return None
