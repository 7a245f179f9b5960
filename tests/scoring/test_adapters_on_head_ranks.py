"""Adapters on the LM head on two ranks: DDP and FSDP2 train like one process, and unsupported cases are errors."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from head_adapter_cases import CASES, build
from head_definition import floats_apart
from model_families import batch
from tiny import Workshop
from trl_ext.scoring.forward import ScoringOptions, attach_scoring_forward
from trl_ext.scoring.head import resolve_head

pytestmark = pytest.mark.filterwarnings("ignore:Model (with|has) `tie_word_embeddings=True`")


def of_rank(rank: int, unscored: bool) -> tuple[dict[str, Tensor], Tensor]:
    inputs, labels = batch()
    ids = (inputs["input_ids"] - 3 + rank) % 94 + 3
    labels = torch.where(labels == -100, labels, ids)
    return {"input_ids": ids}, torch.full_like(labels, -100) if unscored and rank == 1 else labels


def backward(model: Any, rank: int, unscored: bool) -> None:
    inputs, labels = of_rank(rank, unscored)
    out = model(**inputs, labels=labels, fused_lm_head=True)
    (out.log_probs.sum() - out.mean_log_probs.sum()).backward()


def on_ranks(group: dist.ProcessGroup, workshop: Workshop, name: str, engine: str, unscored: bool) -> Any:
    model = build(CASES[name], workshop).train()
    base = model.get_base_model()
    attach_scoring_forward(base, ScoringOptions(outputs=("log_probs", "mean_log_probs")))
    wrapped: Any = model
    if engine == "DDP":
        wrapped = DistributedDataParallel(model, process_group=group)
    elif engine != "tensor parallel":
        mesh = DeviceMesh.from_group(group, "cpu")
        if engine == "FSDP2, the head apart":
            fully_shard(base.lm_head, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
        linear = base.lm_head.base_layer
        linear.weight = torch.nn.Parameter(distribute_tensor(linear.weight.data, mesh, [Shard(0)]), requires_grad=False)
    try:
        backward(wrapped, group.rank(), unscored)
    except NotImplementedError as error:
        return str(error)
    gradients = {key: x.grad for key, x in model.named_parameters() if x.grad is not None}
    return {key: x.full_tensor() if isinstance(x, DTensor) else x for key, x in gradients.items()}


def of_one_process(workshop: Workshop, name: str, unscored: bool) -> dict[str, Tensor]:
    """Return the means of the results for both ranks' batches."""
    model = build(CASES[name], workshop).train()
    attach_scoring_forward(model.get_base_model(), ScoringOptions(outputs=("log_probs", "mean_log_probs")))
    for rank in range(2):
        backward(model, rank, unscored)
    return {key: x.grad / 2 for key, x in model.named_parameters() if x.grad is not None}


TOLD = ("LoRA", "two LoRAs", "LoRA with its own bias", "tokens, tied", "LoRA and head in modules_to_save")
SAME = [
    *(("DDP", name, unscored) for name in (*TOLD, "DoRA", "IA3") for unscored in (False, True)),
    *(("FSDP2", name, True) for name in ("LoRA", "tokens, tied")),
    *(("FSDP2, the head apart", name, True) for name in TOLD if "tied" not in name),
]
FAST = [("DDP", "LoRA", True), ("DDP", "DoRA", True), ("FSDP2", "tokens, tied", True), SAME[-3]]


@pytest.mark.parametrize(
    ("engine", "name", "unscored"),
    [pytest.param(*row, marks=() if row in FAST else pytest.mark.slow) for row in SAME],
)
def test_ranks_train_as_one_process(ranks, workshop, engine, name, unscored):
    """With `unscored` one rank has no labels, but its parameters need a gradient too."""
    expected = of_one_process(workshop, name, unscored)
    for found in ranks.run(on_ranks, 2, workshop, name, engine, unscored):
        assert found.keys() == expected.keys()
        for key, exact in expected.items():
            assert floats_apart(found[key], exact) <= 1e-5 * max(float(exact.abs().max()), 1.0), key


@pytest.mark.parametrize(
    ("engine", "name", "why"),
    [
        ("FSDP2, the head apart", "DoRA", "only the module's own forward computes it, because its LoRA is a variant"),
        ("tensor parallel", "LoRA", "it has an adapter"),
        ("tensor parallel", "DoRA", "only the module's own forward computes it"),
    ],
)
def test_unsupported_sharded_heads_are_an_error_on_every_rank(ranks, workshop, engine, name, why):
    workshop.model(CASES[name].model)
    for message in ranks.run(on_ranks, 2, workshop, name, engine, False):
        assert why in message
        assert "Leave `lm_head` out of the adapter" in message


class Doubled(torch.nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def custom_head_on_ranks(group: dist.ProcessGroup) -> str:
    head = Doubled(8, 16, bias=False)
    fully_shard(head, mesh=DeviceMesh.from_group(group, "cpu"))
    with pytest.raises(NotImplementedError) as error:
        resolve_head(head)
    return str(error.value)


def test_a_sharded_head_of_another_class_is_an_error_that_names_no_adapter(ranks):
    for message in ranks.run(custom_head_on_ranks, 2):
        assert "because it is a `Doubled`. This combination is not supported. Use DDP or one process" in message
        assert "adapter" not in message
