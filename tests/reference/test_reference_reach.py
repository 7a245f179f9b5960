"""What foreign code reads is part of a reference's identity, equal in each process, or the log-probs are not stored."""

import copy
import logging
import os
import random
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import transformers.models.llama.modeling_llama as llama
import trl
from peft import get_peft_model
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import trl_ext
from reached_values import REACHED, hooked, mlp
from reference_runs import logged, of_check, trainer
from tiny import lora_config
from token_counts import counted
from trl_ext.reference.weights import ReferenceWeights

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture
def base(workshop):
    model = AutoModelForCausalLM.from_pretrained(workshop.model("untied"))
    return lambda: copy.deepcopy(model)


def state(model):
    return ReferenceWeights(model).in_memory(None)["modules"]


def changed(model, change):
    change(model)
    return model


FAST = ("closure_of_tensor", "callable_object", "module_global", "class_attribute", "module_attribute", "own_module")


@pytest.mark.parametrize("name", [pytest.param(x, marks=() if x in FAST else pytest.mark.slow) for x in REACHED])
def test_a_value_that_foreign_code_reads_is_in_the_identity(name, base):
    first, again, other = (state(changed(base(), REACHED[name](factor))) for factor in (0.5, 0.5, 0.6))
    assert first == again != other
    assert state(base()) not in (first, other)


def test_hooks_on_peft_models_and_their_wrappers_are_in_the_identity(base):
    def adapted():
        return get_peft_model(base(), lora_config())

    plain = state(adapted())
    assert plain == state(base())
    for place in (
        lambda model: model,
        lambda model: model.base_model,
        lambda model: model.get_base_model().model.layers[0].self_attn.q_proj,
    ):
        found = []
        for factor in (0.5, 0.5, 0.6):
            model = adapted()
            place(model).register_forward_hook(lambda module, args, output, factor=factor: output)
            found.append(state(model))
        assert found[0] == found[1] != found[2]
        assert found[0] != plain


def scaled_by(factor, own):
    def scaled(*args, **kwargs):
        return factor * own(*args, **kwargs)

    return scaled


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (llama.LlamaMLP, "forward"),
        (llama, "rotate_half"),
        (torch.nn.functional, "silu"),
        (llama.LlamaRMSNorm, "forward"),
    ],
    ids=str,
)
def test_functions_that_replace_those_of_libraries_are_in_the_identity(owner, name, base, monkeypatch):
    plain, own, found = state(base()), getattr(owner, name), []
    for factor in (0.5, 0.5, 0.6):
        monkeypatch.setattr(owner, name, scaled_by(factor, own))
        found.append(state(base()))
    assert found[0] == found[1] != found[2]
    assert found[0] != plain


def test_a_users_attention_is_in_the_identity(base, monkeypatch):
    own, found = ALL_ATTENTION_FUNCTIONS["sdpa"], [state(base())]
    for factor in (0.5, 0.6):
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", scaled_by(factor, own))
        found.append(state(base()))
    assert len({*found}) == 3


# What no process can compare


def opens_a_file(module, args, output):
    return float(open(__file__).readline()) * output


def reads_the_environment(module, args, output):
    return float(os.environ["FACTOR"]) * output


class ScaledByTheEnvironment(llama.LlamaMLP):
    def forward(self, x):
        return reads_the_environment(self, (x,), super().forward(x))


def reads_the_environment_by_a_function(module, args, output):
    return float(os.getenv("FACTOR", "1")) * output


def loads_a_tensor(module, args, output):
    return torch.load("factor.pt") * output


NUMBERS = iter([0.5, 0.6])
DRAWN = random.Random(0)
LOCAL = threading.local()
UNORDERED = {object(), object()}


def has_an_iterator(module, args, output):
    return next(NUMBERS) * output


def has_random_state(module, args, output):
    return DRAWN.random() * output


def has_local_state(module, args, output):
    return LOCAL.factor * output


def has_a_set_of_objects(module, args, output):
    return len(UNORDERED) * output


UNKNOWN = [
    *(opens_a_file, reads_the_environment, reads_the_environment_by_a_function, loads_a_tensor, has_an_iterator),
    *(has_random_state, has_local_state, has_a_set_of_objects),
]


@pytest.mark.parametrize("hook", UNKNOWN)
def test_what_cannot_be_compared_is_not_stored(hook, base):
    model = changed(base(), hooked(hook))
    assert f"`{hook.__qualname__}` " in ReferenceWeights(model).uncacheable_reason()


def test_the_plan_says_why_log_probs_stay_in_memory(workshop, tmp_path, base):
    model = base()
    mlp(model).__class__ = ScaledByTheEnvironment
    subject = trainer(workshop, tmp_path, ref_model=model)
    reason = " ".join(subject.explain()["reference"].reason.split())
    assert "kept in memory, for this run only, because `reads_the_environment` calls `environ`" in reason


def deep(levels):
    held = []
    for _ in range(levels):
        held = [held]
    return held


@pytest.mark.parametrize("held", [deep(5000), [[i] for i in range(100_000)]], ids=["deep", "wide"])
def test_the_walk_has_a_bound(held, base):
    model = changed(base(), hooked(lambda module, args, output: len(held) * output))
    assert "reaches too many objects" in ReferenceWeights(model).uncacheable_reason()


# False alarms


class Cyclic:
    def __init__(self):
        self.itself, self.kinds = self, {Cyclic: [self]}
        self.pattern, self.log, self.lock = re.compile("a"), logging.getLogger("x"), threading.Lock()
        self.path, self.unordered = Path("a"), {"x", "y", "z"}

    def __call__(self, module, args, output):
        self.log.info("%s %s", self.pattern, self.itself)
        return output


def counter(seen):
    def count(module, args, output):
        seen.append(tuple(output.shape))

    return count


def test_usual_hooks_are_stored(base):
    for make in (Cyclic, lambda: counter([]), lambda: lambda module, args, output: print(module) or output):
        assert state(changed(base(), hooked(make()))) == state(changed(base(), hooked(make())))

    def with_its_model(model):
        mlp(model).register_forward_hook(lambda module, args, output: output + 0 * model.lm_head.weight.sum())

    assert state(changed(base(), with_its_model)) == state(changed(base(), with_its_model))
    adapted = get_peft_model(changed(base(), with_its_model), lora_config())
    assert state(adapted) == state(changed(base(), with_its_model))


_IN_A_PROCESS = """
import sys
sys.path.insert(0, {support!r})
from reached_values import REACHED
from transformers import AutoModelForCausalLM
from trl_ext.reference.weights import ReferenceWeights
for name, make in REACHED.items():
    model = AutoModelForCausalLM.from_pretrained({path!r})
    make(0.5)(model)
    print("state", name, ReferenceWeights(model).in_memory(None)["modules"])
"""


@pytest.mark.slow
def test_another_process_computes_the_same_identity(workshop, base):
    script = _IN_A_PROCESS.format(path=workshop.model("untied"), support=str(SUPPORT))
    here = {name: state(changed(base(), make(0.5))) for name, make in REACHED.items()}
    environment = {**os.environ, "PYTHONHASHSEED": "3"}
    ran = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    found = dict(line.split()[1:] for line in ran.stdout.splitlines() if line.startswith("state "))
    assert found == here


# The trainer


@pytest.mark.parametrize(
    "name",
    ["own_module", pytest.param("parametrization", marks=pytest.mark.slow)],
)
def test_a_later_run_in_bf16_scores_again_when_the_value_has_changed(name, workshop, tmp_path, base):
    def run(factor, library=trl_ext):
        model = changed(base(), REACHED[name](factor))
        subject = trainer(workshop, tmp_path, library, ref_model=model, bf16=True, learning_rate=0.0)
        with counted() as tokens:
            subject.train()
        return logged(subject, "rewards/chosen"), tokens.without

    _, passes = run(0.98)
    assert len(passes) == 3
    again, passes = run(0.98)
    assert passes == of_check(passes)
    other, passes = run(1.0)
    assert len(passes) == 3
    assert other == pytest.approx(run(1.0, trl)[0], abs=0.05)
    assert other != pytest.approx(again, abs=1e-4)
