"""With `keep_sampling_mask` the ratio to the sampler is 1 on every rank, however the engine shards the head."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from accelerate.utils import gather_object

import trl_ext
from ranks import Rank, run_on_ranks
from tiny import Workshop
from truncated_runs import made, ratios, sampler_noted

KEPT = {"top_k": 8, "top_p": 0.9, "keep_sampling_mask": True, "dynamic_sampling": True}


def off_by(rank: Rank, lora: bool) -> tuple[str, float, int]:
    """Return which rows of the head the ranks used, the largest |ratio - 1|, and the number of ratios."""
    fields: dict[str, Any] = {
        "num_iterations": 2,
        "max_steps": 1,
        "beta": 0.0,
        "gradient_accumulation_steps": 2,
        **KEPT,
    }
    fields |= {"use_cpu": rank.engine == "ddp", "dataloader_pin_memory": False, "gradient_checkpointing": False}
    model = (rank.folder / "model").read_text()
    with sampler_noted() as contexts:
        trainer = made(trl_ext.GRPOTrainer, model, rank.folder / f"{lora}", lora=lora, **fields)
        trainer.train()
    rank.check(trainer)
    # Rows have moved between the ranks
    found = ratios(trainer, {key: x for of_rank in gather_object([contexts]) for key, x in of_rank.items()})
    return trainer.scoring_forwards[0].head_rows, float((found - 1).abs().max()), len(found)


CASES = {f"lora={lora}": partial(off_by, lora=lora) for lora in (True, False)}
IN_TURN = "the ranks broadcast their rows of the weight in slices (FSDP2), because each token keeps only some classes"


@pytest.mark.parametrize("engine", ["fsdp2", pytest.param("ddp", marks=pytest.mark.slow)])
def test_the_ratio_is_one_on_every_rank(engine: str, workshop: Workshop, tmp_path: Path) -> None:
    (tmp_path / "model").write_text(workshop.model("untied"))
    results = run_on_ranks(__file__, list(CASES), engine, tmp_path)
    for name, of_ranks in results.items():
        for rows, largest, count in of_ranks:
            assert rows == (
                IN_TURN if engine == "fsdp2" and name == "lora=True" else "the whole weight is on this rank"
            )
            assert largest < 1e-5, name
            assert count > 20
