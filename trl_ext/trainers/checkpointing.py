"""Writes a trainer's checkpoints, marked as incomplete until all is written, and finds the one to resume from."""

import logging
import re
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from accelerate.utils import gather_object
from peft import PeftModel
from peft.utils import CONFIG_NAME as PEFT_CONFIG_NAME
from transformers import PreTrainedModel

from ..callbacks.progress import show
from ..checkpoints.complete import begin, complete_checkpoints, discard, finish, half_written, is_complete, step_of
from ..checkpoints.engine import (
    deepspeed_format,
    fsdp_format,
    load_weights,
    names_differ,
    read_optimizer,
    save_optimizer,
    why_not_loaded,
)
from ..compat.features import Features
from ..compat.replaced import module_of, names_replaced, replaced
from ..distributed.detect import detect_engine
from ..distributed.ranks import Ranks
from ..reference.adapters import trained_beside

logger = logging.getLogger("trl_ext")

_SPELLED: dict[str, bool | str] = {"true": True, "false": False, "auto": "auto"}


class Trainer(Protocol):
    """The trainer members that `Checkpoints` reads."""

    accelerator: Any
    args: Any
    model: Any
    state: Any
    optimizer: Any
    lr_scheduler: Any
    _features: Features
    _ranks: Ranks
    is_fsdp_enabled: bool
    is_deepspeed_enabled: bool


class Checkpoints:
    """The checkpoints that a trainer writes, and the one that it resumes from."""

    def __init__(self, trainer: Trainer, *, are_trls: bool = False) -> None:
        self.trainer = trainer
        self.are_trls = are_trls  # TRL writes and reads them, because an internal that this class needs has moved
        self.resumes_from: Path | None = None  # the checkpoint of the current `train`
        self.parts: list[Callable[[Path], None]] = []  # each function writes a part of the checkpoint, on every rank
        self._hides_optimizer = False
        self._postponed: list[Callable[[], None]] | None = (
            None  # pushes and deletions, until the checkpoint is complete
        )

    # Construction: transformers refuses to save the optimizer of a split model, so this class saves it

    def hide_optimizer(self) -> None:
        if self._is_split() and not self.trainer.args.save_only_model:
            self._hides_optimizer = True
            self.trainer.args.save_only_model = True

    def unhide_optimizer(self) -> None:
        if self._hides_optimizer:
            self.trainer.args.save_only_model = False

    def _is_split(self) -> bool:
        return bool(getattr(self.trainer.model, "is_distributed_loading_by_transformers", False))

    # Resuming

    def find(self, requested: str | bool | None) -> str | None:
        """Return the checkpoint to resume from, as the main process finds it; `None` to start from the beginning.

        Raises:
            `ValueError`: there is none, it is not complete, or the current engine cannot load it.
        """
        if self.are_trls:
            meaning = _SPELLED.get(str(requested).lower(), requested)
            if meaning == "auto":
                self.trainer._features.require("checkpoints", 'does not take `resume_from_checkpoint="auto"`')
            return meaning or None  # type: ignore[return-value]
        if not requested:
            self.resumes_from = None
            return None

        def find_on_main() -> tuple[str | None, str | None]:
            try:
                path = checkpoint_to_resume(requested, Path(self.trainer.args.output_dir))
                return path, self._why_not_loaded(Path(path)) if path is not None and Path(path).is_dir() else None
            except (OSError, ValueError) as error:
                return None, str(error)

        path, problem = self.trainer._ranks.of_main(find_on_main)
        if problem is not None:
            raise ValueError(problem)
        self.resumes_from = None if path is None else Path(path)
        return path

    def _why_not_loaded(self, folder: Path) -> str | None:
        """Return why the current engine cannot resume from a checkpoint; `None` if it can."""
        self._check_run(folder)
        accelerator = self.trainer.accelerator
        format_to_write = ""
        runs = detect_engine(accelerator, self.trainer.model)
        if runs.fsdp_version is not None:
            format_to_write = fsdp_format(accelerator.state.fsdp_plugin.state_dict_type.name)
        elif runs.zero_stage is not None:
            config = accelerator.state.deepspeed_plugin.deepspeed_config
            if config.get("checkpoint", {}).get("load_universal"):
                return None  # DeepSpeed's format for any number of processes
            format_to_write = deepspeed_format(runs.zero_stage, runs.processes)
        return why_not_loaded(folder, format_to_write, runs.name)

    def _check_run(self, folder: Path) -> None:
        """Raise `ValueError` if another trainer wrote the checkpoint, or if only one of the runs trains an adapter."""
        from transformers.trainer import TRAINING_ARGS_NAME

        args = self.trainer.args
        model = self.trainer.model
        writer = _config_class(folder / TRAINING_ARGS_NAME)
        if writer is not None and writer not in [cls.__name__ for cls in type(args).__mro__]:
            raise ValueError(
                f"`resume_from_checkpoint`: {folder} is a checkpoint of another trainer (`{writer}`). Pass it as "
                "`model` to start from its weights."
            )
        trains_adapter = isinstance(model, PeftModel) or getattr(model, "_hf_peft_config_loaded", False)
        has_adapter = any(folder.glob(PEFT_CONFIG_NAME)) or any(folder.glob(f"*/{PEFT_CONFIG_NAME}"))
        if has_adapter and not trains_adapter:
            raise ValueError(
                f"`resume_from_checkpoint`: {folder} holds an adapter, but this run trains the whole model. Pass the "
                "`peft_config` of the run that wrote it."
            )
        if trains_adapter and not has_adapter and any(folder.glob("model*.safetensors")):
            raise ValueError(
                f"`resume_from_checkpoint`: {folder} holds a whole model, but this run trains an adapter. Leave "
                "`peft_config` out, or pass the checkpoint as `model`."
            )

    def first_batch(self, begins: tuple[int, int]) -> tuple[int, int]:
        """Return the epoch and batch to begin with: `begins`, or the end of the last epoch if no step is left.

        Transformers would take one step too many, because it reads `max_steps` only after a step.
        """
        if not self.is_finished:
            return begins
        state = self.trainer.state
        if self.trainer.accelerator.is_main_process:
            show(
                f"Training is already finished: {self.resumes_from} is at optimizer step {state.global_step} of "
                f"{state.max_steps}. To train more, raise `max_steps` or `num_train_epochs`."
            )
        return state.num_train_epochs, 0

    @property
    def is_finished(self) -> bool:
        """Whether no optimizer step is left after the checkpoint to resume from."""
        return self.resumes_from is not None and self.trainer.state.global_step >= self.trainer.state.max_steps

    # Writing

    @contextmanager
    def write(self, folder: Path) -> Iterator[None]:
        """Mark the checkpoint that is written in the `with` block. Once it is complete, push it and delete old ones."""
        args = self.trainer.args
        accelerator = self.trainer.accelerator
        rotate = module_of(transformers.Trainer).rotate_checkpoints
        postponed: list[Callable[[], None]] = []
        if args.should_save:
            begin(folder)
        accelerator.wait_for_everyone()

        def postpone_rotation(*positional: Any, **keywords: Any) -> None:
            postponed.append(partial(rotate, *positional, **keywords))

        with (
            names_replaced(transformers.Trainer, rotate_checkpoints=postpone_rotation),
            replaced(self, _postponed=postponed),
        ):
            yield
        for save in self.parts:
            save(folder)
        accelerator.wait_for_everyone()
        if args.should_save:
            finish(folder)
            for interrupted in half_written(folder.parent) if args.save_total_limit else ():
                discard(interrupted)
        for action in postponed:
            action()

    def push(self, push: Callable[[], None]) -> None:
        if self._postponed is None:
            push()
        else:
            self._postponed.append(push)

    def save_optimizer(self, folder: str) -> bool:
        """Write optimizer and scheduler of a split model. Returns `False` if transformers must write them."""
        from transformers.trainer import SCHEDULER_NAME

        trainer = self.trainer
        if not self._is_split():
            return False
        save_optimizer(trainer.optimizer, Path(folder), trainer.args.process_index)
        if trainer.args.should_save:
            torch.save(trainer.lr_scheduler.state_dict(), Path(folder) / SCHEDULER_NAME)
        return True

    def load_optimizer(self, checkpoint: str | None) -> bool:
        """Load what `save_optimizer` wrote, and warn if it is missing. Returns `False` if transformers must load it."""
        from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

        trainer = self.trainer
        if checkpoint is None or trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            return False
        folder = Path(checkpoint)
        state = None
        is_stored = all((folder / name).exists() for name in (OPTIMIZER_NAME, SCHEDULER_NAME))
        if self._is_split():
            state = read_optimizer(trainer.optimizer, folder, trainer.args.process_index)
            is_stored = all(gather_object([state is not None]))
        if not is_stored:
            if trainer.accelerator.is_main_process and not self.is_finished:
                logger.warning(
                    f"{folder} has no optimizer state that can be loaded here: it was written with "
                    "`save_only_model=True`, by another engine, or with another tensor-parallel split. The optimizer "
                    "and the learning rate schedule start anew, so the result differs from an uninterrupted run."
                )
            return True
        if not self._is_split():
            return False
        trainer.optimizer.load_state_dict(state)
        trainer.lr_scheduler.load_state_dict(torch.load(folder / SCHEDULER_NAME, weights_only=True))
        return True

    def load_weights(self, folder: Path) -> bool:
        """Load weights of a split model, or under other names than its own. Returns `False` if transformers must."""
        trainer = self.trainer
        model = trainer.model
        if not isinstance(model, PreTrainedModel) or trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            return False
        if not self._is_split() and not names_differ(model, folder):
            return False
        load_weights(model, folder)
        return True

    # Adapters

    def policy_folder(self, checkpoint: str) -> str:
        """Return the folder in a checkpoint to which PEFT saved the trained adapter; for "default", the checkpoint."""
        model = self.trainer.model
        name = model.active_adapter if isinstance(model, PeftModel) else "default"
        folder = Path(checkpoint) / name
        return str(folder) if name != "default" and folder.is_dir() else checkpoint

    def load_default_adapter(self, checkpoint: str) -> None:
        """Load the adapter "default" if it is trained and others exist: transformers would load only those."""
        model = self.trainer.model
        has_several = isinstance(model, PeftModel) and len(model.peft_config) > 1
        if has_several and model.active_adapter == "default" and (Path(checkpoint) / PEFT_CONFIG_NAME).exists():
            model.load_adapter(checkpoint, "default", is_trainable=True)

    def warnings(self) -> list[str]:
        """Return a warning about trained weights that PEFT does not save, if there are any."""
        names = trained_beside(self.trainer.model) if isinstance(self.trainer.model, PeftModel) else []
        if not names:
            return []
        more = f" and {len(names) - 1} more" if names[1:] else ""
        return [
            f"`{names[0]}`{more} {'are' if more else 'is'} trained but in no adapter. PEFT saves only adapters, so "
            "checkpoints and `save_model` would lose such weights. Add their modules to `modules_to_save`, or freeze "
            "them."
        ]


def _config_class(args_file: Path) -> str | None:
    """Return the name of a saved object's class; `None` if it is neither TRL's nor ours. Does not unpickle it."""
    try:
        with zipfile.ZipFile(args_file) as archive:
            pickled = archive.read(next(x for x in archive.namelist() if x.endswith("data.pkl")))
    except (OSError, StopIteration, zipfile.BadZipFile):
        return None
    first = re.match(rb"\x80.ctrl(?:_ext)?\.[\w.]+\n(\w+)\n", pickled)
    return first[1].decode() if first else None


def checkpoint_to_resume(requested: str | bool, run: Path) -> str | None:
    """Return the complete checkpoint to resume from; `None` to start from the beginning."""
    complete = complete_checkpoints(run)
    interrupted = half_written(run)
    text = str(requested)
    path = Path(text)
    meaning: bool | str | None = None  # None for a path
    if isinstance(requested, bool):
        meaning = requested
    elif not path.exists():
        meaning = _SPELLED.get(text.lower())
    if meaning is None:
        if path.is_dir() and not is_complete(path):
            hint = f" The last complete one in {run} is {complete[-1].name}." if complete else ""
            raise ValueError(
                f"`resume_from_checkpoint={text!r}` is not a complete checkpoint: writing it was interrupted, or it is "
                f"another kind of folder.{hint} Pass True to use the last complete one in `output_dir`."
            )
        return text
    if meaning is False:
        return None
    if complete:
        last = complete[-1]
        later = [path.name for path in interrupted if step_of(path) > step_of(last)]
        if later:
            are = "was not completely written and is" if len(later) == 1 else "were not completely written and are"
            logger.warning(f"{', '.join(later)} {are} ignored. Training resumes from {last.name}.")
        elif meaning == "auto":
            show(f'`resume_from_checkpoint="auto"`: training resumes from {last}.')
        return str(last)
    names = f"; incomplete: {', '.join(path.name for path in interrupted)}" if interrupted else ""
    no_checkpoint = f"no complete checkpoint is in `output_dir` ({run}{names})"
    if meaning == "auto":
        show(f'`resume_from_checkpoint="auto"`: {no_checkpoint}. Training starts from the beginning.')
        return None
    raise ValueError(
        f"`resume_from_checkpoint=True`, but {no_checkpoint}. Leave it off to start from the beginning, or pass "
        '`"auto"` to do so only if there is no checkpoint.'
    )
