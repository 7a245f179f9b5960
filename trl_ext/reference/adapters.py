"""The reference of a PEFT policy: another adapter, the base model, or a copy of the trained parameters."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from peft import LoraConfig, PeftModel
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from .weights import ReferenceWeights, adapter_settings

FILE = "reference_weights.safetensors"

# Attributes that PEFT sets on a prompt-learning model while its adapter is off, and does not remove
_LEFT_BY_PEFT = {"forward", "prepare_inputs_for_generation"}

Source = Literal["trl", "named", "initial", "base"]


class AdapterChoice:
    """Activates the adapter to train and chooses the reference, before TRL's `__init__`.

    Args:
        fresh (`PeftConfig`, *optional*): TRL's `peft_config`.
        options (`Any`): has `policy_adapter_name`, and `ref_adapter_name` if the trainer has a reference.

    Attributes:
        trl_may_copy (`bool`): whether TRL may copy the adapter "default" as the reference.

    Raises:
        `ValueError`: the options name no adapter of `policy`, or contradict each other or `ref_model`.
    """

    def __init__(self, policy: Any, fresh: Any, options: Any, ref_model: Any, args: Any) -> None:
        self.fresh = fresh
        self._ref_name = getattr(options, "ref_adapter_name", None)
        loaded = isinstance(policy, PeftModel)
        moves = getattr(args, "sync_ref_model", False)
        if (loaded or fresh is not None) and ref_model is not None and moves:
            raise ValueError(
                "`sync_ref_model=True` with an adapter updates a copy of that adapter, so it cannot be used with "
                "`ref_model`. Remove `ref_model`, or set `sync_ref_model=False`."
            )
        names = {"policy_adapter_name": options.policy_adapter_name, "ref_adapter_name": self._ref_name}
        names = {field: name for field, name in names.items() if name is not None}
        for field, name in names.items():
            if not loaded or fresh is not None:
                model = f"`{type(policy).__name__}`" if fresh is None else "a fresh adapter (`peft_config`)"
                raise ValueError(
                    f"`{field}={name!r}` needs a `PeftModel` with that adapter, got {model}. Pass the `PeftModel` as "
                    f"`model`, or leave `{field}` unset."
                )
            if name not in policy.peft_config:
                raise ValueError(
                    f"Unknown `{field}` {name!r}. Choose from: {sorted(policy.peft_config)}, or load that "
                    'adapter first with `model.load_adapter(path, "name")`.'
                )
        if "policy_adapter_name" in names:
            _train_adapter(policy, options.policy_adapter_name)
        if self._ref_name is not None:
            if ref_model is not None:
                raise ValueError(
                    f"`ref_adapter_name={self._ref_name!r}` and `ref_model` both name a reference. Remove one."
                )
            if policy.active_adapter == self._ref_name:
                raise ValueError(
                    f"`ref_adapter_name={self._ref_name!r}` is the active adapter, which would be trained. "
                    "Set `policy_adapter_name` to the adapter to train."
                )
            _set_trained(policy, self._ref_name, False)
        self.trl_may_copy = not loaded or fresh is not None
        if not self.trl_may_copy and not names and not moves and "default" in policy.peft_config:
            self.trl_may_copy = _trl_copies_whole(policy)

    def reference(self, policy: Any, moves: bool) -> "PolicyReference":
        """Return the reference for `policy`, which TRL has built. `moves`: whether training updates the reference."""
        if moves:
            reference = PolicyReference(policy, "initial", moves=True)
            if self.fresh is not None:
                reference.begin_as_base(self.fresh)
            elif self._ref_name is not None:
                reference.begin_as(self._ref_name)
            return reference
        if self._ref_name is not None:
            return PolicyReference(policy, "named", self._ref_name)
        if not self.trl_may_copy or _begins_with_base_weights(self.fresh):
            return PolicyReference(policy, "initial")
        reference = PolicyReference(policy, "trl")
        if self.fresh is None:
            _set_trained(policy, "ref", False)
        return reference

    def base(self, policy: Any) -> "PolicyReference":
        """Return the base model of `policy`, which TRL has built, as a reference.

        Raises:
            `ValueError`: an adapter has taken weights out of the base model.
        """
        base_adapter = next((x for x in policy.peft_config.values() if _begins_with_base_weights(x)), None)
        if self.fresh is None and base_adapter is not None:
            raise ValueError(
                "The base model is the teacher, but an adapter with "
                f"`init_lora_weights={base_adapter.init_lora_weights!r}` has changed its weights. Pass the model from "
                "before as `teacher_model`."
            )
        return PolicyReference(policy, "initial" if _begins_with_base_weights(self.fresh) else "base")


class PolicyReference:
    """A reference that the policy model computes, with other adapters or other values of its parameters.

    Training changes some parameters that the reference reads. During a reference pass, *copies* of their values before
    training replace the policy's values. They are written in-place, because DDP, FSDP2, ZeRO-1, ZeRO-2 and the
    optimizer hold the parameters.

    Args:
        policy (`PeftModel`): before training, with `requires_grad` set.
        source (`str`):
            `"trl"`: the adapter "ref" if there is one, otherwise no adapter. `"named"`: the adapter `adapter`.
            `"initial"`: the policy's adapter with its current values. `"base"`: no adapter.
        adapter (`str`, *optional*): for `"named"`.
        moves (`bool`): whether training updates the copies towards the policy (`sync_ref_model`).

    Attributes:
        copies (`dict[str, Tensor]`): the reference's values for parameters of the policy, by parameter name.
    """

    def __init__(self, policy: PeftModel, source: Source, adapter: str | None = None, moves: bool = False) -> None:
        self.policy: Any = policy
        self.moves = moves
        self._source = source
        self._adapter = adapter
        self.copies: dict[str, Tensor] = {}
        self.copy_trained()

    @property
    def adapters(self) -> tuple[str, ...]:
        """The adapters that are on in a reference pass. For a copy, these are the policy's."""
        if self._source == "initial":
            return tuple(_active_adapters(self.policy))
        if self._source == "named":
            return (str(self._adapter),)
        return ("ref",) if self._source == "trl" and "ref" in self.policy.peft_config else ()

    def describe(self) -> str:
        """Return a description of the reference, for the plan."""
        names = " and ".join(f'"{name}"' for name in self.adapters)
        if self._source == "initial":
            adapters = f"the adapters {names}" if len(self.adapters) > 1 else f"the adapter {names}"
            return f"a copy of {adapters}" if self.moves else f"a copy of {adapters} from before training"
        description = f"the frozen adapter {names}" if names else "the base model, with the adapter off"
        if self.copies:
            first = next(iter(self.copies))
            more = f" and {len(self.copies) - 1} more" if len(self.copies) > 1 else ""
            description += f", with a copy of the parameters trained outside of the adapter (`{first}`{more})"
        return description

    def copy_trained(self) -> None:
        """Copy each parameter that the reference reads and training changes, unless it has a copy."""
        read: Iterable[nn.Parameter] = self.policy.parameters()
        if self._source != "initial":
            read = (param for _, param in ReferenceWeights(self.policy, self.adapters).trained_parameters())
        ids = {id(param) for param in read}
        for name, param in self.policy.named_parameters():
            if param.requires_grad and id(param) in ids and name not in self.copies:
                self.copies[name] = param.detach().clone()

    def begin_as_base(self, fresh: Any) -> None:
        """Make the copies of a `fresh` adapter add nothing to the base model; `ValueError` if that is impossible."""
        begins = "With `sync_ref_model=True` and `peft_config`, the reference starts as the base model"
        if fresh.is_prompt_learning:
            raise ValueError(
                f"{begins}, but a {fresh.peft_type.value} adapter always changes its outputs. Train the adapter "
                "first, load it, and pass the `PeftModel`: then the reference starts as that adapter."
            )
        if not any(getattr(fresh, name) is False for name in vars(fresh) if name.startswith("init_")):
            return  # it adds nothing yet, or it subtracts from the base what it adds, as PiSSA does
        if not isinstance(fresh, LoraConfig) or fresh.use_dora:
            raise ValueError(
                f"{begins}, but this {type(fresh).__name__} initializes its adapter at random. Use the default "
                "initialization, or pass a `PeftModel` with this adapter: then the reference starts as that adapter."
            )
        for name, copy in self.copies.items():
            if not {"lora_B", "lora_embedding_B"}.isdisjoint(name.split(".")):
                copy.zero_()

    def begin_as(self, adapter: str) -> None:
        """Set the copies of the policy's adapter to the values of another adapter with the same configuration."""
        policy_adapter = str(self.policy.active_adapter)
        policy_settings, reference_settings = (
            adapter_settings(self.policy.peft_config[name].to_dict()) for name in (policy_adapter, adapter)
        )
        params = dict(self.policy.named_parameters())
        ids = {id(param) for param in _parameters_of(self.policy, policy_adapter)}
        names = [name for name in self.copies if id(params[name]) in ids]
        sources = {name: params.get(_renamed(name, policy_adapter, adapter)) for name in names}
        unlike = [name for name, param in sources.items() if param is None or param.shape != self.copies[name].shape]
        if policy_settings != reference_settings or unlike:
            raise ValueError(
                f'`sync_ref_model=True` needs equal configurations of the adapters "{policy_adapter}" and "{adapter}" '
                f"(`ref_adapter_name`), but they differ{f' (`{unlike[0]}`)' if unlike else ''}. Use equal "
                "configurations, or remove `ref_adapter_name`: then the reference starts as the policy's adapter."
            )
        for name, param in sources.items():
            self.copies[name].copy_(param.detach())  # type: ignore[union-attr]

    def copied(self) -> set[int]:
        """Return the `id` of each parameter of the policy that has a copy."""
        return {id(self.policy.get_parameter(name)) for name in self.copies}

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Return each copied parameter of the policy with its copy, which is sharded like the parameter."""
        if self.copies:
            reshard(self.policy)  # what is written to a parameter that FSDP2 has gathered is lost later
        pairs = []
        for name, copy in self.copies.items():
            param = self.policy.get_parameter(name)
            if isinstance(param, DTensor) and not isinstance(copy, DTensor):
                # If only the first rank loaded the weights, the copies of other ranks are on the meta device
                whole = torch.empty_like(copy, device=param.device) if copy.is_meta else copy.to(param.device)
                copy = distribute_tensor(whole, param.device_mesh, param.placements)
            copy = copy.to(param.device)
            self.copies[name] = copy
            pairs.append((param, copy))
        return pairs

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Turn the policy into the reference in the `with` block, and restore it afterwards, even after an error.

        `requires_grad` stays as it is: in the first forward pass, which this may be, FSDP2 chooses the dtype of
        gradients from the parameters that require one.
        """
        policy = self.policy
        trained = [(param, param.requires_grad) for param in policy.parameters()]
        attributes = set(vars(policy))
        turned: AbstractContextManager[Any] = nullcontext()
        if self._source != "initial":
            turned = _adapter_on(policy, self.adapters[0]) if self.adapters else policy.disable_adapter()
        try:
            with turned, self.copies_in_place():
                _restore_trained(trained)
                yield
        finally:
            _restore_trained(trained)
            for name in _LEFT_BY_PEFT - attributes:
                vars(policy).pop(name, None)

    @contextmanager
    def copies_in_place(self) -> Iterator[None]:
        """Give the policy's parameters the values of the copies in the `with` block."""
        pairs = self.pairs()
        policy_values = [(param, param.detach().clone()) for param, _ in pairs]
        try:
            self._put(pairs)
            yield
        finally:
            self._put(policy_values)

    def _put(self, values: list[tuple[Tensor, Tensor]]) -> None:
        for param, value in values:
            param.data.copy_(value)  # hidden from autograd, because the old value is back before a backward reads it
        if values:
            reshard(self.policy)  # else parameters that stay gathered, as after an evaluation, keep old values

    def load(self, folder: Path) -> None:
        """Read the copies from a checkpoint. Raises `ValueError` if training updates them and they are missing."""
        if not load_weights(self.copies, folder) and self.moves:
            raise ValueError(
                f"The checkpoint {folder} has no `{FILE}`, which `sync_ref_model=True` needs to resume. Choose a "
                "checkpoint of a run with `sync_ref_model=True`, or start a new run from the checkpoint's adapter."
            )


def save_weights(named_tensors: Iterable[tuple[str, Tensor]], folder: Path, writes: bool) -> None:
    """Write a reference's unsharded tensors to `folder`, if this process `writes`. Every rank must call it."""
    tensors = {}
    for name, tensor in named_tensors:
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if writes:
            tensors[name] = whole.detach().to("cpu", copy=True).contiguous()
    if tensors:
        unfinished = folder / f"{FILE}.unfinished"
        save_file(tensors, unfinished)
        unfinished.replace(folder / FILE)


def load_weights(tensors: dict[str, Tensor], folder: Path) -> bool:
    """Set `tensors` to the values that [`save_weights`] wrote, and return whether there are any.

    Every rank must call it. Raises `ValueError` if the saved tensors have other names or shapes.
    """
    path = folder / FILE
    if not path.exists():
        return False
    with safe_open(path, framework="pt") as file, torch.no_grad():
        saved = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        unlike = {name for name in saved.keys() | shapes if saved.get(name) != shapes.get(name)}
        if unlike:
            raise ValueError(
                f"The reference in `{path}` does not match this trainer's: `{min(unlike)}` is in only one of the two, "
                "or has another shape. Build the trainer with the model, adapters and `ref_model` of the run that "
                "wrote the checkpoint."
            )
        for name, tensor in tensors.items():
            value = file.get_tensor(name).to(tensor.device, tensor.dtype)
            if isinstance(tensor, DTensor):
                value = distribute_tensor(value, tensor.device_mesh, tensor.placements)
            tensor.copy_(value)
    return True


def reshard(model: nn.Module) -> None:
    """Free parameters that FSDP2 has gathered and, with `reshard_after_forward=False`, kept."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def trained_beside(policy: Any) -> list[str]:
    """Return the names of trained parameters outside of adapters, except biases that PEFT saves with an adapter."""
    saves_biases = getattr(policy.active_peft_config, "bias", "none") != "none"
    names = [name for name, _ in ReferenceWeights(policy).trained_parameters()]
    return [name for name in names if not (saves_biases and name.endswith(".bias"))]


def _restore_trained(trained: list[tuple[Any, bool]]) -> None:
    """Restore `requires_grad`, which PEFT sets on every parameter of an adapter that it turns on or off."""
    for param, requires_grad in trained:
        if param.requires_grad != requires_grad:
            param.requires_grad_(requires_grad)


@contextmanager
def _adapter_on(policy: Any, name: str) -> Iterator[None]:
    """Turn on only the adapter `name` in the `with` block."""
    active_adapter = policy.active_adapter
    active_adapters = _active_adapters(policy)
    try:
        policy.set_adapter(name)
        yield
    finally:
        policy.set_adapter(active_adapter)
        if active_adapters != [active_adapter]:
            policy.base_model.set_adapter(active_adapters)


def _active_adapters(policy: Any) -> list[str]:
    """Return the adapters that are on. There are several if they were set on the tuner below the `PeftModel`."""
    if policy.active_peft_config.is_prompt_learning:
        return [policy.active_adapter]
    return list(policy.base_model.active_adapters)


def _renamed(name: str, adapter: str, new_adapter: str) -> str:
    """Return the name of a tensor of `adapter` with the name of `new_adapter` in its place."""
    segments = name.split(".")
    place = len(segments) - 1 - segments[::-1].index(adapter)
    return ".".join([*segments[:place], new_adapter, *segments[place + 1 :]])


def _trl_copies_whole(policy: Any) -> bool:
    """Whether the adapter "ref" that TRL makes from "default" is an exact copy.

    TRL copies tensors with ".default." in their names, but names of IA3, VeRA, LoHa and trained tokens end in
    ".default". PEFT supports only one adapter with a bias. Creating an adapter that starts from weights of the
    base changes the policy.
    """
    default_names = [name for name, _ in policy.named_parameters() if "default" in name.split(".")]
    config = policy.peft_config["default"]
    plain = getattr(config, "bias", "none") == "none" and not _begins_with_base_weights(config)
    return plain and all(".default." in name for name in default_names)


def _begins_with_base_weights(config: Any) -> bool:
    """Whether a fresh adapter takes weights out of the base model, which changes the base model."""
    start = getattr(config, "init_lora_weights", None)
    return isinstance(start, str) and start.lower().startswith(("pissa", "olora", "corda", "loftq", "lora_ga"))


def _train_adapter(policy: Any, name: str) -> None:
    """Turn on only the adapter `name`, and make it trainable unless a part of it already is."""
    if _active_adapters(policy) != [name]:
        policy.set_adapter(name)
    if not any(param.requires_grad for param in _parameters_of(policy, name)):
        _set_trained(policy, name, True)


def _set_trained(policy: Any, name: str, trained: bool) -> None:
    for param in _parameters_of(policy, name):
        param.requires_grad_(trained)


def _parameters_of(policy: Any, name: str) -> list[nn.Parameter]:
    return list(ReferenceWeights(policy, (name,)).parameters_of_adapters())
