r"""Fine-tunes a language model on preference pairs with DPO, with LoRA or all weights.

On one device:

    python examples/dpo_lora.py \
        --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct \
        --dataset_name trl-lib/ultrafeedback_binarized \
        --learning_rate 5e-6 --per_device_train_batch_size 2 --gradient_accumulation_steps 8 --max_steps 1000 \
        --use_peft --lora_r 16 --lora_alpha 32 \
        --output_dir runs/qwen-dpo

Without a GPU, with the demo's model and data:

    python examples/dpo_lora.py --config examples/demo/dpo.yaml --model_name_or_path examples/demo/model \
        --dataset_name examples/demo/data/dpo --use_cpu --output_dir runs/dpo

On several GPUs of one machine, pass the same options to:

    accelerate launch --config_file examples/accelerate_configs/ddp.yaml --num_processes 4 examples/dpo_lora.py

The options are TRL's (`--help` lists them); `--config options.yaml` reads them from a file. `--dataset_name` takes a
Hub name or a folder of JSONL files with the columns `prompt`, `chosen` and `rejected`. If `--model_name_or_path` is a
folder with an `adapter_config.json`, the script continues to train that adapter, with the initial model as reference;
omit `--use_peft` then.
"""

import os
import sys
from typing import Any

import torch
from datasets import load_dataset
from peft import AutoPeftModelForCausalLM
from trl import (
    DatasetMixtureConfig,
    ModelConfig,
    ScriptArguments,
    TrlParser,
    get_dataset,
    get_peft_config,
    get_quantization_config,
)

from trl_ext import DPOConfig, DPOTrainer


def main(
    script_args: ScriptArguments,
    training_args: DPOConfig,
    model_args: ModelConfig,
    mixture_args: DatasetMixtureConfig,
) -> None:
    if model_args.model_name_or_path is None or not (script_args.dataset_name or mixture_args.datasets):
        raise ValueError(
            "Pass a model and a dataset: `--model_name_or_path` and `--dataset_name` (or `datasets` in a config file)."
        )
    model_init_kwargs: dict[str, Any] = {
        "dtype": model_args.dtype,
        "attn_implementation": model_args.attn_implementation,
        "trust_remote_code": training_args.trust_remote_code,
        **(training_args.model_init_kwargs or {}),
    }
    model = model_args.model_name_or_path
    quantization_config = get_quantization_config(model_args)
    if os.path.isfile(os.path.join(model, "adapter_config.json")):
        # The trainer does not load adapters from a folder. Without `is_trainable`, PEFT loads them for inference, and
        # nothing would be trained.
        model = AutoPeftModelForCausalLM.from_pretrained(
            model, is_trainable=True, quantization_config=quantization_config, **model_init_kwargs
        )
        quantization_config = training_args.model_init_kwargs = None
    else:
        training_args.model_init_kwargs = {"revision": model_args.model_revision, **model_init_kwargs}

    if mixture_args.datasets:
        dataset = get_dataset(mixture_args)
    else:
        dataset = load_dataset(
            script_args.dataset_name, name=script_args.dataset_config, streaming=script_args.dataset_streaming
        )
    evaluates = training_args.eval_strategy != "no"
    trainer = DPOTrainer(
        model=model,
        args=training_args,
        train_dataset=dataset[script_args.dataset_train_split],
        eval_dataset=dataset[script_args.dataset_test_split] if evaluates else None,
        quantization_config=quantization_config,
        peft_config=get_peft_config(model_args),
    )
    if script_args.ignore_bias_buffers:
        # DDP broadcasts buffers, and some backends cannot broadcast booleans.
        trainer.model._ddp_params_and_buffers_to_ignore = [
            buffer_name for buffer_name, buffer in trainer.model.named_buffers() if buffer.dtype == torch.bool
        ]
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
    if hasattr(trainer, "end"):  # transformers 5.18 and later: closes the trackers and the process group
        trainer.end()


if __name__ == "__main__":
    if len(sys.argv) == 1:
        raise SystemExit(__doc__)
    main(*TrlParser((ScriptArguments, DPOConfig, ModelConfig, DatasetMixtureConfig)).parse_args_and_config())
