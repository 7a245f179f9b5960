"""Log-probs of a reference that runs the user's code are not stored on disk, unless the code only observes."""

import copy
import functools
from types import MethodType, SimpleNamespace

import pytest
import torch
import transformers.models.llama.modeling_llama as llama
import trl
from accelerate.hooks import ModelHook, SequentialHook, add_hook_to_module
from peft import get_peft_model
from torch import nn
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import trl_ext
from reference_runs import logged, of_check, trainer
from tiny import lora_config
from token_counts import counted
from trl_ext.reference.weights import ReferenceWeights

FACTOR = 0.5
UNKNOWN = " reads, so a later run cannot compare the reference"


@pytest.fixture
def base(workshop):
    model = AutoModelForCausalLM.from_pretrained(workshop.model("untied"))
    return lambda: copy.deepcopy(model)


def mlp(model):
    return model.model.layers[0].mlp


def reason(model):
    return ReferenceWeights.of_model(model).uncacheable_reason()


class Holder:
    factor = 0.5


class Scale:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, *args):
        return self.factor * args[-1]

    def hook(self, module, args, output):
        return self.factor * output


class Scaled(nn.Module):
    def __init__(self, inner, factor):
        super().__init__()
        self.inner = inner
        self.factor = factor

    def forward(self, x):
        return self.factor * self.inner(x)


class ScaledWeight(nn.Module):
    def forward(self, weight):
        return FACTOR * weight


class ScaledLater(ModelHook):
    def post_forward(self, module, output):
        return FACTOR * output


class LaterConfig(llama.LlamaConfig):
    pass


class Weight(nn.Parameter):
    pass


class ScaledWithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return FACTOR * x


def scale_by(factors, *args):
    return factors["factor"] * args[-1]


def hooked(hook):
    return lambda model: mlp(model).register_forward_hook(hook)


def closure_of_a_tensor():
    factor = torch.tensor(0.5)
    return lambda module, args, output: factor * output


def closure_of_a_dict():
    factors = {"a": [{"b": 0.5}]}
    return lambda module, args, output: factors["a"][0]["b"] * output


def under_a_decorator():
    @torch.no_grad()
    def scale(module, args, output):
        return FACTOR * output

    return scale


def replaced_forward(model):
    mlp(model).forward = MethodType(lambda self, x: FACTOR * type(self).forward(self, x), mlp(model))


def patched_helper(model):
    model.model.layers[0].self_attn._helper = MethodType(lambda self, x: FACTOR * x, mlp(model))


def module_class(model):
    model.model.layers[0].mlp = Scaled(mlp(model), 0.5)


def subclass(model):
    mlp(model).__class__ = type("Halved", (llama.LlamaMLP,), {"forward": lambda self, x: FACTOR * x})


def parametrization(model):
    parametrize.register_parametrization(mlp(model).down_proj, "weight", ScaledWeight())


def parameter_class(model):
    mlp(model).down_proj._parameters["weight"] = Weight(mlp(model).down_proj.weight.detach())


def config_class(model):
    model.config = model.model.config = LaterConfig(**model.config.to_dict())


def in_an_attribute(value):
    return lambda model: setattr(model.model.layers[0].self_attn, "helper", value)


def hook_of_accelerate(*hooks):
    return lambda model: add_hook_to_module(mlp(model), SequentialHook(*hooks) if hooks else ScaledLater())


CASES = {
    "hook with a tensor in its closure": (hooked(closure_of_a_tensor()), "closure_of_a_tensor.<locals>.<lambda>"),
    "hook with a dict in its closure": (hooked(closure_of_a_dict()), "closure_of_a_dict.<locals>.<lambda>"),
    "hook with a default": (hooked(lambda module, args, output, factor=0.5: factor * output), "<lambda>"),
    "hook that reads a global": (hooked(lambda module, args, output: FACTOR * output), "<lambda>"),
    "hook that reads a class": (hooked(lambda module, args, output: Holder.factor * output), "<lambda>"),
    "hook that is an object": (hooked(Scale(0.5)), "Scale"),
    "hook that is a method": (hooked(Scale(0.5).hook), "Scale.hook"),
    "hook that is a partial function": (hooked(functools.partial(scale_by, {"factor": 0.5})), "scale_by"),
    "hook under a decorator": (hooked(under_a_decorator()), "under_a_decorator.<locals>.scale"),
    "pre-hook": (lambda model: mlp(model).register_forward_pre_hook(lambda module, args: (2 * args[0],)), "<lambda>"),
    "hook of accelerate": (hook_of_accelerate(), "ScaledLater"),
    "hooks of accelerate": (hook_of_accelerate(ModelHook(), ScaledLater()), "ScaledLater"),
    "replaced forward": (replaced_forward, "replaced_forward.<locals>.<lambda>"),
    "patched method of a module": (patched_helper, "patched_helper.<locals>.<lambda>"),
    "function in an attribute": (in_an_attribute(lambda x: FACTOR * x), "<lambda>"),
    "autograd function": (in_an_attribute(ScaledWithGradient.apply), "ScaledWithGradient"),
    "object in an attribute": (in_an_attribute(Scale(0.5)), "Scale"),
    "function in a list": (in_an_attribute([{"a": functools.cache(scale_by)}]), "scale_by"),
    "class of a module": (module_class, "Scaled"),
    "subclass of a module": (subclass, "Halved"),
    "parametrization": (parametrization, "ScaledWeight"),
    "class of a parameter": (parameter_class, "Weight"),
    "class of the config": (config_class, "LaterConfig"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_reference_that_runs_the_users_code_is_not_stored(name, base):
    change, code = CASES[name]
    model = base()
    assert reason(model) is None
    change(model)
    assert f"{code}`{UNKNOWN}" in reason(model)
    assert f"{code}`{UNKNOWN}" in reason(get_peft_model(model, lora_config()))


@pytest.mark.parametrize(
    "place",
    [
        lambda model: model,
        lambda model: model.base_model,
        lambda model: model.get_base_model().model.layers[0].self_attn.q_proj,
    ],
    ids=["model", "tuner", "layer"],
)
def test_a_hook_on_pefts_wrappers_is_the_users_code(place, base):
    model = get_peft_model(base(), lora_config())
    assert reason(model) is None
    place(model).register_forward_hook(lambda module, args, output: output)
    assert f"<lambda>`{UNKNOWN}" in reason(model)


def scaled(own):
    @functools.wraps(own)
    def scaled(*args, **kwargs):
        return FACTOR * own(*args, **kwargs)

    return scaled


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (llama.LlamaMLP, "forward"),
        (llama.LlamaModel, "get_input_embeddings"),
        (llama, "rotate_half"),
        (nn.functional, "silu"),
        (nn.Module, "__call__"),
    ],
    ids=str,
)
def test_a_function_in_place_of_a_librarys_is_the_users_code(owner, name, base, monkeypatch):
    monkeypatch.setattr(owner, name, scaled(getattr(owner, name)))
    assert UNKNOWN in reason(base())
    monkeypatch.setattr(owner, name, Scale(0.5))
    assert f"Scale`{UNKNOWN}" in reason(base())


def test_a_users_attention_is_the_users_code(base, monkeypatch):
    model = base()
    attention = ALL_ATTENTION_FUNCTIONS[model.config._attn_implementation]
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, model.config._attn_implementation, scaled(attention))
    assert UNKNOWN in reason(model)


def test_an_object_in_an_operation_is_not_stored(base):
    model = base()
    model.model.norm.forward = functools.partial(torch.mul, SimpleNamespace(factor=0.5))
    assert "trl_ext cannot tell what the object of the class `SimpleNamespace` holds" in reason(model)


# The trainer


def test_the_plan_says_why_log_probs_stay_in_memory(workshop, tmp_path, base):
    for change, options in (
        (module_class, {}),
        (CASES["hook under a decorator"][0], {"precompute_ref_log_probs": True}),
    ):
        model = base()
        change(model)
        subject = trainer(workshop, tmp_path, ref_model=model, **options)
        plan = " ".join(subject.explain()["reference"].reason.split())
        assert "kept in memory, for this run only, because " in plan
        assert options or f"because trl_ext cannot tell what `{__name__}.Scaled`{UNKNOWN}." in plan
    assert not (tmp_path / "datasets" / "trl_ext_reference_log_probs").exists()


def run(workshop, tmp_path, model, library=trl_ext):
    subject = trainer(workshop, tmp_path, library, ref_model=model, bf16=True, learning_rate=0.0, num_train_epochs=2)
    with counted() as tokens:
        subject.train()
    return logged(subject, "rewards/chosen"), tokens.without


def test_each_run_scores_again_with_the_users_code(workshop, tmp_path, base):
    found = []
    for factor in (0.98, 1.0):
        model = base()
        model.model.layers[0].mlp = Scaled(mlp(model), factor)
        rewards, passes = run(workshop, tmp_path, model)
        assert len(passes) == 3
        assert rewards == pytest.approx(run(workshop, tmp_path, model, trl)[0], abs=0.05)
        found.append(rewards)
    assert found[0] != pytest.approx(found[1], abs=1e-4)


def test_a_later_run_finds_the_log_probs_of_a_reference_that_is_only_observed(workshop, tmp_path, base):
    found = []
    for name in ("first", "second"):
        shapes = {name: []}
        model = base()
        mlp(model).register_forward_hook(lambda module, args, output, shapes=shapes[name]: shapes.append(output.shape))
        rewards, passes = run(workshop, tmp_path, model)
        assert shapes[name]
        found.append(rewards)
        assert len(passes) == 3 if name == "first" else passes == of_check(passes)
    assert found[0] == pytest.approx(found[1], abs=1e-5)
