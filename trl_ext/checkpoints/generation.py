"""The checkpoint file with the position in the generation cycle of GRPO or RLOO, and its untrained completions."""

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
    """What one rank saves.

    Args:
        micro_batch (`int`): number of micro-batches trained on since training began.
        sampled_at_step (`int`): the optimizer step at which the completions were sampled.
        further_prompts (`int`): number of prompts that dynamic sampling drew in addition to the data loader's.
        schedule (`dict[str, int]`): the arguments that must be the same when training resumes.
        slices (`list[dict]`, *optional*): TRL's generation buffer: each micro-batch's tensors and JSON values. `None`
            if no completions are left to train on.
        lost (`str`, *optional*): why `slices` lacks completions.
        sampler_is_older (`bool`): whether older weights than those of that step sampled them.
    """

    micro_batch: int
    sampled_at_step: int
    further_prompts: int
    schedule: dict[str, int]
    slices: list[dict[str, Any]] | None
    lost: str | None = None
    sampler_is_older: bool = False


def _file(folder: Path, rank: int) -> Path:
    return folder / f"generation_{rank}.safetensors"


def write_generation(folder: Path, rank: int, saved_generation: SavedGeneration) -> None:
    """Write this rank's part into a checkpoint, atomically.

    Raises:
        `TypeError`: an entry of a slice is neither a tensor nor a JSON value.
    """
    slices = saved_generation.slices or []
    # The slices are views of one tensor, and safetensors refuses tensors that share memory
    tensors = {
        f"{i}/{name}": x.detach().cpu().clone(memory_format=torch.contiguous_format)
        for i, entries in enumerate(slices)
        for name, x in entries.items()
        if isinstance(x, Tensor)
    }
    json_entries = [{name: x for name, x in entries.items() if not isinstance(x, Tensor)} for entries in slices]
    state = {**vars(saved_generation), "slices": None if saved_generation.slices is None else json_entries}
    path = _file(folder, rank)
    unfinished = path.with_suffix(".unfinished")
    save_file(tensors, unfinished, metadata={"format": _FORMAT, "state": json.dumps(state)})
    os.replace(unfinished, path)


def read_generation(folder: Path, rank: int, device: torch.device) -> SavedGeneration | None:
    """Read this rank's part, with tensors on `device`; `None` if the checkpoint has none.

    Raises:
        `ValueError`: the file has another format.
    """
    path = _file(folder, rank)
    if not path.exists():
        return None
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != _FORMAT:
            raise ValueError(
                f"{path} has the format {metadata.get('format')!r}, but the installed trl_ext reads {_FORMAT!r}. "
                "Resume with the version of trl_ext that wrote it, or delete the file to sample new completions."
            )
        state = json.loads(metadata["state"])
        for key in file.keys():  # noqa: SIM118  # not a mapping
            i, name = key.split("/", 1)
            state["slices"][int(i)][name] = file.get_tensor(key).to(device)
    return SavedGeneration(**state)


def position_in_data(
    global_step: int, accumulation_steps: int, micro_batches_of_an_epoch: int | None, epoch_begins_again: bool = False
) -> tuple[int, int]:
    """Return the finished epochs and all micro-batches trained on after `global_step` optimizer steps.

    The last step of an epoch has fewer micro-batches if `accumulation_steps` does not divide their number.

    Args:
        micro_batches_of_an_epoch (`int`, *optional*): `None` if unknown before the data ends.
        epoch_begins_again (`bool`): whether the unfinished epoch starts again, and does not count.
    """
    if micro_batches_of_an_epoch is None:
        return 0, 0 if epoch_begins_again else global_step * accumulation_steps
    steps_of_an_epoch = max(-(-micro_batches_of_an_epoch // accumulation_steps), 1)
    epochs, steps = divmod(global_step, steps_of_an_epoch)
    begun = 0 if epoch_begins_again else steps * accumulation_steps
    return epochs, epochs * micro_batches_of_an_epoch + begun
