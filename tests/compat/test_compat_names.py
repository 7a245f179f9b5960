"""All internals of libraries that trl_ext uses are listed. In a later release, what has moved turns a feature off."""

import importlib
import os
import re
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

import trl_ext
from compat_names import LIBRARIES, unlisted_private_names, used
from later_trl import Change, environment_of, make_later_trl, run_python
from trl_ext.compat import check_deepspeed
from trl_ext.compat.features import FEATURES, features_of
from trl_ext.compat.moved import NAMES, Moved, check_untested, moved
from trl_ext.version import TESTED

GONE = Moved("trl.trainer.dpo_trainer", "y", "`trl.trainer.dpo_trainer` has no `y`")
LATER = {"trl": "1.17.0", "transformers": version("transformers")}
ROOT = Path(__file__).parents[2]


def test_every_internal_that_is_used_is_listed():
    names, nowhere = used()
    assert nowhere == []
    assert sum(map(len, names.values())) > 150
    assert moved(LIBRARIES) == []
    if version("trl") != "1.16.0":
        return  # in another release, a method may belong to a parent class; `moved` has found it there
    # If this fails: python tests/support/compat_names.py
    assert {owner: set(of_owner) for owner, of_owner in names.items()} == {
        owner: set(of_owner) for owner, of_owner in NAMES.items()
    }
    for owner, of_owner in names.items():
        for name, parameters in of_owner.items():
            accepted = NAMES[owner][name]
            assert parameters in accepted if parameters else accepted == [], f"{owner} {name}"


def test_every_private_name_is_ours_or_listed():
    # If this fails: add the name to `INTERNALS` in tests/support/compat_names.py
    assert unlisted_private_names() == []


def test_a_method_of_transformers_trainer_is_listed_once():
    owners = [owner for owner, names in NAMES.items() if "_save_optimizer_and_scheduler" in names]
    assert owners == ["transformers.trainer:Trainer"]


class UsesMore(trl_ext.GRPOTrainer):
    def _set_signature_columns_if_needed(self):
        self._epoch_of_rewards = 0  # ours
        super()._set_signature_columns_if_needed()
        self.add_callback(self.epsilon_low)
        return self._tokenise


def test_a_new_use_of_an_internal_is_noticed():
    names, nowhere = used([UsesMore])
    of_grpo = names["trl.trainer.grpo_trainer:GRPOTrainer"]
    new = {name: of_grpo[name] for name in of_grpo.keys() - NAMES["trl.trainer.grpo_trainer:GRPOTrainer"].keys()}
    assert new == {"_set_signature_columns_if_needed": "(self)", "epsilon_low": ""}
    assert nowhere == ["trl.trainer.grpo_trainer:GRPOTrainer has no `_tokenise`"]


def test_every_changed_name_is_listed(monkeypatch):
    monkeypatch.delattr("trl.trainer.dpo_trainer.create_model_from_path")
    monkeypatch.delattr("trl.DPOTrainer.compute_ref_log_probs")
    monkeypatch.delattr("trl.trainer.utils.is_async_callable")
    monkeypatch.setattr("trl.trainer.grpo_trainer.shuffle_sequence_dict", lambda seq_dict, seed=0: seq_dict)
    monkeypatch.setitem(sys.modules, "trl.cli.accelerate_config", None)
    assert [name.change for name in moved(LATER)] == [
        "`trl.cli.accelerate_config`, which had `resolve_accelerate_config_argument`, is gone",
        "`trl.trainer.dpo_trainer` has no `create_model_from_path`",
        "`trl.trainer.dpo_trainer.DPOTrainer` has no `compute_ref_log_probs`",
        "`trl.trainer.grpo_trainer.shuffle_sequence_dict` takes `(seq_dict, seed=...)` instead of `(seq_dict)`",
        "`trl.trainer.utils` has no `is_async_callable`",
    ]


def test_changed_names_of_the_other_libraries_are_listed(monkeypatch):
    monkeypatch.delattr("accelerate.Accelerator._prepare_cp")
    monkeypatch.setattr("accelerate.state.GradientState._set_sync_gradients", lambda self: None)
    monkeypatch.delattr("peft.utils.other.TrainableTokensWrapper")
    # As if no source had a `self.name`
    monkeypatch.setattr("trl_ext.compat.moved.words_of", lambda module: frozenset())
    monkeypatch.delattr("torch.nn.modules.module._global_forward_hooks")
    changes = [name.change for name in moved(["accelerate", "peft", "torch"])]
    assert {
        "`accelerate.accelerator` has no `._is_accelerate_prepared`",
        "`accelerate.accelerator.Accelerator` has no `_models`",
        "`accelerate.accelerator.Accelerator` has no `_prepare_cp`",
        "`accelerate.state.GradientState._set_sync_gradients` takes `(self)` instead of `(self, sync_gradients)`",
        "`peft.tuners.lora.layer.LoraLayer` has no `lora_variant`",
        "`peft.utils.other` has no `TrainableTokensWrapper`",
        "`torch.nn.modules.module` has no `_global_forward_hooks`",
        '`torch.nn.parallel.distributed` has no `"_ddp_params_and_buffers_to_ignore"`',
    } <= set(changes)


def test_an_untested_deepspeed_is_checked_where_it_runs(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    check_deepspeed()  # of the tested version: without a warning
    monkeypatch.setitem(TESTED, "deepspeed", SpecifierSet("<0.1"))
    with pytest.warns(UserWarning, match=rf"is not tested with deepspeed {re.escape(version('deepspeed'))} "):
        check_deepspeed()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    monkeypatch.delattr("deepspeed.runtime.sequence_parallel.parallel_state_sp._SEQUENCE_PARALLEL_GROUP")
    said = r"does not train with deepspeed .*, because .*parallel_state_sp` has no `_SEQUENCE_PARALLEL_GROUP`\. Run"
    with pytest.warns(UserWarning, match="1 has moved"), pytest.raises(ImportError, match=said):
        check_deepspeed()


def test_a_check_is_recorded(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.warns(UserWarning, match="is not tested") as warned:
        assert check_untested(LATER, TESTED) == []
    assert [str(x.message) for x in warned] == [
        f"trl_ext {trl_ext.__version__} is not tested with trl 1.17.0 (tested: {TESTED['trl']}). Of the internals that "
        "trl_ext uses, none has moved."
    ]
    assert len(list((tmp_path / "trl_ext").iterdir())) == 1
    monkeypatch.setattr("trl_ext.compat.moved.moved", lambda found: [GONE])
    with pytest.warns(UserWarning, match="none has moved"):
        assert check_untested(LATER, TESTED) == []
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"not tested with trl 1\.17\.1 .* 1 has moved\.$"):
            assert check_untested({**LATER, "trl": "1.17.1"}, TESTED) == [GONE]
    assert len(list((tmp_path / "trl_ext").iterdir())) == 2


def test_a_missing_dependency_raises_its_own_error(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def broken(name: str) -> Any:
        raise ImportError("libcudart.so.12: cannot open shared object file")

    with monkeypatch.context() as patch:
        patch.setattr(importlib, "import_module", broken)
        with pytest.raises(ImportError, match=r"^libcudart\.so\.12"):
            check_untested(LATER, TESTED)
    with pytest.warns(UserWarning, match="is not tested"):  # after it is repaired
        check_untested(LATER, TESTED)


def test_an_unwritable_cache_folder_is_no_error(tmp_path: Path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="is not tested"):
        check_untested(LATER, TESTED)


def test_a_later_transformers_is_checked_too_and_only_the_first_rank_warns(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.warns(UserWarning, match=r"is not tested with transformers 5\.99\.0 \("):
        check_untested({"trl": "1.16.0", "transformers": "5.99.0"}, TESTED)
    monkeypatch.setenv("RANK", "1")
    assert check_untested(LATER, TESTED) == []


# The release still works without trl_ext
MOVES = [
    Change("trainer/dpo_trainer.py", r"\bcreate_model_from_path,", "create_model_from_path as create_policy,"),
    Change("trainer/dpo_trainer.py", r"\bcreate_model_from_path\(", "create_policy("),
    Change("trainer/grpo_trainer.py", r"\b_buffered_inputs\b", "_buffer"),
    Change(
        "trainer/grpo_trainer.py",
        r"(?s)(def _calculate_rewards\(self, inputs.*?, )completion_ids_list\b",
        r"\1completion_ids",
    ),
]


def test_a_later_trl_with_changed_names_turns_features_off_or_stops_a_trainer(tmp_path: Path):
    make_later_trl(tmp_path, MOVES)
    code = """
import trl_ext
from trl_ext.compat.features import Features
for trainer in ("DPOTrainer", "GRPOTrainer", "KTOTrainer"):
    getattr(trl_ext, trainer)
    try:
        print(trainer, Features(trainer).off.keys())
    except ImportError as error:
        print(error)
"""
    done = run_python(code, environment_of(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("is not tested with trl 1.17.0") == 1
    assert "internals that trl_ext uses, 3 have moved." in done.stderr
    assert done.stdout.splitlines() == [
        "DPOTrainer dict_keys(['freeing the reference'])",
        f"`GRPOTrainer` of trl_ext {trl_ext.__version__} does not work with trl 1.17.0, because "
        "`trl.trainer.grpo_trainer.GRPOTrainer` has no `_buffered_inputs`. Run `pip install 'trl<1.17,>=1.15'`, or "
        "install a later trl_ext.",
        "KTOTrainer dict_keys([])",
    ]


def test_each_feature_has_a_name_and_each_name_a_place():
    """A feature whose names nobody uses any more is left over."""
    used_features = {
        feature for place, names in NAMES.items() for name in names for feature in features_of(place, name)
    }
    assert used_features == {*FEATURES}
    for needs in FEATURES.values():
        for method in needs.methods.split():
            assert hasattr(trl_ext.DPOTrainer, method) or hasattr(trl_ext.GRPOTrainer, method)


@pytest.mark.slow
def test_a_later_trl_with_the_same_names_trains_with_one_warning(tmp_path: Path):
    make_later_trl(tmp_path, [])
    environment = environment_of(tmp_path, Path(__file__).parent)
    done = run_python("import test_compat_names; test_compat_names._train()", environment)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stderr.count("is not tested with trl 1.17.0") == 1
    assert len(list((tmp_path / "cache" / "trl_ext").iterdir())) == 1


@pytest.mark.parametrize(
    ("package", "beyond", "supported"),
    [("trl", "2.0.0", "<2,>=1.15"), ("trl", "1.14.2", "<2,>=1.15"), ("transformers", "5.16.1", "<6,>=5.17")],
)
def test_a_version_outside_the_range_is_refused(package: str, beyond: str, supported: str, tmp_path: Path):
    (tmp_path / f"{package}-9.dist-info").mkdir()
    (tmp_path / f"{package}-9.dist-info" / "METADATA").write_text(f"Name: {package}\nVersion: {beyond}\n")
    code = "import sys, types; sys.modules['trl_ext'] = x = types.ModuleType('trl_ext'); x.__path__ = [sys.argv[1]];"
    code = code.replace("sys.argv[1]", repr(str(ROOT / "trl_ext"))) + "import trl_ext.compat"
    done = run_python(code, os.environ | {"PYTHONPATH": str(tmp_path)})
    assert f"ImportError: trl_ext works with {package}{supported}, found {package} {beyond}." in done.stderr


def _train() -> None:
    from short_training import Bench
    from tiny import Workshop

    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Workshop(Path(folder)), Path(folder) / "runs")
        bench.dpo()
        bench.grpo()
