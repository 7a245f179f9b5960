"""Which checkpoint training resumes from: the last that was written whole."""

from pathlib import Path

from ..checkpoints import complete_checkpoints, half_written, is_complete

_SPELT = {"true": True, "false": False}


def spelt(asked: str | bool | None) -> str | bool | None:
    """`"true"`, as a command line has it, is True."""
    if isinstance(asked, str) and not Path(asked).exists():
        return _SPELT.get(asked.lower(), asked)
    return asked


def found_checkpoint(asked: str | bool, run: Path) -> tuple[str | None, str | None]:
    """The checkpoint to resume from, and what there is to say; without the first the second is an error."""
    complete, interrupted = complete_checkpoints(run), half_written(run)
    others = f" The last complete one in {run} is {complete[-1].name}." if complete else ""
    if asked is not True:
        path = Path(str(asked))
        if path.is_dir() and not is_complete(path):
            return None, (
                f"`resume_from_checkpoint={str(asked)!r}` is no complete checkpoint: it was interrupted while it was "
                f"written, or is a folder of another kind.{others} `True` takes the last complete one in `output_dir`."
            )
        return str(asked), None
    if not complete:
        names = f": {', '.join(path.name for path in interrupted)} not written whole" if interrupted else ""
        return None, (
            f"`resume_from_checkpoint=True`, but no complete checkpoint is in `output_dir` ({run}){names}. Leave it "
            "off to train from the beginning."
        )
    later = [path.name for path in interrupted if _step(path) > _step(complete[-1])]
    if later:
        return str(
            complete[-1]
        ), f"{', '.join(later)} was not written whole: training resumes from {complete[-1].name}."
    return str(complete[-1]), None


def _step(path: Path) -> int:
    return int(path.name.rsplit("-", 1)[1])
