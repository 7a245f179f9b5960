"""An evaluation before training on two ranks changes nothing in the training, or stops with what to do."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import launch
import trl_ext
from short_training import PROMPTS, TEXTS, reward
from tiny import Workshop, lora_config

BUILD: dict[str, Callable[..., Any]] = {
    "sft": lambda **given: trl_ext.SFTTrainer(args=trl_ext.SFTConfig(**given), train_dataset=TEXTS, **_common()),
    "sft-lora": lambda **given: trl_ext.SFTTrainer(
        args=trl_ext.SFTConfig(**given), train_dataset=TEXTS, peft_config=lora_config(), **_common()
    ),
    "grpo": lambda **given: trl_ext.GRPOTrainer(
        reward_funcs=reward,
        args=trl_ext.GRPOConfig(num_generations=2, max_completion_length=3, **given),
        train_dataset=PROMPTS,
        **{**_common(), "eval_dataset": PROMPTS},
    ),
}


def _common() -> dict[str, Any]:
    return {"model": os.environ["TINY_MODEL"], "eval_dataset": TEXTS}


def weights(rank: launch.LaunchedRank, kind: str, *before: str, **config: Any) -> dict[str, torch.Tensor]:
    """Train two steps, after calls of the methods `before`, and return the trained weights."""
    folder = rank.folder / "-".join([kind, *before, str(len(config))])
    trainer = BUILD[kind](
        output_dir=str(folder),
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        max_steps=2,
        learning_rate=1e-2,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        model_init_kwargs=rank.model_arguments() or None,
        **{"bf16": False, **rank.training_arguments(), **config},
    )
    for method in before:
        getattr(trainer, method)(*([trainer.eval_dataset] if method == "predict" else []))
    torch.manual_seed(trainer.args.seed)  # an evaluation of GRPO samples
    trainer.train()
    rank.check(trainer)
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    return rank.whole({name: param for name, param in model.named_parameters() if param.requires_grad})


def alike(kind: str, *before: str, **config: Any) -> Callable[[launch.LaunchedRank], Any]:
    def case(rank: launch.LaunchedRank) -> Any:
        trained, expected = weights(rank, kind, *before, **config), weights(rank, kind, **config)
        assert trained.keys() == expected.keys()
        for name, weight in trained.items():
            torch.testing.assert_close(weight, expected[name], msg=lambda text, name=name: f"{name}: {text}")
        return trained

    return case


def stops(method: str, words: str) -> Callable[[launch.LaunchedRank], None]:
    def case(rank: launch.LaunchedRank) -> None:
        with pytest.raises(ValueError, match=words):
            weights(rank, "sft", method)
        rank.checked = True  # nothing has trained

    return case


CASES = {
    "evaluate": alike("sft", "evaluate"),
    "evaluate-twice-lora": alike("sft-lora", "evaluate", "evaluate"),
    "predict": alike("sft", "predict", prediction_loss_only=True),
    "bf16": alike("sft", "evaluate", bf16=True, use_cpu=True),
    "grpo": alike("grpo", "evaluate"),
    "no-optimizer": stops("evaluate", r"`evaluate\(\)` before `train\(\)` does not work under .* `eval_on_start=True`"),
    "no-engine": stops("evaluate", r"`train\(\)` after `evaluate\(\)` does not work under DeepSpeed ZeRO-3: .*start"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "cases"),
    [
        ("ddp", ["evaluate", "evaluate-twice-lora", "predict", "bf16", "grpo"]),
        ("fsdp2", ["no-optimizer"]),
        ("fsdp2_native", ["evaluate"]),
        ("zero2", ["no-optimizer"]),
        ("zero3", ["no-engine"]),
    ],
)
def test_an_evaluation_before_training_changes_nothing_or_stops(
    engine: str, cases: list[str], workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINY_MODEL", workshop.model("untied"))
    found = launch.launch(__file__, cases, engine, tmp_path)
    for of_ranks in found.values():
        if of_ranks[0] is not None:  # gradients were averaged
            assert all(torch.equal(weight, of_ranks[1][name]) for name, weight in of_ranks[0].items())
