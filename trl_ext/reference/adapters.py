"""The adapter, or the copy of weights, that is the reference of a policy."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
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


def save_moved(model: Any, folder: Path, writes: bool) -> None:
    """Write the parameters of `model`, whole, to `folder`. Every rank must call it.

    Args:
        writes (`bool`): whether this process writes.
    """
    tensors = {}
    for name, param in model.named_parameters():
        whole = param.full_tensor() if isinstance(param, DTensor) else param
        if writes:
            tensors[name] = whole.detach().to("cpu", copy=True).contiguous()
    if writes:
        unfinished = folder / f"{FILE}.unfinished"
        save_file(tensors, unfinished)
        unfinished.replace(folder / FILE)


def load_moved(model: Any, folder: Path) -> bool:
    """Give `model` the parameters that [`save_moved`] has written; whether there are any. Every rank must call it.

    Raises:
        `ValueError`: they are those of another model.
    """
    path = folder / FILE
    if not path.exists():
        return False
    params = dict(model.named_parameters())
    with safe_open(path, framework="pt") as file, torch.no_grad():
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        unlike = {name for name in shapes.keys() | params if shapes.get(name) != _shape(params.get(name))}
        if unlike:
            raise ValueError(
                f"`{path}` holds the reference of another model: `{min(unlike)}` is in one of the two only, or has "
                "another shape. Build the trainer with the `ref_model` that the checkpoint was written with."
            )
        for name, param in params.items():
            value = file.get_tensor(name).to(param.device, param.dtype)
            if isinstance(param, DTensor):
                value = distribute_tensor(value, param.device_mesh, param.placements)
            param.copy_(value)
    return True


def _shape(param: Any) -> tuple[int, ...] | None:
    return None if param is None else tuple(param.shape)


Source = Literal["trl", "named", "initial"]

FILE = "reference_weights.safetensors"

# What PEFT puts into a model of prompt learning while its adapter is off, and leaves there
_EXCHANGED = {"forward", "prepare_inputs_for_generation"}


class OwnReference:
    """
    What of a PEFT policy is the reference, and the policy as it during a pass.

    Everything that is trained and that the reference reads is kept as it was: these tensors, the *copies*, are in the
    place of the policy's while a pass runs. In-place, so that whatever holds the parameters (DDP, FSDP2, ZeRO-1 and 2,
    an optimizer) holds them still.

    Args:
        policy (`PeftModel`): as it is before training, with what is trained by now.
        source (`str`):
            `"trl"`: the adapter "ref" where there is one, else no adapter. `"named"`: the adapter `adapter`.
            `"initial"`: the policy's own, with the values that it has now.
        adapter (`str`, *optional*): for `"named"`.
        moves (`bool`): whether the copies will be moved towards the policy.
    """

    def __init__(self, policy: PeftModel, source: Source, adapter: str | None = None, moves: bool = False) -> None:
        self.policy: Any = policy
        self.moves = moves
        self._source = source
        self._named = adapter
        self._copies: dict[str, Tensor] = {}
        self.keep_what_is_trained()

    @property
    def adapter(self) -> str | None:
        """The adapter that is on in a reference pass; `None` where all are off."""
        if self._source == "initial":
            return str(self.policy.active_adapter)
        if self._source == "named":
            return self._named
        return "ref" if "ref" in self.policy.peft_config else None

    @property
    def adapters(self) -> tuple[str, ...]:
        """All adapters that are on in a reference pass; of one that is a copy, those of the policy."""
        if self._source == "initial":
            return tuple(active_adapters(self.policy))
        return () if self.adapter is None else (self.adapter,)

    def describe(self) -> str:
        """What the reference is, for the plan."""
        own = " and ".join(f'"{name}"' for name in self.adapters)
        own = f"the adapters {own}" if len(self.adapters) > 1 else f"the adapter {own}"
        if self.moves:
            return f"a copy of {own}"
        if self._source == "initial":
            return f"{own} as before training, a copy"
        what = "the base model, with the adapter off"
        if self.adapter is not None:
            what = f'the frozen adapter "{self.adapter}"'
        if self._copies:
            first, *others = self._copies
            more = f" and {len(others)} more" if others else ""
            what += f", with a copy of what is trained outside of the adapter (`{first}`{more})"
        return what

    # The copies

    def keep_what_is_trained(self) -> None:
        """Copy what the reference reads and is trained, and is not copied yet."""
        if self._source == "initial":
            reads = {id(param) for param in self.policy.parameters()}
        else:
            reads = {id(param) for _, param in ReferenceWeights(self.policy, self.adapters).trained_parameters()}
        for name, param in self.policy.named_parameters():
            if param.requires_grad and id(param) in reads and name not in self._copies:
                self._copies[name] = param.detach().clone()

    def begin_as_base(self, fresh: Any) -> None:
        """
        Make the copies of a fresh adapter those of one that adds nothing to the base model.

        Args:
            fresh (`PeftConfig`): of the adapter, which nothing was trained of.

        Raises:
            `ValueError`: there are no such values.
        """
        asked = "`sync_ref_model=True` moves a reference that begins as the base model"
        if fresh.is_prompt_learning:
            raise ValueError(
                f"{asked}, and no virtual tokens are the same as none. Train the {fresh.peft_type.value} adapter "
                "first, load it, and pass the `PeftModel`: then the reference begins as that adapter."
            )
        if not any(getattr(fresh, name) is False for name in vars(fresh) if name.startswith("init_")):
            return  # it adds nothing yet; or it takes from the base what it adds, as PiSSA does
        if not isinstance(fresh, LoraConfig) or fresh.use_dora:
            raise ValueError(
                f"{asked}, and this adapter begins as another ({type(fresh).__name__} with a random start). Leave its "
                "initialization at the default, or make the `PeftModel` yourself and pass it: then the reference "
                "begins as that adapter."
            )
        for name, copy in self._copies.items():
            if not {"lora_B", "lora_embedding_B"}.isdisjoint(name.split(".")):
                copy.zero_()

    def begin_as(self, adapter: str) -> None:
        """
        Give the copies of the policy's adapter the values of another one.

        Raises:
            `ValueError`: the two do not have the same tensors.
        """
        own = str(self.policy.active_adapter)
        configs = [adapter_settings(self.policy.peft_config[name].to_dict()) for name in (own, adapter)]
        theirs = dict(self.policy.named_parameters())
        of_own = {id(param) for param in _parameters_of(self.policy, own)}
        names = [name for name in self._copies if id(theirs[name]) in of_own]
        found = {name: theirs.get(_renamed(name, own, adapter)) for name in names}
        unlike = [name for name, param in found.items() if param is None or param.shape != self._copies[name].shape]
        if configs[0] != configs[1] or unlike:
            raise ValueError(
                f'`sync_ref_model=True` mixes the adapters "{own}" and "{adapter}" (`ref_adapter_name`) by name, and '
                f"they have other configurations{f' (`{unlike[0]}`)' if unlike else ''}. Use adapters of one kind, or "
                "remove `ref_adapter_name`: then the reference begins as the policy's adapter."
            )
        for name, param in found.items():
            self._copies[name].copy_(param.detach())  # type: ignore[union-attr]

    @property
    def copies(self) -> list[str]:
        """Names of the parameters of the policy that have a copy."""
        return list(self._copies)

    def copied(self) -> set[int]:
        """`id` of each parameter of the policy that has a copy."""
        return {id(self.policy.get_parameter(name)) for name in self._copies}

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Each copied parameter of the policy, and the reference's tensor in its place, sharded as it is."""
        self._reshard()  # else FSDP2 shows whole parameters, which it takes away again
        found = []
        for name, copy in self._copies.items():
            param = self.policy.get_parameter(name)
            if isinstance(param, DTensor) and not isinstance(copy, DTensor):
                # Where the first rank alone has loaded weights, it has the copies, and the others their places
                whole = torch.empty_like(copy, device=param.device) if copy.is_meta else copy.to(param.device)
                copy = distribute_tensor(whole, param.device_mesh, param.placements)
            self._copies[name] = copy = copy.to(param.device)
            found.append((param, copy))
        return found

    def same_on_all_ranks(self, of_first: Callable[[Tensor], Tensor]) -> None:
        """Give every copy the value that `of_first(tensor)` returns, as DDP does with the parameters."""
        for _, copy in self.pairs():
            copy.copy_(of_first(copy))

    # A pass

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Within, the policy is the reference. Afterwards, failed or not, it is as it was."""
        policy = self.policy
        trained = [(param, param.requires_grad) for param in policy.parameters()]
        own = set(vars(policy))
        try:
            with self._adapter_on(), self.copies_in_place():
                yield
        finally:
            # PEFT lets all of an adapter be trained that it turns on again
            for param, was in trained:
                if param.requires_grad != was:
                    param.requires_grad_(was)
            for name in _EXCHANGED - own:
                vars(policy).pop(name, None)

    def _adapter_on(self) -> AbstractContextManager[Any]:
        if self._source == "initial":
            return _nothing()
        adapter = self.adapter
        context: AbstractContextManager[Any] = (
            self.policy.disable_adapter() if adapter is None else _adapter_on(self.policy, adapter)
        )
        return context

    @contextmanager
    def copies_in_place(self) -> Iterator[None]:
        """Within, the policy's parameters have the values of the copies."""
        pairs = self.pairs()
        held = [param.detach().clone() for param, _ in pairs]
        try:
            self._put([(param, copy) for param, copy in pairs])
            yield
        finally:
            self._put([(param, value) for (param, _), value in zip(pairs, held, strict=True)])

    def _put(self, values: list[tuple[Tensor, Tensor]]) -> None:
        for param, value in values:
            # Not seen by autograd: a graph that holds the parameter meets its own value again in its backward
            param.data.copy_(value)
        self._reshard()  # what it holds gathered, as it does after an evaluation, has the old values

    def _reshard(self) -> None:
        for module in self.policy.modules():
            if self._copies and isinstance(module, FSDPModule):
                module.reshard()

    # Beside a checkpoint

    def save(self, folder: Path, writes: bool) -> None:
        """Write the copies, whole, to `folder`, where there are any. Every rank must call it.

        Args:
            writes (`bool`): whether this process writes.
        """
        tensors = {}
        for name, copy in self._copies.items():
            whole = copy.full_tensor() if isinstance(copy, DTensor) else copy
            if writes:
                tensors[name] = whole.detach().cpu().contiguous()
        if tensors:
            unfinished = folder / f"{FILE}.unfinished"
            save_file(tensors, unfinished)
            unfinished.replace(folder / FILE)

    def load(self, folder: Path) -> None:
        """
        Take the copies that [`save`] has written.

        Raises:
            `ValueError`: `folder` has those of another model, or none and the reference moves.
        """
        if not (folder / FILE).exists():
            if self.moves:
                raise ValueError(
                    f"The checkpoint {folder} has no `{FILE}`, the state of the reference that "
                    "`sync_ref_model=True` moves, so training cannot go on from it. Take a checkpoint that such a run "
                    "has written, or train from its adapter as a new run."
                )
            return
        with safe_open(folder / FILE, framework="pt") as file:
            names = set(file.keys())
            found = {name: file.get_tensor(name) for name in names}
        shapes = {name: tuple(self.policy.get_parameter(name).shape) for name in self._copies}
        unlike = names ^ shapes.keys() or {name for name in names if tuple(found[name].shape) != shapes[name]}
        if unlike:
            raise ValueError(
                f"`{folder / FILE}` holds the reference of another model: `{min(unlike)}` is in one of the two only, "
                "or has another shape. Build the trainer with the model and the adapters that the checkpoint was "
                "written with."
            )
        for name, value in found.items():
            self._copies[name] = value.to(self._copies[name].device, self._copies[name].dtype)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def _adapter_on(policy: Any, name: str) -> Iterator[None]:
    """Within, the adapter `name` is on, alone; afterwards those that were."""
    before, every = policy.active_adapter, active_adapters(policy)
    try:
        policy.set_adapter(name)
        yield
    finally:
        policy.set_adapter(before)
        if every != [before]:
            policy.base_model.set_adapter(every)


def active_adapters(policy: Any) -> list[str]:
    """The adapters that are on; several, where a tuner was told so below the `PeftModel`."""
    if policy.active_peft_config.is_prompt_learning:
        return [policy.active_adapter]
    return list(policy.base_model.active_adapters)


def _renamed(name: str, own: str, other: str) -> str:
    """The name of a tensor of the adapter `own`, as it is in the adapter `other`."""
    segments = name.split(".")
    place = len(segments) - 1 - segments[::-1].index(own)
    return ".".join([*segments[:place], other, *segments[place + 1 :]])


# Of a policy that comes with its adapters


def trl_copies_whole(policy: Any) -> bool:
    """Whether the adapter "ref" that TRL makes of "default" is a copy of it.

    It copies tensors with ".default." in their names: not those that are entries of a dictionary of parameters, as of
    IA3, VeRA, LoHa and trained tokens, which end in ".default". PEFT has room for one adapter with a bias only. And
    making one that takes from the base changes the policy.
    """
    of_default = [name for name, _ in policy.named_parameters() if "default" in name.split(".")]
    config = policy.peft_config["default"]
    plain = getattr(config, "bias", "none") == "none" and not begins_with_weights_of_base(config)
    return plain and all(".default." in name for name in of_default)


def name_policy(policy: Any, name: str) -> None:
    """Turn the adapter `name` on, alone, and let it be trained where it is not."""
    if active_adapters(policy) != [name]:
        policy.set_adapter(name)
    if not any(param.requires_grad for param in _parameters_of(policy, name)):
        for param in _parameters_of(policy, name):
            param.requires_grad_(True)


def begins_with_weights_of_base(config: Any) -> bool:
    """Whether an adapter takes what it begins with, when it is made, out of the base model.

    That is another model then with the adapter off, and yet another once a second such adapter is made.
    """
    start = getattr(config, "init_lora_weights", None)
    return isinstance(start, str) and start.lower().startswith(("pissa", "olora", "corda", "loftq", "lora_ga"))


def trained_beside(policy: Any) -> list[str]:
    """Names of what is trained and is in no adapter, nor a bias that PEFT saves with one."""
    saves_biases = getattr(policy.active_peft_config, "bias", "none") != "none"
    names = [name for name, _ in ReferenceWeights(policy).trained_parameters()]
    return [name for name in names if not (saves_biases and name.endswith(".bias"))]


def freeze_adapter(policy: Any, name: str) -> None:
    """Let no tensor of the adapter `name` be trained."""
    for param in _parameters_of(policy, name):
        param.requires_grad_(False)


def _parameters_of(policy: Any, name: str) -> list[nn.Parameter]:
    return list(ReferenceWeights(policy, (name,)).parameters_of_adapters())
