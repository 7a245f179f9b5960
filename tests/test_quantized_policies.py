"""QLoRA: adapters on a model that bitsandbytes has quantized to 4 or 8 bit, on the CPU, in both trainers."""

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import trl
import trl_ext
from adapter_cases import MovesDefinition, assert_alike, build, run
from tiny import lora_config

pytest.importorskip("bitsandbytes")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:MatMul8bitLt. inputs will be cast"),
    pytest.mark.filterwarnings("ignore:.*_check_is_size will be removed"),
]

BITS = {
    "4bit": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32),
    "8bit": BitsAndBytesConfig(load_in_8bit=True),
}


def quantized(workshop, bits):
    return AutoModelForCausalLM.from_pretrained(workshop.model("untied"), quantization_config=BITS[bits])


@pytest.mark.parametrize("kind", ["dpo", "grpo"])
@pytest.mark.parametrize("bits", BITS)
def test_an_adapter_on_a_quantized_model_trains_as_in_stock(bits, kind, workshop, tmp_path):
    shown = [
        run(kind, library, workshop, tmp_path, quantized(workshop, bits), peft_config=lora_config())
        for library in (trl_ext, trl)
    ]
    assert_alike(*shown)
