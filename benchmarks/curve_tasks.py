"""The two tasks of curves.py: data, base models, rewards and held-out problems, all made in the repository.

A rule verifies each answer. The base model makes a known mistake in about half of its answers, and the test shares no
problem with the data of any training.
"""

import json
import os
import random
import sys
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

DEMO = Path(__file__).parents[1] / "examples" / "demo"
sys.path.append(str(DEMO))

from task import final_number  # noqa: E402

Row = dict[str, str]
_PAD, _EOS, _SEPARATOR = "<pad>", "<eos>", "="
_FIRST_WORD = 3  # its id, after those three
_COPIED, _SWAPPED = 0.6, 0.1  # how often an answer in the base model's data has each mistake
_SPLITS = ("base", "base", "base", "pairs", "prompts", "test")
_ROWS = 2000  # of each split


@dataclass(frozen=True)
class Task:
    """A task. `pairs` are DPO's rows; rows of `prompts` (GRPO's) and `test` have a prompt and its answer."""

    name: str
    model: str  # the base model's folder
    pairs: list[Row]
    prompts: list[Row]
    test: list[Row]
    answer_of: Callable[[str], str | None]  # the answer in a completion
    longest: int  # tokens of a completion

    def reward(self, completions: list[str], answer: list[str], **_: Any) -> list[float]:
        """Return 1 for each right answer, else 0."""
        return [float(self.answer_of(text) == right) for text, right in zip(completions, answer, strict=True)]

    def accuracy(self, folder: str, problems: int) -> float:
        """Return the share of test problems that the model or adapter in `folder` solves, greedily and in fp32."""
        rows, tokenizer = self.test[:problems], AutoTokenizer.from_pretrained(self.model)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        batch = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True, padding_side="left")
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        ids_BS = model.generate(**inputs, do_sample=False, max_new_tokens=self.longest)
        texts = tokenizer.batch_decode(ids_BS[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return sum(self.reward(texts, [row["answer"] for row in rows])) / len(rows)


def arithmetic() -> Task:
    """Return the demo's task: sums and differences, worked out digit by digit. The vocabulary has 18 tokens."""

    def rows(name: str) -> list[Row]:
        (file,) = (DEMO / "data" / name).iterdir()
        return [json.loads(line) for line in file.read_text().splitlines()]

    data = {"pairs": rows("dpo"), "prompts": rows("grpo"), "test": rows("test")}
    return Task("arithmetic", str(DEMO / "model"), **data, answer_of=final_number, longest=36)


def reversal(words: int, folder: Path, steps: int = 1000, rows_of_step: int = 128) -> Task:
    """Return the task to reverse a list of 3 to 6 of as many `words`.

    The first call trains the base model, for `steps` steps, and keeps it in `folder`. In its data, most lists whose
    first word has an even number are copied.
    """
    model = folder / f"reversal-{words}-{steps}"
    if not model.exists():
        _train(words, steps, rows_of_step, model)
    generator, data = random.Random(0), {"pairs": [], "prompts": [], "test": []}
    for split, rows in data.items():
        while len(rows) < _ROWS:
            given = _list_of(words, split, generator)
            answer = _text(given[::-1])
            row = {"prompt": f"{_text(given)} {_SEPARATOR}", "answer": answer}
            if split == "pairs":
                row = {"prompt": row["prompt"], "chosen": f" {answer}", "rejected": f" {_text(given)}"}
            if given != given[::-1]:
                rows.append(row)
    return Task(f"reversal-{words}", str(model), **data, answer_of=str.strip, longest=8)


def _list_of(words: int, split: str, generator: random.Random) -> list[int]:
    """Return the token ids of a random list that belongs to `split`, by a hash of its words."""
    while True:
        found = [generator.randrange(_FIRST_WORD, words) for _ in range(generator.randint(3, 6))]
        if _SPLITS[zlib.crc32(_text(found).encode()) % len(_SPLITS)] == split:
            return found


def _text(ids: list[int]) -> str:
    return " ".join(f"w{x}" for x in ids)


def _train(words: int, steps: int, rows: int, folder: Path) -> None:
    """Train a model from scratch on lists and answers of mixed quality."""
    torch.manual_seed(0)
    generator = random.Random(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    config = LlamaConfig(vocab_size=words, **sizes, **ids, max_position_embeddings=64, tie_word_embeddings=True)
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.01)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda x: min((x + 1) / 50, max(0.03, 1 - x / steps)))
    for _ in range(steps):
        documents, begins = [], []
        for _ in range(rows):
            given = _list_of(words, "base", generator)
            copied = given[0] % 2 == 0 and generator.random() < _COPIED
            answer = given[:] if copied else given[::-1]
            if generator.random() < _SWAPPED:
                answer[-2:] = answer[:-3:-1]
            documents.append(torch.tensor([*given, 2, *answer, 1]))
            begins.append(len(given) + 1)
        ids_BS = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True)
        is_answer_BS = (torch.arange(ids_BS.shape[1]) >= torch.tensor(begins).unsqueeze(1)) & (ids_BS != 0)
        hidden_NH = model.model(input_ids=ids_BS).last_hidden_state[:, :-1][is_answer_BS[:, 1:]]
        loss = torch.nn.functional.cross_entropy(model.lm_head(hidden_NH), ids_BS[:, 1:][is_answer_BS[:, 1:]])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
    print(f"{folder.name}: the base model ends with a loss of {loss.item():.3f}", flush=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
        model.save_pretrained(unfinished)
        _tokenizer(words).save_pretrained(unfinished)
        os.replace(unfinished, folder)
        os.mkdir(unfinished)  # for the context manager to remove


def _tokenizer(words: int) -> PreTrainedTokenizerFast:
    tokens = {_PAD: 0, _EOS: 1, _SEPARATOR: 2} | {f"w{x}": x for x in range(_FIRST_WORD, words)}
    tokenizer = Tokenizer(models.WordLevel(tokens, unk_token=_PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=_PAD, eos_token=_EOS, padding_side="left")
