"""A `PeftModel` as `ref_model`: its adapters are in its log-probs, and in its identity in the store."""

from functools import partial

import pytest
import torch
import trl
from datasets import Dataset
from peft import IA3Config, PeftMixedModel, PeftModel, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import trl_ext
from reference_runs import logged, of_check, trainer
from tiny import REFERENCE_SEED, lora_config, preferences
from token_counts import counted
from trl_ext.reference.weights import ReferenceWeights

NOTHING = {"learning_rate": 0.0}


def base(workshop):
    return AutoModelForCausalLM.from_pretrained(workshop.model("untied"))


def sft(workshop):
    return PeftModel.from_pretrained(base(workshop), workshop.adapter("untied"))


def fresh(workshop, config, seed=0):
    plain = base(workshop)
    torch.manual_seed(seed)
    return get_peft_model(plain, config)


def two(workshop):
    model = sft(workshop)
    model.load_adapter(workshop.adapter("untied"), "b")
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_B.b." in name:
                param.mul_(-2)
    return model


def second_on(workshop):
    model = two(workshop)
    model.set_adapter("b")
    return model


def both_on(workshop):
    model = two(workshop)
    model.base_model.set_adapter(["default", "b"])
    return model


def off(workshop):
    model = sft(workshop)
    model.base_model.disable_adapter_layers()
    return model


def merged(workshop):
    model = sft(workshop)
    model.merge_adapter()
    return model


def merged_and_off(workshop):
    model = merged(workshop)
    model.base_model.disable_adapter_layers()
    return model


def scaled(workshop):
    model = sft(workshop)
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("default", 3.0)
    return model


def one_layer_off(workshop):
    model = sft(workshop)
    model.get_base_model().model.layers[0].self_attn.q_proj.enable_adapters(False)
    return model


def mixed(workshop):
    plain = base(workshop)
    torch.manual_seed(0)
    return PeftMixedModel(plain, lora_config(init_lora_weights=False), adapter_name="default")


def compiled(workshop):
    return torch.compile(sft(workshop), backend="eager")


# Each `PeftModel`, and a plain model with the same outputs
PLAIN = {
    "adapter": (sft, lambda x: sft(x).merge_and_unload()),
    "second of two": (second_on, lambda x: second_on(x).merge_and_unload()),
    "two at once": (both_on, lambda x: both_on(x).merge_and_unload(adapter_names=["default", "b"])),
    "off": (off, base),
    "merged": (merged, lambda x: sft(x).merge_and_unload()),
    "merged and off": (merged_and_off, base),
    "scaled": (scaled, lambda x: scaled(x).merge_and_unload()),
    "on the head": (
        lambda x: fresh(x, lora_config(target_modules=["lm_head", "q_proj"], init_lora_weights=False)),
        lambda x: fresh(
            x, lora_config(target_modules=["lm_head", "q_proj"], init_lora_weights=False)
        ).merge_and_unload(),
    ),
    "IA3": (
        lambda x: noisy(fresh(x, IA3Config(target_modules=["k_proj"], feedforward_modules=[]))),
        lambda x: noisy(fresh(x, IA3Config(target_modules=["k_proj"], feedforward_modules=[]))).merge_and_unload(),
    ),
    "mixed": (mixed, lambda x: mixed(x).merge_and_unload()),
    "compiled": (compiled, lambda x: sft(x).merge_and_unload()),
}
VIRTUAL = {
    "prompt tuning": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "prefix tuning": PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


def noisy(model):
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "ia3" in name:
                param.add_(0.5)
    return model


def rewards(subject):
    with counted() as tokens:
        subject.train()
    return [logged(subject, f"rewards/{name}") for name in ("chosen", "rejected")], tokens.without


def assert_equal_rewards(ours, stock):
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(stock), rtol=1e-4, atol=1e-5)


FAST = ("adapter", "two at once", "merged and off")


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")  # the test counts tokens with a global hook
@pytest.mark.parametrize("name", [pytest.param(x, marks=() if x in FAST else pytest.mark.slow) for x in PLAIN])
def test_the_reference_is_the_model_with_its_adapters(name, workshop, tmp_path):
    adapted, plain = PLAIN[name]
    stock, _ = rewards(trainer(workshop, tmp_path, trl, ref_model=plain(workshop)))
    for config in ({}, {"padding_free": True}):
        ours = trainer(workshop, tmp_path, ref_model=adapted(workshop), **config)
        assert_equal_rewards(rewards(ours)[0], stock)
    words = {"off": "its adapters off", "merged and off": "its adapters off", "second of two": 'the adapter "b"'}
    assert f"`ref_model`, with {words.get(name, 'the adapter')}" in ours.explain()["reference"].reason


@pytest.mark.parametrize("name", VIRTUAL)
def test_virtual_tokens_are_in_the_reference(name, workshop, tmp_path):
    model = fresh(workshop, VIRTUAL[name])
    subject = trainer(workshop, tmp_path, ref_model=model, precompute_ref_log_probs=True, padding_free=True)
    batch = subject._prepare_inputs(next(iter(subject.get_train_dataloader())))
    ids, mask = batch["input_ids"], batch["attention_mask"]
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask).logits[:, -ids.shape[1] : -1].float()
    scored = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0] * batch["completion_mask"][:, 1:]
    found = subject._source.stored(batch, None)
    torch.testing.assert_close(found.log_probs, scored, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "config",
    [
        {"reference_device": "cpu"},
        {"precompute_ref_log_probs": True},
        {"reference_store": "off"},
        pytest.param({"reference_store": "memory"}, marks=pytest.mark.slow),
        pytest.param({"max_tokens_per_micro_batch": 30, "reference_store": "off"}, marks=pytest.mark.slow),
        pytest.param({"head": "dense"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("policy", ["model", "adapter"])
def test_options_of_the_reference_do_not_change_it(policy, config, workshop, tmp_path):
    options = {"peft_config": lora_config()} if policy == "adapter" else {}
    stock, _ = rewards(trainer(workshop, tmp_path, trl, ref_model=sft(workshop).merge_and_unload(), **options))
    ours = trainer(workshop, tmp_path, ref_model=sft(workshop), **options, **config)
    assert_equal_rewards(rewards(ours)[0], stock)


def test_an_sft_adapter_loaded_twice_is_policy_and_reference(workshop, tmp_path):
    def policy():
        return PeftModel.from_pretrained(base(workshop), workshop.adapter("untied"), is_trainable=True)

    stock, _ = rewards(trainer(workshop, tmp_path, trl, policy=policy()))
    ours, _ = rewards(trainer(workshop, tmp_path, policy=policy(), ref_model=sft(workshop)))
    assert_equal_rewards(ours, stock)


def test_kto_scores_a_peft_reference(workshop, tmp_path):
    rows = [
        {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
        for row in preferences(4, seed=1)
        for side in ("chosen", "rejected")
    ]

    def trained(library, ref_model):
        subject = library.KTOTrainer(
            workshop.model("untied"),
            ref_model,
            library.KTOConfig(
                str(tmp_path / library.__name__),
                per_device_train_batch_size=4,
                max_steps=2,
                logging_steps=1,
                bf16=False,
                use_cpu=True,
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
                dataloader_pin_memory=False,
                gradient_checkpointing=False,
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(workshop.model("untied")),
        )
        subject.train()
        return [log[key] for log in subject.state.log_history for key in ("loss", "kl", "rewards/chosen") if key in log]

    stock = trained(trl, sft(workshop).merge_and_unload())
    assert len(stock) == 6
    assert_equal_rewards(trained(trl_ext, sft(workshop)), stock)


# The store


def test_a_store_tells_adapters_apart_and_finds_each_again(workshop, tmp_path):
    kinds = {"base": base, "adapter": sft, "second": second_on, "both": both_on, "scaled": scaled, "merged": merged}
    known = {}
    for name, make in kinds.items():
        known[name], passes = rewards(trainer(workshop, tmp_path, ref_model=make(workshop), **NOTHING))
        assert len(passes) == 3, name
    assert len({str(x) for x in known.values()}) >= len(kinds) - 1  # merging changes the last bits only
    for name, make in kinds.items():
        found, passes = rewards(trainer(workshop, tmp_path, ref_model=make(workshop), **NOTHING))
        assert passes == of_check(passes), name
        assert_equal_rewards(found, known[name])


def identity(model):
    weights = ReferenceWeights.of_model(model)
    return weights.hash(None), str(weights.config), str(weights.in_memory(None))


def test_the_identity_has_what_is_on(workshop):
    plain = identity(base(workshop))
    assert identity(off(workshop)) == plain
    kinds = [sft, two, second_on, both_on, merged, merged_and_off, scaled, one_layer_off, mixed, compiled]
    kinds += [partial(fresh, config=config, seed=seed) for config in VIRTUAL.values() for seed in (0, 1)]
    found = [identity(make(workshop)) for make in kinds]
    assert found == [identity(make(workshop)) for make in kinds]
    # An adapter that is off changes nothing, so `two` is `sft`
    assert found[0] == found[1]
    assert len({plain, *found}) == len(kinds)
    changed = sft(workshop)
    changed.get_base_model().model.layers[1].self_attn.q_proj.lora_B["default"].weight.data[0, 0] += 1
    assert identity(changed) != found[0]


# Errors


def test_a_reference_that_wraps_the_policys_base_is_an_error(workshop, tmp_path):
    shared = base(workshop)
    policy = PeftModel.from_pretrained(shared, workshop.adapter("untied"), is_trainable=True)
    with pytest.warns(UserWarning, match="multiple adapters|second time"):
        reference = PeftModel.from_pretrained(shared, workshop.adapter("untied"))
    with pytest.raises(ValueError, match="`ref_model` and `model` wrap the same base model"):
        trainer(workshop, tmp_path, policy=policy, ref_model=reference)


@pytest.mark.parametrize("make", [sft, lambda x: AutoModelForCausalLM.from_pretrained(x.model("tied"))])
def test_a_reference_with_other_parameters_cannot_follow_the_policy(make, workshop, tmp_path):
    with pytest.raises(ValueError, match=r"`sync_ref_model=True` needs a `ref_model` with the parameters of `model`"):
        trainer(workshop, tmp_path, policy=base(workshop), ref_model=make(workshop), sync_ref_model=True)


def test_a_reference_with_the_policys_parameters_follows_it(workshop, tmp_path):
    config = {"ref_model": REFERENCE_SEED, "sync_ref_model": True, "ref_model_sync_steps": 1}
    stock, ours = (rewards(trainer(workshop, tmp_path, library, **config))[0] for library in (trl, trl_ext))
    assert_equal_rewards(ours, stock)


def test_a_mixed_model_cannot_be_trained(workshop, tmp_path):
    with pytest.raises(TypeError, match="`model` of `DPOTrainer` is a `PeftMixedModel`"):
        trainer(workshop, tmp_path, policy=mixed(workshop), data=preferences(4, 1))
