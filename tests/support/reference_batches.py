"""Padded batches of given sequences, and a fake reference pass."""

import torch

from tiny import V_WORDS

WEIGHT = torch.randn(V_WORDS, 2, generator=torch.Generator().manual_seed(0))


def batch(rows, width=None, left=0):
    """Make a batch of rows (token ids, start of the completion), padded on the right, and by `left` on the left."""
    width = max(len(ids) for ids, _ in rows) if width is None else width
    names = ("input_ids", "attention_mask", "completion_mask")
    out = {name: torch.zeros(len(rows), left + width, dtype=torch.long) for name in names}
    for i, (ids, start) in enumerate(rows):
        at = slice(left, left + len(ids))
        out["input_ids"][i, at] = torch.tensor(ids)
        out["attention_mask"][i, at] = 1
        out["completion_mask"][i, left + start : left + len(ids)] = 1
    return out


def score(fed):
    """Return fake log-probs: the value of each label depends on all tokens up to it."""
    seen = torch.cumsum(WEIGHT[fed["input_ids"]] * fed["attention_mask"][..., None], dim=1)
    values = (seen[:, :-1, 0] + seen[:, 1:, 1]).sin() - 1
    return values.masked_fill(fed["completion_mask"][:, 1:] == 0, 0)
