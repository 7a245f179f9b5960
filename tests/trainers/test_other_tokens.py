"""The tokens that enter the model, counted at its embedding: other trainers than DPO and GRPO beside stock TRL's."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

import trl_ext
from rewards import id_reward
from tiny import V_WORDS, word_tokenizer
from token_counts import counted, total

PROMPT, COMPLETION, GROUP = 512, 64, 8


def model(model_class: Any = LlamaForCausalLM) -> Any:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    sizes = {"vocab_size": V_WORDS, "max_position_embeddings": 1024, "num_labels": 1}
    return model_class(LlamaConfig(**shape, **ids, **sizes))


def words(count: int, seed: int) -> str:
    draw = random.Random(seed)
    return " ".join(f"w{draw.randrange(90)}" for _ in range(count))


def config(library: Any, method: str, folder: Path, **fields: Any) -> Any:
    common = {"output_dir": str(folder), "use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no"}
    steps = {"max_steps": 2, "logging_steps": 1, "gradient_checkpointing": False, "learning_rate": 0.01}
    return getattr(library, f"{method}Config")(**{**common, **steps, **fields})


def tokens(trainer: Any) -> tuple[int, int]:
    """Return the tokens with and without a gradient in a training."""
    for scoring in getattr(trainer, "scoring_forwards", ()):
        scoring.packing.checked = True  # else a few rows of the first batch run twice more
        scoring.is_compared = True
    with counted() as found:
        trainer.train()
    return total(found.with_gradient), total(found.without)


@pytest.mark.parametrize(("beta", "most"), [(0.05, 0.25), (0.0, 0.13)])
def test_rloo_processes_prompts_once(beta: float, most: float, tmp_path: Path) -> None:
    """TRL's passes process each prompt for each of 8 completions; without a KL term, TRL scores the old policy too."""
    counts = []
    for library in (trl, trl_ext):
        trainer_class = library.RLOOTrainer

        class Scripted(trainer_class):
            def _generate_single_turn(self, prompt_ids: Any, *_: Any) -> list[list[int]]:
                draw = random.Random(self.state.global_step)
                return [[draw.randrange(3, 90) for _ in range(COMPLETION)] for _ in prompt_ids]

        Scripted.__name__ = trainer_class.__name__
        sizes = {"per_device_train_batch_size": GROUP, "num_generations": GROUP, "max_completion_length": COMPLETION}
        policy = model()
        policy.config._name_or_path = saved(policy, tmp_path)
        trainer = Scripted(
            policy,
            reward_funcs=id_reward,
            args=config(library, "RLOO", tmp_path, beta=beta, **sizes),
            train_dataset=Dataset.from_list([{"prompt": words(PROMPT, seed)} for seed in range(4)]),
            processing_class=word_tokenizer(),
        )
        counts.append(tokens(trainer))
    theirs, ours = counts
    passes = 3 if beta else 2
    assert sum(theirs) == 2 * passes * GROUP * (PROMPT + COMPLETION)
    assert sum(ours) <= most * sum(theirs)


def saved(policy: Any, folder: Path) -> str:
    """Save the model: TRL loads the reference from its path."""
    policy.save_pretrained(folder / "model")
    return str(folder / "model")


def rows() -> list[dict[str, Any]]:
    """Return rows whose completions have 1 to 40 words."""
    lengths = [1, 40, 3, 25, 7, 12, 33, 2]
    return [
        {"prompt": words(4, seed), "completion": f" {words(length, 100 + seed)}", "label": seed % 2 == 0}
        for seed, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("method", ["SFT", "KTO"])
def test_padding_of_ragged_rows_is_not_processed(method: str, tmp_path: Path) -> None:
    counts = []
    for library in (trl, trl_ext):
        policy = model()
        policy.config._name_or_path = saved(policy, tmp_path)
        fields = {"loss_type": "apo_zero_unpaired"} if method == "KTO" else {}
        if method == "KTO" and library is trl_ext:
            fields["reference_store"] = "off"
        given = rows() if method == "KTO" else [{name: x[name] for name in ("prompt", "completion")} for x in rows()]
        trainer = getattr(library, f"{method}Trainer")(
            policy,
            args=config(library, method, tmp_path, per_device_train_batch_size=4, **fields),
            train_dataset=Dataset.from_list(given),
            processing_class=word_tokenizer(),
        )
        real = sum(
            int(batch["attention_mask"].sum()) - len(batch["input_ids"]) for batch in trainer.get_train_dataloader()
        )
        counts.append((*tokens(trainer), real))
    (theirs, _, _), (ours, without, real) = counts
    assert theirs > 1.4 * real  # padding
    assert ours == real  # the last token of a row is only predicted
    assert without == (real if method == "KTO" else 0)  # the reference


def test_a_pair_to_score_has_no_padding_and_one_prompt(tmp_path: Path) -> None:
    """Prompts of 32 to 512 words, completions of 4 to 64, 8 pairs a batch: at most 0.36 of TRL's tokens."""
    draw = random.Random(0)
    pairs = []
    for seed in range(32):
        pair = {"prompt": words(draw.randint(32, 512), seed)}
        for number, name in enumerate(("chosen", "rejected"), 1):
            pair[name] = f" {words(draw.randint(4, 64), 100 * number + seed)}"
        pairs.append(pair)
    counts = []
    for library in (trl, trl_ext):
        trainer = library.RewardTrainer(
            model(LlamaForSequenceClassification),
            args=config(library, "Reward", tmp_path, per_device_train_batch_size=8, max_steps=4),
            train_dataset=Dataset.from_list(pairs),
            processing_class=word_tokenizer(),
        )
        counts.append(tokens(trainer)[0])
    theirs, ours = counts
    # Both rows of a pair have an end; of chance, a few completions begin alike
    needed = sum(len(" ".join(pair.values()).split()) + 2 for pair in pairs)
    assert needed - 32 <= ours <= needed
    assert ours <= 0.36 * theirs
