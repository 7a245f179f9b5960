"""The recurrent and convolutional mixers of hybrid models. Only they see rows; all else runs on the packed row.

The layout reaches a mixer as a keyword argument of the forward that it belongs to. Gradient checkpointing passes it
again when it recomputes a layer, and several forwards may be alive at once. A layer that does not pass its keyword
arguments to its mixer gets a subclass, whose forward lends the layout to the mixer. It runs inside the checkpoint. A
backbone that does not pass its keyword arguments to its layers lends it to them: they take it when they are called,
outside of the checkpoint.
"""

import inspect
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from .attention import LAYOUT_ARGUMENT, LayoutNotReadError, select_fp32_grad
from .layout import Layout
from .mixer_calls import MixerCalls, mixer_calls
from .mixer_states import CACHE_ARGUMENTS, PrefixStates, cache_argument, continues_from_states, output_of
from .support import LENDS_FOR, mixers_of, text_backbone_of

_OWN_FORWARD = "_trl_ext_own_forward"
_LENT_LAYOUT = "_trl_ext_lent_layout"
_LAYERS = "_trl_ext_layers_with_mixers"
_CONTINUES = "_trl_ext_continues_from_states"
_NOT_PASSED = "the model's backbone does not pass its keyword arguments to its layers"
# Arguments that describe the columns of the packed row, or hold the cache of a generation
_NOT_OF_ROWS = {"attention_mask", "cache_position", *CACHE_ARGUMENTS}


def accept_layouts_in_mixers(model: Any) -> None:
    """Make the mixers of `model` run on rows where their forward gets a layout."""
    mixers = mixers_of(model)
    for mixer in mixers:
        if _OWN_FORWARD not in vars(mixer):  # as in a second trainer of the same model
            _run_on_rows(mixer)
    layers = [module for module in model.modules() if any(child in mixers for child in module.children())]
    classes = {type(layer): _lending_class(type(layer)) for layer in layers if not hasattr(layer, LENDS_FOR)}
    for module in model.modules():  # also layers of these classes without a mixer, so that FSDP finds one class
        layer_class = type(module)
        if layer_class not in classes:
            continue
        module.__class__ = classes[layer_class]
        # A hook of accelerate calls the forward that it replaced
        if getattr(vars(module).get("_old_forward"), "__func__", None) is layer_class.forward:
            module._old_forward = types.MethodType(classes[layer_class].forward, module)
    backbone = text_backbone_of(model)
    if layers and _LAYERS not in vars(backbone):
        vars(backbone)[_LAYERS] = layers  # in the module, so that a deep copy has its own
        backbone.register_forward_pre_hook(_lend_to_layers, with_kwargs=True)
        backbone.register_forward_hook(_take_back, always_call=True)


def _lend_to_layers(backbone: Any, args: Any, kwargs: dict[str, Any]) -> None:
    # Such a wrapper calls the layer again in the backward, when nothing is lent
    if any(isinstance(module, CheckpointWrapper) for module in backbone.modules()):
        return
    for layer in vars(backbone)[_LAYERS]:
        vars(layer)[_LENT_LAYOUT] = kwargs.get(LAYOUT_ARGUMENT)


def _take_back(backbone: Any, args: Any, outputs: Any) -> None:
    for layer in vars(backbone)[_LAYERS]:
        vars(layer).pop(_LENT_LAYOUT, None)


def _run_on_rows(mixer: Any) -> None:
    """Replace the forward of `mixer`."""
    # In the mixer, so that a deep copy has its own. None for the class's forward
    vars(mixer)[_OWN_FORWARD] = vars(mixer).get("forward")

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        layout = kwargs.pop(LAYOUT_ARGUMENT, None)
        layout = vars(self).get(_LENT_LAYOUT) if layout is None else layout
        run = vars(self)[_OWN_FORWARD] or partial(type(self).forward, self)
        if layout is None:
            mask = kwargs.get("attention_mask")
            if mask is not None and mask.shape == (1, 1, 1, 1):  # that of a packed row
                raise LayoutNotReadError(_NOT_PASSED)
            return run(*args, **kwargs)
        return _run_mixer(self, run, layout, args, kwargs)

    mixer.forward = types.MethodType(forward, mixer)


def _lending_class(layer_class: Any) -> Any:
    """Return a subclass, of the same name, whose forward lends the layout to the mixers of its layer."""
    parameters = inspect.signature(layer_class.forward).parameters.values()
    takes_arguments = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        layout = kwargs.get(LAYOUT_ARGUMENT)
        if layout is None:
            return layer_class.forward(self, *args, **kwargs)
        children = list(self.children())
        for child in children:
            vars(child)[_LENT_LAYOUT] = layout
        try:
            return layer_class.forward(self, *args, **kwargs)
        finally:
            for child in children:
                vars(child).pop(_LENT_LAYOUT, None)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        layout = vars(self).get(_LENT_LAYOUT)
        if layout is not None and takes_arguments:
            kwargs.setdefault(LAYOUT_ARGUMENT, layout)
        return layer_class.__call__(self, *args, **kwargs)

    names = {
        "forward": forward,
        "__call__": call,
        "__module__": layer_class.__module__,
        "__doc__": layer_class.__doc__,
        LENDS_FOR: layer_class,
    }
    return type(layer_class.__name__, (layer_class,), names)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _run_mixer(
    mixer: Any, run: Callable[..., Any], layout: Layout, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return what the forward of `mixer` returns for the packed row, computed on its rows."""
    layout.reads[0] += 1
    arguments = _arguments_by_name(mixer, args, kwargs)
    hidden_argument = next(iter(arguments))
    hidden_1TH = arguments.pop(hidden_argument)
    cache = cache_argument(mixer)
    calls = _calls(mixer, run, layout, cache, hidden_1TH)
    token_arguments = {
        name: x
        for name, x in arguments.items()
        if isinstance(x, Tensor) and x.shape[:2] == hidden_1TH.shape[:2] and name not in _NOT_OF_ROWS
    }
    arguments |= dict.fromkeys(_NOT_OF_ROWS & arguments.keys())
    prefix_states = PrefixStates()
    outputs = []
    for call in calls.calls:
        (hidden_NH,) = select_fp32_grad(call.tokens_RC.flatten(), hidden_1TH.squeeze(0))
        arguments[hidden_argument] = hidden_NH.unflatten(0, call.tokens_RC.shape)
        arguments |= {name: x.squeeze(0)[call.tokens_RC] for name, x in token_arguments.items()}
        if cache is not None:
            uses_states = call.is_prefix or call.prefix_R is not None
            arguments[cache] = prefix_states.select(call.prefix_R) if uses_states else None
        result = run(**arguments)
        outputs.append(output_of(result).flatten(0, 1))
        if call.is_prefix:
            prefix_states.add(arguments[str(cache)])
    packed = torch.cat(outputs).index_select(0, calls.place_T).unsqueeze(0)
    return (packed, *result[1:]) if isinstance(result, tuple) else packed


def _arguments_by_name(mixer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the mixer's forward by name, the hidden states first."""
    bound = inspect.signature(type(mixer).forward).bind(mixer, *args, **kwargs)
    _, *arguments = bound.arguments.items()
    by_name: dict[str, Any] = {}
    for name, value in arguments:
        is_rest = bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
        by_name |= value if is_rest else {name: value}
    return by_name


def _calls(mixer: Any, run: Callable[..., Any], layout: Layout, cache: str | None, hidden_1TH: Tensor) -> MixerCalls:
    in_one_call = _is_gathered_by_part(mixer)
    continues = False
    if layout.shares_tokens and not in_one_call:
        if _CONTINUES not in vars(mixer):
            vars(mixer)[_CONTINUES] = continues_from_states(run, cache, hidden_1TH)
        continues = vars(mixer)[_CONTINUES]
    settings = ("mixers", continues, in_one_call, hidden_1TH.device)
    if settings not in layout.calls:
        layout.calls[settings] = mixer_calls(layout, hidden_1TH.device, continues=continues, in_one_call=in_one_call)
    return layout.calls[settings]  # type: ignore[no-any-return]


def _is_gathered_by_part(mixer: Any) -> bool:
    """Whether FSDP or ZeRO-3 gathers the weights of modules inside the mixer, in each call.

    All ranks must then call the mixer equally often, though they differ in their rows.
    """
    sharded = FSDPModule | FullyShardedDataParallel
    return any(isinstance(module, sharded) for module in mixer.modules() if module is not mixer) or any(
        hasattr(param, "ds_shape") for param in mixer.parameters()
    )
