"""The run that `plan` plans: what may change without changing a result, and the memory and time of each option."""

import copy
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, cached_property
from itertools import product

import numpy as np

from ..losses.loss_types import dpo_loss_type, grpo_loss_type, unknown_loss_types
from ..memory.step import Step, StepMemory, facts_of, memory_of_step
from ..planning.cost import CostModel
from ..planning.non_finite import steps_in_backward
from ..planning.speed import Device, Model, seconds
from . import CommandError
from .arguments import Parsed
from .estimate import ENGINES, MOST_ROWS, OF_WHOLE_WEIGHTS, EstimateArguments, check_covered, policy_of, step_of
from .plan_lengths import lengths_of
from .plan_search import Counted, Lengths, Option, Setting, Space, search

_SAMPLES = ("grpo", "rloo")
_OF_CPU = ("one_process", "ddp")
_MOST_ROWS_OF_STEP = 2**16  # that a device reads in an optimizer step


class Subject:
    """A run of `method` with these arguments on `devices` devices of one kind."""

    def __init__(self, method: str, parsed: Parsed, devices: int, kind: str, limits: Device) -> None:
        self.method, self.devices, self.kind, self.limits = method, devices, kind, limits
        if parsed.training.max_steps <= 0 and parsed.training.num_train_epochs <= 0:
            raise CommandError(f"`--num_train_epochs` must be above 0, got {parsed.training.num_train_epochs}.")
        rows = parsed.training.per_device_train_batch_size * parsed.training.gradient_accumulation_steps
        if rows > _MOST_ROWS_OF_STEP:
            raise CommandError(
                f"`--per_device_train_batch_size {parsed.training.per_device_train_batch_size}` and "
                f"`--gradient_accumulation_steps {parsed.training.gradient_accumulation_steps}` make steps of {rows:,} "
                f"rows, but `plan` takes at most {_MOST_ROWS_OF_STEP:,}. Lower one of the two."
            )
        # The search decides what is in host memory
        self._given, self.training = parsed.training, copy.copy(parsed.training)
        for name, value in (("activation_offloading", False), ("reference_device", None)):
            if hasattr(self.training, name):
                setattr(self.training, name, value)
        self.parsed = parsed._replace(training=self.training)
        self.policy = policy_of(parsed)
        self.facts = facts_of(self.policy.make, self.training.router_aux_loss_coef)
        self.uncovered: dict[str, str] = {}  # engines that `estimate` does not cover, and what it says
        self.engines = tuple(x for x in ENGINES if self._covers(x))
        if not self.engines:
            raise CommandError(next(reversed(self.uncovered.values())))
        self._refuse_padding()
        self.lengths = self._lengths()
        self.memory_of, self._step = cache(self._memory), cache(self._step_of)

    def _covers(self, engine: str) -> bool:
        # accelerate runs no other engines on a CPU
        if (engine == "one_process") != (self.devices == 1) or (self.kind == "cpu" and engine not in _OF_CPU):
            return False
        try:
            check_covered(self.parsed, self._asked(engine))
        except CommandError as error:
            self.uncovered[engine] = str(error)
            return False
        return True

    @property
    def shards_on_more(self) -> bool:
        """Whether some of the memory would be divided among more devices."""
        asked = EstimateArguments(device=self.kind, engine="fsdp2", num_devices=self.devices + 1)
        try:
            check_covered(self.parsed, asked)
        except CommandError:
            return False
        return self.kind == "cuda"

    def _refuse_padding(self) -> None:
        """Raise `CommandError` if batches stay padded: the memory of their attention masks is not counted."""
        training, why = self.training, None
        if not self.facts.packs:
            why = "which this model needs. Use `estimate`"
        elif training.padding_free is False:
            why = "which `--padding_free false` asks for. Leave it out"
        elif training.neftune_noise_alpha is not None:
            why = f"which `--neftune_noise_alpha {training.neftune_noise_alpha}` needs. Leave it out"
        if why is not None:
            raise CommandError(f"`plan` does not cover padded batches, {why}.")

    def _asked(self, engine: str, prompt_length: int = 0) -> EstimateArguments:
        return EstimateArguments(device=self.kind, engine=engine, num_devices=self.devices, prompt_length=prompt_length)

    def _lengths(self) -> Lengths:
        training = self.training
        prompts_U, completions_UC = lengths_of(
            self.method, self.parsed, self.policy.name, self.parsed.model.model_revision
        )
        if self.method in _SAMPLES:
            completions_UC = np.full((len(prompts_U), 1), training.max_completion_length)
        return Lengths(
            prompts_U,
            completions_UC,
            group=training.num_generations if self.method in _SAMPLES else 1,
            shares=self.method in ("dpo", *_SAMPLES) and self.facts.shares and training.share_prompts is not False,
            kept_together=self._keeps_groups,
        )

    @property
    def _keeps_groups(self) -> bool:
        if self.method not in _SAMPLES or self.training.steps_per_generation == 1:
            return True
        return self.kept_because is None and self._joined > 1

    @property
    def _joined(self) -> int:
        """How many micro-batches of a generation batch are certain to share an optimizer step."""
        training = self.training
        if self.method == "dpo":
            return int(training.gradient_accumulation_steps)
        if self.method not in _SAMPLES or training.keep_groups_together is False:
            return 1
        return math.gcd(training.steps_per_generation, training.gradient_accumulation_steps)

    @cached_property
    def kept_because(self) -> str | None:
        """Why the loss depends on the micro-batch, whose rows then stay as given; `None` if it does not."""
        training = self.training
        unknown = unknown_loss_types(self.method, getattr(training, "loss_type", ()))
        if unknown:
            return f"the loss type `{unknown[0]}` is unknown to this release of trl_ext"
        if self.method == "kto":
            return "KTO may pair the rows of each micro-batch"
        if training.dataloader_drop_last:
            return "`dataloader_drop_last` drops rows that do not fill a micro-batch"
        if self.method == "sft" and self.devices > 1 and not training.average_tokens_across_devices:
            return "with `average_tokens_across_devices=False`, the loss depends on the tokens of each device"
        if self.method == "dpo":
            for name in training.loss_type:
                if dpo_loss_type(name).of_whole_batch is not None:
                    return f"the loss type `{name}` {dpo_loss_type(name).of_whole_batch}"
        if self.method == "grpo":
            of_whole_batch = grpo_loss_type(training.loss_type).of_whole_batch
            if of_whole_batch is not None:
                return f"the loss `{training.loss_type}` {of_whole_batch}"
            if training.entropy_coef != 0.0 or training.use_adaptive_entropy:
                return "the entropy bonus is a mean over the tokens of each micro-batch"
            if training.top_entropy_quantile < 1.0:
                return "`top_entropy_quantile` selects tokens within each micro-batch"
        if steps_in_backward(training.optim):
            return f"the optimizer `{training.optim}` steps in each backward"
        return self.facts.by_micro_batch

    @cached_property
    def space(self) -> Space:
        training, free = self.training, self.kept_because is None
        unknown = unknown_loss_types(self.method, getattr(training, "loss_type", ()))
        setting = Setting(
            self.engines[0],
            checkpointing=bool(training.gradient_checkpointing),
            precompute=bool(getattr(training, "precompute_ref_log_probs", False)),
            offloads=bool(getattr(self._given, "activation_offloading", False)),
            hosts=getattr(self._given, "reference_device", None) is not None,
        )
        given = Option(
            setting=setting,
            batch=training.per_device_train_batch_size,
            accumulation=training.gradient_accumulation_steps,
            generation=training.steps_per_generation if self.method in _SAMPLES else None,
            # A loss that is unknown does not run in parts
            budget=None if unknown else getattr(training, "max_tokens_per_micro_batch", None),
        )
        return Space(
            given=given,
            settings=tuple(self._settings(setting)),
            changes_batch=free and self.method in ("sft", "rloo"),
            changes_budget=free and self.method in ("dpo", "grpo"),
            together=self._joined if self.method in ("dpo", "grpo") else 1,
            most_rows=MOST_ROWS // (2 if self.method == "dpo" else 1),
        )

    def _settings(self, given: Setting) -> Iterator[Setting]:
        training = self.training
        # A model, which stays as it is
        separate = self._step(Setting(given.engine, given.checkpointing)).reference is not None
        separate = separate and not getattr(training, "sync_ref_model", False)
        stores = self.method in ("dpo", "kto") and training.reference_store != "off"
        precompute = (False, True) if separate and stores and not given.precompute else (given.precompute,)
        for hosts, offloads in product((False, True), (False, True)):
            # A CPU's memory is host memory
            if hosts and not (separate and self.kind == "cuda" and hasattr(training, "reference_device")):
                continue
            if offloads and not (self.kind == "cuda" and hasattr(training, "activation_offloading")):
                continue
            for engine, precomputes, checkpointing in product(self.engines, precompute, (False, True)):
                if not (hosts and precomputes) and (engine in OF_WHOLE_WEIGHTS or not (hosts or offloads)):
                    yield Setting(engine, checkpointing, precomputes, offloads, hosts)

    def search(self, limit: int) -> tuple[list[Counted], list[Counted]]:
        """Return the options whose predicted peak is at most `limit` bytes, and the others that were counted."""

        def size_of(option: Option) -> int:
            return self.lengths.tokens_of(self.lengths.worst(option, self.space.together))

        return search(self.space.ladders(self.lengths), lambda x: self.memory_of(x).peak, size_of, limit)

    # Memory

    def _step_of(self, setting: Setting) -> Step:
        training = copy.copy(self.training)
        training.gradient_checkpointing = setting.checkpointing
        if hasattr(training, "precompute_ref_log_probs"):
            training.precompute_ref_log_probs = setting.precompute
        if setting.offloads:
            training.activation_offloading = True
        if setting.hosts:
            training.reference_device = "cpu"
        prompt_length = 0
        if self.method in _SAMPLES:
            prompt_length = min(int(self.lengths.prompts_U.max()), self.policy.positions - 2)
        else:
            training.max_length = max(2, int(self.lengths.rows_U.max()))
        return step_of(self.method, self.parsed._replace(training=training), self._asked(setting.engine, prompt_length))

    def _memory(self, option: Option) -> StepMemory:
        """Return the predicted memory of the largest micro-batch that the data allows."""
        step, together = self._step(option.setting), self.space.together
        rows = self.lengths.worst(option, together)
        apart = option.accumulation // (together if option.budget else 1) > 1
        whole = self.lengths.most(option.batch * together)
        splits = option.budget is not None and option.budget < self.lengths.tokens_of(whole)
        return memory_of_step(replace(step, accumulates=apart or splits, lengths=rows))

    # Time

    @cached_property
    def _model(self) -> Model:
        config = self.policy.config.get_text_config()
        layers = getattr(config, "num_hidden_layers", None) or 1
        return Model(CostModel.of(config), layers, self.facts.weight_bytes, self.facts.trained_bytes)

    def seconds_of(self, option: Option) -> float:
        """Return the predicted time of an optimizer step: only ratios mean something."""
        together, reference = self.space.together, self._reference_passes(option)
        offloaded = 0.0
        if option.setting.offloads:
            tokens = self.lengths.tokens_of(self.lengths.worst(option, together))
            offloaded = self.memory_of(option).offloaded / tokens
        work = self.lengths.work(option, self.devices, together, reference, offloaded)
        return seconds(work, self._model, self.limits)

    def _reference_passes(self, option: Option) -> float:
        """Return how often the reference scores the tokens of a step, on average over the run."""
        training = self.training
        if self.method == "sft" or (self.method in _SAMPLES and training.beta == 0.0):
            return 0.0
        if self.method in _SAMPLES or training.reference_store == "off":
            return 1.0
        rows, step = len(self.lengths.prompts_U), option.batch * option.accumulation * self.devices
        epochs = training.max_steps * step / rows if training.max_steps > 0 else training.num_train_epochs
        # Precomputing scores all rows, also those that the run does not reach
        return 1 / epochs if option.setting.precompute else min(1.0, 1 / epochs)
