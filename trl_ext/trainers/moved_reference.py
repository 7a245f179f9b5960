"""Both trainers: a reference model that `sync_ref_model` moves goes on, when resumed, where its checkpoint stood."""

import logging
from pathlib import Path
from typing import Any

import trl
from torch.distributed.fsdp import FSDPModule
from transformers import TrainerCallback

from ..reference import load_moved, save_moved

logger = logging.getLogger("trl_ext")


class MovedReferenceMixin:
    """Mixed in before `CompleteCheckpointsMixin`."""

    _resumes_from: Path | None

    def __init__(self, *positional: Any, **keywords: Any) -> None:
        super().__init__(*positional, **keywords)
        self.add_callback(_MovesAndResumes(self))  # type: ignore[attr-defined]

    def _moved_reference(self) -> Any:
        """The reference model, where a callback moves it."""
        trainer: Any = self
        moves = any(isinstance(x, trl.SyncRefModelCallback) for x in trainer.callback_handler.callbacks)
        return trainer.ref_model if moves else None

    def _is_partitioned(self) -> bool:
        """Whether ZeRO-3 has the reference's parameters, of which no rank sees more than its part."""
        plugin = self.accelerator.state.deepspeed_plugin  # type: ignore[attr-defined]
        return plugin is not None and bool(plugin.zero_stage == 3)

    def _save_beside(self, folder: Path) -> None:
        super()._save_beside(folder)  # type: ignore[misc]
        reference, args = self._moved_reference(), self.args  # type: ignore[attr-defined]
        if reference is not None and not args.save_only_model and not self._is_partitioned():
            save_moved(reference, folder, writes=args.should_save)


class _MovesAndResumes(TrainerCallback):
    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self.trainer
        folder, reference = trainer._resumes_from, trainer._moved_reference()
        if reference is not None and trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2:
            raise ValueError(
                "`sync_ref_model=True` under FSDP1: FSDP1 keeps gathered weights of the reference between passes, so "
                "it would not follow the policy. Use FSDP2 (`fsdp_version: 2`), or set `sync_ref_model=False`."
            )
        if folder is None or reference is None:
            return
        loaded = not trainer._is_partitioned() and load_moved(reference, folder)
        if not loaded and not trainer._is_finished():
            logger.warning(
                f"{folder} does not have the weights of the reference that `sync_ref_model` moves, as one of stock "
                "TRL, of ZeRO-3 or with `save_only_model`: the reference starts from its first weights, so the "
                "result differs from an uninterrupted run."
            )

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        reference = self.trainer._moved_reference()
        if reference is None or (state.global_step + 1) % args.ref_model_sync_steps:
            return
        for module in reference.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # with `reshard_after_forward=False` it is gathered, and the policy is not
