"""A model with logits as large as a real one's (SmolLM2-135M's reach 39), in rows of 512 tokens: how exact is it?

Elsewhere the tests compare with TRL to 1e-5 on short rows. A sum over 500 tokens is near -2,000, where fp32 numbers are
1.2e-4 apart, and DPO's loss is made of differences of such sums.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from head_inputs import Inputs
from head_subjects import ours
from head_subjects import trl as trl_head
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

import trl_ext
from tiny import word_tokenizer

LARGEST_LOGIT = 39.0
TOKENS = 512


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return word_tokenizer()


@pytest.fixture(scope="module")
def pairs(tokenizer: PreTrainedTokenizerBase) -> Dataset:
    generator = random.Random(7)
    words = sorted(tokenizer.get_vocab().keys() - set(tokenizer.all_special_tokens))

    def text(count: int) -> str:
        return " ".join(generator.choices(words, k=count))

    return Dataset.from_list(
        [{"prompt": text(12), "chosen": " " + text(496), "rejected": " " + text(400)} for _ in range(2)]
    )


@pytest.fixture(scope="module")
def model(tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    shape: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=4099, max_position_embeddings=TOKENS, pad_token_id=0, **shape))
    ids = torch.randint(2, len(tokenizer), (4, TOKENS))
    with torch.no_grad():
        model.lm_head.weight *= LARGEST_LOGIT / model(ids).logits.abs().max()
    folder = tmp_path_factory.mktemp("large-logits")
    model.save_pretrained(folder)
    return folder


def losses(library: Any, model: Path, tokenizer: Any, pairs: Dataset, out: Path) -> dict[str, float]:
    """Return what the second step of a training logs: there the policy differs from the reference."""
    config = library.DPOConfig(
        str(out),
        max_steps=2,
        learning_rate=1e-5,
        per_device_train_batch_size=2,
        max_length=TOKENS,
        logging_steps=1,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
    )
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    trainer = library.DPOTrainer(policy, args=config, train_dataset=pairs, processing_class=tokenizer)
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry][1]


def test_dpo_in_fp32_differs_from_trl_by_the_rounding_of_sums(
    model: Path, tokenizer: Any, pairs: Dataset, tmp_path: Path
) -> None:
    stock = losses(trl, model, tokenizer, pairs, tmp_path / "trl")
    logged = losses(trl_ext, model, tokenizer, pairs, tmp_path / "trl_ext")
    assert abs(stock["logps/chosen"]) > 1000
    assert logged["logps/chosen"] == pytest.approx(stock["logps/chosen"], rel=1e-6)
    # Sums round, and the weights come from a first step: the difference is 1.8e-4 on some CPUs
    assert logged["loss"] == pytest.approx(stock["loss"], rel=5e-4)


@torch.no_grad()
def test_bf16_logits_are_not_rounded(model: Path, tokenizer: Any) -> None:
    ids = torch.randint(2, len(tokenizer), (2, TOKENS), generator=torch.Generator().manual_seed(5))
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    hidden = policy.model(ids[:, :-1]).last_hidden_state.flatten(0, 1)
    weight = policy.lm_head.weight
    logits = hidden.double() @ weight.double().t()
    assert 30 < logits.abs().max() < 50
    # Every other target is the most likely class: an error there is relative to a log-prob near zero
    targets = torch.where(torch.arange(len(hidden)) % 2 == 0, logits.argmax(-1), ids[:, 1:].flatten())
    exact = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    inputs = Inputs(hidden, weight, targets, torch.ones(len(targets)))
    errors = [
        (head(inputs, ("log_probs",)).double() - exact).abs().max() for head in (ours(kernels="torch"), trl_head())
    ]
    assert errors[0] < 2e-5
    assert errors[1] > 0.03
