"""Bytes that reach a rank and bytes that it holds, for the head and for a whole step, by engine: plain functions.

The model is that of a ring (Patarasuk and Yuan, 2009): of a tensor of S bytes, an all-gather and a reduce-scatter bring
each of R ranks (R - 1) / R * S, an all-reduce twice that. A broadcast brings S to every rank but its first; over ranks
that take turns at being first that is (R - 1) / R * S on average. Bytes sent are as many. Latency, and what overlaps
with arithmetic, is not in it.

What a layer's own arithmetic holds (activations) is the same under every engine but tensor parallelism, and left out.
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
        ranks (`int`): R, over which the weight's rows are spread.
        tokens (`int`): N that are scored on a rank, on each as many; under tensor parallelism all have the same.
        hidden (`int`): H.
        vocabulary (`int`): V.
        item (`int`): bytes of an element of hidden states and weight.
        trained (`bool`): whether the weight gets a gradient.
        gradient (`bool`): whether the hidden states do.
        more_outputs (`int`): outputs beside log_probs, each one fp32 number a token.
        entropy_grad (`bool`): whether the entropy has a gradient.
        device (`str`): whose sizes of tiles, slices and parts to take.
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
        """Whether the backward reads hidden states and weight once more."""
        return self.gradient and (self.trained or self.entropy_grad)

    @property
    def weight(self) -> int:
        """Bytes of the whole weight."""
        return self.vocabulary * self.hidden * self.item


def gathered(ranks: int, whole: float) -> float:
    """Bytes that reach a rank by an all-gather or a reduce-scatter of `whole` bytes."""
    return (ranks - 1) / ranks * whole


def reduced(ranks: int, whole: float) -> float:
    """Bytes that reach a rank by an all-reduce of `whole` bytes."""
    return 2 * gathered(ranks, whole)


def head_payloads(case: HeadCase, way: Way) -> dict[str, int]:
    """Bytes of the tensors that all collectives of a kind work on, forward and backward together.

    - `"here"`: the whole weight is on every rank. Nothing.
    - `"local"`: the tokens of all ranks come to the rows. Forward: hidden states, targets, a max and two sums a token;
      the fp32 gradient of the hidden states goes back. Where the backward reads the tiles again, hidden states and
      targets come again, with four numbers a token that the forward made (six with the entropy's gradient).
    - `"tensor parallel"`: tokens are everywhere. A max and two sums; the fp32 gradient is added up.
    - `"in turn"`: every row goes to every rank, again in a backward that reads it.
    - `"whole"`: the weight is gathered, and held; its gradient is reduced and scattered.
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
    """Bytes that reach a rank over a ring, of payloads by kind: over all ranks' mean, for a broadcast."""
    return sum(reduced(ranks, x) if kind == "all_reduce" else gathered(ranks, x) for kind, x in payloads.items())


def head_received(case: HeadCase, way: Way) -> float:
    """Bytes that reach a rank for the head, in one micro-batch, forward and backward."""
    return received(case.ranks, head_payloads(case, way))


def head_held(case: HeadCase, way: Way) -> int:
    """Most bytes that a rank holds for the head beside its own rows, its own hidden states and their gradient.

    Two fp32 tiles in every way, and the fp32 sums of what is scored together. Local: hidden states of all ranks, for as
    many tokens at a time as `heads/parallel.py` takes. In turn: two slices, and the targets' rows. Whole: the weight.
    A trained weight: the gradient of the rows that are scored with, and one tile's in fp32.
    """
    device = torch.device(case.device)
    kind = "cpu" if device.type == "cpu" else "cuda"
    tokens, rows = case.tokens, case.weight
    if way == "local":
        tokens = case.ranks * min(case.tokens, max(1, _GATHERED_TOKENS[kind] // case.ranks))
    n = rows_per_tile(tokens, device, None)
    v = columns_per_tile(n, case.vocabulary, device)
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
    """What `scoring/weight_layout.py` chooses where a weight is spread over ranks with different tokens."""
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
        """(in, out) of the linear layers of one block."""
        H, A, K, I = self.hidden, self.attention, self.key_value, self.intermediate  # noqa: E741
        return [(H, A), (H, K), (H, K), (A, H), (H, I), (H, I), (I, H)]

    @property
    def block(self) -> int:
        """Parameters of one block."""
        return sum(a * b for a, b in self.linears()) + 2 * self.hidden + self.norms_of_heads

    def adapters(self, rank: int) -> int:
        """Parameters of LoRA on all linear layers of one block."""
        return sum(rank * (a + b) for a, b in self.linears())

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, and of the head."""
        return self.vocabulary * self.hidden

    @property
    def total(self) -> int:
        """All parameters: without LoRA."""
        return self.layers * self.block + self.embedding * (1 if self.tied else 2) + self.hidden


@dataclass(frozen=True)
class Step:
    """One optimizer step.

    Args:
        ranks (`int`): R in all. With `tensor` > 1, groups of so many have the same tokens.
        fed (`int`): tokens that enter a rank's model in a micro-batch.
        lora (`int`): rank of the adapters on all linear layers of the blocks; 0 trains every parameter.
        micro_batches (`int`): in a step.
        item (`int`), gradient_item (`int`): bytes of a parameter's element as it is moved, and of a gradient's.
        state_item (`int`): bytes of optimizer state of a trained parameter: fp32 copy and two moments.
    """

    ranks: int
    fed: int
    lora: int = 0
    micro_batches: int = 1
    tensor: int = 1
    item: int = 2
    gradient_item: int = 2
    state_item: int = 12


def trained(model: Model, step: Step) -> int:
    """Parameters that get a gradient."""
    return model.layers * model.adapters(step.lora) if step.lora else model.total


def step_received(model: Model, step: Step, engine: Engine) -> float:
    """Bytes that reach a rank in one optimizer step, without what the head's own way moves.

    For FSDP2 and ZeRO-3 the head's weight is left out here, and its gradient: `head_received` has them.

    - DDP: the gradients are reduced once a step.
    - ZeRO-1: gradients are reduced once a step and the new weights gathered (Rajbhandari et al., arXiv 1910.02054).
    - ZeRO-2: as ZeRO-1, but gradients are reduced and scattered in every micro-batch.
    - FSDP2, ZeRO-3: the weights of each block and of the embedding are gathered in the forward and again in the
      backward, those of the last norm once, in every micro-batch. Gradients are reduced and scattered: by ZeRO-3 in
      every micro-batch; by FSDP2 once, since accelerate keeps them whole until then.
    - TP: all-reduces of the fed tokens' hidden states, as transformers 5 runs them. In the forward two a block and one
      of the embedding; in the backward five a block, because each linear layer that splits its columns has its own.
    """
    if engine in ("TP", "TP x FSDP2"):
        tensor = step.ranks if engine == "TP" else step.tensor
        activations = (7 * model.layers + 1) * step.fed * model.hidden * step.item * step.micro_batches
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
    # A frozen embedding comes twice too: torch 2.13 prefetches it in a backward that does not need it
    rest = model.hidden + (0 if model.tied else 2 * model.embedding)
    gradients = trained(model, step)
    if not step.lora:
        gradients -= model.embedding
    weights = (2 * blocks + rest) * step.item * step.micro_batches
    return gathered(ranks, weights + gradients * step.gradient_item * reductions)


def step_held(model: Model, step: Step, engine: Engine) -> float:
    """Bytes of weights, gradients and optimizer state that a rank holds, with the blocks that are gathered at a time.

    For FSDP2 and ZeRO-3 two blocks are gathered at a time, one ahead; the head's weight is `head_held`'s.
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
