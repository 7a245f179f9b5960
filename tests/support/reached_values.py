"""Models with foreign code that reads a factor from somewhere, for tests of a reference's identity."""

import functools
import sys
import types
from dataclasses import dataclass
from types import MethodType, SimpleNamespace

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrize

SETTINGS = {"factor": 0.5}
FACTOR = 0.5


class Holder:
    factor = 0.5


class Slots:
    __slots__ = ("factor",)

    def __init__(self, factor):
        self.factor = factor


class Scale:
    """Scales an output by a factor in an attribute."""

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, module, args, output):
        return self.factor * output

    def hook(self, module, args, output):
        return self.factor * output


@dataclass
class Parts:
    scales: list


class Scaled(nn.Module):
    def __init__(self, inner, factor):
        super().__init__()
        self.inner = inner
        self._table = {"factor": factor}

    def forward(self, x):
        return self._helper(self.inner(x))

    def _helper(self, x):
        return self._table["factor"] * x


class Times(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return self.factor * x


def mlp(model):
    return model.model.layers[0].mlp


def hooked(hook):
    def change(model):
        mlp(model).register_forward_hook(hook)

    return change


def closure(factor):
    return hooked(lambda module, args, output: factor * output)


def closure_of_tensor(factor):
    return closure(torch.tensor([0.1, factor]).mean())


def closure_of_array(factor):
    array = np.array([factor])
    return hooked(lambda module, args, output: float(array[0]) * output)


def closure_in_containers(factor):
    held = {"a": [(1, {"b": factor})]}
    return hooked(lambda module, args, output: held["a"][0][1]["b"] * output)


def closure_of_a_cell_set_later(factor):
    def change(model):
        mlp(model).register_forward_hook(lambda module, args, output: late * output)
        late = factor

    return change


def default(factor):
    return hooked(lambda module, args, output, factor=factor: factor * output)


def keyword_default(factor):
    def scale(module, args, output, *, factors=(factor,)):
        return factors[0] * output

    return hooked(scale)


def function_attribute(factor):
    def scale(module, args, output):
        return scale.factor * output

    scale.factor = torch.tensor(factor)
    return hooked(scale)


def callable_object(factor):
    return hooked(Scale(factor))


def callable_object_with_a_tensor(factor):
    return hooked(Scale(torch.tensor(factor)))


def bound_method(factor):
    return hooked(Scale(factor).hook)


def object_with_slots(factor):
    held = Slots(factor)
    return hooked(lambda module, args, output: held.factor * output)


def dataclass_of_objects(factor):
    held = Parts([Scale(factor)])
    return hooked(lambda module, args, output: held.scales[0].factor * output)


def namespace(factor):
    held = SimpleNamespace(inner=SimpleNamespace(factor=factor))
    return hooked(lambda module, args, output: held.inner.factor * output)


def scale_by(factors, module, args, output):
    return factors["factor"] * output


def partial_function(factor):
    return hooked(functools.partial(scale_by, {"factor": factor}))


def nested_function(factor):
    def outer(module, args, output):
        def inner(x):
            return factor * x

        return inner(output)

    return hooked(outer)


def decorated(factor):
    @torch.no_grad()
    def scale(module, args, output):
        return factor * output

    return hooked(scale)


def cached(factor):
    @functools.cache
    def strength():
        return factor

    return hooked(lambda module, args, output: strength() * output)


def module_global(factor):
    def change(model):
        globals()["FACTOR"] = factor
        mlp(model).register_forward_hook(lambda module, args, output: FACTOR * output)

    return change


def global_dict_through_a_function(factor):
    def change(model):
        SETTINGS["factor"] = factor
        mlp(model).register_forward_hook(lambda module, args, output: _strength() * output)

    return change


def _strength():
    return SETTINGS["factor"]


def class_attribute(factor):
    def change(model):
        Holder.factor = factor
        mlp(model).register_forward_hook(lambda module, args, output: Holder.factor * output)

    return change


def class_attribute_of_a_tensor(factor):
    def change(model):
        Holder.factor = torch.tensor(factor)
        mlp(model).register_forward_hook(lambda module, args, output: Holder.factor * output)

    return change


def users_module(factor):
    def change(model):
        made = sys.modules.setdefault("reached_settings", types.ModuleType("reached_settings"))
        made.inner = SimpleNamespace(factor=factor)
        made.unread = object()

        def scale(module, args, output):
            import reached_settings

            return reached_settings.inner.factor * output

        mlp(model).register_forward_hook(scale)

    return change


def module_attribute(factor):
    def change(model):
        mlp(model).box = SimpleNamespace(factor=torch.tensor(factor))
        mlp(model).register_forward_hook(lambda module, args, output: module.box.factor * output)

    return change


def private_module_attribute(factor):
    def change(model):
        mlp(model)._factor = factor
        mlp(model).register_forward_hook(lambda module, args, output: getattr(module, "_factor") * output)  # noqa: B009

    return change


def pre_hook(factor):
    def change(model):
        mlp(model).register_forward_pre_hook(lambda module, args: (factor * args[0],))

    return change


def patched_on_the_instance(factor):
    def change(model):
        mlp(model).forward = MethodType(lambda self, x: factor * type(self).forward(self, x), mlp(model))

    return change


def patched_with_a_partial_of_torch(factor):
    def change(model):
        model.model.norm.forward = functools.partial(torch.mul, factor)

    return change


def own_module(factor):
    def change(model):
        layer = model.model.layers[0]
        layer.mlp = Scaled(layer.mlp, factor)

    return change


def own_module_in_a_closure(factor):
    other = Times(factor)
    return hooked(lambda module, args, output: other(output))


def weight_of_another_module(factor):
    other = nn.Linear(1, 1, bias=False)
    nn.init.constant_(other.weight, factor)
    return hooked(lambda module, args, output: other.weight * output)


def parametrization(factor):
    def change(model):
        parametrize.register_parametrization(mlp(model).down_proj, "weight", Times(factor))

    return change


def plain_tensor(factor):
    def change(model):
        model.model.layers[0].self_attn.scaling = torch.tensor(factor)

    return change


def string_attribute(factor):
    def change(model):
        model.model.layers[0].attention_type = str(factor)

    return change


def config_of_a_module(factor):
    def change(model):
        attention = model.model.layers[0].self_attn
        attention.config = type(attention.config)(**attention.config.to_dict())
        attention.config._attn_implementation = {0.5: "sdpa", 0.6: "eager"}[factor]

    return change


REACHED = {
    x.__name__: x
    for x in (
        *(closure, closure_of_tensor, closure_of_array, closure_in_containers, closure_of_a_cell_set_later, default),
        *(keyword_default, function_attribute, callable_object, callable_object_with_a_tensor, bound_method),
        *(object_with_slots, dataclass_of_objects, namespace, partial_function, nested_function, decorated, cached),
        *(module_global, global_dict_through_a_function, class_attribute, class_attribute_of_a_tensor, users_module),
        *(module_attribute, private_module_attribute, pre_hook, patched_on_the_instance),
        *(patched_with_a_partial_of_torch, own_module, own_module_in_a_closure, weight_of_another_module),
        *(parametrization, plain_tensor, string_attribute, config_of_a_module),
    )
}
