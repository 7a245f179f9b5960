"""Checkpoints: marked until they are complete, and resumed from the last that is; those of a split model by rank."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from accelerate.utils import broadcast_object_list
from transformers import PreTrainedModel
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from ..callbacks.progress import show
from ..checkpoints.complete import begin, complete_checkpoints, discard, finish, half_written, is_complete
from ..checkpoints.engine import (
    deepspeed_format,
    fsdp_format,
    load_weights,
    names_differ,
    read_optimizer,
    save_optimizer,
    why_not_loaded,
)
from ..compat.replaced import module_of, names_replaced
from ..distributed.detect import detect_engine

logger = logging.getLogger("trl_ext")

_SPELT: dict[str, bool | str] = {"true": True, "false": False, "auto": "auto"}


class Trainer(Protocol):
    """What of a trainer its checkpoints read."""

    accelerator: Any
    args: Any
    model: Any
    state: Any
    optimizer: Any
    lr_scheduler: Any
    is_fsdp_enabled: bool
    is_deepspeed_enabled: bool


class Checkpoints:
    """The checkpoints that a trainer writes, and the one that it resumes from.

    Attributes:
        resumes_from (`Path`, *optional*): the checkpoint of the present `train`.
        parts (`list[Callable[[Path], None]]`): what else belongs to a checkpoint; each writes it, on every rank.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.resumes_from: Path | None = None
        self.parts: list[Callable[[Path], None]] = []
        self._keeps_optimizer = False
        self._put_off: list[Callable[[], None]] | None = None

    # When the trainer is built: transformers refuses to save the optimizer of a split model, which is done here

    def hide_optimizer(self) -> None:
        if self._is_split() and not self.trainer.args.save_only_model:
            self._keeps_optimizer = self.trainer.args.save_only_model = True

    def unhide_optimizer(self) -> None:
        if self._keeps_optimizer:
            self.trainer.args.save_only_model = False

    def _is_split(self) -> bool:
        """Whether transformers has split the model over ranks as it loaded it."""
        return bool(getattr(self.trainer.model, "is_distributed_loading_by_transformers", False))

    # Resumed

    def find(self, asked: str | bool | None) -> str | None:
        """The checkpoint to resume from. The first rank looks, and every rank takes what it has found.

        Raises:
            `ValueError`: there is none, it is not complete, or the engine that runs cannot load it.
        """
        found: list[str | None] = [None, None]
        if asked and self.trainer.accelerator.is_main_process:
            try:
                path = _found(asked, Path(self.trainer.args.output_dir))
                if path is not None and Path(path).is_dir():
                    found[1] = self._why_not_loaded(Path(path))
                found[0] = path
            except (OSError, ValueError) as error:
                found = [None, str(error)]
        if asked:
            broadcast_object_list(found, from_process=0)
        path, problem = found
        if problem is not None:
            raise ValueError(problem)
        self.resumes_from = None if path is None else Path(path)
        return path

    def _why_not_loaded(self, folder: Path) -> str | None:
        """Why the engine that runs cannot resume from a checkpoint; `None` where it can."""
        accelerator = self.trainer.accelerator
        runs = detect_engine(accelerator, self.trainer.model)
        if runs.fsdp_version is not None:
            form = fsdp_format(accelerator.state.fsdp_plugin.state_dict_type.name)
        elif runs.zero_stage is not None:
            config = accelerator.state.deepspeed_plugin.deepspeed_config
            if config.get("checkpoint", {}).get("load_universal"):
                return None  # DeepSpeed's form for any number of processes
            form = deepspeed_format(runs.zero_stage, runs.processes)
        else:
            form = ""
        return why_not_loaded(folder, form, runs.name)

    def first_batch(self, begins: tuple[int, int]) -> tuple[int, int]:
        """Epoch and batch with which training begins: after the last epoch where no step is left.

        Transformers asks only after an optimizer step whether it was the last, so it would take one more.
        """
        if not self.is_finished:
            return begins
        state = self.trainer.state
        if self.trainer.accelerator.is_main_process:
            show(
                f"{self.resumes_from} was written after optimizer step {state.global_step}, and training ends "
                f"after step {state.max_steps}: nothing is left to train. Raise `max_steps` or "
                "`num_train_epochs` to train on."
            )
        return state.num_train_epochs, 0

    @property
    def is_finished(self) -> bool:
        """Whether the checkpoint that training resumes from has all optimizer steps."""
        return self.resumes_from is not None and self.trainer.state.global_step >= self.trainer.state.max_steps

    # Written

    @contextmanager
    def written(self, folder: Path) -> Iterator[None]:
        """Within, transformers writes a checkpoint, which is marked until all of it is there."""
        trainer = self.trainer
        writes = trainer.args.should_save
        rotate = module_of(transformers.Trainer).rotate_checkpoints
        rotations: list[Callable[[], None]] = []
        pushes: list[Callable[[], None]] = []
        self._put_off = pushes
        if writes:
            begin(folder)
        trainer.accelerator.wait_for_everyone()
        try:
            with names_replaced(
                transformers.Trainer, rotate_checkpoints=lambda *a, **k: rotations.append(partial(rotate, *a, **k))
            ):
                yield
        finally:
            self._put_off = None
        for save in self.parts:
            save(folder)
        trainer.accelerator.wait_for_everyone()
        if writes:
            finish(folder)
            if trainer.args.save_total_limit:
                for interrupted in half_written(folder.parent):
                    discard(interrupted)
        for step in (*pushes, *rotations):
            step()

    def push(self, push: Callable[[], None]) -> None:
        """Push a checkpoint, once it is complete."""
        if self._put_off is None:
            push()
        else:
            self._put_off.append(push)

    def save_optimizer(self, folder: str) -> bool:
        """Write the optimizer and the scheduler of a split model; False for others, which transformers saves."""
        trainer = self.trainer
        if not self._is_split():
            return False
        save_optimizer(trainer.optimizer, Path(folder), trainer.args.process_index)
        if trainer.args.should_save:
            torch.save(trainer.lr_scheduler.state_dict(), Path(folder) / SCHEDULER_NAME)
        return True

    def load_optimizer(self, checkpoint: str | None) -> bool:
        """Load what `save_optimizer` has written, and say where it is missing; False where transformers loads."""
        trainer = self.trainer
        if checkpoint is None or trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            return False
        folder, state = Path(checkpoint), None
        is_there = all((folder / name).exists() for name in (OPTIMIZER_NAME, SCHEDULER_NAME))
        if self._is_split():
            state = read_optimizer(trainer.optimizer, folder, trainer.args.process_index)
            accelerator = trainer.accelerator
            is_there = bool(accelerator.gather(torch.tensor([state is not None], device=accelerator.device)).all())
        if not is_there:
            if trainer.accelerator.is_main_process and not self.is_finished:
                logger.warning(
                    f"{folder} has no state of the optimizer that can be loaded here: it was written with "
                    "`save_only_model=True`, under another engine or, by tensor parallelism, on other ranks. The "
                    "optimizer and the learning rate start from scratch: the result differs from an uninterrupted run."
                )
            return True
        if not self._is_split():
            return False
        trainer.optimizer.load_state_dict(state)
        trainer.lr_scheduler.load_state_dict(torch.load(folder / SCHEDULER_NAME, weights_only=True))
        return True

    def load_weights(self, folder: Path) -> bool:
        """Load weights that transformers' trainer would miss, or cannot load into a split model; False for others."""
        trainer = self.trainer
        if not isinstance(trainer.model, PreTrainedModel) or trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            return False
        if not self._is_split() and not names_differ(trainer.model, folder):
            return False
        load_weights(trainer.model, folder)
        return True


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
