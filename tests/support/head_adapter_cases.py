"""Adapters on the LM head: PEFT's config for each, how it is scored, and what stock TRL does."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import peft
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from tiny import Workshop

LOW_RANK = "LoRA's low-rank term"
ROWS = "the rows of `trainable_token_indices`"
MODULE = "the head's own forward runs"
WHOLE = "the whole weight is on this rank"

REFUSES = "Applying a PEFT adapter to `lm_head` is not supported"  # of stock TRL, at the start
CRASHES = "has no attribute 'bias'"  # of stock TRL, in its first forward


@dataclass(frozen=True)
class Case:
    """One adapter.

    Args:
        config (`Callable`): makes the PEFT configuration.
        way (`str`): words in the row `head` of the plan.
        stock (`str`, *optional*): the error that stock TRL raises; None if it trains with the same result.
        model (`str`): a name of `tiny.MODELS`.
        after (`Callable`): called with the PEFT model after it is built.
    """

    config: Callable[[], Any]
    way: str
    stock: str | None = REFUSES
    model: str = "untied"
    after: Callable[[Any], Any] = field(default=lambda model: None)


def lora(**changes: Any) -> Callable[[], Any]:
    """Return LoRA on the head and on a layer below it, with a nonzero B."""
    options = {"r": 4, "lora_alpha": 6, "init_lora_weights": False, "target_modules": ["lm_head", "q_proj"]}
    return lambda: peft.LoraConfig(task_type="CAUSAL_LM", **{**options, **changes})


def two_adapters(model: Any) -> None:
    """Add a second active adapter with another rank and scaling."""
    model.add_adapter("second", lora(r=2, lora_alpha=9, use_rslora=True)())
    model.base_model.set_adapter(["default", "second"])


def second_is_dora(model: Any) -> None:
    model.add_adapter("second", lora(r=2, use_dora=True)())
    model.base_model.set_adapter(["default", "second"])


def disable(model: Any) -> None:
    model.base_model.disable_adapter_layers()


TOKENS = [1, 17, 3, 96]
CASES: dict[str, Case] = {
    "LoRA": Case(lora(), LOW_RANK),
    "LoRA, rank-stabilised": Case(lora(use_rslora=True), LOW_RANK),
    "LoRA with its own bias": Case(lora(lora_bias=True), LOW_RANK, model="head_bias"),
    "LoRA with a bias, on a head without": Case(lora(lora_bias=True), LOW_RANK),
    "LoRA, all biases trained": Case(lora(bias="all"), LOW_RANK, model="head_bias"),
    "LoRA, B zero": Case(lora(init_lora_weights=True), LOW_RANK),
    "LoRA, PiSSA": Case(lora(init_lora_weights="pissa"), LOW_RANK),
    "LoRA under a softcap": Case(lora(), LOW_RANK, model="softcap"),
    "LoRA under a logit scale": Case(lora(), LOW_RANK, model="logits_scaling"),
    "LoRA on a tied head": Case(lora(), LOW_RANK, model="tied"),
    "LoRA on a tied embedding": Case(lora(target_modules=["embed_tokens"]), WHOLE, None, "tied"),
    "LoRA, tied with its embedding": Case(
        lora(target_modules=["embed_tokens"], ensure_weight_tying=True), LOW_RANK, model="tied"
    ),
    "two LoRAs": Case(lora(), LOW_RANK, after=two_adapters),
    "LoRA and head in modules_to_save": Case(lora(target_modules=["q_proj"], modules_to_save=["lm_head"]), WHOLE, None),
    "LoRA disabled": Case(lora(), WHOLE, after=disable),
    "LoRA merged": Case(lora(), WHOLE, after=lambda model: model.merge_adapter()),
    "DoRA": Case(lora(use_dora=True), MODULE),
    "LoRA and DoRA": Case(lora(), MODULE, after=second_is_dora),
    "tokens of the head": Case(
        lora(target_modules=["q_proj"], trainable_token_indices={"embed_tokens": [5], "lm_head": TOKENS}),
        ROWS,
        CRASHES,
    ),
    "tokens, tied": Case(lora(target_modules=["q_proj"], trainable_token_indices=TOKENS), ROWS, CRASHES, "tied"),
    "tokens alone, tied": Case(lambda: peft.TrainableTokensConfig(token_indices=TOKENS), ROWS, CRASHES, "tied"),
    "tokens, tied, disabled": Case(
        lora(target_modules=["q_proj"], trainable_token_indices=TOKENS), WHOLE, None, "tied", disable
    ),
    "tokens of a head with a bias": Case(
        lora(target_modules=["q_proj"], trainable_token_indices={"lm_head": TOKENS}), MODULE, CRASHES, "head_bias"
    ),
    "IA3": Case(lambda: peft.IA3Config(target_modules=["lm_head", "v_proj"], feedforward_modules=["lm_head"]), MODULE),
    "IA3 on what comes out": Case(lambda: peft.IA3Config(target_modules=["lm_head"], feedforward_modules=[]), MODULE),
    "OFT": Case(lambda: peft.OFTConfig(target_modules=["lm_head"], oft_block_size=4), MODULE),
    "LoHa": Case(lambda: peft.LoHaConfig(target_modules=["lm_head"], r=4, init_weights=False), MODULE),
    "VeRA": Case(lambda: peft.VeraConfig(target_modules=["lm_head"], r=4, init_weights=False), MODULE),
    "IA3 disabled": Case(
        lambda: peft.IA3Config(target_modules=["lm_head"], feedforward_modules=[]), MODULE, after=disable
    ),
}


def build(case: Case, workshop: Workshop) -> Any:
    """Build the PEFT model in evaluation mode, with random weights in its adapter."""
    path = workshop.model(case.model)
    torch.manual_seed(0)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(path), case.config())
    for name, parameter in model.named_parameters():
        if "modules_to_save" in name:  # different from the module that it copies
            parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
        if "lora_embedding" in name:
            parameter.data.mul_(0.3)
        if parameter.requires_grad and ("ia3" in name or "oft" in name or "tokens_delta" in name):
            nn.init.normal_(parameter, 1.0 if "ia3" in name else 0.0, 0.2)
    case.after(model)
    return model.eval()
