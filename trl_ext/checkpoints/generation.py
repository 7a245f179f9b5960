"""GRPO's place in its cycle of generation, in a file, with the completions that are still to be trained on."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

_FORMAT = "trl_ext generation 1"


@dataclass(frozen=True, kw_only=True)
class SavedGeneration:
    """One rank's part.

    Args:
        micro_batch (`int`): micro-batches trained on, counted from the first of all.
        sampled_at_step (`int`): the optimizer step at which the completions were sampled.
        further_prompts (`int`): prompts that dynamic sampling has drawn beside those of the data loader.
        schedule (`dict[str, int]`): the arguments on which the meaning of the rest depends.
        slices (`list[dict]`, *optional*):
            TRL's generation buffer: for each micro-batch its entries, tensors or JSON values. `None` where nothing
            that was generated is still to be trained on.
        lost (`str`, *optional*): why completions that should be in `slices` are not.
    """

    micro_batch: int
    sampled_at_step: int
    further_prompts: int
    schedule: dict[str, int]
    slices: list[dict[str, Any]] | None
    lost: str | None = None


def generation_file(folder: Path, rank: int) -> Path:
    """Where a rank's part is kept in a checkpoint."""
    return folder / f"generation_{rank}.safetensors"


def write_generation(folder: Path, rank: int, saved: SavedGeneration) -> None:
    """Write a rank's part into a checkpoint, whole or not at all.

    Raises:
        `TypeError`: an entry of a slice is neither a tensor nor a JSON value.
    """
    tensors: dict[str, Tensor] = {}
    others: list[dict[str, Any]] = []
    for i, entries in enumerate(saved.slices or []):
        others.append({})
        for name, value in entries.items():
            if isinstance(value, Tensor):
                # Slices are views of one tensor, which the format refuses
                tensors[f"{i}/{name}"] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
            else:
                others[i][name] = value
    state = {**vars(saved), "slices": None if saved.slices is None else others}
    path = generation_file(folder, rank)
    unfinished = path.with_suffix(".unfinished")
    save_file(tensors, unfinished, metadata={"format": _FORMAT, "state": json.dumps(state)})
    os.replace(unfinished, path)


def read_generation(folder: Path, rank: int, device: torch.device) -> SavedGeneration | None:
    """A rank's part, with its tensors on `device`; `None` where the checkpoint has none.

    Raises:
        `ValueError`: the file is of another format.
    """
    path = generation_file(folder, rank)
    if not path.exists():
        return None
    file: Any
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != _FORMAT:
            raise ValueError(f"{path} has the format {metadata.get('format')!r}, where {_FORMAT!r} is read.")
        state = json.loads(metadata["state"])
        for key in file.keys():  # noqa: SIM118  # not a mapping
            i, name = key.split("/", 1)
            state["slices"][int(i)][name] = file.get_tensor(key).to(device)
    return SavedGeneration(**state)


def position_in_data(
    global_step: int, accumulation_steps: int, micro_batches_of_an_epoch: int | None, epoch_begins_again: bool = False
) -> tuple[int, int]:
    """Epochs finished, and micro-batches trained on in all, after `global_step` optimizer steps.

    The last window of an epoch is shorter where `accumulation_steps` does not divide it.

    Args:
        micro_batches_of_an_epoch (`int`, *optional*): `None` where only the end of the data will tell.
        epoch_begins_again (`bool`): whether those of an epoch that was begun do not count.
    """
    if micro_batches_of_an_epoch is None:
        return 0, 0 if epoch_begins_again else global_step * accumulation_steps
    steps_of_an_epoch = max(-(-micro_batches_of_an_epoch // accumulation_steps), 1)
    epochs, steps = divmod(global_step, steps_of_an_epoch)
    begun = 0 if epoch_begins_again else steps * accumulation_steps
    return epochs, epochs * micro_batches_of_an_epoch + begun
