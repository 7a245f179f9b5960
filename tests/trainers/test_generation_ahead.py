"""`generation_lag=1`: training with samples of older weights, as stock TRL trains on the same samples."""

import asyncio
import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from signal import signal as set_handler
from typing import Any

import numpy as np
import pytest
import torch
import trl
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForSequenceClassification, TrainerCallback

import trl_ext
from lagged_sampling import Logs, OwnSampler, delayed_trainer, even_tokens, rows, short_text
from tiny import Workshop, chat_tokenizer, word_tokenizer

TOLERANCE = 1e-5
LORA = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
CASES: dict[str, dict[str, Any]] = {
    "dapo": {},
    **{name: {"loss_type": name} for name in ("grpo", "dr_grpo", "bnpo", "cispo", "sapo")},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "vespo": {"loss_type": "vespo", "vllm_importance_sampling_mode": "token_truncate"},
    "token_mask": {"vllm_importance_sampling_mode": "token_mask"},
    "sequence_truncate": {"vllm_importance_sampling_mode": "sequence_truncate"},
    "no correction": {"vllm_importance_sampling_correction": False},
    "KL term": {"beta": 0.05},
    "two iterations": {"num_iterations": 2},
    "one micro-batch a generation": {"steps_per_generation": 1},
    "two steps a generation": {"steps_per_generation": 4},
    "two iterations of two steps": {"num_iterations": 2, "steps_per_generation": 4},
    "two epochs": {"max_steps": -1, "num_train_epochs": 2, "rows": 24},
    "LoRA": {"peft_config": LORA},
}
FAST = ("dapo", "two iterations of two steps", "two epochs", "LoRA", "KL term")


class Run:
    """A training of ours or, with `stock`, of TRL's."""

    def __init__(
        self,
        workshop: Workshop,
        folder: Path,
        *,
        lag: int = 1,
        stock: bool = False,
        seconds: float = 0.0,
        sampler: Callable[[Any], Any] = OwnSampler,
        callbacks: Any = (),
        model_name: str = "untied",
        **arguments: Any,
    ) -> None:
        self.path = workshop.model(model_name)
        names = ("peft_config", "reward_funcs", "train_dataset", "eval_dataset", "processing_class")
        names += ("reward_processing_classes",)
        parts = {name: arguments.pop(name) for name in names if name in arguments}
        count = arguments.pop("rows", 64)
        options = {
            "output_dir": str(folder),
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "num_generations": 4,
            "max_steps": 5,
            "max_completion_length": 10,
            "learning_rate": 0.1,
            "optim": "sgd",  # Adam's step is nearly a sign, which turns rounding into a full update
            "max_grad_norm": 0.0,
            "lr_scheduler_type": "constant",
            "logging_steps": 1,
            "report_to": "none",
            "save_strategy": "no",
            "bf16": False,
            "use_cpu": True,
            "gradient_checkpointing": False,
            "seed": 7,
            "disable_tqdm": True,
            **arguments,
        }
        self.logs = Logs()
        torch.manual_seed(1)
        model = self._loaded() if not options.get("beta") else self.path
        self.sampler = sampler(self._adapted(parts))
        common = {
            "model": model,
            "reward_funcs": [even_tokens, short_text],
            "train_dataset": rows(count),
            "processing_class": word_tokenizer(),
            "callbacks": [self.logs, *callbacks],
            **parts,
        }
        if stock:
            self.trainer = delayed_trainer(self.sampler, lag=lag, args=trl.GRPOConfig(**options), **common)
        else:
            config = trl_ext.GRPOConfig(generation_lag=lag, show_plan=False, **options)
            self.trainer = trl_ext.GRPOTrainer(rollout_func=self.sampler, args=config, **common)
        for name, x in self.trainer.model.named_parameters():
            if "lora" in name:
                generator = torch.Generator().manual_seed(len(name))
                x.data.copy_(0.05 * torch.randn(x.shape, generator=generator))
        self.start = self._weights()

    def train(self, resume: Any = None) -> "Run":
        self.trainer.train(resume_from_checkpoint=resume)
        self.weights = self._weights()
        return self

    def logged(self, name: str) -> list[float]:
        return [log[name] for log in self.logs.logs if name in log]

    def _loaded(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.path)

    def _adapted(self, parts: dict[str, Any]) -> Any:
        return get_peft_model(self._loaded(), parts["peft_config"]) if "peft_config" in parts else self._loaded()

    def _weights(self) -> torch.Tensor:
        return torch.cat([x.detach().flatten().clone() for x in self.trainer.model.parameters()])


def distance(one: Run, other: Run) -> float:
    """Return the largest difference of a weight, relative to the largest change of one by training."""
    changed = float((other.weights - other.start).abs().max())
    assert changed > 1e-4
    return float((one.weights - other.weights).abs().max()) / changed


def threads_left() -> list[str]:
    time.sleep(0.1)  # a thread ends a moment after its call
    return [x.name for x in threading.enumerate() if x.name.startswith("generation batch")]


@pytest.mark.parametrize("name", [pytest.param(x, marks=() if x in FAST else pytest.mark.slow) for x in CASES])
def test_lag_of_one_trains_as_stock_trl_does_on_older_samples(name: str, workshop: Workshop, tmp_path: Path) -> None:
    ours = Run(workshop, tmp_path / "a", **CASES[name]).train()
    stock = Run(workshop, tmp_path / "b", stock=True, **CASES[name]).train()
    losses = ours.logged("loss"), stock.logged("loss")
    size = max(1.0, *map(abs, losses[1]))  # some losses are sums over tokens
    assert losses[0] == pytest.approx(losses[1], abs=TOLERANCE * size)
    assert len(losses[0]) > 2
    for metric in ("reward", "completions/mean_length", "mean_tokens", "num_tokens"):
        assert ours.logged(metric) == pytest.approx(stock.logged(metric), abs=1e-6), metric
    assert distance(ours, stock) < 1e-4
    assert max(ours.logged("generation_ahead/age_in_steps")) > 0
    assert threads_left() == []


class MasksTokens(OwnSampler):
    """Says that every third token of a completion is not the policy's."""

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        output = super().__call__(prompts, trainer)
        return output | {"env_mask": [[int(i % 3 > 0) for i in range(len(x))] for x in output["completion_ids"]]}


class Chats(OwnSampler):
    """Samples for messages."""

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        return super().__call__([messages[0]["content"] for messages in prompts], trainer)


def reply_length(completions: list[Any], **_: Any) -> list[float]:
    return [-0.1 * len(messages[0]["content"].split()) for messages in completions]


def reward_model() -> LlamaForSequenceClassification:
    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=len(word_tokenizer()),
        num_labels=1,
        pad_token_id=0,
    )
    return LlamaForSequenceClassification(config)


def messages() -> Any:
    return rows().map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param(lambda: {"sampler": MasksTokens}, id="masked tokens"),
        pytest.param(
            lambda: {
                "sampler": Chats,
                "train_dataset": messages(),
                "reward_funcs": [even_tokens, reply_length],
                "processing_class": chat_tokenizer(),
                "model_name": "chat",
            },
            id="messages",
        ),
        pytest.param(
            lambda: {
                "reward_funcs": [even_tokens, reward_model(), short_text],
                "reward_weights": [1.0, 0.5, 1.0],
                "reward_processing_classes": [None, word_tokenizer(), None],
            },
            id="reward model",
        ),
    ],
)
def test_what_trl_supports_trains_as_stock_trl_does_on_older_samples(
    parts: Callable[[], dict[str, Any]], workshop: Workshop, tmp_path: Path
) -> None:
    ours = Run(workshop, tmp_path / "a", **parts()).train()
    stock = Run(workshop, tmp_path / "b", stock=True, **parts()).train()
    for metric in ("loss", "reward", "completions/mean_length", "num_tokens"):
        assert ours.logged(metric) == pytest.approx(stock.logged(metric), abs=TOLERANCE), metric
    assert distance(ours, stock) < 1e-4
    assert len(set(ours.logged("reward"))) > 1


def test_without_a_delay_stock_trl_trains_otherwise(workshop: Workshop, tmp_path: Path) -> None:
    ours = Run(workshop, tmp_path / "a").train()
    stock = Run(workshop, tmp_path / "b", stock=True, lag=0).train()
    assert distance(ours, stock) > 0.1


def test_each_batch_is_sampled_with_the_weights_before_the_one_ahead_of_it(workshop: Workshop, tmp_path: Path) -> None:
    run = Run(workshop, tmp_path).train()
    assert run.sampler.steps == [0, 0, 1, 2, 3]
    assert run.logged("generation_ahead/age_in_steps") == [0, 1, 1, 1, 1]


class SamplesWith(OwnSampler):
    """A sampler that calls a function of the trainer first."""

    def __init__(self, model: Any, read: Callable[[Any], Any]) -> None:
        super().__init__(model)
        self.read = read

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        self.read(trainer)
        return super().__call__(prompts, trainer)


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda trainer: trainer.model, "GRPOTrainer.model` was read by a function that runs beside training"),
        (lambda trainer: trainer.accelerator.gather(torch.ones(1)), "Accelerator.gather` was read"),
        (lambda trainer: trainer.accelerator.unwrap_model(None), "sync_weights"),
        (lambda trainer: setattr(trainer, "note", 1), "GRPOTrainer.note` was set"),
        (lambda trainer: trainer.log({"note": 1.0}), "A reward function logs with its arguments `log_metric`"),
        (lambda trainer: trainer._generate_single_turn, "It may run the model"),
        (lambda trainer: trainer.save_model(), "It may run the model"),
        (lambda trainer: trainer.optimizer, "GRPOTrainer.optimizer` was read"),
        (lambda trainer: trainer.callback_handler, "GRPOTrainer.callback_handler` was read"),
        (lambda trainer: trainer.accelerator.backward, "Accelerator.backward` was read"),
        (lambda trainer: signal.signal(signal.SIGALRM, signal.SIG_DFL), "sets a handler of a signal"),
        (lambda trainer: torch.rand(1), "draws from torch's global generator"),
        (lambda trainer: random.random(), "draws from the module `random`"),
        (lambda trainer: np.random.rand(), "draws from NumPy's global generator"),
    ],
)
def test_what_races_with_training_is_an_error_before_the_first_step(
    read: Callable[[Any], Any], message: str, workshop: Workshop, tmp_path: Path
) -> None:
    run = Run(workshop, tmp_path, sampler=lambda model: SamplesWith(model, read))
    with pytest.raises((RuntimeError, ValueError)) as caught:
        run.train()
    assert message in str(caught.value)
    assert run.trainer.state.global_step == 0


def test_functions_may_use_asyncio_and_methods_of_the_users_class(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Own(trl_ext.GRPOTrainer):
        def peek(self) -> int:
            return self.state.global_step + self.args.seed + int(self.is_world_process_zero())

        def weight(self) -> float:
            return float(self.model.get_input_embeddings().weight.sum())

    async def rewards(completion_ids: list[list[int]]) -> list[float]:
        return [float(sum(ids) % 5) for ids in completion_ids]

    def awaited(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return asyncio.run(rewards(completion_ids))

    monkeypatch.setattr(trl_ext, "GRPOTrainer", Own)
    peeks: list[int] = []
    sampler = lambda model: SamplesWith(model, lambda trainer: peeks.append(trainer.peek()))  # noqa: E731
    Run(workshop, tmp_path / "a", sampler=sampler, reward_funcs=[awaited]).train()
    assert peeks == [step + 8 for step in (0, 0, 1, 2, 3)]
    sampler = lambda model: SamplesWith(model, lambda trainer: trainer.weight())  # noqa: E731
    with pytest.raises(RuntimeError, match="model` was read by a function that runs beside training"):
        Run(workshop, tmp_path / "b", sampler=sampler).train()


@pytest.mark.parametrize("kind", ["numpy", "pandas", "torch", "arrow"])
def test_a_format_of_the_data_set_trains(kind: str, workshop: Workshop, tmp_path: Path) -> None:
    data = rows().map(lambda row, i: {"score": i / 7}, with_indices=True)

    def score(completion_ids: list[list[int]], score: Any, **_: Any) -> list[float]:
        return [float(len(ids)) + float(x) for ids, x in zip(completion_ids, score, strict=True)]

    parts = {"train_dataset": data.with_format(kind), "reward_funcs": [score]}
    try:
        lag_0 = Run(workshop, tmp_path / "a", lag=0, **parts).train()
    except Exception:  # of TRL, which does not train on such rows
        pytest.skip(f"TRL does not train on rows of the format {kind!r}")
    run = Run(workshop, tmp_path / "b", **parts).train()
    assert run.logged("reward")[0] == pytest.approx(lag_0.logged("reward")[0])
    assert len(run.logged("loss")) == 5


def test_a_nan_is_named_once(workshop: Workshop, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def sometimes(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float("nan"), *(float(sum(ids) % 5) for ids in completion_ids[1:])]

    caplog.set_level(logging.WARNING, logger="trl_ext")
    Run(workshop, tmp_path, reward_funcs=[sometimes]).train()
    assert sum("returned nan" in x for x in caplog.messages) == 1


def test_after_a_checkpoint_draws_of_a_function_are_found(workshop: Workshop, tmp_path: Path) -> None:
    Run(workshop, tmp_path / "a", save_strategy="steps", save_steps=2).train()
    sampler = lambda model: SamplesWith(model, lambda trainer: random.random())  # noqa: E731
    run = Run(workshop, tmp_path / "b", sampler=sampler)
    with pytest.raises(ValueError, match="draws from the module `random`"):
        run.train(str(tmp_path / "a" / "checkpoint-2"))


def test_an_evaluation_waits_for_the_call_of_a_training_that_failed(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fails(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            raise OSError("a fault of a callback")

    running = 0
    most = 0

    class Slow(OwnSampler):
        def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
            nonlocal running, most
            running += 1
            most = max(most, running)
            time.sleep(1.0 if threading.current_thread().name.startswith("generation batch") else 0.0)
            running -= 1
            return super().__call__(prompts, trainer)

    monkeypatch.setattr("trl_ext.trainers.generation_ahead._PATIENCE", 0.1)
    options = {"eval_dataset": rows(4), "per_device_eval_batch_size": 4}
    run = Run(workshop, tmp_path, sampler=Slow, callbacks=[Fails()], **options)
    with pytest.raises(OSError, match="a fault of a callback"):
        run.train()
    run.trainer.evaluate()
    assert most == 1
    assert threads_left() == []


def test_sampling_ahead_without_effect_is_a_warning(workshop: Workshop, tmp_path: Path) -> None:
    run = Run(workshop, tmp_path, lag=0, sample_ahead=True)
    assert any("`sample_ahead=True` has no effect" in x for x in run.trainer.explain().warnings)


def test_a_reward_function_that_hides_an_error_of_its_time_limit_is_found(workshop: Workshop, tmp_path: Path) -> None:
    """Its rewards would all be 0 in a thread."""

    def limited(completion_ids: list[list[int]], **_: Any) -> list[float]:
        try:
            before = set_handler(signal.SIGALRM, lambda *_: None)
            set_handler(signal.SIGALRM, before)
            return [float(sum(ids) % 5) for ids in completion_ids]
        except ValueError:
            return [0.0 for _ in completion_ids]

    with pytest.raises(ValueError, match="sets a handler of a signal"):
        Run(workshop, tmp_path / "a", reward_funcs=[limited]).train()
    ahead = {"lag": 0, "sample_ahead": True, "gradient_accumulation_steps": 2, "steps_per_generation": 1}
    run = Run(workshop, tmp_path / "b", reward_funcs=[limited], **ahead).train()
    assert min(run.logged("reward")) > 0


@pytest.mark.parametrize("name", ["_prepare_inputs", "training_step", "get_batch_samples"])
def test_rows_that_a_subclass_changes_are_an_error(
    name: str, workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rewards would be those of the rows of the data set."""

    def changed(rows: Any) -> Any:
        if isinstance(rows, list) and isinstance(rows[0], dict):
            return [{**row, "answer": row["answer"] + 100} for row in rows]
        return [changed(x) for x in rows] if isinstance(rows, list) else rows

    class Changes(trl_ext.GRPOTrainer):
        if name == "_prepare_inputs":

            def _prepare_inputs(self, generation_batch: Any) -> Any:
                return super()._prepare_inputs(changed(generation_batch))

        if name == "training_step":

            def training_step(self, model: Any, inputs: Any, *positional: Any) -> Any:
                return super().training_step(model, changed(inputs), *positional)

        if name == "get_batch_samples":

            def get_batch_samples(self, *positional: Any) -> Any:
                batches, items = super().get_batch_samples(*positional)
                return changed(batches), items

    monkeypatch.setattr(trl_ext, "GRPOTrainer", Changes)
    with pytest.raises(ValueError, match="batch 0 has other rows than TRL's data loader gives it"):
        Run(workshop, tmp_path).train()


def test_completions_may_be_arrays(workshop: Workshop, tmp_path: Path) -> None:
    class ReturnsArrays(OwnSampler):
        def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
            output = super().__call__(prompts, trainer)
            return output | {"completion_ids": [np.array(ids) for ids in output["completion_ids"]]}

    def last(completion_ids: list[Any], **_: Any) -> list[float]:
        return [float(ids[-1] % 5) for ids in completion_ids]

    arrays = Run(workshop, tmp_path / "a", sampler=ReturnsArrays, reward_funcs=[last]).train()
    lists = Run(workshop, tmp_path / "b", reward_funcs=[last]).train()
    assert torch.equal(arrays.weights, lists.weights)


def test_a_sampler_without_log_probs_needs_the_correction_off(workshop: Workshop, tmp_path: Path) -> None:
    class WithoutLogProbs(OwnSampler):
        def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
            return super().__call__(prompts, trainer) | {"logprobs": None}

    with pytest.raises(ValueError, match="`rollout_func` returned no `logprobs`"):
        Run(workshop, tmp_path / "a", sampler=WithoutLogProbs).train()
    off = Run(workshop, tmp_path / "b", sampler=WithoutLogProbs, vllm_importance_sampling_correction=False)
    assert len(off.train().logged("loss")) == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dynamic_sampling": True}, "`dynamic_sampling` draws further prompts"),
        ({"train_dataset": rows().with_transform(lambda batch: batch)}, "a transform of the data set"),
        ({"train_dataset": rows().to_iterable_dataset()}, "a streaming data set"),
        ({"sampler": lambda model: OwnSampler(model).__call__}, "has no method `sync_weights"),
    ],
)
def test_what_is_not_supported_is_an_error(
    arguments: dict[str, Any], message: str, workshop: Workshop, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="`generation_lag=1` is not supported here") as caught:
        Run(workshop, tmp_path, **arguments)
    assert message in str(caught.value)


class Faulty:
    """A reward function and a sampler, one of which has a fault at a call.

    Args:
        part (`str`): "reward", "sampler" or "sync".
        fault (`Callable`): gets what the part returns.
        call (`int`): the number of the call, from 1.
    """

    def __init__(self, part: str, fault: Callable[[Any], Any], call: int) -> None:
        self.part = part
        self.fault = fault
        self.call = call
        self.calls = 0

    def passed(self, part: str, value: Any) -> Any:
        self.calls += part == self.part
        return self.fault(value) if (part, self.calls) == (self.part, self.call) else value

    def reward(self, completion_ids: list[list[int]], **_: Any) -> Any:
        return self.passed("reward", [float(sum(ids) % 5) for ids in completion_ids])

    def sampler(self, model: Any) -> OwnSampler:
        passed = self.passed

        class FaultySampler(OwnSampler):
            def __call__(self, prompts: list[str], trainer: Any) -> Any:
                return passed("sampler", super().__call__(prompts, trainer))

            def sync_weights(self, trainer: Any) -> None:
                super().sync_weights(passed("sync", trainer))

        return FaultySampler(model)


def divide_by_zero(_: Any) -> Any:
    raise ZeroDivisionError("a fault")


FAULTS = {
    "a reward function raises": ("reward", divide_by_zero, ZeroDivisionError, "a fault"),
    "a reward is text": ("reward", lambda rewards: ["good", *rewards[1:]], TypeError, "`reward` returned"),
    "a reward function returns nothing": ("reward", lambda _: None, TypeError, "`reward` returned None"),
    "a reward is missing": ("reward", lambda rewards: rewards[1:], TypeError, "`reward` returned"),
    "the sampler raises": ("sampler", divide_by_zero, ZeroDivisionError, "a fault"),
    "a completion is missing": (
        "sampler",
        lambda output: output | {"completion_ids": output["completion_ids"][1:]},
        ValueError,
        "`rollout_func` returned 7 completions for 8 prompts",
    ),
    "a completion is empty": (
        "sampler",
        lambda output: output | {"completion_ids": [[], *output["completion_ids"][1:]]},
        ValueError,
        "`rollout_func` returned an empty completion",
    ),
    "weights cannot be sent": ("sync", divide_by_zero, ZeroDivisionError, "a fault"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_ends_the_step_that_needs_the_batch(name: str, workshop: Workshop, tmp_path: Path) -> None:
    part, fault, error, message = FAULTS[name]
    faulty = Faulty(part, fault, call=4)
    run = Run(workshop, tmp_path, reward_funcs=[faulty.reward], sampler=faulty.sampler)
    with pytest.raises(error, match=message) as caught:
        run.train()
    assert run.trainer.state.global_step == 3
    files = {Path(frame.filename).name for frame in traceback.extract_tb(caught.value.__traceback__)}
    assert Path(__file__).name in files
    assert threads_left() == []


def test_an_early_stop_leaves_no_thread(workshop: Workshop, tmp_path: Path) -> None:
    class Stops(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step == 2

    run = Run(workshop, tmp_path, callbacks=[Stops()], seconds=0.3)
    run.train()
    assert run.trainer.state.global_step == 2
    assert threads_left() == []


def test_an_interrupt_ends_training_while_the_sampler_hangs(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    released = threading.Event()

    def hang(trainer: Any) -> None:
        if trainer.state.global_step == 1:
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGINT)
            released.wait()

    monkeypatch.setattr("trl_ext.trainers.generation_ahead._PATIENCE", 0.1)
    caplog.set_level(logging.WARNING, logger="trl_ext")
    run = Run(workshop, tmp_path, sampler=lambda model: SamplesWith(model, hang))
    # A shell starts a job in the background with interrupts ignored
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run.train()
    finally:
        signal.signal(signal.SIGINT, before)
    assert any("still runs after" in x for x in caplog.messages)
    released.set()
    time.sleep(0.5)
    assert threads_left() == []


def test_a_sampler_that_hangs_is_named(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("trl_ext.trainers.generation_ahead._NEWS", 0.05)
    caplog.set_level(logging.WARNING, logger="trl_ext")
    sampler = lambda model: SamplesWith(model, lambda trainer: time.sleep(0.5))  # noqa: E731
    Run(workshop, tmp_path, sampler=sampler, max_steps=2).train()
    assert any("generation batch 1: training has waited" in x for x in caplog.messages)


def test_evaluation_waits_for_the_batch_in_flight(workshop: Workshop, tmp_path: Path) -> None:
    running = 0
    most = 0

    class Counts(OwnSampler):
        def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
            nonlocal running, most
            running += 1
            most = max(most, running)
            try:
                return super().__call__(prompts, trainer)
            finally:
                running -= 1

    options = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": rows(4), "per_device_eval_batch_size": 4}
    with_evaluation = Run(workshop, tmp_path / "a", sampler=Counts, **options).train()
    without = Run(workshop, tmp_path / "b").train()
    assert most == 1
    # An evaluation draws a seed for its data loader, so rows are shuffled otherwise, and sums rounded otherwise
    assert distance(with_evaluation, without) < 1e-4
    assert with_evaluation.logged("reward") == without.logged("reward")


@pytest.mark.parametrize("schedule", [{}, {"steps_per_generation": 4}, {"num_iterations": 2}])
@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_resumed_run_continues_bit_for_bit(
    step: int, schedule: dict[str, int], workshop: Workshop, tmp_path: Path
) -> None:
    options = {"save_strategy": "steps", "save_steps": 1, **schedule}
    whole = Run(workshop, tmp_path, **options).train()
    resumed = Run(workshop, tmp_path / "b", **options).train(str(tmp_path / f"checkpoint-{step}"))
    assert torch.equal(resumed.weights, whole.weights)
    assert resumed.logged("loss") == whole.logged("loss")[step:]


@pytest.mark.parametrize("lags", [(0, 1), (1, 0)])
def test_a_run_resumes_with_another_lag(lags: tuple[int, int], workshop: Workshop, tmp_path: Path) -> None:
    before, after = lags
    options = {"save_strategy": "steps", "save_steps": 1}
    Run(workshop, tmp_path, lag=before, max_steps=2, **options).train()
    resumed = Run(workshop, tmp_path / "b", lag=after, **options).train(str(tmp_path / "checkpoint-2"))
    assert len(resumed.logged("loss")) == 3


@pytest.mark.parametrize("batches", [2, 4])
def test_within_a_step_the_next_batch_is_sampled_ahead_without_a_lag(
    batches: int, workshop: Workshop, tmp_path: Path
) -> None:
    """Bit for bit what a `rollout_func` gives that takes the weights itself, one batch after the other."""

    class TakesWeights(OwnSampler):
        sync_weights = None  # type: ignore[assignment]

        def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
            self.model.load_state_dict(trainer.model.state_dict())
            return super().__call__(prompts, trainer)

    threads: list[str] = []

    class NotesThread(OwnSampler):
        def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
            threads.append(threading.current_thread().name)
            return super().__call__(prompts, trainer)

    options = {"gradient_accumulation_steps": batches, "steps_per_generation": 1, "max_steps": 3, "lag": 0}
    ahead = Run(workshop, tmp_path / "a", sampler=NotesThread, sample_ahead=True, **options).train()
    in_turn = Run(workshop, tmp_path / "b", sampler=TakesWeights, **options).train()
    assert torch.equal(ahead.weights, in_turn.weights)
    assert ahead.sampler.steps == in_turn.sampler.steps
    names = [f"generation batch {x}" if x % batches else "MainThread" for x in range(3 * batches)]
    assert threads == names
    for name in ("loss", "reward", "num_tokens", "mean_tokens", "grad_norm"):
        assert ahead.logged(name) == in_turn.logged(name)


@pytest.mark.parametrize("name", ["JSON", "not JSON"])
def test_a_batch_that_cannot_be_saved_is_sampled_again(
    name: str, workshop: Workshop, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class ReturnsTensors(OwnSampler):
        def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
            output = super().__call__(prompts, trainer)
            return output | {"note": [torch.ones(1) for _ in prompts]} if name == "not JSON" else output

    caplog.set_level(logging.WARNING, logger="trl_ext")
    options = {"save_strategy": "steps", "save_steps": 1, "sampler": ReturnsTensors}
    whole = Run(workshop, tmp_path, **options).train()
    resumed = Run(workshop, tmp_path / "b", **options).train(str(tmp_path / "checkpoint-2"))
    lost = any("is sampled again: it cannot be saved" in x for x in caplog.messages)
    assert lost == (name == "not JSON")
    assert len(resumed.logged("loss")) == len(whole.logged("loss")) - 2


def test_functions_may_change_what_they_get(workshop: Workshop, tmp_path: Path) -> None:
    """TRL has made its tensors before the rewards."""

    def edits(completion_ids: list[list[int]], **_: Any) -> list[float]:
        rewards = [float(sum(ids) % 5) for ids in completion_ids]
        for ids in completion_ids:
            ids[:] = [1]
        return rewards

    ours = Run(workshop, tmp_path / "a", reward_funcs=[edits]).train()
    stock = Run(workshop, tmp_path / "b", stock=True, reward_funcs=[edits]).train()
    assert ours.logged("reward") == pytest.approx(stock.logged("reward"), abs=1e-6)
    assert distance(ours, stock) < 1e-4


def test_without_the_options_a_rollout_func_runs_as_in_trl(workshop: Workshop, tmp_path: Path) -> None:
    class SendsItself(OwnSampler):
        def sync_weights(self) -> None:  # type: ignore[override]  # not the one that trl_ext calls
            raise AssertionError

        def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
            self.model.load_state_dict(trainer.model.state_dict())
            random.random()
            return super().__call__(prompts, trainer)

    options = {"lag": 0, "gradient_accumulation_steps": 2, "steps_per_generation": 1, "max_steps": 2}
    assert len(Run(workshop, tmp_path, sampler=SendsItself, **options).train().logged("loss")) == 2


def test_without_a_lag_draws_from_a_global_generator_end_sampling_ahead(
    workshop: Workshop, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="trl_ext")
    options = {"gradient_accumulation_steps": 2, "steps_per_generation": 1, "max_steps": 2, "sample_ahead": True}
    sampler = lambda model: SamplesWith(model, lambda trainer: random.random())  # noqa: E731
    run = Run(workshop, tmp_path, lag=0, sampler=sampler, **options).train()
    assert any("not sampled ahead: `rollout_func` or a reward function draws from" in x for x in caplog.messages)
    assert run.logged("generation_ahead/age_in_steps") == [0]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"seed": 8}, "other prompts come next"),
        ({"num_generations": 2}, "the schedule has changed"),
        ({"per_device_train_batch_size": 8}, "the schedule has changed"),
    ],
)
def test_a_resumed_run_with_another_schedule_samples_again(
    changes: dict[str, Any], reason: str, workshop: Workshop, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="trl_ext")
    Run(workshop, tmp_path, save_strategy="steps", save_steps=1, max_steps=4).train()
    resumed = Run(workshop, tmp_path / "b", **changes)
    resumed.train(str(tmp_path / "checkpoint-2"))
    assert any(f"is sampled again: {reason}" in x for x in caplog.messages)
    assert resumed.sampler.steps[0] == 2


def test_a_checkpoint_keeps_a_batch_that_waits(workshop: Workshop, tmp_path: Path) -> None:
    options = {"steps_per_generation": 8, "save_strategy": "steps", "save_steps": 1, "max_steps": 6}
    whole = Run(workshop, tmp_path / "a", **options).train()
    Run(workshop, tmp_path / "b", **{**options, "max_steps": 2}, callbacks=[]).train(
        str(tmp_path / "a" / "checkpoint-1")
    )
    resumed = Run(workshop, tmp_path / "c", **options).train(str(tmp_path / "b" / "checkpoint-2"))
    assert torch.equal(resumed.weights, whole.weights)


def test_a_checkpoint_without_a_batch_removes_that_of_an_earlier_run(workshop: Workshop, tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    Run(workshop, tmp_path, **options).train()
    assert list(tmp_path.glob("checkpoint-2/generation_ahead_*.json"))
    Run(workshop, tmp_path, lag=0, **options).train(str(tmp_path / "checkpoint-1"))
    assert not list(tmp_path.glob("checkpoint-2/generation_ahead_*.json"))


def test_a_checkpoint_of_a_second_training_continues(workshop: Workshop, tmp_path: Path) -> None:
    options = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1}
    run = Run(workshop, tmp_path, **options).train()
    run.train()
    resumed = Run(workshop, tmp_path / "b", **options).train(str(tmp_path / "checkpoint-2"))
    assert torch.equal(resumed.weights, run.weights)


def test_a_trainer_resumes_after_a_stop_within_a_generation_batch(workshop: Workshop, tmp_path: Path) -> None:
    class Stops(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop |= not stopped and state.global_step == 3

    stopped: list[bool] = []
    options = {"steps_per_generation": 4, "save_strategy": "steps", "save_steps": 1, "max_steps": 6}
    run = Run(workshop, tmp_path / "a", callbacks=[Stops()], **options).train()
    assert run.trainer.state.global_step == 3
    stopped.append(True)
    run.train(str(tmp_path / "a" / "checkpoint-3"))
    whole = Run(workshop, tmp_path / "b", **options).train()
    assert torch.equal(run.weights, whole.weights)


def test_a_schedule_that_begins_to_share_steps_samples_in_turn(workshop: Workshop, tmp_path: Path) -> None:
    class Accumulates(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            args.gradient_accumulation_steps = 4

    options = {"lag": 0, "sample_ahead": True, "gradient_accumulation_steps": 2, "steps_per_generation": 2}
    run = Run(workshop, tmp_path, callbacks=[Accumulates()], max_steps=3, **options).train()
    assert run.logged("generation_ahead/age_in_steps") == []


def test_a_second_training_begins_with_the_first_prompts(workshop: Workshop, tmp_path: Path) -> None:
    ours = Run(workshop, tmp_path / "a", max_steps=3).train().train()
    stock = Run(workshop, tmp_path / "b", stock=True, lag=0, max_steps=3)
    rewards = stock.train().train().logged("mean_tokens")
    assert len(ours.logged("loss")) == len(rewards) == 6
    assert ours.logged("generation_ahead/age_in_steps") == [0, 1, 1, 0, 1, 1]


def test_a_second_training_within_a_generation_batch_is_an_error(workshop: Workshop, tmp_path: Path) -> None:
    run = Run(workshop, tmp_path, max_steps=3, steps_per_generation=4).train()
    with pytest.raises(ValueError, match="the last `train\\(\\)` ended within a generation batch"):
        run.train()


@pytest.mark.slow
def test_a_run_that_is_killed_twenty_times_ends_as_one_that_is_not(workshop: Workshop, tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "support" / "killed_ahead.py"
    ended = subprocess.run(
        [sys.executable, script, str(tmp_path), workshop.model("untied"), "20"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    result = json.loads(ended.stdout.splitlines()[-1])
    assert result["killed"] == 20
    assert result["equal"]
    assert all(result["equal"])


def test_a_full_disk_is_the_error_of_the_checkpoint(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("trl_ext.checkpoints.generation_ahead.Path.write_text", full)
    run = Run(workshop, tmp_path, save_strategy="steps", save_steps=2)
    with pytest.raises(OSError, match="No space left"):
        run.train()
    assert run.trainer.state.global_step == 2
    assert threads_left() == []


def test_a_call_that_failed_before_a_checkpoint_fails_at_its_step(
    workshop: Workshop, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="trl_ext")
    calls = 0

    def fails_once(completion_ids: list[list[int]], **_: Any) -> list[float]:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise ConnectionError("the reward service is gone")
        return [float(sum(ids) % 5) for ids in completion_ids]

    options = {"save_strategy": "steps", "save_steps": 1, "reward_funcs": [fails_once]}
    run = Run(workshop, tmp_path / "a", **options)
    with pytest.raises(ConnectionError):
        run.train()
    assert run.trainer.state.global_step == 2
    resumed = Run(workshop, tmp_path / "b", **options).train(str(tmp_path / "a" / "checkpoint-2"))
    assert any("is sampled again: ConnectionError: the reward service is gone" in x for x in caplog.messages)
    assert len(resumed.logged("loss")) == 3


def test_an_infinite_reward_is_an_error_of_the_first_step(workshop: Workshop, tmp_path: Path) -> None:
    def infinite(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float("inf") for _ in completion_ids]

    with pytest.raises(ValueError, match="Return a finite number for each completion"):
        Run(workshop, tmp_path, reward_funcs=[infinite]).train()
    assert threads_left() == []
