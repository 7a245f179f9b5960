"""Formulas for the bytes that a rank receives and holds, for the head and for a whole step, by engine.

They model a ring (Patarasuk and Yuan, 2009). For a tensor of S bytes, each of R ranks receives (R - 1) / R * S in an
all-gather or a reduce-scatter, and twice that in an all-reduce. In a broadcast, every rank but the source receives S;
if the ranks take turns as the source, that is (R - 1) / R * S on average. Each rank sends as much as it receives. The
formulas ignore latency and the overlap with arithmetic.

They also ignore activations, which are the same under every engine except tensor parallelism.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from trl_ext.heads.parallel import _GATHERED_TOKENS, _SLICE
from trl_ext.heads.tiled import columns_per_tile, rows_per_tile

Way = Literal["here", "local", "in turn", "whole", "tensor parallel"]
Engine = Literal["DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "FSDP2", "TP", "TP x FSDP2"]

FP32, INT64 = 4, 8


@dataclass(frozen=True)
class HeadCase:
    """One pass of the head.

    Args:
        ranks (`int`): R, the number of ranks that share the weight's rows.
        tokens (`int`): N, the scored tokens of each rank; under tensor parallelism, all ranks have the same tokens.
        hidden (`int`): H.
        vocabulary (`int`): V.
        item (`int`): bytes of an element of hidden states and weight.
        trained (`bool`): whether the weight gets a gradient.
        gradient (`bool`): whether the hidden states get a gradient.
        more_outputs (`int`): number of outputs besides log_probs, each one fp32 number per token.
        entropy_grad (`bool`): whether the entropy has a gradient.
        device (`str`): device type that the sizes of tiles, slices and parts are for.
    """

    ranks: int
    tokens: int
    hidden: int
    vocabulary: int
    item: int = 2
    trained: bool = False
    gradient: bool = True
    more_outputs: int = 0
    entropy_grad: bool = False
    device: str = "cuda"

    @property
    def again(self) -> bool:
        """Whether the backward reads hidden states and weight again."""
        return self.gradient and (self.trained or self.entropy_grad)

    @property
    def weight(self) -> int:
        """Bytes of the whole weight."""
        return self.vocabulary * self.hidden * self.item


def gathered(ranks: int, whole: float) -> float:
    """Return the bytes that a rank receives in an all-gather or a reduce-scatter of `whole` bytes."""
    return (ranks - 1) / ranks * whole


def reduced(ranks: int, whole: float) -> float:
    """Return the bytes that a rank receives in an all-reduce of `whole` bytes."""
    return 2 * gathered(ranks, whole)


def head_payloads(case: HeadCase, way: Way) -> dict[str, int]:
    """Return the bytes of the tensors in all collectives of each kind, forward and backward together.

    - `"here"`: every rank has the whole weight, and nothing moves.
    - `"local"`: each rank scores the tokens of all ranks with its rows. The forward moves hidden states, targets, a max
      and two sums per token; the backward the fp32 gradient of the hidden states. A backward that reads the tiles again
      also moves hidden states and targets again, and four numbers per token (six with the entropy's gradient).
    - `"tensor parallel"`: every rank has the tokens. A max and two sums move, and the fp32 gradient is summed.
    - `"in turn"`: every rank broadcasts its rows, and does so again in a backward that reads them.
    - `"whole"`: each rank gathers and holds the weight; its gradient is reduced and scattered.
    """
    every = case.ranks * case.tokens
    if case.ranks == 1 or way == "here":
        return {}
    if way == "tensor parallel":
        gradient = case.tokens * case.hidden * FP32 if case.gradient else 0
        return {"all_reduce": case.tokens * FP32 * (3 + case.more_outputs) + gradient}
    if way == "local":
        forward = every * (case.hidden * case.item + INT64)
        numbers = FP32 * (6 if case.entropy_grad else 4)
        return {
            "all_gather": forward + (forward + every * numbers if case.again else 0),
            "all_reduce": every * FP32 * (3 + case.more_outputs),
            "reduce_scatter": every * case.hidden * FP32 if case.gradient else 0,
        }
    if way == "in turn":
        return {"broadcast": case.weight * (2 if case.again else 1)}
    return {"all_gather": case.weight, "reduce_scatter": case.weight if case.gradient and case.trained else 0}


def received(ranks: int, payloads: dict[str, int]) -> float:
    """Return the bytes that a rank receives over a ring, from payloads by kind; for broadcasts, the mean over ranks."""
    return sum(reduced(ranks, x) if kind == "all_reduce" else gathered(ranks, x) for kind, x in payloads.items())


def head_received(case: HeadCase, way: Way) -> float:
    """Return the bytes that a rank receives for the head in one micro-batch, forward and backward."""
    return received(case.ranks, head_payloads(case, way))


def head_held(case: HeadCase, way: Way) -> int:
    """Return the peak bytes of the head on a rank, besides its own rows, its own hidden states and their gradient.

    Every way holds two fp32 tiles, and the fp32 gradient sums of the tokens that are scored together. "local" adds the
    hidden states of all ranks, for as many tokens at a time as `heads/parallel.py` takes; "in turn" adds two slices and
    the targets' rows; "whole" adds the weight. A trained weight adds the gradient of its rows, and one tile's in fp32.
    """
    device = torch.device(case.device)
    kind = "cpu" if device.type == "cpu" else "cuda"
    tokens, rows = case.tokens, case.weight
    if way == "local":
        tokens = case.ranks * min(case.tokens, max(1, _GATHERED_TOKENS[kind] // case.ranks))
    weights = case.vocabulary * case.hidden
    n = rows_per_tile(tokens, device, None, weights)
    v = columns_per_tile(n, case.vocabulary, device, weights=weights)
    held = 2 * n * v * FP32 + (tokens * case.hidden * FP32 if case.gradient else 0)
    if way == "local":
        held += tokens * case.hidden * case.item
    if way in ("local", "tensor parallel"):
        rows = -(-rows // case.ranks)
        v = min(v, -(-case.vocabulary // case.ranks))
    if way == "in turn":
        held += 2 * min(_SLICE[kind], -(-case.weight // case.ranks)) + tokens * case.hidden * case.item
    if way == "whole" and case.ranks > 1:
        held += case.weight
    if case.gradient and case.trained:
        held += rows + v * case.hidden * FP32
    return held


def chosen_way(case: HeadCase, *, can_stream: bool = True) -> Way:
    """Return the way that `scoring/weight_layout.py` chooses for a weight spread over ranks with different tokens."""
    if head_received(case, "local") <= head_received(case, "in turn" if not case.trained else "whole"):
        return "local"
    return "in turn" if can_stream and not case.trained else "whole"


@dataclass(frozen=True)
class Model:
    """A decoder's sizes.

    Args:
        layers (`int`), hidden (`int`), intermediate (`int`), vocabulary (`int`): L, H, I, V.
        attention (`int`), key_value (`int`): widths of the queries, and of the keys and the values.
        tied (`bool`): whether the head's weight is the embedding's.
    """

    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    attention: int
    key_value: int
    tied: bool = False
    norms_of_heads: int = 0  # elements of a layer's norms of queries and keys

    def linears(self) -> list[tuple[int, int]]:
        """Return (in, out) of the linear layers of one block."""
        H, A, K, I = self.hidden, self.attention, self.key_value, self.intermediate  # noqa: E741
        return [(H, A), (H, K), (H, K), (A, H), (H, I), (H, I), (I, H)]

    @property
    def block(self) -> int:
        """The number of parameters of one block."""
        return sum(a * b for a, b in self.linears()) + 2 * self.hidden + self.norms_of_heads

    def adapters(self, rank: int) -> int:
        """Return the number of parameters of LoRA on all linear layers of one block."""
        return sum(rank * (a + b) for a, b in self.linears())

    @property
    def embedding(self) -> int:
        """The number of parameters of the embedding, which the head also has."""
        return self.vocabulary * self.hidden

    @property
    def total(self) -> int:
        """The number of all parameters, without LoRA."""
        return self.layers * self.block + self.embedding * (1 if self.tied else 2) + self.hidden


@dataclass(frozen=True)
class Step:
    """One optimizer step.

    Args:
        ranks (`int`): R, the number of all ranks. Groups of `tensor` ranks have the same tokens.
        processed (`int`): tokens that a rank's model processes in a micro-batch.
        lora (`int`): rank of the adapters on all linear layers of the blocks; 0 trains every parameter.
        micro_batches (`int`): number in a step.
        item (`int`), gradient_item (`int`): bytes of an element of a weight and of a gradient, as they are moved.
        state_item (`int`): bytes of optimizer state per trained parameter: fp32 copy and two moments.
    """

    ranks: int
    processed: int
    lora: int = 0
    micro_batches: int = 1
    tensor: int = 1
    item: int = 2
    gradient_item: int = 2
    state_item: int = 12


def trained(model: Model, step: Step) -> int:
    """Return the number of parameters that get a gradient."""
    return model.layers * model.adapters(step.lora) if step.lora else model.total


def step_received(model: Model, step: Step, engine: Engine) -> float:
    """Return the bytes that a rank receives in one optimizer step, without those of the head's way.

    For FSDP2 and ZeRO-3, `head_received` counts the head's weight and its gradient instead.

    - DDP: all-reduces gradients once per step.
    - ZeRO-1: reduces gradients once per step and gathers the new weights (Rajbhandari et al., arXiv 1910.02054).
    - ZeRO-2: as ZeRO-1, but reduces and scatters gradients in every micro-batch.
    - FSDP2, ZeRO-3: in every micro-batch, gather the weights of blocks and embedding in the forward and again in the
      backward, and those of the last norm once. ZeRO-3 reduces and scatters gradients in every micro-batch; FSDP2 once
      per step, because accelerate keeps them whole until then.
    - TP: all-reduces hidden states of the processed tokens, as transformers 5 does: in the forward, twice per block and
      once for the embedding; in the backward, five times per block, once for each linear layer split by columns.
    """
    if engine in ("TP", "TP x FSDP2"):
        tensor = step.ranks if engine == "TP" else step.tensor
        activations = (7 * model.layers + 1) * step.processed * model.hidden * step.item * step.micro_batches
        moved = reduced(tensor, activations)
        if engine == "TP":
            return moved
        return moved + _sharded_received(model, step, step.ranks // tensor, 1) / tensor
    if step.ranks == 1:
        return 0.0
    gradients = trained(model, step) * step.gradient_item
    weights = trained(model, step) * step.item
    if engine == "DDP":
        return reduced(step.ranks, gradients)
    if engine == "ZeRO-1":
        return gathered(step.ranks, gradients + weights)
    if engine == "ZeRO-2":
        return gathered(step.ranks, gradients * step.micro_batches + weights)
    return _sharded_received(model, step, step.ranks, step.micro_batches if engine == "ZeRO-3" else 1)


def _sharded_received(model: Model, step: Step, ranks: int, reductions: int) -> float:
    blocks = model.layers * (model.block + model.adapters(step.lora))
    # A frozen embedding is also gathered twice: torch 2.13 prefetches it in the backward, which does not need it
    rest = model.hidden + (0 if model.tied else 2 * model.embedding)
    gradients = trained(model, step)
    if not step.lora:
        gradients -= model.embedding
    weights = (2 * blocks + rest) * step.item * step.micro_batches
    return gathered(ranks, weights + gradients * step.gradient_item * reductions)


def step_held(model: Model, step: Step, engine: Engine) -> float:
    """Return the bytes of weights, gradients, optimizer state and gathered blocks that a rank holds.

    FSDP2 and ZeRO-3 hold two gathered blocks, one of them ahead. `head_held` counts the head's gathered weight.
    """
    total = model.total + (model.layers * model.adapters(step.lora) if step.lora else 0)
    trains = trained(model, step)
    weights, gradients, states = total * step.item, trains * step.gradient_item, trains * step.state_item
    R = step.ranks
    if engine == "DDP":
        return weights + gradients + states
    if engine == "ZeRO-1":
        return weights + gradients + states / R
    if engine == "ZeRO-2":
        return weights + (gradients + states) / R
    if engine == "TP":
        return (weights + gradients + states) / R
    tensor = step.tensor if engine == "TP x FSDP2" else 1
    if engine != "ZeRO-3" and step.micro_batches > 1:
        gradients *= R / tensor  # kept whole until the last micro-batch
    ahead = 2 * (model.block + model.adapters(step.lora)) * step.item / tensor if tensor < R else 0
    return (weights + gradients + states) / R + ahead


def rows_received(ranks: int, rows: int, tokens: int, *, per_token: int = 5, entries: int = 5) -> tuple[int, int]:
    """Return the bytes that a rank receives when rows move between ranks, if all its rows are new to it.

    Args:
        ranks (`int`): R.
        rows (`int`): of a rank.
        tokens (`int`): of a row.
        per_token (`int`): bytes: 4 for the id, 1 for the mask, 4 for a sampler's log-prob, 1 for a tool mask.
        entries (`int`): of the batch: ids and mask of prompts and completions, advantages, and further ones.

    Returns:
        `tuple[int, int]`: the bytes of the rows, with 4 for each advantage; and those of the numbers about the rows of
        all ranks: a hash of the prompt, three counts of tokens and the length of each entry.
    """
    return rows * (tokens * per_token + FP32), (ranks - 1) * (rows * (4 + entries) + 1) * INT64
