"""With the plugin, axolotl's DPO trainer trains as without it, on fewer tokens; else one line says that it is off."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.filterwarnings("ignore")  # of axolotl's imports

LORA = {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_linear": True}


def run(folder: Path, options: dict[str, Any], **others: Any) -> dict[str, Any]:
    import axolotl_runs  # imports axolotl, which warns

    return axolotl_runs.run(folder, options, **others)


def assert_equal(ours: dict[str, Any], axolotls: dict[str, Any], tolerance: float) -> None:
    assert len(ours["log"]) == len(axolotls["log"])
    for entry, expected in zip(ours["log"], axolotls["log"], strict=True):
        margin = expected.get("rewards/margins", expected.get("eval_rewards/margins"))
        if margin is not None and abs(margin) < 1e-6:
            # The policy still is the reference: rounding decides which of two equal rewards is larger
            entry, expected = ({k: v for k, v in x.items() if "accuracies" not in k} for x in (entry, expected))
        assert entry == pytest.approx(expected, abs=tolerance, rel=tolerance)
    assert ours["weights"].keys() == axolotls["weights"].keys()
    for name, weight in ours["weights"].items():
        assert (weight - axolotls["weights"][name]).abs().max() <= tolerance
    assert axolotls["moved"] > 1e-3


@pytest.mark.parametrize(
    "options",
    [
        {},
        LORA,
        {"gradient_checkpointing": True},
        LORA | {"gradient_checkpointing": True, "gradient_accumulation_steps": 2, "micro_batch_size": 2},
        LORA | {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        LORA | {"rl_adapter_ref_model": True},
        {"precompute_ref_log_probs": True},
        LORA | {"precompute_ref_log_probs": True},
        LORA | {"lora_target_modules": ["q_proj", "lm_head"], "lora_target_linear": False},
        LORA | {"rl_beta": 0.5, "dpo_label_smoothing": 0.1, "dpo_padding_free": True},
    ],
    ids=[
        *("full", "lora", "full-checkpointing", "lora-checkpointing-accumulation", "lora-reentrant"),
        *("lora-reference-model", "full-precomputed", "lora-precomputed", "lora-head", "lora-ignored-options"),
    ],
)
def test_training_equals_axolotls(options: dict[str, Any], tmp_path: Path) -> None:
    options = options | {"eval_steps": 2}
    axolotls, ours = (run(tmp_path, options, plugin=plugin, eval_rows=5) for plugin in (False, True))
    assert type(axolotls["trainer"]).__name__ == "AxolotlDPOTrainer"
    assert type(ours["trainer"]).__name__ == "ExactDPOTrainer"
    assert ours["lines"] == []
    assert_equal(ours, axolotls, 1e-5)
    assert ours["tokens"] < 0.9 * axolotls["tokens"]


def test_qlora_trains_as_axolotls(tmp_path: Path) -> None:
    """Its adapter is in bf16, whose rounding moves weights by more than 1e-5."""
    options = LORA | {"adapter": "qlora", "load_in_4bit": True}
    axolotls, ours = (run(tmp_path, options, plugin=plugin) for plugin in (False, True))
    assert ours["lines"] == []
    assert_equal(ours | {"weights": {}}, axolotls | {"weights": {}}, 1e-3)
    assert ours["tokens"] < 0.9 * axolotls["tokens"]


@pytest.mark.parametrize(
    ("options", "arguments", "reason"),
    [
        ({"rl": "ipo"}, {}, "it covers only `rl: dpo`, not `rl: ipo`"),
        ({"dpo_loss_type": ["hinge"]}, {}, "it covers only `loss_type=['sigmoid']`, not ['hinge']"),
        (
            {"dpo_loss_type": ["sigmoid"], "dpo_loss_weights": [0.5]},
            {},
            "it covers only `loss_weights=[1.0]`, not [0.5]",
        ),
        ({"dpo_use_weighting": True}, {}, "it covers only `use_weighting=False`, not True"),
        ({}, {"f_divergence_type": "js_divergence"}, "it covers only `f_divergence_type='reverse_kl'`, not 'js_div"),
        ({}, {"ld_alpha": 0.5}, "it covers only `ld_alpha=None`, not 0.5"),
        ({}, {"sync_ref_model": True, "ref_model_sync_steps": 1}, "it covers only `sync_ref_model=False`, not True"),
        (
            {},
            {"neftune_noise_alpha": 5.0},
            "two passes of the model may differ, because `neftune_noise_alpha` adds noise",
        ),
        (
            LORA | {"lora_dropout": 0.5},
            {"disable_dropout": False},
            "two passes of the model may differ, because dropout",
        ),
        (LORA, {"bias": "all"}, "training changes `"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_axolotl_trains_what_is_not_covered(
    options: dict[str, Any], arguments: dict[str, Any], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if arguments.get("bias"):  # no key of axolotl's config sets it
        import peft

        with_bias = peft.LoraConfig.__post_init__

        def post_init(config: Any) -> None:
            config.bias = "all"
            with_bias(config)

        monkeypatch.setattr(peft.LoraConfig, "__post_init__", post_init)
        options = options | {"base_model": str(with_biases(tmp_path / "model"))}
        arguments = {}
    axolotls, ours = (run(tmp_path, options, plugin=plugin, arguments=arguments) for plugin in (False, True))
    assert len(ours["lines"]) == 1
    assert ours["lines"][0].startswith(f"trl_ext is off, and axolotl trains without it: {reason}")
    assert ours["log"] == axolotls["log"]
    assert ours["tokens"] == axolotls["tokens"]
    assert all(torch.equal(x, axolotls["weights"][name]) for name, x in ours["weights"].items())


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"rl": "dpo"}, None),
        ({"rl": "dpo", "context_parallel_size": 1, "trainer_cls": "trl_ext.axolotl.ExactDPOTrainer"}, None),
        ({}, "it covers only `rl: dpo`, not `rl: None`"),
        ({"rl": "dpo", "trainer_cls": "mine.Trainer"}, "`trainer_cls: mine.Trainer` is set"),
        ({"rl": "dpo", "context_parallel_size": 2}, "it was not tried with `context_parallel_size: 2`"),
        ({"rl": "dpo", "trl": "1.10.0"}, "it covers only the DPO loss of trl==1.9.*, not that of trl 1.10.0"),
    ],
)
def test_the_plugin_chooses_the_trainer(
    config: dict[str, Any], reason: str | None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trl_ext import axolotl

    config = dict(config)
    monkeypatch.setattr(axolotl.trl, "__version__", config.pop("trl", "1.9.0"))
    trainer_cls = config.get("trainer_cls")
    axolotl.TrlExtPlugin().register(config)
    assert config.get("trainer_cls") == (trainer_cls if reason else "trl_ext.axolotl.ExactDPOTrainer")
    lines = [f"trl_ext is off, and axolotl trains without it: {reason}."] if reason else []
    assert caplog.messages == lines


def with_biases(folder: Path) -> Path:
    import axolotl_runs
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(axolotl_runs.CONFIG["base_model"])
    model.config.attention_bias = True
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(model.config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(axolotl_runs.CONFIG["base_model"]).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("options", [{}, LORA], ids=["full", "lora"])
def test_bf16_runs_under_autocast(options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trl_ext import core

    score = core.score
    dtypes: list[torch.dtype] = []

    def with_dtypes(model: Any, *args: Any, **kwargs: Any) -> Any:
        (mlp, *_) = (x for x in model.modules() if type(x).__name__ == "LlamaMLP")
        hook = mlp.register_forward_hook(lambda _, args, output: dtypes.append(output.dtype))
        scores = score(model, *args, **kwargs)
        hook.remove()
        assert set(dtypes) == {torch.bfloat16}
        assert scores.log_probs.dtype == torch.float32
        return scores

    axolotls = run(tmp_path, options, plugin=False, bf16=True, arguments={"use_cpu": True})
    monkeypatch.setattr(core, "score", with_dtypes)
    ours = run(tmp_path, options, plugin=True, bf16=True, arguments={"use_cpu": True})
    assert ours["lines"] == []
    assert dtypes
    losses, expected = ([x["loss"] for x in done["log"] if "loss" in x] for done in (ours, axolotls))
    assert losses == pytest.approx(expected, abs=2e-2)  # axolotl's log-probs come from logits that bf16 rounds


def test_two_ranks_train_as_axolotls(tmp_path: Path) -> None:
    done = []
    for name in ("axolotl", "plugin"):
        folder = tmp_path / name
        folder.mkdir()
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        command += [str(Path(__file__).with_name("axolotl_runs.py")), str(folder), name]
        finished = subprocess.run(
            command, capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        assert finished.returncode == 0, finished.stderr[-4000:]
        done.append(torch.load(folder / "run.pt", weights_only=False))
    axolotls, ours = done
    assert ours["lines"] == []
    assert_equal(ours, axolotls, 1e-5)
    assert ours["tokens"] < 0.9 * axolotls["tokens"]


def test_the_model_card_names_the_data_sets(tmp_path: Path) -> None:
    axolotls, ours = (run(tmp_path, {"num_epochs": 1}, plugin=plugin, rows=4) for plugin in (False, True))
    assert ours["trainer"].dataset_tags == axolotls["trainer"].dataset_tags != []
