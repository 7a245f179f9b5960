"""The private parts of TRL's `GRPOTrainer` and `RLOOTrainer`, which sample completions, as functions of a trainer."""

import copy
import functools
import itertools
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
import trl
from accelerate.utils import broadcast_object_list, send_to_device
from datasets import Dataset
from torch import nn
from transformers import LogitsProcessorList

from .overrides import LOSS, PASS, overrides, overrides_below
from .replaced import module_of, names_replaced, next_of, replaced

logger = logging.getLogger("trl_ext")


def checked_reward(reward: Any, warned_of: set[str]) -> Any:
    """Wrap a reward function: an error if it does not return a list of rewards, and one warning if it returns NaN.

    TRL takes NaN for None. `warned_of` holds the names of functions that a warning has named. Models stay unwrapped.
    """
    from trl.trainer.utils import is_async_callable

    if isinstance(reward, nn.Module):
        return reward
    name = getattr(reward, "__name__", type(reward).__name__)

    def check(rewards: Any, completions: list[Any]) -> list[Any]:
        try:
            values = list(rewards)
            nan_row = next((row for row, value in enumerate(values) if value is not None and math.isnan(value)), None)
            is_list_of_rewards = len(values) == len(completions)
        except TypeError:
            is_list_of_rewards = False
        if not is_list_of_rewards:
            raise TypeError(
                f"`reward_funcs`: `{name}` returned {rewards!r:.80} for {len(completions)} completions. Return a list "
                "with a number for each completion, or None where the function does not apply."
            )
        if nan_row is not None and name not in warned_of:
            warned_of.add(name)
            logger.warning(
                f"`reward_funcs`: `{name}` returned nan for completion {nan_row}. NaN counts as None, as in TRL: the "
                "function does not apply to that completion. A completion to which no function applies is not trained "
                "on. Return a number, or None if this is what you mean."
            )
        return values

    @functools.wraps(reward)
    async def await_and_check(*positional: Any, **keywords: Any) -> list[Any]:
        return check(await reward(*positional, **keywords), keywords["completions"])

    @functools.wraps(reward)
    def call_and_check(*positional: Any, **keywords: Any) -> list[Any]:
        return check(reward(*positional, **keywords), keywords["completions"])

    return await_and_check if is_async_callable(reward) else call_and_check


def checked_rollout(rollout_func: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a `rollout_func`: an error unless it returns a completion for each prompt, none of them empty."""

    def call_and_check(prompts: list[Any], *positional: Any) -> Any:
        output = rollout_func(prompts, *positional)
        completions = output.get("completion_ids") if isinstance(output, Mapping) else None
        if completions is None:  # TRL names the missing keys
            return output
        if len(completions) != len(prompts):
            raise ValueError(
                f"`rollout_func` returned {len(completions)} completions for {len(prompts)} prompts. TRL repeats a "
                "prompt for each of its completions: return one completion for each entry of `prompts`."
            )
        empty_row = next((row for row, ids in enumerate(completions) if not len(ids)), None)
        if empty_row is not None:
            raise ValueError(
                f"`rollout_func` returned an empty completion in row {empty_row}. Return at least one token, such as "
                "the token that ends completions."
            )
        return output

    return call_and_check


# Arguments that TRL's loss and advantages read from the trainer, where a user may change them
LIVE_ARGUMENTS = {
    "beta",
    "importance_sampling_level",
    "loss_type",
    "multi_objective_aggregation",
    "num_generations",
    "num_iterations",
    "scale_rewards",
    "top_entropy_quantile",
}

_MERGED = "merged_micro_batches"  # the key of a batch that says how many of TRL's micro-batches it holds
_IMAGE_KEYS = (
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "pixel_attention_mask",
    "spatial_shapes",
    "num_tiles",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)


def sequence_parallelism_hidden(config: Any) -> AbstractContextManager[None]:
    """Hide context or sequence parallelism, which TRL's `GRPOConfig` refuses, in the `with` block."""
    parallelism = config.parallelism_config
    is_refused = parallelism is not None and (parallelism.cp_enabled or parallelism.sp_enabled)
    return replaced(config, parallelism_config=None) if is_refused else nullcontext()


def has_images(batch: dict[str, Any]) -> bool:
    return any(key in batch for key in _IMAGE_KEYS)


class SampledInternals(Protocol):
    """The members of both trainers that this file reads or replaces."""

    _trl_trainer: Any  # ours
    accelerator: Any
    args: Any
    model: Any
    state: Any
    data_collator: Any
    train_dataset: Any
    shuffle_dataset: bool
    callback_handler: Any
    reward_funcs: list[Any]
    num_iterations: int
    _metrics: dict[str, dict[str, list[float]]]
    _step: int
    _buffered_inputs: Any
    _last_loaded_step: int
    current_gradient_accumulation_steps: int
    _tokenizer: Any
    _ranks: Any  # ours
    _routes: Any  # ours
    _phase_times: Any  # ours
    use_vllm: bool
    vllm_mode: str
    vllm_generation: Any
    use_transformers_continuous_batching: bool
    _compute_loss: Callable[..., Any]
    _generate: Callable[..., Any]
    _generate_single_turn: Callable[..., Any]
    _calculate_rewards: Callable[..., Any]
    _remove_unused_columns: Callable[..., Any]


def mode_metrics(trainer: SampledInternals) -> dict[str, list[float]]:
    return trainer._metrics["train" if trainer.model.training else "eval"]


def replace_latest(metrics: dict[str, list[float]], name: str, value: float | None) -> None:
    """Replace the latest value of a metric. `None` removes it: a log without any other value has no such metric."""
    if name not in metrics:  # a subclass's loss
        return
    metrics[name].pop()
    if value is not None:
        metrics[name].append(value)
    elif not metrics[name]:
        del metrics[name]


def metrics_set_aside(trainer: SampledInternals) -> AbstractContextManager[None]:
    """Log nothing in the `with` block."""
    return replaced(trainer, _metrics={name: defaultdict(list) for name in trainer._metrics})


@contextmanager
def loss_of_scores(
    trainer: SampledInternals,
    model: Any,
    pass_outputs: tuple[Any, Any, Any],
    micro_batches: int = 1,
    *,
    corrects_for_sampler: bool = False,
) -> Iterator[None]:
    """Make TRL's loss read finished scores in the `with` block.

    Args:
        pass_outputs (`tuple`): what TRL's loss gets from its pass of `model`, which does not run: log-probs, entropies,
            router loss.
        micro_batches (`int`): how many of TRL's micro-batches the rows are, for divisions by their number.
        corrects_for_sampler (`bool`): whether the loss reads the ratio to the sampler. TRL's loss does so only with
            vLLM.
    """
    run_pass = getattr(trainer, PASS)
    is_used = False

    def outputs_or_pass(called_model: Any, *positional: Any, **options: Any) -> Any:
        nonlocal is_used
        # TRL's loss runs one pass of the policy; any other is a real one
        if called_model is model and not is_used:
            is_used = True
            return pass_outputs
        return run_pass(called_model, *positional, **options)

    members: dict[str, Any] = {PASS: outputs_or_pass}
    if corrects_for_sampler:
        members["use_vllm"] = True
    with replaced(trainer, **members), as_one_micro_batch(trainer, micro_batches):
        yield


def model_replaced(
    trainer: SampledInternals, model: Any, batch: dict[str, Any], replacement: Callable[[], Any]
) -> AbstractContextManager[None]:
    """Make TRL's passes of `model` over the rows of `batch`, and no others, run a `replacement` in the `with` block."""
    batch_ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    batch_mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    run_pass = getattr(trainer, PASS)

    def run_replacement(called: Any, input_ids: Any, attention_mask: Any, *positional: Any, **keywords: Any) -> Any:
        if called is model and torch.equal(input_ids, batch_ids) and torch.equal(attention_mask, batch_mask):
            called = replacement()
        return run_pass(called, input_ids, attention_mask, *positional, **keywords)

    return replaced(trainer, **{PASS: run_replacement})


def completion_log_probs(
    trainer: SampledInternals, model: Any, batch: dict[str, Any], **options: Any
) -> tuple[Any, Any, Any]:
    """Run TRL's log-prob pass, or a subclass's, over the rows of `batch`."""
    return getattr(trainer, PASS)(
        model,
        torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
        torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
        batch["completion_ids"].size(1),
        **options,
        **{key: batch[key] for key in _IMAGE_KEYS if key in batch},
    )


def overridden_loss(trainer: SampledInternals) -> str | None:
    """Return the overridden method that computes the loss, or a part of it, in place of TRL's; `None` without one."""
    # Our `compute_loss` calls one that stands below it, with what TRL's loss gets
    return overrides(trainer, *LOSS) or overrides_below(trainer, "compute_loss")


def overridden_pass(trainer: SampledInternals) -> str | None:
    """Return the name of TRL's log-prob pass if it is overridden."""
    return overrides(trainer, PASS)


def generation_reader(trainer: SampledInternals) -> str | None:
    """Return an overridden method that makes or reads generation batches, or the pass that scores them."""
    return overrides(trainer, "_generate_and_score_completions", PASS) or overridden_below(trainer)


def overridden_below(trainer: SampledInternals) -> str | None:
    """Return a method below ours that makes or reads generation batches, and so sees what TRL's generation returns."""
    return overrides_below(trainer, "_generate_and_score_completions", "_prepare_inputs")


class Generation:
    """TRL's generation, with members of the trainer replaced. `rewards` holds the rewards of the last call.

    Args:
        trainer_class (`type`): TRL's class.
        use_adapter (`Callable`): in place of TRL's context manager, which activates the reference's adapter.
        run_turn (`Callable`): calls its first argument, TRL's `_generate_single_turn`, with the others.
        continuing_turns (`Callable`): returns a context manager around all these calls for a generation batch.
        members (`Any`): members of the trainer to replace. TRL's `_generate` and `_calculate_rewards`, and what a
            subclass puts in their place, still find the trainer's own log-prob pass.
    """

    def __init__(
        self,
        trainer: Any,
        trainer_class: Any,
        use_adapter: Callable[..., Any],
        run_turn: Callable[..., Any],
        continuing_turns: Callable[[], AbstractContextManager[None]] = nullcontext,
        **members: Any,
    ) -> None:
        self.trainer = trainer
        self.trainer_class = trainer_class
        self.use_adapter = use_adapter
        self.run_turn = run_turn
        self.continuing_turns = continuing_turns
        self.members = members
        self.rewards: Any = None
        self.gave_nan: set[str] = set()

    def draw(self, inputs: Any, *, runs_passes: bool = False, **members: Any) -> dict[str, Any]:
        """Generate and reward.

        Args:
            runs_passes (`bool`): run TRL's own passes: leave in place the members that were to be replaced.
            members (`Any`): members to replace for this call only.
        """
        trainer = self.trainer
        self.rewards = None
        trl_generate = trainer._generate
        trl_calculate_rewards = trainer._calculate_rewards
        trl_single_turn = trainer._generate_single_turn
        run_pass = getattr(trainer, PASS)
        agreed = trainer._ranks.agreed  # ranks that split one model must get the same completions

        def calculate_rewards(*positional: Any, **keywords: Any) -> torch.Tensor:
            timed = trainer._phase_times.measured("rewards")
            # A pass of the user may score other rows
            without_routes = trainer._routes.switched_off()
            with timed, without_routes, replaced(trainer, **{PASS: run_pass}), self._checked_rewards():
                self.rewards = trl_calculate_rewards(*positional, **keywords)
            return self.rewards

        def generate(*positional: Any, **keywords: Any) -> Any:
            members_in_turn: dict[str, Any] = {PASS: run_pass, "_generate_single_turn": single_turn}
            rollout_func = getattr(trainer, "rollout_func", None)  # RLOO has none
            if rollout_func is not None:
                members_in_turn["rollout_func"] = checked_rollout(rollout_func)
            timed = trainer._phase_times.measured("generation")
            with timed, self.continuing_turns(), replaced(trainer, **members_in_turn):
                return agreed(trl_generate(*positional, **keywords))

        def single_turn(prompt_ids: Any, *positional: Any, **keywords: Any) -> Any:
            return agreed(self.run_turn(trl_single_turn, agreed(prompt_ids), *positional, **keywords))

        def enter_reference(*_: Any, **__: Any) -> Any:
            return trainer.reference_pass()

        use_adapter = enter_reference
        if not runs_passes:
            use_adapter = self.use_adapter
            members |= self.members
        members |= {"_generate": generate, "_calculate_rewards": calculate_rewards}
        # Without it, no adapter is the reference
        names = {} if trainer._features.why_off("adapters") else {"use_adapter": use_adapter}
        try:
            with names_replaced(self.trainer_class, **names), replaced(trainer, **members):
                return next_of(trainer)._generate_and_score_completions(inputs)
        except BaseException:
            trainer._routes.drop_sampled()
            raise

    def _checked_rewards(self) -> AbstractContextManager[None]:
        if overrides(self.trainer, "_calculate_rewards") is not None:  # it may call the functions in another way
            return nullcontext()
        if self.trainer._features.why_off("checks of rewards"):
            return nullcontext()
        rewards = [checked_reward(reward, self.gave_nan) for reward in self.trainer.reward_funcs]
        return replaced(self.trainer, reward_funcs=rewards)


@contextmanager
def sampling_recorded(trainer: SampledInternals, mask: Any, log_probs: int | None) -> Iterator[None]:
    """Record the tokens that the sampler can choose in `mask`, a `SamplingMaskRecorder`, in the `with` block.

    Args:
        log_probs (`int`, *optional*): with vLLM, how many log-probs to ask for.
    """
    single_turn = trainer._generate_single_turn

    def record_turn(*positional: Any, **keywords: Any) -> Any:
        completion_ids, sampling_log_probs = single_turn(*positional, **keywords)
        mask.record_completions(completion_ids)
        return completion_ids, sampling_log_probs

    sampler: Any
    members: dict[str, Any]
    if trainer.use_vllm:
        sampler = trainer.vllm_generation
        generate = sampler.generate

        def generate_and_record(*positional: Any, **keywords: Any) -> Any:
            return mask.record_vllm(generate(*positional, **keywords))

        members = {"generate": generate_and_record, "logprobs": log_probs}
    else:
        sampler = getattr(trainer.model, "get_base_model", lambda: trainer.model)()
        get_processors = sampler._get_logits_processor

        def processors_and_record(*positional: Any, **keywords: Any) -> LogitsProcessorList:
            return LogitsProcessorList([*get_processors(*positional, **keywords), mask.record])

        # `generate` puts the caller's processors before `top_k`, `top_p` and `min_p`
        members = {"_get_logits_processor": processors_and_record}
    with replaced(sampler, **members), replaced(trainer, _generate_single_turn=record_turn):
        yield


def shared_scores(model: Any, share: Callable[[torch.Tensor], torch.Tensor]) -> AbstractContextManager[None]:
    """Make `generate` use the first rank's scores in the `with` block, because devices may round differently.

    Args:
        share (`Callable`): returns the first rank's values, which it writes into the tensor.
    """
    generate = model.generate

    def of_first_rank(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return share(scores.clone(memory_format=torch.contiguous_format))

    def generate_alike(*positional: Any, logits_processor: Any = None, **keywords: Any) -> Any:
        processors = LogitsProcessorList([*(logits_processor or []), of_first_rank])
        return generate(*positional, logits_processor=processors, **keywords)

    return replaced(model, generate=generate_alike)


def most_log_probs(trainer: SampledInternals) -> int:
    """Return how many log-probs vLLM returns at most, at most the vocabulary. In server mode, every rank calls it."""
    generation = trainer.vllm_generation
    vocabulary = trainer.model.config.get_text_config().vocab_size
    if trainer.vllm_mode == "colocate":
        most = generation.llm.model_config.max_logprobs
    else:
        server = generation.vllm_client.get_server_info() if trainer.accelerator.is_main_process else None
        of_main_process = [server and server["model_config"]["max_logprobs"]]
        most = broadcast_object_list(of_main_process, from_process=0)[0]
    return vocabulary if most == -1 else min(most, vocabulary)


class Buffer:
    """TRL's generation buffer: its micro-batches, and training's position in it."""

    def __init__(self, trainer: SampledInternals) -> None:
        self.trainer = trainer
        self.window_began = 0
        self.sampled_at_step = 0  # the optimizer step at which TRL's generation returned the completions
        self.sampler_is_older = False  # whether older weights sampled them (`generation_lag`)
        self.sampler: Any = None

    def window_begins(self) -> None:
        self.window_began = self.trainer._step

    @property
    def micro_batches_of_an_epoch(self) -> int | None:
        loader = self.trainer.callback_handler.train_dataloader
        try:
            return len(loader)
        except TypeError:  # of a streaming data set
            return None

    def merge(self, micro_batches: int) -> dict[str, Any]:
        """Put the rows of each `micro_batches` micro-batches into the last of them. Returns the current one."""
        buffer = self.trainer._buffered_inputs
        for first in range(0, len(buffer), micro_batches):
            merging = buffer[first : first + micro_batches]
            keys = [key for key, x in merging[0].items() if isinstance(x, torch.Tensor) and x.ndim > 0]
            all_rows = {key: torch.cat([batch[key] for batch in merging]) for key in keys}
            no_rows = {key: x.new_empty((0, *x.shape[1:])) for key, x in all_rows.items()}
            merged_batch = {**merging[0], **all_rows, _MERGED: micro_batches}
            buffer[first : first + micro_batches] = [*({**merging[0], **no_rows} for _ in merging[1:]), merged_batch]
        current: dict[str, Any] = buffer[self.trainer._step % len(buffer)]
        return current

    def remaining(self) -> list[dict[str, Any]]:
        """Return the micro-batches left before the next generation, the next one first, and again last if it recurs.

        Those whose rows run with a later one are left out.
        """
        step = self.trainer._step
        buffer = self.trainer._buffered_inputs
        if buffer is None:
            return []
        cycle = len(buffer) * self.trainer.num_iterations
        places = range(step, step + min(cycle - step % cycle, len(buffer) + 1))
        batches = (buffer[place % len(buffer)] for place in places)
        return [batch for batch in batches if len(batch["completion_ids"])]

    def store(self, batch: dict[str, Any], entries: dict[str, Any]) -> None:
        """Add `entries` to the micro-batch `batch`, if it is trained on again."""
        remaining = self.remaining()
        if remaining and remaining[0] is batch and any(later is batch for later in remaining[1:]):
            batch.update(entries)

    def drop(self) -> None:
        self.trainer._buffered_inputs = None

    @property
    def trained(self) -> int:
        return int(self.trainer._step)

    @property
    def in_mid_cycle(self) -> bool:
        return self.trained % self.micro_batches_of_a_generation != 0

    @property
    def micro_batches_of_a_generation(self) -> int:
        return int(self.trainer.args.steps_per_generation * self.trainer.num_iterations)

    @property
    def number(self) -> int:
        """The number of the current generation batch since training began."""
        return self.trained // self.micro_batches_of_a_generation

    def mid_cycle_slices(self) -> list[dict[str, Any]] | None:
        return self.trainer._buffered_inputs if self.in_mid_cycle else None

    def continue_at(self, micro_batch: int, slices: list[dict[str, Any]] | None) -> None:
        self.trainer._step = micro_batch
        self.trainer._buffered_inputs = slices
        self.trainer._last_loaded_step = -1

    def draw_orders_of(self, epochs: int) -> None:
        if self.sampler is not None:
            for _ in range(epochs):
                next(iter(self.sampler), None)

    def training_rows(self) -> Any:
        trainer = self.trainer
        dataset = self.trainer.train_dataset
        is_table = isinstance(dataset, Dataset)
        return trainer._remove_unused_columns(dataset, description="training") if is_table else dataset

    def padding(self) -> dict[str, float]:
        pad = self.trainer._tokenizer.pad_token_id
        return {"prompt_ids": pad, "completion_ids": pad, "tool_mask": 1, "kept_ids": -1}


def reads_rows_anew(trainer: SampledInternals) -> bool:
    """Return whether rows of the training data may change each time that they are read."""
    from trl.trainer.utils import identity

    format_type = getattr(trainer.train_dataset, "format", {}).get("type")
    return format_type == "custom" or trainer.data_collator is not identity


class UpcomingRows:
    """The rows of the data in each generation batch of this rank, before the data loader yields them.

    TRL's sampler draws its order from the seed alone.
    """

    def __init__(self, trainer: SampledInternals, buffer: Buffer) -> None:
        from trl.trainer.utils import RepeatSampler

        args = trainer.args
        self.trainer = trainer
        self.buffer = buffer
        self.rows = buffer.training_rows()
        self.batch_size = args.generation_batch_size
        self.rank_size = args.generation_batch_size // args.world_size
        self.first_row = args.process_index * self.rank_size
        sampler = RepeatSampler(
            self.rows,
            mini_repeat_count=args.num_generations,
            batch_size=args.generation_batch_size // args.num_generations,
            repeat_count=1,
            shuffle=trainer.shuffle_dataset,
            seed=args.seed,
        )
        self._order = itertools.chain.from_iterable(iter(sampler) for _ in itertools.count())
        self._places: list[int] = []

    def of_batch(self, number: int) -> list[dict[str, Any]]:
        """Return the rows of generation batch `number`, as copies, and as the data loader reads them."""
        first = number * self.batch_size + self.first_row
        missing = first + self.rank_size - len(self._places)
        self._places += itertools.islice(self._order, max(0, missing))
        places = self._places[first : first + self.rank_size]
        # A format of the data set may give other types for a row alone
        read = getattr(self.rows, "__getitems__", None)
        rows = [self.rows[i] for i in places] if read is None else read(places)
        of_device: list[dict[str, Any]] = send_to_device([dict(row) for row in rows], self.trainer.accelerator.device)
        return copy.deepcopy(of_device)

    def prompts_of(self, number: int) -> list[Any]:
        return [row.get("prompt") for row in self.of_batch(number)]


def merged_micro_batches(batch: dict[str, Any]) -> int:
    """Return how many of TRL's micro-batches a batch holds, also one of a checkpoint with another plan."""
    return int(batch.get(_MERGED, 1))


@contextmanager
def as_one_micro_batch(trainer: SampledInternals, micro_batches: int) -> Iterator[None]:
    """Make TRL's loss divide as if the rows of `micro_batches` were a single one, in the `with` block."""
    if micro_batches == 1:
        yield
        return
    accumulation_steps = trainer.current_gradient_accumulation_steps / micro_batches
    steps_per_generation = trainer.args.steps_per_generation / micro_batches
    with (
        replaced(trainer, current_gradient_accumulation_steps=accumulation_steps),
        replaced(trainer.args, steps_per_generation=steps_per_generation),
    ):
        yield


def without_passes(
    trainer: SampledInternals,
    run_turn: Callable[..., Any],
    continuing_turns: Callable[[], AbstractContextManager[None]],
) -> Generation:
    """Return TRL's generation without its log-prob passes, which run later."""

    def no_pass(*_: Any, **__: Any) -> tuple[None, None, None]:
        return None, None, None

    def no_adapter(*_: Any, **__: Any) -> AbstractContextManager[None]:
        return nullcontext()

    # TRL's correction reads the log-probs of the pass, so ours follows the passes
    members = {PASS: no_pass, "vllm_importance_sampling_correction": False}
    return Generation(trainer, trl.GRPOTrainer, no_adapter, run_turn, continuing_turns, **members)


def shuffled_then(
    rearrange: Callable[[dict[str, Any]], dict[str, Any]], trainer_class: type
) -> AbstractContextManager[None]:
    shuffle = module_of(trainer_class).shuffle_sequence_dict
    return names_replaced(trainer_class, shuffle_sequence_dict=lambda batch: rearrange(shuffle(batch)))


def gathered_by(accelerator: Any) -> AbstractContextManager[None]:
    return names_replaced(trl.GRPOTrainer, gather=accelerator.gather, gather_object=accelerator.gather_object)
