r"""GRPO in a training loop of your own, with Accelerate, and without TRL:

    python examples/loop_grpo.py

It trains the demo's model on sums, in one process. Completions with zero advantage are not scored, and a group's prompt
is computed once. The last line that it prints is a list of mean rewards.
"""

import argparse
import json
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_ext import core

GROUP, EPSILON, LENGTH, TEMPERATURE = 8, 0.2, 40, 1.0


def sample(model: Any, tokenizer: Any, problems: list[dict[str, str]], device: torch.device) -> dict[str, torch.Tensor]:
    """Return a padded batch of completions, GROUP for each problem, and their rewards: 1 for a right answer."""
    texts = [problem["prompt"] for problem in problems for _ in range(GROUP)]
    prompts = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left").to(device)
    ids = model.generate(**prompts, do_sample=True, max_new_tokens=LENGTH, temperature=TEMPERATURE, top_k=0)
    completions = ids[:, prompts["input_ids"].size(1) :]
    ends = (completions == tokenizer.eos_token_id).cumsum(dim=1)
    is_completion = (ends == 0) | ((ends == 1) & (completions == tokenizer.eos_token_id))
    answers = [problem["answer"] for problem in problems for _ in range(GROUP)]
    said = tokenizer.batch_decode(completions, skip_special_tokens=True)
    rewards = [float(text.split()[-1:] == [answer]) for text, answer in zip(said, answers, strict=True)]
    labels = ids.clone()
    labels[:, : -completions.size(1)] = -100
    labels[:, -completions.size(1) :].masked_fill_(~is_completion, -100)
    return {
        "input_ids": ids,
        "attention_mask": torch.cat([prompts["attention_mask"], is_completion.long()], dim=1),
        "labels": labels,
        "rewards": torch.tensor(rewards, device=device),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="examples/demo/model")
    parser.add_argument("--problems", default="examples/demo/data/grpo/train.jsonl")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--learning_rate", type=float, default=1e-4)
    options = parser.parse_args()

    accelerator = Accelerator()
    set_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model)
    core.attach(model, temperature=TEMPERATURE)  # before `prepare`, which wraps the forward
    optimizer = torch.optim.AdamW(model.parameters(), options.learning_rate, weight_decay=0.0)
    with open(options.problems) as file:
        problems = [json.loads(line) for line in file]
    loader = DataLoader(problems, 4, collate_fn=list, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    rewards: list[float] = []
    for problems_of_step in loader:
        batch = sample(accelerator.unwrap_model(model), tokenizer, problems_of_step, accelerator.device)
        groups = batch.pop("rewards").view(-1, GROUP)
        advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()
        tokens = (batch["labels"] != -100).sum()  # of all rows, as each counts in the mean
        scored = core.rows_with_gradient(advantages, batch["labels"] != -100)
        rewards.append(groups.mean().item())
        if scored.any():
            rows = {name: x[scored] for name, x in batch.items()}
            scores = core.score(model, **rows)
            ratios = (scores.log_probs - scores.log_probs.detach()).exp()  # on policy: of value 1, with a gradient
            bounded = ratios.clamp(1 - EPSILON, 1 + EPSILON)
            gains = torch.minimum(ratios * advantages[scored, None], bounded * advantages[scored, None])
            loss = -(gains * scores.label_mask).sum() / tokens
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if len(rewards) == options.steps:
            break
    print(json.dumps(rewards))


if __name__ == "__main__":
    main()
