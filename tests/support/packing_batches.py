"""Padded batches as TRL's trainers make them, and a count in plain Python of the tokens that must be processed."""

import random
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import torch
from torch import Tensor
from trl.trainer.dpo_trainer import DataCollatorForPreference

PAD, FIRST, V = 0, 3, 97


@dataclass(frozen=True)
class Batch:
    """A padded batch of shape `(B, S)` for the scoring forward. Labels that are not scored are -100."""

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor

    @property
    def inputs(self) -> dict[str, Tensor]:
        return {"input_ids": self.input_ids, "attention_mask": self.attention_mask, "labels": self.labels}

    def with_tokens(self, row: int, columns: Any, tokens: Any) -> "Batch":
        """Return the batch with other `tokens` in some columns of a row; labels that are set change too."""
        ids, labels = self.input_ids.clone(), self.labels.clone()
        ids[row, columns] = torch.as_tensor(tokens)
        labels[row] = torch.where(labels[row] == -100, -100, ids[row])
        return Batch(ids, self.attention_mask, labels)

    def rows(self, rows: Any) -> "Batch":
        return Batch(self.input_ids[rows], self.attention_mask[rows], self.labels[rows])


def tokens_needed(batch: Batch, share: bool = True, in_columns: bool = False, router: bool = False) -> int:
    """Count the tokens that must be processed: one for each distinct start of a row that ends in a needed token.

    A row needs its tokens up to the last that predicts a label; with a router loss, all of its tokens. If no token is
    needed, one is processed.

    Args:
        share: whether two rows with the same start share its tokens.
        in_columns: whether they share them only in the same columns.
    """
    starts = set()
    rows = zip(batch.input_ids.tolist(), batch.attention_mask.tolist(), batch.labels.tolist(), strict=True)
    for row, (ids, mask, labels) in enumerate(rows):
        real = [column for column, is_real in enumerate(mask) if is_real]
        needed = real if router else [column for column in real if any(x != -100 for x in labels[column + 1 :])]
        for column in needed:
            start = tuple(ids[real[0] : column + 1])
            starts.add((start, real[0] if in_columns else None, None if share else row))
    return max(len(starts), 1)


def grpo(
    groups: list[tuple[list[int], list[list[int]]]],
    unscored: dict[tuple[int, int], list[int]] | None = None,
    order: list[int] | None = None,
    more: tuple[int, int] = (0, 0),
) -> Batch:
    """Make a GRPO batch: prompts padded on the left, completions on the right.

    Args:
        groups: the prompt and the completions of each group.
        unscored: positions in a completion (group, completion) that an environment wrote.
        order: the order of rows.
        more: extra columns of padding on the left and the right, for longer rows in other micro-batches.
    """
    rows = []
    wide = max(len(prompt) for prompt, _ in groups) + more[0]
    long = max(len(completion) for _, completions in groups for completion in completions) + more[1]
    for g, (prompt, completions) in enumerate(groups):
        for c, completion in enumerate(completions):
            left, right = wide - len(prompt), long - len(completion)
            dropped = (unscored or {}).get((g, c), [])
            labels = [-100 if place in dropped else token for place, token in enumerate(completion)]
            rows.append(
                (
                    [PAD] * left + prompt + completion + [PAD] * right,
                    [0] * left + [1] * (len(prompt) + len(completion)) + [0] * right,
                    [-100] * wide + labels + [-100] * right,
                )
            )
    rows = rows if order is None else [rows[i] for i in order]
    return Batch(*(torch.tensor(field) for field in zip(*rows, strict=True)))


def dpo(pairs: list[tuple[list[int], list[int], list[int]]], **collator: Any) -> Batch:
    """Make a batch like TRL's collator, from prompt, chosen and rejected of each pair."""
    examples = [dict(zip(("prompt_ids", "chosen_ids", "rejected_ids"), pair, strict=True)) for pair in pairs]
    collated = DataCollatorForPreference(pad_token_id=PAD, **collator)(examples)
    ids, mask = collated["input_ids"], collated["attention_mask"]
    return Batch(ids, mask, ids.masked_fill(collated["completion_mask"] == 0, -100))


def words(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(FIRST, V) for _ in range(count)]


def grpo_example(seed: int = 0, group: int = 3) -> Batch:
    """Make three shuffled groups, longer than the windows.

    The second prompt begins with a part of the first; the third shares nothing. Some completions have one token, some
    the same start, one has tokens of an environment, and one is fully masked.
    """
    rng = random.Random(seed)
    shared = words(rng, 9)
    prompts = [shared + words(rng, 8), shared + words(rng, 3), words(rng, 6)]
    groups = []
    for prompt in prompts:
        alike = words(rng, 3)
        lengths = [1, 14, *(rng.randint(2, 14) for _ in range(group - 2))]
        groups.append((prompt, [(alike if n > 4 else [])[:n] + words(rng, n - 3 * (n > 4)) for n in lengths]))
    order = list(range(3 * group))
    rng.shuffle(order)
    return grpo(groups, unscored={(1, 1): [2, 3, 4, 12, 13], (2, 1): list(range(14))}, order=order, more=(2, 1))


def dpo_example(seed: int = 0) -> Batch:
    """Make pairs whose completions have the same start or not; two pairs have the same prompt."""
    rng = random.Random(seed)
    first = words(rng, 12)
    pairs = []
    for prompt, alike in ((first, 3), (words(rng, 17), 0), (first, 1)):
        start = words(rng, alike)
        pairs.append((prompt, start + words(rng, rng.randint(2, 15)), start + words(rng, rng.randint(2, 15))))
    return dpo(pairs)


EXAMPLES = {"grpo": grpo_example, "dpo": dpo_example}

# The pad token may be a real token, for example EOS
_TOKENS = st.sampled_from([PAD, 5, 6])


def _some(least: int, most: int) -> st.SearchStrategy[list[int]]:
    return st.lists(_TOKENS, min_size=least, max_size=most)


@st.composite
def grpo_batches(draw: st.DrawFn) -> Batch:
    """Draw one to three groups. Prompts are equal, nearly equal or have the same start; completions may be empty."""
    starts = draw(st.lists(_some(0, 6), min_size=1, max_size=2))
    groups, unscored = [], {}
    for g in range(draw(st.integers(1, 3))):
        prompt = draw(st.sampled_from(starts)) + draw(_some(0, 3))
        completions = draw(st.lists(_some(0, 6), min_size=1, max_size=3))
        groups.append((prompt or [5], completions))
        for c, completion in enumerate(completions):
            places = st.sampled_from([[], list(range(len(completion)))])
            unscored[g, c] = draw(places | st.lists(st.integers(0, 5), max_size=3))
    rows = sum(len(completions) for _, completions in groups)
    more = draw(st.tuples(st.integers(0, 3), st.integers(0, 3)))
    return grpo(groups, unscored, draw(st.permutations(range(rows))), more)


@st.composite
def dpo_batches(draw: st.DrawFn) -> Batch:
    """Draw one to three pairs. Chosen and rejected may have the same start, be equal or empty; prompts may repeat."""
    prompts = draw(st.lists(_some(1, 7), min_size=1, max_size=2))
    pairs = []
    for _ in range(draw(st.integers(1, 3))):
        alike = draw(_some(0, 4))
        pairs.append((draw(st.sampled_from(prompts)), alike + draw(_some(0, 4)), alike + draw(_some(0, 4))))
    return dpo(pairs, pad_to_multiple_of=draw(st.sampled_from([None, 4])))


@st.composite
def any_batches(draw: st.DrawFn) -> Batch:
    """Draw rows padded on both sides, with labels on any token that follows a real one."""
    width = draw(st.integers(2, 10))
    rows = []
    for _ in range(draw(st.integers(1, 5))):
        left = draw(st.integers(0, width - 1))
        ids = draw(_some(1, width - left))
        right = width - left - len(ids)
        wanted = draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
        labels = [token if i and want else -100 for i, (token, want) in enumerate(zip(ids, wanted, strict=True))]
        rows.append(
            (
                [PAD] * left + ids + [PAD] * right,
                [0] * left + [1] * len(ids) + [0] * right,
                [-100] * left + labels + [-100] * right,
            )
        )
    return Batch(*(torch.tensor(field) for field in zip(*rows, strict=True)))
