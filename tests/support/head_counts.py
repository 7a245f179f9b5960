"""Kernel launches and bytes of the head at GPU sizes, counted on the pretended GPU with tensors without data.

python tests/support/head_counts.py   # on the pretended GPU; JSON to stdout

The bytes are those that each kernel reads and writes, as if nothing stayed in a cache between kernels. A gather counts
what it returns as read. Triton kernels do not run: each counts as reading the product and writing the coefficients.

The milliseconds are an estimate for an H100, not a measurement.
"""

import json
import os
import sys
from typing import Any

N, H, V = 8192, 4096, 131072
USES = {"forward": (False, False), "frozen": (True, False), "trained": (True, True)}
PRODUCTS = {"forward": 1, "frozen": 2, "trained": 4}
_FLOPS, _BYTES, _LAUNCH = 798e12, 0.8 * 3.0e12, 2e-6  # an H100's products a second, bytes a second, seconds a launch
_GATHERS = {"index", "index_select", "gather", "embedding"}


def milliseconds(use: str, counts: dict[str, int]) -> float:
    """Estimate the time: products, then what the other kernels move, then the launches, with no overlap."""
    products = PRODUCTS[use] * 2 * N * H * V / _FLOPS
    return 1e3 * (products + (counts["bytes"] - counts["bytes_of_products"]) / _BYTES + counts["launches"] * _LAUNCH)


def main() -> None:
    import torch
    from torch import Tensor
    from torch.utils._pytree import tree_leaves

    import pretended_gpu
    from trl_ext.heads.kernels import triton_work
    from trl_ext.heads.linear_log_probs import linear_log_probs

    pretended_gpu.start()
    counted = {"launches": 0, "bytes": 0, "bytes_of_products": 0}

    class Kernel:
        def __getitem__(self, grid: Any) -> Any:
            def launch(product: Tensor, *args: Any, **kwargs: Any) -> None:
                tiles = [x for x in (product, *args) if isinstance(x, Tensor) and x.shape == product.shape]
                counted["launches"] += 1
                counted["bytes"] += sum(x.nbytes for x in tiles)

            return launch

    run = pretended_gpu._run

    def counting(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        result = run(func, args, kwargs)
        name = func._schema.name.split("::")[1]
        if name in pretended_gpu._VIEWS or func is torch.ops.prim.device.default:
            return result
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        if not any(isinstance(x, pretended_gpu.Pretended) for x in (*inputs, *outputs)):
            return result
        out = kwargs.get("out")
        if name == "addmm":
            inputs = list(args[:3]) if kwargs.get("beta", 1) else list(args[1:3])
        elif out is not None or name in ("fill_", "zero_"):
            inputs = [x for x in inputs if x is not out and name not in ("fill_", "zero_")]
        elif name in ("zeros_like", "full_like", "new_zeros"):
            inputs = []
        elif name == "copy_":
            inputs = [args[1]]
        elif name in _GATHERS:
            inputs = outputs
        moved = sum(x.nbytes for x in (*inputs, *outputs))
        counted["launches"] += 1
        counted["bytes"] += moved
        counted["bytes_of_products"] += moved if name == "addmm" else 0
        return result

    found = {}
    with pretended_gpu.DeviceMode():
        # With numbers once, because the first call checks kernels and products
        few = torch.ones(8, 8, dtype=torch.bfloat16, device="cuda")
        linear_log_probs(few, few, torch.zeros(8, dtype=torch.long, device="cuda"), kernels="triton")
        pretended_gpu.HELD_ON, pretended_gpu._run = torch.device("meta"), counting
        triton_work.triton_kernels = type("Kernels", (), {x: Kernel() for x in ("fold", "finish", "gradient")})
        for use, (of_hidden, of_weight) in USES.items():
            shapes = {"dtype": torch.bfloat16, "device": "cuda"}
            hidden, weight = torch.empty(N, H, **shapes), torch.empty(V, H, **shapes)  # type: ignore[call-overload]
            targets = torch.empty(N, dtype=torch.long, device="cuda")
            hidden.requires_grad_(of_hidden)
            weight.requires_grad_(of_weight)
            counted.update(dict.fromkeys(counted, 0))
            with torch.set_grad_enabled(of_hidden):
                log_probs = linear_log_probs(
                    hidden, weight, targets, outputs=("log_probs",), kernels="triton"
                ).log_probs
            if of_hidden:
                torch.autograd.grad(
                    log_probs, [x for x in (hidden, weight) if x.requires_grad], torch.empty_like(log_probs)
                )
            found[use] = {**counted, "milliseconds": milliseconds(use, counted)}
    print(json.dumps(found), file=sys.__stdout__, flush=True)
    # Autograd's thread may still free tensors, which needs the interpreter and aborts while the interpreter shuts down
    os._exit(0)


if __name__ == "__main__":
    main()
