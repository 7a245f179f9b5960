"""GRPO's next generation batch, sampled and rewarded in a thread while the current one trains (`generation_lag`).

The thread runs only the user's functions and requests to vLLM's server, and records what they return. When the batch is
due, TRL's own generation runs on the main thread and gets the record. Collectives, TRL's metrics and random generators
stay on the main thread. So does a sampler in this process: then only rewards run beside training.
"""

import _signal
import copy
import dataclasses
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..checkpoints.generation import position_in_data
from ..checkpoints.generation_ahead import read_ahead, write_ahead
from ..compat import sampled as internals
from ..compat.replaced import replaced
from ..compat.user_functions import LocalTurn, Record, ServerRequest, Turn, UserFunctions, replayed
from ..distributed.ranks import Ranks
from ..distributed.thread_messages import ThreadMessages
from ..planning.sampled import GENERATE
from .generate_rows import FewerRows
from .sampled_metrics import SampledMetrics
from .trainer_view import view_of

logger = logging.getLogger("trl_ext")

_CANARY = 16  # tokens of a completion that shows whether the sampler has the policy's weights
_PATIENCE = 10.0  # seconds that the end of training waits for a call that still runs
_NEWS = 60.0  # seconds between messages while training waits for a call


class BackgroundCall:
    """A call in a thread, which ends with the process."""

    def __init__(self, call: Callable[[], Record], name: str) -> None:
        self.name = name
        self._call = call
        self._record: Record | None = None
        self._error: BaseException | None = None
        # Not the thread's `join`: interrupted by Ctrl-C, it takes the thread for ended (https://bugs.python.org/issue45274)
        self._has_ended = threading.Event()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        try:
            self._record = self._call()
        except BaseException as error:  # raised on the main thread, at the step that needs the record
            self._error = error
        finally:
            self._has_ended.set()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the call has ended, for at most `seconds`. Returns whether it has."""
        return self._has_ended.wait(seconds)

    def wait_until_ended(self) -> None:
        """Wait until the call has ended. Says once a minute that it waits."""
        waited = 0.0
        while not self.wait(_NEWS):
            waited += _NEWS
            logger.warning(f"{self.name}: training has waited for {waited:.0f} s for the sampler or reward functions.")

    def result(self) -> Record:
        """Return what the call returned, or raise what it raised. Waits until it has ended."""
        self.wait_until_ended()
        if self._error is not None:
            raise self._error
        assert self._record is not None
        return self._record


class GenerationAhead:
    """Samples and rewards one generation batch ahead of its turn.

    Args:
        trainer (`GRPOTrainer`): which generates.
    """

    def __init__(
        self,
        trainer: Any,
        ranks: Ranks,
        metrics: SampledMetrics,
        buffer: internals.Buffer,
        fewer_rows: FewerRows,
    ) -> None:
        self.trainer = trainer
        self.ranks = ranks
        self.metrics = metrics
        self.buffer = buffer
        self.fewer_rows = fewer_rows
        self.gave_nan: set[str] = set()  # names of reward functions that a warning on NaN has named
        self._call: BackgroundCall | None = None
        self._dropped_call: BackgroundCall | None = None  # of an earlier training run
        self._record: Record | None = None  # of a checkpoint, or sampled on the main thread
        self._in_turn_reason: str | None = None  # why this training run does not sample ahead; without a lag
        self._first_batch = 0  # the number of this training run's first generation batch since the trainer was built
        self._upcoming: internals.UpcomingRows | None = None
        self._tokenizer: Any = None
        self._messages: ThreadMessages | None = None
        self._replayed: Record | None = None  # what TRL's generation gets now
        self._is_first = True
        self._sent_at_step: int | None = None  # the optimizer step of the weights that the sampler has

    @property
    def lag(self) -> int:
        lag: int = self.trainer._added.generation_lag
        return lag

    @property
    def is_on(self) -> bool:
        """Whether a generation batch may be sampled ahead: with a lag, or with the same weights within a step."""
        if self.lag:
            return True
        return self._is_asked and self._shares_steps and self._in_turn_reason is None and self.refusal() is None

    @property
    def samples_in_process(self) -> bool:
        """Whether sampling takes this process's time, so that only rewards run beside training."""
        return self.trainer.rollout_func is None and not self._has_server

    @property
    def _has_server(self) -> bool:
        return bool(self.trainer.use_vllm and self.trainer.vllm_mode == "server")

    @property
    def _sampler(self) -> str:
        if self.trainer.rollout_func is not None:
            return "`rollout_func`"
        return "vLLM's server" if self._has_server else "this process"

    @property
    def _is_asked(self) -> bool:
        """Whether to sample ahead without a lag. A `rollout_func` must be written for it."""
        sample_ahead = self.trainer._added.sample_ahead
        return self.trainer.rollout_func is None if sample_ahead is None else bool(sample_ahead)

    @property
    def _shares_steps(self) -> bool:
        return self.buffer.micro_batches_of_a_generation < self.trainer.args.gradient_accumulation_steps

    def check(self) -> None:
        """Raise `ValueError` if this trainer cannot sample ahead as its arguments ask."""
        added = self.trainer._added
        if self.lag and added.sample_ahead is False:
            raise ValueError("`generation_lag=1` needs `sample_ahead`, which is False. Change one of them.")
        option = "generation_lag=1" if self.lag else "sample_ahead=True"
        reason = self.refusal() if self.lag or added.sample_ahead else None
        if reason is not None:
            raise ValueError(
                f"`{option}` is not supported here: {reason}, or leave `{option.partition('=')[0]}` unset."
            )

    def refusal(self) -> str | None:
        """Return why this trainer cannot sample ahead; `None` if it can."""
        trainer = self.trainer
        rollout_func = trainer.rollout_func
        overridden = next((x for x in ("sampler", "generation", "rewards") if trainer._replaces(x)), None)
        moved_reason: str | None = trainer._features.why_off("sampling ahead")
        if moved_reason is not None:
            return f"{moved_reason}. Use a tested version of TRL"
        if self.samples_in_process and not self.lag:
            return (
                "the sampler draws random numbers between those of training. Use vLLM's server, a `rollout_func` or "
                "`generation_lag=1`"
            )
        if self.lag and self._corrects and self.fewer_rows.facts().sampler == GENERATE:
            return (
                "`generate` returns no log-probs, so the loss cannot correct for the age of the weights. Use vLLM or "
                "continuous batching, accept the bias with `vllm_importance_sampling_correction=False`"
            )
        if rollout_func is not None and trainer.use_vllm:
            return "with `use_vllm=True`, TRL sends weights to vLLM while `rollout_func` runs. Leave `use_vllm` off"
        if rollout_func is not None and not callable(getattr(rollout_func, "sync_weights", None)):
            return (
                "`rollout_func` has no method `sync_weights(trainer)`, which copies the policy's weights to the "
                "sampler between optimizer steps. Give it one"
            )
        if not hasattr(trainer.train_dataset, "__len__"):
            return "a streaming data set does not say which prompts come next. Load the data set whole"
        if internals.reads_rows_anew(trainer):
            return "a transform of the data set or a data collator may change rows each time. Apply it before training"
        if trainer.tools or trainer.environment_factories is not None:
            return "tools and environments run on the main thread. Call them in a `rollout_func`"
        if trainer._is_vlm:
            return "a model of images is not supported. Train a text model"
        if trainer._added.dynamic_sampling:
            return "`dynamic_sampling` draws further prompts once the rewards are known. Leave it off"
        if trainer._added.keep_sampling_mask:
            return "the sampling mask is recorded on the main thread. Leave `keep_sampling_mask` off"
        if overridden is not None:
            return f"this trainer overrides TRL's {overridden}. Leave it to TRL"
        if self.ranks.tensor_parallel is not None or self.ranks.sequence is not None:
            return "ranks that share a model or a row must sample together. Use data parallelism"
        return None

    def begin(self, *, resumes: bool) -> None:
        """Called when training begins, before a checkpoint is read. All ranks call it.

        Args:
            resumes (`bool`): whether a checkpoint follows.
        """
        if not self.is_on:
            return
        self.check()  # the data set or the sampler may be another than before
        if self.buffer.in_mid_cycle and not resumes:
            self._give_up("the last `train()` ended within a generation batch. Build a new trainer")
        self._first_batch = self.buffer.number
        self._upcoming = internals.UpcomingRows(self.trainer, self.buffer)
        self._tokenizer = copy.deepcopy(self.trainer.processing_class)
        self._messages = ThreadMessages(self.ranks) if self._has_server else None
        self._wait_for_calls()

    def end(self) -> None:
        """Called when training ends, also by an error. A batch that is not trained on is dropped."""
        call = self._call
        self._call = None
        self._record = None
        self._upcoming = None
        self._in_turn_reason = None
        self._is_first = True
        self._sent_at_step = None  # the best checkpoint's weights may be loaded now
        if call is not None and not call.wait(_PATIENCE):
            logger.warning(
                f"{call.name} still runs after {_PATIENCE:.0f} s. Its thread ends with the process. Another training "
                "or evaluation waits for it."
            )
            self._dropped_call = call
            return
        if self._messages is not None:
            self._messages.close()
            self._messages = None

    def _wait_for_calls(self) -> None:
        """Wait for calls in threads. A sampler gets one request at a time."""
        for call in filter(None, (self._dropped_call, self._call)):
            call.wait_until_ended()
        self._dropped_call = None

    @contextmanager
    def batch(self, inputs: list[dict[str, Any]]) -> Iterator[None]:
        """In the `with` block, in which TRL generates from `inputs`, TRL gets what was sampled ahead.

        The batch after it starts in a thread.
        """
        record = None
        if self.trainer.model.training and self.is_on and self._upcoming is not None:
            with self.trainer._phase_times.measured("generation"):
                record = self._due(inputs)
        if record is None:
            self._wait_for_calls()
            if self.trainer.rollout_func is not None and (self.lag or self.trainer._added.sample_ahead):
                self._send_weights()
            if self.trainer.model.training:
                self.buffer.sampler_is_older = False
            yield
            return
        self._replayed = record
        try:
            with replayed(self.trainer, record):
                yield
        finally:
            self._replayed = None
        age = self.trainer.state.global_step - record.sampled_at_step
        self.buffer.sampler_is_older = age > 0
        metrics = internals.mode_metrics(self.trainer)
        metrics["generation_ahead/age_in_steps"].append(age)
        metrics["seconds/generation_ahead"].append(record.seconds)

    def run_turn(self, single_turn: Callable[..., Any], *positional: Any, **keywords: Any) -> Any:
        """Run TRL's `single_turn`, or return what it returned ahead."""
        if self._replayed is not None and self.samples_in_process:
            return self._replayed.turn["completion_ids"], self._replayed.turn["logprobs"]
        return self.fewer_rows.run_turn(single_turn, *positional, **keywords)

    def _given_up(self, reason: str | None) -> bool:
        """Give up if any rank has a reason. All ranks call it, because sampling has collectives."""
        reason = next(filter(None, self.ranks.gather_objects(reason)), None)
        if reason is not None:
            self._give_up(reason)
        return reason is not None

    def _give_up(self, reason: str) -> None:
        """Sample in turn for the rest of this training run. With a lag, raise `ValueError`."""
        if self.lag:
            raise ValueError(f"`generation_lag=1` is not supported here: {reason}.")
        logger.warning(f"Generation batches are not sampled ahead: {reason}.")
        self._in_turn_reason = reason

    def _due(self, inputs: list[dict[str, Any]]) -> Record | None:
        """Return the record of the batch of `inputs`, and start the next one. `None`: TRL samples in turn."""
        assert self._upcoming is not None
        number = self.buffer.number - self._first_batch
        other_rows = None
        if not _are_same(inputs, self._upcoming.of_batch(number)):
            other_rows = f"batch {number} has other rows than TRL's data loader gives it. Change rows before training"
        if self._given_up(other_rows):
            return None
        record = self._finished(number)
        shares = self.lag or self._shares_step(number, number + 1)
        if number < self._last_batch() and shares and self._in_turn_reason is None:
            if self._is_first:  # after a checkpoint; the functions have not run in this process yet
                self._record = self._sampled_now(number + 1)
            else:
                self._send_weights()
                self._call = BackgroundCall(self._work(number + 1), f"generation batch {number + 1}")
        return record

    def _shares_step(self, *numbers: int) -> bool:
        """Whether generation batches begin in one optimizer step, and so have the same weights."""
        epoch = self.buffer.micro_batches_of_an_epoch
        assert epoch is not None
        accumulation_steps = self.trainer.args.gradient_accumulation_steps
        starts = [divmod(x * self.buffer.micro_batches_of_a_generation, epoch) for x in numbers]
        steps = {(epochs, start // accumulation_steps) for epochs, start in starts}
        return len(steps) == 1

    def _last_batch(self) -> int:
        """Return the number of the last generation batch of the training run."""
        trainer = self.trainer
        epoch = self.buffer.micro_batches_of_an_epoch
        accumulation_steps = trainer.args.gradient_accumulation_steps
        _, micro_batches = position_in_data(trainer.state.max_steps, accumulation_steps, epoch)
        return (micro_batches - 1) // self.buffer.micro_batches_of_a_generation

    def _finished(self, number: int) -> Record:
        """Return the record of batch `number`: sampled ahead, of a checkpoint, or sampled now."""
        record = self._record
        if self._call is not None:
            record = self._call.result()
        self._record = None
        self._call = None
        # All ranks have a record or none: `resume` agrees on it
        if record is None or record.batch != number:
            record = self._sampled_now(number)
        self._check_log_probs(record)
        return record

    def _sampled_now(self, number: int) -> Record:
        """Sample batch `number` on the main thread. In the first one, see whether the functions can run in another."""
        self._send_weights()
        work = self._work(number)
        if not self._is_first:
            return work()
        before = _global_states()
        with _signal_handlers_noted() as handlers:
            record = work()
        # Nothing has run beside the functions yet, so their draws show
        after = _global_states()
        names = [name for name, state in before.items() if state != after[name]]
        reason = None
        if names:
            reason = (
                f"`rollout_func` or a reward function draws from {' and '.join(names)}, which training draws from at "
                "the same time. Use a generator for these functions alone, such as `torch.Generator()` or "
                "`random.Random(seed)`"
            )
        elif handlers:
            reason = (
                "`rollout_func` or a reward function sets a handler of a signal, for example as a time limit, which "
                "only works in the main thread. Let it compute in a process"
            )
        self._given_up(reason)
        self._is_first = False
        return record

    def _work(self, number: int) -> Callable[[], Record]:
        """Return the call for a batch, with all that it reads of the trainer taken now."""
        assert self._upcoming is not None
        trainer = self.trainer
        device = trainer.accelerator.device
        inputs = self._upcoming.of_batch(number)
        prompts = self._upcoming.prompts_of(number)
        step = trainer.state.global_step
        record = Record(batch=number, sampled_at_step=step, sampler=self._sampler, prompts=prompts)
        turn = self._turn(prompts)
        view = view_of(trainer, self._tokenizer)
        functions = UserFunctions.of(trainer, view, self._tokenizer, turn, self.gave_nan)
        if self.lag and turn is not None:
            # Otherwise, the completions themselves show whether the sampler has the policy's weights
            self.metrics.check_sent_weights(partial(turn.sample, _CANARY))

        def work() -> Record:
            began = time.perf_counter()
            if device.type == "cuda":
                torch.cuda.set_device(device)  # a thread begins on the first one
            functions.run(record, inputs)
            record.seconds = time.perf_counter() - began
            return record

        return work

    def _turn(self, prompts: list[Any]) -> Turn | None:
        """Return what samples for `prompts`, unless the `rollout_func` does. All ranks call it."""
        if self.trainer.rollout_func is not None:
            return None
        if self.samples_in_process:
            return LocalTurn.of(self.trainer, prompts, self.fewer_rows.run_turn)
        assert self._messages is not None
        return ServerRequest.of(self.trainer, prompts, self._messages)

    def _send_weights(self) -> None:
        """Send the policy's weights to the sampler, if it has older ones. All ranks call it, while no request runs."""
        trainer = self.trainer
        # Outside of training, weights may change without a step
        step = trainer.state.global_step if trainer.model.training else None
        if trainer.rollout_func is not None:
            if step is None or self._sent_at_step != step:
                trainer.rollout_func.sync_weights(trainer)
        elif self._has_server and trainer._last_loaded_step != step:
            trainer.vllm_generation.sync_weights()
            trainer._last_loaded_step = step  # TRL sends them otherwise, while a request runs
        self._sent_at_step = step

    @property
    def _corrects(self) -> bool:
        return bool(self.trainer.vllm_importance_sampling_correction)

    def _lacks_log_probs(self, record: Record) -> bool:
        """Whether the loss needs log-probs that the record lacks."""
        if not self.lag or not self._corrects:
            return False
        if self.trainer.rollout_func is not None:
            return record.rollout.get("logprobs") is None
        return self.samples_in_process and record.turn["logprobs"] is None

    def _check_log_probs(self, record: Record) -> None:
        if not self._lacks_log_probs(record):
            return
        found, advice = "the sampler returned no log-probs", "Leave `generate_fewer_rows` on"
        if self.trainer.rollout_func is not None:
            found, advice = "`rollout_func` returned no `logprobs`", "Return the log-prob of each sampled token"
        raise ValueError(
            f"`generation_lag=1`: {found}, so the loss cannot correct for the age of the weights. {advice}, or accept "
            "the bias with `vllm_importance_sampling_correction=False`."
        )

    # Checkpoints

    def save(self, folder: Path) -> None:
        """Write the batch that is sampled ahead into a checkpoint. Waits until its call has ended."""
        if self.trainer.args.save_only_model:
            return
        rank = self.trainer.args.process_index
        try:
            record = self._record if self._call is None else self._call.result()
        except Exception as error:  # raised again at the step that needs the batch
            write_ahead(folder, rank, None, lost=f"{type(error).__name__}: {error}")
            return
        try:
            write_ahead(folder, rank, None if record is None else dataclasses.asdict(record))
        except TypeError as error:
            write_ahead(folder, rank, None, lost=f"it cannot be saved: {error}")

    def resume(self, folder: Path, *, same_schedule: bool) -> None:
        """Read the batch that was sampled ahead. All ranks call it.

        Args:
            same_schedule (`bool`): whether arguments and ranks are those of the checkpoint.
        """
        args = self.trainer.args
        values, lost = read_ahead(folder, args.process_index)
        record = None if values is None else Record(**values)
        if not self.is_on:
            return
        if args.ignore_data_skip:
            self._give_up("with `ignore_data_skip`, the epoch starts again. Leave it off")
            return
        assert self._upcoming is not None
        self._first_batch = self._first_batch_of_run()
        if record is not None and not same_schedule:
            lost = "the schedule has changed"
        elif record is not None and record.sampler != self._sampler:
            lost = f"{record.sampler} sampled it, and now {self._sampler} samples"
        elif record is not None and record.prompts != self._upcoming.prompts_of(record.batch):
            lost = "other prompts come next"
        elif record is not None and not self.lag and record.sampled_at_step != self.trainer.state.global_step:
            lost = "without a lag, its weights are too old"
        elif record is not None and self._lacks_log_probs(record):
            lost = "it has no log-probs for the loss to correct with"
        if lost is not None:
            logger.warning(f"The generation batch that was sampled ahead is sampled again: {lost}.")
            record = None
        has_record = torch.tensor(int(record is not None), device=self.ranks.device)
        # Sending weights is a collective, so all ranks use their records or none does
        if int(self.ranks.world.reduce(has_record, "sum")) == self.ranks.world.num_processes:
            self._record = record

    def _first_batch_of_run(self) -> int:
        """Return the number of the resumed run's first generation batch. An earlier `train()` may have counted too."""
        _, micro_batches = position_in_data(
            self.trainer.state.global_step,
            self.trainer.args.gradient_accumulation_steps,
            self.buffer.micro_batches_of_an_epoch,
        )
        return (self.buffer.trained - micro_batches) // self.buffer.micro_batches_of_a_generation


def _are_same(value: Any, other: Any) -> bool:
    """Whether rows of data are equal, also with tensors, arrays or images in them."""
    if isinstance(value, dict):
        is_alike = isinstance(other, dict) and value.keys() == other.keys()
        return is_alike and all(_are_same(x, other[name]) for name, x in value.items())
    if isinstance(value, list | tuple):
        is_alike = type(value) is type(other) and len(value) == len(other)
        return is_alike and all(map(_are_same, value, other))
    if isinstance(value, torch.Tensor | np.ndarray):
        return type(value) is type(other) and repr(value.tolist()) == repr(other.tolist())
    try:
        return bool(value == other) or bool(value != value and other != other)  # NaN
    except (TypeError, ValueError):  # of other types that a format of the data set gives
        return repr(value) == repr(other)


@contextmanager
def _signal_handlers_noted() -> Iterator[list[Any]]:
    """Yield a list of the signals whose handler is set in the `with` block."""
    signals: list[Any] = []
    set_handler = _signal.signal

    def noted(signal_number: Any, handler: Any) -> Any:
        before = set_handler(signal_number, handler)
        if signal_number != _signal.SIGINT:  # that of `asyncio.run`, which sets it in the main thread only
            signals.append(signal_number)
        return before

    # `signal.signal` calls it, also where user code has imported that function by its name
    with replaced(_signal, signal=noted):
        yield signals


def _global_states() -> dict[str, Any]:
    states = {
        "torch's global generator": torch.get_rng_state().numpy().tobytes(),
        "the module `random`": random.getstate(),
        "NumPy's global generator": repr(np.random.get_state(legacy=False)),
    }
    if torch.cuda.is_initialized():
        states["the GPU's global generator"] = torch.cuda.get_rng_state().numpy().tobytes()
    return states
