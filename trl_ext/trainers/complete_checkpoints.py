"""Both trainers: a checkpoint counts once all of it is written, and training resumes from the last that does."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..checkpoints import begin, complete_checkpoints, discard, finish, half_written, is_complete
from ..compat import rotation_put_off

logger = logging.getLogger("trl_ext")

_SPELT = {"true": True, "false": False}


class CompleteCheckpointsMixin:
    """Mixed in before a TRL trainer."""

    accelerator: Any
    args: Any
    _resumes_from: Path | None = None
    _pushes_put_off: list[Callable[[], None]] | None = None

    def train(self, resume_from_checkpoint: str | bool | None = None, *positional: Any, **keywords: Any) -> Any:
        """TRL's own; `resume_from_checkpoint=True` takes the last checkpoint that was written whole,
        and so does `"true"`, as a command line has it.

        Raises:
            `ValueError`: there is none, or the one that was named was not.
        """
        if isinstance(resume_from_checkpoint, str) and not Path(resume_from_checkpoint).exists():  # of a command line
            resume_from_checkpoint = _SPELT.get(resume_from_checkpoint.lower(), resume_from_checkpoint)
        if resume_from_checkpoint:
            resume_from_checkpoint = self._complete_checkpoint(resume_from_checkpoint)
        self._resumes_from = Path(resume_from_checkpoint) if resume_from_checkpoint else None
        return super().train(resume_from_checkpoint, *positional, **keywords)  # type: ignore[misc]

    def _complete_checkpoint(self, asked: str | bool) -> str:
        """The same on every rank, as the first one sees the files."""
        found: list[str | None] = [None, None]
        if self.accelerator.is_main_process:
            found = list(_found(asked, Path(self.args.output_dir)))
        broadcast_object_list(found, from_process=0)
        path, problem = found
        if path is None:
            raise ValueError(problem)
        if problem is not None and self.accelerator.is_main_process:
            logger.warning(problem)
        return path

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        trainer: Any = self
        folder = Path(trainer._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
        writes = self.args.should_save
        if writes:
            begin(folder)
        self.accelerator.wait_for_everyone()  # before others write into it
        pushes: list[Callable[[], None]] = []
        self._pushes_put_off = pushes
        try:
            with rotation_put_off() as rotations:
                super()._save_checkpoint(model, trial)  # type: ignore[misc]
        finally:
            self._pushes_put_off = None
        self._save_beside(folder)
        self.accelerator.wait_for_everyone()  # every rank's files are there
        if writes:
            finish(folder)
            if self.args.save_total_limit:
                # They would be counted, and by their numbers kept in the place of the one just written
                for interrupted in half_written(folder.parent):
                    discard(interrupted)
        for step in (*pushes, *rotations):
            step()

    def _save_beside(self, folder: Path) -> None:
        """Called on every rank for what else belongs to a checkpoint."""

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        push: Callable[[str], None] = super()._push_from_checkpoint  # type: ignore[misc]
        if self._pushes_put_off is None:
            push(checkpoint_folder)
        else:
            self._pushes_put_off.append(lambda: push(checkpoint_folder))


def _found(asked: str | bool, run: Path) -> tuple[str | None, str | None]:
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
