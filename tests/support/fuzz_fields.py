"""The fields that the fuzzer draws, with their values and chances, and those that it does not draw, with the reason.

`FIELDS` is drawn from top to bottom into one dict, so a row may depend on those above it. A name is an argument of
TRL's config or of ours, or a field of `Case`.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import trl

import trl_ext
from drop_in_cases import ATTENTION_ONLY, DPO_LEARNING_RATES, DPO_LOSSES, F_DIVERGENCE_LOSSES, GRPO_LOSSES, Case
from trl_ext.cli.line import class_name

SFT, DPO, KTO, GRPO, RLOO, REWARD = ("sft",), ("dpo",), ("kto",), ("grpo",), ("rloo",), ("reward",)
STORING, GROUPED = DPO + KTO, GRPO + RLOO
ROWS = SFT + STORING + REWARD  # the trainers whose data set is tokenized before training
LANGUAGE_MODELS = SFT + STORING + GROUPED
DISTILLATION = ("distillation",)
ALL = ROWS + GROUPED + DISTILLATION

Drawn = dict[str, Any]  # what has been drawn, by name


@dataclass(frozen=True)
class Row:
    """Fields that are drawn together, or not at all."""

    trainers: tuple[str, ...]
    chance: float
    values: dict[str, Any]  # name -> values, one of which is drawn, or a function that returns them
    when: Callable[[Drawn], Any]


def _(trainers: tuple[str, ...], chance: float, when: Callable[[Drawn], Any] = lambda _: True, **values: Any) -> Row:
    return Row(trainers, chance, values, when)


def _is(name: str, *values: Any) -> Callable[[Drawn], bool]:
    return lambda drawn: drawn.get(name) in values


def _is_short(drawn: Drawn) -> bool:
    """Whether prompts are shorter than the values of `max_length`."""
    return drawn["model"] != "chat"


def _can_stream(drawn: Drawn) -> bool:
    return drawn["steps"] > 0 and "gradient_accumulation_steps" not in drawn and "precompute_ref_log_probs" not in drawn


def _has(name: str) -> Callable[[Drawn], bool]:
    return lambda drawn: bool(drawn.get(name))


def _evaluates(drawn: Drawn) -> bool:
    return "eval_strategy" in drawn


def _is_preference_loss(*names: str) -> Callable[[Drawn], bool]:
    return lambda drawn: not {*names}.isdisjoint(_loss_types(drawn))


def _has_divergence(drawn: Drawn) -> bool:
    return set(_loss_types(drawn)) <= {*F_DIVERGENCE_LOSSES}


def _best_metrics(drawn: Drawn) -> tuple[str | None, ...]:
    if drawn["trainer"] in GROUPED:
        return ("eval_reward", "entropy")  # their loss may be a rounding error
    return ("eval_a_loss", "b_loss") if "eval_sets" in drawn else ("eval_loss", None)


def _loss_types(drawn: Drawn) -> list[str]:
    loss_type = drawn["loss_type"]
    return loss_type if isinstance(loss_type, list) else [loss_type]


_MODELS = (
    "tied",
    "tied",
    "untied",
    "untied",
    "softcap",
    "logits_scaling",
    "logit_scale",
    "head_bias",
    "experts",
    "chat",
)
_CLASSIFIERS = ("tied", "tied", "untied", "softcap", "head_bias", "head_bias_gptj", "experts", "chat")
_LORA = ({}, {}, {"use_dora": True}, {"use_rslora": True}, ATTENTION_ONLY)
_PAIRS = tuple([first, second] for first, second in zip(list(DPO_LOSSES), list(DPO_LOSSES)[3:], strict=False))

FIELDS = (
    # Model and adapter
    _(ALL, 1.0, model=_MODELS),
    _(REWARD, 1.0, model=_CLASSIFIERS),
    _(REWARD, 1.0, setup=("full", "full", "lora", "prompt_tuning")),
    # A hook of a user on the student also changes a teacher that is its base model, so that is not compared
    _(DISTILLATION, 1.0, setup=("full", "full", "lora")),
    _(SFT, 1.0, setup=("full", "full", "lora", "prompt_tuning")),
    _(DPO, 1.0, setup=("full", "lora", "lora", "ref_adapter", "ref_model", "lora_ref_model", "prompt_tuning")),
    _(KTO, 1.0, setup=("full", "lora", "ref_adapter", "ref_model", "prompt_tuning")),
    _(GRPO, 1.0, setup=("full", "full", "lora", "lora", "ref_adapter", "ref_model", "prompt_tuning")),
    _(RLOO, 1.0, setup=("full", "full", "lora", "ref_adapter", "prompt_tuning")),
    _(ALL, 1.0, lambda d: d["setup"].startswith("lora") and d["model"] != "experts", lora=_LORA),
    _(ALL, 1.0, lambda d: d["setup"].startswith("lora") and d["model"] == "experts", lora=(ATTENTION_ONLY,)),
    _(LANGUAGE_MODELS, 0.3, _is("model", "experts"), router_aux_loss_coef=(0.0, 0.5)),
    # What is called, and for how long
    _(
        ALL,
        0.3,
        calls=(("evaluate", "train"), ("train", "evaluate"), ("train", "train"), ("evaluate", "train", "train")),
    ),
    _(ALL, 1.0, steps=(2, 3, 4)),
    _(ALL, 0.2, steps=(-1,), num_train_epochs=(1, 2, 1.5)),
    _(ROWS, 0.5, rows=(9, 10, 11, 13)),
    _(GROUPED + DISTILLATION, 1.0, prompts=(24, 24, 11, 13)),
    _(GROUPED + DISTILLATION, 1.0, _is("steps", -1), prompts=(8, 9)),
    # Steps
    _(ALL, 0.3, gradient_accumulation_steps=(2, 3)),
    _(ALL, 0.2, gradient_checkpointing=(True,)),
    # With adapters, the inputs of a block have no gradient, and torch would stop there
    _(
        ALL,
        0.5,
        lambda d: d.get("gradient_checkpointing") and d["setup"] in ("full", "ref_model"),
        gradient_checkpointing_kwargs=({"use_reentrant": True},),
    ),
    _(ALL, 0.2, max_grad_norm=(0.05, 1.0)),
    _(ALL, 0.2, weight_decay=(0.1,)),
    _(ALL, 0.2, lr_scheduler_type=("linear", "cosine")),
    _(ALL, 0.05, lr_scheduler_type=("cosine_with_min_lr",), lr_scheduler_kwargs=({"min_lr": 1e-3},)),
    _(ALL, 0.2, warmup_steps=(1, 2, 0.5)),
    # Its default epsilon would turn gradients that are rounding errors into full steps
    _(
        ALL,
        0.2,
        optim=("adamw_torch", "adamw_torch_fused"),
        adam_epsilon=(1e-4,),
        adam_beta1=(0.9, 0.5),
        adam_beta2=(0.999, 0.9),
    ),
    _(ALL, 0.15, neftune_noise_alpha=(5.0, 20.0)),
    _(ALL, 0.1, data_seed=(3,)),
    _(ALL, 0.1, average_tokens_across_devices=(False,)),
    _(ALL, 0.1, dataloader_drop_last=(True,)),
    _(ROWS, 0.1, remove_unused_columns=(False,)),
    _(SFT + DPO, 0.1, train_sampling_strategy=("sequential",)),
    _(ALL, 0.2, pad_to_multiple_of=(None, 4, 8)),
    _(ALL, 0.05, use_cache=(True,)),
    # Logs and evaluations
    _(ALL, 0.3, logging_steps=(2, 3)),
    _(ALL, 0.1, logging_first_step=(True,)),
    _(ALL, 0.05, logging_strategy=("epoch",)),
    _(ALL, 0.1, logging_nan_inf_filter=(False,)),
    _(ROWS, 0.1, include_num_input_tokens_seen=("all", "non_padding")),
    _(ALL, 0.3, eval_strategy=("steps",), eval_steps=(1, 2)),
    _(ALL, 0.05, eval_strategy=("epoch",)),
    _(ROWS, 0.5, _evaluates, per_device_eval_batch_size=(2, 3, 4)),
    _(ALL, 0.3, _evaluates, eval_sets=(("a", "b"),)),
    _(ALL, 0.2, _evaluates, eval_on_start=(True,)),
    _(ALL, 0.1, _evaluates, eval_delay=(1,)),
    _(ROWS, 0.1, _evaluates, eval_accumulation_steps=(1,)),
    _(ROWS, 0.1, _evaluates, eval_do_concat_batches=(False,)),
    _(ALL, 0.1, _evaluates, prediction_loss_only=(True,)),
    _(
        # Of a model with experts, transformers loads all but the experts
        ALL,
        0.4,
        lambda d: d.get("eval_strategy") == "steps" and d["model"] != "experts",
        load_best_model_at_end=(True,),
        save_strategy=("steps",),
        save_steps=(2,),
        eval_steps=(1, 2),
        metric_for_best_model=_best_metrics,
        greater_is_better=(True, False),
        save_total_limit=(1, None),
        save_only_model=(True, False),
    ),
    # SFT
    _(SFT, 1.0, loss_type=("nll", "nll", "dft")),
    _(SFT, 0.4, lambda d: d["model"] != "chat", form=("text",)),
    _(SFT, 0.2, label_smoothing_factor=(0.1,)),
    _(SFT, 0.2, _is_short, max_length=(6, 8, 11)),
    _(SFT, 0.3, _is_short, packing=(True,), packing_strategy=("bfd", "bfd_split", "wrapped"), max_length=(16, 24)),
    _(SFT, 0.3, _has("packing"), eval_packing=(False, True)),
    _(SFT, 0.1, lambda d: not d.get("packing"), padding_free=(True,), max_length=(None,)),
    _(SFT, 0.2, lambda d: "form" not in d, completion_only_loss=(False,)),
    _(SFT, 0.1, _is("model", "chat"), assistant_only_loss=(True,)),
    # DPO
    _(DPO, 1.0, loss_type=tuple(DPO_LOSSES)),
    _(DPO, 0.2, loss_type=_PAIRS, loss_weights=([0.7, 0.2], None)),
    _(DPO, 0.3, _has_divergence, f_divergence_type=("forward_kl", "js_divergence")),
    _(
        DPO,
        0.1,
        _has_divergence,
        f_divergence_type=("alpha_divergence",),
        f_alpha_divergence_coef=(0.5, 0.8, 1.0),
    ),
    _(DPO, 0.15, label_smoothing=(0.1, 0.2)),
    _(DPO, 1.0, _is_preference_loss("exo_pair", "robust"), label_smoothing=(0.1, 0.2)),
    _(DPO, 0.1, discopop_tau=(0.5,)),
    _(DPO, 0.2, ld_alpha=(0.0, 0.5)),
    _(DPO, 0.15, lambda d: not _is_preference_loss("aot", "aot_unpaired")(d), use_weighting=(True,)),
    _(DPO, 0.2, _is_short, max_length=(8, 11, None)),
    _(DPO, 0.15, truncation_mode=("keep_end",)),
    # KTO
    _(KTO, 1.0, loss_type=("kto", "kto", "apo_zero_unpaired")),
    _(KTO, 0.3, _is("loss_type", "apo_zero_unpaired"), train_sampling_strategy=("random",)),
    _(KTO, 0.2, desirable_weight=(0.6, 1.5), undesirable_weight=(0.5, 1.2)),
    _(KTO, 0.2, _is_short, max_length=(8, 11)),
    # Reward modeling
    _(REWARD, 0.4, center_rewards_coefficient=(0.01, 0.5)),
    _(REWARD, 0.4, margins=(True,)),
    _(REWARD, 0.2, _is_short, max_length=(12, 15)),
    _(REWARD, 0.2, _is_short, padding=("</s>", "w3")),
    # DPO and KTO
    _(STORING, 0.3, beta=(0.05, 0.5)),
    _(STORING, 0.2, precompute_ref_log_probs=(True,)),
    _(STORING, 0.1, precompute_ref_batch_size=(3,)),
    _(
        STORING,
        0.1,
        lambda d: d["setup"] in ("full", "ref_model") and not d.get("precompute_ref_log_probs"),
        sync_ref_model=(True,),
        ref_model_sync_steps=(1,),
        ref_model_mixup_alpha=(0.3,),
    ),
    _(DPO + SFT, 0.5, per_device_train_batch_size=(1, 2, 6)),
    # Of a stream that is shorter than the batches of a step, transformers would never make one
    _(DPO, 0.15, _can_stream, streaming=(True,)),
    _(KTO, 0.5, per_device_train_batch_size=(2, 3, 6)),  # its KL term needs two rows
    # GRPO and RLOO: generation and rewards
    _(GROUPED, 1.0, num_generations=(2, 4, 4, 8)),
    _(GROUPED, 1.0, per_device_train_batch_size=lambda d: [d["num_generations"] * x for x in (1, 1, 2)]),
    _(GROUPED, 1.0, per_device_eval_batch_size=lambda d: (d["num_generations"],)),
    _(GROUPED, 0.3, _evaluates, num_generations_eval=(2,)),
    _(GROUPED, 0.5, steps_per_generation=(1, 2, 3, 4)),
    _(GROUPED, 0.4, num_iterations=(2, 3)),
    _(GROUPED + DISTILLATION, 1.0, max_completion_length=(1, 2, 5, 8, 8, 16)),
    # Otherwise every completion is truncated
    _(
        GROUPED,
        0.3,
        lambda d: d["model"] != "chat" and d["max_completion_length"] > 1,
        mask_truncated_completions=(True,),
    ),
    _(GROUPED + DISTILLATION, 0.3, temperature=(0.7, 1.6)),
    _(GROUPED, 1.0, rewards=(("id",), ("id",), ("half_dead",), ("half_dead",), ("short",), ("unscorable",))),
    _(GROUPED, 0.15, rewards=(("id", "short"),), reward_weights=([1.0, 0.5], None)),
    _(GRPO, 0.4, lambda d: len(d["rewards"]) == 2, multi_objective_aggregation=("normalize_then_sum",)),
    _(GRPO, 1.0, rollout=("scripted", "scripted", "masked", "masked_whole", "near_sampler")),
    _(RLOO + DISTILLATION, 1.0, rollout=("generate",)),
    # Distillation
    _(DISTILLATION, 1.0, per_device_train_batch_size=(1, 2, 4)),
    _(DISTILLATION, 1.0, per_device_eval_batch_size=(2, 3)),
    _(DISTILLATION, 1.0, beta=(0.0, 0.3, 0.5, 1.0)),
    # GRPO and RLOO: the loss
    _(GRPO, 1.0, loss_type=tuple(GRPO_LOSSES)),
    _(GRPO, 0.5, lambda d: d["setup"] != "full", beta=(0.05, 0.2)),
    _(RLOO, 0.5, beta=(0.0, 0.2)),
    _(GROUPED, 0.2, epsilon=(0.01, 0.1)),
    _(GROUPED, 0.2, lambda d: d.get("loss_type") not in ("cispo", "vespo", "sapo"), epsilon_high=(0.05, 0.3)),
    _(GRPO, 1.0, _is("loss_type", "cispo"), epsilon_high=(1.1,)),
    _(GRPO, 0.1, lambda d: d["loss_type"] not in ("cispo", "vespo", "sapo"), delta=(1.5, 4.0)),
    _(GRPO, 0.3, importance_sampling_level=("sequence",)),
    _(GRPO, 0.2, use_bias_correction_kl=(False,)),
    _(GRPO, 0.3, _is("loss_type", "sapo"), sapo_temperature_neg=(2.0,), sapo_temperature_pos=(0.5,)),
    _(GRPO, 0.3, _is("loss_type", "vespo"), vespo_k_pos=(1.0,), vespo_lambda_pos=(2.0,)),
    _(GRPO, 0.3, _is("loss_type", "vespo"), vespo_k_neg=(2.0,), vespo_lambda_neg=(1.0,)),
    _(GRPO, 0.3, scale_rewards=("batch", "none")),
    _(GRPO, 0.15, top_entropy_quantile=(0.2, 0.5, 0.8)),
    _(GRPO, 0.1, entropy_coef=(0.05,)),
    _(
        GRPO,
        0.1,
        lambda d: "entropy_coef" not in d,
        use_adaptive_entropy=(True,),
        entropy_target=(10.0,),
        entropy_coef_min=(0.0, 0.01),
        entropy_coef_max=(1.0, 0.02),
        entropy_coef_delta=(0.005, 0.01),
    ),
    _(GRPO, 0.15, off_policy_mask_threshold=(0.01, 0.5)),
    _(GRPO, 0.15, _is("model", "untied"), cast_lm_head_to_fp32=(True,)),
    _(RLOO, 0.3, normalize_advantages=(True,)),
    _(RLOO, 0.2, reward_clip_range=((0.1, 0.6),)),
    _(
        GROUPED,
        0.1,
        lambda d: d["setup"] in ("full", "ref_model"),
        beta=(0.1,),
        sync_ref_model=(True,),
        ref_model_sync_steps=(1,),
        ref_model_mixup_alpha=(0.3,),
    ),
    # GRPO with a sampler
    _(GRPO, 0.8, _is("rollout", "near_sampler"), vllm=(True,)),
    _(GRPO, 0.2, _is("rollout", "near_sampler"), vllm_importance_sampling_correction=(False,)),
    _(
        GRPO,
        0.7,
        lambda d: d["rollout"] == "near_sampler" and d["loss_type"] != "vespo",
        vllm_importance_sampling_mode=("token_truncate", "token_mask", "sequence_truncate"),
    ),
    _(
        GRPO,
        1.0,
        lambda d: d["rollout"] == "near_sampler" and d["loss_type"] == "vespo",
        vllm_importance_sampling_mode=("token_truncate", "token_mask"),
    ),
    _(GRPO, 0.4, _is("rollout", "near_sampler"), vllm_importance_sampling_clip_min=(0.7,)),
    _(GRPO, 0.6, _is("rollout", "near_sampler"), vllm_importance_sampling_clip_max=(1.5,)),
    # Ours
    _(
        ALL,
        0.2,
        lambda d: d["setup"] != "prompt_tuning" and not d.get("padding_free"),
        ours_padding_free=(False, False, True),
    ),
    _(ALL, 0.2, lambda d: "ours_padding_free" not in d, share_prompts=(False,)),
    _(LANGUAGE_MODELS, 0.1, head=("dense",)),
    _(LANGUAGE_MODELS + DISTILLATION, 0.2, head_chunk_size=(1, 3, 17)),
    _(ALL, 0.2, on_non_finite_loss=("stop", "skip")),
    _(STORING, 0.4, reference_store=lambda d: ("memory",) if d.get("precompute_ref_log_probs") else ("memory", "off")),
    _(DPO + GRPO, 0.2, max_tokens_per_micro_batch=(1, 30, 80)),
    _(GROUPED, 0.4, keep_groups_together=(False,)),
    _(GROUPED, 0.1, generate_fewer_rows=(False,)),
    _(GROUPED, 0.1, zero_advantages_of_equal_rewards=(False,)),
)

NOT_DRAWN = {
    "random draws: the distribution is TRL's, the draws are not": "disable_dropout",
    "of the model, not of the training": "model_init_kwargs optim_target_modules label_names",
    "of the tokenizer": "pad_token eos_token chat_template_path",
    "of the data, before training": "dataset_num_proc dataset_text_field dataset_kwargs shuffle_dataset",
    "an attention bias or a length column that these data sets lack": "length_column_name",
    "rounding in 16 bits: tests/trainers compares it with float64": "bf16 fp16 tf32 bf16_full_eval fp16_full_eval",
    "needs a GPU, and changes no number": "activation_offloading torch_empty_cache_steps torch_compile "
    "torch_compile_backend torch_compile_mode use_cpu dataloader_pin_memory reference_device head_kernels "
    "teacher_device",
    "needs another package": "use_liger_kernel liger_kernel_config",
    "of several ranks: tests/distributed": "balance ds3_gather_for_generation accelerator_config parallelism_config "
    "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout fsdp "
    "fsdp_config deepspeed local_rank eval_use_gather_object",
    "the same as a field that is drawn": "activation_checkpointing activation_checkpointing_kwargs optim_args "
    "generation_batch_size vllm_importance_sampling_cap",
    "completions are scripted: of generation alone": "top_p top_k min_p generation_kwargs chat_template_kwargs "
    "repetition_penalty cache_implementation max_tool_calling_iterations use_transformers_continuous_batching "
    "transformers_continuous_batching_config use_transformers_paged",
    "set once the trainer is built: a rollout stands for vLLM, tests/sampler runs it": "use_vllm vllm_mode "
    "vllm_model_impl vllm_enable_sleep_mode vllm_structured_outputs_regex vllm_server_base_url vllm_server_host "
    "vllm_server_port vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization vllm_max_model_length "
    "vllm_tensor_parallel_size sampler_check vllm_engine_args",
    "prints or reports": "log_completions log_multimodal num_completions_to_print log_unique_prompts "
    "log_completions_hub_repo show_plan log_level log_level_replica log_on_each_node disable_tqdm report_to run_name "
    "project trackio_space_id trackio_bucket_id trackio_static_space_id skip_memory_metrics debug",
    "needs the Hub": "trust_remote_code push_to_hub hub_token hub_private_repo hub_model_id hub_strategy "
    "hub_always_push hub_revision",
    "of scripts, not of the trainer": "do_train do_eval do_predict",
    "of resuming: tests/trainers/test_resume*": "resume_from_checkpoint ignore_data_skip save_on_each_node "
    "restore_callback_states_from_checkpoint enable_jit_checkpoint",
    "worker processes are slow to start": "dataloader_num_workers dataloader_persistent_workers "
    "dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order",
    "of `compute_metrics`, which TRL's trainers have no labels for": "include_for_metrics batch_eval_metrics",
    "of the process: deterministic algorithms, memory that ran out": "full_determinism auto_find_batch_size",
    "set by the runner": "output_dir max_steps learning_rate seed",
    "each run has its folder": "reference_store_dir teacher_store_dir",
    "completions of the data: tests/trainers/test_teacher_store.py": "completion_column teacher_store",
    "of the teacher's loading": "teacher_model_name_or_path teacher_model_revision teacher_model_init_kwargs",
    "stock TRL: tests/trainers/test_as_trl.py": "as_trl",
    "TRL has no counterpart": "policy_adapter_name ref_adapter_name reward_scale rpo_average_log_probs "
    "sft_label_smoothing sft_label_smoothing_convention force_on_policy_ratio",
    "other numbers or data than TRL's": "keep_sampling_mask trust_sampling_log_probs replay_routes "
    "generation_lag sample_ahead dynamic_sampling "
    "dynamic_sampling_max_draws",
}

_OF_DATA = {"form", "margins", "padding"}
_OF_CASE = {field.name for field in fields(Case)} - {"name", "config", "ours"}


def draw_case(seed: int) -> Case:
    """Return the case of a draw: arguments of TRL's config, those of ours alone, and what is trained."""
    trainer = random.Random(f"{seed} trainer").choice(("sft", "dpo", "dpo", "kto", "grpo", "grpo", "grpo", "rloo"))
    # Apart, with a word that leaves the draws that `test_fuzz.py` names as they were
    other = random.Random(f"{seed} other trainer 171").random()
    if other < 0.2:
        trainer = "reward" if other < 0.1 else "distillation"
    drawn: Drawn = {"trainer": trainer}
    for row in FIELDS:
        # A generator for each row, so that a change of one leaves the others as they are
        rng = random.Random(f"{seed} {list(row.values)}")
        if trainer in row.trainers and row.when(drawn) and rng.random() < row.chance:
            for name, values in row.values.items():
                drawn[name] = rng.choice(list(values(drawn) if callable(values) else values))
    of_case = {name: drawn.pop(name) for name in _OF_CASE & drawn.keys()}
    ours = {name: drawn.pop(name) for name in sorted(drawn.keys() - _names(trl, trainer) - _OF_DATA - {"trainer"})}
    if "ours_padding_free" in ours:
        ours["padding_free"] = ours.pop("ours_padding_free")
    case = Case(f"fuzz-{seed}", config={**drawn, "seed": seed}, ours=ours, **of_case)
    return replace(case, learning_rate=_learning_rate(case))


def _names(library: Any, trainer: str) -> set[str]:
    return {field.name for field in fields(getattr(library, class_name(trainer, "Config")))}


def _learning_rate(case: Case) -> float:
    if "optim" in case.config:  # Adam's steps have the size of the rate
        return 0.01
    if case.setup == "prompt_tuning":
        return 1.0
    if case.trainer == "kto":
        return 0.2
    if case.trainer != "dpo":
        return 0.01
    rate = min(DPO_LEARNING_RATES.get(name, 0.03) for name in _loss_types(case.config))
    return rate * 0.2 if "f_divergence_type" in case.config else rate


def fields_of_all_configs() -> set[str]:
    """Return the names of the fields of TRL's configs and of ours."""
    return {name for library in (trl, trl_ext) for trainer in ALL for name in _names(library, trainer)}
