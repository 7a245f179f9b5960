"""LoRA on a model that tensor parallelism splits: refused where it would train wrong, completed where PEFT stops."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from peft import PeftModel, PeftType
from peft.tuners.lora import LoraLayer
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from .tensor_parallel import TensorParallel, tensor_parallel_mesh

# Options that read or copy a layer's whole weight, of which a rank has a part, and what leaves them out
_OPTIONS = {
    "use_dora": False,
    "modules_to_save": None,
    "target_parameters": None,
    "trainable_token_indices": None,
}
_DRAWN = (True, False, "gaussian")


def check_adapter(config: Any, ranks: TensorParallel) -> None:
    """Refuse an adapter that cannot be put on a model that `ranks` hold, before PEFT meets it.

    Raises:
        `ValueError`: it is not LoRA, or an option of it needs whole weights, or FSDP2 has sharded the parts.
    """
    if ranks.copies > 1:
        raise ValueError(
            f"The model is split over {ranks.size} ranks and sharded by FSDP2 over {ranks.copies} such groups "
            "(`DistributedConfig`), and PEFT takes the width of an adapter from what one rank holds then. Train the "
            "adapter with tensor parallelism over all ranks, or with FSDP2 or DDP alone."
        )
    if config.peft_type != PeftType.LORA:
        raise ValueError(
            f"`peft_config` is a `{type(config).__name__}`, and under tensor parallelism PEFT splits LoRA alone. Use a "
            "`LoraConfig`, or train without tensor parallelism."
        )
    for name, default in _OPTIONS.items():
        value = getattr(config, name, default)
        if value != default and value:
            raise ValueError(
                f"`LoraConfig({name}={value!r})` under tensor parallelism: PEFT would take the part of a weight that a "
                f"rank holds for the whole. Set `{name}={default!r}`, or train without tensor parallelism."
            )
    if config.init_lora_weights not in _DRAWN:
        raise ValueError(
            f"`LoraConfig(init_lora_weights={config.init_lora_weights!r})` under tensor parallelism: PEFT would form "
            "the adapter from the part of a weight that a rank holds. Set it to `True` or `'gaussian'`, or save the "
            "adapter from one process and load it."
        )


def complete_adapters(model: nn.Module, ranks: TensorParallel) -> None:
    """Make PEFT's LoRA layers on a split model right; a model without any is left as it is.

    PEFT gives a split factor the width of its part, and transformers' row-wise style reads the whole from it.

    Raises:
        `ValueError`: an adapter is on a layer that PEFT has not split with the model.
    """
    if not isinstance(model, PeftModel):
        return
    for config in model.peft_config.values():
        check_adapter(config, ranks)
    layers = dict(_lora_layers(model))
    unsplit = {name for name, layer in layers.items() if not _is_split_with_its_base(layer)}
    if unsplit:
        kinds, right = ({name.rpartition(".")[2] for name in names} for names in (unsplit, layers.keys() - unsplit))
        raise ValueError(
            f"`target_modules` of the LoRA adapter has {sorted(kinds)} in it, and under tensor parallelism PEFT splits "
            "adapters of linear layers that are split by columns or by rows without more, and no others; there the "
            f"gradients would be wrong. Leave them out: `target_modules={sorted(right - kinds)}`."
        )
    for layer in layers.values():
        for factor in _factors(layer):
            factor.out_features, factor.in_features = factor.weight.shape


def draw_adapters(model: Any, ranks: TensorParallel) -> None:
    """Random starting values of adapters that PEFT has just made: as of one process, where each rank drew its part.

    PEFT draws every part with the same seed, and the part of a row-wise layer for a layer as narrow as that part.
    """
    for _, layer in _lora_layers(model):
        for name, factor in layer.lora_A.items():
            weight = factor.weight
            if isinstance(weight, DTensor):
                whole = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
                if model.peft_config[name].init_lora_weights == "gaussian":
                    nn.init.normal_(whole, std=1 / layer.r[name])
                else:
                    nn.init.kaiming_uniform_(whole, a=math.sqrt(5))
                with torch.no_grad():
                    weight.copy_(distribute_tensor(whole, weight.device_mesh, weight.placements))
    for param in model.parameters():
        if param.requires_grad and not isinstance(param, DTensor):
            ranks.share_(param.data)


def _lora_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer))


def _factors(layer: Any) -> list[nn.Linear]:
    return [*layer.lora_A.values(), *layer.lora_B.values()]


def _is_split_with_its_base(layer: Any) -> bool:
    base = layer.get_base_layer()
    if any(tensor_parallel_mesh(param) is not None for param in base.parameters(recurse=False)):
        factors = _factors(layer)
        return bool(factors) and sum(isinstance(factor.weight, DTensor) for factor in factors) * 2 == len(factors)
    return getattr(base, "_hf_tp_plan", None) is None  # PEFT's note of a layer that is whole and still in the plan
