r"""DPO in a training loop of your own, with Accelerate and LoRA, and without TRL:

    python examples/loop_dpo.py
    accelerate launch --num_processes 2 examples/loop_dpo.py  # on two GPUs
    ACCELERATE_USE_CPU=true torchrun --nproc_per_node 2 examples/loop_dpo.py  # without a GPU

It trains the demo's model on the demo's pairs. `--model` and `--pairs` name others: a Hub name or folder, and a JSONL
file with `prompt`, `chosen` and `rejected`. The last line that it prints is a list of losses.
"""

import argparse
import json
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from peft import LoraConfig, get_peft_model
from torch.nn.functional import logsigmoid
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_ext import core

BETA = 0.1


def collate(pairs: list[dict[str, str]], tokenizer: Any) -> dict[str, torch.Tensor]:
    """Return a padded batch: the chosen completions, then the rejected ones. Labels are -100 on prompts and padding."""
    ids, labels = [], []
    for column in ("chosen", "rejected"):
        for pair in pairs:
            prompt = tokenizer(pair["prompt"])["input_ids"]
            whole = [*tokenizer(pair["prompt"] + pair[column])["input_ids"], tokenizer.eos_token_id]
            ids.append(torch.tensor(whole))
            labels.append(torch.tensor([-100] * len(prompt) + whole[len(prompt) :]))
    return {
        "input_ids": pad_sequence(ids, batch_first=True, padding_value=tokenizer.pad_token_id),
        "attention_mask": pad_sequence([torch.ones_like(x) for x in ids], batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="examples/demo/model")
    parser.add_argument("--pairs", default="examples/demo/data/dpo/train.jsonl")
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    options = parser.parse_args()

    accelerator = Accelerator()
    set_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model)
    model = get_peft_model(model, LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    core.attach(model)  # before `prepare`, which wraps the forward
    reference = core.Reference(model, accelerator, within=model.disable_adapter)
    optimizer = torch.optim.AdamW(model.parameters(), options.learning_rate, weight_decay=0.0)
    with open(options.pairs) as file:
        pairs = [json.loads(line) for line in file]
    loader = DataLoader(pairs, options.batch_size, collate_fn=lambda rows: collate(rows, tokenizer))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    losses: list[float] = []
    while len(losses) < options.steps:
        for batch in loader:
            before = reference.log_probs(**batch)  # each pair is scored once, however many epochs there are
            ratios = (core.score(model, **batch).log_probs - before).sum(dim=1)
            chosen, rejected = ratios.chunk(2)
            loss = -logsigmoid(BETA * (chosen - rejected)).mean()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            if len(losses) == options.steps:
                break
    if accelerator.is_main_process:
        print(json.dumps(losses))


if __name__ == "__main__":
    main()
