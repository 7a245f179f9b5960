"""A trained head that FSDP2 shards, with or without tensor parallelism, gets the mean of its ranks' gradients."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from head_traffic import on_ranks
from trl_ext.heads.linear_log_probs import run_head
from trl_ext.heads.logits import LogitTransform
from trl_ext.scoring.head import LinearHead
from trl_ext.scoring.weight_layout import weight_layout_of

V, H, N = 22, 8, 6


def gradients(copies):
    """Return gradients of weight and bias with each rank's rows, with the whole weight, and the expected ones."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (copies, ranks // copies), mesh_dim_names=("dp", "tp"))
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(V, H, generator=generator), torch.randn(V, generator=generator)
    hidden = torch.randn(copies, N, H, generator=generator)
    targets = torch.randint(V, (copies, N), generator=generator)
    whole = [x.clone().requires_grad_() for x in (weight, bias)]
    logits = hidden.flatten(0, 1) @ whole[0].T + whole[1]
    torch.nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum").div(copies).backward()
    found = {"expected": [x.grad for x in whole]}

    head = nn.Linear(H, V)
    for name, x in (("weight", weight), ("bias", bias)):
        x = distribute_tensor(x, mesh["tp"], [Shard(0)]) if ranks > copies else x
        setattr(head, name, nn.Parameter(x))
    fully_shard(head, mesh=mesh["dp"])
    own = mesh.get_local_rank("dp")
    for name, gathered in (("rows here", False), ("gathered", True)):
        head.zero_grad()
        hidden_NH = hidden[own].clone().requires_grad_()
        rows = weight_layout_of(
            *(LinearHead(head), hidden_NH), outputs=("log_probs",), whole=gathered, entropy_grad=False
        )
        scored = run_head(
            *("tiled", hidden_NH, rows.weight, targets[own]),
            bias=rows.bias,
            transform=LogitTransform(),
            outputs=("log_probs",),
            readable=rows.readable,
            shard=rows.shard,
        )
        (-scored.log_probs.sum()).backward()
        found[name] = [x.grad.full_tensor() for x in (head.weight, head.bias)]
    return found


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_trained_head_gets_the_mean_of_the_ranks_gradients(ranks):
    """There are two copies of the model, each with its own tokens. On four ranks, two ranks split each copy."""
    for found in on_ranks(ranks, gradients, 2):
        for name in ("rows here", "gathered"):
            for grad, expected in zip(found[name], found["expected"], strict=True):
                torch.testing.assert_close(grad, expected, rtol=0, atol=1e-5, msg=name)
