"""References that DPO's store cannot identify run in every pass or are stored for one run, with stock's values."""

import random
import types

import numpy as np
import pytest
import torch
import trl
from accelerate import dispatch_model
from peft import PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

import trl_ext
from reference_runs import logged, trainer, with_values
from tiny import _SHAPE, _WORD_IDS, let_transformers_add_adapters, lora_config, preferences, word_tokenizer
from token_counts import counted


def saved(folder, config):
    """Return the path of a new model with this configuration."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return str(folder)


def passes(subject):
    with counted() as tokens:
        subject.train()
    return len(tokens.without)


def reason(subject):
    return " ".join(subject.explain()["reference"].reason.split())


def test_noise_in_the_embeddings_is_drawn_in_every_pass(workshop, tmp_path):
    noisy = {"neftune_noise_alpha": 5.0, "num_train_epochs": 2}
    subject = trainer(workshop, tmp_path, peft_config=lora_config(), **noisy)
    assert passes(subject) == 6
    assert "neftune_noise_alpha" in reason(subject)
    assert trainer(workshop, tmp_path, **noisy).explain()["reference"].action == "reuse"  # a separate model


def test_jitter_of_a_router_is_drawn_in_every_pass(workshop, tmp_path):
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
    config = MixtralConfig(**{**_SHAPE, **_WORD_IDS, **experts, "router_jitter_noise": 0.3})
    policy = saved(tmp_path / "model", config)
    subject = trainer(workshop, tmp_path, policy=policy, peft_config=lora_config(target_modules=["q_proj"]))
    assert "two passes can differ" in reason(subject)
    assert subject.explain()["reference"].action == "run"


@pytest.mark.parametrize("name", ["bf16_full_eval", "fp16_full_eval"])
def test_a_policy_that_evaluation_casts_is_not_stored(name, workshop, tmp_path):
    lora = {"peft_config": lora_config(), name: True}
    subject = trainer(workshop, tmp_path, **lora)
    assert subject.explain()["reference"].action == "run"
    assert f"`{name}` casts the policy" in reason(subject)
    beforehand = reason(trainer(workshop, tmp_path, precompute_ref_log_probs=True, **lora))
    assert f"kept in memory, for this run only, because `{name}`" in beforehand
    assert trainer(workshop, tmp_path, **{name: True}).explain()["reference"].action == "reuse"


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_positions_that_depend_on_the_longest_row_are_not_stored(kind, workshop, tmp_path):
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 12}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [8.0] * 4}
    config = LlamaConfig(
        **{**_SHAPE, **_WORD_IDS, "max_position_embeddings": 12 if kind == "dynamic" else 48, "rope_parameters": rope}
    )
    still = {"learning_rate": 1e-9, "num_train_epochs": 2, "per_device_train_batch_size": 2}
    subject = trainer(workshop, tmp_path, policy=saved(tmp_path / "model", config), **still)
    assert passes(subject) == 12
    assert kind in reason(subject)
    # The policy is the reference
    assert logged(subject, "rewards/margins") == pytest.approx([0.0] * 12, abs=1e-5)


def adapter_of_transformers(workshop, folder, seed):
    torch.manual_seed(seed)
    base = AutoModelForCausalLM.from_pretrained(workshop.model("untied"))
    get_peft_model(base, lora_config(init_lora_weights=False)).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder)


def test_references_with_other_adapters_of_transformers_have_other_values(workshop, tmp_path):
    for seed in (1, 2):
        logs = []
        for library in (trl, trl_ext):
            reference = adapter_of_transformers(workshop, tmp_path / str(seed), seed)
            subject = trainer(workshop, tmp_path, library, ref_model=reference)
            assert passes(subject) == 3
            logs.append(logged(subject, "rewards/margins"))
        assert logs[1] == pytest.approx(logs[0], abs=1e-4)


def test_an_adapter_of_transformers_is_removed_in_training(workshop, tmp_path, monkeypatch):
    let_transformers_add_adapters(monkeypatch)
    policy = AutoModelForCausalLM.from_pretrained(workshop.model("untied"))
    policy.add_adapter(lora_config())
    subject = trainer(workshop, tmp_path, policy=policy, precompute_ref_log_probs=True)
    assert subject.plan.gone_in_training
    new = trainer(workshop, tmp_path, trl, data=preferences(4, seed=9)).train_dataset
    subject.train()
    with pytest.raises(ValueError, match="the reference is gone"):
        subject.predict(new)


@pytest.mark.parametrize("before", ["train", "evaluate"])
def test_a_reference_adapter_that_is_loaded_later_is_another_reference(before, workshop, tmp_path):
    adapter_of_transformers(workshop, tmp_path / "late", seed=3)
    data = {"eval_dataset": preferences(8, 2)}
    logs = []
    for library in (trl, trl_ext):
        subject = trainer(workshop, tmp_path, library, peft_config=lora_config(), **data)
        if before == "evaluate":
            subject.train()
            subject.evaluate()
        subject.model.load_adapter(str(tmp_path / "late"), "ref")
        if before == "train":
            subject.train()
        subject.evaluate()
        logs.append(logged(subject, "rewards/margins") + logged(subject, "eval_rewards/margins"))
    assert logs[1] == pytest.approx(logs[0], abs=1e-4)
    assert 'the frozen adapter "ref"' in reason(subject)
    # Nothing was stored under the identity of the base model
    after, stock = (trainer(workshop, tmp_path, x, peft_config=lora_config(), **data) for x in (trl_ext, trl))
    assert after.evaluate()["eval_rewards/margins"] == pytest.approx(stock.evaluate()["eval_rewards/margins"], abs=1e-5)


def test_a_reference_adapter_that_is_loaded_after_precomputing_is_an_error(workshop, tmp_path):
    adapter_of_transformers(workshop, tmp_path / "late", seed=3)
    subject = trainer(workshop, tmp_path, peft_config=lora_config(), precompute_ref_log_probs=True)
    subject.model.load_adapter(str(tmp_path / "late"), "ref")
    with pytest.raises(ValueError, match='an adapter named "ref" was loaded or deleted'):
        subject.train()


def test_an_offloaded_reference_is_kept_in_memory_only(workshop, tmp_path):
    parts = ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head")
    places = {**dict.fromkeys(parts, "cpu"), "model.layers.1": "disk"}
    logs = []
    for library in (trl, trl_ext):
        reference = AutoModelForCausalLM.from_pretrained(workshop.model("untied"))
        reference = dispatch_model(reference, places, main_device="cpu", offload_dir=str(tmp_path / "offloaded"))
        subject = trainer(workshop, tmp_path, library, ref_model=reference, num_train_epochs=2)
        assert passes(subject) == (6 if library is trl else 3)
        logs.append(logged(subject, "rewards/margins"))
    assert logs[1] == pytest.approx(logs[0], abs=1e-5)
    assert "kept in memory, for this run only, because `" in reason(subject)
    assert "is on the meta device, so the reference's weights cannot be hashed" in reason(subject)
    assert not (tmp_path / "datasets" / "trl_ext_reference_log_probs").exists()


# Things that a user may do with a trainer


class Overrides:
    def compute_ref_log_probs(self, model, inputs):
        raise NotImplementedError


def test_an_override_that_has_no_effect_is_an_error(workshop, tmp_path):
    class Library:
        DPOConfig = trl_ext.DPOConfig
        DPOTrainer = type("Mine", (Overrides, trl_ext.DPOTrainer), {})

    with pytest.raises(ValueError, match=r"does not call `Mine.compute_ref_log_probs`"):
        trainer(workshop, tmp_path, Library, precompute_ref_log_probs=True)
    trainer(workshop, tmp_path, Library, precompute_ref_log_probs=True, data=with_values(8, 1))
    trainer(workshop, tmp_path, Library)  # TRL does not call it there either


def test_a_function_in_place_of_trls_that_has_no_effect_is_an_error(workshop, tmp_path, monkeypatch):
    monkeypatch.setattr(trl.DPOTrainer, "compute_ref_log_probs", Overrides.compute_ref_log_probs)
    with pytest.raises(ValueError, match=r"does not call `DPOTrainer.compute_ref_log_probs`"):
        trainer(workshop, tmp_path, precompute_ref_log_probs=True)


def test_an_override_that_comes_before_other_data_is_evaluated_is_an_error(workshop, tmp_path):
    subject = trainer(workshop, tmp_path, precompute_ref_log_probs=True)
    subject.compute_ref_log_probs = types.MethodType(Overrides.compute_ref_log_probs, subject)
    with pytest.raises(ValueError, match=r"does not call `DPOTrainer.compute_ref_log_probs`"):
        subject.evaluate(preferences(4, seed=9))


@pytest.mark.parametrize("loss_type", ["sigmoid", "discopop", "exo_pair"])
def test_an_override_that_trls_loss_does_not_call_is_not_called(loss_type, workshop, tmp_path, monkeypatch):
    monkeypatch.setattr(trl.DPOTrainer, "compute_ref_log_probs", Overrides.compute_ref_log_probs)
    subject = trainer(workshop, tmp_path, loss_type=loss_type, label_smoothing=0.1)
    assert len(subject.train().metrics) > 0


class Strict(trl.trainer.dpo_trainer.DataCollatorForPreference):
    """Fails on columns that the dataloader removes, and draws random numbers."""

    def torch_call(self, examples):
        assert set(examples[0]) <= {"prompt_ids", "chosen_ids", "rejected_ids"}
        _ = torch.rand(1), np.random.rand(), random.random()
        return super().torch_call(examples)


def test_rows_are_looked_up_as_the_dataloader_returns_them(workshop, tmp_path):
    subject = trainer(workshop, tmp_path, data_collator=Strict(pad_token_id=0), num_train_epochs=2)
    subject.train()
    assert subject.ref_model is None
    kept = trainer(workshop, tmp_path, data_collator=Strict(pad_token_id=0))
    kept.train()
    before = torch.get_rng_state(), np.random.get_state()[2], random.getstate()
    kept._release_reference()
    assert kept.ref_model is None
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[2], random.getstate()) == before[1:]


def test_an_evaluation_set_may_be_set_after_the_trainer_is_built(workshop, tmp_path):
    subject = trainer(workshop, tmp_path, num_train_epochs=2, eval_dataset=None)
    subject.eval_dataset = subject.train_dataset.select(range(4))
    subject.train()
    assert subject.ref_model is None
    assert logged(subject, "skipped/passes") == [0, 0, 0, 1, 1, 1]


def test_frozen_parameters_stay_frozen(workshop, tmp_path):
    def policy():
        base = AutoModelForCausalLM.from_pretrained(workshop.model("untied"))
        model = PeftModel.from_pretrained(base, workshop.adapter("untied"), is_trainable=True)
        for name, param in model.named_parameters():
            if "layers.0" in name:
                param.requires_grad_(False)
        return model

    def trained(model):
        return [name for name, param in model.named_parameters() if param.requires_grad]

    norms = []
    for library in (trl, trl_ext):
        subject = trainer(workshop, tmp_path, library, policy=policy(), max_grad_norm=0.01)
        before = trained(subject.model)
        subject.train()
        norms.append(logged(subject, "grad_norm")[0])
    assert trained(subject.model) == before
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)  # stock unfreezes them in the first reference pass
    failing = {"input_ids": torch.full((2, 4), 10**6), "completion_mask": torch.ones(2, 4)}
    with pytest.raises(IndexError):
        subject._source.run_pass(failing)
    assert trained(subject.model) == before


def test_fixed_values_do_not_go_with_a_reference_that_moves(workshop, tmp_path):
    with pytest.raises(
        ValueError, match=r"`sync_ref_model=True` changes the reference, .* `train_dataset` do not change"
    ):
        trainer(workshop, tmp_path, data=with_values(12, 1), sync_ref_model=True, ref_model_sync_steps=1)


def test_the_users_values_are_used_while_other_rows_need_a_pass(workshop, tmp_path):
    subject = trainer(workshop, tmp_path, data=with_values(12, 1), reference_store="off")
    assert passes(subject) == 0
    assert logged(subject, "rewards/chosen") == pytest.approx([0.1 * (x + 20) for x in logged(subject, "logps/chosen")])


def test_a_hosted_reference_in_the_policys_memory_is_an_error(workshop, tmp_path):
    policy, reference = (AutoModelForCausalLM.from_pretrained(workshop.model("untied")) for _ in range(2))
    reference.model.layers[0] = policy.model.layers[0]
    with pytest.raises(ValueError, match=r"the policy shares them \(`model.layers.0"):
        trainer(workshop, tmp_path, policy=policy, ref_model=reference, reference_device="cpu")
