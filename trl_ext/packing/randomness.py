"""What makes two passes of the same weights over the same tokens differ: dropout, noise and functions that draw."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from dis import get_instructions
from functools import cache
from itertools import pairwise
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules import module as torch_module

from ..functions import closure_of, nested_codes, plain_function
from .hooks import (
    describe_function,
    forward_hooks,
    functions_of_users,
    gradient_hooks,
    is_known,
    without_hooks_of_users,
)
from .observers import only_observes
from .support import own_class_of

# Names of draws that are also modules of `torch.distributions`, which a function may use to compute quantiles
_DISTRIBUTIONS = {"normal", "uniform", "bernoulli", "multinomial", "poisson", "binomial"}
_RATES = ("drop", "jitter")
# Rates of draws that are one for a row or a batch, not one for each token or each forward
_RATES_OF_ROWS = ("drop_path", "path_drop", "stochastic_depth")
_DROPOUT = {
    "dropout",
    "dropout_",
    "alpha_dropout",
    "feature_dropout",
    "feature_alpha_dropout",
    "native_dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
}
_DRAWS = {
    "rand",
    "randn",
    "randint",
    "rand_like",
    "randn_like",
    "randint_like",
    "randperm",
    "normal",
    "normal_",
    "uniform",
    "uniform_",
    "bernoulli",
    "bernoulli_",
    "exponential_",
    "log_normal_",
    "cauchy_",
    "geometric_",
    "random_",
    "multinomial",
    "poisson",
    "binomial",
    "gumbel_softmax",
    "rrelu",
    "rrelu_",
    "sample",
    "rsample",
    "random",
    "randrange",
    "gauss",
    "choice",
    "choices",
    "shuffle",
    "standard_normal",
    "default_rng",
    "RandomState",
    "Generator",
    "urandom",
    "token_bytes",
    "integers",
}
_MAY_CHANGE = "may change from call to call"
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


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

    @property
    def weight(self) -> tuple[bool, bool]:
        """A key to sort by: what changes most comes first."""
        return self.of_tokens, self.in_training_only


def strongest(*sources: Randomness | None) -> Randomness | None:
    """Return the first of the `sources` that change most."""
    return min((x for x in sources if x is not None), key=lambda x: x.weight, default=None)


def randomness_of(model: nn.Module, neftune_noise_alpha: float | None = None) -> Randomness | None:
    """Return what `model` draws at random in training; `None` if two passes are equal.

    A source whose draws can depend on the batch comes first.

    Args:
        neftune_noise_alpha (`float`, *optional*): of the trainer, which attaches the noise when training begins.
    """
    if neftune_noise_alpha is not None:
        return NEFTUNE
    sources = []
    for name, module in model.named_modules():
        source = randomness_of_module(name, module)
        if source is not None:
            sources.append(source)
            if source.weight == (False, False):
                break
    return strongest(*sources)


def randomness_without_hooks(model: nn.Module) -> Randomness | None:
    """Return what a check of the model would draw: it runs in evaluation mode and without users' hooks."""
    with without_hooks_of_users(model):
        randomness = randomness_of(model)
    return None if randomness is None or randomness.in_training_only else randomness


def may_keep_outputs(model: nn.Module) -> bool:
    """Whether a forward hook of a user may keep what a module of `model` returns, with its graph, for a loss."""
    hooks = [hook for module in model.modules() for hook in module._forward_hooks.values()]
    hooks += torch_module._global_forward_hooks.values()
    return any(not only_observes(function) for hook in hooks for function in functions_of_users(hook))


DROPOUT = Randomness("dropout is active", of_tokens=True)
NEFTUNE = Randomness("`neftune_noise_alpha` adds noise to the embeddings", of_tokens=False)


def randomness_of_module(name: str, module: nn.Module) -> Randomness | None:
    """Return what the module called `name` draws, without its children."""
    hooks = forward_hooks(module)
    if any(getattr(hook, "__name__", "") == "neftune_post_forward_hook" for hook in hooks):
        return NEFTUNE
    return _randomness_of_users(name, module, hooks) or _randomness_of_layer(name, module)


def _randomness_of_users(name: str, module: nn.Module, hooks: list[Any]) -> Randomness | None:
    """Return why a user's hook or `forward` may change from call to call: all may, but for hooks that only observe.

    A function can read anything: a counter, the clock, noise that was drawn before, whether gradients are recorded.
    """
    part = own_class_of(module)
    class_forwards = _forwards_of(part)
    for hook in hooks:
        for function in functions_of_users(hook, class_forwards):
            if not only_observes(function):
                return _of_user(
                    f"a forward hook of {_describe_module(name, module)}, {describe_function(function)}, {_MAY_CHANGE}"
                )
    forwards = [part.forward]
    if "forward" in vars(module):  # it may call the class's
        forwards.append(vars(module)["forward"])
    for function in (x for forward in forwards for x in functions_of_users(forward, class_forwards)):
        return _of_user(
            f"the replaced `forward` of {_describe_module(name, module)}, {describe_function(function)}, {_MAY_CHANGE}"
        )
    # A gradient that is clipped for each row, for example, depends on the rows of a tensor
    for hook in gradient_hooks(module):
        for function in functions_of_users(hook):
            if not only_observes(function):
                described = f"a backward hook of {_describe_module(name, module)}, {describe_function(function)}"
                return Randomness(f"{described}, may change gradients", of_tokens=False)
    return None


@cache
def _forwards_of(part: type) -> frozenset[FunctionType]:
    """Return what users' classes define as their forward. In a class of a known package, it is a replaced one."""
    user_classes = (x for x in part.__mro__ if not is_known(x.__module__))
    functions: Iterator[Any] = (y for x in user_classes for y in functions_of_users(vars(x).get("forward")))
    return frozenset(plain_function(function) for function in functions)


def _randomness_of_layer(name: str, module: nn.Module) -> Randomness | None:
    """Return what `module` draws, without its hooks and children."""
    kind = _kind_of(own_class_of(module))
    if kind.may_have_rates or _names_rate(" ".join(vars(module))):
        if _has_rate_of_rows(module):
            return Randomness(f"{_describe_module(name, module)} drops the paths of whole rows", of_tokens=False)
        if _has_rate(module):
            reason = f"{_describe_module(name, module)} draws random numbers"
            return DROPOUT if kind.draws_for_tokens else Randomness(reason, of_tokens=False)
    if kind.draws and _class_draws(module, kind.draws):
        return _of_user(f"{_describe_module(name, module)} draws random numbers")
    return None


def _describe_module(name: str, module: nn.Module) -> str:
    kind = type(module).__name__
    return f"`{name}` ({kind})" if name else f"`{kind}`"


def _of_user(reason: str) -> Randomness:
    return Randomness(reason, of_tokens=False, in_training_only=False)


@dataclass(frozen=True)
class _Kind:
    """What the class of a module says about its draws."""

    may_have_rates: bool  # apart from those that an attribute's name says
    draws_for_tokens: bool
    draws: frozenset[str]  # names of draws in the code of its forward


@cache
def _kind_of(part: type) -> _Kind:
    channel_dropouts = nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.FeatureAlphaDropout
    is_dropout = issubclass(part, nn.modules.dropout._DropoutNd | nn.RReLU) or "Dropout" in part.__name__
    return _Kind(
        may_have_rates=is_dropout or _samples_vectors(part) or bool(_rate_names(part)),
        draws_for_tokens=is_known(part.__module__) and not issubclass(part, channel_dropouts),
        draws=_draws_of_class(part),
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
    attributes = vars(module)
    for name, value in attributes.items():
        if _names_rate(name):
            yield from ((name, x) for x in (value.values() if isinstance(value, dict) else (value,)))
    config = attributes.get("config")
    if config is not None:
        yield from ((name, getattr(config, name, None)) for name in _rate_names(own_class_of(module)))


def _is_rate(value: Any) -> bool:
    return isinstance(value, float) and value > 0


@cache
def _rate_names(part: type) -> tuple[str, ...]:
    """Return the names of rates that the class's forward reads from a `config`."""
    names = set()
    for function in functions_of_forward(part):
        for instruction, following in pairwise(get_instructions(function.__code__)):
            name = following.argval
            if instruction.argval == "config" and isinstance(name, str) and _names_rate(name):
                names.add(name)
    return tuple(sorted(names))


def _class_draws(module: nn.Module, draws: frozenset[str]) -> bool:
    """Whether the class's forward, which has the names `draws`, draws in a way that no rate says."""
    has_rates = any(True for _ in _rates(module))
    if draws - _DROPOUT:
        return not (has_rates and is_known(type(module).__module__))
    # `self.dropout(...)` calls a child, which is looked at itself
    return not has_rates and any(not hasattr(module, name) for name in draws)


def _draws_of_class(part: type) -> frozenset[str]:
    """Return the names of draws in the class's forward and, for a user's class, in what it calls."""
    if part.__module__.split(".")[0] in ("torch", "peft"):  # their layers that draw have rates
        return frozenset()
    draws: set[str] = set()
    for function in functions_of_forward(part):
        names = _names(function.__code__)
        if is_known(function.__module__):
            # A distribution draws by `sample` and `rsample`
            draws |= names & (_DRAWS - _DISTRIBUTIONS if "distributions" in names else _DRAWS)
        else:
            values = _read_by(function)
            names |= {str(getattr(value, "__name__", "")) for value in values}
            draws |= names & (_DRAWS | _DROPOUT)
            draws |= {"Generator" for value in values if isinstance(value, _GENERATORS)}
    return frozenset(draws)


@cache
def functions_of_forward(part: type) -> tuple[FunctionType, ...]:
    """Return the class's forward, the methods that it calls, directly or not, and the functions of users."""
    functions: dict[FunctionType, None] = {}
    waiting = [_undecorated(getattr(part, name, None)) for name in ("forward", "__call__")]
    while waiting:
        function = waiting.pop()
        if function is None or function in functions or function.__module__.startswith("torch.nn.modules.module"):
            continue
        functions[function] = None
        names = _names(function.__code__)
        waiting += [_undecorated(getattr(part, name, None)) for name in names if not name.startswith("__")]
        if not is_known(function.__module__):
            named_functions = (x for x in _read_by(function) if isinstance(x, FunctionType))
            waiting += [_undecorated(x) for x in named_functions if not is_known(x.__module__)]
    return tuple(functions)


def _read_by(function: FunctionType) -> list[Any]:
    """Return the globals that a function names, and what its closure holds."""
    return [*(function.__globals__.get(name) for name in _names(function.__code__)), *closure_of(function)]


def _undecorated(value: Any) -> FunctionType | None:
    """Return the function under decorators that keep it in `__wrapped__`."""
    while not isinstance(value, ModuleType) and hasattr(value, "__wrapped__"):
        value = value.__wrapped__
    value = plain_function(value)
    return value if isinstance(value, FunctionType) else None


def _names(code: CodeType) -> set[str]:
    return {name for inner in nested_codes(code) for name in inner.co_names}
