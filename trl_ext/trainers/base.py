"""The base of all trainers: the methods of TRL's trainers that all override, in the order they run.

Read it first. Each step calls one of the parts that `_begin` creates (`_ranks`, `_scorer`, `_reference_weights`,
`_checkpoints`, `_non_finite`). A part is a plain object in its own file.
"""

import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import ProgressCallback

from ..callbacks.progress import ThroughputProgress, add_to_model_card, show
from ..callbacks.summary import PhaseTimes, show_saved, tokens_line
from ..checks.arguments import (
    adapter_padding_reason,
    bound_arguments,
    check_given,
    padding_reason,
    warn_of_unknown_loss_types,
)
from ..checks.best_metric import check_best_metric, check_given_metrics, has_no_value
from ..checks.overrides import check_overrides
from ..compat import check_deepspeed
from ..compat.features import Features, methods_off
from ..compat.overrides import (
    LOSS,
    PASS,
    REPLACEABLE,
    STEP,
    our_class,
    overrides,
    overrides_below,
    replaces_backward,
)
from ..compat.replaced import built_with, next_of, replaced, unrecorded_pass
from ..config import AddedCommonFields, AddedReferenceFields
from ..distributed.detect import detect_engine, engine_mismatch, requested_engine
from ..distributed.evaluation import check_evaluation, check_training, wrapped_in_training
from ..distributed.lora import keep_differentiable, make_adapter
from ..distributed.ranks import Ranks
from ..heads.kernels.work import triton_unavailable_reason
from ..host.activations import ActivationsOnHost
from ..losses.loss_types import unknown_loss_types
from ..packing.randomness import NEFTUNE, Randomness, randomness_of, strongest
from ..planning.agreement import agreed, compared
from ..planning.plan import (
    Decision,
    PackingFacts,
    PackingPlan,
    Plan,
    actions_of,
    changes_of,
    check_packing_options,
    plan_packing,
)
from ..reference.adapters import AdapterChoice
from ..reference.weights import base_of
from ..scoring.backbone import ForwardTokens
from ..scoring.model_inputs import watch_token_ids
from ..scoring.scorer import Scorer
from .as_trl import give_way_to_trl
from .callbacks import Lifecycle, MovesReference
from .checkpointing import Checkpoints
from .counts import SkipCounts, TokenCounts
from .first_batch import FirstBatchChecks
from .non_finite import NonFiniteLoss
from .reference_source import ReferenceSource
from .reference_weights import ReferenceOfPolicy
from .row_balance import RowBalance

logger = logging.getLogger("trl_ext")

# What TRL's losses read from the trainer under other names than the arguments
_LIVE_VALUES = (
    "loss_types",
    "loss_weights",
    "epsilon_low",
    "aux_loss_enabled",
    "compute_loss_func",
    "label_smoother",
    "_entropy_bonus_enabled",
)

# What our `compute_loss` adds to a batch
_ADDED_BY_LOSS = {
    "ref_chosen_logps",
    "ref_rejected_logps",
    "ref_logps",
    "ref_KL_logps",
}


class ExactTrainer(transformers.Trainer if TYPE_CHECKING else object):  # type: ignore[misc]
    """The first base class of each trainer; TRL's trainer is the second."""

    _trl_trainer: type
    _config_class: type
    _added_fields: type[AddedCommonFields]
    _scorer_class: type[Scorer] = Scorer
    _task_type = "CAUSAL_LM"  # of the model, by PEFT's name
    _other_model = "ref_model"  # the attribute of a second model with a forward of ours
    accelerator: Any
    ref_model: Any  # without a default, which would hide that TRL has renamed it
    _added: Any
    _source: ReferenceSource | None = None  # of trainers with a store of reference log-probs
    # Methods of TRL's that ours replace, and that each step runs
    _methods_of_step: tuple[str, ...] = ("training_step", "compute_loss")
    _splits_rows = True  # whether we split the tokens of a row over ranks; `SFTTrainer` leaves it to TRL
    _evaluated = "eval"  # the prefix of metrics in the evaluation that is to be logged
    _first_step_ran = False
    _first_step_checked = False  # whether it called our methods
    _loss_reached = False  # whether our `compute_loss` ran
    _bypasses_loss = False  # whether the first training step did not run our `compute_loss`
    _step_begins = False  # whether the next micro-batch is the first of an optimizer step
    _has_generation = False  # whether a step may sample completions
    _in_steps = False  # whether the first micro-batch of this training has begun, and training has not ended
    _values_of_plan: dict[str, Any] | None = None  # that TRL reads at each use
    _known_randomness: Randomness | None = None  # of the plan
    _randomness_of_ranks: Randomness | None = None  # if the ranks differ
    _scored_elsewhere: str | None = None  # why our forward does not score the policy
    _users_loss: str | None = None  # what `_name_of_users_loss` returned when the plan was made

    # 1. Construction: `_begin`, TRL's `__init__` within `_built`, `_ready`

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Give each trainer TRL's tags, and an `__init__` with TRL's signature, for `help()` and editors."""
        super().__init_subclass__(**keywords)
        if "_trl_trainer" not in vars(cls):  # a user's subclass
            return
        trls: Any = cls._trl_trainer
        cls._tag_names = [*getattr(trls, "_tag_names", ()), "trl_ext"]
        for method in methods_off(trls.__name__):
            if hasattr(trls, method):
                setattr(cls, method, _after_ours(method))

        @functools.wraps(trls.__init__)
        def init(self: Any, *positional: Any, **keywords: Any) -> None:
            self._construct(positional, keywords)

        cls.__init__ = init  # type: ignore[method-assign]

    def _begin(self, arguments: dict[str, Any]) -> None:
        """Check the arguments, by name, and create the parts, before TRL's `__init__`."""
        self._features = Features(self._trl_trainer.__name__)
        if os.environ.get("RANK", "0") == "0":
            self._features.warn()
        config = arguments.get("args")
        check_given(type(self).__name__, arguments, config, self._config_class, self._task_type)
        check_overrides(self, arguments.values())
        self._added = self._added_fields.of(config)
        self._require_features(arguments, config)
        self._methods_called: set[str] = set()
        self.skip_counts = SkipCounts()
        self.token_counts = TokenCounts()
        self._phase_times = PhaseTimes()
        self._ranks = Ranks()
        self._scorer = self._scorer_class(self._added)
        self._first_batch = FirstBatchChecks(self._ranks, self._scorer)
        self._non_finite = NonFiniteLoss(self, self._ranks)
        self._balance = RowBalance(self, self._ranks)
        self._reference_weights = ReferenceOfPolicy(self, self._ranks, getattr(self._added, "reference_device", None))
        self._checkpoints = Checkpoints(self, are_trls=self._features.why_off("checkpoints") is not None)
        self._facts_of_ranks: dict[str, Any] = {}  # those that differ, with the values for all ranks
        self._seen_in_policy: dict[Callable[[Any], Any], Any] = {}
        # A checkpoint must not exist without the log-probs that were scored before it
        self._checkpoints.parts += [self._reference_weights.save, lambda _: self._flush_store()]

    def _require_features(self, arguments: dict[str, Any], config: Any) -> None:
        """Raise `ImportError` if the user asks for a feature that is off, and for which TRL has no other way."""
        models = (arguments.get("model"), arguments.get("ref_model"))
        asked_features = {
            "packing": getattr(config, "padding_free", None) is True,
            "adapters": arguments.get("peft_config") is not None or any(isinstance(x, PeftModel) for x in models),
            "vLLM": getattr(config, "use_vllm", False),
            "moving reference": getattr(config, "sync_ref_model", False),
            "parts": getattr(self._added, "max_tokens_per_micro_batch", None) is not None,
            "dynamic sampling": getattr(self._added, "dynamic_sampling", False),
            "non-finite losses": self._added.on_non_finite_loss is not None,
            "teacher by name": isinstance(arguments.get("teacher_model"), str),
        }
        for feature, is_asked in asked_features.items():
            if is_asked:
                self._features.require(feature)
        if getattr(config, "precompute_ref_log_probs", False):
            self._features.require("store", "cannot precompute reference log-probs")

    def _construct(self, positional: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Run TRL's `__init__` between the checks of the arguments and those of the finished trainer."""
        arguments = bound_arguments(
            type(self).__name__, self._trl_trainer, self._config_class, self._added_fields, positional, keywords
        )
        if getattr(arguments.get("args"), "as_trl", False):
            trl_init = next_of(self).__init__
            give_way_to_trl(self, (our_class(self), ExactTrainer))
            trl_init(**arguments)
            return
        self._begin(arguments)
        replacements = self._check(arguments, arguments.get("args"))
        with self._built(arguments, **replacements):
            next_of(self).__init__(**arguments)
        self._ready(arguments.get("callbacks"))

    def _check(self, arguments: dict[str, Any], config: Any) -> dict[str, Any]:
        """Check what only this trainer takes, and create its parts. Returns names of TRL's module to replace."""
        return {}

    @contextmanager
    def _built(self, arguments: dict[str, Any], **replacements: Any) -> Iterator[None]:
        """Make TRL's `__init__` use our head and adapters in the `with` block, and these `replacements` by name."""
        config = arguments.get("args")
        # Only after all arguments are checked, because this may activate another adapter
        adapters = AdapterChoice(
            arguments["model"], arguments.get("peft_config"), self._added, arguments.get("ref_model"), config
        )
        self._reference_weights.adapters = adapters
        copies = adapters.trl_may_copy or not isinstance(self._added, AddedReferenceFields)
        try:
            with built_with(
                self._trl_trainer,
                config,
                self._attach_model,
                make_adapter,
                self._activations_on_host,
                copies=copies,
                off=self._features.off,
                **replacements,
            ):
                yield
        finally:
            self._reference_weights.restore(config)
            self._checkpoints.unhide_optimizer()

    def create_accelerator_and_postprocess(self) -> None:
        """Detect the engine and the groups of ranks. Transformers' `__init__` calls this first."""
        self._requested = requested_engine(os.environ, self.args)
        super().create_accelerator_and_postprocess()
        if self.is_deepspeed_enabled:
            check_deepspeed()
        self._checkpoints.hide_optimizer()
        joined_accelerator = self._ranks.join(self.accelerator, self.model, splits_rows=self._splits_rows)
        if joined_accelerator is not self.accelerator:
            self.accelerator = joined_accelerator
            self.gather_function = partial(
                joined_accelerator.gather_for_metrics, use_gather_object=self.args.eval_use_gather_object
            )
        self.check_engine()
        if self._ranks.tensor_parallel is not None:
            self._features.require("tensor parallelism")
        if self._ranks.sequence is not None:
            self._features.require("sequence parallelism")
        if self._ranks.group is not None:
            # TRL's would have each rank of a group write the same file
            self._features.require("checkpoints", "cannot save a model whose rows or weights are split over ranks")
        self._on_accelerator()

    def _on_accelerator(self) -> None:
        """Hook: called once the groups of ranks are known."""

    def check_engine(self, wrapped: Any = None) -> None:
        """Raise `ValueError` if the running engine is not the requested one. Called again with the `wrapped` model."""
        reason = engine_mismatch(self._requested, detect_engine(self.accelerator, self.model, wrapped))
        if reason is not None:
            raise ValueError(reason)

    def _attach_model(self, model: Any, **options: Any) -> None:
        """Attach the exact head to the policy, then to the reference model, before an engine shards the weights."""
        # TRL attaches its head to a `PeftModel` given as `ref_model` itself, whose forward then fails
        self._scorer.attach(base_of(model), entropy_requires_grad=self._entropy_has_gradient(), **options)
        if len(self._scorer.forwards) > 1:
            self._scorer.packings[-1].padded_reason = (
                adapter_padding_reason(model) or self._scorer.packings[-1].padded_reason
            )
            self._reference_weights.take_model(model)
        else:
            if isinstance(self.model, PeftModel):
                keep_differentiable(self.model)
            self._reference_weights.take_policy(has_reference=self._has_reference())
        if self._features.why_off("packing") is not None:
            self._scorer.packings[-1].padded_reason = self._features.why_off("packing")
        # Only once: a reference model that was freed is attached again when it is loaded again
        if self._source is not None and not self._source.registered and self.ref_model in (None, model):
            self._source.register()

    def _activations_on_host(self, model: Any = None) -> AbstractContextManager[None]:
        """Return the context of `activation_offloading`, which TRL's training step enters."""
        return ActivationsOnHost(lambda: self.model, self.accelerator.device)

    def _has_reference(self) -> bool:
        return True

    def _entropy_has_gradient(self) -> bool:
        """Whether a loss may send a gradient through the entropy. TRL's entropy always has one, which costs a pass."""
        # If code of the user is on some ranks only, all have the same passes over a sharded head
        reads_batches = overrides(self, *STEP, *LOSS, PASS) is not None or replaces_backward(self.accelerator)
        return reads_batches or bool(self._facts_of_ranks) or bool(self._unknown_loss_types)

    def _loss_reads_entropy(self) -> bool:
        """Whether more than TRL's loss reads the entropy of the pass that our `compute_loss` runs."""
        # Code of the user below ours may run passes itself
        is_read = "compute_loss" in self._overridden_below or overrides(self, *LOSS, PASS) is not None
        return is_read or bool(self._facts_of_ranks) or bool(self._unknown_loss_types)

    @property
    def _unknown_loss_types(self) -> list[str]:
        """The loss types of TRL's that this release does not know, so that nothing is assumed of them."""
        method = self._trl_trainer.__name__.removesuffix("Trainer").lower()
        names = unknown_loss_types(method, getattr(self.args, "loss_type", ()))
        return [] if names and self._replaces("loss") else names

    def _ready(self, callbacks: Any) -> None:
        """After TRL's `__init__`, run the remaining checks and add the callbacks."""
        if self._source is not None:
            self._source.loaded.clear()
        if getattr(self, "aux_loss_enabled", False):
            self._features.require("router loss")
        if any(isinstance(module, BaseTunerLayer) for module in self.model.modules()):
            self._features.require("adapters")  # those that transformers has loaded
        self._scorer.check(self.accelerator.device, padding_reason(self))
        check_packing_options(self._packing_facts())
        self.padding_free = self._packing_plan().padding_free
        self._scorer.split_over(self._ranks, self.accelerator.unwrap_model(self.model).config.get_text_config())
        self._non_finite.check_options()
        if hasattr(self, "_tp_size") and self._ranks.tensor_parallel is not None:
            self._tp_size = 1
        reference = self._reference_weights.policy_reference
        if reference is not None and reference.moves:
            self.add_callback(MovesReference(reference))
        self.add_callback(Lifecycle(self))
        user_callbacks = callbacks or ()
        all_callbacks = self.callback_handler.callbacks
        if self._features.why_off("progress bar") is None:
            all_callbacks[:] = [
                ThroughputProgress() if type(x) is ProgressCallback and x not in user_callbacks else x
                for x in all_callbacks
            ]
        for argument, model in (("model", self.model), ("ref_model", getattr(self, "ref_model", None))):
            if model is not None:
                watch_token_ids(model, len(self._tokenizer), argument)
        if self._unknown_loss_types and self.accelerator.is_main_process:
            warn_of_unknown_loss_types(self._unknown_loss_types)

    # 2. The plan: which passes run, and why

    @property
    def scoring_forwards(self) -> list[Any]:
        """The policy's scoring forward, then that of the reference model if there is one."""
        return self._scorer.forwards

    def _replaces(self, part: str) -> bool:
        """Return whether code of the user overrides one of the methods that `REPLACEABLE` lists for a `part`."""
        return overrides(self, *REPLACEABLE[part]) is not None

    def _randomness(self) -> Randomness | None:
        """Return why two passes of the same weights differ in training; `None` if they are equal. All plans ask it."""
        randomness = NEFTUNE if self.neftune_noise_alpha is not None else self._look_at_policy(randomness_of)
        # Hooks that are there in a pass only, and those of other ranks
        return strongest(randomness, self._scorer.policy.late_randomness, self._randomness_of_ranks)

    @cached_property
    def _overridden_below(self) -> list[str]:
        """The methods of ours whose `super()` is code of the user. As `plan`, it holds until the next one."""
        return [x for x in ("compute_loss", "_compute_loss", PASS) if overrides_below(self, x) is not None]

    def _name_of_users_loss(self) -> str | None:
        """Return an override that our `compute_loss` calls, and which may score the policy itself."""
        method = overrides(self, "_compute_loss") or overrides_below(self, "compute_loss")
        return None if method is None else f"`{type(self).__name__}.{method}`"

    @cached_property
    def _entropy_is_read(self) -> bool:
        """What `_loss_reads_entropy` returned when the plan was made."""
        return self._loss_reads_entropy()

    def _look_for_overrides(self) -> None:
        """Find out again which methods run code of the user: once for each plan, because each micro-batch asks."""
        self.__dict__.pop("_overridden_below", None)
        self._users_loss = self._name_of_users_loss()
        self._entropy_is_read = self._loss_reads_entropy()
        self._scorer.set_entropy_gradient(self._entropy_has_gradient())

    def _look_at_policy(self, look: Callable[[Any], Any]) -> Any:
        """Return what `look` finds in the policy. Within an optimizer step it looks only once, at all modules."""
        if not self._in_steps:
            return look(self.model)
        if look not in self._seen_in_policy:
            self._seen_in_policy[look] = look(self.model)
        return self._seen_in_policy[look]

    def _packing_facts(self) -> PackingFacts:
        packing = self._scorer.policy.packing
        randomness = self._randomness()
        unsupported = packing.padded_reason
        if unsupported is None and randomness is not None and not randomness.of_tokens:
            unsupported = f"{randomness.reason}, which may depend on the shape of the batch"
        return PackingFacts.of(
            self.args,
            self._added,
            unsupported=unsupported,
            unshared=packing.unshared_reason,
            randomness=None if randomness is None else randomness.reason,
            has_mixers=packing.has_mixers,
        )

    def _packing_plan(self) -> PackingPlan:
        return plan_packing(self._packing_facts())

    def _make_plan(self) -> Plan:
        """Decide which log-prob passes run. Trainers without a store implement it."""
        assert self._source is not None
        return self._source.plan()

    def _for_all_ranks(self, facts: Any) -> Any:
        """Return the `facts` of this rank, with the agreed ones where ranks differ."""
        return dataclasses.replace(facts, **self._facts_of_ranks)

    def _agree(self) -> None:
        """Make the facts of the plan the same on all ranks, or raise `ValueError` on all. All ranks must call it."""
        if self._ranks.world.num_processes == 1:
            return
        facts: dict[str, Any] = {}
        problem = None
        try:
            plan = self._make_plan()
            facts = compared(plan.facts) if hasattr(plan, "facts") else {}
        except ValueError as error:  # perhaps on this rank only, while the others wait below
            problem = str(error)
        rank_values = self._ranks.differing((facts, self._randomness(), problem))
        problem = next((x[2] for x in rank_values or () if x[2] is not None), problem)
        if problem is not None:
            raise ValueError(problem)
        if rank_values is None:
            return
        draws = [x for _, x, _ in rank_values if x is not None]
        # Draws that depend on the batch come first
        self._randomness_of_ranks = min(draws, key=lambda x: x.of_tokens, default=None)
        self._facts_of_ranks = {**self._facts_of_ranks, **agreed([x for x, _, _ in rank_values])}

    @cached_property
    def plan(self) -> Any:
        """The plan of this training; before training, a plan that is made at the first access."""
        return self._make_plan()

    def _live_values(self) -> dict[str, Any]:
        """Return the values that TRL reads from the trainer and its arguments at each use."""
        values = {name: getattr(self, name, None) for name in _LIVE_VALUES}
        values |= {name: value for name, value in vars(self).items() if name in vars(self.args)}
        values |= {f"args.{name}": value for name, value in vars(self.args).items()}
        return {name: _comparable(value) for name, value in values.items()}

    def _plan_again(self) -> None:
        """Replace the plan after a change."""
        for forward in self._scorer.forwards:
            forward.forget_randomness()
        self._look_for_overrides()
        self._values_of_plan = self._live_values()
        self._known_randomness = self._randomness()
        self._scorer.policy.planned_randomness = self._known_randomness
        self.plan = self._make_plan()

    def _follow_changes(self) -> None:
        """Replace the plan if a user's code has changed what it was made from, which TRL reads at each use.

        In an optimizer step, the model's changes are not seen, but for hooks. All ranks must make the same change.
        """
        self._values_of_plan = self._live_values()
        old_plan = self.plan
        plan = self._make_plan()
        self._look_for_overrides()
        if changes_of(old_plan, plan) is None and self._randomness() == self._known_randomness:
            return
        self._plan_again()
        if self.accelerator.is_main_process and actions_of(plan) != actions_of(old_plan):
            show(f"The plan has changed, because {changes_of(old_plan, plan) or 'the model has'}.\n{self.explain()}")

    def _follow_changes_in_step(self) -> None:
        """Replace the plan for changes that are followed within an optimizer step: hooks, and values of the trainer."""
        hooks_have_come = self._scorer.look_for_hooks(self.model_wrapped)
        # Several ranks agree on a plan for a hook when the next step begins
        if self._values_of_plan != self._live_values() or (hooks_have_come and self._ranks.world.num_processes == 1):
            self._follow_changes()

    def explain(self, verbose: bool = False) -> Plan:
        """Return what runs and why. Printed, it shows what differs from TRL or matters to users; if `verbose`, all."""
        plan = vars(self).get("plan") or self._make_plan()
        sources = self._requested.sources
        source = f" Requested by {' and '.join(sources)}." if sources else ""
        running_engine = detect_engine(self.accelerator, self.model)
        is_alone = running_engine.name == "one process" and not sources
        engine = Decision("engine", "run", f"{running_engine}.{source}", routine=is_alone)
        packing = self._packing_plan().decision
        head = Decision("head", "run", *self._head())
        policy = base_of(self.accelerator.unwrap_model(self.model))
        checks = self._first_batch.decisions(policy, packs=packing.action == "run")
        if self._scored_elsewhere is not None:
            packing, head = (Decision(name, "skip", self._scored_elsewhere) for name in ("packing", "head"))
            checks = ()
        passes = (self._balance.measured(x) for x in plan.decisions)
        return dataclasses.replace(
            plan,
            decisions=(engine, *passes, packing, head, *checks),
            warnings=(*plan.warnings, *self._checkpoints.warnings()),
            verbose=verbose,
        )

    def _head(self) -> tuple[str, bool]:
        """Return a description of how the head runs, and whether that is the usual way."""
        device = self.accelerator.device
        is_usual = self._scorer.is_usual and (device.type == "cpu" or triton_unavailable_reason(device) is None)
        return self._scorer.describe(device, self.accelerator.state.num_processes == 1), is_usual

    @contextmanager
    def reference_pass(self) -> Iterator[None]:
        """Make the policy's model compute the reference's outputs, without gradients, in the `with` block."""
        with unrecorded_pass(self), self._reference_weights.entered():
            yield

    # 3. Training

    def train(self, resume_from_checkpoint: str | bool | None = None, *positional: Any, **keywords: Any) -> Any:
        """Log the plan and train. `resume_from_checkpoint="auto"` resumes from the last complete checkpoint, if any.

        Raises:
            `ValueError`: no parameter is trained, or there is no checkpoint that this engine can resume from.
        """
        check_training(self, detect_engine(self.accelerator, self.model))
        self._facts_of_ranks = {}
        self._randomness_of_ranks = None
        self._agree()
        if resume_from_checkpoint and getattr(self._added, "dynamic_sampling", False):
            self._features.require("checkpoints", "cannot resume with `dynamic_sampling`")
        self._before_training()
        if not any(param.requires_grad for param in self.model.parameters()):
            hint = "Set it on the parameters to train."
            if isinstance(self.model, PeftModel):
                adapter = f'The adapter "{self.model.active_adapter}" was loaded for inference'
                hint = f"{adapter}: load it with `is_trainable=True`, or name it in `policy_adapter_name`."
            raise ValueError(f"No part of the model would be trained: no parameter has `requires_grad=True`. {hint}")
        check_best_metric(self)
        self._reference_weights.copy_trained()
        self._plan_again()
        if self.accelerator.is_main_process:
            plan = self.explain()
            if self._shows_plan():
                show(f"{type(self).__name__}: what runs, and why\n{plan}")
            for warning in plan.warnings:
                logger.warning(warning)
        self.skip_counts.of_training.clear()
        self.token_counts.of_training = 0
        self._phase_times = PhaseTimes()
        try:
            output = super().train(self._checkpoints.find(resume_from_checkpoint), *positional, **keywords)
        finally:
            self._in_steps = False
            self._after_training()
        if self._shows_plan():
            self._show_summary()
        return output

    def _show_summary(self) -> None:
        tokens = self.token_counts.of_training
        tokens_text = tokens_line(tokens, self.skip_counts.of_training, self._ranks.world.num_processes)
        if tokens_text is not None:
            show(tokens_text)
        show(self._phase_times.line())

    def _shows_plan(self) -> bool:
        """Whether this process logs the plan, and what ran in the end."""
        return bool(self.accelerator.is_main_process and self._added_fields.of(self.args).show_plan)

    def _before_training(self) -> None:
        """Called first by `train`."""
        if self._source is not None:
            self._source.refresh_if_adapters_changed()
            self._source.training_began = True

    def _after_training(self) -> None:
        """Hook: called last by `train`, also after an error."""

    def _resumed(self, state: Any) -> None:
        """Called when training begins, perhaps from a checkpoint."""
        if self._source is not None and state.global_step > 0:
            self._source.refresh()

    def _flush_store(self) -> None:
        """Called at the end of each epoch, evaluation and training, and before a checkpoint."""
        if self._source is not None:
            self._source.flush()

    def _release_reference(self) -> None:
        """Called at the end of each epoch but the last."""
        if self._source is not None:
            self._source.release()

    def evaluation_loop(self, *positional: Any, **keywords: Any) -> Any:
        if self._source is not None:
            self._source.refresh_if_adapters_changed()
        self._seen_in_policy.clear()
        self._agree()
        self._follow_changes()
        are_trls = self._features.why_off("evaluation before training") is not None
        if not are_trls:
            check_evaluation(self, detect_engine(self.accelerator, self.model))
        with nullcontext() if are_trls else wrapped_in_training(self), self._phase_times.measured("evaluation"):
            output = super().evaluation_loop(*positional, **keywords)
        # `eval_NAME` if there are several sets
        self._evaluated = keywords.get("metric_key_prefix", positional[4] if len(positional) > 4 else "eval")
        return output

    def _report_to_hp_search(self, trial: Any, step: int, metrics: dict[str, float]) -> None:
        """Called with the metrics of each evaluation in training, before anything reads them."""
        if overrides(self, "_determine_best_metric") is None:
            check_given_metrics(self, metrics, trial)
        super()._report_to_hp_search(trial, step, metrics)

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """Compare as transformers does. A metric without a value is not the best, as if it were NaN."""
        return not has_no_value(self, metrics) and super()._determine_best_metric(metrics, trial)

    def training_step(self, *positional: Any, **keywords: Any) -> Any:
        self._methods_called.add("training_step")
        if self._step_begins:
            self._seen_in_policy.clear()
            self._step_begins = False
            if not self._in_steps:
                self._phase_times.steps_begin(self.state.global_step, has_generation=self._has_generation)
            self._in_steps = True
            self._agree()
            self._follow_changes()
            if not self._first_step_ran:
                self._first_batch.look_up([self.model, getattr(self, self._other_model, None)], self.args)
        with self._in_step():
            return self._watched_step(super().training_step, *positional, **keywords)

    def _in_step(self) -> AbstractContextManager[Any]:
        """Hook: a context for TRL's training step."""
        return nullcontext()

    def _watched_step(self, step: Callable[..., Any], *positional: Any, **keywords: Any) -> Any:
        """Run TRL's training step. In the first one, find out whether a subclass's `compute_loss` calls ours."""
        if self._first_step_ran:
            return step(*positional, **keywords)
        self._loss_reached = False
        self._scorer.policy.was_called = False
        try:
            loss = step(*positional, **keywords)
        except KeyError as error:
            is_added_key = any(error.args == (name,) for name in _ADDED_BY_LOSS)
            if self._loss_reached or not is_added_key or not self._replaces("loss"):
                raise
            raise RuntimeError(
                f"{self._loss_name()} reads {error} from the batch, to which `super().compute_loss(...)` adds it. Call "
                "that first, or train with TRL's trainer."
            ) from error
        self._first_step_ran = True
        if not self._loss_reached:
            self._bypasses_loss = True
            if not self._scorer.policy.was_called:
                self._scored_elsewhere = f"{self._loss_name()} scores the policy without `fused_lm_head=True`."
            self._loss_bypassed()
        return loss

    def _note_call(self, method: str) -> None:
        """Note that a training step has called a method of ours."""
        if self.model.training and not self._first_step_checked:
            self._methods_called.add(method)

    def check_methods_called(self) -> None:
        """Raise `RuntimeError` if the first step has not called a method of ours, and no override of a user is why.

        A TRL in which such a method has another name would train without what ours adds.
        """
        self._first_step_checked = True
        for method in self._methods_of_step:
            if method not in self._methods_called and not self._may_be_bypassed(method):
                raise RuntimeError(
                    f"The first step did not call `{type(self).__name__}.{method}`, so the step lacks what trl_ext "
                    "adds to this method. Install tested versions of TRL and transformers (`trl-ext doctor` names "
                    "them)."
                )

    def _may_be_bypassed(self, method: str) -> bool:
        """Whether code of the user may be why a training step does not call a method of ours."""
        if overrides(self, method) is not None:
            return True
        if method == "_compute_loss" and "compute_loss" in self._methods_called:
            return overrides_below(self, "compute_loss") is not None
        return overrides(self, "training_step", "compute_loss") is not None

    def _loss_name(self) -> str:
        return f"`{type(self).__name__}.compute_loss`"

    def _bypassed_by(self) -> str | None:
        """Return the name of a subclass's `compute_loss` if it does not call ours, else `None`."""
        return self._loss_name() if self._bypasses_loss else None

    def _loss_bypassed(self) -> None:
        """Replace the plan, because a subclass's `compute_loss` did not call ours in the first training step."""
        if self._non_finite.action is not None:
            raise ValueError(
                f"`on_non_finite_loss={self._non_finite.action!r}` needs `super().compute_loss(...)`, which "
                f"{self._loss_name()} does not call. Call it, or leave `on_non_finite_loss` unset."
            )
        self._plan_again()
        if self.accelerator.is_main_process:
            logger.warning(
                f"{self._loss_name()} does not call `super().compute_loss(...)`, so this trainer's additions to TRL's "
                f"loss do not run. The plan is now:\n{self.explain()}"
            )

    def _loss_begins(self, batch: dict[str, Any]) -> None:
        """Called first by each `compute_loss`. Hooks of users may have come since the step began."""
        self._note_call("compute_loss")
        self._loss_reached = True
        self._follow_changes_in_step()
        late_randomness = self._scorer.policy.late_randomness
        if late_randomness is not None and self.model.training and self._lacks_old_policy(batch):
            logger.warning(
                f"A hook was added after this batch was generated: {late_randomness.reason}. TRL computes the old "
                "policy's log-probs without the hook. trl_ext computes them with it, until completions are generated "
                "again. Add the hook before training."
            )

    def _lacks_old_policy(self, batch: dict[str, Any]) -> bool:
        """Whether `batch` lacks log-probs of the old policy that stock TRL has scored at generation."""
        return False

    @contextmanager
    def _policy_scored(self, by: str | None = None, return_outputs: bool = False) -> Iterator[None]:
        """Require our forward to score the policy in the block. If a subclass's method `by` does it instead, warn."""
        entropy_requires_grad: bool | None = False
        if self._scorer.policy.may_keep_outputs:  # a loss may read their entropy
            entropy_requires_grad = True
        elif return_outputs or self._entropy_is_read:
            entropy_requires_grad = None
        with self._scorer.policy_scored(is_required=by is None, entropy_requires_grad=entropy_requires_grad):
            yield
        if by is not None and not self._scorer.policy.was_called and self._scored_elsewhere is None:
            self._scored_elsewhere = f"{by} scores the policy without `fused_lm_head=True`."
            if self.accelerator.is_main_process:
                logger.warning(f"The plan has changed:\n{self.explain()}")

    def _count_tokens(self, counts: list[int] | None = None) -> None:
        """Add what the micro-batch processed to the logs: `counts` of all ranks, by default the scorer's."""
        tokens = ForwardTokens(*(counts or self._ranks.sum_counts(list(self._scorer.take_counts()))))
        mode = "train" if self.model.training else "eval"
        self.skip_counts.add(mode, tokens=tokens.skipped)
        self.token_counts.add(
            mode,
            with_gradient=tokens.with_gradient,
            without_gradient=tokens.without_gradient,
            head=tokens.head,
            checks=tokens.checks,
        )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log as TRL does. Add `skipped/*`, `tokens_processed/*` and `head/*`, totals of all ranks, and `seconds/*`.

        If there are several evaluation sets, the metrics of each are also logged with its name.
        """
        mode = "train" if self.model.training else "eval"
        prefix = "" if self.model.training else "eval_"
        totals = self.skip_counts.take(mode) | self.token_counts.take(mode)
        if self.model.training:
            totals |= self._phase_times.take(self.state.global_step)
        logs.update({f"{prefix}{name}": value for name, value in totals.items()})
        if self._evaluated.startswith("eval_"):
            # TRL names its metrics alike for each of several sets, so that those of the last one replace the others
            set_name = self._evaluated.removeprefix("eval_")
            logs.update({f"{self._evaluated}_{name}": value for name, value in totals.items()})
            metrics = self._metrics["eval"]
            metrics.update({f"{set_name}_{name}": list(values) for name, values in metrics.items()})
        self._evaluated = "eval"
        super().log(logs, start_time)

    # 4. Checkpoints: saving and resuming

    def _init_training_state(self, *positional: Any, **keywords: Any) -> tuple[int, int]:
        return self._checkpoints.first_batch(super()._init_training_state(*positional, **keywords))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

        folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        timed = self._phase_times.measured("checkpoints")
        with timed, self._world_accelerator(), self._checkpoints.write(folder):
            super()._save_checkpoint(model, trial)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        self._checkpoints.push(partial(super()._push_from_checkpoint, checkpoint_folder))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self._checkpoints.save_optimizer(output_dir):
            super()._save_optimizer_and_scheduler(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load as transformers does, and also a split model, or a trained adapter "default" if there are others."""
        with self._world_accelerator():
            if not self._checkpoints.load_weights(Path(resume_from_checkpoint)):
                super()._load_from_checkpoint(resume_from_checkpoint, model)
        self._checkpoints.load_default_adapter(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        with (
            self._world_accelerator(),
            replaced(self.state, best_model_checkpoint=self._checkpoints.policy_folder(best)),
        ):
            if not self._checkpoints.load_weights(Path(best)):
                super()._load_best_model()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with self._world_accelerator():
            if not self._checkpoints.load_optimizer(checkpoint):
                super()._load_optimizer_and_scheduler(checkpoint)

    def save_model(self, *positional: Any, **keywords: Any) -> None:
        """Save as transformers does, and log whether it is an adapter or a whole model."""
        with self._world_accelerator():
            super().save_model(*positional, **keywords)
        if self._shows_plan():
            show_saved(self, *positional, **keywords)

    def _world_accelerator(self) -> Any:
        """Use the accelerator that counts every rank in the `with` block: it decides which rank writes a file."""
        return replaced(self, accelerator=self._ranks.world)

    def create_model_card(self, *positional: Any, **keywords: Any) -> None:
        """Write TRL's model card, with the tag `trl_ext`, our arguments and the plan."""
        super().create_model_card(*positional, **keywords)
        if self.is_world_process_zero():
            card = Path(self.args.output_dir) / "README.md"
            changed_fields = self._added_fields.changed(self.args)
            add_to_model_card(card, self.args, changed_fields, self.explain().table(folders=False))

    # 5. Sequence parallelism: our forward splits the tokens, so transformers must not split or count a batch again

    def _prepare_context_parallel_inputs(self, model: Any, inputs: Any) -> Any:
        if self._ranks.sequence is None:
            return super()._prepare_context_parallel_inputs(model, inputs)
        return nullcontext, inputs

    def get_sp_size(self) -> int:
        """Return 1 in a sequence group, because transformers must not split its batches."""
        return 1 if self._ranks.sequence is not None else super().get_sp_size()

    def get_tp_size(self) -> int:
        """Return 1 in a tensor-parallel group, because `accelerator` counts its ranks as one process."""
        return 1 if self._ranks.tensor_parallel is not None else super().get_tp_size()

    def floating_point_ops(self, inputs: Any) -> int:
        return int(super().floating_point_ops(inputs)) // self._ranks.sequence_size

    def get_total_train_batch_size(self, args: Any) -> int:
        """Count a group's batch once."""
        total = super().get_total_train_batch_size(args)
        if self._ranks.tensor_parallel is not None:
            total //= super().get_tp_size()
        return total if self._ranks.sequence is None else total // self.accelerator.parallelism_config.sp_size


def _after_ours(method: str) -> Callable[..., Any]:
    """Return a method that runs TRL's, or that of a user's class between ours and TRL's."""

    def run(self: Any, *positional: Any, **keywords: Any) -> Any:
        return getattr(super(ExactTrainer, self), method)(*positional, **keywords)

    return run


def _comparable(value: Any) -> Any:
    """Return a value that stays as it is if a list changes, and whose `==` is a bool, as that of a tensor is not."""
    if isinstance(value, list | tuple):
        return tuple(_comparable(x) for x in value)
    return value if isinstance(value, str | int | float | None) else id(value)
