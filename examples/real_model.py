r"""GRPO teaches a real model, SmolLM2-135M-Instruct, to answer with the last of three words; minutes on one CPU core.

    python examples/real_model.py --output_dir runs/real_model
    python examples/real_model.py --library trl --output_dir runs/real_model_trl  # the same training by stock TRL

The reward is 1 for the right word and nothing else. The words of held-out questions occur in no training prompt. Three
controls: the best constant answer, the untrained model, and `--learning_rate 0`, with which nothing may be gained.
`make bench-real-task` trains three seeds of all, with a model from the package index.
"""

import argparse
import json
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

WORDS = """
anchor apple arrow basket bottle bread bridge button camera candle castle chair cloud dance desert doctor dragon
drum eagle earth engine feather field flame flower forest garden ghost glove grape guitar hammer hill honey hotel
house image insect iron island jacket jewel judge jungle kettle king kitten knife ladder lake lamp leaf lemon market
metal mirror moon mouse needle nest night nose ocean olive onion orange oven paper pearl pencil piano planet queen
quilt rabbit ring river robot rope sand silver snake spoon stone table tent tiger tower train uncle valley vase
village violin voice wagon water wheel window winter wolf yard zebra
""".split()  # noqa: SIM905
HELD_OUT_WORDS = WORDS[::4]
TRAINING_WORDS = [word for word in WORDS if word not in HELD_OUT_WORDS]
Question = dict[str, str]


def questions(count: int, words: list[str], seed: str) -> list[Question]:
    """Return questions, each with its answer."""
    generator = random.Random(seed)
    draws = [generator.sample(words, 3) for _ in range(count)]
    return [{"question": f"What is the last word of: {' '.join(draw)}?", "answer": draw[-1]} for draw in draws]


def prompt_of(question: Question) -> list[dict[str, str]]:
    """Return the chat that asks a question, after one that is answered."""
    return [
        {"role": "system", "content": "Answer with nothing but the answer."},
        {"role": "user", "content": "What is the last word of: gold bell coat?"},
        {"role": "assistant", "content": "coat"},
        {"role": "user", "content": question["question"]},
    ]


def right_answer(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """Return the reward of each completion."""
    pairs = zip(completions, answer, strict=True)
    return [float(completion[0]["content"].strip() == word) for completion, word in pairs]


def right_answers(model: Any, tokenizer: Any, held_out: list[Question]) -> int:
    """Return how many questions the model answers right, with greedy decoding."""
    count = 0
    for start in range(0, len(held_out), 32):
        part = held_out[start : start + 32]
        chats = [tokenizer.apply_chat_template(prompt_of(x), add_generation_prompt=True, tokenize=False) for x in part]
        batch = tokenizer(chats, return_tensors="pt", padding=True, add_special_tokens=False).to(model.device)
        with torch.no_grad():
            ids = model.generate(**batch, max_new_tokens=8, do_sample=False)
        texts = tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        count += sum(text.strip() == x["answer"] for text, x in zip(texts, part, strict=True))
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="folder or name on the Hub")
    parser.add_argument("--library", choices=["trl_ext", "trl"], default="trl_ext")
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps, each with 4 questions and 32 answers")
    parser.add_argument("--learning_rate", type=float, default=3e-4)
    parser.add_argument("--held_out", type=int, default=96, help="number of held-out questions")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output_dir", type=Path, required=True)
    options = parser.parse_args()
    if options.library == "trl_ext":
        from trl_ext import GRPOConfig, GRPOTrainer
    else:
        from trl import GRPOConfig, GRPOTrainer

    held_out = questions(options.held_out, HELD_OUT_WORDS, f"held out {options.seed}")
    training = questions(2000, TRAINING_WORDS, f"training {options.seed}")
    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32),
        reward_funcs=right_answer,
        args=GRPOConfig(
            str(options.output_dir),
            max_steps=options.steps,
            learning_rate=options.learning_rate,
            lr_scheduler_type="constant",
            per_device_train_batch_size=32,
            num_generations=8,
            max_completion_length=8,
            bf16=False,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            seed=options.seed,
        ),
        train_dataset=Dataset.from_list([{"prompt": prompt_of(x), "answer": x["answer"]} for x in training]),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    )

    most_common, constant = Counter(x["answer"] for x in held_out).most_common(1)[0]
    before = right_answers(trainer.model, tokenizer, held_out)
    begun = time.process_time()
    trainer.train()
    seconds = time.process_time() - begun
    after = right_answers(trainer.model, tokenizer, held_out)
    trainer.save_model()
    print(
        f"of {len(held_out)} held-out questions: always {most_common!r} {constant} right, untrained {before}", end=", "
    )
    print(f"trained {after}; {options.steps} steps in {seconds:.0f} s of CPU time")
    result = {"held_out": len(held_out), "constant": constant, "before": before, "after": after, "seconds": seconds}
    (options.output_dir / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
