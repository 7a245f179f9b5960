"""Ways to change a reference model in memory: that its identity has, that are not stored, and one that it misses."""

import operator
from types import MethodType

import torch
from transformers.models.llama.modeling_llama import LlamaMLP


class HalvedMLP(LlamaMLP):
    def forward(self, x):
        return 0.5 * super().forward(x)


def plain(model):
    pass


def buffer(model):
    model.model.rotary_emb.inv_freq.mul_(3.0)


def norm(model):
    for layer in model.model.layers:
        layer.input_layernorm.variance_epsilon = 0.5


def scaling(model):
    for layer in model.model.layers:
        layer.self_attn.scaling *= 3.0


def forward(model):
    for layer in model.model.layers:
        layer.mlp.forward = MethodType(lambda self, x: 0.5 * type(self).forward(self, x), layer.mlp)


def hook(model):
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: 0.5 * output)


def layers(model):
    for layer in model.model.layers:
        layer.mlp.__class__ = HalvedMLP


def activation(model):
    model.model.layers[0].mlp.act_fn = torch.nn.Tanh()


LISTED = {change.__name__: change for change in (buffer, norm, scaling, activation)}
# By functions that may change from call to call: the reference runs on every micro-batch
BY_FUNCTIONS = {change.__name__: change for change in (forward, hook)}


def unnoticed(factor):
    """Activate by an object of a library, whose contents are not in the identity."""

    def change(model):
        mlp = model.model.layers[0].mlp
        del mlp.act_fn
        mlp.act_fn = operator.methodcaller("mul", factor)

    return change
