"""Lets go of a reference model that TRL loaded, once the store covers the run, and loads it again if it is needed."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from accelerate.utils.memory import clear_device_cache
from datasets import Dataset

from ..compat import ReferenceGiven
from ..reference import StoredReference, identity_of
from .adapter_reference import AdapterReferenceMixin
from .exact_head import ExactHeadMixin
from .hosted_reference import HostedReferenceMixin
from .planned import PlannedPassesMixin

_ROWS_CHECKED_TOGETHER = 64


class ReleasedReferenceMixin(
    AdapterReferenceMixin, PlannedPassesMixin, HostedReferenceMixin, ExactHeadMixin, ReferenceGiven
):
    """For `StoredReferenceMixin`, which says what the reference is and what the store holds."""

    _identity: str | None
    _identity_facts: dict[str, Any]
    _untold: str | None
    _load_reference: Callable[[], Any] | None
    _identify: Callable[[Any], dict[str, Any]]
    _datasets: Callable[[], Iterator[tuple[str, Any]]]
    _gather_counts: Callable[[list[int]], list[list[int]]]

    @property
    def _with_columns(self) -> dict[str, bool]:
        raise NotImplementedError

    @property
    def stored(self) -> StoredReference:
        """The store."""
        raise NotImplementedError

    def release_reference(self) -> None:
        """Drop a reference model that TRL loaded, if no data set of the run needs it any more.

        A sharded one is left where it is.
        """
        if self.ref_model is None or self._load_reference is None or self._untold or not self._store_covers_the_run():
            return
        if self._identity is None:
            self._identity_facts = self._identify(self.ref_model)
            self._identity = identity_of(self._identity_facts)
        held = self.accelerator.unwrap_model(self.ref_model)
        models = self.accelerator._models
        models[:] = [model for model in models if self.accelerator.unwrap_model(model) is not held]
        del self.scoring_forwards[1:], held
        self.ref_model = None
        clear_device_cache(garbage_collection=True)

    def _load_reference_again(self, load: Callable[[], Any]) -> None:
        self.ref_model = model = self.loaded_reference(load)
        super()._attach(model)
        same = identity_of(self._identify(model)) == self._identity
        if same:
            self.ref_model = self.accelerator.prepare_model(model, evaluation_mode=True)
        if not same or self._gives_others():
            self.ref_model = None
            raise ValueError(
                "The reference model was released from memory when every sequence had been scored, and is needed for "
                f"others now; but what lies at {model.config._name_or_path!r} is no longer the same model. Put it "
                "back, or pass a `ref_model`, which is kept."
            )

    def _gives_others(self) -> bool:
        """Whether the reference model gives other values than are stored."""

        def score(batch: dict[str, Any]) -> torch.Tensor:
            return self.score_as_reference(self.ref_model, batch)

        return self.stored.why_another(score, self.accelerator.device) is not None

    def _store_covers_the_run(self) -> bool:
        """Whether all ranks together find every row in the store, of training and of evaluation in training."""
        if self.plan.source != "store":
            return False
        needed = [
            dataset
            for name, dataset in self._datasets()
            if not self._with_columns[name] and (name == "train_dataset" or self.args.eval_strategy != "no")
        ]
        with _random_state_kept():  # a collator may draw
            covers = all(is_map_style(dataset) and self._store_covers(dataset) for dataset in needed)
        return all(count[0] for count in self._gather_counts([int(covers)]))

    def _store_covers(self, dataset: Dataset) -> bool:
        """This rank's share of the rows."""
        dataset = self.as_fed(dataset)
        size, step = self.accelerator.num_processes, _ROWS_CHECKED_TOGETHER
        for start in range(self.accelerator.process_index * step, len(dataset), size * step):
            rows = [dataset[i] for i in range(start, min(start + step, len(dataset)))]
            if not self.stored.holds(self.data_collator(rows)):
                return False
        return True


def is_map_style(dataset: Any) -> bool:
    """Whether the rows of a data set can be read in any order."""
    return isinstance(dataset, Dataset)


@contextmanager
def _random_state_kept() -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
