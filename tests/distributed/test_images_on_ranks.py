"""Batches with images on two ranks: sharded, and where only one of the ranks has images in a step."""

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from image_models import Picture, image_batch, image_model, prompt_of
from trl_ext.scoring.forward import ScoringOptions, attach_scoring_forward

FIRST, SECOND = Picture(1), Picture(2, (4, 8))
PROMPTS = {
    "two images": [prompt_of([4, FIRST, 3], 0), prompt_of([3, SECOND, FIRST, 2], 1)],
    "one image": [prompt_of([2, SECOND, 6], 2)],
    "text": [prompt_of([9], 3)],
}


def gradients(name: str, wrapped: Any = None, *, packed: bool = True) -> tuple[dict[str, torch.Tensor], int]:
    """Return the gradients of a pass over the batch `name`, and the tokens that it processed."""
    model = image_model("qwen3_vl")
    scoring = attach_scoring_forward(model, ScoringOptions(padding_free=packed))
    call = model if wrapped is None else wrapped(model)
    out = call(**image_batch(model.config, PROMPTS[name]), fused_lm_head=True)
    out.log_probs.sum().backward()
    grads = {key: x.grad for key, x in model.named_parameters() if x.grad is not None}
    full = {key: x.full_tensor() if isinstance(x, DTensor) else x for key, x in grads.items()}
    return full, scoring.take_counts().with_gradient


def on_rank(group: Any, kind: str, names: list[str]) -> tuple[dict[str, torch.Tensor], int]:
    def shard(model: Any) -> Any:
        mesh = DeviceMesh.from_group(group, "cpu")
        for block in (*model.model.visual.blocks, *model.model.language_model.layers):
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def replicate(model: Any) -> Any:
        return DistributedDataParallel(model, process_group=group, find_unused_parameters=True)

    return gradients(names[group.rank()], shard if kind == "FSDP2" else replicate)


@pytest.mark.parametrize(
    ("kind", "names"),
    [("FSDP2", ["two images", "one image"]), ("DDP", ["two images", "text"]), ("DDP", ["text", "one image"])],
)
def test_ranks_with_other_images_get_the_gradients_of_padded_batches(ranks: Any, kind: str, names: list[str]) -> None:
    padded = [gradients(name, packed=False) for name in names]
    for grads, tokens in ranks.run(on_rank, 2, kind, names):
        assert tokens < max(count for _, count in padded)
        for key, gradient in grads.items():
            parts = [of_rank.get(key, torch.zeros_like(gradient)) for of_rank, _ in padded]
            expected = sum(parts) / len(parts)
            assert (gradient - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max())), key
