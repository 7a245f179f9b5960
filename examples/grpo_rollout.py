r"""GRPO with a rollout function: completions and their log-probs come from your own sampler.

Takes a minute on a CPU, with the demo's model and data:

    python examples/grpo_rollout.py --output_dir runs/rollout

`rollout_func` gets the trainer and the prompts, each repeated for each of its completions. It returns the token ids of
prompts and completions, and the sampler's log-prob of each sampled token. With `trust_sampling_log_probs`, the trainer
uses these as the old policy's log-probs instead of running a forward pass. This is an approximation: another engine or
precision gives slightly different log-probs. Without the option, the policy computes them.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from datasets import load_dataset
from grpo_verifiable import right, says_so
from peft import LoraConfig
from trl import TrlParser

from trl_ext import GRPOConfig, GRPOTrainer


@dataclass
class Task:
    """The model and the data.

    Args:
        model (`str`, *optional*): a Hub name or a folder.
        data (`str`, *optional*): a dataset with the columns `prompt` and `answer`.
    """

    model: str = field(default="examples/demo/model", metadata={"help": "Hub name or folder."})
    data: str = field(default="examples/demo/data/grpo", metadata={"help": "With columns `prompt` and `answer`."})


@torch.no_grad()
def sample(
    model: Any, tokenizer: Any, prompts: list[str], temperature: float, max_new_tokens: int
) -> dict[str, list[Any]]:
    """Sample one completion for each prompt, and return the sampler's log-probs of its tokens."""
    batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left").to(model.device)
    sampled = model.generate(
        **batch,
        do_sample=True,
        temperature=temperature,
        top_k=0,
        max_new_tokens=max_new_tokens,
        pad_token_id=tokenizer.pad_token_id,
        output_logits=True,
        return_dict_in_generate=True,
    )
    prompt_ids, mask = batch["input_ids"], batch["attention_mask"].bool()
    ids = sampled.sequences[:, prompt_ids.shape[1] :]
    logits = torch.stack(sampled.logits, dim=1).float() / temperature
    log_probs = logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    ends = (ids == tokenizer.eos_token_id).int()
    lengths = torch.where(ends.any(1), ends.argmax(1) + 1, ids.shape[1]).tolist()
    return {
        "prompt_ids": [row[is_token].tolist() for row, is_token in zip(prompt_ids, mask, strict=True)],
        "completion_ids": [row[:n].tolist() for row, n in zip(ids, lengths, strict=True)],
        "logprobs": [row[:n].tolist() for row, n in zip(log_probs, lengths, strict=True)],
    }


def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, list[Any]]:
    model = trainer.accelerator.unwrap_model(trainer.model)
    return sample(model, trainer.processing_class, prompts, trainer.temperature, trainer.max_completion_length)


def main(task: Task, config: GRPOConfig) -> None:
    trainer = GRPOTrainer(
        model=task.model,
        reward_funcs=[right, says_so],
        rollout_func=rollout,
        args=config,
        train_dataset=load_dataset(task.data, split="train"),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    parser = TrlParser((Task, GRPOConfig))
    parser.set_defaults(
        reward_weights=[1.0, 0.1],
        num_iterations=2,
        trust_sampling_log_probs=True,
        gradient_checkpointing=False,  # it turns off the KV cache, and sampling would be slow
        learning_rate=5e-4,
        max_steps=20,
        per_device_train_batch_size=64,
        num_generations=8,
        max_completion_length=36,
        logging_steps=2,
        bf16=False,
        report_to="none",
        save_strategy="no",
    )
    main(*parser.parse_args_and_config())
