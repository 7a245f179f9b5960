"""What `trl-ext explain` says about a run, and what the run then processes, counted at the input embeddings."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import rewards
from tiny import Workshop, preferences, prompts
from token_counts import as_of_a_library
from trl_ext.cli import training
from trl_ext.cli.__main__ import main
from trl_ext.scoring import scorer as exact_head

EOS = 1
Tokens = tuple[int, ...]


@dataclass
class Forward:
    """One scoring forward: the pass that it belongs to, the rows of its batch, and the number of tokens embedded."""

    kind: str  # "policy", "old policy", "reference"; "evaluation" of the policy
    training: bool  # whether the model was in training mode
    given: list[Tokens]  # real tokens of each row
    rows: list[Tokens]  # of those that are scored
    step: int  # optimizer steps before it
    fed: int = 0


@dataclass
class Sampled:
    """One generation batch, as the reward function got it: each `(prompt, completion)` and its reward."""

    rows: list[tuple[Tokens, Tokens]]
    rewards: list[float]

    @property
    def sequences(self) -> list[Tokens]:
        return [prompt + completion for prompt, completion in self.rows]

    @property
    def live(self) -> list[Tokens]:
        """The sequences of groups whose rewards are not all identical."""
        of_prompt: dict[Tokens, set[float]] = {}
        for (prompt, _), reward in zip(self.rows, self.rewards, strict=True):
            of_prompt.setdefault(prompt, set()).add(reward)
        return [prompt + completion for prompt, completion in self.rows if len(of_prompt[prompt]) > 1]

    @property
    def width(self) -> int:
        """The number of columns of the padded batch."""
        return max(len(prompt) for prompt, _ in self.rows) + max(len(completion) for _, completion in self.rows)


@dataclass
class Happened:
    """What a test observed of one run."""

    forwards: list[Forward] = field(default_factory=list)
    sampled: list[Sampled] = field(default_factory=list)
    trainer: Any = None

    def of(self, kind: str) -> list[Forward]:
        return [forward for forward in self.forwards if forward.kind == kind]

    def scored(self, kind: str) -> Counter[Tokens]:
        """Return how often the passes of this kind scored each sequence."""
        return Counter(row for forward in self.of(kind) for row in forward.rows)


@dataclass(frozen=True)
class Run:
    """The arguments of one run, its data, and what follows from both before it starts."""

    method: str
    options: list[str]
    data: dict[str, list[dict[str, str]]]
    folder: Path

    @property
    def arguments(self) -> list[str]:
        return [*self.options, "--dataset_name", str(self.folder)]

    @property
    def rows(self) -> dict[str, list[Tokens]]:
        """For DPO: the sequences of each split, chosen and rejected."""
        return {
            split: [
                (*_tokens(row["prompt"]), *_tokens(row[name]), EOS) for row in rows for name in ("chosen", "rejected")
            ]
            for split, rows in self.data.items()
        }

    @property
    def prompts(self) -> dict[str, set[Tokens]]:
        return {split: {_tokens(row["prompt"]) for row in rows} for split, rows in self.data.items()}


def run_of(method: str, more: list[str], workshop: Workshop, folder: Path) -> Run:
    """Return a run, with its own data in `folder`."""
    make: Callable[..., Any] = preferences if method == "dpo" else prompts
    data = {split: make(rows, seed=seed).to_list() for split, rows, seed in (("train", 8, 3), ("test", 4, 4))}
    (folder / "data").mkdir()
    for split, rows in data.items():
        (folder / "data" / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    options = [
        *("--model_name_or_path", workshop.model("tied"), "--output_dir", str(folder / "out"), "--use_cpu"),
        *("--bf16", "false", "--report_to", "none", "--save_strategy", "no", "--learning_rate", "0.01"),
        *("--no_dataloader_pin_memory", "--disable_tqdm", "true"),
    ]
    if method == "dpo":
        options += ["--per_device_train_batch_size", "2", "--num_train_epochs", "2"]
    else:
        options += [
            *("--per_device_train_batch_size", "4", "--num_generations", "4", "--num_generations_eval", "2"),
            *("--max_completion_length", "6", "--reward_funcs", "rewards.watched", "--max_steps", "2"),
        ]
    return Run(method, [*options, *more], data, folder / "data")


def explained(run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> dict[str, tuple[str, str]]:
    """Return action and reason of each row of the plan of `trl-ext explain`, and of the rows that it does not print."""
    trainers: list[Any] = []
    build = training.build

    def kept(*args: Any, **kwargs: Any) -> Any:
        trainers.append(build(*args, **kwargs))
        return trainers[0]

    with monkeypatch.context() as patched, _reward(Happened(), "id"):
        patched.setattr(training, "build", kept)
        assert main(["explain", run.method, *run.arguments]) == 0
    printed = capsys.readouterr().out
    assert any(str(trainers[0].explain(verbose=verbose)) in printed for verbose in (False, True))
    return rows_of(trainers[0])


def rows_of(trainer: Any) -> dict[str, tuple[str, str]]:
    """Return action and reason of each row of a trainer's plan."""
    return {row.name: (row.action, row.reason) for row in trainer.explain().decisions}


def happened(run: Run, monkeypatch: pytest.MonkeyPatch, reward: str) -> Happened:
    """Train, and return the batches that the models get and the number of tokens that they embed."""
    seen = Happened()
    build, attach = training.build, exact_head.attach_scoring_forward

    def watched(model: Any, *args: Any) -> Any:
        scoring = attach(model, *args)
        scoring.packing.checked = True  # the check of the first batch feeds a few rows more
        scoring.is_compared = True
        _watch(model, seen)
        return scoring

    def built(*args: Any, **kwargs: Any) -> Any:
        seen.trainer = build(*args, **kwargs)
        return seen.trainer

    monkeypatch.setattr(exact_head, "attach_scoring_forward", watched)
    monkeypatch.setattr(training, "build", built)
    with _reward(seen, reward):
        assert main([run.method, *run.arguments]) == 0
    monkeypatch.undo()
    return seen


def _watch(model: Any, seen: Happened) -> None:
    inside: list[Forward] = []

    def begin(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        inside.clear()
        if kwargs.get("fused_lm_head"):
            ids = kwargs["input_ids"].tolist()
            masks = kwargs["attention_mask"].tolist()
            labels = kwargs["labels"].tolist()
            given = [tuple(x for x, there in zip(*row, strict=True) if there) for row in zip(ids, masks, strict=True)]
            rows = [row for row, marks in zip(given, labels, strict=True) if any(mark != -100 for mark in marks)]
            step = 0 if seen.trainer is None else seen.trainer.state.global_step
            kind = _kind(id(module), bool(module.training), seen)
            inside.append(Forward(kind, bool(module.training), given, rows, step))
            seen.forwards.append(inside[0])

    def embed(module: Any, args: tuple[torch.Tensor, ...]) -> None:
        if inside:
            inside[0].fed += args[0].numel()

    model.register_forward_pre_hook(as_of_a_library(begin), with_kwargs=True)
    model.get_input_embeddings().register_forward_pre_hook(as_of_a_library(embed))


def _kind(model_id: int, is_training: bool, seen: Happened) -> str:
    if seen.trainer is None:
        return "reference"  # precomputed: there is no policy yet
    policy = seen.trainer.accelerator.unwrap_model(seen.trainer.model)
    if hasattr(policy, "peft_config"):
        policy = policy.get_base_model()
    is_off = any(getattr(module, "disable_adapters", None) is True for module in policy.modules())
    if model_id != id(policy) or is_off:
        return "reference"
    if torch.is_grad_enabled():
        return "policy"
    return "old policy" if is_training else "evaluation"


@contextmanager
def _reward(seen: Happened, name: str) -> Iterator[None]:
    """Within, `rewards.watched` rewards as `name` does, and writes down what it was given."""

    def watched(prompts: list[str], completion_ids: list[list[int]], **more: Any) -> list[float]:
        given = rewards.REWARDS[name](prompts=prompts, completion_ids=completion_ids, **more)
        rows = [(_tokens(prompt), tuple(ids)) for prompt, ids in zip(prompts, completion_ids, strict=True)]
        seen.sampled.append(Sampled(rows, given))
        return given

    rewards.watched = watched
    try:
        yield
    finally:
        del rewards.watched


def _tokens(text: str) -> Tokens:
    return tuple(3 + int(word[1:]) for word in text.split())


def least(rows: list[Tokens], *, shared: bool) -> int:
    """Return the least number of tokens to process for `rows`; if `shared`, a prefix that rows share counts once."""
    starts = [(row[: n + 1], None if shared else i) for i, row in enumerate(rows) for n in range(len(row) - 1)]
    return max(1, len(set(starts)))
