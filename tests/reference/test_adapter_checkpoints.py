"""Checkpoints of adapters that are policy or reference: saved, loaded, merged, resumed, and loaded as the best."""

from pathlib import Path

import pytest
import torch
from peft import PeftModel, PromptTuningConfig
from transformers import AutoModelForCausalLM

import trl_ext
from adapter_cases import base, build, drawn, ia3_config, loaded
from tiny import lora_config, preferences

# How the policy is made, the arguments of its trainer, and the folder of PEFT's adapter
ROWS = {
    "fresh": (lambda *_: None, {"peft_config": lora_config()}, "."),
    "bias": (lambda *_: None, {"peft_config": lora_config(bias="all"), "model": "head_bias"}, "."),
    "default": (lambda workshop, folder: loaded(workshop, folder, "default"), {}, "."),
    "any-name": (lambda workshop, folder: loaded(workshop, folder, "policy"), {}, "policy"),
    "two": (
        lambda workshop, folder: loaded(workshop, folder, "default", "policy"),
        {"policy_adapter_name": "policy", "ref_adapter_name": "default"},
        "policy",
    ),
    "ia3": (lambda workshop, folder: drawn(base(workshop), ia3_config(), 0), {}, "."),
    "moving": (lambda *_: None, {"peft_config": lora_config(), "sync_ref_model": True}, "."),
    "moving-any-name": (
        lambda workshop, folder: loaded(workshop, folder, "policy"),
        {"sync_ref_model": True},
        "policy",
    ),
    "moving-tokens": (
        lambda workshop, folder: drawn(
            base(workshop), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), 0
        ),
        {"sync_ref_model": True, "learning_rate": 3.0},
        ".",
    ),
}
FAST = {"two", "moving"}
EVERY = [pytest.param(row, marks=[] if row in FAST else pytest.mark.slow) for row in ROWS]
SYNC = {"ref_model_mixup_alpha": 0.6, "ref_model_sync_steps": 1}


def made(row, kind, workshop, folder, **config):
    policy, options, _ = ROWS[row]
    return build(kind, trl_ext, workshop, folder, policy(workshop, folder), **{**SYNC, **options, **config})


def logits(model, workshop):
    ids = torch.arange(3, 11)[None]
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


def copied(trainer):
    return {name: copy.clone() for name, copy in trainer._reference_weights.policy_reference.copies.items()}


def trained(trainer):
    return {name: param.detach().clone() for name, param in trainer.model.named_parameters() if param.requires_grad}


@pytest.mark.parametrize("kind", ["dpo", pytest.param("grpo", marks=pytest.mark.slow)])
@pytest.mark.parametrize("row", EVERY)
def test_a_resumed_run_ends_like_an_uninterrupted_one(row, kind, workshop, tmp_path):
    through = made(row, kind, workshop, tmp_path, save_strategy="steps", save_steps=2)
    through.train()
    resumed = made(row, kind, workshop, tmp_path, max_steps=4)
    if resumed._reference_weights.policy_reference.moves:  # whatever the values are now
        for copy in resumed._reference_weights.policy_reference.copies.values():
            copy.add_(1.0)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert resumed.state.global_step == 4
    for of in (trained, copied):
        ends, want = of(resumed), of(through)
        assert ends.keys() == want.keys()
        for name in want:
            torch.testing.assert_close(ends[name], want[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("row", EVERY)
def test_what_is_saved_is_the_policy(row, workshop, tmp_path):
    trainer = made(row, "dpo", workshop, tmp_path, save_strategy="steps", save_steps=4)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    assert not list((tmp_path / "saved").rglob("reference_weights*"))
    want = logits(trainer.model, workshop)
    for folder in ("saved", "run/checkpoint-4"):
        place = tmp_path / folder / ROWS[row][2]
        again = PeftModel.from_pretrained(base(workshop, ROWS[row][1].get("model", "untied")), place)
        torch.testing.assert_close(logits(again, workshop), want, rtol=1e-5, atol=1e-5)
    if row != "moving-tokens":  # virtual tokens cannot be merged
        whole = trainer.model.merge_and_unload()
        torch.testing.assert_close(logits(whole, workshop), want, rtol=1e-4, atol=1e-4)
        whole.save_pretrained(tmp_path / "merged")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        torch.testing.assert_close(logits(again, workshop), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("row", EVERY)
def test_the_best_checkpoint_is_loaded(row, workshop, tmp_path):
    """The scores are set so that the best is neither the first nor the last."""
    best = {"load_best_model_at_end": True, "save_strategy": "steps", "eval_strategy": "steps"}
    best |= {"save_steps": 1, "eval_steps": 1, "metric_for_best_model": "eval_rewards/accuracies"}
    trainer = made(
        row, "dpo", workshop, tmp_path, eval_dataset=preferences(6, 2), greater_is_better=True, max_steps=3, **best
    )
    seen = {}
    original = trainer.save_model

    def save_model(output_dir=None, _internal_call=False):
        seen[Path(output_dir).name] = trained(trainer)
        original(output_dir, _internal_call)

    trainer.save_model = save_model
    scores = iter([0.5, 0.9, 0.1])
    evaluate = trainer.evaluate

    def scored(*args, **kwargs):
        metrics = evaluate(*args, **kwargs)
        metrics["eval_rewards/accuracies"] = next(scores)
        return metrics

    trainer.evaluate = scored
    trainer.train()
    assert Path(trainer.state.best_model_checkpoint).name == "checkpoint-2"
    ends = trained(trainer)
    for name, want in seen["checkpoint-2"].items():
        assert torch.equal(ends[name], want), name
    assert any(not torch.equal(want, seen["checkpoint-3"][name]) for name, want in seen["checkpoint-2"].items())


def test_a_moving_reference_without_its_state_is_an_error(workshop, tmp_path):
    made("fresh", "dpo", workshop, tmp_path, save_strategy="steps", save_steps=2).train()
    with pytest.raises(ValueError, match=r"checkpoint-2 has no `reference_weights.safetensors`"):
        made("moving", "dpo", workshop, tmp_path).train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))


def test_a_checkpoint_with_the_reference_of_another_model_is_an_error(workshop, tmp_path):
    made("moving", "dpo", workshop, tmp_path, save_strategy="steps", save_steps=2).train()
    other = build(
        "dpo", trl_ext, workshop, tmp_path, None, peft_config=lora_config(bias="lora_only"), sync_ref_model=True, **SYNC
    )
    other._reference_weights.policy_reference.copies["base_model.model.lm_head.weight"] = torch.zeros(1)
    with pytest.raises(ValueError, match=r"`base_model.model.lm_head.weight` is in only one of the two"):
        other.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
