"""Methods of TRL's trainers that earlier versions called and this one does not, each with what to override now."""

# What to do instead -> trainers -> methods. No class of TRL or transformers has such a method today
_REMOVED = {
    "override `_compute_loss`": {
        "DPO KTO": "get_batch_loss_metrics concatenated_forward _compute_loss_liger get_batch_logps _get_batch_logps",
        "DPO": "dpo_loss concatenated_inputs",
        "KTO": "kto_loss bco_loss forward",
        "GRPO": "compute_liger_loss",
    },
    "override `_get_per_token_logps_and_entropies`": {
        "GRPO RLOO": "_get_per_token_logps _get_last_hidden_state",
    },
    "override `_prepare_dataset`": {
        "SFT DPO KTO": "_tokenize",
        "SFT": "_prepare_non_packed_dataloader _prepare_packed_dataloader",
        "DPO KTO": "tokenize_row process_row build_tokenized_answer",
    },
    "prepare the model before you pass it": {
        "SFT DPO KTO": "_create_model_from_path _prepare_peft_model",
        "SFT": "_prepare_model_for_kbit_training",
        "SFT GRPO": "_enable_gradient_checkpointing",
        "DPO KTO": "_prepare_deepspeed _prepare_gradient_checkpointing",
    },
    "pass another `ref_model`": {"DPO KTO": "compute_reference_log_probs null_ref_context"},
    "pass another `data_collator`": {"DPO": "_truncate_inputs"},
    "append to `self._metrics[mode][name]`, a list of values to average": {"DPO KTO": "store_metrics"},
    "add `trl.LogCompletionsCallback`": {"DPO KTO": "generate_from_model_and_ref", "RLOO": "generate_completions"},
    "override `vllm_generation.sync_weights`": {
        "GRPO RLOO": "_move_model_to_vllm _fix_param_name_to_vllm _sync_fsdp_params_to_vllm _sync_fsdp1_params_to_vllm "
        "_sync_fsdp2_params_to_vllm",
    },
    "override `evaluate`": {"Reward": "visualize_samples"},
    "set `neftune_noise_alpha`": {"SFT": "_trl_activate_neftune"},
}

# Trainer's name -> method -> what to do instead
REMOVED_METHODS: dict[str, dict[str, str]] = {
    f"{trainer}Trainer": {
        method: remedy
        for remedy, methods_of in _REMOVED.items()
        for trainers, methods in methods_of.items()
        if trainer in trainers.split()
        for method in methods.split()
    }
    for trainer in ("SFT", "DPO", "KTO", "GRPO", "RLOO", "Distillation", "Reward")
}
