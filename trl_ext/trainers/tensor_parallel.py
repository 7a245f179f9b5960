"""Trainers under tensor parallelism: the ranks that hold one copy of the model do the same, and count once."""

from typing import Any

from torch import Tensor
from transformers import TrainerCallback

from ..compat import TensorParallelInternals, adapters_made_by
from ..engines.partial_gradients import sum_gradients_once
from ..engines.split_lora import complete_adapters, make_adapter
from ..engines.tensor_parallel import TensorParallel
from .counted_once import CountedOnceMixin


class TensorParallelMixin(CountedOnceMixin, TensorParallelInternals):
    """Mixed in before a TRL trainer.

    Attributes:
        tensor_parallel (`TensorParallel`, *optional*): the group that this process is in; `None` where each process has
            a copy of the model, or a part of one that FSDP or DeepSpeed puts together.
    """

    tensor_parallel: TensorParallel | None = None
    _trl_trainer: type

    def __init__(self, *positional: Any, **keywords: Any) -> None:
        with adapters_made_by(_make_adapter, self._trl_trainer):
            super().__init__(*positional, **keywords)
        if self.tensor_parallel is not None:
            self._tokens_are_counted_once()
            self.add_callback(_SumsOnce(self.tensor_parallel))  # type: ignore[attr-defined]

    def create_accelerator_and_postprocess(self) -> None:
        """Transformers' own, called in its `__init__`."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self.tensor_parallel = TensorParallel.of(self.model)  # type: ignore[attr-defined]
        if self.tensor_parallel is not None:
            model: Any = self.model  # type: ignore[attr-defined]
            complete_adapters(model, self.tensor_parallel)
            self._count_once(self.tensor_parallel)

    def _ranks_in_step(self) -> TensorParallel | None:
        return super()._ranks_in_step() if self.tensor_parallel is None else self.tensor_parallel

    def _agreed(self, value: Any) -> Any:
        """The `value` of the first of the ranks that hold this copy of the model."""
        if self.tensor_parallel is None:
            return value
        return self.tensor_parallel.shared(value, self.accelerator.device)

    def _check_same_rows(self, ids: Tensor) -> None:
        """The rows of a micro-batch must be those of the other ranks that hold this copy of the model."""
        if self.tensor_parallel is not None:
            self.tensor_parallel.check_same(ids)


class _SumsOnce(TrainerCallback):
    """Before the first step, and after what FSDP2 shards besides is sharded."""

    def __init__(self, ranks: TensorParallel) -> None:
        self.ranks = ranks

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        sum_gradients_once(model, self.ranks.group)


def _make_adapter(make: Any, model: Any, config: Any, *positional: Any, **keywords: Any) -> Any:
    ranks = TensorParallel.of(model)
    if ranks is None:
        return make(model, config, *positional, **keywords)
    return make_adapter(make, model, config, ranks, *positional, **keywords)
