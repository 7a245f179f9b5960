"""Complete and incomplete checkpoints: a file in the folder marks a checkpoint until all of it is written.

Checkpoints of stock TRL have no such file and stay usable.
"""

import json
import re
import shutil
from pathlib import Path

_MARK = "_incomplete"
_MARK_SAYS = "This checkpoint is being written, or writing it was interrupted. Do not resume from it.\n"
_STATE = "trainer_state.json"  # transformers writes it after weights and optimizer
_NAME = re.compile(r"checkpoint-\d+")


def begin(folder: Path) -> None:
    """Create `folder`, or keep the existing one, and mark it incomplete. Delete leftovers of a killed process first.

    A kill at any moment leaves the folder missing, unchanged, or marked.
    """
    unnamed = folder.with_name(f".{folder.name}")
    discard(unnamed)  # left by a process that was killed before the rename
    if (folder / _MARK).exists():
        discard(folder)
    if folder.exists():
        (folder / _MARK).write_text(_MARK_SAYS)
    else:
        unnamed.mkdir(parents=True)
        (unnamed / _MARK).write_text(_MARK_SAYS)
        unnamed.rename(folder)


def finish(folder: Path) -> None:
    (folder / _MARK).unlink()


def is_complete(folder: Path) -> bool:
    """Return whether all files were written: the mark is gone, and transformers' last file is valid JSON."""
    try:
        json.loads((folder / _STATE).read_text())
    except (OSError, ValueError):
        return False
    return not (folder / _MARK).exists()


def complete_checkpoints(run: Path) -> list[Path]:
    """Return the complete checkpoints in a run's folder, in order of step."""
    return [folder for folder in _checkpoints(run) if is_complete(folder)]


def half_written(run: Path) -> list[Path]:
    """Return the incomplete checkpoints in a run's folder, in order of step."""
    return [folder for folder in _checkpoints(run) if not is_complete(folder)]


def discard(folder: Path) -> None:
    """Delete `folder` if it exists. It is renamed first, so that a kill never leaves half of it under its name."""
    if not folder.exists():
        return
    gone = folder.with_name(f".gone-{folder.name.lstrip('.')}")
    shutil.rmtree(gone, ignore_errors=True)
    folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _checkpoints(run: Path) -> list[Path]:
    folders = [path for path in run.glob("checkpoint-*") if path.is_dir() and _NAME.fullmatch(path.name)]
    return sorted(folders, key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])
