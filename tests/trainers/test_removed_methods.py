"""Methods that earlier versions of TRL called are an error or a warning, unless the subclass calls them."""

import importlib.util
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import transformers
import trl

import trl_ext
from short_training import Bench
from tiny import Workshop
from trl_ext.compat.removed import REMOVED_METHODS

# The classes are in files of their own, because a mention of the method in the same file makes the error a warning
LINES = "import functools, torch, trl, trl_ext, transformers\n"
DEAD = {
    "DPO, its loss": (
        "class Own(trl_ext.DPOTrainer):\n    def dpo_loss(self, a, b, c, d):\n        return a - b\n",
        "`Own` has the method `dpo_loss`, which TRL no longer calls. Instead of `dpo_loss`, override `_compute_loss`. "
        "If your code calls it, rename it.",
    ),
    "DPO, several that call each other": (
        "class Own(trl_ext.DPOTrainer):\n"
        "    def get_batch_loss_metrics(self, model, batch, train_eval='train'):\n"
        "        return self.dpo_loss(self.concatenated_forward(model, batch))\n"
        "    def concatenated_forward(self, model, batch):\n        return super().concatenated_forward(model, batch)\n"
        "    def dpo_loss(self, x):\n        return x\n",
        "`Own` has the method `get_batch_loss_metrics`, `concatenated_forward`, `dpo_loss`, which TRL no longer calls.",
    ),
    "DPO, rows": (
        "class Own(trl_ext.DPOTrainer):\n    @staticmethod\n    def tokenize_row(features, processing_class):\n"
        "        return features\n",
        "`Own` has the method `tokenize_row`, which TRL no longer calls. Instead of `tokenize_row`, override",
    ),
    "KTO, a mixin": (
        "class Loss:\n    def kto_loss(self, *logps):\n        return logps\n"
        "class Own(Loss, trl_ext.KTOTrainer):\n    pass\n",
        "`Own` has the method `kto_loss`, which TRL no longer calls. Instead of `kto_loss`, override `_compute_loss`.",
    ),
    "GRPO, its pass": (
        "class Own(trl_ext.GRPOTrainer):\n    @torch.no_grad()\n"
        "    def _get_per_token_logps(self, model, ids, mask, keep):\n        return ids\n",
        "`Own` has the method `_get_per_token_logps`, which TRL no longer calls. Instead of "
        "`_get_per_token_logps`, override `_get_per_token_logps_and_entropies`.",
    ),
    "SFT, the model": (
        "class Own(trl_ext.SFTTrainer):\n    def _prepare_peft_model(self, model, *given):\n        return model\n",
        "`Own` has the method `_prepare_peft_model`, which TRL no longer calls. Instead of "
        "`_prepare_peft_model`, prepare the model before you pass it.",
    ),
    "DPO, samples": (
        "class Own(trl_ext.DPOTrainer):\n    def get_batch_samples(self, model, batch):\n        return batch\n",
        "`Own.get_batch_samples` must take `(epoch_iterator, num_batches, device)`",
    ),
}
LIVE = {
    "DPO, a helper of its own loss": (
        "class Own(trl_ext.DPOTrainer):\n    def get_batch_logps(self, x):\n        return x\n"
        "    def _compute_loss(self, *given, **named):\n"
        "        return self.get_batch_logps(super()._compute_loss(*given, **named))\n"
    ),
    "DPO, a helper of a helper": (
        "class Own(trl_ext.DPOTrainer):\n    def dpo_loss(self, x):\n        return self.store_metrics(x)\n"
        "    def store_metrics(self, x):\n        return x\n"
        "    def log(self, logs, *given):\n        super().log([self.dpo_loss(x) for x in [logs]][0], *given)\n"
    ),
    "DPO, by its name": (
        "class Own(trl_ext.DPOTrainer):\n    def dpo_loss(self, x):\n        return x\n"
        "    def log(self, logs, *given):\n        super().log(getattr(self, 'dpo_loss')(logs), *given)\n"
    ),
    "DPO, in a wrapped method": (
        "def noted(method):\n    @functools.wraps(method)\n    def called(*given, **named):\n"
        "        return method(*given, **named)\n    return called\n"
        "class Own(trl_ext.DPOTrainer):\n    @staticmethod\n    def tokenize_row(x):\n        return x\n"
        "    @noted\n    def log(self, logs, *given):\n        super().log(self.tokenize_row(logs), *given)\n"
    ),
    "DPO, other methods": (
        "class Own(trl_ext.DPOTrainer):\n    def compute_ref_log_probs(self, *given):\n"
        "        return super().compute_ref_log_probs(*given)\n"
        "    def get_batch_samples(self, *given):\n        return super().get_batch_samples(*given)\n"
    ),
}


def _module(lines: str, folder: Path) -> ModuleType:
    file = folder / "own_trainer.py"
    file.write_text(LINES + lines)
    spec = importlib.util.spec_from_file_location("own_trainer", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _train(name: str, module: ModuleType, workshop: Workshop, folder: Path, **given: Any) -> Bench:
    bench = Bench(workshop, folder)
    getattr(bench, name.split(",")[0].lower())(subclass=lambda _: module.Own, **given)
    return bench


@pytest.mark.parametrize("name", DEAD)
def test_a_method_that_nothing_calls_stops_before_training(name: str, workshop: Workshop, tmp_path: Path) -> None:
    lines, message = DEAD[name]
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the message is compared
        _train(name, _module(lines, tmp_path), workshop, tmp_path)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    "name", [x if x == "DPO, by its name" else pytest.param(x, marks=pytest.mark.slow) for x in LIVE]
)
def test_a_method_that_the_subclass_calls_trains(
    name: str, workshop: Workshop, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = _train(name, _module(LIVE[name], tmp_path), workshop, tmp_path)
    assert bench.trainer.state.global_step == 1
    assert "no longer calls" not in caplog.text


CALLED_FROM_OUTSIDE = "\ndef inspect_pairs(trainer):\n    return trainer.dpo_loss(1, 2, 3, 4)\n"
CALLBACK = (
    "class Watch(transformers.TrainerCallback):\n    def on_step_end(self, *given, **named):\n"
    "        self.trainer.dpo_loss(1, 2, 3, 4)\n"
)


@pytest.mark.slow
def test_a_method_that_a_script_may_call_is_a_warning(
    workshop: Workshop, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = DEAD["DPO, its loss"][0] + CALLED_FROM_OUTSIDE
    assert _train("DPO", _module(lines, tmp_path), workshop, tmp_path).trainer.state.global_step == 1
    assert "`Own` has the method `dpo_loss`, which TRL no longer calls." in caplog.text


@pytest.mark.slow
def test_a_method_that_a_callback_calls_trains(
    workshop: Workshop, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module = _module(DEAD["DPO, its loss"][0] + CALLBACK, tmp_path)
    watch = module.Watch()
    watch.trainer = module.Own.__new__(module.Own)
    assert _train("DPO", module, workshop, tmp_path, callbacks=[watch]).trainer.state.global_step == 1
    assert "no longer calls" not in caplog.text


@pytest.mark.parametrize("patched", [trl.DPOTrainer, trl_ext.DPOTrainer], ids=["TRL's", "ours"])
def test_a_patched_class_is_noticed(
    patched: type, workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = _module("def own_loss(self, x):\n    return x\n", tmp_path)
    monkeypatch.setattr(patched, "concatenated_forward", module.own_loss, raising=False)
    with pytest.raises(ValueError, match="`DPOTrainer` has the method `concatenated_forward`, which TRL no longer"):
        Bench(workshop, tmp_path).dpo()


def test_no_library_calls_a_removed_method() -> None:
    for name, methods in REMOVED_METHODS.items():
        trainer = getattr(trl, name)
        sources = " ".join(inspect.getsource(cls) for cls in (trainer, transformers.Trainer))
        for method in methods:
            assert not hasattr(trainer, method)
            assert f"self.{method}(" not in sources


def test_what_is_named_instead_exists() -> None:
    for name, methods in REMOVED_METHODS.items():
        for remedy in methods.values():
            for word in remedy.split("`")[1::2]:
                attribute = word.removeprefix("trl.").split("[")[0].split(".")
                known = [trl, getattr(trl, name), getattr(trl, name.replace("Trainer", "Config"))]
                parameters = inspect.signature(getattr(trl, name)).parameters
                is_metrics = attribute == ["self", "_metrics"]
                is_vllm = attribute == ["vllm_generation", "sync_weights"]
                assert is_metrics or is_vllm or word in parameters or any(hasattr(x, attribute[0]) for x in known), word
