"""The pass of a batch through a model's backbone: whether it is packed, and which tokens it processes."""

import operator
import weakref
from typing import Any, NamedTuple

import torch
from torch import nn

from ..packing.hooks import attached_functions
from ..packing.layout import Layout
from ..packing.packing import Packing, has_other_ranks
from ..packing.randomness import Randomness, may_keep_outputs, randomness_of, strongest


class ForwardTokens(NamedTuple):
    """Token counts of forwards: of this rank, or sums over all."""

    skipped: int = 0  # padding and repeated prompts that packing removed
    with_gradient: int = 0  # tokens that the backbone processed with a gradient
    without_gradient: int = 0
    head: int = 0  # tokens that the head scored
    checks: int = 0  # tokens that only the checks of the first batch processed


class BackboneForward:
    """Passes of one model through its backbone. What uses the hidden states is in classes below it."""

    was_called = False  # every call sets it; the caller resets and reads it
    is_compared = False  # whether the results were compared with those of the model's own forward
    agrees_with_model = False  # whether they were equal, at once

    def __init__(self, model: Any, packing: Packing) -> None:
        self._outermost = weakref.ref(model)  # the model in its wrappers; weak, because its `forward` holds this object
        self.model_class = type(model).__name__
        self.packing = packing
        self.counts = ForwardTokens()  # since they were last taken, but for what packing counts
        self.planned_randomness: Randomness | None = None  # what the plan knows, perhaps of another rank
        self.late_randomness: Randomness | None = None  # of users' code that came after the plan was made
        self.may_keep_outputs = False  # whether a hook of a user may keep what a module returns, with its graph
        self._randomness: Randomness | None = None
        self._modules: list[nn.Module] | None = None  # of the model; None to look at all of it in the next pass
        self._functions: list[Any] = []  # hooks and replaced forwards when `_randomness` was found

    @property
    def facts(self) -> dict[str, Any]:
        """What the results depend on, besides the model. The record of the first batch's checks has it."""
        raise NotImplementedError

    def take_counts(self) -> ForwardTokens:
        """Return token counts since the last call."""
        counts = self.counts._replace(
            skipped=self.packing.skipped_tokens,
            checks=self.counts.checks + self.packing.checked_tokens,
        )
        self.counts = ForwardTokens()
        self.packing.skipped_tokens = 0
        self.packing.checked_tokens = 0
        return counts

    # Not compiled: the counts differ in each call, so every call would be compiled again
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _count(self, tokens: int, scored_tokens: int) -> None:
        with_gradient = tokens if torch.is_grad_enabled() else 0
        self.counts = self.counts._replace(
            with_gradient=self.counts.with_gradient + with_gradient,
            without_gradient=self.counts.without_gradient + tokens - with_gradient,
            head=self.counts.head + scored_tokens,
        )

    def _layout(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], labels: Any) -> Layout | None:
        """Return how the batch is packed, or None: then it stays padded."""
        randomness = self._randomness_of_pass(model)
        packs = randomness is None or randomness.of_tokens  # other draws depend on the shape of the batch
        if not packs and not has_other_ranks():
            return None
        # Other ranks may have no such hook, and would wait for this rank in the check of the first batch
        return self.packing.layout(model, args, kwargs, labels, share=randomness is None, pack=packs)

    def forget_randomness(self) -> None:
        """Look again, in the next pass, at what the model draws at random."""
        self._modules = None

    def look_for_hooks(self, wrapped_model: nn.Module | None = None) -> bool:
        """Look at the hooks again. Return whether one has come since the plan was made that the plan must know.

        Args:
            wrapped_model (`nn.Module`, *optional*): the model in the wrappers of PEFT and the engine, which may have
                hooks.
        """
        if wrapped_model is not None and self._outermost() is not wrapped_model:
            self._outermost = weakref.ref(wrapped_model)
            self._modules = None
        model = self._outermost()
        known_randomness = self.late_randomness
        if model is not None:
            self._look_at(model)
        return self.late_randomness != known_randomness

    def _look_at(self, model: Any) -> None:
        """Look at what the hooks of `model` may do, if they differ from those of the last look."""
        is_first_look = self._modules is None
        if self._modules is None:
            self._modules = list(model.modules())
        functions = attached_functions(self._modules)
        if not is_first_look and _are_same(functions, self._functions):
            return
        self._functions = functions
        self._randomness = randomness_of(model)
        self.may_keep_outputs = may_keep_outputs(model)
        if self._randomness is not None and not self._randomness.of_tokens:
            is_planned = self.planned_randomness is not None and not self.planned_randomness.of_tokens
            self.late_randomness = self.late_randomness if is_planned else self._randomness

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _randomness_of_pass(self, model: Any) -> Randomness | None:
        """Return what makes equal tokens have different hidden states in this pass."""
        # A hook may come and go within a step, for example in a user's `compute_loss`
        outermost = self._outermost()
        self._look_at(model if outermost is None else outermost)
        randomness = strongest(self._randomness, self.late_randomness, self.planned_randomness)
        is_off = randomness is not None and randomness.in_training_only and not model.training
        return None if is_off else randomness


def _are_same(functions: list[Any], other_functions: list[Any]) -> bool:
    return len(functions) == len(other_functions) and all(map(operator.is_, functions, other_functions))
