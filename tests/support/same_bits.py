"""Trains many short cases with the code of two trees, and compares what a user can see, bit for bit.

Compared are the final weights, all logged metrics but times, the best metric, the text of `explain()`, warnings,
errors, and in draws of the fuzzer what the user's code read. Run it before and after a change that must change nothing:

    make same-bits                                      this tree beside the last commit
    make same-bits OLD=304e36c OPTIONS='--draws 200'    beside another commit, with 200 draws
    python tests/support/same_bits.py --old FOLDER      beside a folder with another checkout

    --trainers dpo,kto        only these trainers; by default all five
    --cases 'dpo-*' grpo-vespo    only these of the named cases, and no draw; `--list` shows the names
    --draws 100 --first 40    draws of `fuzz.py`, here the 100 from number 40 on (of these trainers); 24 by default
    --remember FOLDER         keep what the old tree gave, and use it again: half of the time

The exit status is 1 if something differs, and each case that differs has a line for each difference. A case takes about
0.4 s of a core in each tree, after 8 s for imports; the two trees run side by side. The cases of two ranks (gloo) start
four more processes.

Both trees are driven by the same files of `tests/support`, those next to this one, which know only the public API: what
this file imports must import no module of the package but `trl_ext` itself.
"""

import argparse
import dataclasses
import fnmatch
import functools
import gc
import hashlib
import importlib.metadata
import logging
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ["TQDM_DISABLE"] = "1"

import datasets
import torch

import other_drop_in_cases
import ranks
import trl_ext
from case_trainers import WALL_CLOCK, Trainers, build_trainer
from drop_in_cases import CASES as DROP_IN_CASES
from drop_in_cases import Case
from fuzz_fields import draw_case
from fuzz_overrides import OfUser, Seen, draw_override, overridden
from tiny import Workshop

TRAINERS = ("sft", "dpo", "kto", "grpo", "rloo", "reward", "distillation")
DRAWS = 24
SUPPORT = Path(__file__).parent
NEW = SUPPORT.parents[1]
# In the folder of a run: tiny models, which both trees read
MODELS = "models"


def _case(
    name: str, setup: str = "full", model: str = "tied", *, ours: dict[str, Any] | None = None, **config: Any
) -> Case:
    of_case = {field.name for field in dataclasses.fields(Case)} & config.keys()
    kwargs = {key: config.pop(key) for key in of_case}
    trainer = name.split("-")[0]
    if trainer == "rloo":
        kwargs = {"rollout": "generate", **kwargs}
    defaults = {"steps": 3, "learning_rate": 0.02, "rows": 16, "prompts": 16}
    return Case(name, trainer, setup, model, config, ours=ours or {}, **{**defaults, **kwargs})


_EVALUATION = {"eval_strategy": "steps", "eval_steps": 1}
_ACCUMULATION = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
_REUSE = {"num_iterations": 2, "steps_per_generation": 2}

# Each of our options, and each path of a step, once for each trainer that has it
_OF_ONE_PROCESS = (
    _case("sft-defaults"),
    _case("sft-evaluation", **_EVALUATION),
    _case("sft-packed", form="text", packing=True, max_length=24),
    _case("sft-smoothed-lora", "lora", label_smoothing_factor=0.1, **_ACCUMULATION),
    _case("sft-dft", loss_type="dft", ours={"head_chunk_size": 3}),
    _case("sft-dense", ours={"head": "dense", "on_non_finite_loss": "skip"}),
    _case("sft-experts", "full", "experts"),
    _case("dpo-defaults"),
    _case("dpo-evaluation", **_EVALUATION),
    _case("dpo-lora", "lora", **_ACCUMULATION),
    _case("dpo-ref_model-untied", "ref_model", "untied", calls=("evaluate", "train", "evaluate")),
    _case("dpo-parts", ours={"max_tokens_per_micro_batch": 60}, gradient_accumulation_steps=2),
    _case("dpo-parts-reference", "lora", ours={"max_tokens_per_micro_batch": 60, "reference_store": "off"}),
    _case("dpo-memory", ours={"reference_store": "memory"}, steps=6),
    _case("dpo-epochs", steps=-1, num_train_epochs=2),
    _case("dpo-off", ours={"reference_store": "off", "share_prompts": False}),
    _case("dpo-padded", ours={"share_prompts": False}, padding_free=False),
    _case("dpo-dense", "ref_model", ours={"head": "dense"}),
    _case("dpo-precompute", precompute_ref_log_probs=True, **_EVALUATION),
    _case("dpo-sync", sync_ref_model=True, ref_model_sync_steps=1, ref_model_mixup_alpha=0.3),
    _case("dpo-weighting", "ref_model", use_weighting=True, **_ACCUMULATION),
    _case("dpo-ld_alpha", "lora", ld_alpha=0.5),
    _case("dpo-mixed", "ref_model", loss_type=["sigmoid", "hinge", "sft"], loss_weights=[1.0, 0.3, 0.5]),
    _case("dpo-cdpo", "lora", loss_type=["cdpo"], label_smoothing=0.1),
    _case("dpo-ipo_sum", "lora", loss_type=["ipo_sum"], learning_rate=5e-3),
    _case("dpo-rpo_squared", "lora", loss_type=["rpo_squared"], reward_columns=True, ours={"reward_scale": 2.0}),
    _case(
        "dpo-rpo_forward_kl",
        "lora",
        loss_type=["rpo_forward_kl", "sigmoid"],
        reward_columns=True,
        ours={"rpo_average_log_probs": True},
        **_EVALUATION,
    ),
    _case("dpo-rpo_backward_kl", loss_type=["rpo_backward_kl"], reward_columns=True),
    _case("dpo-sft", loss_type=["sft"], ours={"sft_label_smoothing": 0.1}),
    _case(
        "dpo-sft-megatron",
        "lora",
        loss_type=["sigmoid", "sft"],
        ours={"sft_label_smoothing": 0.1, "sft_label_smoothing_convention": "megatron"},
    ),
    _case("dpo-divergence", "ref_model", f_divergence_type="js_divergence", loss_type="exo_pair", label_smoothing=0.1),
    _case("dpo-bco", loss_type="bco_pair", ours={"reference_device": "cpu"}),
    _case("dpo-experts", "full", "experts"),
    _case("dpo-prompt_tuning", "prompt_tuning", learning_rate=1.0),
    _case("dpo-skip", ours={"on_non_finite_loss": "skip"}),
    _case("kto-defaults"),
    _case("kto-evaluation", **_EVALUATION),
    _case("kto-lora", "lora", **_ACCUMULATION),
    _case("kto-apo", "ref_model", "untied", loss_type="apo_zero_unpaired", beta=0.5),
    _case("kto-memory", ours={"reference_store": "memory"}, steps=6),
    _case("kto-off", ours={"reference_store": "off"}),
    _case("kto-precompute", "lora", precompute_ref_log_probs=True, **_EVALUATION),
    _case("kto-sync", sync_ref_model=True, ref_model_sync_steps=1, ref_model_mixup_alpha=0.3),
    _case("kto-padded", ours={"padding_free": False, "head": "dense"}),
    _case("kto-experts", "full", "experts"),
    _case("kto-skip", "ref_adapter", ours={"on_non_finite_loss": "skip"}),
    _case("grpo-defaults"),
    _case("grpo-generated", rollout="generate", rewards=("id", "short"), **_EVALUATION),
    _case("grpo-beta-iterations", "ref_model", num_iterations=2, gradient_accumulation_steps=2, steps_per_generation=4),
    _case("grpo-misaligned", gradient_accumulation_steps=1, steps_per_generation=3),
    _case("grpo-half-dead", rewards=("half_dead",), gradient_accumulation_steps=2),
    _case("grpo-half-dead-beta", "lora", rewards=("half_dead",), beta=0.1, gradient_accumulation_steps=2),
    _case("grpo-dead", rewards=("dead",)),
    _case("grpo-tenths", rewards=("tenths",), ours={"zero_advantages_of_equal_rewards": False}),
    _case("grpo-parts", "lora", ours={"max_tokens_per_micro_batch": 60}, beta=0.1, gradient_accumulation_steps=2),
    _case("grpo-parts-iterations", ours={"max_tokens_per_micro_batch": 60}, gradient_accumulation_steps=2, **_REUSE),
    _case("grpo-vespo", loss_type="vespo", **_REUSE),
    _case("grpo-luspo", "lora", loss_type="luspo", beta=0.1, **_REUSE),
    _case("grpo-sapo-tools", "lora", rollout="masked", loss_type="sapo", beta=0.1, **_REUSE),
    _case("grpo-cispo", loss_type="cispo", epsilon_high=1.1, **_REUSE),
    _case("grpo-dr_grpo", loss_type="dr_grpo", scale_rewards="none", ours={"keep_groups_together": False}),
    _case("grpo-delta", delta=1.05, epsilon_high=0.1, learning_rate=0.1, **_REUSE),
    _case("grpo-one_token", "lora", max_completion_length=1, beta=0.1),
    _case("grpo-truncated", mask_truncated_completions=True, rewards=("half_dead",)),
    _case("grpo-sequence", importance_sampling_level="sequence", **_REUSE),
    _case("grpo-entropy", entropy_coef=0.1, **_EVALUATION),
    _case("grpo-adaptive", use_adaptive_entropy=True, entropy_coef=0.02, entropy_target=10.0),
    _case("grpo-quantile", "lora", top_entropy_quantile=0.2, beta=0.1, **_REUSE),
    _case("grpo-off_policy", off_policy_mask_threshold=0.01, **_REUSE),
    _case("grpo-sampling_mask", rollout="generate", top_k=5, ours={"keep_sampling_mask": True}, **_REUSE),
    _case("grpo-sampling_mask-lora", "lora", rollout="generate", top_k=9, beta=0.1, ours={"keep_sampling_mask": True}),
    _case("grpo-top_p", rollout="generate", top_p=0.8, **_REUSE),
    _case("grpo-dynamic", rewards=("half_dead",), ours={"dynamic_sampling": True, "dynamic_sampling_max_draws": 3}),
    _case("grpo-trusted", rollout="sampler", ours={"trust_sampling_log_probs": True}, learning_rate=1e-3),
    _case("grpo-sampler", rollout="near_sampler", vllm=True, ours={"sampler_check": "warn"}),
    _case("grpo-sampler-sequence", "lora", rollout="near_sampler", vllm=True, importance_sampling_level="sequence"),
    _case("grpo-forced", ours={"force_on_policy_ratio": True}),
    _case("grpo-skip", ours={"on_non_finite_loss": "skip"}, rewards=("half_dead",)),
    _case("grpo-padded", ours={"padding_free": False, "share_prompts": False}, rewards=("half_dead",)),
    _case("grpo-dense", ours={"head": "dense"}, gradient_checkpointing=True),
    _case("grpo-experts", "full", "experts", gradient_accumulation_steps=2),
    _case("grpo-sync", "ref_model", sync_ref_model=True, ref_model_sync_steps=1, ref_model_mixup_alpha=0.3),
    _case("grpo-chat-tools", "full", "chat", rollout="tool_call", max_completion_length=120),
    _case("rloo-defaults"),
    _case("rloo-evaluation", "lora", **_EVALUATION),
    _case("rloo-beta", beta=0.1, gradient_accumulation_steps=2),
    _case("rloo-iterations", beta=0.0, **_REUSE),
    _case("rloo-misaligned", "lora", gradient_accumulation_steps=1, steps_per_generation=3),
    _case("rloo-half-dead", beta=0.0, rewards=("half_dead",), gradient_accumulation_steps=2),
    _case("rloo-dead", beta=0.0, rewards=("dead",)),
    _case("rloo-normalized", normalize_advantages=True, rewards=("id", "short")),
    _case("rloo-truncated", "lora", mask_truncated_completions=True, max_completion_length=16),
    _case("rloo-padded", ours={"padding_free": False, "head": "dense"}, beta=0.0),
    _case("rloo-skip", ours={"on_non_finite_loss": "skip", "keep_groups_together": False}, beta=0.0),
    _case("rloo-sync", sync_ref_model=True, ref_model_sync_steps=1, ref_model_mixup_alpha=0.3),
    _case("rloo-experts", "full", "experts"),
    _case("reward-defaults"),
    _case("reward-evaluation", "lora", margins=True, **_EVALUATION),
    _case("reward-centered", center_rewards_coefficient=0.1, **_ACCUMULATION),
    _case("reward-padded", ours={"padding_free": False, "on_non_finite_loss": "skip"}),
    _case("reward-unshared", "full", "untied", ours={"share_prompts": False}, gradient_checkpointing=True),
    _case("reward-experts", "full", "experts"),
)

_OF_TWO_RANKS = (
    _case("sft-two_ranks", **_ACCUMULATION),
    _case("dpo-two_ranks", "full", "untied", rows=32, **_ACCUMULATION, **_EVALUATION),
    _case("dpo-two_ranks-parts", "lora", "untied", rows=32, ours={"max_tokens_per_micro_batch": 60}),
    _case("dpo-two_ranks-unbalanced", ours={"balance": False}, rows=32),
    _case("kto-two_ranks", rows=32, gradient_accumulation_steps=2),
    _case("grpo-two_ranks", "lora", "untied", beta=0.1, gradient_accumulation_steps=2),
    _case("grpo-two_ranks-iterations", rewards=("half_dead",), gradient_accumulation_steps=2, **_REUSE),
    _case("grpo-two_ranks-parts", ours={"max_tokens_per_micro_batch": 60}, steps_per_generation=2),
    _case("rloo-two_ranks", beta=0.0, rollout="generate", gradient_accumulation_steps=2),
)

NAMED = {case.name: case for case in (*_OF_ONE_PROCESS, *_OF_TWO_RANKS)}
DROP_INS = {f"stock-{case.name}": case for case in [*DROP_IN_CASES.values(), *other_drop_in_cases.CASES.values()]}


@dataclass
class Outcome:
    """What a user sees of a training. Each field is compared."""

    options: list[str]  # of ours, that the config of this tree knows
    error: str = ""
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    logs: list[dict[str, float]] = field(default_factory=list)
    best: tuple[Any, ...] = ()
    plan: str = ""
    warnings: list[str] = field(default_factory=list)
    read: Seen = field(default_factory=list)


def differences(old: Outcome, new: Outcome) -> list[str]:
    """Return a line for each field of two outcomes that is not the same."""
    if old.error != new.error:
        return [f"error: {old.error or 'none'} -> {new.error or 'none'}"]
    wrong = [line for name in ("options", "plan", "warnings", "read", "best") for line in _text(name, old, new)]
    if old.weights.keys() != new.weights.keys():
        wrong.append(f"weights: other names: {sorted(old.weights.keys() ^ new.weights.keys())[:4]}")
    else:
        changed = [name for name in old.weights if not _is_same(old.weights[name], new.weights[name])]
        if changed:
            far = max(_distance(old.weights[name], new.weights[name]) for name in changed)
            wrong.append(f"weights: {len(changed)} of {len(old.weights)} differ, by {far:.1e} at most: {changed[0]}")
    if len(old.logs) != len(new.logs):
        wrong.append(f"logs: {len(old.logs)} -> {len(new.logs)} entries")
    for number, (before, after) in enumerate(zip(old.logs, new.logs, strict=False)):
        if before.keys() != after.keys():
            gone, added = sorted(before.keys() - after.keys()), sorted(after.keys() - before.keys())
            wrong.append(f"log {number}: gone {gone}, added {added}")
        # Of a float, `repr` has every bit but the sign of a NaN
        metrics = [key for key in before.keys() & after.keys() if repr(before[key]) != repr(after[key])]
        wrong += [f"log {number}: {key}: {before[key]!r} -> {after[key]!r}" for key in sorted(metrics)]
    return wrong


def _text(name: str, old: Outcome, new: Outcome) -> list[str]:
    """Return the first line of a field that differs."""
    before, after = getattr(old, name), getattr(new, name)
    lines = [value.splitlines() if isinstance(value, str) else list(map(repr, value)) for value in (before, after)]
    if lines[0] == lines[1]:
        return []
    longest = max(map(len, lines))
    padded = [[*x, *["(none)"] * (longest - len(x))] for x in lines]
    place = next(i for i in range(longest) if padded[0][i] != padded[1][i])
    return [f"{name}: line {place}: {padded[0][place]} -> {padded[1][place]}"]


def _is_same(old: torch.Tensor, new: torch.Tensor) -> bool:
    if old.dtype != new.dtype or old.shape != new.shape:
        return False
    return torch.equal(old.contiguous().view(torch.uint8), new.contiguous().view(torch.uint8))


def _distance(old: torch.Tensor, new: torch.Tensor) -> float:
    return (old.double() - new.double()).abs().max().item() if old.shape == new.shape else float("inf")


# What runs in the process of one tree


class _Texts(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def outcome(case: Case, override: OfUser, workshop: Workshop, rank: ranks.Rank | None = None) -> Outcome:
    """Train `case` with the package that this process imports.

    Args:
        override (`OfUser`): what a user's code does.
        rank (`Rank`, *optional*): this rank, if there are several.
    """
    trainers = replace(Trainers.of(trl_ext), records_batches=False)
    trainer_class = getattr(trainers, f"{case.trainer}_trainer")
    result = Outcome(options=sorted(trainers.only_ours(case)))
    handler = _Texts()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        logging.getLogger("trl_ext").addHandler(handler)
        try:
            with (
                patch.object(datasets.config, "HF_DATASETS_CACHE", Path(folder) / "datasets"),
                overridden(override, trainer_class, result.read) as (of_user, prepare),
            ):
                torch.manual_seed(0)
                trainer = build_trainer(case, trainers, workshop, folder, of_user)
                prepare(trainer)
                _train(case, trainer, result)
                if rank is not None:
                    rank.check(trainer)
        except Exception as error:
            if rank is not None:
                raise
            result.error = f"{type(error).__name__}: {error}".replace(folder, "FOLDER")
            result.read.clear()
        finally:
            logging.getLogger("trl_ext").removeHandler(handler)
        texts = [*handler.texts, *(str(warning.message) for warning in caught)]
        result.warnings = [text.replace(folder, "FOLDER") for text in texts]
    return result


def _train(case: Case, trainer: Any, result: Outcome) -> None:
    history: list[dict[str, Any]] = []
    for call in case.calls:
        returned = getattr(trainer, call)()
        history += trainer.state.log_history if call == "train" else [returned]
    result.logs = [{key: x for key, x in log.items() if not key.endswith(WALL_CLOCK)} for log in history]
    result.weights = {name: x.detach().clone() for name, x in trainer.model.state_dict().items()}
    result.best = (trainer.state.best_metric, trainer.state.best_global_step)
    result.plan = trainer.explain(verbose=True).table(folders=False)


def _of_name(name: str) -> tuple[Case, OfUser]:
    if name.startswith("draw-"):
        seed = int(name.removeprefix("draw-"))
        case = draw_case(seed)
        return case, draw_override(seed, case.trainer)
    return (NAMED | DROP_INS)[name], None


def _of_rank(case: Case, rank: ranks.Rank) -> Outcome:
    models = Workshop(Path(os.environ["SAME_BITS_MODELS"]))
    return outcome(case, None, models, rank)


# Read by `ranks.py`, which runs this file on each rank
CASES = {case.name: partial(_of_rank, case) for case in _OF_TWO_RANKS}


def run_tree(tree: Path, folder: Path, names: list[str]) -> None:
    """Train the cases of these names with the code of `tree`, and write the outcomes into `folder`."""
    found = Path(trl_ext.__file__).parents[1]
    assert found == tree, f"The package of {found} was imported, not that of {tree}."
    torch.set_num_threads(1)
    # A quarter of the time: each training collects garbage, and looks packages up
    gc.freeze()
    importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)
    workshop = Workshop(folder.parent / MODELS)
    for name in names:
        if name in CASES:
            continue
        with open(os.devnull, "w") as nowhere, patch.object(sys, "stdout", nowhere):
            _save(folder, name, [outcome(*_of_name(name), workshop)])
    of_ranks = [name for name in names if name in CASES]
    if of_ranks:
        os.environ["SAME_BITS_MODELS"] = str(workshop.root)
        ranks.ROOT = tree
        (folder / "ranks").mkdir()
        for name, outcomes in ranks.run_on_ranks(__file__, of_ranks, "ddp", folder / "ranks", timeout=900.0).items():
            _save(folder, name, outcomes)


def _save(folder: Path, name: str, outcomes: list[Outcome]) -> None:
    """Write a file in one piece, because the other process waits for it."""
    torch.save([vars(x) for x in outcomes], folder / "unfinished")
    (folder / "unfinished").rename(folder / f"{name}.pt")


# What runs in the first process


def compare(old: Path, new: Path, names: list[str], remembered: Path | None = None) -> dict[str, list[str]]:
    """Train the cases of these names with both trees. Return the differences in each, and print them as they come."""
    wrong: dict[str, list[str]] = {}
    counts: Counter[str] = Counter()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as root:
        _make_models(Path(root), names)
        sides = [_Side(old, Path(root, "old"), names, remembered), _Side(new, Path(root, "new"), names)]
        try:
            for name in names:
                old_outcomes, new_outcomes = (side.outcomes(name) for side in sides)
                pairs = zip(old_outcomes, new_outcomes, strict=True)
                wrong[name] = [line for pair in pairs for line in differences(*pair)]
                error = old_outcomes[0].error
                counts["differ" if wrong[name] else "raise the same error" if error else "are the same"] += 1
                if wrong[name]:
                    print(f"{name}: {_described(name)}", *wrong[name][:6], sep="\n    ", flush=True)
                elif error and name in NAMED:
                    print(f"{name}: both raise {error[:160]}", flush=True)
        finally:
            for side in sides:
                side.stop()
    seconds = time.monotonic() - began
    summary = ", ".join(f"{count} {word}" for word, count in counts.most_common())
    print(f"{len(names)} cases: {summary}; {seconds:.0f} s, {seconds / max(len(names), 1):.1f} s a case")
    return wrong


def _described(name: str) -> str:
    case, override = _of_name(name)
    default = Case("", "")
    changed = {key: x for key, x in vars(case).items() if key != "name" and x != getattr(default, key)}
    return f"{changed}{f'; {override}' if override else ''}"


def _make_models(root: Path, names: list[str]) -> None:
    """Make what the cases load, before two processes would make it at once."""
    workshop = Workshop(root / MODELS)
    for case in (_of_name(name)[0] for name in names):
        workshop.model(case.model)
        if case.setup == "ref_adapter":
            workshop.adapter(case.model)
        if case.setup.endswith("ref_model"):
            workshop.model(case.model, seed=5)


class _Side:
    """One tree, the process that trains with its code, and the outcomes."""

    def __init__(self, tree: Path, folder: Path, names: list[str], remembered: Path | None = None) -> None:
        self.tree = tree
        self.folder = folder
        folder.mkdir()
        self.remembered = None if remembered is None else remembered / _digest(tree)
        missing = [name for name in names if not self._kept(name)]
        environment = {
            **os.environ,
            "PYTHONPATH": str(tree),
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "TQDM_DISABLE": "1",
            "TRL_EXPERIMENTAL_SILENCE": "1",
            "HF_DATASETS_CACHE": str(folder / "datasets"),
        }
        command = [sys.executable, __file__, "--run-tree", str(tree), "--folder", str(folder), "--cases", *missing]
        self.output = (folder / "output").open("w+")
        self.process = subprocess.Popen(
            command if missing else [sys.executable, "-c", ""],
            env=environment,
            cwd=folder,
            stdout=self.output,
            stderr=subprocess.STDOUT,
        )

    def _kept(self, name: str) -> Path | None:
        path = None if self.remembered is None else self.remembered / f"{name}.pt"
        return path if path is not None and path.exists() else None

    def outcomes(self, name: str) -> list[Outcome]:
        """Wait for a case, and return its outcome on each rank."""
        path = self._kept(name) or self.folder / f"{name}.pt"
        while not path.exists():
            if self.process.poll() is not None and not path.exists():
                self.output.seek(0)
                raise RuntimeError(f"{self.tree} ended before {name}:\n{self.output.read()[-4000:]}")
            time.sleep(0.05)
        content = torch.load(path, weights_only=False)
        if self.remembered is not None and not self._kept(name):
            self.remembered.mkdir(parents=True, exist_ok=True)
            _save(self.remembered, name, [Outcome(**x) for x in content])
        return [Outcome(**x) for x in content]

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait()
        self.output.close()


def _digest(tree: Path) -> str:
    """Return a name for the code of a tree and for the files of this folder that drive it."""
    digest = hashlib.sha256()
    loaded = [Path(module.__file__ or "") for module in list(sys.modules.values()) if hasattr(module, "__file__")]
    drivers = {path for path in loaded if path.parent == SUPPORT}
    for path in sorted([*(tree / "trl_ext").rglob("*.py"), *drivers]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def chosen(trainers: list[str], patterns: list[str], draws: int, first: int) -> list[str]:
    """Return the names of cases. Draws come first, because those of two ranks run last."""
    seeds: Iterator[int] = iter(range(first, first + 50 * draws + 1))
    names = []
    while len(names) < draws:
        seed = next(seeds)
        if draw_case(seed).trainer in trainers:
            names.append(f"draw-{seed}")
    for name, case in (NAMED | DROP_INS).items():
        wanted = any(fnmatch.fnmatch(name, x) for x in patterns) if patterns else name in NAMED
        if wanted and case.trainer in trainers:
            names.append(name)
    return sorted(names, key=lambda name: name in CASES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, help="folder of the other tree")
    parser.add_argument("--new", type=Path, default=NEW, help="folder of this tree")
    parser.add_argument("--trainers", default=",".join(TRAINERS))
    parser.add_argument("--cases", nargs="*", default=[], help="names, or patterns of names")
    parser.add_argument("--draws", type=int)
    parser.add_argument("--first", type=int, default=0, help="number of the first draw")
    parser.add_argument("--remember", type=Path, help="folder for the outcomes of the old tree")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and end")
    parser.add_argument("--run-tree", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run_tree:
        run_tree(arguments.run_tree, arguments.folder, arguments.cases)
        return
    draws = arguments.draws if arguments.draws is not None else 0 if arguments.cases else DRAWS
    names = chosen(arguments.trainers.split(","), arguments.cases, draws, arguments.first)
    if arguments.list:
        print(*(NAMED | DROP_INS), sep="\n")
        return
    if not names or arguments.old is None:
        parser.error("no case has such a name, see --list" if not names else "--old: name the folder of the other tree")
    wrong = compare(arguments.old.resolve(), arguments.new.resolve(), names, arguments.remember)
    sys.exit(any(wrong.values()))


if __name__ == "__main__":
    main()
