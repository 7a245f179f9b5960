"""Each mistake of mistakes.txt stops before the first step, in one line with what was given and what to do."""

import importlib.util
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trl
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import PreTrainedModel
from trl.rewards import accuracy_reward, think_format_reward

import trl_ext
from mistakes import MESSAGES, NO_STEP, TRAINS, USER, read_table
from short_training import PROMPTS, Bench
from tiers import fast_first
from tiny import Workshop
from trl_ext.checks.arguments import (
    check_dpo_arguments,
    check_grpo_arguments,
    check_kto_arguments,
    check_rloo_arguments,
    check_sft_arguments,
)
from trl_ext.checks.data import check_rewards
from trl_ext.checks.values import check_numbers
from trl_ext.compat.choices import (
    ADVANTAGE_CHOICES,
    DPO_CHOICES,
    GRPO_CHOICES,
    TRUNCATION_MODES,
    compared_values,
)

MISTAKES = read_table()
# Beginnings of messages that do not begin with the name of an argument
BEGINNINGS = ("Unknown `", "No part of the model would be trained", "The train data set has no column `chosen_reward`")


@pytest.fixture
def bench(workshop: Workshop, tmp_path: Path) -> Iterator[Any]:
    """A bench that counts forward passes of models."""
    made: Any = Bench(workshop, tmp_path)
    made.passes = 0

    def count(module: Any, _: Any) -> None:
        made.passes += isinstance(module, PreTrainedModel)

    hook = register_module_forward_pre_hook(count)
    yield made
    hook.remove()


def without_folders(message: str, bench: Any) -> str:
    return message.replace(str(bench.folder), "…").replace(str(bench.workshop.root), "…")


def test_there_are_as_many_mistakes_as_the_readme_says() -> None:
    assert len(MISTAKES) > 150


@pytest.mark.parametrize("name", fast_first(MISTAKES, *[name for name, mistake in MISTAKES.items() if mistake.is_fast]))
def test_a_mistake_stops_before_the_first_step_and_names_the_argument(name: str, bench: Any) -> None:
    mistake = MISTAKES[name]
    with pytest.raises((ValueError, TypeError)) as raised:
        mistake.make(bench)
    message = without_folders(str(raised.value), bench)
    if "[...]" in mistake.message:
        assert re.fullmatch(".*".join(map(re.escape, mistake.message.split("[...]"))), message), message
    else:
        assert message == mistake.message
        assert re.match(r"`\w+|\w+(Config|Trainer)\.__init__\(\)", message) or message.startswith(BEGINNINGS)
    assert "\n" not in message
    if mistake.section != "Seen after a forward pass":
        assert bench.passes == 0
    assert bench.trainer is None or bench.trainer.state.global_step == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, mistake in MISTAKES.items() if mistake.stock])
def test_what_stock_trl_does_with_it(name: str, bench: Any) -> None:
    bench.package, mistake = trl, MISTAKES[name]
    if mistake.stock in (TRAINS, NO_STEP):
        mistake.make(bench)
        assert bool(bench.trainer.state.global_step) is (mistake.stock == TRAINS)
        return
    with pytest.raises(Exception) as raised:  # noqa: PT011 - of any type: the message is compared
        mistake.make(bench)
    said = without_folders(f"{type(raised.value).__name__}: {raised.value}", bench)
    assert any(message in said for message in str(mistake.stock).split(" OR ")), said


# Values that look like mistakes, with which TRL trains
RIGHT: dict[str, tuple[str, dict[str, Any]]] = {
    "no bound on the gradient": ("DPO", {"max_grad_norm": math.inf}),
    "a gradient that is only measured": ("SFT", {"max_grad_norm": 0.0}),
    "steps in place of epochs": ("KTO", {"num_train_epochs": -1, "max_steps": 3}),
    "a whole run of evaluations": ("DPO", {"num_train_epochs": 0, "max_steps": -1}),
    "no momentum": ("DPO", {"adam_beta1": 0.0, "adam_epsilon": 0.0, "learning_rate": 0.0}),
    "checkpoints at the end alone": ("DPO", {"save_steps": -1}),
    "JSON": ("DPO", {"model_init_kwargs": '{"dtype": "float32"}', "accelerator_config": '{"split_batches": false}'}),
    "a dictionary": ("GRPO", {"chat_template_kwargs": {}, "generation_kwargs": None}),
    "all tokens, vLLM's way": ("GRPO", {"top_k": -1, "use_vllm": True}),
    "all tokens": ("RLOO", {"top_k": 0, "top_p": 1.0, "min_p": None}),
    "an override of a value": ("GRPO", {"top_p": 2.0, "generation_kwargs": {"top_p": 0.9}}),
    "no bound above": ("GRPO", {"epsilon_high": math.inf, "vllm_importance_sampling_clip_max": math.inf}),
    "labels that are as often right as wrong": ("DPO", {"loss_type": "aot", "label_smoothing": 0.5}),
}
CHECKS: dict[str, Callable[[Any], None]] = {
    "SFT": lambda config: check_sft_arguments(config, own_loss=False),
    "DPO": lambda config: check_dpo_arguments(config, own_loss=False),
    "KTO": lambda config: check_kto_arguments(config, own_loss=False),
    "GRPO": lambda config: check_grpo_arguments(config, own_loss=False, own_advantages=False, own_generation=False),
    "RLOO": lambda config: check_rloo_arguments(config, own_loss=False, own_advantages=False, own_generation=False),
}


@pytest.mark.parametrize("case", RIGHT)
@pytest.mark.parametrize("library", [trl_ext, trl])
def test_what_trl_trains_is_no_mistake(case: str, library: Any, tmp_path: Path) -> None:
    method, fields = RIGHT[case]
    config = getattr(library, f"{method}Config")(str(tmp_path), use_cpu=True, bf16=False, report_to="none", **fields)
    check_numbers(config)
    CHECKS[method](config)


def as_messages(rows: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": [[USER] for _ in rows["prompt"]]}


@pytest.mark.parametrize("data", [MESSAGES, MESSAGES.to_iterable_dataset(), PROMPTS.with_transform(as_messages)])
def test_a_reward_that_reads_messages_takes_them(data: Any, tmp_path: Path) -> None:
    given = {"reward_funcs": [accuracy_reward, think_format_reward], "train_dataset": data}
    config = trl_ext.GRPOConfig(str(tmp_path), use_cpu=True, bf16=False)
    check_rewards(given, config, has_environments=False, columns_are_added=True)


def test_another_version_of_trl_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / "trl-2.0.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: trl\nVersion: 2.0.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    file = Path(trl_ext.__file__).parent / "compat" / "__init__.py"
    spec = importlib.util.spec_from_file_location("trl_ext.compat_again", file, submodule_search_locations=[])
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ImportError, match=r"works with trl\S+, found trl 2\.0\.0\. Run `pip install 'trl\S+'`\.$"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_choices_are_those_of_trl() -> None:
    of_dpo = {**DPO_CHOICES, "truncation_mode": TRUNCATION_MODES}
    of_trainers = {trl.DPOTrainer: of_dpo, trl.GRPOTrainer: {**GRPO_CHOICES, **ADVANTAGE_CHOICES}}
    for trainer, choices in of_trainers.items():
        for name, allowed in choices.items():
            assert compared_values(trainer, name) == set(allowed), name
