"""LoRA on layers that are sharded or quantized."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from peft import PeftModel, PeftType
from peft.tuners.lora import LoraLayer
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from .tensor_parallel import TensorParallel, tensor_parallel_mesh

logger = logging.getLogger("trl_ext")


def keep_differentiable(model: nn.Module) -> None:
    """Keep bitsandbytes from converting 4-bit layers of `model` to its CPU inference format, which has no gradient.

    On a CPU with bf16 instructions, the first forward in evaluation mode would convert them permanently.
    """
    for module in model.modules():
        if "support_avx512bf16_for_cpu" in vars(module):
            vars(module)["support_avx512bf16_for_cpu"] = False


# Options that need a whole weight, of which each rank has only a part -> values that turn them off
_OPTIONS = {"use_dora": False, "modules_to_save": None, "target_parameters": None, "trainable_token_indices": None}


def check_adapter(config: Any, ranks: TensorParallel) -> None:
    """Check that PEFT can create an adapter on a model that is split over `ranks`.

    Raises:
        `ValueError`: it is not LoRA, an option needs whole weights, or FSDP2 also shards the model.
    """
    if ranks.copies > 1:
        raise ValueError(
            f"`distributed_config` splits the model over {ranks.size} ranks and shards it with FSDP2 over "
            f"{ranks.copies} such groups. With both, PEFT would create adapter matrices of the wrong shape. Train the "
            "adapter with tensor parallelism over all ranks, or with FSDP2 or DDP alone."
        )
    if config.peft_type != PeftType.LORA:
        raise ValueError(
            f"`peft_config` must be a `LoraConfig` under tensor parallelism, got a `{type(config).__name__}`, which "
            "PEFT cannot split. Use a `LoraConfig`, or train without tensor parallelism."
        )
    for name, default in _OPTIONS.items():
        value = getattr(config, name, default)
        if value:
            raise ValueError(
                f"`LoraConfig({name}={value!r})` does not work under tensor parallelism: PEFT needs the whole weight, "
                f"and each rank has only a part. Set `{name}={default!r}`, or train without tensor parallelism."
            )
    if config.init_lora_weights not in (True, False, "gaussian"):
        raise ValueError(
            f"`LoraConfig(init_lora_weights={config.init_lora_weights!r})` does not work under tensor parallelism: "
            "PEFT needs the whole weight, and each rank has only a part. Set `init_lora_weights` to True or "
            "'gaussian', or create the adapter in one process, save it and load it."
        )


def complete_adapters(model: nn.Module, ranks: TensorParallel) -> None:
    """Set `in_features` and `out_features` of a split model's LoRA layers to those of the whole layers.

    Transformers' row-wise split reads these; PEFT sets those of this rank's part.
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
            f"`target_modules` contains {sorted(kinds)}. Under tensor parallelism PEFT can only split adapters of "
            "linear layers that are split by columns or by rows. Gradients of other adapters would be wrong. Set "
            f"`target_modules={sorted(right - kinds)}`."
        )
    for layer in layers.values():
        for factor in _factors(layer):
            factor.out_features, factor.in_features = factor.weight.shape


def make_adapter(make: Callable[..., Any], model: Any, config: Any, *more: Any, **keywords: Any) -> Any:
    """Call `make(model, config, ...)`. Under tensor parallelism, initialize the adapter as a single process would.

    PEFT alone would draw each rank's part of a factor independently. Afterwards all ranks have the same random state.

    Raises:
        `ValueError`: no module has a name in `target_modules`.
    """
    ranks = TensorParallel.of(model)
    if ranks is None:
        linear = _linear_layers(model)
        _warn_of_unknown_modules(model, config)
        try:
            return make(model, config, *more, **keywords)
        except ValueError as error:
            targets = getattr(config, "target_modules", None)
            if "not found in the base model" not in str(error) or not targets:
                raise
            names = ", ".join(map(repr, [targets] if isinstance(targets, str) else sorted(targets)))
            raise ValueError(
                f"Unknown `target_modules` {names}. Choose from: {', '.join(map(repr, linear))}. These are the linear "
                "layers of the model. 'all-linear' means all of them except the LM head."
            ) from error
    check_adapter(config, ranks)
    ranks.share_random_state(next(model.parameters()).device)
    with torch.random.fork_rng(devices=[]):  # PEFT draws on the CPU
        adapted = make(model, config, *more, **keywords)
    for _, layer in _lora_layers(adapted):
        for name in layer.r:
            _draw_whole(layer, name, adapted.peft_config[name].init_lora_weights)
    for param in adapted.parameters():
        if param.requires_grad and not isinstance(param, DTensor):
            ranks.share_(param.data)
    return adapted


def _warn_of_unknown_modules(model: nn.Module, config: Any) -> None:
    """Warn of names in lists of modules that no module has: PEFT skips them if another name fits."""
    names = [name for name, _ in model.named_modules()]
    for option in ("target_modules", "modules_to_save"):
        targets = getattr(config, option, None)
        if not isinstance(targets, list | tuple | set):
            continue
        unknown = [x for x in sorted(targets) if not any(name == x or name.endswith(f".{x}") for name in names)]
        if unknown and (len(unknown) < len(targets) or option == "modules_to_save"):
            logger.warning(
                f"`{option}` of `peft_config` has {', '.join(map(repr, unknown))}, but the model has no module of this "
                "name, so the entry has no effect."
            )


def _linear_layers(model: nn.Module) -> list[str]:
    """Return the names of the linear layers, without what stands before the last dot."""
    linear = (
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"  # GPT-2's
    )
    return sorted(set(linear))


def _draw_whole(layer: Any, name: str, init: bool | str) -> None:
    """Draw the whole factors of an adapter in PEFT's order, and keep this rank's part of each one."""
    kinds = [getattr(layer, kind) for kind in ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")]
    factors = [(by_name, by_name[name]) for by_name in kinds if name in by_name]
    for by_name, factor in factors:
        if isinstance(factor, nn.Parameter):
            by_name[name] = nn.Parameter(torch.randn(factor.shape))
        elif isinstance(factor, nn.Linear):  # PEFT does not split a convolution
            rows, columns = factor.weight.shape
            by_name[name] = nn.Linear(columns, rows, bias=factor.bias is not None)
    layer.reset_lora_parameters(name, init)
    weight = layer.get_base_layer().weight
    for by_name, factor in factors:
        whole_factor = by_name[name]
        by_name[name] = factor
        for param, whole in zip(_params(factor), _params(whole_factor), strict=True):
            value = whole.detach().to(param.device)
            if weight.is_floating_point():  # PEFT rounds to the base layer's dtype
                value = value.to(weight.dtype)
            if isinstance(param, DTensor):
                value = distribute_tensor(value, param.device_mesh, param.placements)
            param.data.copy_(value)


def _params(factor: nn.Module | nn.Parameter) -> list[nn.Parameter]:
    return [factor] if isinstance(factor, nn.Parameter) else list(factor.parameters())


def _lora_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer))


def _factors(layer: Any) -> list[nn.Linear]:
    return [*layer.lora_A.values(), *layer.lora_B.values()]


def _is_split_with_its_base(layer: Any) -> bool:
    base = layer.get_base_layer()
    if any(tensor_parallel_mesh(param) is not None for param in base.parameters(recurse=False)):
        factors = _factors(layer)
        return bool(factors) and sum(isinstance(factor.weight, DTensor) for factor in factors) * 2 == len(factors)
    return getattr(base, "_hf_tp_plan", None) is None  # set on a layer of the plan, even if it is whole
