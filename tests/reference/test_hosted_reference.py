"""A reference model on the host: training and log-probs do not change, and the device holds at most two layers.

On the CPU the "device" is host memory too. Weights are still copied there and freed, so addresses show where they are.
"""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
import trl
from torch import nn
from transformers import AutoModelForCausalLM

import trl_ext
from drop_in_cases import CASES
from model_families import batch
from run_losses import Trainers, train
from tiny import MODELS, lora_config, preferences
from token_counts import as_of_a_library
from training_comparison import assert_same
from trl_ext.host.reference import HostedReference, check_supported
from trl_ext.scoring.forward import ScoringOptions, attach_scoring_forward

DEVICE = torch.device("cpu")
LAYERS = 5


def deep(name: str) -> nn.Module:
    """Make the model `name` of tiny.MODELS with `LAYERS` layers, and its scoring forward."""
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
    """Return the address of each parameter."""
    return {name: param.untyped_storage().data_ptr() for name, param in model.named_parameters()}


@pytest.mark.parametrize("name", ["tied", "untied", "softcap", "logits_scaling", "head_bias", "experts"])
@pytest.mark.parametrize("precision", ["fp32", "bf16 autocast", "bf16 weights"])
def test_log_probs_equal_those_of_the_model_on_the_device_bit_for_bit(name, precision):
    plain, hosted = deep(name), deep(name)
    if precision == "bf16 weights":
        plain, hosted = plain.bfloat16(), hosted.bfloat16()
    HostedReference(hosted, DEVICE)
    before = {key: value.clone() for key, value in hosted.state_dict().items()}
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16 autocast"):
        for context in (torch.no_grad, torch.inference_mode, torch.no_grad):
            want, got = score(plain, context), score(hosted, context)
            assert want.log_probs.ne(0).any()
            assert torch.equal(got.log_probs, want.log_probs)
            assert torch.equal(got.entropy, want.entropy)
    assert all(torch.equal(value, before[key]) for key, value in hosted.state_dict().items())


def test_computes_on_copies_of_at_most_two_layers():
    model = deep("tied")
    shared = "model.layers.2.input_layernorm.weight"
    model.model.layers[2].input_layernorm.weight = model.model.norm.weight
    hosted = HostedReference(model, DEVICE)
    home = places(model)
    of_layer = {name: int(name.split(".")[2]) for name in home if "layers." in name and name != shared}
    assert set(of_layer.values()) == set(range(LAYERS))
    seen, memory = [], []

    def look(module, *_):
        """Check, before each module computes, that its weights are copies, and those of at most one other layer."""
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
    assert seen[-1] == set()  # the head is read after the last layer is freed
    assert set().union(*seen) == set(range(LAYERS))
    assert max(map(len, seen)) == 1
    # The device has memory for two layers during the call, and none after it
    assert len({id(ref) for ref in memory}) == 2
    assert hosted.layer_bytes >= max(layer_bytes(model, index) for index in range(LAYERS))
    assert hosted.layer_bytes < 1.3 * max(layer_bytes(model, index) for index in range(LAYERS))
    assert places(model) == home
    gc.collect()
    assert all(ref() is None for ref in memory)
    assert not hosted._places


def layer_bytes(model, index):
    return sum(param.nbytes for param in model.model.layers[index].parameters())


def test_an_exception_leaves_every_weight_on_the_host():
    model = deep("untied")
    want = score(model).log_probs
    hosted = HostedReference(model, DEVICE)
    home = places(model)
    broken = model.model.layers[2].mlp.register_forward_pre_hook(as_of_a_library(lambda *_: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        score(model)
    assert places(model) == home
    assert not hosted._places
    broken.remove()
    # An interrupt is not an `Exception`: no hook runs after it, and the next call restores the weights
    broken = model.model.layers[3].mlp.register_forward_pre_hook(as_of_a_library(interrupt))
    with pytest.raises(KeyboardInterrupt):
        score(model)
    broken.remove()
    at_start = []
    watch = as_of_a_library(lambda *_: at_start.append(places(model)))
    model.model.layers[0].register_forward_pre_hook(watch)
    assert torch.equal(score(model).log_probs, want)
    assert all(at_start[0][name] == home[name] for name in home if "layers.3" in name)
    assert places(model) == home


def interrupt(*_):
    raise KeyboardInterrupt


def test_skipped_repeated_and_shared_layers_compute_with_their_own_weights():
    orders = [[0, 2, 4], [1, 1, 2], [4, 3, 2, 1, 0], [0, 1, 2, 3, 4]]
    models = deep("untied"), deep("untied")
    for model in models:
        layers = list(model.model.layers)
        layers[3].mlp = layers[1].mlp
        layers[4] = layers[2]
        model.model.layers = nn.ModuleList(layers)
    HostedReference(models[1], DEVICE)
    home, results = places(models[1]), []
    for order in orders:
        for model in models:
            layers = model.model.layers
            model.model.layers = nn.ModuleList(layers[index] for index in order)
            model.model.config.num_hidden_layers = len(order)
            results.append(score(model).log_probs)
            model.model.layers = layers
        assert torch.equal(results[-2], results[-1]), order
    assert len({result.sum().item() for result in results}) == len(orders)
    assert places(models[1]) == home


def test_prepare_model_does_not_move_it_and_other_moves_are_errors():
    model = deep("tied")
    device = torch.device("meta")  # a tensor that moves there is lost
    for buffer_owner in model.modules():
        buffer_owner._buffers.clear()
    HostedReference(model, device)
    assert model.to(device) is model.to("meta") is model
    assert {param.device.type for param in model.parameters()} == {"cpu"}
    for wrong in (torch.bfloat16, "cpu"):
        with pytest.raises(RuntimeError, match="keeps this model in host memory"):
            model.to(wrong)


def test_calling_a_part_of_the_model_is_an_error():
    model = deep("tied")
    HostedReference(model, DEVICE)
    inputs, _ = batch()
    with pytest.raises(RuntimeError, match="Call the model"):
        model.model(**inputs)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda model: setattr(model, "hf_device_map", {"model": 0, "lm_head": "cpu"}), "'device_map': None"),
        (lambda model: setattr(model, "is_quantized", True), "quantized"),
        (lambda model: model.lm_head.to("meta"), "lm_head.weight"),
        (lambda model: setattr(model.model, "layers", nn.Identity()), "with an `nn.ModuleList`"),
    ],
)
def test_a_model_that_cannot_be_hosted_is_an_error(change, words):
    model = deep("untied")
    change(model)

    def host() -> None:
        check_supported(model)
        HostedReference(model, DEVICE)

    with pytest.raises(ValueError, match=words):
        host()


TRAINED = [
    "dpo-untied",
    "dpo-sigmoid-full",
    "dpo-lora-with-ref_model",
    "dpo-softcap-full",
    "dpo-experts",
    "dpo-evaluation",
    "dpo-checkpointing-reentrant",
    "dpo-ld_alpha-precompute",
    "grpo-on_policy-beta",
    "grpo-cast_lm_head_to_fp32",
    "grpo-experts-accumulation",
    "grpo-defaults",  # without beta there is no reference to host
]


@pytest.mark.parametrize("name", TRAINED)
def test_training_equals_stock_trl(name, workshop, hosted_models):
    case = CASES[name]
    ours = replace(case, config={**case.config, "reference_device": "cpu"})
    assert_same(ours, train(ours, Trainers.of(trl_ext), workshop), train(case, Trainers.of(trl), workshop))
    assert len(hosted_models) == (name != "grpo-defaults")


@pytest.fixture
def hosted_models(monkeypatch):
    """Return the models that trainers host from now on."""
    models = []

    def host(model, device):
        models.append(model)
        return HostedReference(model, device)

    monkeypatch.setattr("trl_ext.trainers.reference_weights.HostedReference", host)
    return models


def dpo(workshop, tmp_path, trainer=None, **config):
    options = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "report_to": "none", "max_steps": 1}
    return trl_ext.DPOTrainer(
        model=workshop.model("untied"),
        args=trl_ext.DPOConfig(reference_device="cpu", **options, **config),
        train_dataset=preferences(4, seed=1),
        **(trainer or {}),
    )


@pytest.mark.parametrize("name", ["dpo-untied", "grpo-on_policy-beta"])
def test_mixed_precision_equals_a_reference_on_the_device_bit_for_bit(name, workshop, hosted_models):
    case = CASES[name]
    records = [
        train(replace(case, config={**case.config, "bf16": True, **where}), Trainers.of(trl_ext), workshop)
        for where in ({}, {"reference_device": "cpu"})
    ]
    assert len(hosted_models) == 1
    plain, hosted = records
    assert hosted.losses == plain.losses
    assert hosted.logs == plain.logs
    assert all(torch.equal(hosted.updates[key], plain.updates[key]) for key in plain.updates)


def test_only_the_reference_is_frozen_and_hosted(workshop, tmp_path, hosted_models):
    trainer = dpo(workshop, tmp_path)
    assert hosted_models == [trainer.ref_model]
    assert not any(param.requires_grad for param in trainer.ref_model.parameters())
    assert all(param.requires_grad for param in trainer.model.parameters())


@pytest.mark.parametrize(
    ("config", "trainer", "words"),
    [
        ({"sync_ref_model": True}, {}, "sync_ref_model"),
        ({}, {"peft_config": lora_config()}, "there is none"),
        ({"torch_compile": True}, {}, "torch_compile"),
    ],
)
def test_options_that_contradict_it_are_errors_before_the_first_step(config, trainer, words, workshop, tmp_path):
    with pytest.raises(ValueError, match=f"reference_device='cpu'.*{words}"):
        dpo(workshop, tmp_path, trainer, **config)


def test_another_device_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="must be None or one of"):
        trl_ext.GRPOConfig(output_dir=str(tmp_path), use_cpu=True, reference_device="cuda")
