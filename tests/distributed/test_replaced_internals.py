"""What trl_ext replaces in other libraries has the name that it expects, or else training stops."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from trl_ext.distributed.gradients import sum_gradients_once
from trl_ext.distributed.sequence_parallel import keep_batches_whole, leave_model_parallel_group


class ReplicatedWithGradAllReduce:
    """As in transformers 5.23, which puts a forward into each module."""

    def install_forward(self, module: nn.Module) -> None:
        original_forward = module.forward

        def tp_forward(x: torch.Tensor) -> torch.Tensor:
            return original_forward(x)

        module.forward = tp_forward  # type: ignore[method-assign]


class RenamedSum(ReplicatedWithGradAllReduce):
    def install_forward(self, module: nn.Module) -> None:
        super().install_forward(module)
        module.forward.__qualname__ = "RenamedSum.install_forward.<locals>.tp_forward"  # type: ignore[attr-defined]


def split_model(style: type[ReplicatedWithGradAllReduce], plan: dict[str, str]) -> Any:
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"q_norm": nn.LayerNorm(4)}) for _ in range(2)])})
    model.tp_plan = plan
    for layer in model["layers"]:  # type: ignore[union-attr]
        style().install_forward(layer["q_norm"])
    return model


PLAN = {"layers.*.q_norm": "replicated_with_grad_allreduce", "layers.*.q_proj": "colwise"}


def test_a_sum_of_gradients_that_is_not_found_stops_the_training():
    group: Any = None  # no backward runs
    found = split_model(ReplicatedWithGradAllReduce, PLAN)
    sum_gradients_once(found, group)
    assert "forward" not in vars(found["layers"][1]["q_norm"])
    sum_gradients_once(found, group)  # a second training
    with pytest.raises(RuntimeError, match=r"^`layers\.0\.q_norm` has gradients that transformers sums"):
        sum_gradients_once(split_model(RenamedSum, PLAN), group)
    sum_gradients_once(split_model(RenamedSum, {"layers.*.q_norm": "colwise"}), group)
    frozen = split_model(RenamedSum, PLAN)
    frozen.requires_grad_(False)
    sum_gradients_once(frozen, group)


class RenamedPreparation(Accelerator):
    """As if accelerate had given its method another name."""

    def __getattribute__(self, name: str) -> Any:
        if name == "_prepare_cp":
            raise AttributeError(name)
        return super().__getattribute__(name)


def test_accelerates_splitting_of_batches_under_another_name_stops_the_training():
    accelerator = Accelerator(cpu=True)
    group: Any = SimpleNamespace(kind="cp")
    keep_batches_whole(accelerator, group)
    assert accelerator._prepare_cp(1, 2) == (1, 2)
    with pytest.raises(RuntimeError, match="`RenamedPreparation` has no `_prepare_cp`, which trl_ext replaces"):
        keep_batches_whole(RenamedPreparation(cpu=True), group)


def test_deepspeeds_group_under_another_name_stops_the_training():
    optimizer = SimpleNamespace(model_parallel_group="the group", model_parallel_rank=1)
    leave_model_parallel_group(optimizer)
    assert vars(optimizer) == {"model_parallel_group": None, "model_parallel_rank": 0}
    with pytest.raises(RuntimeError, match="has no `model_parallel_group`, which trl_ext replaces"):
        leave_model_parallel_group(SimpleNamespace(mp_group="the group"))
