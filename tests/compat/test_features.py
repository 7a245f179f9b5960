"""What has moved in a library turns features off where they are used, and nothing else."""

import warnings
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest

import trl_ext
from later_trl import environment_of, run_python
from short_training import Bench
from tiny import Workshop
from trl_ext.compat.features import FEATURES, Features, config_of_trl
from trl_ext.compat.moved import NAMES, Moved, _fingerprint
from trl_ext.trainers.checkpointing import Checkpoints

# A name of each place -> the trainers that lose a feature by it, or stop
CONCERNED = {
    "trl.trainer.utils|is_async_callable": "GRPO RLOO",
    "trl.trainer.utils|disable_dropout_in_model": "DPO KTO",
    "trl.trainer.dpo_trainer:DPOTrainer|beta": "DPO",
    "trl.trainer.rloo_trainer|shuffle_sequence_dict": "RLOO",
    "transformers.modeling_utils|ALL_ATTENTION_FUNCTIONS": "DPO KTO",  # and sequence parallelism, without a warning
    "transformers.generation.utils:GenerationMixin|_get_logits_processor": "GRPO",
    "transformers.trainer|rotate_checkpoints": "SFT DPO KTO GRPO RLOO Reward Distillation",
    "peft.utils.other|AuxiliaryTrainingWrapper": "",
    "trl.scripts.utils:TrlParser|error": "",
}


@pytest.mark.parametrize("text", CONCERNED)
def test_only_trainers_that_have_a_feature_say_that_it_is_off(text: str, monkeypatch: pytest.MonkeyPatch):
    place, _, name = text.partition("|")
    assert name in NAMES[place]
    monkeypatch.setattr("trl_ext.compat.features.MOVED", [Moved(place, name, f"`{place}` has no `{name}`")])
    concerned = []
    for trainer in ("SFT", "DPO", "KTO", "GRPO", "RLOO", "Reward", "Distillation"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                Features(f"{trainer}Trainer").warn()
            except ImportError as error:
                caught.append(error)  # type: ignore[arg-type]
        for line in map(str, (getattr(x, "message", x) for x in caught)):
            concerned.append(trainer)
            assert line.startswith(f"`{trainer}Trainer` of trl_ext {trl_ext.__version__} ")
            package = place.partition(".")[0]
            assert f" with {package} {version(package)}, because `{place}` has no `{name}`. Run `pip install" in line
            assert "\n" not in line
    assert concerned == CONCERNED[text].split()


def test_what_is_asked_for_and_off_is_one_line(monkeypatch: pytest.MonkeyPatch):
    names = [Moved("peft.utils.other", "TrainableTokensWrapper", "`peft.utils.other` has no `TrainableTokensWrapper`")]
    monkeypatch.setattr("trl_ext.compat.features.MOVED", names)
    features = Features("SFTTrainer")
    features.require("vLLM")
    with pytest.raises(ImportError, match=r"cannot train PEFT adapters with peft \S+, because .*`, or install a later"):
        features.require("adapters")


@pytest.mark.filterwarnings("ignore:.*leaves the checks of data to TRL:UserWarning")
@pytest.mark.parametrize("trainer", ["grpo", "rloo"])
def test_without_checks_of_data_prompts_are_not_read(
    trainer: str, workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    names = [Moved("datasets.arrow_dataset:Dataset", "_indices", "`datasets.Dataset` has no `_indices`")]
    monkeypatch.setattr("trl_ext.compat.features.MOVED", names)
    monkeypatch.setattr(f"trl_ext.trainers.{trainer}.check_prompts", lambda *_: pytest.fail("reads `_indices`"))
    getattr(Bench(workshop, tmp_path), trainer)()


@pytest.mark.parametrize(("spelled", "meaning"), [("true", True), ("False", None), (None, None), ("folder", "folder")])
def test_trls_checkpoints_take_spelled_words(spelled: str | None, meaning: bool | str | None):
    assert Checkpoints(SimpleNamespace(), are_trls=True).find(spelled) == meaning  # type: ignore[arg-type]


def test_trls_checkpoints_do_not_take_auto(monkeypatch: pytest.MonkeyPatch):
    names = [Moved("transformers.trainer", "rotate_checkpoints", "`transformers.trainer` has no `rotate_checkpoints`")]
    monkeypatch.setattr("trl_ext.compat.features.MOVED", names)
    trainer = SimpleNamespace(_features=Features("DPOTrainer"))
    with pytest.raises(ImportError, match='does not take `resume_from_checkpoint="auto"` with transformers'):
        Checkpoints(trainer, are_trls=True).find("auto")  # type: ignore[arg-type]


def test_a_config_that_trl_no_longer_has_stops_its_trainer_alone():
    gone = config_of_trl("NoSuchConfig")
    with pytest.raises(ImportError, match=r"`NoSuchConfig` of trl_ext .* because `trl` has no `NoSuchConfig`\. Run"):
        gone(output_dir="x")


def test_methods_of_features_that_are_off_give_way_to_a_class_between_ours_and_trls(tmp_path: Path):
    code = """
import sys, warnings
warnings.simplefilter("ignore")
import trl_ext.compat
from trl_ext.compat.moved import Moved
trl_ext.compat.MOVED.append(Moved("trl.trainer.dpo_trainer:DPOTrainer", "_prepare_dataset", "`x` has no `y`"))
from pathlib import Path
import trl
from short_training import Bench
from tiny import Workshop

class Own(trl.DPOTrainer):
    def _prepare_dataset(self, dataset, *positional, **keywords):
        return super()._prepare_dataset(dataset.select(range(4, 6)), *positional, **keywords)

class Both(trl_ext.DPOTrainer, Own):
    pass

bench = Bench(Workshop(Path(sys.argv[1])), Path(sys.argv[1]) / "runs")
bench.dpo(subclass=lambda base: Both)
print(len(bench.trainer.train_dataset))
""".replace("sys.argv[1]", repr(str(tmp_path)))
    done = run_python(code, environment_of(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split()[-1] == "2"


def test_a_changed_file_of_any_package_is_checked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An editable installation keeps its version while its files change."""
    (tmp_path / "peft" / "utils").mkdir(parents=True)
    for name in ("__init__.py", "utils/__init__.py", "utils/other.py"):
        (tmp_path / "peft" / name).touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "peft")
    before = _fingerprint({"peft": "0.99.0"})
    assert _fingerprint({"peft": "0.99.0"}) == before
    (tmp_path / "peft" / "utils" / "other.py").write_text("x = 1\n")
    assert _fingerprint({"peft": "0.99.0"}) != before


def test_each_feature_is_of_known_trainers():
    trainers = {name for name in trl_ext.__all__ if name.endswith("Trainer")}
    assert all({*needs.trainers.split()} <= trainers for needs in FEATURES.values())
