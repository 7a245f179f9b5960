"""Which adapters vLLM samples with, the files that it gets of one, and the weights that it gets of the others."""

import json

import pytest
import torch
from accelerate import Accelerator
from peft import IA3Config, LNTuningConfig, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from trl.distributed import DistributedBackend

from tiny import Workshop, lora_config
from trl_ext.compat.vllm import VLLMGeneration
from trl_ext.sampler.adapter import adapter_files, unsupported_adapter
from trl_ext.sampler.engine import EngineGeneration

SUPPORTED = {
    "every linear layer": {},
    "scaled by its rank": {"use_rslora": True, "lora_alpha": 16},
    "a layer": {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1]},
    "dropout": {"lora_dropout": 0.1, "init_lora_weights": True},
}
UNSUPPORTED = {
    "dora": ({"use_dora": True}, "vLLM does not support `use_dora=True`"),
    "ranks by layer": ({"rank_pattern": {"q_proj": 2}}, "vLLM does not support `rank_pattern={'q_proj': 2}`"),
    "scales by layer": ({"alpha_pattern": {"q_proj": 2}}, "`alpha_pattern="),
    "bias": ({"bias": "all"}, "`bias='all'`"),
    "a whole module": ({"modules_to_save": ["lm_head"]}, "`modules_to_save="),
    "tokens": ({"trainable_token_indices": [1, 2]}, "`trainable_token_indices="),
    "embedding": (
        {"target_modules": ["q_proj", "embed_tokens"]},
        "`base_model.model.model.embed_tokens.lora_embedding_A",
    ),
    "another base": ({"init_lora_weights": "pissa"}, "`init_lora_weights='pissa'` changes the base model"),
    "rank": ({"r": 16}, "`--max-lora-rank 8`, and the adapter has `r=16`"),
}


@pytest.fixture
def base(workshop: Workshop) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(workshop.model("untied"))


@pytest.mark.parametrize("kind", SUPPORTED)
def test_vllm_samples_with(base, kind):
    assert unsupported_adapter(get_peft_model(base, lora_config(**SUPPORTED[kind])), max_rank=8) is None


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_vllm_does_not_sample_with(base, kind):
    options, reason = UNSUPPORTED[kind]
    assert reason in unsupported_adapter(get_peft_model(base, lora_config(**options)), max_rank=8)


def test_other_models_are_named(base):
    assert unsupported_adapter(base) == "the policy has no adapter"
    model = get_peft_model(base, IA3Config(target_modules=["k_proj"], feedforward_modules=[]))
    assert unsupported_adapter(model) == "vLLM does not support IA3"


def test_a_weight_that_is_trained_beside_the_adapter_is_named(base):
    model = get_peft_model(base, lora_config())
    model.base_model.model.lm_head.weight.requires_grad_(True)
    assert "`base_model.model.lm_head.weight` is trained too" in unsupported_adapter(model)


def test_the_files_are_those_of_the_active_adapter(workshop: Workshop, base, tmp_path):
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"]), adapter_name="other")
    model.add_adapter("policy", lora_config())
    model.set_adapter("policy")
    size = adapter_files(model, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"adapter_model.safetensors", "adapter_config.json"}
    assert size == sum(x.numel() * 4 for x in load_file(tmp_path / "adapter_model.safetensors").values())
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == 4
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(workshop.model("untied")), str(tmp_path))
    ids = torch.arange(2, 20)[None]
    torch.testing.assert_close(again(ids).logits, model.eval()(ids).logits, rtol=0, atol=0)


STREAMED = {
    "lora": ("untied", lora_config()),
    "bf16": ("untied", lora_config()),
    "tied": ("tied", lora_config()),
    "dora": ("untied", lora_config(use_dora=True)),
    "biases": ("head_bias", lora_config(bias="all")),
    "saved modules": ("untied", lora_config(modules_to_save=["lm_head"])),
    "embedding": ("untied", lora_config(target_modules=["embed_tokens", "q_proj"])),
    "ln tuning": ("untied", LNTuningConfig(target_modules=["input_layernorm", "norm"])),
    "ia3": (
        "untied",
        IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], init_ia3_weights=False),
    ),
}


# PEFT, of IA3 and of LN tuning on the norms of Llama
@pytest.mark.filterwarnings("ignore:Unmerge result can be inaccurate", "ignore:Unsupported layer type")
@pytest.mark.parametrize("name", STREAMED)
def test_merged_weights_are_trls_and_the_policys_own_stay(workshop, name):
    model, config = STREAMED[name]
    dtype = torch.bfloat16 if name == "bf16" else torch.float32
    torch.manual_seed(0)
    policy = get_peft_model(AutoModelForCausalLM.from_pretrained(workshop.model(model), dtype=dtype), config)
    generation = object.__new__(EngineGeneration)  # without an engine
    generation.model, generation.accelerator, generation.bytes_sent = policy, Accelerator(cpu=True), 0
    generation._dist = DistributedBackend(generation.accelerator)
    before = {part: x.detach().clone() for part, x in policy.named_parameters()}
    ours, own = ({part: x.detach().clone() for part, x in generation._iter_named_params()} for _ in range(2))
    assert all(torch.equal(x, before[part]) for part, x in policy.named_parameters())
    theirs = {part: x.detach().clone() for part, x in VLLMGeneration._iter_named_params(generation)}
    assert list(ours) == list(own) == list(theirs)
    assert all(torch.equal(ours[part], x) and torch.equal(own[part], x) for part, x in theirs.items())
