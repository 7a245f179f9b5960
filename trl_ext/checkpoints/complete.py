"""Whether a checkpoint was written whole: a file in its folder says that it is being written, until all of it is there.

Checkpoints of stock TRL have no such file and stay usable.
"""

import json
import re
import shutil
from pathlib import Path

_MARK = "_incomplete"
_MARK_SAYS = "This checkpoint is being written, or its writing was interrupted. Do not train on from it.\n"
_STATE = "trainer_state.json"  # transformers writes it after weights and optimizer
_NAME = re.compile(r"checkpoint-(\d+)")


def begin(folder: Path) -> None:
    """Make `folder`, or mark the one that is there, as incomplete; what a killed process left of it goes.

    At every moment the folder is missing, as it was, or marked.
    """
    discard(folder.with_name(f".{folder.name}"))  # left between the next lines by another
    if (folder / _MARK).exists():
        discard(folder)
    if not folder.exists():
        unnamed = folder.with_name(f".{folder.name}")
        unnamed.mkdir(parents=True)
        (unnamed / _MARK).write_text(_MARK_SAYS)
        unnamed.rename(folder)
    else:
        (folder / _MARK).write_text(_MARK_SAYS)


def finish(folder: Path) -> None:
    """Say that everything is in `folder`."""
    (folder / _MARK).unlink()


def is_complete(folder: Path) -> bool:
    """Whether a checkpoint holds all that was saved: ours by the mark, any by transformers' last file."""
    if (folder / _MARK).exists():
        return False
    try:
        json.loads((folder / _STATE).read_text())
    except (OSError, ValueError):
        return False
    return True


def complete_checkpoints(run: Path) -> list[Path]:
    """The complete checkpoints of a run's folder, by their steps."""
    return [folder for folder in _checkpoints(run) if is_complete(folder)]


def half_written(run: Path) -> list[Path]:
    """Those whose writing was interrupted, by their steps."""
    return [folder for folder in _checkpoints(run) if not is_complete(folder)]


def discard(folder: Path) -> None:
    """Delete `folder`, if it is there; it passes for no checkpoint from the first moment on."""
    if not folder.exists():
        return
    gone = folder.with_name(f".gone-{folder.name.lstrip('.')}")
    shutil.rmtree(gone, ignore_errors=True)
    folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _checkpoints(run: Path) -> list[Path]:
    if not run.is_dir():
        return []
    steps = {int(match[1]): path for path in run.iterdir() if path.is_dir() and (match := _NAME.fullmatch(path.name))}
    return [steps[step] for step in sorted(steps)]
