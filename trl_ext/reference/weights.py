"""The identity of a reference: a hash of the weights, settings, code and versions that determine its log-probs."""

import enum
import hashlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from peft import PeftMixedModel, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..packing.randomness import randomness_of_module
from ..version import __version__
from .code import code_of, states_of, without_origin
from .digests import digest_of_tensor
from .segments import write_file
from .versions import UnknownCodeError

_WORKERS = 4
_VERSIONS = ("torch", "transformers", "peft")

_NOT_IN_ADAPTER = {"base_model_name_or_path", "revision", "inference_mode", "auto_mapping"}

# The names that PEFT's wrappers give to the module that they wrap
_OF_WRAPPERS = {"base_layer", "original_module", "token_adapter"}

Gathered = Callable[[Tensor], AbstractContextManager[Any]]


class ReferenceWeights:
    """The part of `model` that a reference pass reads.

    Args:
        model (`PreTrainedModel` or `PeftModel`): before it is sharded.
        adapters (`tuple[str, ...]`):
            The adapters of a `PeftModel` that are on in the reference pass, in PEFT's order. Empty if all are off.
        states (`list`): which adapters are on and merged in each layer, if that is part of the reference.
    """

    def __init__(self, model: nn.Module, adapters: tuple[str, ...] = (), states: list[Any] | None = None) -> None:
        self.base: Any = base_of(model)
        self._is_adapted = self.base is not model
        self._is_compiled = self._is_adapted and hasattr(model, "_orig_mod")
        self.model: Any = uncompiled(model) if self._is_adapted else model
        self.adapters = adapters
        self._states = states or []
        # In a wrapper of a `PeftModel`, only this child belongs to the base model. In a plain model, an adapter of
        # transformers belongs to the model.
        self._wrappers = {
            name: child
            for name, module in self.base.named_modules()
            if self._is_adapted and (child := _base_child(module)) is not None
        }

    @classmethod
    def of_model(cls, model: nn.Module) -> "ReferenceWeights":
        """Return the weights of a separate reference model, with the adapters that are on in it now."""
        base = base_of(model)
        if base is model:
            return cls(model)
        from peft.utils.other import AuxiliaryTrainingWrapper  # private: a model without adapters does not need it

        wrapped: Any = uncompiled(model)
        layers: list[Any] = [x for x in base.modules() if isinstance(x, BaseTunerLayer | AuxiliaryTrainingWrapper)]
        names = [name for layer in layers if not layer.disable_adapters for name in layer.active_adapters]
        if isinstance(wrapped, PeftModel) and wrapped.active_peft_config.is_prompt_learning:
            names = [wrapped.active_adapter]
        on = tuple(name for name in dict.fromkeys(names) if name in wrapped.peft_config)
        # With all adapters off and none merged, the reference is the base model
        states = [(list(x.active_adapters), x.disable_adapters, list(x.merged_adapters)) for x in layers]
        is_plain = not on and not any(merged for _, _, merged in states)
        return cls(model, on, [] if is_plain else states)

    def describe(self) -> str:
        """Return which adapters are on in a separate reference model, for the plan."""
        if not self._is_adapted:
            return ""
        names = " and ".join(f'"{name}"' for name in self.adapters)
        return f", with the adapter{'s' * (len(self.adapters) > 1)} {names}" if names else ", with its adapters off"

    @property
    def config(self) -> dict[str, Any]:
        """The settings of model and adapters that can change a logit."""
        settings = {
            "attention": getattr(self.base.config, "_attn_implementation", None),
            "experts": getattr(self.base.config, "_experts_implementation", None),
            "kernels": getattr(self.base, "use_kernels", False),
            "code": code_of(self.base),
        }
        layers: list[Any] = [module for module in self.model.modules() if isinstance(module, BaseTunerLayer)]
        on = self.adapters
        if self._states:
            settings["states"] = self._states
        if self._is_compiled:
            settings["compiled"] = True
        if layers and not self._is_adapted:
            on = tuple(self.model.peft_config)
            settings["layers"] = [(x.active_adapters, x.disable_adapters, x.merged_adapters) for x in layers]
        # In order, because PEFT runs the first adapter's copy of a module in `modules_to_save`
        settings["adapters"] = [(name, adapter_settings(self.model.peft_config[name].to_dict())) for name in on]
        # A layer's scaling may differ from the configuration's
        scalings = [x.scaling for x in layers if isinstance(getattr(x, "scaling", None), dict)]
        settings["scaling"] = [[scaling.get(name) for name in on] for scaling in scalings] if on else []
        return {"model": without_origin(self.base.config.to_dict()), **settings}

    def trained_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield name and parameter of each tensor that training changes and the reference reads."""
        return ((name, p) for name, p in self.base.named_parameters() if p.requires_grad and self._reads(name))

    def shares_with(self, policy: nn.Module, trained: bool = True) -> str | None:
        """Return the name of a tensor that shares memory with a parameter of `policy` (a trained one, if `trained`)."""
        policy_places = {place for p in policy.parameters() if p.requires_grad or not trained for place in _places(p)}
        return next(
            (name for name, p in self.base.named_parameters() if not policy_places.isdisjoint(_places(p))), None
        )

    def uncacheable_reason(self) -> str | None:
        """Return why this reference cannot be identified, or None."""
        away = next((name for name, tensor in self.tensors() if tensor.is_meta), None)
        if away:
            return f"`{away}` is on the meta device, so the reference's weights cannot be hashed"
        try:
            self._states_in_memory()
        except UnknownCodeError as error:
            return f"{error}, so a later run cannot compare the reference"
        return None

    @property
    def dtypes(self) -> set[torch.dtype]:
        return {param.dtype for name, param in self.base.named_parameters() if self._reads(name)}

    def rope_of_batch(self) -> str | None:
        """Return the `rope_type` if positions depend on the longest sequence of a batch, otherwise None."""
        config = self.base.config.get_text_config()
        for name in ("rope_parameters", "rope_scaling"):
            parameters = vars(config).get(name) or {}
            for part in (parameters, *parameters.values()):
                kind = (part.get("rope_type") or part.get("type")) if isinstance(part, dict) else None
                if kind is not None and (kind in ("longrope", "su") or "dynamic" in kind):
                    return str(kind)
        return None

    def randomness(self, in_training: bool = True) -> str | None:
        """Return what makes two passes in training (not `in_training`: in the current mode) differ, or None."""
        for name, module in self.base.named_modules():
            randomness = randomness_of_module(name, module) if self._reads(name) else None
            if randomness is not None and (in_training or module.training or not randomness.in_training_only):
                return f"{randomness.reason} (`{name}`)" if randomness.of_tokens else randomness.reason
        return None

    def hash(self, gathered: Gathered, is_hashed: bool = True) -> str:
        """Return a hash of all saved tensors that does not depend on sharding or on adapters that are off.

        If tensors are sharded, every rank must call it. `gathered(parameter)` gathers a parameter that ZeRO-3
        partitions. Unless `is_hashed`, this rank only takes part in gathering.
        """
        return _hash(list(self.tensors()), gathered, is_hashed)

    def in_memory(self, gathered: Gathered, is_hashed: bool = True) -> dict[str, str]:
        """Return hashes of state that is in no checkpoint or configuration: buffers, and [`states_of`] the modules."""
        buffers = _hash(list(self.tensors(saved=False)), gathered, is_hashed)
        return {"buffers": buffers, "modules": identity_of(self._states_in_memory()) if is_hashed else ""}

    def _states_in_memory(self) -> dict[str, Any]:
        tensors = *self.base.named_parameters(), *self.base.named_buffers()
        tensor_names = {id(tensor): f"tensor {_without_wrappers(name)}" for name, tensor in tensors}
        modules: dict[str, nn.Module] = {}
        wrappers: dict[str, nn.Module] = {}
        for name, module in self.base.named_modules():
            # PEFT's wrappers run in each pass too, and may have hooks
            if self._reads(name):
                (wrappers if name in self._wrappers else modules)[_without_wrappers(name)] = module
        of_base = {*self.base.modules()}
        wrappers |= {f"wrapper {name}": x for name, x in self.model.named_modules() if x not in of_base}
        return states_of(self.base.config, modules, wrappers, tensor_names)

    def tensors(self, saved: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Yield name and tensor of each part of the reference: of a checkpoint, or what no checkpoint has."""
        for prefix, part in [("", self.base), *(("prompt_encoder.", encoder) for encoder in self._encoders())]:
            # `keep_vars`, because ZeRO-3's attributes are on the parameter
            tensors = part.state_dict(keep_vars=True)
            if not saved:
                buffers = part.named_buffers(remove_duplicate=False)
                tensors = {name: buffer for name, buffer in buffers if name not in tensors}
            for name, value in tensors.items():
                if isinstance(value, Tensor) and self._reads(name):
                    yield prefix + _without_wrappers(name), value

    def parameters_of_adapters(self) -> Iterator[nn.Parameter]:
        """Yield each parameter of the adapters that are on, trained or frozen."""
        yield from (p for name, p in self.base.named_parameters() if self._beside_base(name) and self._reads(name))
        for encoder in self._encoders():
            yield from encoder.parameters()

    def _encoders(self) -> Iterator[nn.Module]:
        """Yield the prompt encoders of adapters with virtual tokens."""
        encoders = getattr(self.model, "prompt_encoder", {})
        return (encoders[name] for name in self.adapters if name in encoders)

    def _reads(self, name: str) -> bool:
        """Whether the tensor or module `name` is part of the base or of an adapter that is on."""
        beside = self._beside_base(name)
        return not beside or not beside.isdisjoint(self.adapters)

    def _beside_base(self, name: str) -> set[str]:
        """Return the segments of `name` below a wrapper of PEFT; an empty set if it is part of the base model."""
        segments = name.split(".")
        for i in range(len(segments)):
            child = self._wrappers.get(".".join(segments[:i]))
            if child is not None and segments[i] != child:
                return set(segments[i:])
        return set()


def uncompiled(model: Any) -> Any:
    """Return the model that `torch.compile` wraps, or `model`."""
    return getattr(model, "_orig_mod", model)


def base_of(model: Any) -> Any:
    """Return the model that PEFT wraps, or `model`."""
    inner = uncompiled(model)
    if isinstance(inner, PeftModel):
        return inner.get_base_model()
    return inner.base_model.model if isinstance(inner, PeftMixedModel) else model


def _without_wrappers(name: str) -> str:
    return ".".join(x for x in name.split(".") if x not in _OF_WRAPPERS)


def _places(param: Tensor) -> set[tuple[str, int]]:
    """Return the object and the memory of a parameter. Parameters that share either are the same."""
    places = {("object", id(param))}
    with suppress(RuntimeError, NotImplementedError):  # a tensor made of several others has no storage
        places.add(("memory", param.untyped_storage().data_ptr()))
    return places - {("memory", 0)}


def adapter_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return an adapter's configuration without settings that do not change its logits, such as its base's name."""
    return {key: value for key, value in config.items() if key not in _NOT_IN_ADAPTER}


def _base_child(module: nn.Module) -> str | None:
    if isinstance(module, BaseTunerLayer):
        return "base_layer"
    return next((name for name in ("token_adapter", "original_module") if name in module._modules), None)


def _hash(named_tensors: list[tuple[str, Tensor]], gathered: Gathered, is_hashed: bool) -> str:
    """Return a hash of tensors and their names that does not depend on their order."""
    with ThreadPoolExecutor(_WORKERS) as pool:
        digests: dict[int, str | Future[str]] = {}
        for _, tensor in named_tensors:
            if id(tensor) in digests:  # tied
                continue
            if isinstance(tensor, DTensor):
                whole = tensor.full_tensor()
                digests[id(tensor)] = digest_of_tensor(whole) if is_hashed else ""
            elif hasattr(tensor, "ds_status"):
                with gathered(tensor):
                    digests[id(tensor)] = digest_of_tensor(tensor) if is_hashed else ""
            elif is_hashed:
                digests[id(tensor)] = pool.submit(digest_of_tensor, tensor)
        hexdigests = {key: value if isinstance(value, str) else value.result() for key, value in digests.items()}
    lines = sorted(f"{name} {hexdigests.get(id(tensor), '')}" for name, tensor in named_tensors)
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


def identity_facts(
    weights_hash: str, config: dict[str, Any], in_memory: dict[str, str], **computed_with: Any
) -> dict[str, Any]:
    """Return the known facts that determine the reference's log-probs of a sequence.

    The first three arguments come from `ReferenceWeights`. `computed_with` has head, mixed precision, device, kernels.
    """
    versions = {**{name: version(name) for name in _VERSIONS}, "trl_ext": __version__}
    return {
        "weights": weights_hash,
        "config": config,
        "in_memory": in_memory,
        "computed_with": computed_with,
        "versions": versions,
    }


def identity_of(facts: dict[str, Any]) -> str:
    """Return 32 hexadecimal digits that identify the reference."""
    return hashlib.blake2b(as_json(facts).encode(), digest_size=16).hexdigest()


def write_about(folder: Path, facts: dict[str, Any]) -> None:
    """Write `about.json`, which describes the folder's reference to people. No program reads it."""
    with suppress(OSError):
        if not (folder / "about.json").exists():
            write_file(folder / "about.json", as_json(facts).encode())


def as_json(facts: dict[str, Any]) -> str:
    """Return the same text for equal facts in any order."""

    def plain(value: Any) -> Any:
        if isinstance(value, (set, frozenset)):
            return sorted(value, key=str)
        return value.value if isinstance(value, enum.Enum) else str(value)

    def with_string_keys(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(key): with_string_keys(item) for key, item in value.items()}
        return [with_string_keys(item) for item in value] if isinstance(value, (list, tuple)) else value

    return json.dumps(with_string_keys(facts), default=plain, sort_keys=True, indent=1)
