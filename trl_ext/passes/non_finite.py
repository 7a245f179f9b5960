"""Where a loss that is not finite came from: which rows, and which pass or reward gave a value that is not finite."""

from collections.abc import Sequence

import torch
from torch import Tensor

ON_NON_FINITE_LOSS = ("stop", "skip")


def not_finite_rows(values: dict[str, Tensor | None], tokens_BC: Tensor) -> dict[int, list[str]]:
    """The rows in which a value is not finite, each with the names of such values, first come first.

    Args:
        values (`dict[str, Tensor]`): by the name of the pass they are from, of shape `(B,)`, `(B, 1)` or `(B, C)`.
            A value that a later one takes over where it is not finite itself is named alone.
        tokens_BC (`Tensor`, bool): the tokens that count.
    """
    rows: dict[int, list[str]] = {}
    named_BC = torch.zeros_like(tokens_BC)
    for name, value in values.items():
        if value is None:
            continue
        value = value.detach()
        wide = value.unsqueeze(1) if value.ndim == 1 else value
        # TRL makes the largest number of an infinite advantage
        bad_BC = ~wide.isfinite() | (wide.abs() == torch.finfo(wide.dtype).max)
        bad_BC = bad_BC.expand_as(tokens_BC) & tokens_BC & ~named_BC
        named_BC = named_BC | bad_BC
        for row in bad_BC.any(dim=1).nonzero().flatten().tolist():
            rows.setdefault(row, []).append(name)
    return rows


def labelled(inputs: dict[str, Tensor]) -> Tensor:
    """The tokens of DPO's loss, at the positions that predict them: `(2B, S - 1)`, bool."""
    return inputs["completion_mask"][:, 1:].bool()


def prompt_of(inputs: dict[str, Tensor], row: int) -> list[int]:
    """The token ids of the prompt of a row of DPO's batch."""
    prompt_S = inputs["attention_mask"][row].bool() & ~inputs["completion_mask"][row].bool()
    ids: list[int] = inputs["input_ids"][row][prompt_S].tolist()
    return ids


def steps_in_backward(optimizer: str) -> bool:
    """Whether an optimizer, by its name in transformers, steps in every backward."""
    return optimizer in ("lomo", "adalomo") or optimizer.endswith("_layerwise")


def why_not_skipped(*, engine: str | None, precision: str | None, optimizer: str) -> str | None:
    """Why an optimizer step cannot be left out once its gradients are there.

    Args:
        engine (`str`, *optional*): that trains several processes together, or shards for one.
        precision (`str`, *optional*): accelerate's mixed precision.
        optimizer (`str`): `args.optim`.
    """
    if engine is not None and engine.startswith("DeepSpeed"):
        return f"{engine} takes its step within the backward"
    if steps_in_backward(optimizer):
        return f"the optimizer `{optimizer}` takes its step within the backward"
    if precision == "fp16":
        return "the gradient scaler of fp16, which leaves out such steps itself, needs their gradients"
    return None


def check_first_rewards(
    rewards_BF: Tensor, gave_nan_B: Tensor, names: Sequence[str], *, infinite_is_watched: bool
) -> None:
    """Raise `ValueError` if a completion of the first generation batch has no reward to learn from, by mistake.

    Args:
        rewards_BF (`Tensor`): of each reward function; NaN where it gave NaN or None.
        gave_nan_B (`Tensor`, bool): a reward function gave NaN. One that none of them scores, for which all give None,
            is no mistake: TRL leaves it out.
        names (`Sequence[str]`): of the reward functions.
        infinite_is_watched (`bool`): the user has said what is to happen at a loss that is not finite.
    """
    unrewarded_B = rewards_BF.isnan().all(dim=1) & gave_nan_B
    infinite_B = rewards_BF.isinf().any(dim=1)
    bad_B = unrewarded_B if infinite_is_watched else unrewarded_B | infinite_B
    if bad_B.any():
        row = int(bad_B.nonzero()[0])
        raise ValueError(
            f"`reward_funcs`: completion {row} of the first generation batch was given {rewards_BF[row].tolist()} by "
            f"{list(names)}. Return a finite number for each completion, or None where the function does not apply."
        )
