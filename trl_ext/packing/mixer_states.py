"""The states from which mixers continue, with their gradients, and a probe that shows which mixers can.

transformers' cache overwrites its states, so a backward through two calls fails. These states are replaced.
"""

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from .attention import index_select_fp32_grad

# transformers 5.24 has one name for what were two
CACHE_ARGUMENTS = ("cache", "cache_params", "past_key_values")
# The rows of the probe, and where it divides them
_ROWS = 2
_COLUMNS = 24
_DIVIDED_AT = 13
# Of the norm. A mixer that ignores its state differs by about all of it
_TOLERANCE = 1e-4
_COARSE_TOLERANCE = 2e-2


class MixerStates:
    """The states of one mixer for R rows, under the names of transformers' `Cache`. A mixer may have several of a kind.

    Args:
        conv, recurrent (`dict[int, Tensor]`, *optional*): the states from which the mixer continues, R in each tensor.
    """

    def __init__(self, conv: dict[int, Tensor] | None = None, recurrent: dict[int, Tensor] | None = None) -> None:
        self.conv = dict(conv or {})
        self.recurrent = dict(recurrent or {})

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.conv.get(state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.recurrent.get(state_idx)

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Return the inputs of the convolution `(R, channels, columns)`, after those of the state; keep the last."""
        state = self.conv.get(state_idx)
        inputs = conv_states if state is None else torch.cat([state, conv_states], dim=-1)
        kept = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
        missing = max(0, kept - inputs.shape[-1])
        self.conv[state_idx] = F.pad(inputs, (missing, 0))[..., -kept:]
        return inputs

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        self.recurrent[state_idx] = recurrent_states
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:
        return True  # otherwise a single token updates the state in place

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return bool(self.conv or self.recurrent)


class PrefixStates:
    """The last states of all prefixes so far, in order, after zeros for rows that continue from none."""

    def __init__(self) -> None:
        self._conv: dict[int, Tensor] = {}
        self._recurrent: dict[int, Tensor] = {}

    def add(self, states: MixerStates) -> None:
        for all_states, new_states in ((self._conv, states.conv), (self._recurrent, states.recurrent)):
            for number, state in new_states.items():
                before = all_states.get(number, torch.zeros_like(state[:1]))
                all_states[number] = torch.cat([before, state])

    def select(self, prefix_R: Tensor | None) -> MixerStates:
        """Return the states after the prefixes of these numbers."""
        if prefix_R is None:
            return MixerStates()
        conv, recurrent = (
            {number: index_select_fp32_grad(state, prefix_R) for number, state in states.items()}
            for states in (self._conv, self._recurrent)
        )
        return MixerStates(conv, recurrent)


def cache_argument(mixer: nn.Module) -> str | None:
    """Return the argument of the mixer's forward that takes a cache."""
    names = inspect.signature(type(mixer).forward).parameters
    return next((name for name in CACHE_ARGUMENTS if name in names), None)


def continues_from_states(run: Any, argument: str | None, hidden: Tensor) -> bool:
    """Whether a mixer gives rows in two parts, the second from the states of the first, the outputs of whole rows.

    Mamba 1 does not: it reads its state only for a single token.

    Args:
        run: the mixer's forward, from hidden states `(R, C, H)` and a cache to outputs.
        argument (`str`, *optional*): the name under which it takes the cache.
        hidden (`Tensor` of shape `(..., H)`): hidden states, whose dtype and device the probe has.
    """
    if argument is None:
        return False
    generator = torch.Generator(hidden.device).manual_seed(0)
    shape = (_ROWS, _COLUMNS, hidden.shape[-1])
    hidden_RCH = torch.randn(shape, dtype=hidden.dtype, device=hidden.device, generator=generator)
    states = MixerStates()
    try:
        # Gradient checkpointing counts what the layer saves for its backward
        with torch.enable_grad(), saved_tensors_hooks(_unchanged, _unchanged):
            hidden_RCH.requires_grad_()
            whole_RCH = output_of(run(hidden_RCH))
            first_RCH = output_of(run(hidden_RCH[:, :_DIVIDED_AT], **{argument: states}))
            second_states = MixerStates(states.conv, states.recurrent)
            second_RCH = output_of(run(hidden_RCH[:, _DIVIDED_AT:], **{argument: second_states}))
            # A kernel may return a state without a gradient
            weights_RCH = torch.randn(second_RCH.shape, dtype=hidden.dtype, device=hidden.device, generator=generator)
            ends = (whole_RCH[:, _DIVIDED_AT:], second_RCH)
            gradients = [torch.autograd.grad((x * weights_RCH).sum(), hidden_RCH)[0] for x in ends]
    except (AttributeError, TypeError, RuntimeError, ValueError, IndexError):
        return False  # it needs another cache than these states
    coarse = hidden.dtype in (torch.bfloat16, torch.float16) or torch.is_autocast_enabled(hidden.device.type)
    tolerance = _COARSE_TOLERANCE if coarse else _TOLERANCE
    outputs = (whole_RCH, torch.cat([first_RCH, second_RCH], dim=1))
    return all(_distance(*pair) < tolerance for pair in (outputs, gradients))


def _unchanged(saved: Tensor) -> Tensor:
    return saved


def _distance(one: Tensor, other: Tensor) -> float:
    """Return the norm of the difference relative to that of `one`."""
    norm = one.detach().float().norm().clamp(min=1e-30)
    return float((other.detach().float() - one.detach().float()).norm() / norm)


def output_of(result: Any) -> Tensor:
    """Return the hidden states among what a mixer returns."""
    return result[0] if isinstance(result, tuple) else result  # type: ignore[no-any-return]
