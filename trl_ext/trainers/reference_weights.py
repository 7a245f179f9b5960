"""The reference's weights (an adapter, copied weights or a model): offloading, `sync_ref_model` and checkpoints."""

import logging
from contextlib import AbstractContextManager, nullcontext
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol

import trl
from accelerate.utils import DynamoBackend, broadcast
from peft import PeftModel

from ..distributed.ranks import Ranks
from ..host.reference import HostedReference, check_supported
from ..reference.adapters import AdapterChoice, PolicyReference, load_weights, reshard, save_weights
from ..reference.weights import ReferenceWeights, base_of

logger = logging.getLogger("trl_ext")


class Trainer(Protocol):
    """The trainer members that the reference reads. It sets only `args.sync_ref_model`."""

    accelerator: Any
    args: Any
    model: Any
    ref_model: Any
    callback_handler: Any
    is_fsdp_enabled: bool
    is_deepspeed_enabled: bool


class ReferenceOfPolicy:
    """The reference of one trainer. `policy_reference` is set if the reference is part of the policy."""

    def __init__(self, trainer: Trainer, ranks: Ranks, device: str | None) -> None:
        self.trainer = trainer
        self.ranks = ranks
        self._device = device
        self.adapters: AdapterChoice  # chosen after all arguments are checked
        self.policy_reference: PolicyReference | None = None
        self._is_teacher = False  # in distillation, with which the reference runs in the middle of the student's pass

    # Construction, before an engine shards the weights

    def take_policy(self, *, has_reference: bool) -> None:
        """Set `policy_reference` if the reference is part of the policy."""
        trainer = self.trainer
        if self._device is not None:
            self._check_host()
        if not has_reference or not isinstance(trainer.model, PeftModel) or trainer.ref_model is not None:
            return
        moves = bool(trainer.args.sync_ref_model)
        self.policy_reference = self.adapters.reference(trainer.model, moves)
        if moves:  # TRL accepts `sync_ref_model` only for a separate reference model
            trainer.args.sync_ref_model = False
        self._check_copies(self.policy_reference)

    def take_base(self) -> None:
        """Make the base model of the policy's adapter the reference, a teacher."""
        self._is_teacher = True
        self.policy_reference = self.adapters.base(self.trainer.model)
        self._check_copies(self.policy_reference)

    def take_late(self, beta: float) -> None:
        """Set `policy_reference` if the KL term is new since construction: TRL then turns the adapter off."""
        if not isinstance(self.trainer.model, PeftModel):
            raise ValueError(
                f"`beta` was changed to {beta} after the trainer was built with `beta=0`, so there is no reference. "
                "Build the trainer with a `beta` above 0, and change `beta` afterwards."
            )
        self.policy_reference = PolicyReference(self.trainer.model, "trl")

    def take_model(self, model: Any) -> None:
        """Check a reference model, and move it to the host if `reference_device` says so."""
        policy = self.trainer.model
        if base_of(model) is base_of(policy):
            raise ValueError(
                "`ref_model` and `model` wrap the same base model, and PEFT puts both adapters into it. Load the base "
                "model a second time for `ref_model`. Or leave `ref_model` out, and set `ref_adapter_name`."
            )
        if self.trainer.args.sync_ref_model:
            _check_synced(policy, model)
        if self._device is None:
            return
        shared_name = ReferenceWeights(model).shares_with(self.trainer.model, trained=False)
        if shared_name:
            raise ValueError(
                "`reference_device='cpu'` moves the reference's weights to the host, but the policy shares them "
                f"(`{shared_name}`). Leave `reference_device` unset, or load a separate `ref_model`."
            )
        check_supported(model)
        HostedReference(model, self.trainer.accelerator.device)

    def restore(self, config: Any) -> None:
        """Restore `sync_ref_model`, which `take_policy` hides from TRL."""
        if self.policy_reference is not None and self.policy_reference.moves:
            config.sync_ref_model = True

    def _check_copies(self, reference: PolicyReference) -> None:
        if self._is_teacher and reference.copies and (self._is_partitioned() or self.trainer.is_fsdp_enabled):
            raise ValueError(
                f"Training changes `{next(iter(reference.copies))}` of the base model, which is the teacher. FSDP and "
                "ZeRO-3 would have to shard a copy in the middle of a pass. Pass a `teacher_model`, or train only the "
                "adapter."
            )
        engine = "ZeRO-3" if self._is_partitioned() else "FSDP1" if self._is_fsdp1() else None
        if reference.copies and engine is not None:
            name = next(iter(reference.copies))
            raise ValueError(
                f"The reference needs a copy of the trained weight `{name}`, which {engine} would "
                "partition. Use ZeRO-2 or FSDP2. Otherwise, train a fresh adapter (`peft_config`) or an adapter named "
                '"default", in either case without `bias` and with `sync_ref_model=False`.'
            )
        if reference.moves and self.ranks.tensor_parallel is not None:
            raise ValueError(
                "`sync_ref_model=True` with an adapter does not work under tensor parallelism, where each rank has "
                "only a part of the reference. Set `sync_ref_model=False`, or use another engine."
            )

    # Training

    def copy_trained(self) -> None:
        """Before the first step, copy those weights of the reference that training will change."""
        if self.policy_reference is not None:
            self.policy_reference.copy_trained()
            self._check_copies(self.policy_reference)

    def entered(self) -> AbstractContextManager[Any]:
        """Make the policy compute the reference's outputs in the `with` block."""
        return nullcontext() if self.policy_reference is None else self.policy_reference.entered()

    @property
    def adapters_on(self) -> tuple[str, ...]:
        """The adapters that are active while the policy computes the reference's outputs."""
        return () if self.policy_reference is None else self.policy_reference.adapters

    @property
    def moves(self) -> bool:
        return (
            self._has_sync_callback()
            or bool(self.trainer.args.sync_ref_model)
            or bool(self.policy_reference and self.policy_reference.moves)
        )

    def _synced_model(self) -> Any:
        """Return the reference model if a callback updates it."""
        return self.trainer.ref_model if self._has_sync_callback() else None

    def _has_sync_callback(self) -> bool:
        return any(isinstance(x, trl.SyncRefModelCallback) for x in self.trainer.callback_handler.callbacks)

    def before_move(self, step: int) -> None:
        """Under FSDP2, reshard the reference model before optimizer step `step`, if the step then updates it."""
        synced = self._synced_model()
        if synced is not None and step % self.trainer.args.ref_model_sync_steps == 0:
            reshard(synced)

    # Checkpoints

    def save(self, folder: Path) -> None:
        """Write the reference into a checkpoint if training updates it or it has copied weights."""
        reference = self.policy_reference
        synced = self._synced_model()
        args = self.trainer.args
        if reference is not None and self.ranks.tensor_parallel is None:
            save_weights(reference.copies.items(), folder, writes=args.should_save)
        if synced is not None and not args.save_only_model and not self._is_partitioned():
            save_weights(synced.named_parameters(), folder, writes=args.should_save)

    def resume(self, folder: Path | None, *, is_finished: bool) -> None:
        """Load the reference from a checkpoint. Without FSDP, all ranks take the first rank's copies, as DDP does."""
        reference = self.policy_reference
        synced = self._synced_model()
        trainer = self.trainer
        if reference is not None and self.ranks.tensor_parallel is None:
            if folder is not None:
                reference.load(folder)
            if trainer.accelerator.num_processes > 1 and not trainer.is_fsdp_enabled:
                for _, copy in reference.pairs():
                    copy.copy_(broadcast(copy))
        if synced is not None and self._is_fsdp1():
            raise ValueError(
                "`sync_ref_model=True` does not work under FSDP1, which keeps old gathered weights of the reference "
                "between passes. Use FSDP2 (`fsdp_version: 2`), or set `sync_ref_model=False`."
            )
        if folder is None or synced is None:
            return
        has_loaded = not self._is_partitioned() and load_weights(dict(synced.named_parameters()), folder)
        if not has_loaded and not is_finished:
            logger.warning(
                f"{folder} has no weights of the reference, which `sync_ref_model` updates: it was written by stock "
                "TRL, under ZeRO-3, or with `save_only_model`. The reference starts from its initial weights, so the "
                "result differs from an uninterrupted run."
            )

    def _is_partitioned(self) -> bool:
        plugin = self.trainer.accelerator.state.deepspeed_plugin
        return plugin is not None and plugin.zero_stage == 3

    def _is_fsdp1(self) -> bool:
        return self.trainer.is_fsdp_enabled and not self.trainer.accelerator.is_fsdp2

    def _check_host(self) -> None:
        trainer = self.trainer
        shares_weights = isinstance(trainer.model, PeftModel) and trainer.args.beta != 0
        if trainer.ref_model is None and not shares_weights:
            return  # beta is 0, or all log-probs are precomputed: there is no reference model
        check_hosted_arguments(trainer.args, has_model=trainer.ref_model is not None)
        check_hosted_engine(trainer, "reference_device", is_split=self.ranks.tensor_parallel is not None)


def check_hosted_engine(trainer: Any, option: str, *, is_split: bool) -> None:
    """Raise `ValueError` if the engine does not allow a model in host memory, for which `option` asks."""
    if is_split or trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise ValueError(
            f"`{option}='cpu'` does not work with FSDP, DeepSpeed and tensor parallelism, which shard the model "
            f"themselves. Leave `{option}` unset. FSDP (`fsdp_offload_params: true`) and ZeRO-3 "
            "(`offload_param_device: cpu`) have their own offloading."
        )
    if trainer.accelerator.state.dynamo_plugin.backend != DynamoBackend.NO:
        raise ValueError(
            f"`{option}='cpu'` replaces weights during the forward pass, which does not work with "
            "`torch_compile=True`. Leave one of them unset."
        )


def check_hosted_arguments(args: Any, *, has_model: bool) -> None:
    """Raise `ValueError` if `reference_device='cpu'` has no reference model to move, or one that changes."""
    option = "`reference_device='cpu'`"
    if not has_model and args.beta != 0:
        raise ValueError(
            f"{option} keeps a separate reference model on the host, but there is none: a PEFT policy and its "
            "reference share their weights. Leave `reference_device` unset."
        )
    if args.sync_ref_model:
        raise ValueError(
            f"{option} needs a reference that does not change, but `sync_ref_model=True` changes it. Leave one of "
            "them unset."
        )


def _check_synced(policy: Any, model: Any) -> None:
    """Raise `ValueError` if TRL's `sync_ref_model` cannot update `model`, which it does parameter by parameter."""
    for of_policy, of_reference in zip_longest(policy.named_parameters(), model.named_parameters()):
        if of_policy is None or of_reference is None or of_policy[1].shape != of_reference[1].shape:
            name = (of_reference or of_policy)[0]
            raise ValueError(
                "`sync_ref_model=True` needs a `ref_model` with the parameters of `model`, but the parameters differ, "
                f"first in `{name}`. Pass a model of the same kind, or set `sync_ref_model=False`."
            )
