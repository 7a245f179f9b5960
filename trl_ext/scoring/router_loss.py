"""The router loss of a mixture of experts, from the router's logits of a padded or packed batch."""

import logging
from typing import Any

import torch
from torch import Tensor

from ..packing.attention import index_select_fp32_grad
from ..packing.layout import Layout
from .model_logits import ModelForward, router_loss_of

logger = logging.getLogger("trl_ext")

# Config fields with the number of experts that a token gets. TRL reads the first
_EXPERTS_OF_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")


def router_loss(
    model: Any,
    model_forward: ModelForward,
    router_logits: tuple[Tensor, ...] | None,
    attention_mask: Tensor | None,
    layout: Layout | None,
) -> Tensor:
    """Return the load-balancing loss of a mixture of experts, from one tensor of router logits per layer."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    config = model.config.get_text_config()
    if not router_logits:
        # Doge and Flint, for example, can be configured without experts. Then there is no load, and TRL crashes
        return model.get_output_embeddings().weight.new_zeros((), dtype=torch.float32)
    if layout is not None:
        # A shared token counts once per row, as in the padded batch
        real_N = layout.real_places().to(router_logits[0].device)
        router_logits = tuple(index_select_fp32_grad(x.flatten(0, -2), real_N.to(x.device)) for x in router_logits)
        attention_mask = None
    experts = router_logits[0].shape[-1]
    experts_of_token = next((x for name in _EXPERTS_OF_TOKEN if (x := getattr(config, name, None)) is not None), None)
    if getattr(config, "num_experts", None) != experts or experts_of_token is None:
        # TRL crashes here. GraniteMoE has another name for `num_experts`, and the logits of Doge are not of experts
        try:
            loss = router_loss_of(model, model_forward, router_logits, attention_mask)
        except Exception as error:  # of the model's code, on what a stand-in returns
            logger.debug(f"{type(model).__name__} computes no router loss without its backbone: {error}")
            loss = None
        if loss is not None:
            return loss
    if experts_of_token is None:
        raise ValueError(
            f"The router loss of {type(model).__name__} is unknown: its config does not say how many experts a token "
            "gets. Set `router_aux_loss_coef=0.0` to train without it."
        )
    return load_balancing_loss_func(router_logits, experts, experts_of_token, attention_mask)
