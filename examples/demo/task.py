"""The demo's task: three-digit sums and differences worked out column by column, and the mistakes people make in them.

A problem reads `358+467=?` and a worked answer `8+7=15, 5+6+1=12, 3+4+1=8, so 825`. The base model learns from a "web"
of answers of mixed quality (`web_answers`), so it can do the arithmetic, but does what the web mostly does.
"""

import random
import re
import zlib
from dataclasses import dataclass

# How often an answer on the web makes each mistake, among the problems that give the occasion for it. The first two
# are the majority there, so greedy decoding repeats them; the last two are not, so they show up in samples only.
DROPPED_CARRY = 0.6
SMALLER_FROM_LARGER = 0.6
FORGOTTEN_LAST_STEP = 0.3
OFF_BY_ONE = 0.06

# Every problem belongs to exactly one of these, decided by a hash of its numbers, so that no two data sets share one.
# The weights are sixteenths.
SPLITS = {"web": 12, "dpo": 1, "grpo": 2, "test": 1}


@dataclass(frozen=True)
class Problem:
    """A sum or a difference of two three-digit numbers; in a difference, `left` is the larger one."""

    left: int
    operation: str
    right: int

    @property
    def prompt(self) -> str:
        return f"{self.left}{self.operation}{self.right}=?"

    @property
    def answer(self) -> int:
        return self.left + self.right if self.operation == "+" else self.left - self.right

    @property
    def split(self) -> str:
        """The only data set that may hold this problem; `a+b` and `b+a` go together."""
        low, high = sorted((self.left, self.right))
        place = zlib.crc32(f"{low}{self.operation}{high}".encode()) % sum(SPLITS.values())
        for name, weight in SPLITS.items():
            if place < weight:
                return name
            place -= weight
        raise AssertionError("the weights of SPLITS cover every remainder")

    @property
    def carries(self) -> bool:
        """Whether a column above the first gets a carry (sum) or lends a ten to the one below (difference)."""
        return self.worked() != self.worked(careless=True)

    def worked(self, careless: bool = False, slip: tuple[int, int] | None = None, forget_last: bool = False) -> str:
        """The answer, column by column from the right.

        Args:
            careless (`bool`, *optional*, defaults to `False`):
                Drop the carries of a sum; in a difference, take the smaller digit from the larger in every column.
            slip (`tuple[int, int]`, *optional*):
                A column and what to add to its result, `(1, -1)` being one too little in the tens.
            forget_last (`bool`, *optional*, defaults to `False`):
                Leave the thousand of a sum out of the result.
        """
        columns, digits, carry = [], [], 0
        for column in range(3):
            upper, lower = (number // 10**column % 10 for number in (self.left, self.right))
            if self.operation == "+":
                terms = [upper, lower] + ([1] if carry and not careless else [])
            elif careless:
                terms = [max(upper, lower), -min(upper, lower)]
            else:
                upper -= carry
                carry = int(upper < lower)
                terms = [upper + 10 * carry, -lower]
            result = abs(sum(terms) + (slip[1] if slip is not None and slip[0] == column else 0))
            if self.operation == "+":
                carry = result // 10
            columns.append(
                str(terms[0]) + "".join(f"{'-' if self.operation == '-' else '+'}{abs(t)}" for t in terms[1:])
            )
            columns[-1] += f"={result}"
            digits.append(result if column == 2 and not forget_last else result % 10)
        return ", ".join([*columns, f"so {sum(digit * 10**column for column, digit in enumerate(digits))}"])


def web_answers(problem: Problem) -> dict[str, float]:
    """How the web answers this problem: each text with its probability.

    The mistakes strike independently of each other, so that learning to avoid one says nothing about the others.
    """
    outcomes: list[tuple[dict, float]] = [({}, 1.0)]

    def strike(choices: list[dict], rate: float) -> None:
        nonlocal outcomes
        hit = [({**o, **c}, p * rate / len(choices)) for o, p in outcomes for c in choices]
        outcomes = [(o, p * (1 - rate)) for o, p in outcomes] + hit

    if problem.carries:
        strike([{"careless": True}], DROPPED_CARRY if problem.operation == "+" else SMALLER_FROM_LARGER)
    if problem.operation == "+":
        strike([{"forget_last": True}], FORGOTTEN_LAST_STEP)
    strike([{"slip": (column, by)} for column in range(3) for by in (-1, 1)], OFF_BY_ONE)

    texts: dict[str, float] = {}
    for outcome, probability in outcomes:
        text = problem.worked(**outcome)
        texts[text] = texts.get(text, 0.0) + probability
    return texts


def problems(split: str, count: int, seed: int) -> list[Problem]:
    """`count` different problems of one split, half of them sums, in an order that depends on the seed alone."""
    generator = random.Random(f"{split} {seed}")
    found: dict[Problem, None] = {}
    while len(found) < count:
        left, right = generator.randint(100, 999), generator.randint(100, 999)
        operation = "+-"[len(found) % 2]
        if operation == "-" and left < right:
            left, right = right, left
        problem = Problem(left, operation, right)
        if problem.split == split:
            found[problem] = None
    return list(found)


def final_number(text: str) -> str | None:
    """The number after `so`, which has to end the text; `None` where there is none."""
    match = re.search(r"so (\d+)$", text)
    return match.group(1) if match else None


def right_answer(completions: list[str], answer: list[str], **_: object) -> list[float]:
    """Reward of GRPO: 1 where the completion ends in the right number, 0 elsewhere."""
    return [float(final_number(text) == right) for text, right in zip(completions, answer, strict=True)]
