"""A PEFT policy as its own reference equals a separate reference model; also what stock TRL does."""

import pytest
import torch
import trl
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from peft import PeftModel, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import set_seed

import trl_ext
from adapter_cases import (
    COMMON,
    MovesDefinition,
    assert_alike,
    base,
    build,
    copy_of,
    drawn,
    ia3_config,
    loaded,
    merged,
    run,
)
from tiny import lora_config

KINDS = ["dpo", pytest.param("grpo", marks=pytest.mark.slow)]


def rows(table, *fast):
    """Return the rows of a table, most of them in the slow tier."""
    return [pytest.param(row, marks=[] if row in fast else pytest.mark.slow) for row in table]


# The reference does not move. Each row: the policy with the adapter name, the reference by definition, our arguments,
# and what stock TRL does: an exception, "drifts", "other" or "same".


def two(workshop, folder, name):
    """Load both adapters from disk, on the same base."""
    return loaded(workshop, folder, name, "anchor")


def several(workshop, folder, name):
    """Load several adapters; another one is active."""
    policy = loaded(workshop, folder, name, "other")
    policy.set_adapter("other")
    if name == "default":
        policy.set_adapter(name)
    return policy


def one(workshop, folder, name):
    return loaded(workshop, folder, name)


def head_saved(workshop, folder, name):
    return loaded(workshop, folder, name, modules_to_save=["lm_head"])


def norms_trained(workshop, folder, name):
    policy = loaded(workshop, folder, name)
    for param_name, param in policy.named_parameters():
        if "layernorm" in param_name:
            param.requires_grad_(True)
    return policy


def scales(workshop, folder, name):
    """TRL's copy of the adapter lacks IA3's vectors, because they are entries of a dictionary of parameters."""
    return drawn(base(workshop), ia3_config(), 0, name)


def scales_merged(workshop, folder):
    return drawn(base(workshop), ia3_config(), 0).merge_and_unload()


def first(workshop, folder):
    return merged(workshop, folder, 0)


def second(workshop, folder):
    return merged(workshop, folder, 1)


NAMED = {"policy_adapter_name": "policy", "ref_adapter_name": "anchor"}
FIXED = {
    "two-adapters": (two, "policy", second, NAMED, KeyError),
    "the-active-and-a-reference": (two, "policy", second, {"ref_adapter_name": "anchor"}, KeyError),
    "named-of-several": (several, "policy", first, {"policy_adapter_name": "policy"}, KeyError),
    "one-by-any-name": (one, "policy", first, {}, KeyError),
    "head-saved": (head_saved, "policy", first, {}, KeyError),
    "trained-outside": (norms_trained, "default", first, {}, "other"),
    "ia3": (scales, "default", scales_merged, {}, "other"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("row", rows(FIXED, "two-adapters", "ia3"))
def test_the_reference_equals_its_definition(row, kind, workshop, tmp_path):
    make, name, reference, names, of_stock = FIXED[row]
    ours = run(kind, trl_ext, workshop, tmp_path, make(workshop, tmp_path, name), **names)
    policy = make(workshop, tmp_path, "default")
    definition = run(kind, trl, workshop, tmp_path, policy, copy_of(reference(workshop, tmp_path)))
    assert_alike(ours, definition, lambda key: key.replace(f".{name}.", ".default."))
    if kind == "grpo":
        return
    if isinstance(of_stock, type):
        with pytest.raises(of_stock):
            build(kind, trl, workshop, tmp_path, make(workshop, tmp_path, name))
    else:
        stock = run(kind, trl, workshop, tmp_path, make(workshop, tmp_path, name))
        with pytest.raises(AssertionError):
            assert_alike(stock, definition)


@pytest.mark.parametrize("kind", KINDS)
def test_a_bias_that_is_trained_does_not_move_the_reference(kind, workshop, tmp_path):
    """LoRA's `bias="all"` trains biases of the base model, which TRL's reference then has too."""
    lora = {"peft_config": lora_config(bias="all"), "model": "head_bias"}
    ours = run(kind, trl_ext, workshop, tmp_path, None, **lora)
    assert "with a copy of the parameters trained outside of the adapter" in ours.trainer.explain()["reference"].reason
    reference = copy_of(base(workshop, "head_bias"))
    definition = run(kind, trl, workshop, tmp_path, None, reference, **lora)
    assert_alike(ours, definition)
    if kind == "dpo":
        with pytest.raises(AssertionError):
            assert_alike(run(kind, trl, workshop, tmp_path, None, **lora), definition)


@pytest.mark.parametrize("kind", KINDS)
def test_a_start_that_is_moved_out_of_the_base_is_in_the_reference(kind, workshop, tmp_path):
    """With PiSSA's adapter off, TRL's reference is the base model without the adapter's start."""
    lora = {"peft_config": lora_config(init_lora_weights="pissa")}
    ours = run(kind, trl_ext, workshop, tmp_path, base(workshop), **lora)
    definition = run(kind, trl, workshop, tmp_path, base(workshop), copy_of(base(workshop)), **lora)
    assert_alike(ours, definition, times=3.0)
    if kind == "dpo":
        with pytest.raises(AssertionError):
            assert_alike(run(kind, trl, workshop, tmp_path, base(workshop), **lora), definition, times=3.0)


@pytest.mark.parametrize("start", ["pissa", pytest.param("olora", marks=pytest.mark.slow)])
def test_a_loaded_adapter_does_not_change_the_base_again(start, workshop, tmp_path):
    """TRL's second adapter "ref" changes it, so TRL's policy is another model before the first step."""

    def policy():
        return loaded(workshop, tmp_path, "default", init_lora_weights=start)

    ours = run("dpo", trl_ext, workshop, tmp_path, policy())
    definition = run("dpo", trl, workshop, tmp_path, policy(), copy_of(merged(workshop, tmp_path, 0)))
    assert_alike(ours, definition, times=3.0)
    with pytest.raises(AssertionError):
        assert_alike(run("dpo", trl, workshop, tmp_path, policy()), definition, times=3.0)


VIRTUAL_TOKENS = {"prompt_tuning": PromptTuningConfig, "prefix_tuning": PrefixTuningConfig}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config", rows(VIRTUAL_TOKENS, "prompt_tuning"))
@pytest.mark.filterwarnings(
    "ignore:Adapter name .ref. should not be contained in the prefix"
)  # PEFT warns about TRL's adapter
@pytest.mark.parametrize("name", rows(("fresh", "default", "policy"), "policy"))
def test_virtual_tokens_are_trained_as_in_stock(name, config, kind, workshop, tmp_path):
    """Stock supports the base as the reference, and the initial adapter if its name is "default"."""
    tokens = VIRTUAL_TOKENS[config](task_type="CAUSAL_LM", num_virtual_tokens=3)

    def shown(library, name):
        if name == "fresh":
            return run(kind, library, workshop, tmp_path, None, peft_config=tokens, learning_rate=3.0)
        return run(kind, library, workshop, tmp_path, drawn(base(workshop), tokens, 0, name), learning_rate=3.0)

    ours = shown(trl_ext, name)
    stock = shown(trl, "default" if name == "policy" else name)
    assert_alike(ours, stock, lambda key: key.replace(f".{name}.", ".default."))


# The reference moves. Each row: the policy, our arguments, and the first reference.


def fresh(lora, begins_as_base=False):
    def policy(workshop, folder, name):
        return base(workshop), {"peft_config": lora}

    def reference(workshop, folder):
        set_seed(COMMON["seed"])  # as TRL does before it initializes an adapter
        model = get_peft_model(base(workshop), lora)
        with torch.no_grad():
            for name, param in model.named_parameters():
                if begins_as_base and "lora_B" in name:
                    param.zero_()
        return model

    return policy, reference


def from_disk(workshop, folder, name):
    return loaded(workshop, folder, name), {}


def beside_an_anchor(workshop, folder, name):
    return loaded(workshop, folder, name, "anchor"), {"ref_adapter_name": "anchor"}


def adapter(seed):
    def reference(workshop, folder):
        return PeftModel.from_pretrained(base(workshop), folder / f"adapter-{seed}")

    return reference


MOVING = {
    "fresh": fresh(lora_config(init_lora_weights=True)),
    "fresh-not-zero": fresh(lora_config(), begins_as_base=True),
    "fresh-dora": fresh(lora_config(init_lora_weights=True, use_dora=True)),
    "from-disk": (from_disk, adapter(0)),
    "from-an-anchor": (beside_an_anchor, adapter(1)),
}
SYNC = {"ref_model_mixup_alpha": 0.6, "ref_model_sync_steps": 2}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("row", rows(MOVING, "fresh-not-zero"))
def test_a_moving_reference_is_updated_by_name(row, kind, workshop, tmp_path):
    make, begins_as = MOVING[row]
    policy, options = make(workshop, tmp_path, "policy")
    ours = run(kind, trl_ext, workshop, tmp_path, policy, sync_ref_model=True, **options, **SYNC)
    assert ours.trainer.args.sync_ref_model
    assert "a copy of the adapter" in ours.trainer.explain()["reference"].reason

    policy, options = make(workshop, tmp_path, "default")
    options = {key: value for key, value in options.items() if key == "peft_config"}
    reference = begins_as(workshop, tmp_path).get_base_model().requires_grad_(False)
    moves = [MovesDefinition(reference)]
    definition = run(kind, trl, workshop, tmp_path, policy, reference, callbacks=moves, **options, **SYNC)
    assert_alike(ours, definition, lambda key: key.replace(".policy.", ".default."))
    policy, options = make(workshop, tmp_path, "default")
    options = {key: value for key, value in options.items() if key == "peft_config"}
    with pytest.raises(NotImplementedError, match="sync_ref_model=True"):
        build(kind, trl, workshop, tmp_path, policy, sync_ref_model=True, **options)


# Errors at the start


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ({"policy_adapter_name": "typo"}, r"Unknown `policy_adapter_name` 'typo'. Choose from: \['a', 'b'\]"),
        ({"ref_adapter_name": "typo"}, r"Unknown `ref_adapter_name` 'typo'. Choose from: \['a', 'b'\]"),
        ({"policy_adapter_name": "b", "ref_adapter_name": "b"}, "are both 'b'"),
        ({"ref_adapter_name": "a"}, "is the active adapter, which would be trained"),
    ],
)
def test_unknown_adapter_names_and_one_name_for_both_are_errors(names, words, workshop, tmp_path):
    policy = loaded(workshop, tmp_path, "a", "b")
    for kind in ("dpo", "grpo"):
        with pytest.raises(ValueError, match=words):
            build(kind, trl_ext, workshop, tmp_path, policy, **names)


def test_a_name_needs_a_model_with_adapters(workshop, tmp_path):
    names = {"policy_adapter_name": "a"}
    for kind in ("dpo", "grpo"):
        with pytest.raises(ValueError, match="`policy_adapter_name='a'` needs a `PeftModel` with that adapter"):
            build(kind, trl_ext, workshop, tmp_path, base(workshop), **names)
        with pytest.raises(ValueError, match="got a fresh adapter"):
            build(kind, trl_ext, workshop, tmp_path, base(workshop), peft_config=lora_config(), **names)
    policy = loaded(workshop, tmp_path, "a", "b")
    with pytest.raises(ValueError, match="both name a reference"):
        build("dpo", trl_ext, workshop, tmp_path, policy, base(workshop), ref_adapter_name="b")


UNMOVABLE = {
    "tokens": ({"peft_config": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)}, "always changes its"),
    "random-dora": ({"peft_config": lora_config(use_dora=True)}, "initializes its adapter at random"),
    "precomputed": ({"peft_config": lora_config(), "precompute_ref_log_probs": True}, "cannot be precomputed"),
}


@pytest.mark.parametrize("row", UNMOVABLE)
def test_a_reference_that_cannot_move_is_an_error(row, workshop, tmp_path):
    options, words = UNMOVABLE[row]
    with pytest.raises(ValueError, match=words):
        build("dpo", trl_ext, workshop, tmp_path, None, sync_ref_model=True, **options)


def test_adapters_with_other_configurations_are_an_error(workshop, tmp_path):
    policy = loaded(workshop, tmp_path, "a")
    drawn(base(workshop), lora_config(r=2), 5).save_pretrained(tmp_path / "narrow")
    policy.load_adapter(tmp_path / "narrow", "narrow")
    with pytest.raises(ValueError, match='needs equal configurations of the adapters "a" and "narrow"'):
        build("dpo", trl_ext, workshop, tmp_path, policy, sync_ref_model=True, ref_adapter_name="narrow")


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_without_trained_parameters_is_an_error(kind, workshop, tmp_path):
    frozen = loaded(workshop, tmp_path, "default", trainable=False)
    with pytest.raises(ValueError, match=r'No part of the model would be trained.*"default" was loaded for inference'):
        build(kind, trl_ext, workshop, tmp_path, frozen).train()
    named = loaded(workshop, tmp_path, "default", trainable=False)
    shown = run(kind, trl_ext, workshop, tmp_path, named, policy_adapter_name="default")
    assert all(update.norm() > 0 for update in shown.updates.values())
    assert len(shown.updates) > 4
    if kind == "grpo":  # stock trains nothing, without a warning
        frozen = loaded(workshop, tmp_path, "default", trainable=False)
        stock = build(kind, trl, workshop, tmp_path, frozen)
        before = {name: param.clone() for name, param in frozen.named_parameters()}
        stock.train()
        assert all(torch.equal(param, before[name]) for name, param in frozen.named_parameters())


def test_trained_parameters_that_are_not_saved_give_a_warning(workshop, tmp_path):
    warnings = (
        build("dpo", trl_ext, workshop, tmp_path, norms_trained(workshop, tmp_path, "default")).explain().warnings
    )
    assert "layernorm.weight` and 3 more are trained but in no adapter" in warnings[-1]
    for policy in (one(workshop, tmp_path, "default"), drawn(base(workshop), lora_config(bias="all"), 0)):
        assert not build("dpo", trl_ext, workshop, tmp_path, policy).explain().warnings


# A pass does not change the policy


class PassFailedError(Exception):
    pass


@st.composite
def policies(draw):
    """Return how each policy is made, and the arguments of its trainer."""
    adapter = draw(st.sampled_from(["lora", "bias", "dora", "head", "ia3", "prompt", "prefix"]))
    # The reference: adapter off, "ref" or a copy, a copy, another by name (PEFT supports only one with a bias)
    given = ["fresh", "default", "policy", *(["anchor"] if adapter != "bias" else [])]
    of = draw(st.sampled_from(given))
    return {
        "adapter": adapter,
        "of": of,
        "sync": of in ("default", "policy") and draw(st.booleans()),
        "frozen": draw(st.booleans()),  # the user froze a part of the adapter
        "training": draw(st.booleans()),
        "fails": draw(st.booleans()),
    }


CONFIGS = {
    "lora": lora_config,
    "bias": lambda: lora_config(bias="all"),
    "dora": lambda: lora_config(use_dora=True),
    "head": lambda: lora_config(modules_to_save=["lm_head"]),
    "ia3": ia3_config,
    "prompt": lambda: PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
    "prefix": lambda: PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
}


def state_of(policy):
    layers = [(name, module) for name, module in policy.named_modules() if isinstance(module, BaseTunerLayer)]
    return {
        "values": {name: param.detach().clone() for name, param in policy.named_parameters()},
        "trained": {name: param.requires_grad for name, param in policy.named_parameters()},
        "objects": {name: id(param) for name, param in policy.named_parameters()},
        "training": {name: module.training for name, module in policy.named_modules()},
        "active": (policy.active_adapter, policy.active_adapters),
        "layers": {name: (layer.active_adapters, layer.disable_adapters) for name, layer in layers},
        "attributes": set(vars(policy)),
    }


def assert_equal_states(before, after):
    for what in before:
        if what == "values":
            assert all(torch.equal(value, after[what][name]) for name, value in before[what].items())
        else:
            assert before[what] == after[what], what


@pytest.mark.filterwarnings("ignore:Adapter name .* should not be contained in the prefix")
@example(case={"adapter": "prompt", "of": "fresh", "sync": False, "frozen": False, "training": True, "fails": True})
@example(case={"adapter": "lora", "of": "default", "sync": False, "frozen": True, "training": True, "fails": False})
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=policies())
def test_a_reference_pass_does_not_change_the_policy(case, workshop, tmp_path):
    model = "head_bias" if case["adapter"] == "bias" else "untied"
    make = CONFIGS[case["adapter"]]
    options = {"model": model, "sync_ref_model": case["sync"]}
    if case["of"] == "fresh":
        trainer = build("dpo", trl_ext, workshop, tmp_path, None, peft_config=make(), **options)
    else:
        policy = drawn(base(workshop, model), make(), 0, "default" if case["of"] == "default" else "policy")
        if case["of"] == "anchor":
            policy.add_adapter("anchor", make())
            options["ref_adapter_name"] = "anchor"
        trainer = build("dpo", trl_ext, workshop, tmp_path, policy, **options)
    policy = trainer.model
    if case["frozen"]:
        next(param for param in policy.parameters() if param.requires_grad).requires_grad_(False)
    policy.train(case["training"])
    # As after some steps: trained parameters have changed
    with torch.no_grad():
        for param in policy.parameters():
            if param.requires_grad:
                param.add_(0.5)
    before = state_of(policy)
    batch = next(iter(trainer.get_train_dataloader()))
    seen = []

    def fail(*_):
        # FSDP2 chooses the dtype of gradients from what is trained in the first forward pass, which may be this one
        seen.append({name: param.requires_grad for name, param in policy.named_parameters()})
        if case["fails"]:
            raise PassFailedError

    handle = policy.get_base_model().get_input_embeddings().register_forward_hook(fail)
    try:
        trainer._source.run_pass(batch)
    except PassFailedError:
        assert case["fails"]
    finally:
        handle.remove()
    assert seen
    assert all(trained == {name: x.requires_grad for name, x in policy.named_parameters()} for trained in seen)
    assert_equal_states(before, state_of(policy))


def test_several_active_adapters_are_active_after_a_pass(workshop, tmp_path):
    policy = loaded(workshop, tmp_path, "default", "second")
    policy.base_model.set_adapter(["default", "second"])
    trainer = build("dpo", trl_ext, workshop, tmp_path, policy)
    before = state_of(policy)
    trainer._source.run_pass(next(iter(trainer.get_train_dataloader())))
    assert_equal_states(before, state_of(policy))


def test_every_active_adapter_is_part_of_the_identity_of_the_reference(workshop, tmp_path):
    found = set()
    for moved in (None, "a", "b"):
        policy = loaded(workshop, tmp_path, "a", "b")
        with torch.no_grad():
            for name, param in policy.named_parameters():
                if f".{moved}." in name:
                    param.add_(0.5)
        policy.base_model.set_adapter(["a", "b"])
        trainer = build("dpo", trl_ext, workshop, tmp_path, policy, reference_store="disk")
        assert 'the adapters "a" and "b" from before training' in trainer.explain()["reference"].reason
        found.add(trainer._source._identity)
    assert len(found) == 3


def test_an_adapter_may_have_the_name_of_a_module(workshop, tmp_path):
    """Only the adapter's parameters are frozen, trained or copied."""
    name = "model"

    def trained(policy, **config):
        trainer = build("dpo", trl_ext, workshop, tmp_path, policy, **config)
        return trainer, {key for key, param in policy.named_parameters() if param.requires_grad}

    policy = loaded(workshop, tmp_path, "policy", name)
    own = {key for key, _ in policy.named_parameters() if ".policy." in key}
    assert trained(policy, ref_adapter_name=name)[1] == own
    policy = loaded(workshop, tmp_path, name, "anchor", trainable=False)
    own = {key for key, _ in policy.named_parameters() if "lora_" in key and ".anchor." not in key}
    assert trained(policy, policy_adapter_name=name)[1] == own
    policy.get_base_model().model.layers[0].input_layernorm.weight.requires_grad_(True)
    trainer, _ = trained(policy, sync_ref_model=True, policy_adapter_name=name, ref_adapter_name="anchor")
    assert len(trainer._reference_weights.policy_reference.copies) == len(own) + 1


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_frozen_by_the_user_stay_frozen(kind, workshop, tmp_path):
    """PEFT makes an adapter trainable when it turns it on again, so stock unfreezes it in the first reference pass."""

    def thawed(library):
        policy = loaded(workshop, tmp_path, "default")
        trainer = build(kind, library, workshop, tmp_path, policy)
        frozen = next(param for param in policy.parameters() if param.requires_grad)
        frozen.requires_grad_(False)
        trainer.train()
        return frozen.requires_grad

    assert not thawed(trl_ext)
    assert thawed(trl)
