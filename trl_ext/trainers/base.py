"""What `DPOTrainer` and `GRPOTrainer` override alike, in the order in which it runs.

Nothing is decided here: each method calls a part of the trainer, a plain object that is named in `_begin`.
"""

import dataclasses
import inspect
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers
from peft import PeftModel
from peft.utils import CONFIG_NAME as PEFT_CONFIG_NAME
from transformers import ProgressCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..callbacks.progress import ThroughputProgress, add_to_model_card, show
from ..compat.choices import REPLACEABLE
from ..compat.replaced import built_with, replaced, unrecorded_pass
from ..config import AddedFields
from ..distributed.detect import detect_engine, engine_mismatch, requested_engine
from ..distributed.failures import rank_failures_reported
from ..distributed.lora import keep_differentiable, make_adapter
from ..distributed.ranks import Ranks
from ..packing.support import has_dropout
from ..planning.plan import (
    Decision,
    PackingFacts,
    PackingPlan,
    Plan,
    SkipCounts,
    TokenCounts,
    check_packing_options,
    plan_packing,
)
from ..reference.adapters import AdapterChoice, trained_beside
from ..scoring.checks import watch_token_ids
from ..scoring.scorer import Scorer
from .callbacks import Lifecycle, MovesReference
from .checked_arguments import check_given, padding_reason
from .checkpointing import Checkpoints
from .non_finite import NonFiniteLoss
from .reference_weights import ReferenceOfPolicy

logger = logging.getLogger("trl_ext")

# What our `compute_loss` adds to a batch
_WITHHELD = {
    *("old_per_token_logps", "ref_per_token_logps", "importance_sampling_ratio"),
    *("ref_chosen_logps", "ref_rejected_logps"),
}


class ExactTrainer(transformers.Trainer if TYPE_CHECKING else object):  # type: ignore[misc]
    """Mixed in before a TRL trainer."""

    _trl_trainer: type
    _config_class: type
    _added_fields: type[AddedFields]
    accelerator: Any
    added: Any
    _plan: Plan | None = None
    _loss_reached: bool | None = None  # whether our `compute_loss` ran in the first training step
    _bypasses_loss = False
    _scored_elsewhere: str | None = None  # what scores the policy in the place of our forward

    # 1. Built

    def _begin(self, positional: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
        """Before TRL's `__init__`: the arguments are checked, and the parts that need nothing else are made."""
        if "tokenizer" in keywords:
            name = type(self).__name__
            raise TypeError(f"`tokenizer` of `{name}` is called `processing_class`, as in TRL. Rename it.")
        given = inspect.signature(self._trl_trainer.__init__).bind(self, *positional, **keywords).arguments  # type: ignore[misc]
        config = given.get("args")
        check_given(type(self).__name__, given, config, self._config_class)
        self.added = self._added_fields.of(config)
        self.skipped, self.fed = SkipCounts(), TokenCounts()
        self.ranks = Ranks()
        self.scorer = Scorer(self.added)
        self.non_finite = NonFiniteLoss(self, self.ranks)
        policy, ref_model = given["model"], given.get("ref_model")
        adapters = AdapterChoice(policy, given.get("peft_config"), self.added, ref_model, config)
        self.reference_weights = ReferenceOfPolicy(self, self.ranks, adapters, self.added.reference_device)
        self.checkpoints = Checkpoints(self)
        self.checkpoints.parts.append(self.reference_weights.save)
        return given

    @contextmanager
    def _built(self, config: Any, **others: Any) -> Iterator[None]:
        """Within, TRL's `__init__` builds the trainer with our head and our adapters."""
        copies = self.reference_weights.adapters.trl_may_copy
        try:
            with built_with(self._trl_trainer, config, self.attach_model, make_adapter, copies=copies, **others):
                yield
        finally:
            self.reference_weights.restore(config)
            self.checkpoints.unhide_optimizer()

    def create_accelerator_and_postprocess(self) -> None:
        """Transformers' own, called first of all when the trainer is built."""
        self._asked = requested_engine(os.environ, self.args)
        super().create_accelerator_and_postprocess()
        self.checkpoints.hide_optimizer()
        joined = self.ranks.join(self.accelerator, self.model)
        if joined is not self.accelerator:
            self.accelerator = joined
            by_objects = self.args.eval_use_gather_object
            self.gather_function = partial(joined.gather_for_metrics, use_gather_object=by_objects)
        self.check_engine()
        self._on_accelerator()

    def _on_accelerator(self) -> None:
        """Called once ranks are known."""

    def check_engine(self, wrapped: Any = None) -> None:
        reason = engine_mismatch(self._asked, detect_engine(self.accelerator, self.model, wrapped))
        if reason is not None:
            raise ValueError(reason)

    def attach_model(self, model: Any, **options: Any) -> None:
        """Stands for TRL's `add_fused_lm_head`: weights are whole here for the last time."""
        self.scorer.attach(model, entropy_requires_grad=self._entropy_has_gradient(), **options)
        is_policy = len(self.scorer.forwards) == 1
        if not is_policy:
            self.reference_weights.take_model(model)
            return
        if isinstance(self.model, PeftModel):
            keep_differentiable(self.model)
        self.reference_weights.take_policy(has_reference=self._has_reference())

    def _has_reference(self) -> bool:
        """Whether the loss reads a reference."""
        return True

    def _entropy_has_gradient(self) -> bool:
        """Whether the loss has a gradient through the entropies."""
        return False

    def _ready(self, callbacks: Any) -> None:
        """After TRL's `__init__`: what can be checked now, and the callbacks."""
        self.scorer.check(self.accelerator.device, padding_reason(self))
        check_packing_options(self._packing_facts())
        self.padding_free = self._packing_plan().padding_free
        self.scorer.split_over(self.ranks, self.accelerator.unwrap_model(self.model).config.get_text_config())
        self.non_finite.check_options()
        if hasattr(self, "_tp_size") and self.ranks.tensor_parallel is not None:
            self._tp_size = 1
        own = self.reference_weights.own
        if own is not None and own.moves:
            self.add_callback(MovesReference(own))
        self.add_callback(Lifecycle(self))
        bars = self.callback_handler.callbacks
        bars[:] = [
            ThroughputProgress() if type(x) is ProgressCallback and x not in (callbacks or ()) else x for x in bars
        ]
        tokens = len(self._tokenizer)
        for model in (self.model, self.ref_model):
            if model is not None:
                watch_token_ids(model, tokens)

    # 2. What runs, and why

    @property
    def scoring_forwards(self) -> list[Any]:
        return self.scorer.forwards

    def _replaces(self, part: str) -> bool:
        ours = next(cls for cls in type(self).__mro__ if "_trl_trainer" in vars(cls))
        return any(x in vars(self) or getattr(type(self), x) is not getattr(ours, x) for x in REPLACEABLE[part])

    def _packing_facts(self) -> PackingFacts:
        packing = self.scorer.policy.packing
        return PackingFacts(
            padding_free=self.added.padding_free,
            share_prompts=self.added.share_prompts,
            unsupported=packing.why_padded,
            unshared=packing.why_unshared,
            active_dropout=has_dropout(self.model),
        )

    def _packing_plan(self) -> PackingPlan:
        return plan_packing(self._packing_facts())

    def _make_plan(self) -> Plan:
        raise NotImplementedError

    @property
    def plan(self) -> Any:
        """What was decided: when training started, else when it was first asked for."""
        if self._plan is None:
            self._plan = self._make_plan()
        return self._plan

    def plan_again(self) -> None:
        """Decide anew, for what has changed."""
        self._plan = self._make_plan()

    def explain(self) -> Plan:
        """Which engine runs; which log-prob passes run, are reused or are skipped, which tokens are fed; and why."""
        plan, packing = self._plan or self._make_plan(), self._packing_plan()
        by = [wish.by for wish in self._asked.wishes]
        if not by and self._asked.processes_by is not None:
            by = [self._asked.processes_by]
        by_words = f", asked for by {' and '.join(by)}" if by else ""
        engine = Decision("engine", "run", f"{detect_engine(self.accelerator, self.model)}{by_words}.")
        alone = self.accelerator.state.num_processes == 1
        head = Decision("head", "run", self.scorer.describe(self.accelerator.device, alone))
        how = packing.decision, head
        if self._scored_elsewhere is not None:
            how = Decision("packing", "skip", self._scored_elsewhere), Decision("head", "skip", self._scored_elsewhere)
        decisions = (engine, *plan.decisions, *how)
        return dataclasses.replace(
            plan, decisions=decisions, warnings=(*plan.warnings, *packing.warnings, *self._unsaved())
        )

    def _unsaved(self) -> list[str]:
        beside = trained_beside(self.model) if isinstance(self.model, PeftModel) else []
        more = f" and {len(beside) - 1} more" if beside[1:] else ""
        return [
            f"`{name}`{more} is trained and is in no adapter: PEFT saves adapters only, so neither a checkpoint nor "
            "`save_model` has it. Name its module in `modules_to_save`, or freeze it."
            for name in beside[:1]
        ]

    @contextmanager
    def reference_pass(self) -> Iterator[None]:
        with unrecorded_pass(self), self.reference_weights.entered():
            yield

    # 3. Trained

    def train(self, resume_from_checkpoint: str | bool | None = None, *positional: Any, **keywords: Any) -> Any:
        """TRL's own, after the plan was made and logged."""
        self._before_training()
        if not any(param.requires_grad for param in self.model.parameters()):
            hint = "Let parameters of it be trained (`requires_grad`)."
            if isinstance(self.model, PeftModel):
                hint = (
                    f'The adapter "{self.model.active_adapter}" was loaded for inference: load it with '
                    "`is_trainable=True`, or name it in `policy_adapter_name`."
                )
            raise ValueError(f"Nothing of the model is trained: no parameter has `requires_grad`. {hint}")
        self.reference_weights.copy_trained()
        self._plan = self._make_plan()
        if self.accelerator.is_main_process:
            plan = self.explain()
            show(f"{type(self).__name__}: what runs, and why\n{plan}")
            for warning in plan.warnings:
                logger.warning(warning)
        with rank_failures_reported():
            return super().train(self.checkpoints.find(resume_from_checkpoint), *positional, **keywords)

    def _before_training(self) -> None:
        """Called first by `train`."""

    def _watched_step(self, step: Callable[..., Any], *positional: Any, **keywords: Any) -> Any:
        """TRL's own. The first one shows whether a subclass's `compute_loss` calls ours; if not, the plan changes.

        Raises:
            `ValueError`: an option needs our `compute_loss`.
        """
        if self._loss_reached is not None:
            return step(*positional, **keywords)
        self._loss_reached = self.scorer.policy.used = False
        try:
            loss = step(*positional, **keywords)
        except KeyError as error:
            if self._loss_reached or not self._replaces("loss") or not any(error.args == (name,) for name in _WITHHELD):
                raise
            raise RuntimeError(
                f"{self.own_loss()} reads {error} of a batch, and does not call `super().compute_loss(...)`, which "
                "adds it. Call it, or train with TRL's trainer."
            ) from error
        if not self._loss_reached:
            self._bypasses_loss = True
            if not self.scorer.policy.used:
                self._scored_elsewhere = f"{self.own_loss()} scores the policy, without `fused_lm_head=True`."
            self._loss_bypassed()
        return loss

    def _loss_is_ours(self) -> None:
        """Called by our `compute_loss`."""
        if self._loss_reached is False:
            self._loss_reached = True

    def own_loss(self) -> str:
        return f"`{type(self).__name__}.compute_loss`"

    def bypassed_by(self) -> str | None:
        """A subclass's `compute_loss` that does not call ours."""
        return self.own_loss() if self._bypasses_loss else None

    def _loss_bypassed(self) -> None:
        """Called after the first training step, where a subclass's `compute_loss` did not call ours."""
        if self.non_finite.action is not None:
            raise ValueError(
                f"`on_non_finite_loss={self.non_finite.action!r}` needs `super().compute_loss(...)`, which "
                f"{self.own_loss()} does not call. Call it, or leave the option unset."
            )
        self.plan_again()
        if self.accelerator.is_main_process:
            logger.warning(
                f"{self.own_loss()} does not call `super().compute_loss(...)`, so what this trainer adds to TRL's "
                f"loss does not run. The plan is now:\n{self.explain()}"
            )

    @contextmanager
    def policy_scored(self, by: str | None = None) -> Iterator[None]:
        """Within, the policy must be scored by our forward, or `by` a subclass's method. The plan says so then."""
        with self.scorer.policy_scored(by is None):
            yield
        if by is not None and not self.scorer.policy.used and self._scored_elsewhere is None:
            self._scored_elsewhere = f"{by} scores the policy, without `fused_lm_head=True`."
            if self.accelerator.is_main_process:
                logger.warning(f"The plan has changed:\n{self.explain()}")

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL's own, with `skipped/*`, `tokens_fed/*` and `head/*`: totals since the last log, of all ranks."""
        mode, prefix = ("train", "") if self.model.training else ("eval", "eval_")
        totals = self.skipped.take(mode) | self.fed.take(mode)
        logs.update({f"{prefix}{name}": value for name, value in totals.items()})
        super().log(logs, start_time)

    # 4. Saved and resumed

    def _init_training_state(self, *positional: Any, **keywords: Any) -> tuple[int, int]:
        return self.checkpoints.first_batch(super()._init_training_state(*positional, **keywords))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """TRL's own, in a folder that is marked until all of it is there; every rank writes as itself."""
        folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        with self.world_accelerator(), self.checkpoints.written(folder):
            super()._save_checkpoint(model, trial)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        self.checkpoints.push(partial(super()._push_from_checkpoint, checkpoint_folder))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.checkpoints.save_optimizer(output_dir):
            super()._save_optimizer_and_scheduler(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        with self.world_accelerator():
            if not self.checkpoints.load_weights(Path(resume_from_checkpoint)):
                super()._load_from_checkpoint(resume_from_checkpoint, model)
        several = isinstance(self.model, PeftModel) and len(self.model.peft_config) > 1
        if several and self._policy_folder() is None and (Path(resume_from_checkpoint) / PEFT_CONFIG_NAME).exists():
            self.model.load_adapter(resume_from_checkpoint, "default", is_trainable=True)

    def _load_best_model(self) -> None:
        best, folder = self.state.best_model_checkpoint, self._policy_folder()
        inner = best if folder is None else os.path.join(best, folder)
        with (
            self.world_accelerator(),
            replaced(self.state, best_model_checkpoint=inner if os.path.isdir(inner) else best),
        ):
            if not self.checkpoints.load_weights(Path(best)):
                super()._load_best_model()

    def _policy_folder(self) -> str | None:
        named = isinstance(self.model, PeftModel) and self.model.active_adapter != "default"
        return str(self.model.active_adapter) if named else None

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with self.world_accelerator():
            if not self.checkpoints.load_optimizer(checkpoint):
                super()._load_optimizer_and_scheduler(checkpoint)

    def save_model(self, *positional: Any, **keywords: Any) -> None:
        with self.world_accelerator():
            super().save_model(*positional, **keywords)

    def world_accelerator(self) -> Any:
        """Within, each rank is a process: accelerate asks the accelerator who writes which file."""
        every = self.ranks.every
        return replaced(self, accelerator=every) if every is not self.accelerator else nullcontext()

    def create_model_card(self, *positional: Any, **keywords: Any) -> None:
        super().create_model_card(*positional, **keywords)
        if self.is_world_process_zero():
            card, changed = Path(self.args.output_dir) / "README.md", self._added_fields.changed(self.args)
            add_to_model_card(card, self.args, changed, self.explain())

    # 5. Where the ranks of a sequence group get whole batches, transformers must not split them

    def _prepare_context_parallel_inputs(self, model: Any, inputs: Any) -> Any:
        if self.ranks.sequence is None:
            return super()._prepare_context_parallel_inputs(model, inputs)
        return nullcontext, inputs

    def get_sp_size(self) -> int:
        return 1 if self.ranks.sequence is not None else super().get_sp_size()

    def floating_point_ops(self, inputs: Any) -> int:
        return int(super().floating_point_ops(inputs)) // self.ranks.sequence_size

    def get_total_train_batch_size(self, args: Any) -> int:
        total = super().get_total_train_batch_size(args)
        return total if self.ranks.sequence is None else total // self.accelerator.parallelism_config.sp_size
