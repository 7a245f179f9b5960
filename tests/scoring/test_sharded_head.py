"""A head with a sharded weight gathers it for the product, on two real gloo processes."""

import contextlib

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from model_families import batch, build
from trl_ext.heads.linear_log_probs import run_head
from trl_ext.heads.logits import LogitTransform
from trl_ext.scoring.forward import ScoringOptions, attach_scoring_forward


def scored(model):
    attach_scoring_forward(model, ScoringOptions(outputs=("log_probs", "entropy")))
    inputs, labels = batch()
    out = model(**inputs, labels=labels, fused_lm_head=True)
    (out.log_probs * torch.arange(1, labels.shape[1])).sum().backward()
    return out, {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def on_each_rank(rank, address):
    dist.init_process_group("gloo", init_method=f"file://{address}", rank=rank, world_size=2)
    try:
        whole, sharded = build("head_bias"), build("head_bias")
        mesh = init_device_mesh("cpu", (2,))
        for model in (whole, sharded):
            model.lm_head.requires_grad_(False)
        for name in ("weight", "bias"):
            tensor = distribute_tensor(getattr(sharded.lm_head, name).data, mesh, [Shard(0)])
            setattr(sharded.lm_head, name, torch.nn.Parameter(tensor, requires_grad=False))
        assert isinstance(sharded.lm_head.weight, DTensor)
        assert sharded.lm_head.weight.to_local().shape[0] < sharded.lm_head.weight.shape[0] == 97
        (a, grads_a), (b, grads_b) = scored(whole), scored(sharded)
        torch.testing.assert_close(a.log_probs, b.log_probs, rtol=0, atol=1e-6)
        torch.testing.assert_close(a.entropy, b.entropy, rtol=0, atol=1e-6)
        assert grads_a.keys() == grads_b.keys()
        for name, grad in grads_a.items():
            torch.testing.assert_close(grad, grads_b[name], rtol=0, atol=1e-5 * float(grad.abs().max()))
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_a_dtensor_head_scores_like_a_whole_one(tmp_path):
    mp.spawn(on_each_rank, args=(tmp_path / "rendezvous",), nprocs=2)


@pytest.mark.parametrize("head", ["tiled", "dense"])
def test_a_weight_that_is_gathered_only_while_it_is_read(head):
    """As under ZeRO-3, the weight is gathered in the forward, released, and gathered again in the backward."""
    torch.manual_seed(0)
    whole, weight = torch.randn(101, 8), torch.nn.Parameter(torch.empty(0, 8), requires_grad=False)
    entered = []

    @contextlib.contextmanager
    def gathered():
        entered.append(1)
        weight.data = whole
        yield
        weight.data = torch.empty(0, 8)

    hidden, targets = torch.randn(6, 8), torch.randint(101, (6,))
    options = {"bias": None, "transform": LogitTransform(), "outputs": ("log_probs", "entropy")}
    gradients = []
    for readable, given in ((contextlib.nullcontext, whole), (gathered, weight)):
        h = hidden.clone().requires_grad_()
        out = run_head(head, h, given, targets, entropy_requires_grad=True, readable=readable, **options)
        assert weight.numel() == 0
        (out.log_probs + out.entropy.square()).sum().backward()
        gradients.append(h.grad)
    assert torch.equal(*gradients)
    assert len(entered) == 2
