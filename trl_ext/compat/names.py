"""The internals of TRL and transformers that trl_ext uses, and the parameters that each function takes.

Written by `python tests/support/compat_names.py`.
"""

# The names of a class include the attributes of `self`, and the quoted words in its source
_NAMES = {
    "transformers.generation.utils:GenerationMixin": "_get_logits_processor",
    "transformers.integrations.integration_utils": "INTEGRATION_TO_CALLBACK",
    "transformers.masking_utils": "ALL_MASK_ATTENTION_FUNCTIONS",
    "transformers.modeling_layers": "GradientCheckpointingLayer",
    "transformers.modeling_utils": "ALL_ATTENTION_FUNCTIONS",
    "transformers.quantizers": "AutoHfQuantizer",
    "transformers.trainer": "OPTIMIZER_NAME SCHEDULER_NAME TRAINING_ARGS_NAME",
    "transformers.trainer_callback:ProgressCallback": "training_bar",
    "transformers.trainer_callback:TrainerCallback": (
        "on_evaluate on_pre_optimizer_step on_predict on_step_begin on_train_end"
    ),
    "transformers.trainer_utils": "PREFIX_CHECKPOINT_DIR",
    "transformers.training_args": "OptimizerNames",
    "trl.generation.vllm_client": "VLLMClient",
    "trl.generation.vllm_client:VLLMClient": "__init__ _updating_weights base_url model session",
    "trl.generation.vllm_generation": "VLLMGeneration",
    "trl.generation.vllm_generation:VLLMGeneration": (
        "__init__ _dist accelerator enable_sleep_mode generate llm logprobs mode model tensor_parallel_size vllm_client"
    ),
    "trl.scripts.utils:TrlParser": "_action_groups _negative_number_matcher add_argument add_argument_group prog",
    "trl.trainer.dpo_config:DPOConfig": "padding_free",
    "trl.trainer.dpo_trainer": "BaseTunerLayer get_peft_model is_peft_model",
    "trl.trainer.dpo_trainer:DPOTrainer": (
        '"completion_mask" "input_ids" "ref_chosen_logps" "ref_rejected_logps" __init_subclass__ '
        "_init_training_state _is_vision_dataset _metrics _precompute_engine _signature_columns "
        "_tag_names _tokenizer _total_train_tokens accelerator add_callback args aux_loss_enabled beta "
        "callback_handler compute_metrics create_model_card current_gradient_accumulation_steps "
        "data_collator deepspeed eval_dataset evaluation_loop f_alpha_divergence_coef f_divergence_type "
        "gather_function get_batch_samples get_decay_parameter_names get_optimizer_cls_and_kwargs "
        "is_deepspeed_enabled is_fsdp_enabled is_in_train is_world_process_zero label_smoothing "
        "loss_types loss_weights lr_scheduler model model_wrapped neftune_noise_alpha optimizer "
        "padding_free push_to_hub ref_model save_model state train train_dataset training_step"
    ),
    "trl.trainer.grpo_config:GRPOConfig": "_VALID_DICT_FIELDS",
    "trl.trainer.grpo_trainer": "BaseTunerLayer VLLMGeneration gather gather_object get_peft_model is_peft_model",
    "trl.trainer.grpo_trainer:GRPOTrainer": (
        '"completion_ids" "completion_mask" "pixel_values" "prompt_ids" "prompt_mask" "tool_mask" '
        "__init_subclass__ _buffered_inputs _entropy_bonus_enabled _get_train_sampler "
        "_init_training_state _is_vlm _last_loaded_step _metrics _step _tag_names _tokenize_prompts "
        "_tokenizer _total_train_tokens accelerator add_callback args aux_loss_enabled beta "
        "callback_handler compute_metrics create_model_card current_gradient_accumulation_steps "
        "data_collator deepspeed environment_factories eval_dataset evaluation_loop gather_function "
        "get_batch_samples get_decay_parameter_names get_high_entropy_mask get_optimizer_cls_and_kwargs "
        "get_train_dataloader importance_sampling_level is_deepspeed_enabled is_fsdp_enabled is_in_train"
        " is_world_process_zero loss_type lr_scheduler model model_wrapped multi_objective_aggregation "
        "neftune_noise_alpha num_generations num_iterations optimizer processing_class push_to_hub "
        "ref_model reward_func_names reward_funcs reward_weights rollout_func save_model scale_rewards "
        "shuffle_dataset state tools top_entropy_quantile train train_dataset training_step "
        "use_transformers_continuous_batching use_vllm vllm_generation vllm_importance_sampling_clip_max"
        " vllm_importance_sampling_clip_min vllm_importance_sampling_correction "
        "vllm_importance_sampling_mode vllm_mode"
    ),
    "trl.trainer.kto_trainer": "BaseTunerLayer get_peft_model is_peft_model",
    "trl.trainer.kto_trainer:KTOTrainer": (
        "__init_subclass__ _init_training_state _metrics _tag_names _tokenizer accelerator add_callback "
        "args callback_handler create_model_card evaluation_loop gather_function is_world_process_zero "
        "model neftune_noise_alpha ref_model save_model state train training_step"
    ),
    "trl.trainer.rloo_trainer": "BaseTunerLayer get_peft_model is_peft_model",
    "trl.trainer.rloo_trainer:RLOOTrainer": (
        "__init_subclass__ _get_train_sampler _init_training_state _metrics _tag_names _tokenizer "
        "accelerator add_callback args aux_loss_enabled callback_handler create_model_card "
        "evaluation_loop gather_function get_batch_samples is_world_process_zero model "
        "neftune_noise_alpha processing_class ref_model save_model state train train_dataset "
        "training_step"
    ),
    "trl.trainer.sft_config:SFTConfig": "padding_free",
    "trl.trainer.sft_trainer": "BaseTunerLayer get_peft_model is_peft_model",
    "trl.trainer.sft_trainer:SFTTrainer": (
        "__init_subclass__ _init_training_state _metrics _tag_names _tokenizer accelerator add_callback "
        "args callback_handler compute_loss_func create_model_card eval_dataset evaluation_loop "
        "gather_function is_world_process_zero label_smoother model neftune_noise_alpha padding_free "
        "save_model state train train_dataset training_step"
    ),
}
# Functions, with the parameters of every supported release
_FUNCTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "transformers.integrations.integration_utils": {
        "get_available_reporting_integrations": ("()",),
    },
    "transformers.models.mixtral.modeling_mixtral": {
        "load_balancing_loss_func": ("(gate_logits, num_experts=..., top_k=..., attention_mask=...)",),
    },
    "transformers.trainer": {
        "rotate_checkpoints": (
            ("(output_dir, save_total_limit=..., best_model_checkpoint=..., use_mtime=..., checkpoint_prefix=...)"),
        ),
    },
    "transformers.trainer:Trainer": {
        "training_step": ("(self, model, inputs, num_items_in_batch=...)",),
    },
    "transformers.trainer_callback:ProgressCallback": {
        "on_log": ("(self, args, state, control, logs=..., **kwargs)",),
        "on_train_begin": ("(self, args, state, control, **kwargs)",),
    },
    "transformers.trainer_callback:TrainerCallback": {
        "on_epoch_end": ("(self, args, state, control, **kwargs)",),
        "on_log": ("(self, args, state, control, **kwargs)",),
        "on_optimizer_step": ("(self, args, state, control, **kwargs)",),
        "on_train_begin": ("(self, args, state, control, **kwargs)",),
    },
    "transformers.trainer_utils": {
        "has_length": ("(dataset)",),
    },
    "trl.cli.accelerate_config": {
        "resolve_accelerate_config_argument": ("(launch_args)",),
    },
    "trl.generation.vllm_client:VLLMClient": {
        "_finish_weight_update": ("(self)",),
        "_start_weight_update": ("(self)",),
        "init_communicator": ("(self, device=...)",),
        "update_named_params": ("(self, metadata, named_params)",),
    },
    "trl.generation.vllm_generation:VLLMGeneration": {
        "_init_vllm": ("(self)",),
        "_iter_named_params": ("(self)",),
        "sync_weights": ("(self)",),
    },
    "trl.models": {
        "prepare_deepspeed": ("(model, accelerator)",),
    },
    "trl.models.utils": {
        "disable_gradient_checkpointing": ("(model, gradient_checkpointing_kwargs=...)",),
    },
    "trl.scripts.utils:TrlParser": {
        "__init__": ("(self, dataclass_types=..., **kwargs)",),
        "error": ("(self, message)",),
    },
    "trl.trainer.callbacks:SyncRefModelCallback": {
        "__init__": ("(self, ref_model, accelerator)",),
        "on_step_end": ("(self, args, state, control, **kwargs)",),
    },
    "trl.trainer.dpo_config:DPOConfig": {
        "__post_init__": ("(self)",),
    },
    "trl.trainer.dpo_trainer": {
        "add_fused_lm_head": ("(model, temperature=..., cast_lm_head_to_fp32=..., outputs=...)",),
        "create_model_from_path": ("(model_id, architecture=..., **kwargs)",),
        "get_act_offloading_ctx_manager": (
            (
                "(model, use_pin_memory=..., use_streams=..., min_offload_size=..., max_fwd_stash_size=..., "
                "warn_if_no_head=...)"
            ),
        ),
        "hash_module": ("(module)",),
    },
    "trl.trainer.dpo_trainer:DPOTrainer": {
        "_compute_loss": ("(self, model, inputs, return_outputs)",),
        "_determine_best_metric": ("(self, metrics, trial)",),
        "_get_output_dir": ("(self, trial)",),
        "_load_best_model": ("(self)",),
        "_load_from_checkpoint": ("(self, resume_from_checkpoint, model=...)",),
        "_load_optimizer_and_scheduler": ("(self, checkpoint)",),
        "_precompute_ref_logps": ("(self, dataset, name, batch_size)",),
        "_prepare_context_parallel_inputs": ("(self, model, inputs)",),
        "_prepare_dataset": ("(self, dataset, processing_class, args, dataset_name)",),
        "_prepare_inputs": ("(self, inputs)",),
        "_push_from_checkpoint": ("(self, checkpoint_folder)",),
        "_remove_unused_columns": ("(self, dataset, description=...)",),
        "_report_to_hp_search": ("(self, trial, step, metrics)",),
        "_save_checkpoint": ("(self, model, trial)",),
        "_save_optimizer_and_scheduler": ("(self, output_dir)",),
        "_set_signature_columns_if_needed": ("(self)",),
        "compute_loss": ("(self, model, inputs, return_outputs=..., num_items_in_batch=...)",),
        "compute_ref_log_probs": ("(self, model, inputs)",),
        "create_accelerator_and_postprocess": ("(self)",),
        "floating_point_ops": ("(self, inputs)",),
        "get_sp_size": ("(self)",),
        "get_total_train_batch_size": ("(self, args)",),
        "get_tp_size": ("(self)",),
        "log": ("(self, logs, start_time=...)",),
    },
    "trl.trainer.grpo_config:GRPOConfig": {
        "__post_init__": ("(self)",),
    },
    "trl.trainer.grpo_trainer": {
        "add_fused_lm_head": ("(model, temperature=..., cast_lm_head_to_fp32=..., outputs=...)",),
        "shuffle_sequence_dict": ("(seq_dict)",),
        "use_adapter": ("(model, adapter_name)",),
    },
    "trl.trainer.grpo_trainer:GRPOTrainer": {
        "_calculate_rewards": ("(self, inputs, prompts, completions, completion_ids_list)",),
        "_compute_loss": ("(self, model, inputs)",),
        "_determine_best_metric": ("(self, metrics, trial)",),
        "_generate": ("(self, prompts)",),
        "_generate_and_score_completions": ("(self, inputs)",),
        "_generate_single_turn": (
            "(self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=...)",
        ),
        "_get_output_dir": ("(self, trial)",),
        "_get_per_token_logps_and_entropies": (
            (
                "(self, model, input_ids, attention_mask, logits_to_keep, batch_size=..., compute_entropy=..., "
                "compute_aux_loss=..., pixel_values=..., image_grid_thw=..., num_images=..., "
                "pixel_attention_mask=..., spatial_shapes=..., num_tiles=..., image_sizes=..., "
                "token_type_ids=..., mm_token_type_ids=..., image_position_ids=...)"
            ),
        ),
        "_load_best_model": ("(self)",),
        "_load_from_checkpoint": ("(self, resume_from_checkpoint, model=...)",),
        "_load_optimizer_and_scheduler": ("(self, checkpoint)",),
        "_prepare_context_parallel_inputs": ("(self, model, inputs)",),
        "_prepare_inputs": ("(self, generation_batch)",),
        "_push_from_checkpoint": ("(self, checkpoint_folder)",),
        "_remove_unused_columns": ("(self, dataset, description=...)",),
        "_report_to_hp_search": ("(self, trial, step, metrics)",),
        "_save_checkpoint": ("(self, model, trial)",),
        "_save_optimizer_and_scheduler": ("(self, output_dir)",),
        "compute_loss": ("(self, model, inputs, return_outputs=..., num_items_in_batch=...)",),
        "create_accelerator_and_postprocess": ("(self)",),
        "floating_point_ops": ("(self, inputs)",),
        "get_sp_size": ("(self)",),
        "get_total_train_batch_size": ("(self, args)",),
        "get_tp_size": ("(self)",),
        "log": ("(self, logs, start_time=...)",),
    },
    "trl.trainer.kto_config:KTOConfig": {
        "__post_init__": ("(self)",),
    },
    "trl.trainer.kto_trainer": {
        "add_fused_lm_head": ("(model, temperature=..., cast_lm_head_to_fp32=..., outputs=...)",),
        "create_model_from_path": ("(model_id, architecture=..., **kwargs)",),
        "get_act_offloading_ctx_manager": (
            (
                "(model, use_pin_memory=..., use_streams=..., min_offload_size=..., max_fwd_stash_size=..., "
                "warn_if_no_head=...)"
            ),
        ),
        "hash_module": ("(module)",),
        "use_adapter": ("(model, adapter_name)",),
    },
    "trl.trainer.kto_trainer:KTOTrainer": {
        "_compute_loss": ("(self, model, inputs, return_outputs)",),
        "_determine_best_metric": ("(self, metrics, trial)",),
        "_get_output_dir": ("(self, trial)",),
        "_load_best_model": ("(self)",),
        "_load_from_checkpoint": ("(self, resume_from_checkpoint, model=...)",),
        "_load_optimizer_and_scheduler": ("(self, checkpoint)",),
        "_precompute_ref_logps": ("(self, dataset, name, batch_size)",),
        "_prepare_context_parallel_inputs": ("(self, model, inputs)",),
        "_prepare_dataset": ("(self, dataset, processing_class, args, dataset_name)",),
        "_prepare_inputs": ("(self, inputs)",),
        "_push_from_checkpoint": ("(self, checkpoint_folder)",),
        "_report_to_hp_search": ("(self, trial, step, metrics)",),
        "_save_checkpoint": ("(self, model, trial)",),
        "_save_optimizer_and_scheduler": ("(self, output_dir)",),
        "compute_loss": ("(self, model, inputs, return_outputs=..., num_items_in_batch=...)",),
        "create_accelerator_and_postprocess": ("(self)",),
        "floating_point_ops": ("(self, inputs)",),
        "get_sp_size": ("(self)",),
        "get_total_train_batch_size": ("(self, args)",),
        "get_tp_size": ("(self)",),
        "log": ("(self, logs, start_time=...)",),
    },
    "trl.trainer.rloo_config:RLOOConfig": {
        "__post_init__": ("(self)",),
    },
    "trl.trainer.rloo_trainer": {
        "add_fused_lm_head": ("(model, temperature=..., cast_lm_head_to_fp32=..., outputs=...)",),
        "shuffle_sequence_dict": ("(seq_dict)",),
        "use_adapter": ("(model, adapter_name)",),
    },
    "trl.trainer.rloo_trainer:RLOOTrainer": {
        "_determine_best_metric": ("(self, metrics, trial)",),
        "_generate_and_score_completions": ("(self, inputs)",),
        "_get_output_dir": ("(self, trial)",),
        "_get_per_token_logps_and_entropies": (
            (
                "(self, model, input_ids, attention_mask, logits_to_keep, batch_size=..., compute_entropy=..., "
                "compute_aux_loss=..., pixel_values=..., image_grid_thw=..., num_images=..., "
                "pixel_attention_mask=..., spatial_shapes=..., num_tiles=..., image_sizes=..., "
                "token_type_ids=..., mm_token_type_ids=..., image_position_ids=...)"
            ),
        ),
        "_load_best_model": ("(self)",),
        "_load_from_checkpoint": ("(self, resume_from_checkpoint, model=...)",),
        "_load_optimizer_and_scheduler": ("(self, checkpoint)",),
        "_prepare_context_parallel_inputs": ("(self, model, inputs)",),
        "_prepare_inputs": ("(self, generation_batch)",),
        "_push_from_checkpoint": ("(self, checkpoint_folder)",),
        "_report_to_hp_search": ("(self, trial, step, metrics)",),
        "_save_checkpoint": ("(self, model, trial)",),
        "_save_optimizer_and_scheduler": ("(self, output_dir)",),
        "compute_loss": ("(self, model, inputs, return_outputs=..., num_items_in_batch=...)",),
        "create_accelerator_and_postprocess": ("(self)",),
        "floating_point_ops": ("(self, inputs)",),
        "get_sp_size": ("(self)",),
        "get_total_train_batch_size": ("(self, args)",),
        "get_tp_size": ("(self)",),
        "log": ("(self, logs, start_time=...)",),
    },
    "trl.trainer.sft_trainer": {
        "add_fused_lm_head": ("(model, temperature=..., cast_lm_head_to_fp32=..., outputs=...)",),
        "get_act_offloading_ctx_manager": (
            (
                "(model, use_pin_memory=..., use_streams=..., min_offload_size=..., max_fwd_stash_size=..., "
                "warn_if_no_head=...)"
            ),
        ),
    },
    "trl.trainer.sft_trainer:SFTTrainer": {
        "_determine_best_metric": ("(self, metrics, trial)",),
        "_get_output_dir": ("(self, trial)",),
        "_load_best_model": ("(self)",),
        "_load_from_checkpoint": ("(self, resume_from_checkpoint, model=...)",),
        "_load_optimizer_and_scheduler": ("(self, checkpoint)",),
        "_prepare_context_parallel_inputs": ("(self, model, inputs)",),
        "_prepare_dataset": ("(self, dataset, processing_class, args, packing, formatting_func, dataset_name)",),
        "_push_from_checkpoint": ("(self, checkpoint_folder)",),
        "_report_to_hp_search": ("(self, trial, step, metrics)",),
        "_save_checkpoint": ("(self, model, trial)",),
        "_save_optimizer_and_scheduler": ("(self, output_dir)",),
        "compute_loss": ("(self, model, inputs, return_outputs=..., num_items_in_batch=...)",),
        "create_accelerator_and_postprocess": ("(self)",),
        "floating_point_ops": ("(self, inputs)",),
        "get_sp_size": ("(self)",),
        "get_total_train_batch_size": ("(self, args)",),
        "get_tp_size": ("(self)",),
        "log": ("(self, logs, start_time=...)",),
    },
    "trl.trainer.utils": {
        "FusedCausalLMOutput": (
            (
                "(loss=..., log_probs=..., entropy=..., log_sum_sq_probs=..., mean_logits=..., is_top1=..., "
                "label_mask=..., aux_loss=...)"
            ),
        ),
        "disable_dropout_in_model": ("(model)",),
        "is_async_callable": ("(func)",),
        "maybe_gather_lm_head_ctx": ("(*params)",),
    },
}
NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    owner: dict.fromkeys(_NAMES.get(owner, "").split(), ()) | _FUNCTIONS.get(owner, {})
    for owner in sorted({*_NAMES, *_FUNCTIONS})
}
