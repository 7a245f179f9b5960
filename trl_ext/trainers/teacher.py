"""The teacher of a `DistillationTrainer`: a model, or the base model of the student's adapter."""

import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from peft import PeftModel
from torch import nn

from ..checks.arguments import adapter_padding_reason
from ..compat.distillation import DistilledRows, call_in_wrapper, load_teacher, prepare_teacher
from ..compat.reference import recorded_model_loads
from ..compat.replaced import unrecorded_pass
from ..distributed.shards import parameter_of
from ..heads.logits import LogitTransform
from ..host.reference import HostedReference, check_supported
from ..planning.plan import Decision
from ..reference.weights import base_of, uncompiled
from ..scoring.forward import HeadInputs
from ..scoring.head import LinearHead
from ..scoring.scorer import Scorer
from .reference_weights import ReferenceOfPolicy, check_hosted_engine
from .teacher_store import TeacherStore

logger = logging.getLogger("trl_ext")


class Trainer(Protocol):
    """The trainer members that the teacher reads. It sets only `teacher_model`, when it loads the model late."""

    accelerator: Any
    args: Any
    model: Any
    teacher_model: Any
    is_deepspeed_enabled: bool
    _forward_redirection: Any


class Teacher:
    """The teacher of one trainer. Without `teacher_model`, it is the base model of the student's adapter.

    Args:
        base (`ReferenceOfPolicy`): makes the base model compute.
        store (`TeacherStore`, *optional*): the store of hidden states.
        device (`str`, *optional*): "cpu" to keep a teacher's model in host memory.
    """

    def __init__(
        self,
        trainer: Trainer,
        scorer: Scorer,
        base: ReferenceOfPolicy,
        *,
        store: TeacherStore | None = None,
        device: str | None = None,
    ) -> None:
        self.trainer = trainer
        self.scorer = scorer
        self.store = store
        self.is_base = False
        self._base = base
        self._device = device
        self._model_loads: list[Any] = []
        self._model: Any = None  # or its name, until TRL has loaded it
        self._waits = False  # whether the model named `_model` is loaded only if the store lacks a row
        self._size = ""  # of the store, for the plan
        self._attached_model: weakref.ref[Any] | None = None  # the model with a forward of ours
        self._has_begun = False

    # Construction

    def take(self, arguments: dict[str, Any], trl_trainer: type) -> dict[str, Any]:
        """Take the argument `teacher_model` of TRL's trainer, unless it need not be loaded.

        Returns names of TRL's module to replace, so that a load is noticed.

        Raises:
            `ValueError`: it is the folder of an adapter alone, which TRL cannot load.
        """
        self._model = arguments.get("teacher_model")
        if not isinstance(self._model, str):
            return {}
        folder = Path(self._model)
        if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
            raise ValueError(
                f"`teacher_model` is '{self._model}', the folder of an adapter. Merge the adapter into its base model, "
                "or pass the loaded model."
            )
        if self.store is not None and self.store.find(self._model):
            self._waits = True
            arguments["teacher_model"] = None
        return recorded_model_loads(trl_trainer, self._model_loads)

    def attach(self) -> None:
        """Attach a scoring forward to the teacher's model, before an engine shards the weights.

        Raises:
            `ValueError`: the model cannot be a teacher, or cannot be stored or kept on the host.
        """
        if self._waits:
            return
        if self._model is not None:
            model = self._model
            if isinstance(model, str):
                model = self._model_loads[-1][0]
                if self.store is not None:
                    self.store.learn_name(self._model)  # its files are here now
            self._model_loads.clear()
            self._model = None  # the trainer has it
            self._attach(model)
        elif isinstance(self.trainer.model, PeftModel):
            options = {"teacher_store": self.store, "teacher_device": self._device}
            option = next((name for name, value in options.items() if value is not None), None)
            if option is not None:
                raise ValueError(
                    f"`{option}` is for a `teacher_model`, but the teacher is the student's base model, which is in "
                    f"memory anyway. Leave `{option}` out."
                )
            self.is_base = True
            self._base.take_base()

    def _attach(self, model: Any) -> None:
        if base_of(model) is base_of(self.trainer.model):
            raise ValueError(
                "`teacher_model` and `model` wrap the same base model. Load the base model a second time. Or leave "
                "`teacher_model` out: then the base model of the student's adapter is the teacher."
            )
        check_vocabulary(self.trainer.model, model.config.get_text_config().vocab_size)
        self.scorer.attach(base_of(model), temperature=self.trainer.args.temperature)
        forward = self.scorer.forwards[-1]
        forward.linear_head(base_of(model))  # an error now, not in the first step
        forward.packing.padded_reason = adapter_padding_reason(model) or forward.packing.padded_reason
        self._attached_model = weakref.ref(base_of(model))
        if self._device is not None:
            check_hosted_engine(self.trainer, "teacher_device", is_split=False)
            check_supported(model, "teacher_device")
            HostedReference(model, self.trainer.accelerator.device, "teacher_device")
        if self.store is not None:
            model.eval()  # as in each pass
            self.store.take(model, is_hosted=self._device is not None)

    def complete(self) -> None:
        """After TRL's `__init__`, load a teacher of which the store lacks a row."""
        if self.store is None:
            return
        if self._waits:
            check_vocabulary(self.trainer.model, self.store.vocabulary)
            self.store.open()
            if not self.store.has_all_rows():
                self._load()
        if not self._waits:
            model = self.inner_model()
            self._size = self.store.expected_size(model.config.get_text_config().hidden_size, model.dtype.itemsize)

    def _load(self) -> None:
        assert self.store is not None
        model = load_teacher(self.trainer, self._model)
        self._waits = False
        self._attach(model)
        self.trainer.teacher_model = prepare_teacher(self.trainer, model)
        self.store.watch(self._unwrapped_model())

    def _unwrapped_model(self) -> Any:
        """Return the teacher's model without the engine's wrapper, perhaps with an adapter."""
        return uncompiled(self.trainer.accelerator.unwrap_model(self.trainer.teacher_model))

    def inner_model(self) -> Any:
        """Return the teacher's model, without the engine's wrapper and without adapters."""
        return base_of(self._unwrapped_model())

    def begin(self) -> None:
        """Find out which model the teacher is now: code of the user may have set `teacher_model`. Every rank calls it.

        Raises:
            `ValueError`: there is no teacher.
        """
        self._has_begun = True
        if self.trainer.teacher_model is not None:
            if self._is_replaced():
                self._attach_replacement()
            if self.store is not None:
                self.store.begin(self._unwrapped_model())
        elif not self.is_base and not self._waits:
            raise ValueError(
                "`teacher_model` is None. Pass a model, its name or its folder. Only a student with a PEFT adapter "
                "needs none: then its base model is the teacher."
            )

    def _is_replaced(self) -> bool:
        """Whether code of the user has set another `teacher_model`."""
        if self.trainer.teacher_model is None:
            return False
        return self._attached_model is None or self.inner_model() is not self._attached_model()

    def _attach_replacement(self) -> None:
        """Attach a model that code of the user has set in place of the teacher."""
        del self.scorer.forwards[1:]
        self.is_base = False
        self._waits = False
        self._base.policy_reference = None
        if self.store is not None:
            self.store.forget_name()
        self._attach(self._unwrapped_model())

    # The plan

    def decision(self) -> Decision:
        """Return the plan's decision on the teacher."""
        if self.is_base:
            reference = self._base.policy_reference
            assert reference is not None
            return Decision("teacher", "run", f"The teacher is {reference.describe()}, and scores every completion.")
        if self.store is None:
            return Decision("teacher", "run", "Scores every completion, as in TRL.", routine=True)
        folder = str(self.store.folder)
        if self._waits:
            reason = "All hidden states are stored, so only the teacher's head is loaded."
            return Decision("teacher", "reuse", reason, folder=folder)
        size = f" ({self._size})" if self._size else ""
        reason = f"The teacher scores each row once, and its hidden states are stored{size}."
        return Decision("teacher", "reuse", reason, folder=folder)

    # Training

    def head_inputs(self, student: Any, rows: DistilledRows) -> HeadInputs:
        """Return what the divergence reads of the teacher for a batch, without a gradient and without dropout.

        Args:
            student (`nn.Module`): the student without the engine's wrapper.
        """
        if not self._has_begun or self._is_replaced():
            self.begin()
        if self.is_base:
            with unrecorded_pass(self.trainer), self._base.entered(), _in_evaluation_mode(student):
                inputs = self._score(student, rows)
            return inputs._replace(head=self._initial_head(inputs.head))
        if self.store is not None:
            if self._attached_model is not None:
                self.store.check_unchanged(self._unwrapped_model())
            return self.store.head_inputs(rows, self)
        return self.run(rows)

    @property
    def is_loaded(self) -> bool:
        return not self._waits

    def run(self, rows: DistilledRows) -> HeadInputs:
        """Run the backbone of the teacher's model, and load it first if no row of the data sets needed it."""
        if self._waits:
            assert self.store is not None
            if self.trainer.accelerator.is_main_process:
                logger.warning(
                    f"`teacher_model` is loaded now and stays in memory, because {self.store.folder} lacks a row, or "
                    "has a damaged one."
                )
            self._load()
        self.trainer.teacher_model.eval()
        with torch.no_grad():
            inputs: HeadInputs = call_in_wrapper(self.trainer, self.trainer.teacher_model, self._score, rows)
        return inputs

    def head(self) -> tuple[LinearHead, LogitTransform]:
        """Return the head of the teacher's model."""
        forward = self.scorer.forwards[1]
        return forward.linear_head(self.inner_model())[0], forward.transform

    def _initial_head(self, head: LinearHead) -> LinearHead:
        """Return the head of the base model with its values from before training."""
        assert self._base.policy_reference is not None
        copies = {id(param): copy for param, copy in self._base.policy_reference.pairs()}
        weight, bias = (parameter_of(head.linear, name) for name in ("weight", "bias"))
        if copies.keys().isdisjoint((id(weight), id(bias))):
            return head
        frozen_linear = nn.Module()
        frozen_linear.weight = copies.get(id(weight), weight)
        frozen_linear.bias = copies.get(id(bias), bias)
        return head._replace(linear=frozen_linear)

    def _score(self, model: Any, rows: DistilledRows) -> HeadInputs:
        forward = self.scorer.forwards[0 if self.is_base else 1]
        return forward.head_inputs(base_of(uncompiled(model)), rows.labels, **rows.inputs)


def check_vocabulary(student: Any, vocabulary: int) -> None:
    """Raise `ValueError` unless the student has the teacher's vocabulary."""
    student_vocabulary = student.config.get_text_config().vocab_size
    if student_vocabulary != vocabulary:
        raise ValueError(
            f"`teacher_model` has a vocabulary of {vocabulary:,} tokens (`vocab_size`), but `model` one of "
            f"{student_vocabulary:,}. Distillation compares them token by token. Use a teacher with the student's "
            "vocabulary."
        )


@contextmanager
def _in_evaluation_mode(model: nn.Module) -> Iterator[None]:
    training_modules = [module for module in model.modules() if module.training]
    for module in training_modules:
        module.training = False
    try:
        yield
    finally:
        for module in training_modules:
            module.training = True
