"""The weights of the reference: an adapter, a copy or a model; kept on the host, moved, saved and resumed."""

import logging
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import trl
from accelerate.utils import DynamoBackend, broadcast
from peft import PeftModel
from torch.distributed.fsdp import FSDPModule

from ..distributed.ranks import Ranks
from ..reference.adapter_choice import AdapterChoice
from ..reference.adapters import OwnReference, load_moved, save_moved
from ..reference.hosted import host_reference
from ..reference.weights import ReferenceWeights

logger = logging.getLogger("trl_ext")


class Trainer(Protocol):
    """What of a trainer is read."""

    accelerator: Any
    args: Any
    model: Any
    ref_model: Any
    callback_handler: Any
    is_fsdp_enabled: bool
    is_deepspeed_enabled: bool


class ReferenceOfPolicy:
    """The reference of one trainer.

    Args:
        device (`str`, *optional*): `reference_device` of the config.

    Attributes:
        own (`OwnReference`, *optional*): the adapter or the copies in the policy that are the reference.
    """

    def __init__(self, trainer: Trainer, ranks: Ranks, adapters: AdapterChoice, device: str | None) -> None:
        self.trainer, self.ranks, self.adapters, self._device = trainer, ranks, adapters, device
        self.own: OwnReference | None = None
        self._moves_apart = False

    # When the trainer is built

    def take_policy(self, *, has_reference: bool) -> None:
        """Find the reference in the policy, which is whole."""
        trainer = self.trainer
        if self._device is not None:
            self._refuse_host()
        if not isinstance(trainer.model, PeftModel) or trainer.ref_model is not None or not has_reference:
            return
        moves = bool(trainer.args.sync_ref_model)
        self.own = self.adapters.reference(trainer.model, moves)
        if moves:  # TRL takes the reference for none that could be moved
            trainer.args.sync_ref_model, self._moves_apart = False, True
        self.check_copies()

    def take_model(self, model: Any) -> None:
        """Take a reference model, which is whole."""
        if self._device is None:
            return
        shared = ReferenceWeights(model).shares_with(self.trainer.model, trained=False)
        if shared:
            raise ValueError(
                "`reference_device='cpu'` moves the reference's weights to the host, and the policy is in the same "
                f"memory (`{shared}`). Leave it unset, or load a reference model of its own."
            )
        host_reference(model, self.trainer.accelerator.device)

    def restore(self, config: Any) -> None:
        """Give the config back what TRL was not to see."""
        if self._moves_apart:
            config.sync_ref_model = True

    def check_copies(self) -> None:
        """Raise `ValueError` where the engine cannot keep the copies that are the reference."""
        own = self.own
        if own is None:
            return
        engine = "ZeRO-3" if self._is_partitioned() else "FSDP1" if self._is_fsdp1() else None
        if own.copies and engine is not None:
            raise ValueError(
                f"The reference needs a copy of `{own.copies[0]}`, which is trained and would be partitioned by "
                f"{engine}. Use another engine (ZeRO-2, FSDP2); or train a fresh adapter (`peft_config`) or one that "
                'is called "default", without a `bias`, and with `sync_ref_model=False`.'
            )
        if own.moves and self.ranks.tensor_parallel is not None:
            raise ValueError(
                "`sync_ref_model=True` with an adapter does not go with tensor parallelism, where each rank has a part "
                "of the reference only. Set it to False, or use another engine."
            )

    # In training

    def keep_what_is_trained(self) -> None:
        """Copy what training will change, before the first step."""
        if self.own is not None:
            self.own.keep_what_is_trained()
            self.check_copies()

    def entered(self) -> AbstractContextManager[Any]:
        """Within, the policy computes what the reference does."""
        return nullcontext() if self.own is None else self.own.entered()

    @property
    def adapters_on(self) -> tuple[str, ...]:
        """The adapters that are on in the reference's pass of the policy."""
        return () if self.own is None else self.own.adapters

    @property
    def moves(self) -> bool:
        """Whether training moves the reference."""
        by_callback = any(isinstance(x, trl.SyncRefModelCallback) for x in self.trainer.callback_handler.callbacks)
        return by_callback or bool(self.trainer.args.sync_ref_model) or (self.own is not None and self.own.moves)

    @property
    def moved(self) -> Any:
        """The reference model, where a callback moves it."""
        moves = any(isinstance(x, trl.SyncRefModelCallback) for x in self.trainer.callback_handler.callbacks)
        return self.trainer.ref_model if moves else None

    def before_move(self, step: int) -> None:
        """Called before optimizer step `step` ends: FSDP2's reference may be gathered then, and the policy is not."""
        reference = self.moved
        if reference is not None and step % self.trainer.args.ref_model_sync_steps == 0:
            for module in reference.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # it stays gathered with `reshard_after_forward=False`

    # In a checkpoint

    def save(self, folder: Path) -> None:
        """Write the reference into a checkpoint, where training moves it."""
        own, moved, args = self.own, self.moved, self.trainer.args
        if own is not None and self.ranks.tensor_parallel is None:
            own.save(folder, writes=args.should_save)
        if moved is not None and not args.save_only_model and not self._is_partitioned():
            save_moved(moved, folder, writes=args.should_save)

    def resume(self, folder: Path | None, *, is_finished: bool) -> None:
        """Load the reference of a checkpoint; under DDP all ranks take that of the first, as DDP does the policy."""
        own, moved, trainer = self.own, self.moved, self.trainer
        if own is not None and self.ranks.tensor_parallel is None:
            if folder is not None:
                own.load(folder)
            if trainer.accelerator.num_processes > 1 and not trainer.is_fsdp_enabled:
                own.same_on_all_ranks(broadcast)
        if moved is not None and self._is_fsdp1():
            raise ValueError(
                "`sync_ref_model=True` under FSDP1: FSDP1 keeps gathered weights of the reference between passes, so "
                "it would not follow the policy. Use FSDP2 (`fsdp_version: 2`), or set `sync_ref_model=False`."
            )
        if folder is None or moved is None:
            return
        loaded = not self._is_partitioned() and load_moved(moved, folder)
        if not loaded and not is_finished:
            logger.warning(
                f"{folder} does not have the weights of the reference that `sync_ref_model` moves, as one of stock "
                "TRL, of ZeRO-3 or with `save_only_model`: the reference starts from its first weights, so the "
                "result differs from an uninterrupted run."
            )

    def _is_partitioned(self) -> bool:
        plugin = self.trainer.accelerator.state.deepspeed_plugin
        return plugin is not None and plugin.zero_stage == 3

    def _is_fsdp1(self) -> bool:
        return self.trainer.is_fsdp_enabled and not self.trainer.accelerator.is_fsdp2

    def _refuse_host(self) -> None:
        trainer, ranks = self.trainer, self.ranks
        args = trainer.args
        asked = "`reference_device='cpu'`"
        if trainer.ref_model is None:
            if isinstance(trainer.model, PeftModel) and args.beta != 0:
                raise ValueError(
                    f"{asked} keeps a separate reference model on the host, and there is none: the reference of a PEFT "
                    "policy is the policy without its adapter, in the same weights. Leave it unset."
                )
            return  # beta is 0, or all was precomputed: what was asked for, no reference on the device, is so
        if ranks.tensor_parallel is not None:
            raise ValueError(
                f"{asked} does not go with tensor parallelism, which spreads the reference model over the ranks "
                "itself. Leave it unset."
            )
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            raise ValueError(
                f"{asked} does not go with FSDP and DeepSpeed, which spread the reference model over the ranks "
                "themselves. Leave it unset; to keep shards on the host, use their own offloading "
                "(`fsdp_offload_params: true`, or `offload_param_device: cpu` under ZeRO-3)."
            )
        if args.sync_ref_model:
            raise ValueError(
                f"{asked} keeps a reference that does not change, and `sync_ref_model=True` mixes the policy's weights "
                "into it as training goes. Leave one of them unset."
            )
        if trainer.accelerator.state.dynamo_plugin.backend != DynamoBackend.NO:
            raise ValueError(
                f"{asked} exchanges the weights during a forward, which `torch_compile=True` would compile. Leave one "
                "of them unset."
            )
