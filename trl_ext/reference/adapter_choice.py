"""Which of a policy's adapters is trained and which is the reference, as arguments and TRL's own rule have it."""

from typing import Any

from peft import PeftModel

from .adapters import OwnReference, begins_with_weights_of_base, freeze_adapter, name_policy, trl_copies_whole


class AdapterChoice:
    """Made before TRL's `__init__`, from its arguments; `reference` is asked once the policy is there."""

    def __init__(self, policy: Any, fresh: Any, asked: Any, ref_model: Any, args: Any) -> None:
        self.fresh, self.asked = fresh, asked
        adapted = isinstance(policy, PeftModel) or fresh is not None
        if adapted and ref_model is not None and getattr(args, "sync_ref_model", False):
            raise ValueError(
                "`sync_ref_model=True` with an adapter moves a copy of that adapter, and `ref_model` is another model. "
                "Leave `ref_model` out, or set `sync_ref_model=False`."
            )
        self._choose(policy, ref_model)
        self.trl_may_copy = not isinstance(policy, PeftModel) or fresh is not None or self._trl_makes_ref(policy, args)

    def _choose(self, policy: Any, ref_model: Any) -> None:
        asked = self.asked
        names = {"policy_adapter_name": asked.policy_adapter_name, "ref_adapter_name": asked.ref_adapter_name}
        names = {field: name for field, name in names.items() if name is not None}
        if names and (not isinstance(policy, PeftModel) or self.fresh is not None):
            field, name = next(iter(names.items()))
            what = "a fresh adapter (`peft_config`)" if self.fresh is not None else f"`{type(policy).__name__}`"
            raise ValueError(
                f"`{field}={name!r}` names an adapter of a `PeftModel`, and `model` is {what}. Pass the `PeftModel` "
                "that holds the adapters, or leave it unset."
            )
        for field, name in names.items():
            if name not in policy.peft_config:
                raise ValueError(
                    f"`{field}={name!r}`, and the model has the adapters {sorted(policy.peft_config)}. Name one of "
                    'them, or load it first (`model.load_adapter(path, "name")`).'
                )
        if not isinstance(policy, PeftModel):
            return
        if asked.policy_adapter_name is not None:
            name_policy(policy, asked.policy_adapter_name)
        if asked.ref_adapter_name is not None:
            if ref_model is not None:
                raise ValueError(
                    f"`ref_adapter_name={asked.ref_adapter_name!r}` and `ref_model` are two references. Give one."
                )
            if policy.active_adapter == asked.ref_adapter_name:
                raise ValueError(
                    f"`ref_adapter_name={asked.ref_adapter_name!r}` is the adapter that is active, which is trained. "
                    "Name the one to train in `policy_adapter_name`."
                )
            freeze_adapter(policy, asked.ref_adapter_name)

    def _trl_makes_ref(self, policy: Any, args: Any) -> bool:
        asked = self.asked
        if asked.policy_adapter_name or asked.ref_adapter_name or getattr(args, "sync_ref_model", False):
            return False
        return "default" in policy.peft_config and trl_copies_whole(policy)

    def reference(self, policy: Any, moves: bool) -> OwnReference:
        """What of the policy is its reference."""
        named = self.asked.ref_adapter_name
        if moves:
            own = OwnReference(policy, "initial", moves=True)
            if self.fresh is not None:
                own.begin_as_base(self.fresh)
            elif named is not None:
                own.begin_as(named)
            return own
        if named is not None:
            return OwnReference(policy, "named", named)
        if begins_with_weights_of_base(self.fresh):
            return OwnReference(policy, "initial")
        if self.fresh is not None or self.trl_may_copy:
            own = OwnReference(policy, "trl")
            if self.fresh is None:
                freeze_adapter(policy, "ref")
            return own
        return OwnReference(policy, "initial")
