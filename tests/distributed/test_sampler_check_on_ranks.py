"""`sampler_check` reads no weights of a sharded policy: between a forward and its backward that would gather them."""

from pathlib import Path

import torch
from trl.distributed import DistributedBackend

import trl_ext
from ranks import Rank, run_on_ranks
from tiny import Workshop
from trl_ext.sampler.engine import EngineGeneration
from truncated_runs import made


class AsksForStaleWeights(trl_ext.GRPOTrainer):
    def compute_loss(self, *positional, **keywords):
        loss = super().compute_loss(*positional, **keywords)
        generation = object.__new__(EngineGeneration)  # without an engine
        generation.model, generation.accelerator = self.model, self.accelerator
        generation._dist = DistributedBackend(self.accelerator)
        generation.mode, generation.tensor_parallel_size = "colocate", 1
        generation.enable_sleep_mode, generation._adapters = False, None
        self.answers = [*getattr(self, "answers", []), generation.stale_weights()]
        return loss


def asked(rank: Rank) -> tuple[list[list[str] | None], bool]:
    """Return what each micro-batch was answered, and whether the weights are finite after training."""
    model = (rank.folder / "model").read_text()
    trainer = made(
        *(AsksForStaleWeights, model, rank.folder / "asked"),
        **{"max_steps": 2, "use_cpu": False, "dataloader_pin_memory": False, "gradient_checkpointing": False},
    )
    trainer.train()
    rank.check(trainer)
    return trainer.answers, all(torch.isfinite(x).all() for x in trainer.model.parameters())


CASES = {"asked": asked}


def test_a_sharded_policy_is_not_read(workshop: Workshop, tmp_path: Path) -> None:
    (tmp_path / "model").write_text(workshop.model("untied"))
    results = run_on_ranks(__file__, list(CASES), "fsdp2", tmp_path)
    for answers, finite in results["asked"]:
        assert len(answers) >= 2
        assert set(answers) == {None}
        assert finite
