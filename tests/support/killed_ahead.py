"""Trains with `generation_lag=1` in processes that get SIGTERM or SIGKILL at random times, until a run ends; and again.

`python killed_ahead.py FOLDER MODEL KILLS` prints, as JSON, the kills, the runs that ended, and whether the weights of
each are bit for bit those of a run that was not killed. Processes are forked, so that libraries are imported once.
"""

import json
import multiprocessing
import os
import random
import shutil
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import trl_ext
from lagged_sampling import OwnSampler, even_tokens, rows, short_text
from tiny import word_tokenizer

STEPS = 8


def train(folder: Path, model: str, resume: bool) -> None:
    torch.manual_seed(1)
    policy = AutoModelForCausalLM.from_pretrained(model)
    trainer = trl_ext.GRPOTrainer(
        model=policy,
        reward_funcs=[even_tokens, short_text],
        rollout_func=OwnSampler(AutoModelForCausalLM.from_pretrained(model), seconds=0.1),
        args=trl_ext.GRPOConfig(
            str(folder),
            generation_lag=1,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            steps_per_generation=4,  # two optimizer steps, so that most checkpoints hold completions and a batch ahead
            num_generations=4,
            max_completion_length=10,
            max_steps=STEPS,
            learning_rate=1e-2,
            save_steps=1,
            save_total_limit=2,
            bf16=False,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            show_plan=False,
        ),
        train_dataset=rows(24),
        processing_class=word_tokenizer(),
    )
    trainer.train(resume_from_checkpoint="auto" if resume else None)
    weights = torch.cat([x.detach().flatten() for x in trainer.model.parameters()])
    torch.save(weights, folder / "end.unfinished")
    os.replace(folder / "end.unfinished", folder / "end.pt")


def main() -> None:
    folder = Path(sys.argv[1])
    model = sys.argv[2]
    kills = int(sys.argv[3])
    torch.set_num_threads(1)
    fork = multiprocessing.get_context("fork")
    draws = random.Random(0)

    def start(name: str, resume: bool) -> multiprocessing.process.BaseProcess:
        (folder / name).mkdir(exist_ok=True)
        process = fork.Process(target=train, args=(folder / name, model, resume))
        process.start()
        return process

    begun = time.monotonic()
    process = start("whole", resume=False)
    process.join()
    seconds = time.monotonic() - begun
    whole = torch.load(folder / "whole" / "end.pt")
    killed = 0
    equal = []
    while killed < kills:
        resume = False
        while not (folder / "killed" / "end.pt").exists():
            process = start("killed", resume)
            process.join(draws.uniform(0.2, 0.8) * seconds)
            if process.exitcode is None and killed < kills:
                end = process.kill if killed % 2 else process.terminate
                end()
                killed += 1
            process.join()
            resume = True
        equal.append(torch.equal(torch.load(folder / "killed" / "end.pt"), whole))
        shutil.rmtree(folder / "killed")
    print(json.dumps({"killed": killed, "equal": equal}))


if __name__ == "__main__":
    main()
