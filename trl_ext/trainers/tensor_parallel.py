"""Trainers under tensor parallelism: the ranks that hold one copy of the model do the same, and count once."""

from typing import Any

from torch import Tensor

from ..compat import TensorParallelInternals
from ..engines.tensor_parallel import OncePerCopy, TensorParallel


class TensorParallelMixin(TensorParallelInternals):
    """Mixed in before a TRL trainer.

    Attributes:
        tensor_parallel (`TensorParallel`, *optional*): the group that this process is in; `None` where each process has
            a copy of the model, or a part of one that FSDP or DeepSpeed puts together.
    """

    tensor_parallel: TensorParallel | None = None

    def __init__(self, *positional: Any, **keywords: Any) -> None:
        super().__init__(*positional, **keywords)
        if self.tensor_parallel is not None:
            self._tokens_are_counted_once()

    def create_accelerator_and_postprocess(self) -> None:
        """Transformers' own, called in its `__init__`."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self.tensor_parallel = TensorParallel.of(self.model)  # type: ignore[has-type]
        if self.tensor_parallel is not None:
            self.accelerator: Any = OncePerCopy(self.accelerator, self.tensor_parallel)

    def _check_same_rows(self, ids: Tensor) -> None:
        """The rows of a micro-batch must be those of the other ranks that hold this copy of the model."""
        if self.tensor_parallel is not None:
            self.tensor_parallel.check_same(ids)
