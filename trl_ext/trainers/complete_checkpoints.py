"""Both trainers: a checkpoint counts once all of it is written, and training resumes from the last that does."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from transformers import PreTrainedModel
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..checkpoints import (
    begin,
    complete_checkpoints,
    deepspeed_format,
    discard,
    finish,
    fsdp_format,
    half_written,
    is_complete,
    load_weights,
    names_differ,
    read_optimizer,
    save_optimizer,
    why_not_loaded,
)
from ..compat import rotation_put_off
from ..engines.running import running
from .planned import show

logger = logging.getLogger("trl_ext")

_SPELT: dict[str, bool | str] = {"true": True, "false": False, "auto": "auto"}


class CompleteCheckpointsMixin:
    """Mixed in before a TRL trainer."""

    accelerator: Any
    args: Any
    model: Any
    state: Any
    _keeps_optimizer = False
    _resumes_from: Path | None = None
    _pushes_put_off: list[Callable[[], None]] | None = None

    def __init__(self, *positional: Any, **keywords: Any) -> None:
        try:
            super().__init__(*positional, **keywords)
        finally:
            if self._keeps_optimizer:
                self.args.save_only_model = False

    def create_accelerator_and_postprocess(self) -> None:
        """Transformers' own, called first of all when the trainer is built.

        Later it refuses to save the optimizer of a model that is split at loading, which is done here.
        """
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        if self._is_split() and not self.args.save_only_model:
            self._keeps_optimizer = self.args.save_only_model = True

    def _is_split(self) -> bool:
        """Whether transformers has split the model over ranks as it loaded it."""
        return bool(getattr(self.model, "is_distributed_loading_by_transformers", False))

    def train(self, resume_from_checkpoint: str | bool | None = None, *positional: Any, **keywords: Any) -> Any:
        """TRL's own. `resume_from_checkpoint=True` takes the last complete checkpoint in `output_dir`; `"auto"` takes
        it too, and trains from the beginning where there is none. `"true"` and `"false"`, as a command line has them,
        are `True` and `False`. A path of such a name comes first.

        Raises:
            `ValueError`: there is no complete checkpoint, or the one that was named is not complete.
        """
        found = self._checkpoint(resume_from_checkpoint) if resume_from_checkpoint else None
        self._resumes_from = None if found is None else Path(found)
        return super().train(found, *positional, **keywords)  # type: ignore[misc]

    def _checkpoint(self, asked: str | bool) -> str | None:
        """The checkpoint to resume from. The first rank looks, and every rank takes what it has found."""
        found: list[str | None] = [None, None]
        if self.accelerator.is_main_process:
            try:
                path = _found(asked, Path(self.args.output_dir))
                if path is not None and Path(path).is_dir():
                    found[1] = self._why_not_loaded(Path(path))
                found[0] = path
            except (OSError, ValueError) as error:
                found = [None, str(error)]
        broadcast_object_list(found, from_process=0)
        path, problem = found
        if problem is not None:
            raise ValueError(problem)
        return path

    def _why_not_loaded(self, folder: Path) -> str | None:
        """Why the engine that runs cannot resume from a checkpoint; `None` where it can."""
        runs = running(self.accelerator, self.model)
        if runs.fsdp_version is not None:
            form = fsdp_format(self.accelerator.state.fsdp_plugin.state_dict_type.name)
        elif runs.zero_stage is not None:
            config = self.accelerator.state.deepspeed_plugin.deepspeed_config
            if config.get("checkpoint", {}).get("load_universal"):
                return None  # DeepSpeed's form for any number of processes
            form = deepspeed_format(runs.zero_stage, runs.processes)
        else:
            form = ""
        return why_not_loaded(folder, form, runs.name)

    def _init_training_state(self, *positional: Any, **keywords: Any) -> tuple[int, int]:
        """Transformers' own, which says where training begins; after the last epoch where no step is left.

        Transformers asks only after an optimizer step whether it was the last, so it would take one more.
        """
        begins: tuple[int, int] = super()._init_training_state(*positional, **keywords)  # type: ignore[misc]
        if not self._is_finished():
            return begins
        if self.accelerator.is_main_process:
            show(
                f"{self._resumes_from} was written after optimizer step {self.state.global_step}, and training ends "
                f"after step {self.state.max_steps}: nothing is left to train. Raise `max_steps` or "
                "`num_train_epochs` to train on."
            )
        return self.state.num_train_epochs, 0

    def _is_finished(self) -> bool:
        """Whether the checkpoint that training resumes from has all optimizer steps."""
        return self._resumes_from is not None and self.state.global_step >= self.state.max_steps

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

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self._is_split():
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
            return
        trainer: Any = self
        save_optimizer(trainer.optimizer, Path(output_dir), self.args.process_index)
        if self.args.should_save:
            torch.save(trainer.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        trainer: Any = self
        if checkpoint is None or trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        folder, state = Path(checkpoint), None
        is_there = all((folder / name).exists() for name in (OPTIMIZER_NAME, SCHEDULER_NAME))
        if self._is_split():
            state = read_optimizer(trainer.optimizer, folder, self.args.process_index)
            on_ranks = self.accelerator.gather(torch.tensor([state is not None], device=self.accelerator.device))
            is_there = bool(on_ranks.all())
        if not is_there:
            if self.accelerator.is_main_process and not self._is_finished():
                logger.warning(
                    f"{folder} has no state of the optimizer that can be loaded here: it was written with "
                    "`save_only_model=True`, under another engine or, by tensor parallelism, on other ranks. The "
                    "optimizer and the learning rate start from scratch: the result differs from an uninterrupted run."
                )
        elif self._is_split():
            trainer.optimizer.load_state_dict(state)
            trainer.lr_scheduler.load_state_dict(torch.load(folder / SCHEDULER_NAME, weights_only=True))
        else:
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self._loads_anew(Path(resume_from_checkpoint)):
            load_weights(self.model, Path(resume_from_checkpoint))
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_best_model(self) -> None:
        best = Path(self.state.best_model_checkpoint)
        if self._loads_anew(best):
            load_weights(self.model, best)
        else:
            super()._load_best_model()  # type: ignore[misc]

    def _loads_anew(self, folder: Path) -> bool:
        """Whether transformers' trainer would miss weights of a checkpoint, or cannot load them into a split model."""
        trainer: Any = self
        if not isinstance(self.model, PreTrainedModel) or trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            return False
        return self._is_split() or names_differ(self.model, folder)

    def _save_beside(self, folder: Path) -> None:
        """Called on every rank for what else belongs to a checkpoint."""

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        push: Callable[[str], None] = super()._push_from_checkpoint  # type: ignore[misc]
        if self._pushes_put_off is None:
            push(checkpoint_folder)
        else:
            self._pushes_put_off.append(lambda: push(checkpoint_folder))


def _found(asked: str | bool, run: Path) -> str | None:
    """The checkpoint to resume from; `None` to train from the beginning.

    Raises:
        `ValueError`: there is no complete one, or that which `asked` names is not complete.
    """
    complete, interrupted = complete_checkpoints(run), half_written(run)
    path = Path(str(asked))
    means = asked if isinstance(asked, bool) else None if path.exists() else _SPELT.get(str(asked).lower())
    if means is None:
        if path.is_dir() and not is_complete(path):
            others = f" The last complete one in {run} is {complete[-1].name}." if complete else ""
            raise ValueError(
                f"`resume_from_checkpoint={str(asked)!r}` is no complete checkpoint: it was interrupted while it was "
                f"written, or is a folder of another kind.{others} `True` takes the last complete one in `output_dir`."
            )
        return str(asked)
    if means is False:
        return None
    if complete:
        last = complete[-1]
        later = [path.name for path in interrupted if _step(path) > _step(last)]
        if later:
            logger.warning(f"{', '.join(later)} was not written whole: training resumes from {last.name}.")
        elif means == "auto":
            show(f'`resume_from_checkpoint="auto"`: training resumes from {last}.')
        return str(last)
    names = f": {', '.join(path.name for path in interrupted)} not written whole" if interrupted else ""
    if means == "auto":
        show(
            f'`resume_from_checkpoint="auto"`: no complete checkpoint is in `output_dir` ({run}){names}. Training '
            "starts from the beginning."
        )
        return None
    raise ValueError(
        f"`resume_from_checkpoint=True`, but no complete checkpoint is in `output_dir` ({run}){names}. Leave it off to "
        'train from the beginning; `"auto"` does so where there is none.'
    )


def _step(path: Path) -> int:
    return int(path.name.rsplit("-", 1)[1])
