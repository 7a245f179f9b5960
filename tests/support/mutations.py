"""Renames a private name in a copy of TRL, transformers, PEFT or Accelerate, and trains beside stock TRL of that copy.

    python tests/support/mutations.py                 # all of `MUTATIONS`, as a table
    python tests/support/mutations.py 'ref_model@kto' hash_module

The copy still works: a name is renamed wherever the libraries use it. What uses it from outside, as trl_ext does, no
longer finds it. One process imports torch and the libraries, and forks for each copy, which takes seconds.
"""

import argparse
import contextlib
import functools
import importlib
import importlib.metadata
import io
import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from drop_in_cases import Case

SUPPORT = Path(__file__).parent
ROOT = SUPPORT.parents[1]
TRAINERS = ("sft", "dpo", "kto", "grpo", "rloo")
# Versions that no release of trl_ext has been tested with
LATER = {"trl": "1.99.0", "transformers": "5.99.0", "peft": "0.99.0", "accelerate": "1.99.0"}
SECONDS_PER_COPY = 900  # many, for machines that run other things too


# What moves


@dataclass(frozen=True)
class Mutation:
    """A name that a later release calls otherwise."""

    name: str
    feature: str
    kind: str = "word"
    """What is renamed. `"word"`: each occurrence. `"self"`: `self.name`. `"alias"`: the name by which a module knows
    what it imports. `"key"`: the name in quotes."""
    trainer: str | None = None
    """The trainer in whose module it is renamed. `None`: in all files."""
    libraries: tuple[str, ...] = ("trl",)
    """Where it is renamed. The version of the first one changes."""
    runs: tuple[str, ...] | None = None
    """The runs that may need it. `None`: all of the trainers in whose files it is."""

    @property
    def id(self) -> str:
        word = {"self": f"self.{self.name}", "key": f"'{self.name}'"}.get(self.kind, self.name)
        return f"{word}@{self.trainer}" if self.trainer else word

    @property
    def new_name(self) -> str:
        return f"{self.name}_renamed"

    def renamed(self, source: str) -> str:
        """Return the source of a module with the name renamed."""
        if self.kind == "self":
            return re.sub(rf"\bself\.{self.name}\b", f"self.{self.new_name}", source)
        if self.kind == "key":
            return re.sub(rf"([\"']){self.name}\1", f'"{self.new_name}"', source)
        if self.kind == "word":
            return re.sub(rf"\b{self.name}\b", self.new_name, source)
        source = re.sub(rf'(?<![\w."`]){self.name}\b(?!`)', self.new_name, source)
        imported = rf"^(\s*(?:from \S+ import .*)?){self.new_name}(,|$)"
        return re.sub(imported, rf"\g<1>{self.name} as {self.new_name}\2", source, flags=re.MULTILINE)


def _of_trl(feature: str, names: str, runs: tuple[str, ...] | None = None) -> list[Mutation]:
    """Read `name`, `self.name`, `'name'`, and each with `@trainer` for one trainer."""
    mutations = []
    for text in names.split():
        word, _, trainer = text.partition("@")
        kind = "key" if word[0] == "'" else "self" if word.startswith("self.") else "alias" if trainer else "word"
        mutations.append(Mutation(word.removeprefix("self.").strip("'"), feature, kind, trainer or None, runs=runs))
    return mutations


_WITH_ADAPTER = (
    "sft",
    "dpo-precompute",
    "dpo-adapter",
    "dpo-resumed",
    "dpo-smoothing",
    "kto-precompute",
    "grpo-generation",
    "rloo",
)
_TRANSFORMERS, _PEFT, _ACCELERATE = ("transformers",), ("peft",), ("accelerate",)

# The features that the runs that may need a name cannot do without: the trainer may refuse to be built
NEEDED = {
    "exact head",
    "loss",
    "precomputing",
    "options",
    "log-prob pass",
    "samples",
    "reference",
    "adapters",
    "router loss",
}
# Those without which a trainer may process more tokens
TOKENS = {
    "exact head",
    "loss",
    "precomputing",
    "log-prob pass",
    "generation",
    "packing",
    "store",
    "reference",
    "adapters",
}

MUTATIONS: dict[str, Mutation] = {
    mutation.id: mutation
    for mutation in (
        *_of_trl("exact head", "add_fused_lm_head FusedCausalLMOutput"),
        *_of_trl(
            "loss", "_compute_loss self._metrics@grpo self.loss_types@dpo self.loss_weights@dpo 'completion_mask'@dpo"
        ),
        Mutation("compute_loss", "loss", libraries=("trl", "transformers")),
        Mutation("training_step", "loss", libraries=("trl", "transformers")),
        *_of_trl("log-prob pass", "_get_per_token_logps_and_entropies"),
        # What the loss of GRPO gets, and for how many steps
        *_of_trl("samples", "_generate_and_score_completions _calculate_rewards _generate_single_turn"),
        *_of_trl("samples", "_buffered_inputs self._step self.num_iterations@grpo self.top_entropy_quantile@grpo"),
        *_of_trl("generation", "is_async_callable get_high_entropy_mask"),
        *_of_trl("balance", "shuffle_sequence_dict gather@grpo"),
        Mutation("_is_stateful", "packing", libraries=("transformers", "accelerate")),
        *_of_trl("checkpoints", "_last_loaded_step"),
        *(
            Mutation(name, "checkpoints", libraries=_TRANSFORMERS)
            for name in ("rotate_checkpoints", "OPTIMIZER_NAME", "_load_from_checkpoint")
        ),
        # What the losses of DPO, KTO, GRPO and RLOO read
        *_of_trl("reference", "self.ref_model@dpo self.ref_model@kto self.ref_model@grpo self.ref_model@rloo"),
        *_of_trl("reference", "compute_ref_log_probs 'ref_chosen_logps'"),
        *_of_trl("precomputing", "_precompute_ref_logps"),
        *_of_trl("store", "hash_module create_model_from_path disable_dropout_in_model"),
        *_of_trl("adapters", "BaseTunerLayer@dpo get_peft_model@kto is_peft_model@dpo use_adapter@grpo", _WITH_ADAPTER),
        *_of_trl("loss", "self.label_smoothing@dpo self.f_divergence_type@dpo _total_train_tokens"),
        *_of_trl("model card", "_tag_names"),
        *_of_trl("vLLM", "_start_weight_update VLLMClient VLLMGeneration"),
        *_of_trl("offloading", "get_act_offloading_ctx_manager"),
        *_of_trl("engines", "prepare_deepspeed disable_gradient_checkpointing"),
        *_of_trl("command line", "resolve_accelerate_config_argument"),
        Mutation("launch_command_parser", "command line", libraries=("accelerate", "trl")),
        Mutation("AutoHfQuantizer", "command line", libraries=_TRANSFORMERS),
        Mutation("ReplicatedWithGradAllReduce", "engines", libraries=_TRANSFORMERS),
        Mutation("GradientCheckpointingLayer", "engines", libraries=("transformers", "peft")),
        Mutation("ALL_ATTENTION_FUNCTIONS", "precomputing", libraries=("transformers", "accelerate")),
        Mutation("load_balancing_loss_func", "router loss", libraries=("transformers", "trl"), runs=("dpo-experts",)),
        Mutation("OptimizerNames", "options", libraries=("transformers", "trl")),
        Mutation("AuxiliaryTrainingWrapper", "adapters", libraries=("peft", "transformers"), runs=_WITH_ADAPTER),
        Mutation("ALoraLinearVariant", "adapters", libraries=_PEFT, runs=_WITH_ADAPTER),
        Mutation("_set_sync_gradients", "options", libraries=("accelerate", "transformers")),
        Mutation("_models", "precomputing", libraries=("accelerate", "transformers")),
    )
}


@dataclass(frozen=True)
class Copy:
    """A folder with copies of libraries, to be the first on the path of a process."""

    folder: Path
    mutation: Mutation | None  # None: no name moved
    changed_files: tuple[str, ...] = ()

    @property
    def trainers(self) -> tuple[str, ...]:
        """The trainers that may need the name: all of them, if it is not TRL's."""
        if self.mutation is None or self.mutation.libraries[0] != "trl":
            return TRAINERS
        return tuple(x for x in TRAINERS if any(f"/{x}_" in path for path in self.changed_files))

    def may_need(self, run: str) -> bool:
        """Whether a run may need the name. All others must go on as before."""
        assert self.mutation is not None
        runs = self.mutation.runs
        return RUNS[run].case.trainer in self.trainers and (runs is None or run in runs)


def make_copy(folder: Path, mutation: Mutation | None, *, keeps_version: bool = False) -> Copy:
    """Copy the libraries of a mutation into `folder`, with the name renamed, and with a later version.

    Args:
        keeps_version (`bool`): the version stays, so that nothing notices the change.

    Raises:
        `AssertionError`: the name is nowhere.
    """
    changed = []
    libraries = ("trl",) if mutation is None else mutation.libraries
    for library in libraries:
        source = Path(str((find_spec(library) or sys).origin)).parent  # type: ignore[union-attr]
        # Links, because transformers has thousands of files. Compiled files are links too, and those of changed ones
        # do not fit, so Python replaces them in the copy
        shutil.copytree(source, folder / library, copy_function=os.symlink)
        if mutation is not None:
            found = [path for path in _files_with(source, mutation) if _is_in(path, mutation)]
            for path in found:
                text = path.read_text()
                renamed = mutation.renamed(text)
                if renamed != text:
                    target = folder / library / path.relative_to(source)
                    target.unlink()
                    target.write_text(renamed)
                    changed.append(f"{library}/{path.relative_to(source)}")
    assert mutation is None or changed, f"{mutation.id} is nowhere"
    if not keeps_version:
        _write_metadata(folder, libraries[0])
    return Copy(folder, mutation, tuple(changed))


def _files_with(source: Path, mutation: Mutation) -> list[Path]:
    command = ["grep", "-rlw", "--include=*.py", mutation.name, str(source)]
    return [Path(x) for x in subprocess.run(command, capture_output=True, text=True).stdout.splitlines()]


def _is_in(path: Path, mutation: Mutation) -> bool:
    return mutation.trainer is None or path.name == f"{mutation.trainer}_trainer.py"


def _write_metadata(folder: Path, library: str) -> None:
    metadata = Path(str(distribution(library)._path))  # type: ignore[attr-defined]
    target = folder / f"{library}-{LATER[library]}.dist-info"
    shutil.copytree(metadata, target)
    text = (metadata / "METADATA").read_text()
    (target / "METADATA").write_text(
        re.sub(r"^Version: .*$", f"Version: {LATER[library]}", text, count=1, flags=re.MULTILINE)
    )


# What trains


@dataclass(frozen=True)
class Run:
    """A training of `case`."""

    case: Case
    is_ours: bool = False  # TRL has no such option: the result is that of trl_ext with an unchanged TRL
    is_mended: bool = False  # TRL's result is another one, which is right only where a line says so
    ranks: int = 1  # processes
    resumes_after: int | None = None  # the step after which it stops, to go on from its checkpoint in another trainer

    @property
    def has_own_options(self) -> bool:
        return self.is_ours or bool(self.case.ours.keys() - {"keep_groups_together"})


def _run(name: str, setup: str = "full", model: str = "tied", **options: Any) -> Run:
    of_run = {key: options.pop(key) for key in ("is_ours", "is_mended", "resumes_after", "ranks") if key in options}
    of_case = {key: options.pop(key) for key in ("steps", "rollout", "rewards", "ours") if key in options}
    trainer = name.partition("-")[0]
    rate = 0.05 if trainer in ("sft", "dpo", "kto") else 0.02
    return Run(Case(name, trainer, setup, model, options, learning_rate=rate, **of_case), **of_run)


_SAVED = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
_KL = {"beta": 0.1, "num_iterations": 2}
_HALVES = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
_MIXED = {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]}
_OF_PAIRS = {"loss_type": ["robust", "hinge"], "loss_weights": [0.8, 0.2], "label_smoothing": 0.1}
_BUDGET = {"max_tokens_per_micro_batch": 32}
_EVALUATED = {"eval_strategy": "steps", "eval_steps": 1}

# Each feature is in use in one of them. The first run of a trainer is that of other trainers' names too
RUNS: dict[str, Run] = {
    run.case.name: run
    for run in (
        _run("sft", "lora", gradient_checkpointing=True),
        _run("dpo"),
        _run("dpo-precompute", "lora", precompute_ref_log_probs=True, **_EVALUATED),
        _run("dpo-adapter", "ref_adapter", gradient_checkpointing=True, **_MIXED),
        _run("dpo-experts", model="experts", f_divergence_type="js_divergence"),
        _run("dpo-parts", "ref_model", gradient_accumulation_steps=2, ours=_BUDGET, **_OF_PAIRS),
        _run("dpo-resumed", "lora", steps=3, resumes_after=2, optim="adamw_torch", **_SAVED),
        _run("dpo-cdpo", "ref_model", is_ours=True, label_smoothing=0.1, ours={"loss_type": ["cdpo"]}),
        _run(
            "dpo-smoothing",
            "lora",
            is_ours=True,
            loss_type=["sigmoid", "sft"],
            loss_weights=[1.0, 0.5],
            optim="adamw_torch",
            ours={"sft_label_smoothing": 0.1, "on_non_finite_loss": "skip"},
        ),
        _run("kto", "ref_model"),
        _run("kto-precompute", "lora", precompute_ref_log_probs=True),
        _run("grpo", "ref_model", steps=3, **_HALVES, **_KL),
        _run("grpo-generation", "lora", rollout="generate", rewards=("half_dead",), entropy_coef=0.05, **_KL),
        _run("grpo-quantile", top_entropy_quantile=0.2, num_iterations=2),
        _run("grpo-parts", ours=_BUDGET, **_HALVES),
        # In the middle of a generation batch
        _run("grpo-resumed", is_mended=True, steps=3, resumes_after=1, num_iterations=4, **_SAVED),
        _run("grpo-dynamic", is_ours=True, rewards=("half_dead",), ours={"dynamic_sampling": True}),
        _run("rloo", "lora", rollout="generate", **_KL),
        _run("dpo-ranks", ranks=2, gradient_accumulation_steps=2, per_device_train_batch_size=2),
        _run("grpo-ranks", ranks=2, rewards=("half_dead",), **_HALVES),
    )
}


def runs_for(trainers: tuple[str, ...]) -> list[str]:
    """Return the names of all runs of these trainers, and of the first run of each other one."""
    return [name for name, run in RUNS.items() if run.case.trainer in trainers or name == run.case.trainer]


_TRAINING = "--model_name_or_path MODEL --dataset_name DATA --use_cpu --bf16 false --report_to none --max_steps 2"
_SAMPLING = f"{_TRAINING} --num_generations 2 --max_completion_length 4 --reward_funcs rewards.id_reward"
COMMANDS = {
    "doctor": "doctor",
    "help": "dpo --help",
    "train": f"dpo {_TRAINING} --save_strategy no --output_dir OUTPUT",
    "explain": f"explain grpo {_SAMPLING} --output_dir OUTPUT",
    "estimate": f"estimate dpo {_TRAINING} --output_dir OUTPUT",
}


# What happened


@dataclass
class Result:
    """What a process with a copy did."""

    imports: dict[str, str] = field(default_factory=dict)  # public name -> error
    lines: list[str] = field(default_factory=list)  # warnings of trl_ext, of its import
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    crash: str = ""


_VERSION = r"\b(trl|transformers|peft|accelerate) ?(==|[<>]=?|\d)"


def is_one_line(text: str, name: str) -> bool:
    """Whether a message is a line that names what moved and which version to install."""
    return "\n" not in text.strip() and re.search(rf"\b{name}\b", text) is not None and bool(re.search(_VERSION, text))


def failures(copy: Copy, result: Result) -> list[str]:
    """Return a line for each import, run or command that neither equals stock nor refuses as it should."""
    mutation = copy.mutation
    if result.crash:
        return [f"the process ended: {result.crash}"]
    wrong = [f"import of {name}: {error}" for name, error in result.imports.items()]
    wrong += [f"on import, more than a line: {line!r}" for line in result.lines if "\n" in line.strip()]
    warned: set[str] = set()
    for name, run in result.runs.items():
        trainer = trainer_of(name)
        if mutation is not None and any(is_one_line(line, mutation.name) for line in run["lines"]):
            warned.add(trainer)
        if any("\n" in line.strip() for line in run["lines"]):
            wrong.append(f"{name}: more than a line: {run['lines']}")
        if run.get("stock_error"):
            wrong.append(f"{name}: stock raises {run['stock_error']}")
        elif run["error"]:
            reason = _not_a_refusal(copy, name, run)
            wrong += [f"{name}: {reason}: {run['error_type']}: {run['error']}"] if reason else []
        elif run.get("equals_stock") and trainer in warned:
            continue
        elif run["wrong"]:
            wrong.append(f"{name}: another result: {'; '.join(run['wrong'][:3])} ({len(run['wrong'])})")
        elif run.get("tokens", 0) > run.get("tokens_today", 0):
            more = f"{name}: {run['tokens']} tokens instead of {run['tokens_today']}"
            if trainer not in warned:
                wrong.append(f"{more}, without a line")
            elif not copy.may_need(name) or mutation is None or mutation.feature not in TOKENS:
                wrong.append(f"{more}, for {mutation and mutation.feature}")
    return wrong


def other_results(result: Result) -> list[str]:
    """Return a line for each run with another result than stock TRL or, for what TRL does not have, than today."""
    wrong = [f"{name}: {'; '.join(run['wrong'][:3])}" for name, run in result.runs.items() if run["wrong"]]
    return [f"the process ended: {result.crash}"] if result.crash else wrong


def trainer_of(name: str) -> str:
    return RUNS[name].case.trainer if name in RUNS else "command line"


def _not_a_refusal(copy: Copy, name: str, run: dict[str, Any]) -> str | None:
    """Return what is wrong with the error of a run; `None` if it is a refusal as it should be."""
    mutation = copy.mutation
    if mutation is None:
        return "an error"
    if name == "doctor" and mutation.name in run["error"]:
        return None
    if run["error_type"] not in ("ImportError", "ValueError") or not is_one_line(run["error"], mutation.name):
        return f"no line with `{mutation.name}` and a version"
    if name in COMMANDS:
        return None
    if not copy.may_need(name):
        return "an error of a run that does not need the name"
    if mutation.feature not in NEEDED and not RUNS[name].has_own_options:
        return f"a trainer can train without {mutation.feature}"
    return None


def summary(result: Result, name: str) -> str:
    """Return one word for what a run did."""
    run = result.runs[name]
    if run["error"]:
        return "refused" if run["error_type"] in ("ImportError", "ValueError") else run["error_type"]
    if run["wrong"]:
        return "as stock" if run.get("equals_stock") else "DIFFERS"
    more = run.get("tokens", 0) - run.get("tokens_today", 0)
    return f"same, {more:+} tokens" if more else "same"


# In a process with a copy


def _in_child(job: dict[str, Any]) -> Result:
    sys.path.insert(0, job["copy"])
    importlib.invalidate_caches()
    # Each training looks packages up, which takes a quarter of the time of a tiny one
    importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)
    result = Result()
    of_ranks = [name for name in job["runs"] if RUNS[name].ranks > 1]
    alone = [name for name in job["runs"] if name not in of_ranks]
    # First, because a process that has trained alone cannot be a rank
    for name in of_ranks:
        result.runs[name] = _on_ranks(name, job)
    # Stock first: nothing of trl_ext is imported yet
    stock = {name: _attempt(name, "trl", job) for name in alone if not RUNS[name].is_ours}
    with _lines() as lines:
        _import_all(result)
    result.lines = lines
    for name in alone:
        result.runs[name] = _compared(name, _attempt(name, "trl_ext", job), stock.get(name), job)
    for name in job["commands"]:
        result.runs[name] = _command(name, job)
    return result


def _import_all(result: Result) -> None:
    import trl_ext

    for name in trl_ext.__all__:
        try:
            getattr(trl_ext, name)
        except Exception as error:
            result.imports[name] = f"{type(error).__name__}: {error}"


@dataclass
class Attempt:
    record: Any = None
    error: str = ""
    error_type: str = ""
    lines: list[str] = field(default_factory=list)


class _Texts(logging.Handler):
    def __init__(self, texts: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.texts = texts

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextlib.contextmanager
def _lines() -> Iterator[list[str]]:
    """Collect what trl_ext warns of in the `with` block."""
    texts: list[str] = []
    handler = _Texts(texts)
    logging.getLogger("trl_ext").addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield texts
        texts += [str(x.message) for x in caught if "trl_ext" in str(x.message) or "/trl_ext/" in x.filename]
    finally:
        logging.getLogger("trl_ext").removeHandler(handler)


def _attempt(name: str, library: str, job: dict[str, Any]) -> Attempt:
    from run_losses import Record, Trainers, build, train
    from tiny import Workshop

    run = RUNS[name]
    attempt = Attempt()
    began = time.process_time()
    workshop = Workshop(Path(job["models"]))

    def stopped_before(trainer: Any) -> None:
        """Train another trainer up to a checkpoint, from which `trainer` goes on."""
        first = build(run.case, trainers, workshop, trainer.args.output_dir, Record())
        first.add_callback(_stop_after(run.resumes_after))
        first.train()
        trainer.train = functools.partial(trainer.train, resume_from_checkpoint=True)

    with _lines() as lines:
        try:
            trainers = Trainers.of(importlib.import_module(library))
            prepare = stopped_before if run.resumes_after else lambda trainer: None
            attempt.record = train(run.case, trainers, workshop, prepare=prepare)
        except Exception as error:
            attempt.error = str(error) or repr(error)
            attempt.error_type = type(error).__name__
            traceback.print_exc()
    attempt.lines = lines
    print(f"{name}, {library}: {time.process_time() - began:.2f} s", flush=True)
    return attempt


def _stop_after(step: int | None) -> Any:
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == step

    return Stop()


def _on_ranks(name: str, job: dict[str, Any]) -> dict[str, Any]:
    """Train on several processes, and return the outcome of the first one with what is wrong on any."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = range(RUNS[name].ranks)
    outs = [Path(f"{job['out']}.{name}.{rank}") for rank in ranks]
    from case_trainers import REFERENCE_SEED
    from tiny import Workshop

    for seed in (0, REFERENCE_SEED):  # before two ranks make it
        Workshop(Path(job["models"])).model(RUNS[name].case.model, seed=seed)
    children = {}
    for rank in ranks:
        child = os.fork()
        if child == 0:
            try:
                numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": len(ranks), "LOCAL_WORLD_SIZE": len(ranks)}
                os.environ |= {key: str(number) for key, number in numbers.items()}
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "ACCELERATE_USE_CPU": "true"}
                signal.alarm(SECONDS_PER_COPY)
                stock = _attempt(name, "trl", job)
                outcome = _compared(name, _attempt(name, "trl_ext", job), stock, job, rank)
                outs[rank].write_text(json.dumps(outcome, default=str))
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(0)
        children[child] = rank
    while children:
        ended, _ = os.waitpid(-1, 0)
        if not outs[children.pop(ended)].exists():  # the others would wait for it
            for child in children:
                os.kill(child, signal.SIGKILL)
    outcomes = [json.loads(out.read_text()) for out in outs if out.exists()]
    if len(outcomes) < len(ranks):
        return {"error": "a rank ended, see the log", "error_type": "crash", "lines": [], "wrong": []}
    failed = next((x for x in outcomes if x["error"] or x["stock_error"]), outcomes[0])
    tokens = {key: sum(x[key] for x in outcomes) for key in ("tokens", "tokens_today", "tokens_of_stock")}
    lines = outcomes[0]["lines"]
    return {**failed, **tokens, "lines": lines, "wrong": [line for x in outcomes for line in x["wrong"]]}


def _command(name: str, job: dict[str, Any]) -> dict[str, Any]:
    """Run a command of `trl-ext` in this process, and return its outcome in the form of a training's."""
    from tiny import Workshop, preferences
    from trl_ext.cli.__main__ import main

    data = Path(job["models"], "data")
    if not data.exists():
        data.mkdir()
        preferences(8, seed=3).to_json(data / "train.jsonl")
    model = Workshop(Path(job["models"])).model("tied")
    places = {"MODEL": model, "DATA": str(data), "OUTPUT": str(data.with_name("output"))}
    words = [places.get(word, word) for word in COMMANDS[name].split()]
    output, errors = io.StringIO(), io.StringIO()
    with _lines() as lines, contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            status = main(words)
        except SystemExit as ended:  # of argparse, after `--help`
            status = int(ended.code or 0)
    text = output.getvalue()
    print(name, status, text, errors.getvalue())
    today = Path(job["today"], f"{name}.txt")
    if not today.exists() and status == 0:
        today.write_text(text)
    # The rows of `doctor` have versions, and what is wrong; a training prints times
    is_same = name in ("doctor", "train") or not today.exists() or today.read_text() == text
    message = errors.getvalue().strip() if name != "doctor" else text
    return {
        "error": message if status else "",
        "error_type": "ImportError" if status else "",
        "lines": lines,
        "wrong": [] if status or is_same else ["its output differs"],
    }


def _compared(name: str, ours: Attempt, stock: Attempt | None, job: dict[str, Any], rank: int = 0) -> dict[str, Any]:
    """Return the outcome of a run as JSON values. Without a file of how it ends today, write one."""
    import torch

    run = RUNS[name]
    today = Path(job["today"], f"{name}.{rank}.pt")
    if not today.exists() and ours.record is not None:
        torch.save(ours.record, today.with_suffix(".new"))
        today.with_suffix(".new").rename(today)
    record_today = torch.load(today, weights_only=False) if today.exists() else None
    stock_record = None if stock is None else stock.record
    wanted = record_today if run.is_ours or run.is_mended else stock_record
    is_both = run.is_mended and ours.record is not None and stock_record is not None
    return {
        "stock_error": f"{stock.error_type}: {stock.error}" if stock is not None and stock.error else "",
        "error": ours.error,
        "error_type": ours.error_type,
        "lines": ours.lines,
        "wrong": [] if ours.record is None or wanted is None else differences(run, ours.record, wanted),
        "equals_stock": is_both and not differences(run, ours.record, stock_record),
        "tokens": 0 if ours.record is None else ours.record.fed(),
        "tokens_today": 0 if record_today is None else record_today.fed(),
        "tokens_of_stock": 0 if stock_record is None else stock_record.fed(),
    }


def differences(run: Run, ours: Any, wanted: Any) -> list[str]:
    """Return a line for each loss, shared metric, gradient and weight that is not within 1e-5."""
    from training_comparison import TOLERANCE, metrics_differ, tensors_differ

    for name in ("logs", "gradients"):
        count, wanted_count = len(getattr(ours, name)), len(getattr(wanted, name))
        if count != wanted_count:
            return [f"{count} {name} instead of {wanted_count}"]
    wrong = metrics_differ(run.case, ours, wanted, counts=False)
    if run.ranks > 1:  # other metrics are means over micro-batches, between which rows move
        wrong = [line for line in wrong if re.match(r"log \d+ (loss|grad_norm|reward):", line)]
    else:
        # Micro-batches may have other rows than those of stock TRL; their sum has the same
        got, want = sum(ours.losses), sum(wanted.losses)
        if not abs(got - want) <= TOLERANCE * max(abs(want), wanted.advantage):
            wrong.append(f"loss {got!r} instead of {want!r}")
    for step, (got_gradients, want_gradients) in enumerate(zip(ours.gradients, wanted.gradients, strict=True)):
        wrong += tensors_differ(f"gradient of step {step}", got_gradients, want_gradients)
    return wrong + tensors_differ("weight update", ours.updates, wanted.updates)


# The process that forks


class Forks:
    """A process that has imported all but `libraries`, and forks for each copy.

    Args:
        folder (`Path`): for tiny models, copies and how runs end today.
        libraries (`tuple`): what copies replace.
    """

    def __init__(self, folder: Path, libraries: tuple[str, ...] = ("trl",)) -> None:
        self.folder = folder
        self.number = 0
        command = [sys.executable, "-W", "ignore", __file__, "--serve", *libraries]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT, SUPPORT))),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
            "HF_DATASETS_CACHE": str(folder / "datasets"),
            "TOKENIZERS_PARALLELISM": "false",
            "TQDM_DISABLE": "1",
            "TRL_EXPERIMENTAL_SILENCE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "XDG_CACHE_HOME": str(folder / "cache"),
        }
        self.log = (folder / f"{'-'.join(libraries)}.log").open("w+")
        self.process = subprocess.Popen(
            command,
            env=environment,
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )

    def run(self, copy: Copy, runs: list[str], commands: tuple[str, ...] = ()) -> Result:
        """Import trl_ext with the libraries of a copy, and train."""
        self.number += 1
        for name in ("today", "models", "results"):
            (self.folder / name).mkdir(exist_ok=True)
        out = self.folder / "results" / f"{copy.folder.name}-{os.getpid()}-{self.number}.json"
        job = {
            "copy": str(copy.folder),
            "models": str(self.folder / "models"),
            "today": str(self.folder / "today"),
            "out": str(out),
            "runs": runs,
            "commands": commands,
        }
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not out.exists():
            log = out.with_suffix(".log")
            said = log.read_text() if log.exists() else f"{answer}\n{Path(self.log.name).read_text()}"
            return Result(crash=said[-2000:])
        return Result(**json.loads(out.read_text()))

    def stop(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
        self.log.close()


def _serve(libraries: tuple[str, ...]) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _preload(libraries)
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            _end_child(job)
        os.waitpid(child, 0)
        answers.write("done\n")
        answers.flush()


def _end_child(job: dict[str, Any]) -> None:
    """Do a job, write its result, and end the process."""
    out = Path(job["out"])
    try:
        log = os.open(out.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        signal.alarm(SECONDS_PER_COPY)
        cache = tempfile.mkdtemp(dir=out.parent)
        os.environ["XDG_CACHE_HOME"] = cache
        text = json.dumps(vars(_in_child(job)), default=str)
        out.with_suffix(".new").write_text(text)
        out.with_suffix(".new").rename(out)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _preload(libraries: tuple[str, ...]) -> None:
    """Import what trl_ext imports, except `libraries` and all that imports them."""
    import torch

    torch.set_num_threads(1)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        # Training imports more, such as DeepSpeed
        with contextlib.suppress(Exception), tempfile.TemporaryDirectory() as folder:
            for name in ("sft", "dpo-experts"):
                _attempt(name, "trl_ext", {"models": folder})
        os.write(write, "\n".join(sys.modules).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        names = pipe.read().split()
    os.waitpid(child, 0)
    ours = {path.stem for path in SUPPORT.glob("*.py")} | {"trl_ext", "__main__"}
    skipped = ours | {*libraries}
    if "transformers" in libraries:
        skipped |= {"deepspeed", "bitsandbytes"}
    for name in names:
        if name.partition(".")[0] not in skipped:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    assert not {*libraries} & {*sys.modules}, {*libraries} & {*sys.modules}
    import gc

    gc.collect()
    gc.freeze()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of mutations, by default all")
    parser.add_argument("--keep-version", action="store_true", help="so that nothing notices the change")
    parser.add_argument("--serve", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        _serve(tuple(arguments.serve))
        return
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(min(table(Path(folder), arguments.names or list(MUTATIONS), keeps_version=arguments.keep_version), 1))


class Bench:
    """Makes copies, and trains on them in processes that are started on first use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._forks: dict[tuple[str, ...], Forks] = {}
        self._copies = 0

    def train(
        self,
        mutation: Mutation | None,
        runs: list[str] | None = None,
        *,
        keeps_version: bool = False,
        commands: tuple[str, ...] = (),
    ) -> tuple[Copy, Result]:
        """Train `runs` on a copy with a name renamed, by default those of the trainers that may need it."""
        self._copies += 1
        copy = make_copy(self.folder / f"copy-{self._copies}", mutation, keeps_version=keeps_version)
        runs = runs_for(copy.trainers) if runs is None else runs
        if mutation is not None:
            self._train_unchanged([*runs, *commands])
        is_of_trl = mutation is None or set(mutation.libraries) == {"trl"}
        result = self._forks_without(("trl",) if is_of_trl else tuple(LATER)).run(copy, runs, commands)
        shutil.rmtree(copy.folder)
        return copy, result

    def _train_unchanged(self, names: list[str]) -> None:
        """Find how runs and commands end with an unchanged TRL, unless that is known."""
        missing = [name for name in names if not any((self.folder / "today").glob(f"{name}.*"))]
        if missing:
            copy, result = self.train(
                None, [x for x in missing if x in RUNS], commands=tuple(x for x in missing if x in COMMANDS)
            )
            wrong = failures(copy, result)
            assert not wrong, wrong

    def _forks_without(self, libraries: tuple[str, ...]) -> Forks:
        if libraries not in self._forks:
            self._forks[libraries] = Forks(self.folder, libraries)
        return self._forks[libraries]

    def stop(self) -> None:
        for forks in self._forks.values():
            forks.stop()


def commands_for(mutation: Mutation) -> tuple[str, ...]:
    return tuple(COMMANDS) if mutation.feature == "command line" else ()


def table(folder: Path, names: list[str], *, keeps_version: bool = False) -> int:
    """Print what each run of each mutation does. Returns how many mutations fail."""
    bench = Bench(folder)
    failed = 0
    try:
        for name in names:
            mutation = MUTATIONS[name]
            began = time.monotonic()
            copy, result = bench.train(mutation, keeps_version=keeps_version, commands=commands_for(mutation))
            # If nothing notices the change, any error will do
            wrong = other_results(result) if keeps_version else failures(copy, result)
            failed += bool(wrong)
            outcomes: dict[str, list[str]] = {}
            for run in result.runs:
                outcomes.setdefault(summary(result, run), []).append(run)
            words = "; ".join(f"{outcome}: {' '.join(runs)}" for outcome, runs in outcomes.items())
            seconds = f"{time.monotonic() - began:.0f} s"
            print(f"{'FAILS' if wrong else 'ok':<6}{name} ({mutation.feature}, {seconds}): {words}", flush=True)
            for line in wrong[:4]:
                print("      ", line[:300], flush=True)
    finally:
        bench.stop()
    return failed


if __name__ == "__main__":
    main()
