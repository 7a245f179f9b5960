"""The config fields that name the adapters of a `PeftModel`, which both trainers' configs have."""

from dataclasses import dataclass, field

from .added_fields import AddedFields


@dataclass
class AdapterArguments(AddedFields):
    """Fields that say which adapter is the policy and which the reference; the defaults are TRL's choice."""

    policy_adapter_name: str | None = field(
        default=None,
        metadata={
            "help": "The adapter that is trained, of a `PeftModel` that holds several. `None`: the one that is active. "
            "Without `ref_adapter_name` the reference is this adapter as it is when the trainer is built."
        },
    )
    ref_adapter_name: str | None = field(
        default=None,
        metadata={
            "help": "The adapter that is the reference, frozen, of a `PeftModel` that holds several. `None`: as in "
            "TRL, the base model for a fresh adapter, and a copy of the adapter as it was for a `PeftModel`."
        },
    )

    def __post_init__(self) -> None:
        if self.policy_adapter_name is not None and self.policy_adapter_name == self.ref_adapter_name:
            raise ValueError(
                f"`policy_adapter_name` and `ref_adapter_name` are both {self.ref_adapter_name!r}: the reference "
                "would be trained. Leave `ref_adapter_name` unset, and the reference is the adapter as it was before "
                "training."
            )
        super().__post_init__()
