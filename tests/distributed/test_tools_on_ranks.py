"""GRPO trains with a tool on two ranks of which only the first calls it, as stock TRL does."""

import shutil
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from transformers import GenerationConfig

import trl_ext
from ranks import Rank, run_on_ranks
from tiny import Workshop, prompts
from tool_calls import ENDS, look_up, tool_tokenizer

NO_WORD = "x"


def train(rank: Rank, package: Any) -> dict[str, Any]:
    samples: list[list[list[int]]] = []
    words: list[str] = []

    @wraps(look_up)
    def noted_look_up(word: str) -> str:
        words.append(word)
        return look_up(word)

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        samples.append([list(ids) for ids in completion_ids])
        return [float(sum(ids) % 5) for ids in completion_ids]

    args = package.GRPOConfig(
        **{"output_dir": str(rank.folder / package.__name__), "max_steps": 2, "logging_steps": 1, "optim": "sgd"},
        **{"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 40, "seed": 5},
        **{"bf16": False, "gradient_checkpointing": False, "dataloader_pin_memory": False, "report_to": "none"},
        **{"save_strategy": "no", "learning_rate": 0.01, "use_cpu": True, "max_tool_calling_iterations": 3},
        model_init_kwargs={"dtype": "float32"},
    )
    trainer = package.GRPOTrainer(
        str(rank.folder / "model"),
        args=args,
        reward_funcs=reward,
        train_dataset=prompts(8, seed=1, conversational=True),
        processing_class=tool_tokenizer() if rank.index == 0 else tool_tokenizer(NO_WORD),
        tools=[noted_look_up],
    )
    trainer.train()
    rank.check(trainer)
    logs = [log for log in trainer.state.log_history if "loss" in log]
    return {
        "samples": samples,
        "words": words,
        "losses": [log["loss"] for log in logs],
        "calls": [log["tools/call_frequency"] for log in logs],
        "random_state": torch.get_rng_state(),
        "weights": {name: x.detach().clone() for name, x in trainer.model.named_parameters()},
        "reason": trainer.explain()["generation"].reason if package is trl_ext else None,
    }


CASES = {package.__name__: partial(train, package=package) for package in (trl_ext, trl)}


@pytest.mark.parametrize("engine", ["ddp"])
def test_only_one_rank_calls_a_tool(engine: str, workshop: Workshop, tmp_path: Path) -> None:
    shutil.copytree(workshop.model("untied"), tmp_path / "model")
    GenerationConfig(eos_token_id=list(ENDS), pad_token_id=0).save_pretrained(tmp_path / "model")
    results = run_on_ranks(__file__, list(CASES), engine, tmp_path, timeout=120.0)
    for ours, stock in zip(results["trl_ext"], results["trl"], strict=True):
        assert "each distinct prompt once" in ours["reason"]
        assert ours["samples"] == stock["samples"]
        assert torch.equal(ours["random_state"], stock["random_state"])
        assert ours["words"] == stock["words"]
        assert ours["losses"] == pytest.approx(stock["losses"], abs=1e-6)
        assert ours["calls"] == stock["calls"]
        for name, weight in stock["weights"].items():
            torch.testing.assert_close(ours["weights"][name], weight, rtol=0.0, atol=1e-6)
    first, second = results["trl_ext"]
    assert len(first["words"]) > 8
    assert second["words"] == []
