"""RPO's rewards keep fp32 precision under DeepSpeed in bf16, where transformers rounds every float of a batch."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import trl_ext
from launch import ENGINES, LaunchedRank, launch
from preference_runs import rewarded, run
from tiny import REFERENCE_SEED, Workshop

EXACT = 1.0 + 2**-20  # bf16 has 8 digits of two


def rewards_met(rank: LaunchedRank) -> dict[str, Any]:
    met: list[torch.Tensor] = []
    data = rewarded(8, seed=1).remove_columns("chosen_reward").add_column("chosen_reward", [EXACT] * 8)

    def watch(trainer: Any, batch: dict[str, torch.Tensor]) -> None:
        met.append(batch["chosen_reward"].cpu())

    # Without `use_cpu`, which turns DeepSpeed off, transformers requires a GPU for bf16
    with patch("transformers.training_args.is_torch_bf16_gpu_available", lambda: True):
        seen = run(
            *(trl_ext, Workshop(Path(os.environ["TINY_ROOT"])), rank.folder / "out"),
            watch=watch,
            gradients=False,
            loss_type=["rpo_squared", "sft"],
            sft_label_smoothing=0.2,
            train_dataset=data,
            per_device_train_batch_size=2,
            use_cpu=False,
            bf16=True,
            **rank.training_arguments(),
        )
    rank.check(seen.trainer)
    return {"met": torch.cat(met), "losses": seen.losses}


CASES = {"rewards": rewards_met}


@pytest.mark.slow
def test_rewards_keep_their_precision(workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("deepspeed")
    workshop.model("tied"), workshop.model("tied", REFERENCE_SEED)
    monkeypatch.setenv("TINY_ROOT", str(workshop.root))
    zero2 = ENGINES["zero2"]
    config = {**zero2.config, "deepspeed": {**zero2.config["deepspeed"], "bf16": {"enabled": True}}}
    monkeypatch.setitem(ENGINES, "zero2", replace(zero2, config=config))
    for of_rank in launch(__file__, ["rewards"], "zero2", tmp_path)["rewards"]:
        assert of_rank["met"].dtype == torch.float32
        assert of_rank["met"].tolist() == [EXACT] * 4
        assert all(x > 0 for x in of_rank["losses"])
