"""Arguments are checked before anything changes, and read when they are used."""

from pathlib import Path

import pytest
import trl
from peft import get_peft_model

import trl_ext
import trl_ext.trainers.dpo
import trl_ext.trainers.grpo
from short_training import Bench
from tiny import Workshop, lora_config


@pytest.fixture
def bench(workshop: Workshop, tmp_path: Path) -> Bench:
    return Bench(workshop, tmp_path)


def test_fields_that_change_after_the_trainer_is_built_count(bench: Bench):
    def later(trainer: type) -> type:
        class Later(trainer):
            def train(self, *args, **kwargs):
                self.args.reference_store = "off"
                self.args.reward_scale = 5.0
                return super().train(*args, **kwargs)

        return Later

    bench.dpo(subclass=later)
    assert bench.trainer.plan.source == "pass"
    assert bench.trainer._dpo_terms.options.reward_scale == 5.0


def test_a_refused_argument_leaves_the_adapters_as_they_were(bench: Bench):
    model = get_peft_model(bench.loaded(), lora_config(), "first")
    model.add_adapter("second", lora_config())
    trained = {name: param.requires_grad for name, param in model.named_parameters()}
    for wrong in ({"beta": -1.0}, {"ref_model": "name"}):
        with pytest.raises((ValueError, TypeError)):
            bench.dpo(model=model, policy_adapter_name="second", ref_adapter_name="first", **wrong)
        assert model.active_adapter == "first"
        assert trained == {name: param.requires_grad for name, param in model.named_parameters()}


def test_one_loss_type_is_no_list_and_several_may_be_a_tuple(bench: Bench):
    with pytest.raises(ValueError, match=r"Unknown `loss_type` \['dapo'\]"):
        bench.grpo(loss_type=["dapo"])
    bench.dpo(loss_type=("sigmoid", "sft"))


def test_the_configs_are_found_where_older_pickles_name_them():
    assert trl_ext.trainers.dpo.DPOConfig is trl_ext.DPOConfig
    assert trl_ext.trainers.grpo.GRPOConfig is trl_ext.GRPOConfig


def test_trls_own_config_has_none_of_our_settings(tmp_path: Path):
    config = trl.DPOConfig(output_dir=str(tmp_path), bf16=False, use_cpu=True)
    assert trl_ext.trainers.dpo.AddedDPOFields.changed(config) == {}
