"""Ways to change a reference model in memory: some that its identity notices, and one that it misses."""

from types import MethodType

import torch


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


def activation(model):
    model.model.layers[0].mlp.act_fn = torch.nn.Tanh()


LISTED = {change.__name__: change for change in (buffer, norm, scaling, forward, hook, activation)}


class Box:
    """Hides a tensor from code that lists attributes."""

    def __init__(self, factor):
        self.factor = torch.tensor(factor)


def boxed(factor):
    def change(model):
        mlp = model.model.layers[0].mlp
        mlp.box = Box(factor)
        mlp.register_forward_hook(lambda module, args, output: module.box.factor * output)

    return change
