"""The checkpoint file with the generation batch that was sampled ahead of its turn."""

import json
import os
from pathlib import Path
from typing import Any

_FORMAT = "trl_ext generation ahead 1"


def _file(folder: Path, rank: int) -> Path:
    return folder / f"generation_ahead_{rank}.json"


def write_ahead(folder: Path, rank: int, record: dict[str, Any] | None, lost: str | None = None) -> None:
    """Write this rank's record into a checkpoint, atomically. Without a record, remove that of an earlier run.

    Args:
        lost (`str`, *optional*): why there is no `record`.

    Raises:
        `TypeError`: a value of the record is not a JSON value.
    """
    path = _file(folder, rank)
    if record is None and lost is None:
        path.unlink(missing_ok=True)
        return
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps({"format": _FORMAT, "record": record, "lost": lost}))
    os.replace(unfinished, path)


def read_ahead(folder: Path, rank: int) -> tuple[dict[str, Any] | None, str | None]:
    """Read this rank's record, and why it is lost; neither if the checkpoint has no such file.

    Raises:
        `ValueError`: the file has another format.
    """
    path = _file(folder, rank)
    if not path.exists():
        return None, None
    content = json.loads(path.read_text())
    if content.get("format") != _FORMAT:
        raise ValueError(
            f"{path} has the format {content.get('format')!r}, but the installed trl_ext reads {_FORMAT!r}. Resume "
            "with the version of trl_ext that wrote it, or delete the file to sample the batch again."
        )
    return content["record"], content["lost"]
