"""Tried in an environment that has the wheel and its dependencies, and nothing of the repository: does it work?

    python .ci/installed.py   # in another folder than the repository's root

The head is compared with its definition in float64, and a LoRA adapter is trained with DPO on a model made here.
"""

import os
import sys
import tempfile
from importlib.metadata import distribution, version
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import trl_ext

WORDS = ["<pad>", "<eos>", *"abcdefghijklmnopqrstuvwxyz"]


def installed() -> None:
    place = Path(trl_ext.__file__).resolve()
    assert "site-packages" in place.parts, f"imported from {place}, which is not what was installed"
    assert version("trl_ext") == trl_ext.__version__
    files = {str(file) for file in distribution("trl_ext").files or ()}
    assert {"trl_ext/py.typed", "trl_ext/compat/names.json"} <= files
    assert not [file for file in files if file.startswith(("tests/", "docs/", "benchmarks/", "examples/"))]


def head() -> None:
    hidden = torch.randn(40, 32, dtype=torch.bfloat16, requires_grad=True)
    weight, targets = torch.randn(500, 32, dtype=torch.bfloat16), torch.randint(500, (40,))
    ours = trl_ext.linear_log_probs(hidden, weight, targets).log_probs
    exact = torch.log_softmax(hidden.double() @ weight.double().T, -1).gather(1, targets[:, None])[:, 0]
    assert (ours - exact).abs().max() < 1e-5
    ours.sum().backward()


def training(folder: str) -> None:
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Whitespace()
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    trainer = trl_ext.DPOTrainer(
        LlamaForCausalLM(config),
        args=trl_ext.DPOConfig(
            folder, max_steps=2, bf16=False, use_cpu=True, report_to="none", disable_tqdm=True, reference_store="memory"
        ),
        train_dataset=Dataset.from_list([{"prompt": "a b", "chosen": " c d", "rejected": " e"}] * 8),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"),
        peft_config=LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )
    print(trainer.explain())
    assert trainer.train().global_step == 2


if __name__ == "__main__":
    installed()
    head()
    with tempfile.TemporaryDirectory() as folder:
        training(folder)
    print(f"trl_ext {trl_ext.__version__} works from {Path(trl_ext.__file__).parent}, Python {sys.version.split()[0]}")
