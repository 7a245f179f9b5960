"""Every name of TRL that is not public API, imported in this one file, and the versions for which that holds."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

from packaging.specifiers import SpecifierSet

SUPPORTED_TRL = SpecifierSet(">=1.15,<1.17")

if version("trl") not in SUPPORTED_TRL:
    raise ImportError(
        f"trl_ext works with trl{SUPPORTED_TRL}, found trl {version('trl')}. Run `pip install 'trl{SUPPORTED_TRL}'`."
    )

from trl.trainer.utils import FusedCausalLMOutput, maybe_gather_lm_head_ctx  # noqa: E402

__all__ = ["FusedCausalLMOutput", "OwnPrecomputeCache", "head_attached_by", "maybe_gather_lm_head_ctx"]


@contextmanager
def head_attached_by(attach: Callable[..., None], trainer_class: type) -> Iterator[None]:
    """Within, `trainer_class.__init__` attaches its models' scoring head with `attach(model, **options)`.

    TRL's trainers call the `add_fused_lm_head` of their module on the policy and on the reference model, after both
    exist and before reference log-probs are precomputed; there is no method to override at that point. The name is put
    back on the way out, so stock trainers keep TRL's head.
    """
    module: Any = sys.modules[trainer_class.__module__]
    original = module.add_fused_lm_head
    module.add_fused_lm_head = attach
    try:
        yield
    finally:
        module.add_fused_lm_head = original


class OwnPrecomputeCache:
    """Mixed in before TRL's `DPOTrainer`: `precompute_key()` is a part of what its cache files are found by.

    TRL finds the file of precomputed reference log-probs by the data set's fingerprint and `_precompute_model_hash`,
    which its `__init__` sets.
    """

    def precompute_key(self) -> tuple[object, ...]:
        """What else the precomputed values depend on."""
        raise NotImplementedError

    @property
    def _precompute_model_hash(self) -> tuple[object, ...]:
        return (self.__dict__["_precompute_model_hash"], *self.precompute_key())

    @_precompute_model_hash.setter
    def _precompute_model_hash(self, model_hash: str | None) -> None:
        self.__dict__["_precompute_model_hash"] = model_hash
