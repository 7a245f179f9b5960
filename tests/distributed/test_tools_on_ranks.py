"""GRPO trains with a tool on two ranks as stock TRL does, also if only the first calls it."""

import shutil
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from transformers import GenerationConfig

import trl_ext
from launch import launch
from ranks import Rank, run_on_ranks
from tiny import Workshop, prompts
from tool_calls import ENDS, look_up, tool_tokenizer

NO_WORD = "x"


def train(rank: Rank, package: Any, callers: int) -> dict[str, Any]:
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
        **{
            "output_dir": str(rank.folder / f"{package.__name__}-{callers}"),
            "max_steps": 2,
            "logging_steps": 1,
            "optim": "sgd",
        },
        **{"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 40, "seed": 5},
        **{"bf16": False, "gradient_checkpointing": False, "dataloader_pin_memory": False, "report_to": "none"},
        **{"save_strategy": "no", "learning_rate": 0.01, "use_cpu": rank.engine == "ddp"},
        # With FSDP, ranks must generate equally often
        max_tool_calling_iterations=3 if callers == 1 else 1,
        model_init_kwargs={"dtype": "float32"},
        **(rank.training_arguments() if rank.engine == "zero2" else {}),
    )
    trainer = package.GRPOTrainer(
        str(rank.folder / "model"),
        args=args,
        reward_funcs=reward,
        train_dataset=prompts(8, seed=1, conversational=True),
        processing_class=tool_tokenizer() if rank.index < callers else tool_tokenizer(NO_WORD),
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
        "weights": trainer.accelerator.get_state_dict(trainer.model_wrapped),
        "unchecked": trainer._grpo_generation.fewer_rows._unchecked if package is trl_ext else None,
        "reason": trainer.explain()["generation"].reason if package is trl_ext else None,
    }


CASES = {
    f"{package.__name__}-{callers}": partial(train, package=package, callers=callers)
    for package in (trl_ext, trl)
    for callers in (1, 2)
}


# Under ZeRO-2, weights are whole, so that ranks may generate unequally often
@pytest.mark.parametrize(("engine", "callers"), [("ddp", 1), ("fsdp2", 2), ("zero2", 1)])
def test_ranks_train_with_a_tool(engine: str, callers: int, workshop: Workshop, tmp_path: Path) -> None:
    if engine == "zero2":
        pytest.importorskip("deepspeed")
    shutil.copytree(workshop.model("untied"), tmp_path / "model")
    GenerationConfig(eos_token_id=list(ENDS), pad_token_id=0).save_pretrained(tmp_path / "model")
    cases = [f"trl_ext-{callers}", f"trl-{callers}"]
    run = launch if engine == "zero2" else run_on_ranks
    results = run(__file__, cases, engine, tmp_path, timeout=120.0)
    for ours, stock in zip(*results.values(), strict=True):
        assert "each distinct prompt once" in ours["reason"]
        assert ours["samples"] == stock["samples"]
        assert torch.equal(ours["random_state"], stock["random_state"])
        assert ours["words"] == stock["words"]
        assert ours["losses"] == pytest.approx(stock["losses"], abs=1e-6)
        assert ours["calls"] == stock["calls"]
        for name, weight in stock["weights"].items():
            torch.testing.assert_close(ours["weights"][name], weight, rtol=0.0, atol=1e-6)
    assert results[cases[0]][0]["weights"]
    for rank, ours in enumerate(results[cases[0]]):
        assert ("continued" in ours["unchecked"]) == (rank >= callers)
        assert (len(ours["words"]) > 4) == (rank < callers)
