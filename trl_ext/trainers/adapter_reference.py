"""What both trainers share of a PEFT policy that is its own reference: which adapter, which copies, and their moves."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import trl
from accelerate.utils import broadcast
from peft import PeftConfig, PeftModel
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..compat import CheckpointedReference, no_adapter_copied_by, unrecorded_pass
from ..reference import OwnReference, freeze_adapter, name_policy, trl_copies_whole
from .adapter_arguments import AdapterArguments


class AdapterReferenceMixin(CheckpointedReference):
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
        if not is_policy or not isinstance(policy, PeftModel) or trainer.ref_model is not None:
            return
        if not self._has_reference():
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
        elif self._fresh is not None or self._trl_makes_ref(policy, args):
            self.own_reference = OwnReference(policy, "trl")
            if self._fresh is None:
                freeze_adapter(policy, "ref")  # PEFT leaves virtual tokens of it trainable
        else:
            self.own_reference = OwnReference(policy, "initial")

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
        return super().train(*positional, **keywords)  # type: ignore[misc]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Transformers' own; with a checkpoint, the copies of the reference too."""
        super().save_model(output_dir, _internal_call)  # type: ignore[misc]
        own, trainer = self.own_reference, self
        if own is not None and _internal_call and output_dir is not None and self._copies_are_whole():
            own.save(Path(output_dir), writes=trainer.args.should_save)  # type: ignore[attr-defined]

    def reference_restored(self, checkpoint: str) -> None:
        """Called when training goes on from `checkpoint`, after the policy was loaded."""
        if self.own_reference is not None and self._copies_are_whole():
            self.own_reference.load(Path(checkpoint))

    def policy_folder(self) -> str | None:
        """In which folder of a checkpoint PEFT puts the policy's adapter, where that is not the checkpoint itself."""
        model: Any = self.model  # type: ignore[attr-defined]
        if not isinstance(model, PeftModel) or model.active_adapter == "default":
            return None
        return str(model.active_adapter)

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
    """Under DDP, whose parameters are those of the first rank, the copies are too."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        trainer = self.trainer
        if trainer.accelerator.num_processes > 1 and trainer.tensor_parallel is None and not trainer.is_fsdp_enabled:
            trainer.own_reference.same_on_all_ranks(broadcast)
