"""The identity of DPO's reference: equal for equal log-probs, and different for any that may differ."""

import copy
import importlib
import json
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator, dispatch_model
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from accelerate.state import AcceleratorState
from peft import PeftModel, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM, dynamic_module_utils
from trl.trainer.utils import add_fused_lm_head, disable_dropout_in_model

from reference_changes import LISTED, forward, norm, plain
from tiny import MODELS, let_transformers_add_adapters, lora_config
from trl_ext.host.reference import HostedReference
from trl_ext.reference.weights import ReferenceWeights, identity_facts, identity_of
from trl_ext.scoring.forward import ScoringOptions, attach_scoring_forward


def identity(model, adapter=None, **computed_with):
    weights = ReferenceWeights(model, () if adapter is None else (adapter,))
    return identity_of(
        identity_facts(
            weights.hash(lambda _: nullcontext()),
            weights.config,
            weights.in_memory(lambda _: nullcontext()),
            **computed_with,
        )
    )


@pytest.fixture
def base(workshop):
    return lambda name="untied", **kwargs: AutoModelForCausalLM.from_pretrained(workshop.model(name), **kwargs)


@pytest.mark.parametrize(
    "adapter",
    [
        lora_config(),
        lora_config(use_dora=True, r=2),
        lora_config(modules_to_save=["lm_head"]),
        lora_config(trainable_token_indices={"embed_tokens": [3, 4]}),
        PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    ],
    ids=["lora", "dora", "modules_to_save", "trainable_tokens", "prompt_tuning"],
)
def test_the_identity_of_a_base_model_does_not_depend_on_its_adapter(adapter, base):
    alone = identity(base())
    policy = get_peft_model(base(), copy.deepcopy(adapter))
    assert identity(policy) == alone
    with torch.no_grad():
        for param in policy.parameters():
            if param.requires_grad:
                param.add_(1.0)
    assert identity(policy) == alone
    assert not [*ReferenceWeights(policy).trained_parameters()]


def test_the_smallest_change_of_a_weight_changes_the_identity(base):
    alone = identity(base())
    assert identity(base()) == alone
    for name, _ in base().named_parameters():
        model = base()
        flat = model.get_parameter(name).data.view(-1)
        flat[-1] = torch.nextafter(flat[-1], torch.tensor(10.0))
        assert identity(model) != alone, name
    buffered = base()
    buffered.model.register_buffer("scale", torch.ones(2))
    other = copy.deepcopy(buffered)
    other.model.scale[1] = 2
    assert len({alone, identity(buffered), identity(other)}) == 3


def test_swapping_two_weights_changes_the_identity(base):
    model = base()
    first, second = model.model.layers
    first.mlp, second.mlp = second.mlp, first.mlp
    assert identity(model) != identity(base())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_another_dtype_changes_the_identity(dtype, base):
    assert identity(base(dtype=dtype)) != identity(base())


def test_bytes_scalars_and_tied_weights_have_a_hash(base):
    model = base("tied")
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    packed = torch.nn.Parameter(torch.arange(8, dtype=torch.uint8), requires_grad=False)
    model.model.layers[0].packed = packed
    model.model.layers[0].register_buffer("exponent", torch.tensor(3))
    before = identity(model)
    packed[7] = 0
    assert identity(model) != before != identity(base("tied"))
    # The same bytes with another dtype or shape
    found = set()
    for zeros in (torch.zeros(4), torch.zeros(4, dtype=torch.int32), torch.zeros(2, 2), torch.zeros(8).half()):
        model.model.layers[0].register_buffer("exponent", zeros)
        found.add(identity(model))
    assert len(found) == 4


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("untied", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
        ("untied", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}),
        ("untied", {"rms_norm_eps": 1e-3}),
        ("untied", {"hidden_act": "gelu"}),
        ("softcap", {"final_logit_softcapping": 3.0}),
        ("softcap", {"attn_logit_softcapping": 5.0}),
        ("softcap", {"sliding_window": 4}),
        ("logits_scaling", {"logits_scaling": 2.0}),
        ("logit_scale", {"logit_scale": 0.5}),
        ("experts", {"num_experts_per_tok": 1}),
        ("untied", {"attn_implementation": "eager"}),
    ],
    ids=str,
)
def test_every_part_of_the_configuration_changes_the_identity(name, change, base):
    assert identity(base(name, **change)) != identity(base(name))


def test_the_origin_and_generation_settings_do_not_change_the_identity(base, tmp_path):
    model = base()
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    again.config.use_cache = False
    assert identity(again) == identity(model)


def test_the_settings_of_the_computation_change_the_identity(base):
    found = {identity(base(), head=head, mixed_precision=p) for head in ("tiled", "dense") for p in ("no", "bf16")}
    assert len(found) == 4


def with_ref_adapter(base, workshop):
    policy = PeftModel.from_pretrained(base(), workshop.adapter("untied"), is_trainable=True)
    policy.add_adapter("ref", policy.peft_config["default"])
    return policy


def test_only_the_reference_adapter_is_part_of_the_identity(base, workshop):
    policy = with_ref_adapter(base, workshop)
    before = identity(policy, "ref")
    assert before != identity(policy) == identity(base())

    def add_to(words):
        with torch.no_grad():
            for name, param in policy.named_parameters():
                if words in name:
                    param.add_(0.5)

    add_to(".default.")
    assert identity(policy, "ref") == before
    add_to("layers.0.self_attn.q_proj.lora_B.ref.")
    assert identity(policy, "ref") != before
    assert not [*ReferenceWeights(policy, ("ref",)).trained_parameters()]


def test_an_adapters_scaling_changes_the_identity(base, workshop):
    policy, scaled = (with_ref_adapter(base, workshop) for _ in range(2))
    scaled.peft_config["ref"].lora_alpha = 8
    weights = ReferenceWeights(policy, ("ref",)), ReferenceWeights(scaled, ("ref",))
    assert weights[0].config != weights[1].config
    before = identity(policy, "ref")
    policy.get_base_model().model.layers[0].self_attn.q_proj.set_scale("ref", 3.0)
    assert identity(policy, "ref") != before


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_a_bias_that_is_trained_with_the_adapter_is_detected(bias, base):
    policy = get_peft_model(base("head_bias"), lora_config(bias=bias, target_modules=["q_proj"]))
    assert next(ReferenceWeights(policy).trained_parameters())[0].endswith("bias")


def test_weights_on_the_meta_device_are_an_error(base):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(MODELS["untied"]())
    with pytest.raises(ValueError, match='before you build the trainer, or set `reference_store="memory"`'):
        identity(model)


def test_the_virtual_tokens_of_a_reference_adapter_change_the_identity(base):
    found = set()
    for seed in (0, 1):
        torch.manual_seed(seed)
        policy = get_peft_model(base(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
        policy.add_adapter("ref", policy.peft_config["default"])
        found |= {identity(policy, "ref"), identity(policy)}
    assert len(found) == 3


def with_adapter_of_transformers(base, seed=0, **config):
    """Make a plain model with an adapter of transformers."""
    model = base()
    torch.manual_seed(seed)
    model.add_adapter(lora_config(init_lora_weights=False, **config))
    return model


def test_an_adapter_of_transformers_is_part_of_the_model(base, monkeypatch):
    let_transformers_add_adapters(monkeypatch)
    model = with_adapter_of_transformers(base)
    assert identity(model) == identity(with_adapter_of_transformers(base)) != identity(base())
    assert identity(model) != identity(with_adapter_of_transformers(base, seed=1))
    assert ReferenceWeights(model).config != ReferenceWeights(with_adapter_of_transformers(base, lora_alpha=3)).config
    assert "lora" in next(ReferenceWeights(model).trained_parameters())[0]
    before = identity(model)
    model.disable_adapters()
    assert identity(model) != before


def test_weights_in_the_memory_of_the_policy_are_detected(base):
    policy, reference = base(), base()
    assert ReferenceWeights(reference).shares_with(policy) is None
    reference.load_state_dict(policy.state_dict(), assign=True)
    assert reference.lm_head.weight is not policy.lm_head.weight
    assert ReferenceWeights(reference).shares_with(policy) == "model.embed_tokens.weight"
    policy.requires_grad_(False)
    assert ReferenceWeights(reference).shares_with(policy) is None
    assert ReferenceWeights(reference).shares_with(policy, trained=False) is not None


@pytest.mark.parametrize(
    ("rope", "kind"),
    [
        ({"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0}, "longrope"),
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}, "dynamic"),
        ({"full_attention": {"rope_type": "dynamic"}, "sliding_attention": {"rope_type": "default"}}, "dynamic"),
        ({"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0}, None),
    ],
    ids=["longrope", "dynamic", "by_layer_type", "llama3"],
)
@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
def test_positions_that_depend_on_the_longest_row_are_detected(name, rope, kind, base):
    model = base()
    assert ReferenceWeights(model).rope_of_batch() is None
    model.config.__dict__.pop("rope_parameters")
    model.config.__dict__[name] = rope
    assert ReferenceWeights(model).rope_of_batch() == kind


def tuple_of_a_norm(model):
    model.model.norm.shape = (32, (1, 2.5))


def partial_of_torch(factor):
    def change(model):
        model.model.norm.forward = partial(torch.mul, factor)

    return change


def attribute(value):
    def change(model):
        model.model.layers[0].self_attn.value = value

    return change


def config_of_a_module(model):
    attention = model.model.layers[0].self_attn
    attention.config = type(attention.config)(**attention.config.to_dict())
    attention.config._attn_implementation = "eager"


IN_MEMORY = {
    **LISTED,
    **{x.__name__: x for x in (tuple_of_a_norm, config_of_a_module)},
    "partial": partial_of_torch(0.5),
    "other partial": partial_of_torch(0.6),
    "partial with a tensor": partial_of_torch(torch.tensor(0.5)),
    "tensor": attribute(torch.tensor(0.5)),
    "other tensor": attribute(torch.tensor(0.6)),
    "array": attribute(np.array([0.5])),
    "other array": attribute(np.array([0.6])),
    "text": attribute("full"),
    "other text": attribute("sliding"),
    "nested": attribute([{"a": (1, "b")}]),
    "other nested": attribute([{"a": (1, "c")}]),
    "buffer of another dtype": lambda model: model.model.rotary_emb.half(),
    "places exchanged": lambda model: exchanged(model, "variance_epsilon", 0.1, 0.2),
    "places exchanged again": lambda model: exchanged(model, "variance_epsilon", 0.2, 0.1),
}


def exchanged(model, name, *values):
    for layer, value in zip(model.model.layers, values, strict=True):
        setattr(layer.input_layernorm, name, value)


def changed(model, change):
    change(model)
    return model


def test_a_change_in_memory_changes_the_identity_in_the_same_way_each_time(base):
    found = {name: identity(changed(base(), change)) for name, change in IN_MEMORY.items()}
    assert found == {name: identity(changed(base(), change)) for name, change in IN_MEMORY.items()}
    assert len({identity(base()), *found.values()}) == len(found) + 1
    for change in (norm, partial_of_torch(0.5)):
        adapted = get_peft_model(changed(base(), change), lora_config())
        assert identity(adapted) == identity(changed(base(), change))


def computed(model):
    ids = torch.arange(6).reshape(2, 3)
    model(input_ids=ids, labels=ids).loss.backward()


def compiled(model):
    torch._dynamo.reset()
    layer = model.model.layers[0].mlp
    torch.compile(layer, backend="eager")(torch.ones(1, 3, model.config.hidden_size))


def stock_trainer(model):
    add_fused_lm_head(model)


def ours_on_stocks(model):
    add_fused_lm_head(model)
    attach_scoring_forward(model, ScoringOptions())
    attach_scoring_forward(model, ScoringOptions())


def in_mixed_precision(model):
    AcceleratorState._reset_state()  # of earlier trainers
    Accelerator(cpu=True, mixed_precision="bf16").prepare_model(model)
    AcceleratorState._reset_state()


LIBRARIES = {
    "training": lambda model: model.train(),
    "evaluation": lambda model: model.eval(),
    "checkpointing": lambda model: model.gradient_checkpointing_enable(),
    "inputs with gradients": lambda model: model.enable_input_require_grads(),
    "computed": computed,
    "compiled": compiled,
    "dropout off": disable_dropout_in_model,
    "stock trainer": stock_trainer,
    "ours on stock's": ours_on_stocks,
    "mixed precision": in_mixed_precision,
    "hooked": lambda model: add_hook_to_module(model.model.layers[0].mlp, AlignDevicesHook("cpu")),
    "dispatched": lambda model: dispatch_model(model, {"": "cpu"}, force_hooks=True),
    "on the host": lambda model: HostedReference(model, torch.device("cpu")),
    "path": lambda model: setattr(model, "name_or_path", "elsewhere"),
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_attributes_set_by_libraries_do_not_change_the_identity(name, base):
    for change in (plain, norm, partial_of_torch(0.5)):
        model = changed(base(), change)
        LIBRARIES[name](model)
        assert identity(model) == identity(changed(base(), change))
    model = changed(base(), forward)
    LIBRARIES[name](model)
    assert "`reference_changes.forward.<locals>.<lambda>`" in ReferenceWeights(model).uncacheable_reason()


@pytest.mark.parametrize("name", MODELS)
def test_loading_a_model_again_does_not_change_the_identity(name, base):
    model, linear = base(name), lora_config(target_modules=["q_proj", "v_proj"])
    computed(model)
    assert identity(model) == identity(base(name)) == identity(get_peft_model(base(name), linear))
    assert identity(copy.deepcopy(model)) == identity(model)


_IN_A_PROCESS = """
from contextlib import nullcontext
from transformers import AutoModelForCausalLM
from trl_ext.reference.weights import ReferenceWeights
model = AutoModelForCausalLM.from_pretrained({path!r})
model.model.norm.devices = {{"cpu", "cuda", "mps", "xpu"}}
print(ReferenceWeights(model).in_memory(lambda _: nullcontext()))
"""


@pytest.mark.slow
def test_processes_compute_the_same_identity(workshop):
    script = _IN_A_PROCESS.format(path=workshop.model("untied"))
    found = set()
    for seed in "1234":  # the order of a set differs between processes
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        ran = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
        )
        found.add(ran.stdout.splitlines()[-1])
    assert len(found) == 1
    assert "modules" in found.pop()


_REMOTE = """
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP
from .parts import Scale
class Scaled(LlamaMLP):
    def forward(self, x):
        return {forward}
class Remote(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = Scaled(config)
            layer.mlp._scale = 1.0
"""
_PARTS = "import os\nFACTOR = 0.5\nclass Scale:\n    factor = {}\n"


@pytest.fixture
def remote(workshop, tmp_path, monkeypatch):
    """Return a maker of a model with code of its own, as with `trust_remote_code`."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "modules"), *sys.path])
    for name in [x for x in sys.modules if x.partition(".")[0] == "transformers_modules"]:  # of another test
        monkeypatch.delitem(sys.modules, name)

    def make(forward="super().forward(x)", factor=0.5):
        folder = tmp_path / "model"
        if not folder.exists():
            shutil.copytree(workshop.model("untied"), folder)
        config = json.loads((folder / "config.json").read_text())
        config["auto_map"] = {"AutoModelForCausalLM": "remote.Remote"}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "remote.py").write_text(_REMOTE.format(forward=forward))
        (folder / "parts.py").write_text(_PARTS.format(factor))
        return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)

    return make


def test_the_files_of_a_remote_model_are_in_the_identity(remote, base):
    found = [identity(x) for x in (remote(), remote("2 * super().forward(x)"), remote(factor=0.6), base())]
    assert len({*found}) == 4
    model = remote()
    assert ReferenceWeights(model).uncacheable_reason() is None
    assert identity(model) == found[0]


@pytest.mark.parametrize(
    "change",
    [
        lambda remote, mlp: setattr(mlp, "_scale", 0.5),
        lambda remote, mlp: setattr(sys.modules[remote.rpartition(".")[0] + ".parts"], "FACTOR", 0.6),
        lambda remote, mlp: setattr(type(mlp), "factor", 0.6),
    ],
    ids=["attribute", "global", "class"],
)
def test_values_of_a_remote_models_code_are_in_the_identity(change, remote):
    model = remote("self._scale * super().forward(x)")
    before = identity(model)
    mlp = model.model.layers[0].mlp
    change(type(mlp).__module__, mlp)
    assert ReferenceWeights(model).uncacheable_reason() is None
    assert identity(model) != before


def test_a_remote_model_that_reads_the_environment_or_is_patched_is_not_stored(remote):
    assert (
        "`Scaled` calls `getenv`"
        in ReferenceWeights(remote("float(__import__('os').getenv('A', 1)) * x")).uncacheable_reason()
    )
    model = remote()
    type(model.model.layers[0].mlp).forward = lambda self, x: x
    assert "<lambda>` reads" in ReferenceWeights(model).uncacheable_reason()


_INSTALLED = """
class Scale:
    def __init__(self, factor):
        self.factor = factor
    def __call__(self, x):
        return self.factor * x
def scale(factor, tensor=None):
    return lambda x, tensor=tensor: factor * x
"""


def test_what_an_installed_packages_function_holds_is_in_the_identity(base, tmp_path, monkeypatch):
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "installed_scales.py").write_text(_INSTALLED)
    monkeypatch.syspath_prepend(folder)
    installed = importlib.import_module("installed_scales")
    held = (0.5, 0.6)
    values = [*map(installed.scale, held), *map(installed.Scale, held), installed.scale(0.5, torch.ones(1))]
    found = [identity(changed(base(), attribute(value))) for value in values]
    assert len({*found, identity(base())}) == 6
    assert identity(changed(base(), attribute(installed.Scale(0.5)))) == found[2]
    for value in (installed.scale(lambda x: x), installed.Scale(attribute)):
        assert "trl_ext cannot tell what" in ReferenceWeights(changed(base(), attribute(value))).uncacheable_reason()
    unknown = changed(base(), attribute(installed.scale(SimpleNamespace(factor=0.5))))
    assert "class `SimpleNamespace` holds" in ReferenceWeights(unknown).uncacheable_reason()
