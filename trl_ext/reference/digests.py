"""A hash of a tensor: its dtype, shape and bytes."""

import hashlib

import torch
from torch import Tensor


def digest_of_tensor(tensor: Tensor) -> str:
    """Return a hash of dtype, shape and bytes."""
    tensor = tensor.detach()
    # SHA-256 is the fastest hash on processors with instructions for it
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    if hasattr(tensor, "__tensor_flatten__"):  # torchao: a tensor made of several
        inner, context = tensor.__tensor_flatten__()
        digest.update("".join([repr(context), *(digest_of_tensor(getattr(tensor, name)) for name in inner)]).encode())
    elif tensor.is_meta:
        raise ValueError(
            "The reference has a tensor on the meta device, so the store cannot identify it. Load the model's weights "
            'before you build the trainer, or set `reference_store="memory"`.'
        )
    else:
        # As bytes, because numpy lacks some dtypes
        digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
