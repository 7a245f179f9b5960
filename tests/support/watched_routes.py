"""What the routers of a mixture of experts really choose, seen in what their classes' `forward` returns.

It uses nothing of trl_ext, and trl_ext does not see it: the `forward` of a router's class is replaced by a function
that names the same file as its own, while instances get no hook and no attribute. An instance may be given another
`forward`, which calls the class's; the recorded routes are then those that the class's returns to it. It has to look up
the class's after the watch began: calls of a bound method that it holds from before are not recorded.

Dimensions: B rows, S columns, N tokens of a forward (B x S with padding, or those of a packed row), L routers, k
experts of a token.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import update_wrapper
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class RouterCall:
    """One call of one router.

    Attributes:
        layer (`int`): the number of the router among the routers of the model, which is not that of its layer.
        name (`str`): of the router, in the model.
        tokens (`int`): N.
        routes_Nk (`Tensor`, *optional*): the indices that it returned; None if it returned no indices.
        has_gradients (`bool`): whether gradients were enabled. The first forward of reentrant checkpointing has none.
        in_backward (`bool`): whether a backward called it, so that checkpointing recomputes it.
    """

    layer: int
    name: str
    tokens: int
    routes_Nk: Tensor | None
    has_gradients: bool
    in_backward: bool


@dataclass
class WatchedRoutes:
    """The calls of a model's routers, in order."""

    names: list[str]
    calls: list[RouterCall] = field(default_factory=list)

    def take_calls(self) -> list[RouterCall]:
        """Return the calls since the last time."""
        calls = self.calls[:]
        self.calls.clear()
        return calls


def routers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the routers of `model` in the order of its modules, in which they run, by name."""
    return {name: module for name, module in model.named_modules() if "Router" in type(module).__name__}


@contextmanager
def watch_routes(model: nn.Module) -> Iterator[WatchedRoutes]:
    """Record each call of the routers that `model` has now. Contexts of several models, or of one, may be nested."""
    routers = routers_of(model)
    if not routers:
        raise ValueError(f"`{type(model).__name__}` has no module whose class is named `Router`")
    replaced = [name for name, module in routers.items() if "forward" in vars(module)]
    if replaced:  # it holds the class's `forward`, so that no call would be recorded
        raise ValueError(f"the `forward` of {replaced} is replaced already; begin to watch before that")
    numbers = {id(module): layer for layer, module in enumerate(routers.values())}
    watched = WatchedRoutes([*routers])

    def record(router: nn.Module, outputs: Any) -> None:
        layer = numbers.get(id(router))
        if layer is None:  # of another model of the same family
            return
        # A function mode that answers `topk` is still on, and sees no call of ours
        with torch._C.DisableTorchFunction():
            indices_Nk = outputs[2] if len(outputs) == 3 and not outputs[2].is_floating_point() else None
            call = RouterCall(
                layer=layer,
                name=watched.names[layer],
                tokens=outputs[0].shape[0],
                routes_Nk=None if indices_Nk is None else indices_Nk.detach().clone(),
                has_gradients=torch.is_grad_enabled(),
                in_backward=torch._C._current_graph_task_id() != -1,
            )
        watched.calls.append(call)

    with ExitStack() as stack:
        for owner in dict.fromkeys(map(_owner_of_forward, routers.values())):
            stack.enter_context(_observed_forward(owner, record))
        yield watched


def _owner_of_forward(router: nn.Module) -> type:
    """Return the class that defines `forward`: sharded parameters give an instance a class of its own."""
    return next(x for x in type(router).__mro__ if "forward" in vars(x))


def _observe(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The `forward` of a watched class. Its globals are not those of this file."""
    outputs = original(self, *args, **kwargs)  # noqa: F821
    record(self, outputs)  # noqa: F821
    return outputs


@contextmanager
def _observed_forward(owner: Any, record: Callable[[nn.Module, Any], None]) -> Iterator[None]:
    original = vars(owner)["forward"]
    # trl_ext tells a user's function by the name in its globals and by its closure, and looks under `__wrapped__`
    names = {"__name__": original.__globals__["__name__"], "original": original, "record": record}
    owner.forward = update_wrapper(FunctionType(_observe.__code__, names), original)
    try:
        yield
    finally:
        owner.forward = original


def stack_rows(calls: Iterable[RouterCall], rows: int) -> Tensor:
    """Return the routes `(B, S, L, k)` of forwards of B padded rows: one, or those of a `generate`, column by column.

    A `generate` with P columns of prompts and C of completions has routes for P + C - 1 columns.
    """
    of_layers: dict[int, list[Tensor]] = {}
    for call in calls:
        assert call.routes_Nk is not None, f"{call.name} returned no indices"
        of_layers.setdefault(call.layer, []).append(call.routes_Nk.unflatten(0, (rows, -1)))
    return torch.stack([torch.cat(of_layers[layer], 1) for layer in sorted(of_layers)], 2)


@torch.no_grad()
def own_routes(model: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Return the routes `(B, S, L, k)` that `model` itself chooses for a padded batch, also those of padding."""
    was_training = model.training
    model.eval()
    try:
        with watch_routes(model) as watched:
            model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
    finally:
        model.train(was_training)
    return stack_rows(watched.calls, rows=input_ids.shape[0])
