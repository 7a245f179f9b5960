"""SFT, KTO, RLOO, distillation and reward models: the cases in which training with ours must equal TRL's."""

from collections.abc import Iterator
from typing import Any

from drop_in_cases import Case

SETUPS = ("full", "lora")
SFT_LOSSES = ("nll", "dft")
KTO_LOSSES = ("kto", "apo_zero_unpaired")
KTO_SETUPS = ("full", "lora", "ref_adapter", "ref_model")


def _case(trainer: str, name: str, setup: str = "full", model: str = "tied", **config: Any) -> Case:
    keys = ("fast", "steps", "learning_rate", "lora", "streaming", "rewards", "ours", "prompts", "rollout")
    kwargs = {key: config.pop(key) for key in keys if key in config}
    if trainer == "rloo":
        kwargs = {"rollout": "generate", "rewards": ("id",), "learning_rate": 0.02, **kwargs}
    if trainer == "distillation":
        kwargs = {"rollout": "generate", "learning_rate": 0.5, **kwargs}
    return Case(f"{trainer}-{name}", trainer, setup, model, config, **kwargs)


def _sft() -> Iterator[Case]:
    for loss in SFT_LOSSES:
        for setup in SETUPS:
            yield _case("sft", f"{loss}-{setup}", setup, loss_type=loss)
            yield _case("sft", f"{loss}-{setup}-text", setup, loss_type=loss, form="text", fast=setup == "full")
    yield _case("sft", "packing", form="text", packing=True, max_length=24)
    yield _case(
        "sft", "packing-split", form="text", packing=True, packing_strategy="bfd_split", max_length=8, fast=False
    )
    yield _case("sft", "packing-lora", "lora", packing=True, max_length=24, fast=False)
    yield _case("sft", "packing-wrapped", form="text", packing=True, packing_strategy="wrapped", max_length=24)
    yield _case(
        "sft", "packing-evaluation", form="text", packing=True, eval_packing=False, max_length=24, **_EVALUATION
    )
    yield _case("sft", "padding_free", padding_free=True, max_length=None)
    yield _case("sft", "whole-rows", completion_only_loss=False)
    yield _case("sft", "label_smoothing", label_smoothing_factor=0.1)
    smoothed = {"label_smoothing_factor": 0.3, "gradient_accumulation_steps": 2}
    yield _case("sft", "label_smoothing-experts", "full", "experts", **smoothed)
    yield _case("sft", "label_smoothing-softcap", "lora", "softcap", **smoothed, fast=False)
    yield _case("sft", "label_smoothing-mean", "lora", average_tokens_across_devices=False, **smoothed, fast=False)
    yield _case("sft", "label_smoothing-evaluation", label_smoothing_factor=0.1, **_EVALUATION)
    yield _case("sft", "label_smoothing-packing", packing=True, max_length=24, **smoothed, fast=False)
    yield _case("sft", "label_smoothing-dft", label_smoothing_factor=0.1, loss_type="dft", fast=False)
    yield _case("sft", "accumulation", "lora", gradient_accumulation_steps=3, per_device_train_batch_size=2)
    yield _case("sft", "accumulation-mean", gradient_accumulation_steps=2, average_tokens_across_devices=False)
    yield _case("sft", "evaluation", **_EVALUATION)
    yield _case("sft", "max_length", max_length=6)
    yield _case("sft", "pad_to_multiple_of", pad_to_multiple_of=8, fast=False)
    yield _case("sft", "chat", "full", "chat")
    yield _case("sft", "chat-assistant", "lora", "chat", assistant_only_loss=False, fast=False)
    yield _case("sft", "streaming", "lora", streaming=True, fast=False)
    yield _case("sft", "clipped-gradient", max_grad_norm=0.05, learning_rate=0.5, fast=False)
    yield _case("sft", "neftune", neftune_noise_alpha=5.0)
    yield from _models("sft")


def _kto() -> Iterator[Case]:
    for loss in KTO_LOSSES:
        for setup in KTO_SETUPS:
            fast = (loss == "kto") == (setup in ("full", "lora"))
            yield _case("kto", f"{loss}-{setup}", setup, loss_type=loss, learning_rate=0.5, fast=fast)
    yield _case("kto", "precompute", precompute_ref_log_probs=True, steps=4)
    precompute = {"precompute_ref_log_probs": True, "fast": False}
    yield _case("kto", "precompute-apo", "lora", loss_type="apo_zero_unpaired", **precompute)
    yield _case("kto", "precompute-eval", "lora", **precompute, **_EVALUATION)
    yield _case("kto", "sync", sync_ref_model=True, ref_model_sync_steps=1, ref_model_mixup_alpha=0.3, steps=3)
    yield _case("kto", "weights", "ref_model", beta=0.5, desirable_weight=2.0, undesirable_weight=0.5, steps=3)
    yield _case("kto", "accumulation", "lora", gradient_accumulation_steps=3, per_device_train_batch_size=2)
    yield _case("kto", "evaluation", **_EVALUATION)
    yield _case("kto", "epochs", steps=7)
    yield _case("kto", "store-off", ours={"reference_store": "off"}, fast=False)
    yield _case("kto", "max_length", max_length=6)
    yield _case("kto", "pad_to_multiple_of", pad_to_multiple_of=8, fast=False)
    yield _case("kto", "chat", "full", "chat")
    yield _case("kto", "neftune", "ref_model", neftune_noise_alpha=5.0)
    yield from _models("kto")


def _rloo() -> Iterator[Case]:
    for setup in (*SETUPS, "ref_adapter"):
        yield _case("rloo", f"defaults-{setup}", setup)
        yield _case("rloo", f"without-kl-{setup}", setup, beta=0.0, fast=setup != "ref_adapter")
        yield _case("rloo", f"iterations-{setup}", setup, num_iterations=2, fast=setup == "full")
    yield _case(
        "rloo", "iterations-without-kl", beta=0.0, num_iterations=2, epsilon=0.01, epsilon_high=0.02, learning_rate=0.5
    )
    yield _case("rloo", "steps_per_generation", beta=0.0, steps_per_generation=2, steps=3)
    yield _case("rloo", "accumulation", "lora", gradient_accumulation_steps=2, steps=3)
    yield _case("rloo", "accumulation-without-kl", beta=0.0, gradient_accumulation_steps=2, steps=3)
    yield _case("rloo", "grouped", beta=0.0, gradient_accumulation_steps=2, steps=3, ours={})
    yield _case("rloo", "half-dead", beta=0.0, rewards=("half_dead",))
    yield _case(
        "rloo", "half-dead-accumulation", "lora", beta=0.0, rewards=("half_dead",), gradient_accumulation_steps=2
    )
    yield _case("rloo", "half-dead-normalized", beta=0.0, rewards=("half_dead",), normalize_advantages=True, fast=False)
    yield _case("rloo", "normalized", normalize_advantages=True)
    yield _case("rloo", "clipped-rewards", reward_clip_range=(0.1, 0.6), fast=False)
    yield _case("rloo", "rewards", rewards=("id", "short"), reward_weights=[1.0, 0.5], fast=False)
    yield _case("rloo", "masked", mask_truncated_completions=True, max_completion_length=16, temperature=2.0)
    yield _case("rloo", "sync", sync_ref_model=True, ref_model_sync_steps=1, ref_model_mixup_alpha=0.3, steps=3)
    yield _case("rloo", "evaluation", "lora", **_EVALUATION)
    yield _case("rloo", "evaluation-without-kl", beta=0.0, fast=False, **_EVALUATION)
    yield _case("rloo", "temperature", "lora", temperature=1.7)
    yield _case("rloo", "pad_to_multiple_of", pad_to_multiple_of=8, fast=False)
    yield _case("rloo", "chat", "full", "chat", fast=False)
    yield from _models("rloo")


def _distillation() -> Iterator[Case]:
    for setup in (*SETUPS, "lora_of_base"):
        for beta in (0.0, 0.3, 1.0):
            fast = (setup == "full") == (beta == 0.3)
            yield _case("distillation", f"beta-{beta}-{setup}", setup, beta=beta, fast=fast)
    # What training changes outside of the adapter, the teacher must not follow
    biases = {"lora": {"bias": "all"}, "learning_rate": 0.1}
    yield _case("distillation", "biases-lora_of_base", "lora_of_base", "head_bias", **biases)
    saved = {"lora": {"modules_to_save": ["lm_head"]}, "fast": False}
    yield _case("distillation", "head-saved-lora_of_base", "lora_of_base", "untied", **saved)
    yield _case("distillation", "checkpointing-lora_of_base", "lora_of_base", gradient_checkpointing=True)
    yield _case("distillation", "accumulation", "lora", gradient_accumulation_steps=3, per_device_train_batch_size=2)
    yield _case("distillation", "evaluation", **_EVALUATION)
    yield _case("distillation", "temperature", temperature=1.7, beta=0.5)
    yield _case("distillation", "pad_to_multiple_of", pad_to_multiple_of=8, fast=False)
    yield _case("distillation", "chat", "full", "chat")
    yield _case("distillation", "tools", "full", "chat", rollout="tool_call", max_completion_length=16, fast=False)
    yield _case("distillation", "dropout", "lora", lora={"lora_dropout": 0.2}, disable_dropout=True)
    yield _case("distillation", "streaming", streaming=True, fast=False)
    yield _case("distillation", "sampling", top_k=5, top_p=0.9, min_p=0.01, repetition_penalty=1.1, fast=False)
    yield _case("distillation", "generation_kwargs", generation_kwargs={"do_sample": False}, fast=False)
    yield _case("distillation", "cache", cache_implementation="static", fast=False)
    yield _case("distillation", "in-order", shuffle_dataset=False, fast=False)
    yield _case("distillation", "checkpointing-reentrant", **_REENTRANT)
    yield _case("distillation", "checkpointing-reentrant-lora", "lora", **_REENTRANT, fast=False)
    for case in _models("distillation"):
        # As in TRL, prompts of virtual tokens are not supported
        if case.setup not in ("prompt_tuning", "prefix_tuning"):
            yield case


def _reward() -> Iterator[Case]:
    for setup in SETUPS:
        yield _case("reward", f"defaults-{setup}", setup)
        yield _case("reward", f"margins-{setup}", setup, margins=True, fast=setup == "full")
        yield _case("reward", f"centered-{setup}", setup, center_rewards_coefficient=0.1, fast=setup == "lora")
        for reentrant in (False, True):
            checkpoints = {
                "gradient_checkpointing": True,
                "gradient_checkpointing_kwargs": {"use_reentrant": reentrant},
            }
            name = f"checkpointing-{'reentrant-' * reentrant}{setup}"
            yield _case("reward", name, setup, **checkpoints, fast=reentrant == (setup == "lora"))
    yield _case(
        "reward", "all-options", margins=True, center_rewards_coefficient=0.1, pad_to_multiple_of=8, max_length=12
    )
    yield _case("reward", "padded-with-end", margins=True, padding="</s>", **_EVALUATION)
    yield _case("reward", "padded-with-word", "lora", padding="w3")  # which rows have, too
    yield _case("reward", "end", eos_token="w5", fast=False)
    yield _case("reward", "max_length", max_length=12)
    yield _case("reward", "without-max_length", max_length=None, fast=False)
    yield _case("reward", "pad_to_multiple_of", pad_to_multiple_of=8)
    yield _case("reward", "dataset_num_proc", dataset_num_proc=1, fast=False)
    yield _case("reward", "accumulation", "lora", gradient_accumulation_steps=3, per_device_train_batch_size=2)
    yield _case("reward", "evaluation", "lora", **_EVALUATION)
    yield _case("reward", "evaluation-margins", margins=True, **_EVALUATION, fast=False)
    yield _case("reward", "chat", "full", "chat")
    yield _case("reward", "chat-lora", "lora", "chat", center_rewards_coefficient=0.01, fast=False)
    yield _case("reward", "streaming", "lora", streaming=True)
    yield _case("reward", "neftune", neftune_noise_alpha=5.0)
    yield _case("reward", "clipped-gradient", max_grad_norm=0.05, learning_rate=0.5, fast=False)
    yield _case("reward", "score-saved", "lora", "untied", lora={"modules_to_save": ["score"]})
    yield _case("reward", "score-frozen", "lora", "untied", lora={"task_type": None})
    yield _case("reward", "dora", "lora", lora={"use_dora": True}, fast=False)
    # GPT-J's class has a forward of its own
    for model in ("untied", "softcap", "head_bias", "head_bias_gptj", "experts"):
        yield _case("reward", model, "full", model, fast=model in ("softcap", "head_bias_gptj"))
    yield _case("reward", "experts-lora", "lora", "experts", lora={"target_modules": ["q_proj", "v_proj"]}, fast=False)
    yield _case("reward", "prompt_tuning", "prompt_tuning", learning_rate=1.0)


def _models(trainer: str) -> Iterator[Case]:
    for model in ("untied", "softcap", "logits_scaling", "logit_scale", "head_bias", "wide_vocab", "experts"):
        yield _case(trainer, model, "full", model, fast=model == "softcap")
    lora = {"target_modules": ["q_proj", "v_proj"]}
    yield _case(trainer, "experts-lora", "lora", "experts", lora=lora, fast=False)
    yield _case(trainer, "prompt_tuning", "prompt_tuning", learning_rate=1.0)
    yield _case(trainer, "prefix_tuning", "prefix_tuning", learning_rate=1.0, fast=False)
    yield _case(trainer, "checkpointing", gradient_checkpointing=True)
    yield _case(trainer, "checkpointing-lora", "lora", "untied", gradient_checkpointing=True, fast=False)
    yield _case(trainer, "head-saved", "lora", "untied", lora={"modules_to_save": ["lm_head"]}, fast=False)
    yield _case(trainer, "dora", "lora", lora={"use_dora": True}, fast=False)


_REENTRANT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
_EVALUATION = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}

CASES: dict[str, Case] = {case.name: case for case in (*_sft(), *_kto(), *_rloo(), *_distillation(), *_reward())}
