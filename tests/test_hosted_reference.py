"""A reference model that is kept on the host: stock TRL's training, bit for bit the same log-probs, two layers at most.

On the CPU the "device" is host memory too, and the weights are copied there and dropped all the same, so what is where
can be told by address.
"""

import gc
import weakref

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from test_scoring_forward import batch
from tiny import MODELS
from trl_ext.reference import host_reference
from trl_ext.scoring import ScoringOptions, attach_scoring_forward

DEVICE = torch.device("cpu")
LAYERS = 5


def deep(name: str) -> nn.Module:
    """Model `name` of tiny.MODELS with `LAYERS` layers, and its scoring forward."""
    torch.manual_seed(3)
    config = MODELS[name]()
    config.num_hidden_layers = LAYERS
    if getattr(config, "layer_types", None):
        config.layer_types = (config.layer_types * LAYERS)[:LAYERS]
    model = AutoModelForCausalLM.from_config(config).eval()
    attach_scoring_forward(model, ScoringOptions(outputs=("log_probs", "entropy")))
    return model


def score(model, context=torch.no_grad):
    inputs, labels = batch()
    with context():
        return model(**inputs, labels=labels, fused_lm_head=True)


def places(model):
    """Where each parameter's memory is."""
    return {name: param.untyped_storage().data_ptr() for name, param in model.named_parameters()}


@pytest.mark.parametrize("name", ["tied", "untied", "softcap", "logits_scaling", "head_bias", "experts"])
@pytest.mark.parametrize("precision", ["fp32", "bf16 autocast", "bf16 weights"])
def test_log_probs_are_those_of_the_model_on_the_device_bit_for_bit(name, precision):
    plain, hosted = deep(name), deep(name)
    if precision == "bf16 weights":
        plain, hosted = plain.bfloat16(), hosted.bfloat16()
    host_reference(hosted, DEVICE)
    before = {key: value.clone() for key, value in hosted.state_dict().items()}
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16 autocast"):
        for context in (torch.no_grad, torch.inference_mode, torch.no_grad):
            want, got = score(plain, context), score(hosted, context)
            assert want.log_probs.ne(0).any()
            assert torch.equal(got.log_probs, want.log_probs)
            assert torch.equal(got.entropy, want.entropy)
    assert all(torch.equal(value, before[key]) for key, value in hosted.state_dict().items())


def test_computes_on_copies_and_of_the_layers_holds_two_at_most():
    model = deep("tied")
    hosted = host_reference(model, DEVICE)
    home = places(model)
    of_layer = {name: int(name.split("layers.")[1].split(".")[0]) for name in home if "layers." in name}
    assert set(of_layer.values()) == set(range(LAYERS))
    seen, memory = [], []

    def look(module, *_):
        """Runs before each module computes: its own weights are copies, and so are at most one layer's more."""
        now = places(model)
        copies = {name for name in now if now[name] != home[name]}
        own = {id(param) for param in module.parameters(recurse=False)}
        assert {name for name, param in model.named_parameters() if id(param) in own} <= copies
        assert {name for name in home if name not in of_layer} <= copies
        seen.append({of_layer[name] for name in copies if name in of_layer})
        memory.extend(weakref.ref(x) for x in (place.memory for place in hosted._places))

    for module in model.modules():
        if next(module.parameters(recurse=False), None) is not None:
            module.register_forward_pre_hook(look)
    head = type(model).get_output_embeddings

    def looked_at():
        look(head(model))
        return head(model)

    model.get_output_embeddings = looked_at
    score(model)
    assert seen[-1] == set()  # the head, read after the last layer has gone
    assert set().union(*seen) == set(range(LAYERS))
    assert max(map(len, seen)) == 1
    # Of the layers the device has two places, each for one: no more memory than that, and none after the call
    assert len({id(ref) for ref in memory}) == 2
    assert hosted.layer_bytes >= max(layer_bytes(model, index) for index in range(LAYERS))
    assert hosted.layer_bytes < 1.3 * max(layer_bytes(model, index) for index in range(LAYERS))
    assert places(model) == home
    gc.collect()
    assert all(ref() is None for ref in memory)
    assert hosted._rest_on_device is None


def layer_bytes(model, index):
    return sum(param.nbytes for param in model.model.layers[index].parameters())
