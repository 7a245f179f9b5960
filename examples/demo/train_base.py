"""Trains the demo's base model from scratch on the web of worked answers, and writes it to `examples/demo/model/`.

    python examples/demo/train_base.py

The model is shipped in the repository, so the demo never runs this; run it to see where the model comes from. It takes
about 15 minutes on one CPU core. Training goes on to the plateau: the held-out loss of an answer has to stand still
over the last fifth of the steps. How close it came to the entropy of the web itself, which is known here, is printed
beside.
"""

import argparse
import csv
import math
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from task import Problem, problems, web_answers

MODEL = Path(__file__).parent / "model"
WEB_SIZE = 200_000
HELD_OUT = 1_000


def web_problems(seed: int) -> tuple[list[Problem], list[Problem]]:
    """Problems of the training documents, and of the held-out documents that measure the plateau."""
    found = problems("web", WEB_SIZE + HELD_OUT, seed)
    return found[:WEB_SIZE], found[WEB_SIZE:]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, except for `, ` and `, so `."""
    vocabulary = ["<pad>", "<eos>", *"0123456789+-=?", ", ", ", so "]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(", so |, |."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left", model_max_length=64
    )


def encode(documents: list[tuple[str, str]], tokenizer: PreTrainedTokenizerFast) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids of `(prompt, answer)` documents, padded on the right, and the mask of the answers; both `(N, S)`."""
    prompts = [len(ids) for ids in tokenizer([prompt for prompt, _ in documents])["input_ids"]]
    rows = tokenizer([prompt + answer + tokenizer.eos_token for prompt, answer in documents])["input_ids"]
    length = max(map(len, rows))
    ids = torch.tensor([row + [tokenizer.pad_token_id] * (length - len(row)) for row in rows])
    position = torch.arange(length)
    start, end = torch.tensor(prompts)[:, None], torch.tensor([len(row) for row in rows])[:, None]
    return ids, (position >= start) & (position < end)


def answer_loss(model: LlamaForCausalLM, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean negative log-likelihood of a whole answer, in nats. Prompts are random numbers, so they are not learned."""
    logits = model(input_ids=ids).logits[:, :-1]
    labels = ids[:, 1:].masked_fill(~mask[:, 1:], -100)
    total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return total / len(ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3500)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=MODEL)
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    tokenizer = make_tokenizer()
    train_problems, held_out_problems = web_problems(options.seed)
    generator = random.Random(options.seed)

    def document(problem: Problem) -> tuple[str, str]:
        answers = web_answers(problem)
        return problem.prompt, generator.choices(list(answers), list(answers.values()))[0]

    train_ids, train_mask = encode([document(problem) for problem in train_problems], tokenizer)
    held_out_ids, held_out_mask = encode([document(problem) for problem in held_out_problems], tokenizer)
    # The mean of -log p(document) under the web that wrote it: no model can do better on these documents.
    floor = sum(
        -math.log(web_answers(problem)[str(tokenizer.decode(ids[mask], skip_special_tokens=True))])
        for problem, ids, mask in zip(held_out_problems, held_out_ids, held_out_mask, strict=True)
    ) / len(held_out_problems)

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    print(
        f"{model.num_parameters():,} parameters, {len(train_ids):,} documents, "
        f"entropy of the web {floor:.4f} nats an answer"
    )

    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    # The rate falls over the first four fifths. The last fifth keeps a constant rate, so that a loss that stands still
    # there has nothing left to learn, rather than no rate to learn with.
    warmup, falling = options.steps // 20, 0.8 * options.steps

    def rate(step: int) -> float:
        fallen = min(1.0, step / falling)
        return min((step + 1) / (warmup + 1), 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * fallen)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    curve: list[dict[str, float]] = []
    started = time.perf_counter()
    order = torch.randperm(len(train_ids))
    for step in range(1, options.steps + 1):
        if len(order) < options.batch_size:
            order = torch.randperm(len(train_ids))
        rows, order = order[: options.batch_size], order[options.batch_size :]
        loss = answer_loss(model, train_ids[rows], train_mask[rows])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % max(1, options.steps // 60) == 0 or step == options.steps:
            with torch.no_grad():
                parts = zip(held_out_ids.split(200), held_out_mask.split(200), strict=True)
                held_out = sum(answer_loss(model, ids, mask).item() for ids, mask in parts) / (HELD_OUT // 200)
            curve.append({"step": step, "train_loss": round(loss.item(), 4), "held_out_loss": round(held_out, 4)})
            print(f"{curve[-1]}, {time.perf_counter() - started:.0f} s", flush=True)

    # Written beside and moved into place, so that an interrupted run never leaves half a model.
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.output.parent) as folder:
        written = Path(folder) / "model"
        model.save_pretrained(written)
        tokenizer.save_pretrained(written)
        with open(written / "training_curve.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(curve[0]))
            writer.writeheader()
            writer.writerows(curve)
        if options.output.exists():
            shutil.rmtree(options.output)
        os.replace(written, options.output)

    # Means over the two halves of the last fifth: a single point moves by half a percent from one evaluation to the
    # next.
    last_fifth = [point["held_out_loss"] for point in curve if point["step"] > 0.8 * options.steps]
    earlier, later = last_fifth[: len(last_fifth) // 2], last_fifth[len(last_fifth) // 2 :]
    change = statistics.mean(later) / statistics.mean(earlier) - 1
    print(
        f"held-out loss moved {change:+.2%} over the last fifth of the steps; "
        f"it ends {last_fifth[-1] / floor - 1:.2%} above the entropy of the web"
    )
    if abs(change) >= 0.01:
        sys.exit("The loss has not reached its plateau: train for more --steps.")


if __name__ == "__main__":
    main()
