"""How TRL's `__init__` builds a trainer with our head and our adapters."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from .replaced import module_of, names_replaced, replaced


@contextmanager
def built_with(
    trainer_class: type,
    config: Any,
    attach: Callable[..., None],
    make_adapter: Callable[..., Any],
    *,
    copies: bool,
    **others: Any,
) -> Iterator[None]:
    """Within, `trainer_class.__init__` attaches each model's scoring head with `attach(model, **options)`.

    TRL's trainers call the `add_fused_lm_head` of their module on the policy and on the reference model, when both
    exist and before reference log-probs are precomputed; there is no method to override at that point.

    Args:
        config (`Any`): of the trainer. TRL refuses a `padding_free` that it does not find False.
        make_adapter (`Callable`): called with PEFT's `get_peft_model` and its arguments.
        copies (`bool`): whether TRL may copy an adapter to be the reference.
        others (`Any`): what else stands for a name of the module.
    """
    module = module_of(trainer_class)
    names = {"add_fused_lm_head": attach, "get_peft_model": partial(make_adapter, module.get_peft_model), **others}
    if not (getattr(config, "cast_lm_head_to_fp32", False) or getattr(config, "use_vllm", False)):
        names["BaseTunerLayer"] = _NoAdapter
    if not copies:
        names["is_peft_model"] = _not_the_first_time(module)
    hidden = {"padding_free": False} if getattr(config, "padding_free", None) else {}
    with names_replaced(trainer_class, **names), replaced(config, **hidden):
        yield


class _NoAdapter:
    """No head is an instance of it: in the place of `BaseTunerLayer`, so that an adapter on the head is taken."""


def _not_the_first_time(module: Any) -> Callable[[Any], bool]:
    original = module.is_peft_model
    asked_before: list[bool] = []

    def is_peft_model(model: Any) -> bool:
        if not asked_before:
            asked_before.append(True)
            return False
        return original(model)

    return is_peft_model
