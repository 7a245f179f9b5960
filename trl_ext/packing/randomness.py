"""What makes two passes of the same weights over the same tokens differ: dropout, noise and functions that draw."""

import random
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import suppress
from dataclasses import dataclass
from dis import get_instructions
from functools import cache, partial
from itertools import pairwise
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import nn

# Packages whose layers draw only at a rate that an attribute or the model's config holds, and whose hooks do not draw
_KNOWN = {
    *("torch", "transformers", "peft", "accelerate", "deepspeed", "trl", "trl_ext", "bitsandbytes", "torchao"),
    *("flash_attn", "kernels", "liger_kernel", "builtins", "functools"),
}
_RATES = ("drop", "jitter")
# Rates of draws that are one for a row or a batch, not one for each token or each forward
_RATES_OF_ROWS = ("drop_path", "path_drop", "stochastic_depth")
_DROPOUT = {
    *("dropout", "dropout_", "alpha_dropout", "feature_dropout", "feature_alpha_dropout", "native_dropout"),
    *("dropout1d", "dropout2d", "dropout3d"),
}
_DRAWS = {
    *("rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "randperm", "normal", "normal_"),
    *("uniform", "uniform_", "bernoulli", "bernoulli_", "exponential_", "log_normal_", "cauchy_", "geometric_"),
    *("random_", "multinomial", "poisson", "binomial", "gumbel_softmax", "rrelu", "rrelu_", "sample", "rsample"),
    *("random", "randrange", "gauss", "choice", "choices", "shuffle", "standard_normal", "default_rng"),
    *("RandomState", "Generator", "urandom", "token_bytes", "integers"),
}
_DRAWS_AND_DROPOUT = _DRAWS | _DROPOUT
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_STORES_OF_STATE = ("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF")
_DEEPEST = 8  # calls that are followed from a forward or a hook


@dataclass(frozen=True)
class Randomness:
    """Why two passes differ.

    Attributes:
        reason (`str`): a clause for the user.
        of_tokens (`bool`):
            Whether a row's draws have the same distribution in every batch, so that it may be packed, moved or run
            without the others. Otherwise batches stay as they are in TRL.
        in_training_only (`bool`): whether evaluation mode turns it off. It is not known for functions of users.
    """

    reason: str
    of_tokens: bool
    in_training_only: bool = True


def randomness_of(model: nn.Module, neftune_noise_alpha: float | None = None) -> Randomness | None:
    """Return what `model` draws at random in training; `None` if two passes are equal.

    A source whose draws can depend on the batch comes first.

    Args:
        neftune_noise_alpha (`float`, *optional*): of the trainer, which attaches the noise when training begins.
    """
    if neftune_noise_alpha is not None:
        return NEFTUNE
    found = None
    ids_of_modules = cache(lambda: {id(module) for module in model.modules()})
    for name, module in model.named_modules():
        source = _drawn_by(name, module, ids_of_modules)
        if source is not None and not source.of_tokens:
            return source
        found = found or source
    return found


def randomness_of_module(name: str, module: nn.Module) -> Randomness | None:
    """Return what the module called `name` draws, without its children."""
    return _drawn_by(name, module, lambda: {id(child) for child in module.modules()})


DROPOUT = Randomness("dropout is active", of_tokens=True)
NEFTUNE = Randomness("`neftune_noise_alpha` adds noise to the embeddings", of_tokens=False)


def _drawn_by(name: str, module: nn.Module, ids_of_modules: Callable[[], set[int]]) -> Randomness | None:
    for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
        if getattr(hook, "__name__", "") == "neftune_post_forward_hook":
            return NEFTUNE
        if _function_draws(hook, ids_of_modules):
            return _of_user(f"a forward hook of {_described(name, module)} changes from call to call")
    if "forward" in vars(module) and _function_draws(vars(module)["forward"], ids_of_modules):
        return _of_user(f"the replaced `forward` of {_described(name, module)} changes from call to call")
    return _drawn_by_layer(name, module)


def _drawn_by_layer(name: str, module: nn.Module) -> Randomness | None:
    """Return what `module` draws, without its hooks and children."""
    part: Any = type(module)
    kind = _kind_of(part)
    if kind.may_have_rates or _names_rate(" ".join(vars(module))):
        if _has_rate_of_rows(module):
            return Randomness(f"{_described(name, module)} drops the paths of whole rows", of_tokens=False)
        if _has_rate(module):
            reason = f"{_described(name, module)} draws random numbers"
            return DROPOUT if kind.draws_for_tokens else Randomness(reason, of_tokens=False)
    if kind.drawn and _class_draws(module, kind.drawn):
        return _of_user(f"{_described(name, module)} draws random numbers")
    return None


def _described(name: str, module: nn.Module) -> str:
    kind = type(module).__name__
    return f"`{name}` ({kind})" if name else f"`{kind}`"


def _of_user(reason: str) -> Randomness:
    return Randomness(reason, of_tokens=False, in_training_only=False)


def _function_draws(function: Any, ids_of_modules: Callable[[], set[int]]) -> bool:
    """Whether a hook or a replaced forward draws. The modules of its model are looked at themselves."""
    is_engines = isinstance(function, FunctionType) and _is_known(function.__globals__.get("__name__"))
    if is_engines and not function.__closure__ and not hasattr(function, "__wrapped__"):
        return False
    drawn = _drawn_by_call(function, set(ids_of_modules()))
    return bool(drawn) or _counts_calls(function)


def _counts_calls(function: Any) -> bool:
    """Whether a user's function changes an output and keeps a state, so that its next call can change it otherwise."""
    if not isinstance(function, MethodType | FunctionType):
        function = vars(type(function)).get("__call__")
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    if code is None or _is_known(getattr(function, "__globals__", {}).get("__name__")):
        return False
    instructions = list(get_instructions(code))
    returns = [read for read, then in pairwise(instructions) if then.opname == "RETURN_VALUE"]
    if all(x.opname == "LOAD_CONST" and x.argval is None for x in returns):
        return False
    # An entry of a dict has a constant string as its key
    entries = any(
        read.opname == "LOAD_CONST" and isinstance(read.argval, str) and then.opname in ("COPY", "STORE_SUBSCR")
        for read, then in pairwise(instructions)
    )
    return entries or any(x.opname in _STORES_OF_STATE or x.argval == "next" for x in instructions)


@dataclass(frozen=True)
class _Kind:
    """What the class of a module says about its draws."""

    may_have_rates: bool  # apart from those that an attribute's name says
    draws_for_tokens: bool
    drawn: frozenset[str]  # names of draws in the code of its forward


@cache
def _kind_of(part: type) -> _Kind:
    of_channels = nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.FeatureAlphaDropout
    has_own_rates = issubclass(part, nn.modules.dropout._DropoutNd | nn.RReLU) or "Dropout" in part.__name__
    return _Kind(
        may_have_rates=has_own_rates or _samples_vectors(part) or bool(_rate_names(part)),
        draws_for_tokens=_is_known(part.__module__) and not issubclass(part, of_channels),
        drawn=_drawn_in_class(part),
    )


def _samples_vectors(part: type) -> bool:
    return any(base.__name__ == "PveraLayer" for base in part.__mro__)  # for each token


def _names_rate(name: str) -> bool:
    return any(rate in name for rate in _RATES)


def _has_rate(module: nn.Module) -> bool:
    """Whether `module` draws at a rate that it, or the config of its model, keeps in an attribute.

    TRL's `disable_dropout` does not change the rates that transformers' attention (`attention_dropout`, `attn_pdrop`)
    and routers of experts (`jitter_noise`) keep, nor PEFT's rates per adapter (`rank_dropout`).
    """
    if _samples_vectors(type(module)):
        return True
    if isinstance(module, nn.modules.dropout._DropoutNd) or "Dropout" in type(module).__name__:
        return bool(getattr(module, "p", 0.0) > 0)
    if isinstance(module, nn.RReLU):
        return bool(module.lower != module.upper)
    return any(_is_rate(value) for name, value in _rates(module))


def _has_rate_of_rows(module: nn.Module) -> bool:
    return any(_is_rate(value) for name, value in _rates(module) if any(part in name for part in _RATES_OF_ROWS))


def _rates(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield name and value of the rates of `module`, also those that its forward reads from the config."""
    own = vars(module)
    for name, value in own.items():
        if _names_rate(name):
            yield from ((name, x) for x in (value.values() if isinstance(value, dict) else (value,)))
    config = own.get("config")
    if config is not None:
        part: Any = type(module)
        yield from ((name, getattr(config, name, None)) for name in _rate_names(part))


def _is_rate(value: Any) -> bool:
    return isinstance(value, float) and value > 0


@cache
def _rate_names(part: type) -> tuple[str, ...]:
    """Return the names of rates that the class's forward reads from a `config`."""
    found = set()
    for function in _functions_of_forward(part):
        for read, then in pairwise(get_instructions(function.__code__)):
            name = then.argval
            if read.argval == "config" and isinstance(name, str) and _names_rate(name):
                found.add(name)
    return tuple(sorted(found))


def _class_draws(module: nn.Module, drawn: frozenset[str]) -> bool:
    """Whether the class's forward, which has the names `drawn`, draws in a way that no rate says."""
    has_rates = any(True for _ in _rates(module))
    if drawn - _DROPOUT:
        return not (has_rates and _is_known(type(module).__module__))
    # `self.dropout(...)` calls a child, which is looked at itself
    return not has_rates and any(not hasattr(module, name) for name in drawn)


def _drawn_in_class(part: type) -> frozenset[str]:
    """Return the names of draws in the class's forward and, for a user's class, in what it calls."""
    if part.__module__.split(".")[0] in ("torch", "peft"):  # their layers that draw have rates
        return frozenset()
    drawn: set[str] = set()
    for function in _functions_of_forward(part):
        if _is_known(function.__module__):
            drawn |= _names(function.__code__) & _DRAWS
        else:
            drawn |= _drawn_by_call(function, set())
    return frozenset(drawn)


@cache
def _functions_of_forward(part: type) -> tuple[FunctionType, ...]:
    """Return the class's forward and the methods that it calls, directly or not."""
    found: dict[str, FunctionType] = {}
    names = ["forward", "__call__"]
    while names:
        name = names.pop()
        function = _plain_function(getattr(part, name, None))
        if name in found or function is None or function.__module__.startswith("torch.nn.modules.module"):
            continue
        found[name] = function
        names += [x for x in _names(function.__code__) if not x.startswith("__")]
    return tuple(found.values())


def _plain_function(value: Any) -> FunctionType | None:
    """Return the function under decorators that keep it in `__wrapped__`."""
    while hasattr(value, "__wrapped__"):
        value = value.__wrapped__
    value = getattr(value, "__func__", value)
    return value if isinstance(value, FunctionType) else None


def _names(code: CodeType) -> set[str]:
    inner = (x for x in code.co_consts if isinstance(x, CodeType))
    return {*code.co_names, *(name for x in inner for name in _names(x))}


def _is_known(module: str | None) -> bool:
    return (module or "").split(".")[0] in _KNOWN


# Functions of users: hooks, replaced forwards, and what the forwards of their classes call


def _drawn_by_call(value: Any, seen: set[int], names: Set[str] = frozenset(), depth: int = 0) -> set[str]:
    """Return the names of draws in what a call of `value` can run.

    Args:
        seen (`set[int]`): ids of objects that are not looked at again.
        names (`set[str]`): the names in the code that reads `value`.
    """
    if id(value) in seen or depth > _DEEPEST:
        return set()
    if isinstance(value, nn.Module):
        return {"random"} if any(_drawn_by_layer("", x) for x in value.modules() if id(x) not in seen) else set()
    seen.add(id(value))
    reached: Iterable[Any] = ()
    drawn: set[str] = set()
    if isinstance(value, _GENERATORS):
        return {"Generator"}
    if isinstance(value, partial):
        reached = (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, list | tuple | set):
        reached = value
    elif isinstance(value, dict):
        reached = value.values()
    elif isinstance(value, MethodType | FunctionType):
        function: Any = getattr(value, "__func__", value)
        names = set()
        if not _is_known(function.__globals__.get("__name__")):
            names = _names(function.__code__)
        drawn = (names | {function.__name__}) & _DRAWS_AND_DROPOUT
        owner = getattr(value, "__self__", None)
        reached = (*_reached(function), *(() if owner is None else _members(owner, names)))
    elif getattr(value, "__name__", "") in _DRAWS_AND_DROPOUT:
        return {value.__name__}
    elif not _is_known(type(value).__module__) and not isinstance(value, type):
        reached = _members(value, names | {"__call__"})
    for x in reached:
        drawn |= _drawn_by_call(x, seen, names, depth + 1)
    return drawn


def _members(owner: Any, names: Set[str]) -> Iterator[Any]:
    """Yield what code with these `names` can read of `owner`: its attributes, and methods of users' classes."""
    for name in names:
        method = getattr(type(owner), name, None)
        held = getattr(owner, "__dict__", {})
        if name in held:
            yield held[name]
        elif name in held.get("_modules", ()):
            yield held["_modules"][name]
        elif isinstance(method, FunctionType) and not _is_known(method.__module__):
            yield MethodType(method, owner)


def _reached(function: FunctionType) -> Iterator[Any]:
    """Yield what a function holds, and the globals that it names if it belongs to no known package."""
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # empty until the name is bound
            yield cell.cell_contents
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    if hasattr(function, "__wrapped__"):
        yield function.__wrapped__
    space = function.__globals__
    if not _is_known(space.get("__name__")):
        yield from (space[x] for x in sorted(_names(function.__code__)) if x in space)
