"""The options of a plan: arguments that change time and memory of a run, but no result.

Pure data. A unit is a row, or a pair in DPO.
"""

from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import Any

from .lengths import Lengths
from .speed import StepWork
from .step import Row


@dataclass(frozen=True)
class Setting:
    """The arguments that trade time for memory."""

    engine: str
    checkpointing: bool
    precompute: bool = False  # `precompute_ref_log_probs`
    offloads: bool = False  # `activation_offloading`
    hosts: bool = False  # `reference_device="cpu"`

    @property
    def on_device(self) -> tuple[str, bool, bool]:
        """The setting without what is in host memory."""
        return self.engine, self.checkpointing, self.precompute

    def only_slows(self, fast: "Setting") -> bool:
        """Return whether this is `fast` with more in host memory: the same results, slower."""
        return self.on_device == fast.on_device and self.offloads >= fast.offloads and self.hosts >= fast.hosts

    def changes(self, given_setting: "Setting") -> int:
        """Return how many of the trainer's arguments differ from those of the `given_setting`."""
        return sum(x != y for x, y in zip(astuple(self)[1:], astuple(given_setting)[1:], strict=True))


@dataclass(frozen=True, kw_only=True)
class Option:
    """The arguments that a plan chooses."""

    setting: Setting
    batch: int  # `per_device_train_batch_size`
    accumulation: int
    generation: int | None = None  # `steps_per_generation`
    budget: int | None = None  # `max_tokens_per_micro_batch`


@dataclass(frozen=True, kw_only=True)
class Space:
    """What the arguments give, and what may change without changing a result."""

    given_option: Option
    lengths: Lengths
    settings: tuple[Setting, ...]  # those that keep more in host memory last
    changes_batch: bool = False  # else the batch is kept
    changes_budget: bool = False  # `max_tokens_per_micro_batch` is allowed
    joined_batches: int = 1  # micro-batches of an optimizer step that `max_tokens_per_micro_batch` merges
    most_rows: int  # units in a pass whose memory can be counted

    def ladders(self) -> Iterator[list[Option]]:
        """Yield, for each setting, the options from the smallest micro-batch up."""
        sizes = self._sizes()
        rows = self.given_option.accumulation * self.given_option.batch
        generation = self.given_option.generation
        rows_of_generation = generation and generation * self.given_option.batch
        for setting in self.settings:
            yield [
                Option(
                    setting=setting,
                    batch=batch,
                    accumulation=rows // batch,
                    generation=rows_of_generation and rows_of_generation // batch,
                    budget=budget,
                )
                for batch, budget in sizes
            ]

    def _sizes(self) -> list[tuple[int, int | None]]:
        """Return pairs of batch and budget, the smallest first."""
        batch = self.given_option.batch
        accumulation = self.given_option.accumulation
        generation = self.given_option.generation
        if self.changes_budget:
            merged_units = batch * self.joined_batches
            units = min(merged_units, self.most_rows)
            # Budgets that the longest rows fill, so that none has room to spare: some of a group, or whole groups
            steps = {min(units, round(2 ** (i / 4))) for i in range(4 * units.bit_length() + 1)}
            lengths = self.lengths
            group = lengths.group
            counts = sorted({min(units, x if x <= group else -(-x // group) * group) for x in steps})
            budgets = sorted({lengths.tokens_of(lengths.most(count)) for count in counts})
            sizes: list[tuple[int, int | None]] = [(batch, x) for x in budgets]
            if accumulation == 1 and units == merged_units:
                # The whole step in one pass needs no budget, because it is one micro-batch
                sizes[-1] = (batch, None)
            return sizes
        if not self.changes_batch:
            return [(batch, None)]
        rows = batch * accumulation
        batches = [x for x in range(1, min(rows, self.most_rows) + 1) if rows % x == 0]
        sizes = [(x, None) for x in batches if generation is None or generation * batch % x == 0]
        tokens = [self.lengths.tokens_of(self.lengths.most(x)) for x, _ in sizes]
        # A batch with parts of groups can have more prompts, and so more tokens, than a larger one with whole groups
        return [size for i, size in enumerate(sizes) if tokens[i] <= min(tokens[i:])]

    def merged(self, option: Option) -> int:
        """Return the units of the micro-batches that an option runs together."""
        return option.batch * (self.joined_batches if option.budget is not None else 1)

    def largest_rows(self, option: Option) -> tuple[Row, ...]:
        """Return the rows of the largest forward with an option."""
        if option.budget is None:
            return self.lengths.most(option.batch)
        return self.lengths.within(option.budget, self.merged(option))

    def largest_tokens(self, option: Option) -> int:
        """Return the tokens of the largest forward with an option."""
        return self.lengths.tokens_of(self.largest_rows(option))

    def work(self, option: Option, devices: int, reference: float, offloaded: float = 0.0) -> StepWork:
        """Return the optimizer step with an option on one of `devices`, of units of average length.

        Args:
            reference: forward passes of the reference, on average.
            offloaded: bytes of activations that go to host memory for each token.
        """
        lengths = self.lengths
        units = option.batch * option.accumulation
        merged_units = self.merged(option)
        tokens = units * float(lengths.units_U.mean())
        if lengths.group > 1 and lengths.shares and (option.batch > 1 or option.budget is not None):
            sharing = min(lengths.group, merged_units)
            tokens -= units * float(lengths.prompts_U.mean()) * (1 - 1 / sharing)
        passes = option.accumulation
        if option.budget is not None:
            passes = option.accumulation // self.joined_batches * lengths.parts(option.budget, merged_units)
        return StepWork(
            passes=passes,
            tokens=tokens,
            pairs=units * lengths.mean_pairs,
            scored_tokens=units * lengths.mean_scored,
            checkpointing=option.setting.checkpointing,
            engine=option.setting.engine,
            devices=devices,
            reference=reference,
            offloaded=tokens * offloaded,
            hosts_reference=option.setting.hosts,
        )

    def arguments_of(self, option: Option) -> dict[str, Any]:
        """Return the arguments of an option that the trainer takes; `None` for those to leave out."""
        setting = option.setting
        arguments: dict[str, Any] = {
            "per_device_train_batch_size": option.batch,
            "gradient_accumulation_steps": option.accumulation,
        }
        if option.generation is not None:
            arguments["steps_per_generation"] = option.generation
            arguments["generation_batch_size"] = None
        if option.budget is not None or self.given_option.budget is not None:
            arguments["max_tokens_per_micro_batch"] = option.budget
        arguments["gradient_checkpointing"] = setting.checkpointing
        if setting.precompute:
            arguments["precompute_ref_log_probs"] = True
        if setting.offloads or self.given_option.setting.offloads:
            arguments["activation_offloading"] = setting.offloads
        if setting.hosts or self.given_option.setting.hosts:
            arguments["reference_device"] = "cpu" if setting.hosts else None
        return arguments
