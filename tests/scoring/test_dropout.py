"""Dropout is detected wherever an adapter or a model stores its rate."""

import pytest
import torch
from peft import BOFTConfig, LoHaConfig, LoKrConfig, LoraConfig, PveraConfig, VeraConfig, get_peft_model

from model_families import build
from trl_ext.packing.support import has_dropout

TARGETS = {"target_modules": ["q_proj", "v_proj"]}
ADAPTERS = {
    "lora": (LoraConfig(lora_dropout=0.5, **TARGETS), True),
    "lora without": (LoraConfig(**TARGETS), False),
    "loha, of ranks": (LoHaConfig(rank_dropout=0.5, **TARGETS), True),
    "loha, of modules": (LoHaConfig(module_dropout=0.5, **TARGETS), True),
    "loha without": (LoHaConfig(**TARGETS), False),
    "lokr": (LoKrConfig(rank_dropout=0.5, **TARGETS), True),
    "boft": (BOFTConfig(boft_block_size=4, boft_dropout=0.5, **TARGETS), True),
    "boft without": (BOFTConfig(boft_block_size=4, **TARGETS), False),
    "vera": (VeraConfig(vera_dropout=0.5, **TARGETS), True),
    "pvera, whose vectors are drawn": (PveraConfig(**TARGETS), True),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT warns about missing kernels
@pytest.mark.parametrize("name", ADAPTERS)
def test_dropout_is_detected_exactly_if_two_passes_differ(name):
    config, draws = ADAPTERS[name]
    config.init_weights = config.init_lora_weights = False
    model = get_peft_model(build("untied"), config).train()
    for param in model.parameters():
        if param.requires_grad:
            torch.nn.init.normal_(param, std=0.5)
    ids = torch.randint(3, 97, (2, 12), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    differs = not all(torch.equal(model(ids).logits, model(ids).logits) for _ in range(8))
    assert differs == draws
    assert has_dropout(model) == draws
