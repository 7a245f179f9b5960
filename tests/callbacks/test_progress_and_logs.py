"""What a user sees of a run: counted tokens in the logs, the progress bar, the model card."""

import io
import itertools
import os
import re
from email.message import Message
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
from huggingface_hub import ModelCard
from tqdm import tqdm
from transformers import AutoModelForCausalLM, ProgressCallback, TrainerCallback

import trl_ext
from tiny import REFERENCE_SEED, Workshop, preferences, prompts, scripted_rollout
from token_counts import Feed, count_feeds
from trl_ext.callbacks.progress import ThroughputProgress, add_to_model_card, throughput


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(ids[0] % 7) for ids in completion_ids]


def built(kind: str, workshop: Workshop, folder: Path, callbacks: Any = (), **config: Any) -> Any:
    config = {
        **{"output_dir": str(folder), "max_steps": 4, "logging_steps": 2, "use_cpu": True, "bf16": False},
        **{"report_to": "none", "save_strategy": "no", "learning_rate": 1e-3},
        **config,
    }
    common = {"model": workshop.model("tied"), "callbacks": list(callbacks)}
    if kind == "dpo":
        config.setdefault("per_device_train_batch_size", 2)
        args = trl_ext.DPOConfig(**config)
        data = preferences(8, seed=1)
        reference = AutoModelForCausalLM.from_pretrained(workshop.model("tied", REFERENCE_SEED))
        return trl_ext.DPOTrainer(args=args, train_dataset=data, eval_dataset=data, ref_model=reference, **common)
    args = trl_ext.GRPOConfig(per_device_train_batch_size=4, num_generations=4, max_completion_length=6, **config)
    given = {"reward_funcs": reward, "rollout_func": scripted_rollout, "train_dataset": prompts(8, seed=1)}
    return trl_ext.GRPOTrainer(args=args, **given, **common)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("dpo", {"eval_strategy": "steps", "eval_steps": 2}),
        pytest.param("dpo", {"padding_free": False, "reference_store": "off"}, marks=pytest.mark.slow),
        ("grpo", {"beta": 0.1, "num_iterations": 2}),
        pytest.param("grpo", {"max_tokens_per_micro_batch": 24}, marks=pytest.mark.slow),
    ],
)
def test_tokens_in_the_logs_are_those_at_the_embedding(
    kind: str, config: dict[str, Any], workshop: Workshop, tmp_path: Path
) -> None:
    trainer = built(kind, workshop, tmp_path, **config)
    passes: list[Feed] = []
    passes_and_checks: list[Feed] = []
    count_feeds(trainer, passes)
    count_feeds(trainer, passes_and_checks, with_checks=True)
    trainer.train()
    logs = trainer.state.log_history
    checked_tokens = sum(x.tokens for x in passes_and_checks) - sum(x.tokens for x in passes)
    assert checked_tokens > 0
    assert [x["tokens_processed/checks"] for x in logs if "tokens_processed/checks" in x] == [checked_tokens]
    for mode in ("", "eval_") if kind == "dpo" else ("",):
        for name, grad in (("with_gradient", True), ("without_gradient", False)):
            fed = sum(x.tokens for x in passes if x.grad is grad and x.training is (mode == ""))
            key = f"{mode}tokens_processed/{name}"
            logged = [x[key] for x in logs if key in x]
            assert sum(logged) == fed
            assert 0.0 not in logged  # absent, not zero
    assert all(x["head/tokens"] > 0 for x in logs if "loss" in x)


class Bar(TrainerCallback):
    """The text after the bar, at each log."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.said: list[str] = []

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        bar = next(x for x in self.trainer.callback_handler.callbacks if isinstance(x, ProgressCallback))
        self.said.append(getattr(bar.training_bar, "postfix", None) or "")


def test_the_bar_says_tokens_a_second_and_what_was_skipped(workshop: Workshop, tmp_path: Path) -> None:
    seen = Bar()
    seen.trainer = trainer = built("dpo", workshop, tmp_path, disable_tqdm=False, num_train_epochs=2)
    trainer.add_callback(seen)
    assert [type(x) for x in trainer.callback_handler.callbacks if isinstance(x, ProgressCallback)] == [
        ThroughputProgress
    ]
    trainer.train()
    assert re.fullmatch(r"[\d.]+[kM]? tok/s, skips \d+%", seen.said[0])


def test_the_bar_has_the_tokens_that_hooks_count(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = itertools.count(step=4)  # from one log to the next
    monkeypatch.setattr("trl_ext.callbacks.progress.time", SimpleNamespace(monotonic=lambda: float(next(seconds))))
    seen = Bar()
    seen.trainer = trainer = built("grpo", workshop, tmp_path, disable_tqdm=False, beta=0.1, logging_steps=4)
    trainer.add_callback(seen)
    feeds: list[Feed] = []
    count_feeds(trainer, feeds)
    trainer.train()
    tokens = sum(x.tokens for x in feeds)
    assert tokens > 0
    assert seen.said[0].startswith(f"{tqdm.format_sizeof(tokens / 4)} tok/s, skips ")


def test_skipped_work_is_never_negative(workshop: Workshop, tmp_path: Path) -> None:
    # The second run has other pairs in its first batch: it scores them, and checks stored values with a further pass
    for seed in (1, 2):
        options = {"max_steps": 1, "logging_steps": 1, "padding_free": False, "seed": seed}
        trainer = built("dpo", workshop, tmp_path / str(seed), **options)
        trainer.train()
        (log,) = (x for x in trainer.state.log_history if "loss" in x)
        assert log["skipped/passes"] == 0.0
        assert log["skipped/tokens"] >= 0.0


def test_rows_that_share_tokens_are_scored_one_by_one(workshop: Workshop, tmp_path: Path) -> None:
    """The head computes more log-probs than there are tokens that ran, where completions are equal."""

    def equal(given: list[str], trainer: Any) -> dict[str, Any]:
        return {
            "prompt_ids": [[7]] * len(given),
            "completion_ids": [[8, 9, 10, 11]] * len(given),
            "logprobs": None,
        }

    trainer = built("grpo", workshop, tmp_path, max_steps=1, logging_steps=1)
    trainer.rollout_func = equal
    trainer.reward_funcs = [lambda completions, **_: [float(place) for place, _ in enumerate(completions)]]
    trainer.train()
    log = next(x for x in trainer.state.log_history if "loss" in x)
    assert log["head/tokens"] == 4 * 4
    assert log["tokens_processed/with_gradient"] < 4 * 4


def test_the_bar_counts_only_tokens_that_ran() -> None:
    logs = {"tokens_processed/with_gradient": 900.0, "tokens_processed/without_gradient": 100.0, "skipped/tokens": 0.0}
    assert throughput(logs, 0.5) == "2.00k tok/s"
    logs["skipped/tokens"] = 3000.0
    assert throughput(logs, 0.5) == "2.00k tok/s, skips 75%"


@pytest.mark.parametrize(("step", "total"), [(16, 16), (512, 1000), (12_345, 100_000)])
def test_the_bar_remains_a_bar_at_80_columns(step: int, total: int) -> None:
    text = throughput({"tokens_processed/with_gradient": 47_000.0, "skipped/tokens": 54_000.0}, 1.0)
    screen = io.StringIO()
    with tqdm(total=total, ncols=79, file=screen, disable=False, smoothing=0, ascii=True) as bar:
        bar.start_t -= 5.0 * step  # five seconds a step
        bar.set_postfix_str(text, refresh=False)
        bar.update(step)
        line = str(bar)
    assert len(line) <= 79
    assert line.endswith(f", {text}]")  # whole
    assert len(line.split("|")[1]) >= 3


def test_a_bar_of_the_users_own_is_left_alone(workshop: Workshop, tmp_path: Path) -> None:
    own = ProgressCallback(max_str_len=7)
    trainer = built("dpo", workshop, tmp_path, callbacks=[own], disable_tqdm=False)
    bars = [x for x in trainer.callback_handler.callbacks if isinstance(x, ProgressCallback)]
    assert bars[0] is own
    assert [type(x) for x in bars[1:]] == [ThroughputProgress]


def test_no_bar_is_made_where_there_is_none(workshop: Workshop, tmp_path: Path) -> None:
    trainer = built("grpo", workshop, tmp_path, disable_tqdm=True)
    assert not [x for x in trainer.callback_handler.callbacks if isinstance(x, ProgressCallback)]


@pytest.mark.parametrize("kind", ["dpo", pytest.param("grpo", marks=pytest.mark.slow)])
def test_the_card_names_reference_losses_and_settings(kind: str, workshop: Workshop, tmp_path: Path) -> None:
    losses = {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.25]} if kind == "dpo" else {"num_iterations": 2}
    trainer = built(kind, workshop, tmp_path, share_prompts=False, **losses)
    trainer.create_model_card(model_name="tiny")
    trainer.create_model_card(model_name="tiny")
    card = (tmp_path / "README.md").read_text()
    assert card.count("## What ran in training") == 1
    assert "`share_prompts`: `False`" in card
    assert "padding_free`:" not in card  # a default
    assert trainer.explain().table(folders=False) in card
    assert card.index("## What ran in training") < card.index("## Citations")
    assert re.search(rf"Trained with (trl_ext|\[trl_ext\]\(\S+\)) {trl_ext.__version__} and:", card)
    assert card.endswith("```\n")
    assert {"trl", kind, "trl_ext"} <= set(ModelCard(card).data.tags)
    assert trainer.model.model_tags == ["trl", kind, "trl_ext"]
    if kind == "dpo":
        assert "`loss_type`: `['sigmoid', 'sft']`" in card
        assert "`loss_weights`: `[1.0, 0.25]`" in card
        assert "reference      reuse  The reference (the model given as `ref_model`)" in card
    else:
        assert "`loss_type`: `'dapo'`" in card
        assert "old policy     reuse  The training forward's log-probs" in card


LOCAL_PATH = re.compile(r"""(?:^|[\s`'"(=:])(?:~|[A-Z]:)?[/\\](?![/\\])\S+""", re.MULTILINE)


@pytest.mark.parametrize("folder", [None, "store"])
def test_the_card_has_no_local_path(folder: str | None, workshop: Workshop, tmp_path: Path) -> None:
    store = {} if folder is None else {"reference_store_dir": str(tmp_path / folder)}
    trainer = built("dpo", workshop, tmp_path / "out", save_strategy="steps", save_steps=4, **store)
    trainer.train()
    where = trainer.plan["reference"].folder
    assert where is not None
    assert Path(where).is_dir()
    assert LOCAL_PATH.search(str(trainer.explain()))  # the plan says where the store is
    card = (tmp_path / "out" / "README.md").read_text()
    assert "kept on disk" in card
    assert not LOCAL_PATH.search(card)
    for path in (where, str(tmp_path), os.path.expanduser("~"), datasets.config.HF_DATASETS_CACHE):
        assert str(path) not in card


def test_the_card_links_the_project_where_the_package_names_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    card = tmp_path / "README.md"
    args = SimpleNamespace(loss_type="dapo", beta=0.0)
    for urls, name in (([], "trl_ext"), (["Homepage, https://x.org/y"], "[trl_ext](https://x.org/y)")):
        about = Message()
        about["Version"] = "1.2.3"
        for url in urls:
            about["Project-URL"] = url
        monkeypatch.setattr("trl_ext.callbacks.progress.metadata", lambda _, about=about: about)
        card.write_text("# A card without citations")
        add_to_model_card(card, args, {}, "a plan")
        assert f"Trained with {name} 1.2.3 and:" in card.read_text()
        assert card.read_text().endswith("```\n")
