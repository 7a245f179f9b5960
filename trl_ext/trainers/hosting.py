"""When a reference model cannot be kept on the host."""

from typing import Any

from accelerate.utils import DynamoBackend
from peft import PeftModel

from ..engines.ranks import Ranks


def refuse_what_cannot_be_hosted(trainer: Any, ranks: Ranks) -> None:
    args = trainer.args
    asked = "`reference_device='cpu'`"
    if trainer.ref_model is None:
        if isinstance(trainer.model, PeftModel) and args.beta != 0:
            raise ValueError(
                f"{asked} keeps a separate reference model on the host, and there is none: the reference of a PEFT "
                "policy is the policy without its adapter, in the same weights. Leave it unset."
            )
        return  # beta is 0, or all was precomputed: what was asked for, no reference on the device, is so
    if ranks.tensor_parallel is not None:
        raise ValueError(
            f"{asked} does not go with tensor parallelism, which spreads the reference model over the ranks "
            "ittrainer. Leave it unset."
        )
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
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
    if trainer.accelerator.state.dynamo_plugin.backend != DynamoBackend.NO:
        raise ValueError(
            f"{asked} exchanges the weights during a forward, which `torch_compile=True` would compile. Leave one "
            "of them unset."
        )
