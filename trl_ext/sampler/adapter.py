"""An adapter as vLLM loads it: its files, and which adapters vLLM cannot sample with."""

from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from safetensors.torch import save_file

# The fields of a `LoraConfig` that may have any value: vLLM computes them, or only PEFT needs them
_ANY_VALUE = {
    "r",
    "lora_alpha",
    "use_rslora",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "lora_dropout",
    "init_lora_weights",
    "fan_in_fan_out",
    "runtime_config",
    "task_type",
    "peft_type",
    "peft_version",
    "auto_mapping",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
}
_KEEP_THE_BASE = (True, False, "gaussian", "orthogonal")


def unsupported_adapter(model: Any, max_rank: int | None = None) -> str | None:
    """Return why vLLM cannot sample with the active adapter of `model`, or `None` if it can.

    Args:
        max_rank (`int`, *optional*): vLLM's `max_lora_rank`.
    """
    if not isinstance(model, PeftModel):
        return "the policy has no adapter"
    if len(model.active_adapters) != 1:
        return f"{len(model.active_adapters)} adapters are active, and vLLM samples with one"
    config = model.peft_config[model.active_adapters[0]]
    if type(config) is not LoraConfig:
        return f"vLLM does not support {type(config).__name__.removesuffix('Config')}"
    for field in fields(config):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        value = getattr(config, field.name)
        if field.name not in _ANY_VALUE and value != default:
            return f"vLLM does not support `{field.name}={value!r}`"
    if config.init_lora_weights not in _KEEP_THE_BASE:
        return (
            f"`init_lora_weights={config.init_lora_weights!r}` changes the base model, of which vLLM has another copy"
        )
    if max_rank is not None and config.r > max_rank:
        return f"vLLM was started with `--max-lora-rank {max_rank}`, and the adapter has `r={config.r}`"
    for name, param in model.named_parameters():
        if param.requires_grad and ".lora_A." not in name and ".lora_B." not in name:
            return f"`{name}` is trained too, and vLLM takes only matrices of linear layers"
    return None


def adapter_files(model: PeftModel, folder: Path) -> int:
    """Write the active adapter of `model` as PEFT's files into `folder`, and return the bytes of its weights."""
    name = model.active_adapters[0]
    tensors = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({key: on_host(x) for key, x in tensors.items()}, folder / "adapter_model.safetensors")
    model.peft_config[name].save_pretrained(str(folder))
    return sum(x.numel() * x.element_size() for x in tensors.values())


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy in host memory that shares no storage, as safetensors requires."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
