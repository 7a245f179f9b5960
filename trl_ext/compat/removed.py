"""Methods of TRL's trainers that earlier versions called and this one does not, each with what to override now."""

_LOSS = "Override `_compute_loss`"
_PASS = "Override `_get_per_token_logps_and_entropies`"
_ROWS = "Override `_prepare_dataset`"
_MODEL = "Prepare the model before you pass it"
_METRICS = "Append to `self._metrics[mode][name]`, a list of values to average"
_REFERENCE = "Pass another `ref_model`"
_WEIGHTS = "Override `vllm_generation.sync_weights`"

_OF_PAIRS = {
    **dict.fromkeys(("get_batch_loss_metrics", "concatenated_forward", "_compute_loss_liger"), _LOSS),
    **dict.fromkeys(("get_batch_logps", "_get_batch_logps"), _LOSS),
    **dict.fromkeys(("tokenize_row", "process_row", "build_tokenized_answer", "_tokenize"), _ROWS),
    **dict.fromkeys(("compute_reference_log_probs", "null_ref_context"), _REFERENCE),
    **dict.fromkeys(
        ("_prepare_deepspeed", "_prepare_peft_model", "_prepare_gradient_checkpointing", "_create_model_from_path"),
        _MODEL,
    ),
    "store_metrics": _METRICS,
    "generate_from_model_and_ref": "Add `trl.LogCompletionsCallback`",
}
_OF_VLLM = dict.fromkeys(
    (
        *("_move_model_to_vllm", "_fix_param_name_to_vllm", "_sync_fsdp_params_to_vllm"),
        *("_sync_fsdp1_params_to_vllm", "_sync_fsdp2_params_to_vllm"),
    ),
    _WEIGHTS,
)

# Trainer's name -> method -> what to do instead. No class of TRL or transformers has such a method today
REMOVED_METHODS: dict[str, dict[str, str]] = {
    "SFTTrainer": {
        **dict.fromkeys(("_prepare_non_packed_dataloader", "_prepare_packed_dataloader", "_tokenize"), _ROWS),
        **dict.fromkeys(
            (
                *("_create_model_from_path", "_enable_gradient_checkpointing", "_prepare_peft_model"),
                "_prepare_model_for_kbit_training",
            ),
            _MODEL,
        ),
        "_trl_activate_neftune": "Set `neftune_noise_alpha`",
    },
    "DPOTrainer": {
        **_OF_PAIRS,
        **dict.fromkeys(("dpo_loss", "concatenated_inputs"), _LOSS),
        "_truncate_inputs": "Pass another `data_collator`",
    },
    "KTOTrainer": {**_OF_PAIRS, **dict.fromkeys(("kto_loss", "bco_loss", "forward"), _LOSS)},
    "GRPOTrainer": {
        **_OF_VLLM,
        **dict.fromkeys(("_get_per_token_logps", "_get_last_hidden_state"), _PASS),
        "compute_liger_loss": _LOSS,
        "_enable_gradient_checkpointing": _MODEL,
    },
    "RLOOTrainer": {
        **_OF_VLLM,
        **dict.fromkeys(("_get_per_token_logps", "_get_last_hidden_state"), _PASS),
        "generate_completions": "Add `trl.LogCompletionsCallback`",
    },
}
