"""Whatever is replaced in TRL must be there: what is set in vain would train in another way, silently."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import trl

import trl_ext
from tiny import Workshop, preferences
from trl_ext.compat import dpo
from trl_ext.compat.replaced import names_replaced, replaced


def _fails(block: AbstractContextManager[Any], name: str) -> None:
    with pytest.raises(AttributeError, match=name), block:
        pass


def test_a_name_of_a_module_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    with names_replaced(trl.RLOOTrainer, use_adapter=None):
        assert trl.trainer.rloo_trainer.use_adapter is None
    monkeypatch.delattr("trl.trainer.rloo_trainer.use_adapter")
    _fails(names_replaced(trl.RLOOTrainer, use_adapter=None), "use_adapter")
    assert not hasattr(trl.trainer.rloo_trainer, "use_adapter")


def test_a_field_of_a_config_that_is_gone(tmp_path: Path) -> None:
    config = trl.SFTConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none")
    _fails(replaced(config, padding_free=False, padding_removed=False), "padding_removed")
    assert not hasattr(config, "padding_removed")
    with replaced(config, padding_free=True):
        assert config.padding_free
    assert not config.padding_free


def test_a_member_of_a_trainer_that_is_gone(workshop: Workshop, tmp_path: Path) -> None:
    args = trl_ext.DPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none")
    trainer: Any = trl_ext.DPOTrainer(workshop.model("tied"), args=args, train_dataset=preferences(8, seed=1))
    with dpo.loss_of_scores(trainer, [("hinge", 1.0)], None):
        assert trainer.loss_types == ["hinge"]
    del trainer.loss_weights
    _fails(dpo.loss_of_scores(trainer, [("hinge", 1.0)], None), "loss_weights")
