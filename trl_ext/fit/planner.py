"""What `plan` chooses from: what of a run may change without changing a result, and each option's memory and time."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from itertools import product

import numpy as np

from ..losses.loss_types import unknown_loss_types
from ..planning import dpo, grpo
from ..planning.cost import CostModel
from ..planning.non_finite import steps_in_backward
from ..planning.plan import model_reason
from ..planning.sampled import micro_batches_of_a_step
from .coverage import ENGINES, ENGINES_OF_CPU, WHOLE_WEIGHT_ENGINES, check_covered
from .estimate import MOST_ROWS, PAIR_METHODS, step_of
from .lengths import Array, Lengths
from .options import Option, Setting, Space
from .policy import facts_of, policy_of
from .run import ArgumentError, Run
from .search import SearchResult, search
from .speed import Device, Model, seconds
from .step import Step, StepMemory, memory_of_step

_MOST_ROWS_OF_STEP = 2**16  # that a device reads in an optimizer step


class Planner:
    """The options of a run on devices of one kind, whose engine it chooses.

    Args:
        run (`Run`): with any engine.
        limits (`Device`): of each device.
        read_lengths (`Callable`): returns, given the name of the model, the tokens of each prompt, `(U,)`, and of its
            completions, `(U, C)`; of a method that samples, `(U, 0)`.
        on_count (`Callable`, *optional*): called before each count of an option's memory, with its number, from 1 on.

    Attributes:
        uncovered (`dict`): the engines that an estimate does not cover, and why.

    Raises:
        `ArgumentError`: an argument is not covered.
    """

    def __init__(
        self,
        run: Run,
        limits: Device,
        read_lengths: Callable[[str], tuple[Array, Array]],
        on_count: Callable[[int], None] | None = None,
    ) -> None:
        _check_length_of_run(run)
        self._given_training = run.training
        # The search decides what is in host memory
        self.run = run.with_training(activation_offloading=False, reference_device=None)
        self.limits = limits
        self.policy = policy_of(run)
        # A reward model has no router loss
        self.facts = facts_of(self.policy, getattr(run.training, "router_aux_loss_coef", 0.0))
        self.uncovered: dict[str, str] = {}
        self.engines = tuple(engine for engine in ENGINES if self._covers(engine))
        if not self.engines:
            raise ArgumentError(next(reversed(self.uncovered.values())))
        self._check_packs()
        prompts_U, completions_UC = read_lengths(self.policy.name)
        self.lengths = self._lengths(prompts_U, completions_UC)
        self._counts_began = on_count or (lambda number: None)
        self._count = 0
        self._static_bytes: dict[tuple[str, bool, bool], int] = {}
        self.memory_of = cache(self._memory)
        self._step = cache(self._step_of)

    def _covers(self, engine: str) -> bool:
        if (engine == "one_process") != (self.run.devices == 1):
            return False
        if self.run.device == "cpu" and engine not in ENGINES_OF_CPU:
            return False
        try:
            check_covered(replace(self.run, engine=engine))
        except ArgumentError as error:
            self.uncovered[engine] = str(error)
            return False
        return True

    @property
    def shards_on_more(self) -> bool:
        """Whether some of the memory would be divided among more devices."""
        try:
            check_covered(replace(self.run, engine="fsdp2", devices=self.run.devices + 1))
        except ArgumentError:
            return False
        return self.run.device == "cuda"

    def _check_packs(self) -> None:
        """Raise `ArgumentError` if batches stay padded: the memory of their attention masks is not counted."""
        training = self.run.training
        if not self.facts.packs:
            reason = "which this model needs. Use `estimate`"
        elif not self.facts.teacher_packs:
            reason = "which the teacher needs. Use `estimate`"
        elif training.padding_free is False:
            reason = "which `--padding_free false` asks for. Leave it out"
        elif training.neftune_noise_alpha is not None:
            reason = f"which `--neftune_noise_alpha {training.neftune_noise_alpha}` needs. Leave it out"
        else:
            return
        raise ArgumentError(f"`plan` does not cover padded batches, {reason}.")

    # What may change

    def _lengths(self, prompts_U: Array, completions_UC: Array) -> Lengths:
        training = self.run.training
        shares = self.facts.shares_prompts and training.share_prompts is not False
        if not self.run.samples:
            return Lengths(prompts_U, completions_UC, shares=shares and self.run.method in PAIR_METHODS)
        longest_completions_UC = np.full((len(prompts_U), 1), training.max_completion_length)
        if self.run.method == "distillation":  # each prompt has one completion
            return Lengths(prompts_U, longest_completions_UC, shares=False)
        return Lengths(
            prompts_U,
            longest_completions_UC,
            group=training.num_generations,
            shares=shares,
            kept_together=training.steps_per_generation == 1
            or (self.kept_because is None and self._joined_batches > 1),
        )

    @property
    def _joined_batches(self) -> int:
        """How many micro-batches of a generation batch are certain to share an optimizer step."""
        training = self.run.training
        if self.run.method == "dpo":
            return int(training.gradient_accumulation_steps)
        if self.run.method not in ("grpo", "rloo") or training.keep_groups_together is False:
            return 1
        return micro_batches_of_a_step(training)

    @cached_property
    def kept_because(self) -> str | None:
        """Why the loss depends on the micro-batch, whose rows then stay as given; `None` if it does not."""
        training = self.run.training
        if self._unknown_loss_types:
            return f"the loss type `{self._unknown_loss_types[0]}` is unknown to this release of trl_ext"
        if self.run.method == "kto":
            return "KTO may pair the rows of each micro-batch"
        if self.run.method == "reward":
            return "the loss is a mean over each micro-batch, of which the last of an epoch may have fewer pairs"
        if training.dataloader_drop_last:
            return "`dataloader_drop_last` drops rows that do not fill a micro-batch"
        if self.run.method == "sft" and self.run.devices > 1 and not training.average_tokens_across_devices:
            return "with `average_tokens_across_devices=False`, the loss depends on the tokens of each device"
        if steps_in_backward(training.optim):
            return f"the optimizer `{training.optim}` steps in each backward"
        return self._micro_batch_reason()

    @property
    def _unknown_loss_types(self) -> Sequence[str]:
        return unknown_loss_types(self.run.method, getattr(self.run.training, "loss_type", ()))

    def _micro_batch_reason(self) -> str | None:
        """Return why the gradient depends on which rows share a micro-batch, as the trainer's own plan says."""
        training = self.run.training
        if self.run.method == "dpo":
            return dpo.micro_batch_reason(training.loss_type, self.facts)
        if self.run.method == "grpo":
            has_entropy_bonus = training.entropy_coef != 0.0 or training.use_adaptive_entropy
            return grpo.micro_batch_reason(
                training.loss_type, has_entropy_bonus, training.top_entropy_quantile, self.facts
            )
        return model_reason(self.facts)

    @cached_property
    def space(self) -> Space:
        training = self.run.training
        method = self.run.method
        setting = Setting(
            self.engines[0],
            checkpointing=bool(training.gradient_checkpointing),
            precompute=bool(getattr(training, "precompute_ref_log_probs", False)),
            offloads=bool(getattr(self._given_training, "activation_offloading", False)),
            hosts=getattr(self._given_training, "reference_device", None) is not None,
        )
        given_option = Option(
            setting=setting,
            batch=training.per_device_train_batch_size,
            accumulation=training.gradient_accumulation_steps,
            generation=getattr(training, "steps_per_generation", None),
            # A loss that is unknown does not run in parts
            budget=None if self._unknown_loss_types else getattr(training, "max_tokens_per_micro_batch", None),
        )
        rows_may_move = self.kept_because is None
        merges = method in ("dpo", "grpo")  # which have `max_tokens_per_micro_batch`
        return Space(
            given_option=given_option,
            lengths=self.lengths,
            settings=tuple(self._settings(setting)),
            changes_batch=rows_may_move and method in ("sft", "rloo", "distillation"),
            changes_budget=rows_may_move and merges,
            joined_batches=self._joined_batches if merges else 1,
            most_rows=MOST_ROWS // (2 if method in PAIR_METHODS else 1),
        )

    def _settings(self, given_setting: Setting) -> Iterator[Setting]:
        training = self.run.training
        on_gpu = self.run.device == "cuda"  # a CPU's memory is host memory
        has_model = self._step(Setting(given_setting.engine, given_setting.checkpointing)).reference is not None
        reference_stays = has_model and not getattr(training, "sync_ref_model", False)
        stores = self.run.method in ("dpo", "kto") and training.reference_store != "off"
        precompute = [given_setting.precompute]
        if reference_stays and stores and not given_setting.precompute:
            precompute.append(True)
        may_host = reference_stays and on_gpu and hasattr(training, "reference_device")
        may_offload = on_gpu and hasattr(training, "activation_offloading")
        for hosts, offloads in product((False, True), (False, True)):
            if (hosts and not may_host) or (offloads and not may_offload):
                continue
            for engine, precomputes, checkpointing in product(self.engines, precompute, (False, True)):
                if hosts and precomputes:
                    continue
                if (hosts or offloads) and engine not in WHOLE_WEIGHT_ENGINES:
                    continue
                yield Setting(engine, checkpointing, precomputes, offloads, hosts)

    def search(self, limit: int) -> SearchResult:
        """Return the options whose predicted peak is at most `limit` bytes, and the others that were counted."""
        space = self.space
        return search(
            space.ladders(),
            lambda option: self.memory_of(option).peak,
            space.largest_tokens,
            limit,
            seconds_of=self.seconds_of,
            least_seconds_of=partial(self.seconds_of, counts=False),
            floor_of=self._floor_of,
        )

    def _floor_of(self, option: Option) -> int:
        """Return the bytes of weights, gradients and states, as far as they are known without another count."""
        setting = option.setting
        static = self._static_bytes.get((setting.engine, setting.precompute, setting.hosts), 0)
        # The facts are those of weights that are not quantized
        if setting.engine not in WHOLE_WEIGHT_ENGINES or getattr(self.run.model, "load_in_4bit", False):
            return static
        # DDP has a copy of the gradients
        copies = 1 + (setting.engine == "ddp")
        return max(static, self.facts.weight_bytes + copies * self.facts.trained_bytes)

    # Memory

    def _step_of(self, setting: Setting) -> Step:
        run = self.run.with_training(
            gradient_checkpointing=setting.checkpointing,
            precompute_ref_log_probs=setting.precompute,
            activation_offloading=setting.offloads,
            reference_device="cpu" if setting.hosts else None,
        )
        if run.samples:
            longest_prompt = min(int(self.lengths.prompts_U.max()), self.policy.longest_row - 2)
        else:
            longest_prompt = 0
            run = run.with_training(max_length=max(2, int(self.lengths.rows_U.max())))
        return step_of(replace(run, engine=setting.engine, prompt_length=longest_prompt))

    def _memory(self, option: Option) -> StepMemory:
        """Return the predicted memory of the largest micro-batch that the data allows."""
        space = self.space
        merged_units = space.merged(option)
        has_earlier = option.accumulation * option.batch > merged_units
        splits = option.budget is not None and option.budget < self.lengths.tokens_of(self.lengths.most(merged_units))
        rows = space.largest_rows(option)
        self._count += 1
        self._counts_began(self._count)
        setting = option.setting
        memory = memory_of_step(replace(self._step(setting), accumulates=has_earlier or splits, lengths=rows))
        self._static_bytes[setting.engine, setting.precompute, setting.hosts] = memory.static
        return memory

    # Time

    @cached_property
    def _model(self) -> Model:
        config = self.policy.config.get_text_config()
        layers = getattr(config, "num_hidden_layers", None) or 1
        return Model(CostModel.of(config), layers, self.facts.weight_bytes, self.facts.trained_bytes)

    def seconds_of(self, option: Option, *, counts: bool = True) -> float:
        """Return the predicted time of an optimizer step: only ratios mean something.

        Without `counts`, it leaves out the copies of activations to host memory, whose bytes need a count.
        """
        space = self.space
        offloaded = 0.0
        if option.setting.offloads and counts:
            offloaded = self.memory_of(option).offloaded / space.largest_tokens(option)
        work = space.work(option, self.run.devices, self._reference_passes(option), offloaded)
        return seconds(work, self._model, self.limits)

    def _reference_passes(self, option: Option) -> float:
        """Return how often the reference scores the tokens of a step, on average over the run."""
        training = self.run.training
        if self.run.method == "distillation":
            return 1.0
        if self.run.method in ("sft", "reward") or (self.run.samples and training.beta == 0.0):
            return 0.0
        if self.run.samples or training.reference_store == "off":
            return 1.0
        rows = len(self.lengths.prompts_U)
        rows_of_step = option.batch * option.accumulation * self.run.devices
        epochs = training.num_train_epochs
        if training.max_steps > 0:
            epochs = training.max_steps * rows_of_step / rows
        # Precomputing scores all rows, also those that the run does not reach
        return 1 / epochs if option.setting.precompute else min(1.0, 1 / epochs)


def _check_length_of_run(run: Run) -> None:
    """Raise `ArgumentError` for a run without epochs, or with steps of too many rows."""
    training = run.training
    if training.max_steps <= 0 and training.num_train_epochs <= 0:
        raise ArgumentError(f"`--num_train_epochs` must be above 0, got {training.num_train_epochs}.")
    rows = training.per_device_train_batch_size * training.gradient_accumulation_steps
    if rows > _MOST_ROWS_OF_STEP:
        raise ArgumentError(
            f"`--per_device_train_batch_size {training.per_device_train_batch_size}` and "
            f"`--gradient_accumulation_steps {training.gradient_accumulation_steps}` make steps of {rows:,} "
            f"rows, but `plan` takes at most {_MOST_ROWS_OF_STEP:,}. Lower one of the two."
        )
