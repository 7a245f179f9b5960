"""The model that gives reference log-probs, ready for a pass: a separate model, a named adapter, or no adapter."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..compat import disable_gradient_checkpointing, use_adapter


@contextmanager
def reference_model(
    policy: Any, unwrapped_policy: Any, separate: Any, checkpointing_kwargs: dict[str, Any] | None
) -> Iterator[Any]:
    """Within, the model to call, without gradients.

    Args:
        policy: the model in training.
        unwrapped_policy: the same, without what an engine wrapped around it.
        separate: the reference model, or `None` where the policy is a PEFT model. Then the reference is its adapter
            named "ref", a frozen copy of the adapter that training began with, or else the model without adapter.
        checkpointing_kwargs (`dict`, *optional*): the arguments of gradient checkpointing, which is off within.
    """
    with torch.no_grad(), disable_gradient_checkpointing(policy, checkpointing_kwargs):
        if separate is not None:
            yield separate
        else:
            frozen = "ref" if "ref" in unwrapped_policy.peft_config else None
            with use_adapter(unwrapped_policy, adapter_name=frozen):
                yield policy
