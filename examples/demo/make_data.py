"""Writes the demo's data sets to `examples/demo/data/`, in TRL's formats; run again whenever `task.py` changes.

python examples/demo/make_data.py
"""

import json
import os
import random
from pathlib import Path

from task import Problem, final_number, problems, web_answers

DATA = Path(__file__).parent / "data"


def preference(problem: Problem, generator: random.Random) -> dict[str, str]:
    """DPO's pair: the right answer over a wrong one, as wrong as the web answers this problem."""
    wrong = {text: rate for text, rate in web_answers(problem).items() if final_number(text) != str(problem.answer)}
    (rejected,) = generator.choices(list(wrong), list(wrong.values()))
    return {"prompt": problem.prompt, "chosen": problem.worked(), "rejected": rejected}


def demonstration(problem: Problem) -> dict[str, str]:
    """SFT's row: the right answer."""
    return {"prompt": problem.prompt, "completion": problem.worked()}


def verifiable(problem: Problem) -> dict[str, str]:
    """A prompt and the number its answer must end in, for GRPO's reward and for the test."""
    return {"prompt": problem.prompt, "answer": str(problem.answer)}


def write(path: Path, rows: list[dict[str, str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.replace(unfinished, path)


if __name__ == "__main__":
    # Differences in which a column lends a ten stay out: taking the smaller digit from the larger is left to GRPO.
    # Those without stay in, as do sums without a carry, else the model would learn to carry always rather than when it
    # should.
    known = [problem for problem in problems("dpo", 8_000, seed=0) if problem.operation == "+" or not problem.carries]
    generator = random.Random(0)
    write(DATA / "dpo" / "train.jsonl", [preference(problem, generator) for problem in known[:4_000]])
    write(DATA / "sft" / "train.jsonl", [demonstration(problem) for problem in known[4_000:4_500]])
    write(DATA / "grpo" / "train.jsonl", [verifiable(problem) for problem in problems("grpo", 4_000, seed=0)])
    write(DATA / "test" / "test.jsonl", [verifiable(problem) for problem in problems("test", 1_000, seed=0)])
