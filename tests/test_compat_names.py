"""What trl_ext/compat/ names of TRL is where it is named; what has moved is listed, with the file that needs it."""

import sys

import trl

from compat_names import names, source_of


def moved(found) -> str:
    return "\n".join(sorted({f"{x.file}: {x.owner} has no `{x.name}`" for x in found if not x.there}))


def test_every_internal_of_trl_that_compat_names_is_there():
    found = list(names())
    assert len(found) > 100
    assert not moved(found), f"trl {trl.__version__} has moved:\n{moved(found)}"


def test_what_a_release_has_renamed_is_listed():
    def of_next_release(trainer: type) -> str:
        source = source_of(trainer)
        return source.replace("_buffered_inputs", "_buffer") if trainer is trl.GRPOTrainer else source

    listed = moved(names(of_next_release)).splitlines()
    assert listed == ["grpo.py: trl.trainer.grpo_trainer.GRPOTrainer has no `_buffered_inputs`"]


def test_a_name_that_a_module_has_lost_is_listed(monkeypatch):
    monkeypatch.delattr("trl.trainer.dpo_trainer.create_model_from_path")
    assert moved(names()).splitlines() == ["reference.py: trl.trainer.dpo_trainer has no `create_model_from_path`"]


def test_what_is_gone_whole_is_listed(monkeypatch):
    monkeypatch.delattr("trl.trainer.utils.FusedCausalLMOutput")
    monkeypatch.delattr("trl.DPOTrainer.compute_ref_log_probs")
    monkeypatch.delattr("trl.GRPOTrainer._tokenize_prompts")
    monkeypatch.setitem(sys.modules, "trl.cli.accelerate_config", None)
    listed = moved(names()).splitlines()
    assert "head.py: FusedCausalLMOutput has no `log_probs`" in listed
    assert "data.py: GRPOTrainer has no `_tokenize_prompts`" in listed
    assert "by call: DPOTrainer.compute_ref_log_probs() has no `inputs`" in listed
    assert "__init__.py: trl.cli.accelerate_config has no `resolve_accelerate_config_argument`" in listed
