"""`RewardTrainer`: what its plan says, what its options do, and what its evaluations give to the user's functions."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trl
from datasets import Dataset
from peft import get_peft_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer, GPT2Config

import trl_ext
from short_training import PAIRS, Bench
from tiny import V_WORDS, Workshop, lora_config
from token_counts import counted, total


@pytest.fixture
def bench(workshop: Workshop, tmp_path: Path) -> Bench:
    return Bench(workshop, tmp_path)


def classifier(bench: Bench, name: str = "tied") -> Any:
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_pretrained(bench.workshop.model(name), num_labels=1)


def test_the_plan_names_the_pairs_and_the_score_head(bench: Bench) -> None:
    bench.reward()
    plan = bench.trainer.explain(verbose=True)
    assert {name: (plan[name].action, plan[name].reason) for name in ("policy", "packing", "head")} == {
        "policy": ("run", "Scores both rows of every pair, as in TRL."),
        "packing": ("run", "Padding is dropped, and a prompt that several completions share is computed once."),
        "head": ("run", "The model's own score head scores one token of each row."),
    }
    assert "2 rows of 8 tokens run twice, to compare logits" in plan["first batch"].reason


def test_a_model_with_a_forward_of_its_own_runs_as_in_trl_and_the_plan_says_why(bench: Bench) -> None:
    config = GPT2Config(
        vocab_size=V_WORDS, n_embd=16, n_layer=1, n_head=2, num_labels=1, pad_token_id=0, eos_token_id=1
    )
    tokenizer = bench.workshop.model("tied")
    weights = []
    for library in (trl, trl_ext):
        bench.package = library
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_config(config)
        config_of = bench.config("Reward", max_steps=2, learning_rate=0.1, optim="sgd", gradient_checkpointing=False)
        trainer = library.RewardTrainer(
            model, args=config_of, train_dataset=PAIRS, processing_class=AutoTokenizer.from_pretrained(tokenizer)
        )
        trainer.train()
        weights.append([x.detach().clone() for x in trainer.model.parameters()])
    assert all(map(torch.equal, *weights))
    plan = trainer.explain()
    assert plan["packing"].action == "skip"
    assert "`GPT2ForSequenceClassification` has a forward of its own" in plan["packing"].reason
    assert plan["head"].reason == "The model's own score head scores each token, as in TRL."


def test_dropout_keeps_prompts_apart_unless_it_is_disabled(bench: Bench) -> None:
    pairs = [{"prompt": f"w{i} w2 w3 w4", "chosen": " w5 w8", "rejected": " w6 w7"} for i in range(4)]
    tokens = []
    for disable in (True, False):
        adapter = lora_config(task_type="SEQ_CLS", lora_dropout=0.5)
        bench.reward(
            train_dataset=Dataset.from_list(pairs),
            peft_config=adapter,
            disable_dropout=disable,
            max_steps=2,
            logging_steps=1,
        )
        tokens.append([x["tokens_processed/with_gradient"] for x in bench.trainer.state.log_history if "loss" in x])
    # Both rows of 2 pairs: a prompt of 4, then 2 words and an end
    assert tokens == [[20.0, 20.0], [28.0, 28.0]]
    assert "`lora_dropout`" in bench.trainer.explain()["packing"].reason


def test_a_loss_that_is_not_finite_names_its_pair(bench: Bench) -> None:
    model = classifier(bench)
    with torch.no_grad():
        model.get_input_embeddings().weight[3 + 77] = math.nan
    pairs = [{"prompt": "w1 w2", "chosen": f" w3 w{i}", "rejected": f" w4 w{77 if i == 1 else i}"} for i in range(2)]
    given = {"train_dataset": Dataset.from_list(pairs), "model": model, "train_sampling_strategy": "sequential"}
    given["processing_class"] = AutoTokenizer.from_pretrained(bench.workshop.model("tied"))
    with pytest.raises(FloatingPointError, match=r"Rank 0: row 1 \(rejected\) of the prompt 'w1 w2'\."):
        bench.reward(on_non_finite_loss="stop", **given)
    bench.reward(on_non_finite_loss="skip", **given)
    assert not bench.trainer.model.score.weight.isnan().any()


def test_functions_of_the_user_get_trls_logits(bench: Bench) -> None:
    seen: list[list[np.ndarray]] = []

    def halved(logits: Any, labels: Any) -> Any:
        return logits / 2

    def mean(prediction: Any) -> dict[str, float]:
        seen[-1].append(prediction.predictions)
        return {"mean": float(prediction.predictions.mean())}

    for library in (trl, trl_ext):
        bench.package = library
        seen.append([])
        functions = {"compute_metrics": mean, "preprocess_logits_for_metrics": halved}
        bench.reward(eval_strategy="steps", eval_steps=1, eval_dataset=PAIRS, max_steps=2, **functions)
        assert "eval_mean" in bench.trainer.state.log_history[-2]
    assert len(seen[0]) == len(seen[1]) == 2
    for stock, ours in zip(*seen, strict=True):
        assert stock.shape == ours.shape
        np.testing.assert_allclose(ours, stock, rtol=1e-3, atol=1e-5)  # adam's first steps


def test_tokenized_pairs_and_streams_train_as_text_does(bench: Bench) -> None:
    bench.reward(max_steps=2)
    expected = [x.detach().clone() for x in bench.trainer.model.parameters()]
    tokenized = bench.trainer.train_dataset.select_columns(["chosen_ids", "rejected_ids"])
    bench.reward(max_steps=2, train_dataset=tokenized)
    assert all(map(torch.equal, expected, bench.trainer.model.parameters()))
    bench.reward(max_steps=2, train_dataset=tokenized.to_iterable_dataset())
    assert bench.trainer.state.global_step == 2


def test_an_adapter_of_a_model_is_chosen_by_its_name(bench: Bench) -> None:
    model = get_peft_model(classifier(bench), lora_config(task_type="SEQ_CLS"), adapter_name="first")
    model.add_adapter("second", lora_config(task_type="SEQ_CLS"))
    tokenizer = AutoTokenizer.from_pretrained(bench.workshop.model("tied"))
    bench.reward(model=model, processing_class=tokenizer, policy_adapter_name="second")
    trained = {name for name, x in bench.trainer.model.named_parameters() if x.requires_grad}
    assert trained
    assert all("second" in name for name in trained)


def test_evaluation_is_packed_too(bench: Bench) -> None:
    tokens = []
    for library in (trl, trl_ext):
        bench.package = library
        bench.reward(eval_dataset=PAIRS)
        with counted() as counts:
            bench.trainer.evaluate()
        tokens.append(total(counts.without))
    assert tokens[1] < 0.7 * tokens[0]
