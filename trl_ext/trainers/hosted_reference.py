"""What both trainers share of a reference model that is kept on the host: when it is, and what that cannot go with."""

from typing import Any

from accelerate.utils import DynamoBackend
from peft import PeftModel

from ..reference import ReferenceWeights, host_reference
from .reference_arguments import ReferenceArguments


class HostedReferenceMixin:
    """Mixed in before `ExactHeadMixin`: with `reference_device="cpu"` the reference model's weights live on the host.

    Its models are met where TRL's `__init__` attaches their heads, before it moves the reference model to the device.
    """

    def _attach(self, model: Any, **options: Any) -> None:
        super()._attach(model, **options)  # type: ignore[misc]
        args = self.args  # type: ignore[attr-defined]
        if not isinstance(args, ReferenceArguments) or args.reference_device is None:
            return
        if model is self.ref_model:  # type: ignore[attr-defined]
            shared = ReferenceWeights(model).shares_with(self.model, trained=False)  # type: ignore[attr-defined]
            if shared:
                raise ValueError(
                    "`reference_device='cpu'` moves the reference's weights to the host, and the policy is in the same "
                    f"memory (`{shared}`). Leave it unset, or load a reference model of its own."
                )
            host_reference(model, self.accelerator.device)  # type: ignore[attr-defined]
        else:
            self._refuse_what_cannot_be_hosted(args)

    def _refuse_what_cannot_be_hosted(self, args: Any) -> None:
        asked = "`reference_device='cpu'`"
        if self.ref_model is None:  # type: ignore[attr-defined]
            if isinstance(self.model, PeftModel) and args.beta != 0:  # type: ignore[attr-defined]
                raise ValueError(
                    f"{asked} keeps a separate reference model on the host, and there is none: the reference of a PEFT "
                    "policy is the policy without its adapter, in the same weights. Leave it unset."
                )
            return  # beta is 0, or all was precomputed: what was asked for, no reference on the device, is so
        if self.tensor_parallel is not None:  # type: ignore[attr-defined]
            raise ValueError(
                f"{asked} does not go with tensor parallelism, which spreads the reference model over the ranks "
                "itself. Leave it unset."
            )
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:  # type: ignore[attr-defined]
            raise ValueError(
                f"{asked} does not go with FSDP and DeepSpeed, which spread the reference model over the ranks "
                "themselves. Leave it unset; to keep shards on the host, use their own offloading "
                "(`fsdp_offload_params: true`, or `offload_param_device: cpu` under ZeRO-3)."
            )
        if args.sync_ref_model:
            raise ValueError(
                f"{asked} keeps a reference that does not change, and `sync_ref_model=True` mixes the policy's weights "
                "into it as training goes. Leave one of them unset."
            )
        if self.accelerator.state.dynamo_plugin.backend != DynamoBackend.NO:  # type: ignore[attr-defined]
            raise ValueError(
                f"{asked} exchanges the weights during a forward, which `torch_compile=True` would compile. Leave one "
                "of them unset."
            )
