"""What both trainers share of a PEFT policy that is its own reference: which adapter, which copies, and their moves."""

import dataclasses
import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import trl
from accelerate.utils import broadcast
from peft import PeftConfig, PeftModel
from peft.utils import CONFIG_NAME as PEFT_CONFIG_NAME
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..compat import PolicyInFolder, no_adapter_copied_by, unrecorded_pass
from ..engines.quantized import keep_differentiable
from ..passes import Plan
from ..reference import (
    OwnReference,
    begins_with_weights_of_base,
    freeze_adapter,
    name_policy,
    trained_beside,
    trl_copies_whole,
)
from .adapter_arguments import AdapterArguments


class AdapterReferenceMixin(PolicyInFolder):
    """Mixed in before `ExactHeadMixin`.

    Attributes:
        own_reference (`OwnReference`, *optional*): what of a PEFT policy is the reference; `None` where it is a model
            of its own, or not needed.
    """

    own_reference: OwnReference | None = None
    _trl_trainer: type

    def __init__(self, *positional: Any, **keywords: Any) -> None:
        signature = inspect.signature(self._trl_trainer.__init__)  # type: ignore[misc]
        given = signature.bind(self, *positional, **keywords).arguments
        policy, args = given["model"], cast(Any, given.get("args"))
        self._fresh: PeftConfig | None = given.get("peft_config")
        self._adapters_asked = AdapterArguments.of(args)
        adapted = isinstance(policy, PeftModel) or self._fresh is not None
        if adapted and given.get("ref_model") is not None and getattr(args, "sync_ref_model", False):
            raise ValueError(
                "`sync_ref_model=True` with an adapter moves a copy of that adapter, and `ref_model` is another model. "
                "Leave `ref_model` out, or set `sync_ref_model=False`."
            )
        self._choose_adapters(policy, given.get("ref_model"))
        self._synced_apart = False
        context: Any = nullcontext()
        if isinstance(policy, PeftModel) and self._fresh is None and not self._trl_makes_ref(policy, args):
            context = no_adapter_copied_by(self._trl_trainer)
        try:
            with context:
                super().__init__(*positional, **keywords)  # type: ignore[call-arg]
        finally:
            if self._synced_apart:
                args.sync_ref_model = True
        if self.own_reference is not None:
            if self.own_reference.moves:
                self.add_callback(_MovesReference(self.own_reference))  # type: ignore[attr-defined]
            self.add_callback(_StartsReference(self))  # type: ignore[attr-defined]

    # When the trainer is built

    def _choose_adapters(self, policy: Any, ref_model: Any) -> None:
        """Turn on what `policy_adapter_name` and freeze what `ref_adapter_name` names.

        Raises:
            `ValueError`: there is no such adapter.
        """
        asked = self._adapters_asked
        names = {"policy_adapter_name": asked.policy_adapter_name, "ref_adapter_name": asked.ref_adapter_name}
        names = {field: name for field, name in names.items() if name is not None}
        if names and (not isinstance(policy, PeftModel) or self._fresh is not None):
            field, name = next(iter(names.items()))
            what = "a fresh adapter (`peft_config`)" if self._fresh is not None else f"`{type(policy).__name__}`"
            raise ValueError(
                f"`{field}={name!r}` names an adapter of a `PeftModel`, and `model` is {what}. Pass the `PeftModel` "
                "that holds the adapters, or leave it unset."
            )
        for field, name in names.items():
            if name not in policy.peft_config:
                raise ValueError(
                    f"`{field}={name!r}`, and the model has the adapters {sorted(policy.peft_config)}. Name one of "
                    'them, or load it first (`model.load_adapter(path, "name")`).'
                )
        if not isinstance(policy, PeftModel):
            return
        if asked.policy_adapter_name is not None:
            name_policy(policy, asked.policy_adapter_name)
        if asked.ref_adapter_name is not None:
            if ref_model is not None:
                raise ValueError(
                    f"`ref_adapter_name={asked.ref_adapter_name!r}` and `ref_model` are two references. Give one."
                )
            if policy.active_adapter == asked.ref_adapter_name:
                raise ValueError(
                    f"`ref_adapter_name={asked.ref_adapter_name!r}` is the adapter that is active, which is trained. "
                    "Name the one to train in `policy_adapter_name`."
                )
            freeze_adapter(policy, asked.ref_adapter_name)

    def _trl_makes_ref(self, policy: PeftModel, args: Any) -> bool:
        """Whether the reference is the adapter "ref", TRL's copy of "default"."""
        asked = self._adapters_asked
        if asked.policy_adapter_name or asked.ref_adapter_name or getattr(args, "sync_ref_model", False):
            return False
        return "default" in policy.peft_config and trl_copies_whole(policy)

    def _has_reference(self) -> bool:
        """Whether there is a reference at all."""
        return True

    def _attach(self, model: Any, **options: Any) -> None:
        super()._attach(model, **options)  # type: ignore[misc]
        trainer: Any = self
        policy, args = trainer.model, trainer.args
        is_policy = len(trainer.scoring_forwards) == 1
        if not is_policy or not isinstance(policy, PeftModel):
            return
        keep_differentiable(policy)
        if trainer.ref_model is not None or not self._has_reference():
            return
        moves, named = bool(args.sync_ref_model), self._adapters_asked.ref_adapter_name
        if moves:
            self.own_reference = own = OwnReference(policy, "initial", moves=True)
            if self._fresh is not None:
                own.begin_as_base(self._fresh)
            elif named is not None:
                own.begin_as(named)
            # TRL takes the reference for none that could be moved
            args.sync_ref_model, self._synced_apart = False, True
        elif named is not None:
            self.own_reference = OwnReference(policy, "named", named)
        elif begins_with_weights_of_base(self._fresh):
            self.own_reference = OwnReference(policy, "initial")
        elif self._fresh is not None or self._trl_makes_ref(policy, args):
            self.own_reference = OwnReference(policy, "trl")
            if self._fresh is None:
                freeze_adapter(policy, "ref")  # PEFT leaves virtual tokens of it trainable
        else:
            self.own_reference = OwnReference(policy, "initial")
        self._refuse_what_cannot_be_copied(self.own_reference)

    def _refuse_what_cannot_be_copied(self, own: OwnReference) -> None:
        trainer: Any = self
        plugin = trainer.accelerator.state.deepspeed_plugin
        engine = "ZeRO-3" if plugin is not None and plugin.zero_stage == 3 else None
        if trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2:
            engine = "FSDP1"
        if own.copies and engine is not None:
            raise ValueError(
                f"The reference needs a copy of `{own.copies[0]}`, which is trained and would be partitioned by "
                f"{engine}. Use another engine (ZeRO-2, FSDP2); or train a fresh adapter (`peft_config`) or one that "
                'is called "default", without a `bias`, and with `sync_ref_model=False`.'
            )
        if own.moves and trainer.tensor_parallel is not None:
            raise ValueError(
                "`sync_ref_model=True` with an adapter does not go with tensor parallelism, where each rank has a part "
                "of the reference only. Set it to False, or use another engine."
            )

    def explain(self) -> Plan:
        """As of all trainers, with a warning of what is trained and not saved."""
        plan: Plan = super().explain()  # type: ignore[misc]
        policy: Any = self.model  # type: ignore[attr-defined]
        beside = trained_beside(policy) if isinstance(policy, PeftModel) else []
        if not beside:
            return plan
        more = f" and {len(beside) - 1} more" if beside[1:] else ""
        warning = (
            f"`{beside[0]}`{more} is trained and is in no adapter: PEFT saves adapters only, so neither a checkpoint "
            "nor `save_model` has it. Name its module in `modules_to_save`, or freeze it."
        )
        return dataclasses.replace(plan, warnings=(*plan.warnings, warning))

    # A pass

    @contextmanager
    def reference_pass(self) -> Iterator[None]:
        """Within, a model is called as the reference: without gradients, and a PEFT policy that is its own is so."""
        own = self.own_reference
        with unrecorded_pass(self), nullcontext() if own is None else own.entered():
            yield

    # Training, and checkpoints

    def train(self, *positional: Any, **keywords: Any) -> Any:
        """TRL's own.

        Raises:
            `ValueError`: nothing would be trained.
        """
        model: Any = self.model  # type: ignore[attr-defined]
        if not any(param.requires_grad for param in model.parameters()):
            hint = "Let parameters of it be trained (`requires_grad`)."
            if isinstance(model, PeftModel):
                hint = (
                    f'The adapter "{model.active_adapter}" was loaded for inference: load it with `is_trainable=True`, '
                    "or name it in `policy_adapter_name`."
                )
            raise ValueError(f"Nothing of the model is trained: no parameter has `requires_grad`. {hint}")
        if self.own_reference is not None:
            self.own_reference.keep_what_is_trained()  # what was unfrozen since
            self._refuse_what_cannot_be_copied(self.own_reference)
        return super().train(*positional, **keywords)  # type: ignore[misc]

    def _save_beside(self, folder: Path) -> None:
        super()._save_beside(folder)  # type: ignore[misc]
        if self.own_reference is not None and self._copies_are_whole():
            self.own_reference.save(folder, writes=self.args.should_save)  # type: ignore[attr-defined]

    def policy_folder(self) -> str | None:
        """In which folder of a checkpoint PEFT puts the policy's adapter, where that is not the checkpoint itself."""
        model: Any = self.model  # type: ignore[attr-defined]
        if not isinstance(model, PeftModel) or model.active_adapter == "default":
            return None
        return str(model.active_adapter)

    def policy_loaded(self, checkpoint: str) -> None:
        """Called after transformers has loaded the policy of `checkpoint`: load it where it lies beside others."""
        model: Any = self.model  # type: ignore[attr-defined]
        several = isinstance(model, PeftModel) and len(model.peft_config) > 1
        if several and self.policy_folder() is None and (Path(checkpoint) / PEFT_CONFIG_NAME).exists():
            model.load_adapter(checkpoint, "default", is_trainable=True)

    def _copies_are_whole(self) -> bool:
        """Under tensor parallelism each rank has copies of its own part."""
        return self.tensor_parallel is None  # type: ignore[attr-defined, no-any-return]


class _Tensors:
    """What TRL takes for a model where it moves the reference: parameters, in order."""

    def __init__(self, own: OwnReference, place: int) -> None:
        self._own, self._place = own, place

    def parameters(self) -> list[Tensor]:
        """Of the policy, or of the reference."""
        return [pair[self._place] for pair in self._own.pairs()]


class _MovesReference(trl.SyncRefModelCallback):  # type: ignore[misc]
    """TRL's own, on the tensors of the policy that have a copy, and on the copies."""

    def __init__(self, own: OwnReference) -> None:
        super().__init__(ref_model=_Tensors(own, 1), accelerator=None)
        self._policy = _Tensors(own, 0)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        super().on_step_end(args, state, control, **{**kwargs, "model": self._policy})


class _StartsReference(TrainerCallback):
    """Takes the copies of a checkpoint; and under DDP, whose parameters are those of the first rank, the first's."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        trainer = self.trainer
        if trainer._resumes_from is not None and trainer._copies_are_whole():
            trainer.own_reference.load(trainer._resumes_from)
        if trainer.accelerator.num_processes > 1 and trainer.tensor_parallel is None and not trainer.is_fsdp_enabled:
            trainer.own_reference.same_on_all_ranks(broadcast)
