"""What TRL and transformers do where several ranks are one process: one copy of a model, or one sequence."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any


class TensorParallelInternals:
    """Mixed in before a TRL trainer: what of its private attributes counts the ranks of a tensor-parallel group."""

    def _tokens_are_counted_once(self) -> None:
        """Tell TRL that its gathered counts hold each token once."""
        if hasattr(self, "_tp_size"):  # DPO's
            self._tp_size = 1


@contextmanager
def adapters_made_by(make: Callable[..., Any], trainer_class: type) -> Iterator[None]:
    """Within, `trainer_class.__init__` puts an adapter on its model with `make(get_peft_model, model, config, ...)`."""
    module: Any = sys.modules[trainer_class.__module__]
    original = module.get_peft_model
    module.get_peft_model = partial(make, original)
    try:
        yield
    finally:
        module.get_peft_model = original


@contextmanager
def gathered_by(accelerator: Any, trainer_class: type) -> Iterator[None]:
    """Within, what `trainer_class` gathers by its module's names, it gathers by the methods of `accelerator`."""
    module: Any = sys.modules[trainer_class.__module__]
    gather, gather_object = module.gather, module.gather_object
    module.gather, module.gather_object = accelerator.gather, accelerator.gather_object
    try:
        yield
    finally:
        module.gather, module.gather_object = gather, gather_object


class WholeBatches:
    """Mixed in before a TRL trainer: what transformers does where the ranks of a sequence group get whole batches.

    It takes it that batches are split over them before the trainer meets them.
    """

    _ranks_of_group = 1
    accelerator: Any
    args: Any
    model: Any

    def _prepare_context_parallel_inputs(self, model: Any, inputs: Any) -> Any:
        """The batch as it is, for our scoring forward to split."""
        if self._ranks_of_group == 1:
            return super()._prepare_context_parallel_inputs(model, inputs)  # type: ignore[misc]
        return nullcontext, inputs

    def get_sp_size(self) -> int:
        """How many micro-batches are made of each that a data loader gives."""
        return 1 if self._ranks_of_group > 1 else super().get_sp_size()  # type: ignore[misc, no-any-return]

    def floating_point_ops(self, inputs: Any) -> int:
        """Transformers' estimate of what this rank computes of a batch."""
        return int(super().floating_point_ops(inputs)) // self._ranks_of_group  # type: ignore[misc]

    def get_total_train_batch_size(self, args: Any) -> int:
        """Transformers' own, in which the ranks of a group count once."""
        total: int = super().get_total_train_batch_size(args)  # type: ignore[misc]
        return total // self.accelerator.parallelism_config.sp_size if self._ranks_of_group > 1 else total
