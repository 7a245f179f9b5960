"""The reference of a PEFT policy: another adapter, the base model, or a copy of what is trained."""

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

# Attributes that PEFT sets on a model of prompt learning while its adapter is off, and does not remove
_LEFT_BY_PEFT = {"forward", "prepare_inputs_for_generation"}

Source = Literal["trl", "named", "initial"]


class AdapterChoice:
    """Which adapter is trained and which is the reference: the options, then TRL's rule. Made before TRL's `__init__`.

    Args:
        fresh (`PeftConfig`, *optional*): TRL's `peft_config`.
        options (`Any`): has `policy_adapter_name` and `ref_adapter_name`.

    Attributes:
        trl_may_copy (`bool`): whether TRL may copy the adapter "default" to be the reference.
    """

    def __init__(self, policy: Any, fresh: Any, options: Any, ref_model: Any, args: Any) -> None:
        self.fresh, self._ref_name = fresh, options.ref_adapter_name
        loaded = isinstance(policy, PeftModel)
        moves = getattr(args, "sync_ref_model", False)
        if (loaded or fresh is not None) and ref_model is not None and moves:
            raise ValueError(
                "`sync_ref_model=True` with an adapter moves a copy of that adapter, and `ref_model` is another model. "
                "Leave `ref_model` out, or set `sync_ref_model=False`."
            )
        names = {"policy_adapter_name": options.policy_adapter_name, "ref_adapter_name": self._ref_name}
        names = {field: name for field, name in names.items() if name is not None}
        for field, name in names.items():
            if not loaded or fresh is not None:
                model = f"`{type(policy).__name__}`" if fresh is None else "a fresh adapter (`peft_config`)"
                raise ValueError(
                    f"`{field}={name!r}` names an adapter of a `PeftModel`, and `model` is {model}. Pass the "
                    "`PeftModel` that holds the adapters, or leave it unset."
                )
            if name not in policy.peft_config:
                raise ValueError(
                    f"`{field}={name!r}`, and the model has the adapters {sorted(policy.peft_config)}. Name one of "
                    'them, or load it first (`model.load_adapter(path, "name")`).'
                )
        if "policy_adapter_name" in names:
            _train_adapter(policy, options.policy_adapter_name)
        if self._ref_name is not None:
            if ref_model is not None:
                raise ValueError(f"`ref_adapter_name={self._ref_name!r}` and `ref_model` are two references. Give one.")
            if policy.active_adapter == self._ref_name:
                raise ValueError(
                    f"`ref_adapter_name={self._ref_name!r}` is the adapter that is active, which is trained. "
                    "Name the one to train in `policy_adapter_name`."
                )
            _set_trained(policy, self._ref_name, False)
        self.trl_may_copy = not loaded or fresh is not None
        if not self.trl_may_copy and not names and not moves and "default" in policy.peft_config:
            self.trl_may_copy = _trl_copies_whole(policy)

    def reference(self, policy: Any, moves: bool) -> "OwnReference":
        """The reference of `policy`, once TRL has built it. `moves`: whether training moves it."""
        if moves:
            own = OwnReference(policy, "initial", moves=True)
            if self.fresh is not None:
                own.begin_as_base(self.fresh)
            elif self._ref_name is not None:
                own.begin_as(self._ref_name)
            return own
        if self._ref_name is not None:
            return OwnReference(policy, "named", self._ref_name)
        if not self.trl_may_copy or _begins_with_base_weights(self.fresh):
            return OwnReference(policy, "initial")
        own = OwnReference(policy, "trl")
        if self.fresh is None:
            _set_trained(policy, "ref", False)
        return own


class OwnReference:
    """A reference that is part of the policy, and the policy as that reference during a pass.

    Training changes some tensors that the reference reads. Their values before training, the *copies*, replace the
    policy's during a pass. They are written in-place, because DDP, FSDP2, ZeRO-1, ZeRO-2 and the optimizer hold the
    parameters.

    Args:
        policy (`PeftModel`): before training, with `requires_grad` set.
        source (`str`):
            `"trl"`: the adapter "ref" if there is one, else no adapter. `"named"`: the adapter `adapter`. `"initial"`:
            the policy's adapter with its current values.
        adapter (`str`, *optional*): for `"named"`.
        moves (`bool`): whether the copies will be moved towards the policy.

    Attributes:
        copies (`dict[str, Tensor]`): the reference's value for each parameter of the policy that has a copy.
    """

    def __init__(self, policy: PeftModel, source: Source, adapter: str | None = None, moves: bool = False) -> None:
        self.policy: Any = policy
        self.moves = moves
        self._source, self._named = source, adapter
        self.copies: dict[str, Tensor] = {}
        self.copy_trained()

    @property
    def adapters(self) -> tuple[str, ...]:
        """The adapters that are on in a reference pass; for a copy, those of the policy."""
        if self._source == "initial":
            return tuple(_active_adapters(self.policy))
        if self._source == "named":
            return (str(self._named),)
        return ("ref",) if "ref" in self.policy.peft_config else ()

    def describe(self) -> str:
        """What the reference is, for the plan."""
        names = " and ".join(f'"{name}"' for name in self.adapters)
        if self._source == "initial":
            own = f"the adapters {names}" if len(self.adapters) > 1 else f"the adapter {names}"
            return f"a copy of {own}" if self.moves else f"{own} as before training, a copy"
        description = f"the frozen adapter {names}" if names else "the base model, with the adapter off"
        if self.copies:
            first, *others = self.copies
            more = f" and {len(others)} more" if others else ""
            description += f", with a copy of what is trained outside of the adapter (`{first}`{more})"
        return description

    # The copies

    def copy_trained(self) -> None:
        """Copy what the reference reads and training changes, unless there is a copy."""
        read: Iterable[nn.Parameter] = self.policy.parameters()
        if self._source != "initial":
            read = (param for _, param in ReferenceWeights(self.policy, self.adapters).trained_parameters())
        ids = {id(param) for param in read}
        for name, param in self.policy.named_parameters():
            if param.requires_grad and id(param) in ids and name not in self.copies:
                self.copies[name] = param.detach().clone()

    def begin_as_base(self, fresh: Any) -> None:
        """Make the copies of a `fresh` adapter add nothing to the base model. Raises `ValueError` if none could."""
        begins = "`sync_ref_model=True` moves a reference that begins as the base model"
        if fresh.is_prompt_learning:
            raise ValueError(
                f"{begins}, and no virtual tokens are the same as none. Train the {fresh.peft_type.value} adapter "
                "first, load it, and pass the `PeftModel`: then the reference begins as that adapter."
            )
        if not any(getattr(fresh, name) is False for name in vars(fresh) if name.startswith("init_")):
            return  # it adds nothing yet; or it takes from the base what it adds, as PiSSA does
        if not isinstance(fresh, LoraConfig) or fresh.use_dora:
            raise ValueError(
                f"{begins}, and this adapter begins as another ({type(fresh).__name__} with a random start). Leave its "
                "initialization at the default, or make the `PeftModel` yourself and pass it: then the reference "
                "begins as that adapter."
            )
        for name, copy in self.copies.items():
            if not {"lora_B", "lora_embedding_B"}.isdisjoint(name.split(".")):
                copy.zero_()

    def begin_as(self, adapter: str) -> None:
        """Give the copies of the policy's adapter the values of another one of the same kind."""
        own = str(self.policy.active_adapter)
        settings, others = (adapter_settings(self.policy.peft_config[name].to_dict()) for name in (own, adapter))
        params = dict(self.policy.named_parameters())
        ids = {id(param) for param in _parameters_of(self.policy, own)}
        names = [name for name in self.copies if id(params[name]) in ids]
        found = {name: params.get(_renamed(name, own, adapter)) for name in names}
        unlike = [name for name, param in found.items() if param is None or param.shape != self.copies[name].shape]
        if settings != others or unlike:
            raise ValueError(
                f'`sync_ref_model=True` mixes the adapters "{own}" and "{adapter}" (`ref_adapter_name`) by name, and '
                f"they have other configurations{f' (`{unlike[0]}`)' if unlike else ''}. Use adapters of one kind, or "
                "remove `ref_adapter_name`: then the reference begins as the policy's adapter."
            )
        for name, param in found.items():
            self.copies[name].copy_(param.detach())  # type: ignore[union-attr]

    def copied(self) -> set[int]:
        """`id` of each parameter of the policy that has a copy."""
        return {id(self.policy.get_parameter(name)) for name in self.copies}

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Each copied parameter of the policy and its copy, sharded alike."""
        if self.copies:
            reshard(self.policy)  # a gathered parameter of FSDP2 is whole, and is dropped later
        found = []
        for name, copy in self.copies.items():
            param = self.policy.get_parameter(name)
            if isinstance(param, DTensor) and not isinstance(copy, DTensor):
                # If only the first rank loaded weights, the copies of other ranks are on the meta device
                whole = torch.empty_like(copy, device=param.device) if copy.is_meta else copy.to(param.device)
                copy = distribute_tensor(whole, param.device_mesh, param.placements)
            self.copies[name] = copy = copy.to(param.device)
            found.append((param, copy))
        return found

    # A pass

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Within, the policy is the reference. Afterwards, even after an error, it is as before."""
        policy = self.policy
        trained = [(param, param.requires_grad) for param in policy.parameters()]
        attributes = set(vars(policy))
        turned: AbstractContextManager[Any] = nullcontext()
        if self._source != "initial":
            turned = _adapter_on(policy, self.adapters[0]) if self.adapters else policy.disable_adapter()
        try:
            with turned, self.copies_in_place():
                yield
        finally:
            # PEFT sets `requires_grad` on every parameter of an adapter that it turns on
            for param, was in trained:
                if param.requires_grad != was:
                    param.requires_grad_(was)
            for name in _LEFT_BY_PEFT - attributes:
                vars(policy).pop(name, None)

    @contextmanager
    def copies_in_place(self) -> Iterator[None]:
        """Within, the policy's parameters have the values of the copies."""
        pairs = self.pairs()
        held = [(param, param.detach().clone()) for param, _ in pairs]
        try:
            self._put(pairs)
            yield
        finally:
            self._put(held)

    def _put(self, values: list[tuple[Tensor, Tensor]]) -> None:
        for param, value in values:
            param.data.copy_(value)  # hidden from autograd: the value is back before a backward reads it
        if values:
            reshard(self.policy)  # parameters that stay gathered, as after an evaluation, have the old values

    # In a checkpoint

    def load(self, folder: Path) -> None:
        """Take the copies from a checkpoint, which must have them if the reference moves."""
        if not load_weights(self.copies, folder) and self.moves:
            raise ValueError(
                f"The checkpoint {folder} has no `{FILE}`, the state of the reference that "
                "`sync_ref_model=True` moves, so training cannot go on from it. Take a checkpoint that such a run "
                "has written, or train from its adapter as a new run."
            )


def save_weights(named: Iterable[tuple[str, Tensor]], folder: Path, writes: bool) -> None:
    """Write a reference's tensors, whole, to `folder`, if this process `writes`. Every rank must call it."""
    tensors = {}
    for name, tensor in named:
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if writes:
            tensors[name] = whole.detach().to("cpu", copy=True).contiguous()
    if tensors:
        unfinished = folder / f"{FILE}.unfinished"
        save_file(tensors, unfinished)
        unfinished.replace(folder / FILE)


def load_weights(tensors: dict[str, Tensor], folder: Path) -> bool:
    """Give `tensors` the values that [`save_weights`] wrote, and return whether there are any. Every rank must call it.

    Raises `ValueError` if they are another model's.
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
                f"`{path}` holds the reference of another model: `{min(unlike)}` is in one of the two only, or has "
                "another shape. Build the trainer with the model, the adapters and the `ref_model` that the "
                "checkpoint was written with."
            )
        for name, tensor in tensors.items():
            value = file.get_tensor(name).to(tensor.device, tensor.dtype)
            if isinstance(tensor, DTensor):
                value = distribute_tensor(value, tensor.device_mesh, tensor.placements)
            tensor.copy_(value)
    return True


def reshard(model: nn.Module) -> None:
    """Drop the whole parameters that FSDP2 has gathered: `reshard_after_forward=False` keeps them."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def trained_beside(policy: Any) -> list[str]:
    """Names of trained parameters that are in no adapter, except biases that PEFT saves with one."""
    saves_biases = getattr(policy.active_peft_config, "bias", "none") != "none"
    names = [name for name, _ in ReferenceWeights(policy).trained_parameters()]
    return [name for name in names if not (saves_biases and name.endswith(".bias"))]


@contextmanager
def _adapter_on(policy: Any, name: str) -> Iterator[None]:
    """Within, only the adapter `name` is on."""
    before, every = policy.active_adapter, _active_adapters(policy)
    try:
        policy.set_adapter(name)
        yield
    finally:
        policy.set_adapter(before)
        if every != [before]:
            policy.base_model.set_adapter(every)


def _active_adapters(policy: Any) -> list[str]:
    """The adapters that are on; several, if the tuner below the `PeftModel` was set so."""
    if policy.active_peft_config.is_prompt_learning:
        return [policy.active_adapter]
    return list(policy.base_model.active_adapters)


def _renamed(name: str, own: str, other: str) -> str:
    """The name of a tensor of the adapter `own`, with `other` for `own`."""
    segments = name.split(".")
    place = len(segments) - 1 - segments[::-1].index(own)
    return ".".join([*segments[:place], other, *segments[place + 1 :]])


def _trl_copies_whole(policy: Any) -> bool:
    """Whether the adapter "ref" that TRL makes of "default" is a copy of it.

    TRL copies tensors with ".default." in their names. Entries of a dictionary of parameters, as of IA3, VeRA, LoHa and
    trained tokens, end in ".default" instead. PEFT has room for one adapter with a bias only. And making an adapter
    that takes its weights from the base changes the policy.
    """
    of_default = [name for name, _ in policy.named_parameters() if "default" in name.split(".")]
    config = policy.peft_config["default"]
    plain = getattr(config, "bias", "none") == "none" and not _begins_with_base_weights(config)
    return plain and all(".default." in name for name in of_default)


def _begins_with_base_weights(config: Any) -> bool:
    """Whether a fresh adapter takes weights out of the base model, so that the model without it is another one."""
    start = getattr(config, "init_lora_weights", None)
    return isinstance(start, str) and start.lower().startswith(("pissa", "olora", "corda", "loftq", "lora_ga"))


def _train_adapter(policy: Any, name: str) -> None:
    """Turn the adapter `name` on, alone, and make it trainable unless a part of it is."""
    if _active_adapters(policy) != [name]:
        policy.set_adapter(name)
    if not any(param.requires_grad for param in _parameters_of(policy, name)):
        _set_trained(policy, name, True)


def _set_trained(policy: Any, name: str, trained: bool) -> None:
    for param in _parameters_of(policy, name):
        param.requires_grad_(trained)


def _parameters_of(policy: Any, name: str) -> list[nn.Parameter]:
    return list(ReferenceWeights(policy, (name,)).parameters_of_adapters())
