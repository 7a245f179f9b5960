r"""GRPO with a rollout function: completions, and their log-probs, come from a sampler of your own.

On the demo's model and data, on a CPU, a minute:

    python examples/grpo_rollout.py --output_dir runs/rollout

`rollout_func` gets the prompts, each once for each of its completions, and the trainer; it returns the token ids of
prompts and completions, and the log-prob of each sampled token as the sampler has it. With `trust_sampling_log_probs`
those are the old policy's, and no pass is run for them. That is an approximation: a sampler of another engine, or in
another precision, is not the policy to the last bit. Without it the ratio is formed from the policy's own.
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
    """What is trained on what.

    Args:
        model (`str`, *optional*): a name on the Hub or a folder.
        data (`str`, *optional*): a data set with the columns `prompt` and `answer`.
    """

    model: str = field(default="examples/demo/model", metadata={"help": "A name on the Hub or a folder."})
    data: str = field(default="examples/demo/data/grpo", metadata={"help": "With columns `prompt` and `answer`."})


@torch.no_grad()
def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, list[Any]]:
    """One completion for each prompt, and the sampler's log-probs of its tokens."""
    tokenizer, model = trainer.processing_class, trainer.accelerator.unwrap_model(trainer.model)
    batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left").to(model.device)
    sampled = model.generate(
        **batch,
        do_sample=True,
        temperature=trainer.temperature,
        top_k=0,
        max_new_tokens=trainer.max_completion_length,
        pad_token_id=tokenizer.pad_token_id,
        output_logits=True,
        return_dict_in_generate=True,
    )
    prompt_ids, mask = batch["input_ids"], batch["attention_mask"].bool()
    ids = sampled.sequences[:, prompt_ids.shape[1] :]
    logits = torch.stack(sampled.logits, dim=1).float() / trainer.temperature
    log_probs = logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    ends = (ids == tokenizer.eos_token_id).int()
    lengths = torch.where(ends.any(1), ends.argmax(1) + 1, ids.shape[1]).tolist()
    return {
        "prompt_ids": [row[fed].tolist() for row, fed in zip(prompt_ids, mask, strict=True)],
        "completion_ids": [row[:n].tolist() for row, n in zip(ids, lengths, strict=True)],
        "logprobs": [row[:n].tolist() for row, n in zip(log_probs, lengths, strict=True)],
    }


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
        gradient_checkpointing=False,  # its forward keeps no cache, without which sampling is slow
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
