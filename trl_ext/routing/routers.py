"""The routers of a model: found by watching one forward pass, and made to use recorded experts.

The model's own router runs. Only its `topk` is answered, so weights, groups and gradients are those of its code.

Dimensions: N tokens of a forward pass, L routers in the order in which they run, k experts of a token.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .top_k import TopKCalls

# Where modules keep the function that checkpoints activations: transformers' layers, and torch's `CheckpointWrapper`
_CHECKPOINT_FUNCTIONS = ("_gradient_checkpointing_func", "checkpoint_fn")
_CLASS_ENDINGS = ("router", "gate", "gating")
# PEFT keeps a module and its trained copies in one wrapper. Which of them runs depends on the adapter
_COPY = re.compile(r"\.(original_module|modules_to_save\.[^.]+)(?=\.|$)")


class UnknownRoutersError(Exception):
    """The experts of a model are not chosen as we can read. The argument says why, as a clause."""


@dataclass(frozen=True)
class Router:
    """A router. Its forward returns (logits, scores, indices), and the indices are those of a `topk`."""

    modules: tuple[nn.Module, ...]  # several: copies, of which an adapter chooses one
    call: int  # the number of that `topk` in the forward
    experts: int
    chosen: int  # k


class Differences:
    """Counts of choices, one for each token and router, on the routers' device."""

    def __init__(self) -> None:
        self.replayed: list[Tensor] = []  # choices with a known route
        self.differing: list[Tensor] = []  # those for which the router would choose other experts

    def add(self, own_Nk: Tensor, replayed_Nk: Tensor) -> None:
        is_known_N = (replayed_Nk >= 0).all(dim=-1)
        differs_N = (own_Nk.sort(dim=-1).values != replayed_Nk.sort(dim=-1).values).any(dim=-1)
        self.replayed.append(is_known_N.sum())
        self.differing.append((differs_N & is_known_N).sum())

    def take(self) -> tuple[float, float]:
        """Return differing and all replayed choices since the last call; waits for the device."""
        lists = self.differing, self.replayed
        self.replayed = []
        self.differing = []
        differing, replayed = (float(sum(x.to(counts[0].device) for x in counts)) for counts in lists)
        return differing, replayed


class Routers:
    """The routers of one model.

    Args:
        routers (`list[Router]`): in the order in which they run.

    Raises:
        `UnknownRoutersError`: there are none, or they choose different numbers of experts.
    """

    def __init__(self, routers: list[Router]) -> None:
        if not routers:
            raise UnknownRoutersError("no module returns logits, scores, and the indices of a `topk`, as routers do")
        numbers = sorted({router.chosen for router in routers})
        if len(numbers) > 1:
            raise UnknownRoutersError(f"its layers choose different numbers of experts ({numbers})")
        self.routers = routers
        self.experts = max(router.experts for router in routers)
        self.chosen = numbers[0]
        self._layers = {module: layer for layer, router in enumerate(routers) for module in router.modules}
        self.differences = Differences()

    @classmethod
    def of(cls, model: nn.Module, run: Callable[[], Any]) -> "Routers":
        """Return the routers of `model` that `run` runs, a function that runs a forward pass.

        Raises:
            `UnknownRoutersError`: a router chooses experts in another way.
        """
        routers: dict[nn.Module, Router] = {}
        candidates = _candidates(model)

        def watched(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
            def call(*positional: Any, **keywords: Any) -> Any:
                with TopKCalls() as top_k:
                    outputs = forward(*positional, **keywords)
                if not top_k.calls and not type(module).__name__.lower().endswith("router"):
                    return outputs  # a gate of another kind
                if module in routers:
                    raise UnknownRoutersError(f"its `{type(module).__name__}` runs several times in a forward pass")
                routers[module] = _router_of(module, candidates, top_k, outputs)
                return outputs

            return call

        with ExitStack() as stack:
            for module in candidates:
                stack.enter_context(_attribute(module, "forward", watched(module, module.forward)))
            run()
        return cls(list(routers.values()))

    @property
    def dtype(self) -> torch.dtype:
        """The smallest dtype that holds each expert and `unknown`."""
        return torch.uint8 if self.experts <= 255 else torch.int16

    @property
    def unknown(self) -> int:
        """What stands for each expert of a token whose route is unknown."""
        return unknown_in(self.dtype)

    @contextmanager
    def recording(self) -> Iterator[list[list[Tensor]]]:
        """Record what the routers choose in the `with` block: for each router its calls, `(N, k)` each."""
        calls: list[list[Tensor]] = [[] for _ in self.routers]

        def recorded(layer: int, forward: Callable[..., Any]) -> Callable[..., Any]:
            def call(*positional: Any, **keywords: Any) -> Any:
                with TopKCalls(self.routers[layer].call) as top_k:
                    outputs = forward(*positional, **keywords)
                assert top_k.indices is not None
                calls[layer].append(top_k.indices.reshape(-1, self.chosen).to(self.dtype))
                return outputs

            return call

        with self._forwards(self._layers, recorded):
            yield calls

    @contextmanager
    def replaying(self, model: nn.Module, routes_NLk: Tensor) -> Iterator[None]:
        """Make the routers choose `routes_NLk` in forward passes of the `with` block.

        They also do when activation checkpointing runs layers of these forward passes again, for whichever backward:
        the function that it keeps holds the routes. Layers' hooks would not see that second forward.

        Args:
            routes_NLk (`Tensor`): on the host, of `dtype`. Each router gets its own on its device when it runs.

        Raises:
            `RuntimeError`: a router did not run.
        """
        layers_run: set[int] = set()
        routes_LNk = routes_NLk.transpose(0, 1).contiguous()
        if next(model.parameters()).is_cuda:
            routes_LNk = routes_LNk.pin_memory()
        differences = self.differences if torch.is_grad_enabled() else None

        def routed(modules: Iterable[nn.Module], counted: Differences | None) -> AbstractContextManager[None]:
            def replayed(layer: int, forward: Callable[..., Any]) -> Callable[..., Any]:
                return self._replayed(layer, forward, routes_LNk[layer], counted, layers_run)

            return self._forwards(modules, replayed)

        def keeps_routes(module: nn.Module, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
            def call(function: Callable[..., Any], *positional: Any, **keywords: Any) -> Any:
                is_first_run = True

                def run(*inputs: Any, **options: Any) -> Any:
                    nonlocal is_first_run
                    counted = differences if is_first_run else None
                    is_first_run = False
                    with routed(module.modules(), counted):
                        return function(*inputs, **options)

                return checkpoint(run, *positional, **keywords)

            return call

        with ExitStack() as stack:
            stack.enter_context(routed(self._layers, differences))
            for module in model.modules():
                for name in _CHECKPOINT_FUNCTIONS:
                    checkpoint = vars(module).get(name)
                    if callable(checkpoint):
                        stack.enter_context(_attribute(module, name, keeps_routes(module, checkpoint)))
            yield
        if len(layers_run) < len(self.routers):
            raise RuntimeError(
                f"`replay_routes`: only {len(layers_run)} of {len(self.routers)} routers ran, because modules of the "
                "model were replaced or added after the trainer was built. Build the trainer last."
            )

    def _replayed(
        self,
        layer: int,
        forward: Callable[..., Any],
        routes_Nk: Tensor,
        differences: Differences | None,
        layers_run: set[int],
    ) -> Callable[..., Any]:
        router = self.routers[layer]

        def call(*positional: Any, **keywords: Any) -> Any:
            device = next(x.device for x in (*positional, *keywords.values()) if isinstance(x, Tensor))
            answer_Nk = routes_Nk.to(device, non_blocking=True).long()
            answer_Nk = answer_Nk.masked_fill(answer_Nk == self.unknown, -1)
            with TopKCalls(router.call, answer_Nk) as top_k:
                outputs = forward(*positional, **keywords)
            assert top_k.indices is not None
            layers_run.add(layer)
            if differences is not None:
                differences.add(top_k.indices.reshape(answer_Nk.shape), answer_Nk)
            return outputs

        return call

    @contextmanager
    def _forwards(
        self, modules: Iterable[nn.Module], wrapped: Callable[[int, Callable[..., Any]], Callable[..., Any]]
    ) -> Iterator[None]:
        """Replace the forward of the routers among `modules` by `wrapped(layer, forward)` in the `with` block."""
        with ExitStack() as stack:
            for module in modules:
                layer = self._layers.get(module)
                if layer is None:
                    continue
                # Not the forward of a pass around this one, which a checkpoint may run again
                forward = getattr(module.forward, "router_forward", module.forward)
                call = wrapped(layer, forward)
                call.router_forward = forward  # type: ignore[attr-defined]
                stack.enter_context(_attribute(module, "forward", call))
            yield


def unknown_in(dtype: torch.dtype) -> int:
    """Return what stands for each expert of a token whose route is unknown, in routes of this dtype."""
    return 255 if dtype == torch.uint8 else -1


def by_forward(calls: list[list[Tensor]]) -> list[Tensor]:
    """Return the routes `(N, L, k)` of each forward pass, from those that `Routers.recording` yields.

    Raises:
        `RuntimeError`: a router did not run once in each forward pass.
    """
    counts = {len(of_router) for of_router in calls}
    if counts == {0}:
        raise RuntimeError(
            "`replay_routes`: no router ran, because modules of the model were replaced or added after the trainer was "
            "built. Build the trainer last."
        )
    if len(counts) > 1:
        raise RuntimeError(
            f"`replay_routes`: the model's routers ran {sorted(counts)} times, and must run equally often."
        )
    return [
        torch.stack([routes_Nk.to(of_forward[0].device) for routes_Nk in of_forward], dim=1)
        for of_forward in zip(*calls, strict=True)
    ]


def _candidates(model: nn.Module) -> dict[nn.Module, str]:
    """Return modules that may be routers, by the names of their classes, with their own names."""
    return {
        module: name
        for name, module in model.named_modules()
        if type(module).__name__.lower().endswith(_CLASS_ENDINGS)  # FSDP2 makes a subclass, and puts a prefix
    }


def _router_of(module: nn.Module, candidates: dict[nn.Module, str], top_k: TopKCalls, outputs: Any) -> Router:
    """Return the router that `module` is, from its outputs and its last call of `topk`."""
    name = type(module).__name__
    if not (isinstance(outputs, tuple) and len(outputs) == 3 and all(isinstance(x, Tensor) for x in outputs)):
        raise UnknownRoutersError(f"its `{name}` does not return logits, scores and the indices of experts")
    logits, scores, indices = outputs
    own_indices = top_k.indices
    if own_indices is None or scores.shape != indices.shape or not torch.equal(own_indices.view(-1), indices.view(-1)):
        raise UnknownRoutersError(f"the experts that its `{name}` returns are not those of a `topk`")
    place = _COPY.sub("", candidates[module])
    copies = tuple(other for other, other_name in candidates.items() if _COPY.sub("", other_name) == place)
    return Router(copies, top_k.calls, experts=logits.size(-1), chosen=indices.size(-1))


@contextmanager
def _attribute(owner: nn.Module, name: str, value: Any) -> Iterator[None]:
    """Set an attribute in the `with` block, and restore what was there, or its absence."""
    had_value = name in vars(owner)
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if had_value:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
