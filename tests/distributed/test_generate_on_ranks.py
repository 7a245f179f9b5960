"""`generate` on fewer rows samples on two ranks what it samples on all rows, also if a rank's rows end first."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import GenerationConfig

import trl_ext
from launch import LaunchedRank, launch
from tiny import Workshop, lora_config, prompts

KINDS = {"grpo": (trl_ext.GRPOTrainer, trl_ext.GRPOConfig), "rloo": (trl_ext.RLOOTrainer, trl_ext.RLOOConfig)}


def train(
    rank: LaunchedRank, kind: str, fewer: bool, peft_config: LoraConfig | None, first_end_step: int = 0
) -> dict[str, Any]:
    """Train; return the samples of this rank, the tokens in `generate`, and the weights' norms.

    Args:
        first_end_step (`int`): the first step in which rows of the second rank can end.
    """
    samples: list[list[list[int]]] = []

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        samples.append([list(ids) for ids in completion_ids])
        if len(samples) == first_end_step:
            trainer.generation_config.eos_token_id = ends
        return [float(sum(ids) % 5) for ids in completion_ids]

    trainer_class, config_class = KINDS[kind]
    args = config_class(
        **{"output_dir": str(rank.folder / f"{kind}-{fewer}"), "max_steps": 2 + 2 * first_end_step},
        **{"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 16, "seed": 5},
        **{"bf16": False, "gradient_checkpointing": False, "dataloader_pin_memory": False, "report_to": "none"},
        **{
            "save_strategy": "no",
            "logging_steps": 1,
            "learning_rate": 0.01,
            "use_cpu": rank.engine in ("ddp", "fsdp2_native"),
        },
        generate_fewer_rows=fewer,
        model_init_kwargs={"dtype": "float32", **rank.model_arguments()},
        **rank.training_arguments(),
    )
    trainer = trainer_class(
        str(rank.folder / "model"),
        args=args,
        reward_funcs=reward,
        train_dataset=prompts(8, seed=1),
        peft_config=peft_config,
    )
    ends = trainer.generation_config.eos_token_id
    if first_end_step and rank.index == 1:
        trainer.generation_config.eos_token_id = [1000]  # beyond the vocabulary
    trainer.train()
    rank.check(trainer)
    logs = trainer.state.log_history
    return {
        "samples": samples,
        "tokens": [log["tokens_processed/generation"] for log in logs if "loss" in log],
        "losses": [(log["loss"], log["grad_norm"]) for log in logs if "loss" in log],
        "random_state": torch.get_rng_state(),
        "reason": trainer.explain()["generation"].reason,
    }


ADAPTERS = {"full": None, "lora": lora_config()}
CASES = {
    f"{kind}-{adapter}-{fewer}": partial(train, kind=kind, fewer=fewer, peft_config=peft_config)
    for kind in KINDS
    for adapter, peft_config in ADAPTERS.items()
    for fewer in (True, False)
} | {
    f"late-{fewer}": partial(train, kind="grpo", fewer=fewer, peft_config=None, first_end_step=1)
    for fewer in (True, False)
}


@pytest.mark.parametrize(
    ("engine", "kinds"),
    [
        ("ddp", ("grpo", "rloo")),
        pytest.param("fsdp2", ("grpo",), marks=pytest.mark.slow),
        pytest.param("zero3", ("grpo", "rloo"), marks=pytest.mark.slow),
        pytest.param("tp", ("grpo",), marks=pytest.mark.slow),
    ],
)
def test_ranks_sample_the_same_on_fewer_rows(
    engine: str, kinds: tuple[str, ...], workshop: Workshop, tmp_path: Path
) -> None:
    if engine == "zero3":
        pytest.importorskip("deepspeed")
    shutil.copytree(workshop.model("untied"), tmp_path / "model")
    # Many tokens end a completion, so that one rank is done before the other
    GenerationConfig(eos_token_id=[1, *range(60, 90)], pad_token_id=0).save_pretrained(tmp_path / "model")
    pairs = [f"{kind}-{adapter}" for kind in kinds for adapter in ADAPTERS]
    results = launch(__file__, [f"{pair}-{fewer}" for pair in pairs for fewer in (True, False)], engine, tmp_path)
    for pair in pairs:
        for ours, all_rows in zip(results[f"{pair}-True"], results[f"{pair}-False"], strict=True):
            assert "each distinct prompt once" in ours["reason"]
            assert ours["samples"] == all_rows["samples"]
            assert torch.equal(ours["random_state"], all_rows["random_state"])
            assert ours["losses"] == all_rows["losses"]
            assert all(a < b for a, b in zip(ours["tokens"], all_rows["tokens"], strict=True))
    first, second = (of_rank["samples"] for of_rank in results[f"{pairs[0]}-True"])
    if engine != "tp":  # otherwise the ranks share their rows
        longest = [[max(map(len, step)) for step in of_rank] for of_rank in (first, second)]
        assert any(a != b for a, b in zip(*longest, strict=True)), longest


@pytest.mark.parametrize("engine", ["fsdp2", "fsdp2_native"])
def test_a_rank_whose_rows_end_later_is_not_checked_alone(engine: str, workshop: Workshop, tmp_path: Path) -> None:
    """Ranks of FSDP run each forward together, also that of a check."""
    shutil.copytree(workshop.model("untied"), tmp_path / "model")
    GenerationConfig(eos_token_id=[1, *range(60, 90)], pad_token_id=0).save_pretrained(tmp_path / "model")
    results = launch(__file__, ["late-True", "late-False"], engine, tmp_path)
    for ours, all_rows in zip(results["late-True"], results["late-False"], strict=True):
        assert "each distinct prompt once" in ours["reason"]
        assert ours["samples"] == all_rows["samples"]
        assert ours["losses"] == all_rows["losses"]
