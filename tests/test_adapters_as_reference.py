"""A PEFT policy as its own reference: what a separate model in its place would give, and TRL's behaviour beside it."""

import pytest
import torch
import trl
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, PrefixTuningConfig, PromptTuningConfig, get_peft_model

import trl_ext
from transformers import set_seed

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


# The reference does not move. Each row: the policy (its adapter under the name that is asked for), the reference by
# definition, arguments of ours, and what stock TRL does: an exception, or "drifts" / "other", or "same".


def two(workshop, folder, name):
    """Both from disk, on the same base."""
    return loaded(workshop, folder, name, "anchor")


def several(workshop, folder, name):
    """Another one is active."""
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
    """IA3's vectors are entries of a dictionary of parameters: TRL's copy of the adapter leaves them out."""
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
@pytest.mark.parametrize("row", FIXED)
def test_the_reference_is_the_model_that_it_stands_for(row, kind, workshop, tmp_path):
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
    """LoRA's `bias="all"` trains the base model's: with the adapter off, TRL's reference has the trained ones."""
    lora = {"peft_config": lora_config(bias="all"), "model": "head_bias"}
    ours = run(kind, trl_ext, workshop, tmp_path, None, **lora)
    assert "with a copy of what is trained outside of the adapter" in ours.trainer.explain()["reference"].reason
    reference = copy_of(base(workshop, "head_bias"))
    definition = run(kind, trl, workshop, tmp_path, None, reference, **lora)
    assert_alike(ours, definition)
    if kind == "dpo":
        with pytest.raises(AssertionError):
            assert_alike(run(kind, trl, workshop, tmp_path, None, **lora), definition)


VIRTUAL_TOKENS = {"prompt_tuning": PromptTuningConfig, "prefix_tuning": PrefixTuningConfig}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config", VIRTUAL_TOKENS.values(), ids=VIRTUAL_TOKENS)
@pytest.mark.filterwarnings("ignore:Adapter name .ref. should not be contained in the prefix")  # of PEFT, for TRL's own
@pytest.mark.parametrize("name", ["fresh", "default", "policy"])
def test_virtual_tokens_are_trained_as_in_stock(name, config, kind, workshop, tmp_path):
    """Stock knows the base as reference, and the initial adapter where it is called "default"."""
    tokens = config(task_type="CAUSAL_LM", num_virtual_tokens=3)

    def shown(library, name):
        if name == "fresh":
            return run(kind, library, workshop, tmp_path, None, peft_config=tokens, learning_rate=3.0)
        return run(kind, library, workshop, tmp_path, drawn(base(workshop), tokens, 0, name), learning_rate=3.0)

    ours = shown(trl_ext, name)
    stock = shown(trl, "default" if name == "policy" else name)
    assert_alike(ours, stock, lambda key: key.replace(f".{name}.", ".default."))


# The reference moves. Each row: the policy and our arguments, and the reference that it begins with.


def fresh(lora, begins_as_base=False):
    def policy(workshop, folder, name):
        return base(workshop), {"peft_config": lora}

    def reference(workshop, folder):
        set_seed(COMMON["seed"])  # as TRL does before it draws an adapter
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
@pytest.mark.parametrize("row", MOVING)
def test_a_reference_that_moves_is_mixed_by_name(row, kind, workshop, tmp_path):
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
