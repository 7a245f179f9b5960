"""DPO's reference log-probs: from the store, the user's columns or TRL's own pass, as the plan says for each batch."""

import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import trl
from accelerate.utils import broadcast_object_list, gather_object, tqdm
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from ..compat import loaded_models_recorded, maybe_gather_lm_head_ctx
from ..packing import has_experts, multiplies_fp32
from ..passes import DPOFacts, DPOPlan, plan_dpo
from ..reference import (
    COARSE,
    EXACT,
    Canary,
    CheckedCollator,
    DiskStore,
    MemoryStore,
    ReferenceWeights,
    StoredReference,
    Tolerance,
    Variants,
    check_batch,
    check_column_values,
    have_columns,
    identity_facts,
    identity_of,
    write_about,
)
from .released_reference import ReleasedReferenceMixin, is_map_style
from .store_arguments import StoreArguments


class StoredReferenceMixin(ReleasedReferenceMixin):
    """Mixed in before TRL's `DPOTrainer`."""

    def __init__(self, *positional: Any, **keywords: Any) -> None:
        self._columns_seen: dict[str, tuple[Any, bool]] = {}
        self._drifts: str | None = None
        self._varies: str | None = None
        self._untold: str | None = None
        self._identity: str | None = None
        self._identity_facts: dict[str, Any] = {}
        self._stored: StoredReference | None = None
        self._load_reference: Callable[[], Any] | None = None
        self._training_began = False
        self._fed_is_counted = False
        with loaded_models_recorded(self._trl_trainer) as self._loaded:
            super().__init__(*positional, **keywords)
        if any(self._with_columns[name] and not is_map_style(x) for name, x in self._datasets()):
            self.data_collator = CheckedCollator(self.data_collator)
        self.callback_handler.add_callback(_StoreCallback(self))

    # When the trainer is built

    def _attach(self, model: Any, **options: Any) -> None:
        super()._attach(model, **options)  # type: ignore[misc]
        # Weights are whole for the last time: here a reference can be told from another
        if self.ref_model is None or model is self.ref_model:
            self._meet_reference()

    def _meet_reference(self) -> None:
        self._kind, self._reference_adapters = self._reference_is(), self._adapters_of_reference()
        if not self._is_sharded:
            self._load_reference = next((x.load for x in self._loaded if x.model is self.ref_model), None)
        if self._kind == "model":
            reference = ReferenceWeights(self.ref_model)
            self._drifts = reference.shares_with(self.model)
            self._varies = self._why_it_varies(reference)
        self._untold = self._why_untold(self.ref_model)
        self._adapters = self.adapters_of_policy()
        self._refuse_what_would_be_ignored()
        for name, dataset in self._datasets():
            if self._with_columns[name] and is_map_style(dataset):
                check_column_values(dataset, f"`{name}`")
        if self._make_plan().durable:
            self._identity_facts = self._identify(self.ref_model)
            self._identity = identity_of(self._identity_facts)

    def _refuse_what_would_be_ignored(self) -> None:
        ours, trls = (getattr(x, "compute_ref_log_probs", None) for x in (type(self), self._trl_trainer))
        if self.args.precompute_ref_log_probs and ours is not trls and not all(self._with_columns.values()):
            raise ValueError(
                f"`{type(self).__name__}` overrides `compute_ref_log_probs`, which `precompute_ref_log_probs=True` "
                "does not call here: log-probs are stored for each token. Give the values of your own as the columns "
                "`ref_chosen_logps` and `ref_rejected_logps` of the data sets, or remove the override."
            )

    def meet_reference_again(self) -> None:
        """Take what is the reference now: an adapter called "ref" may have come or gone, and a checkpoint brings one.

        Raises:
            `ValueError`: it is another one than was precomputed.
        """
        if self.own_reference is None:
            return
        was, self._kind, self._adapters = self._reference_adapters, self._reference_is(), self.adapters_of_policy()
        self._reference_adapters = now = self._adapters_of_reference()
        if not was and not now and not self.own_reference.copied():
            return
        if was != now and self.args.precompute_ref_log_probs:
            raise ValueError(
                "`precompute_ref_log_probs=True` scored the data with the reference that was there when the trainer "
                'was built, and an adapter named "ref" has come or gone since, which makes another reference. Load or '
                "delete it before building the trainer, or set `precompute_ref_log_probs=False`."
            )
        self._untold = None if self._is_sharded else self._why_untold(None)
        self._plan = self._make_plan()
        if self._plan.durable and not self._is_sharded:
            self._identity_facts = self._identify(None)
            identity = identity_of(self._identity_facts)
            if was == now and identity == self._identity:
                return
            self._identity = identity
        else:
            self._identity = None  # what is sharded already is not hashed, so nothing of it is kept
        self._stored = None

    def _meet_adapters_that_changed(self) -> None:
        found = self.adapters_of_policy()
        if found.keys() != self._adapters.keys() or any(found[name] is not self._adapters[name] for name in found):
            self.meet_reference_again()

    @property
    def _with_columns(self) -> dict[str, bool]:
        """For each data set whether its rows bring the user's own values; a data set may be exchanged at any time."""
        for name, dataset in self._datasets():
            if self._columns_seen.get(name, (None,))[0] is not dataset:
                names = dataset.column_names or next(iter(dataset)).keys()
                self._columns_seen[name] = dataset, have_columns(names, f"`{name}`")
        return {name: self._columns_seen[name][1] for name, _ in self._datasets()}

    @property
    def _is_sharded(self) -> bool:
        return self.is_fsdp_enabled or self.is_deepspeed_enabled

    def _datasets(self) -> Iterator[tuple[str, Any]]:
        yield "train_dataset", self.train_dataset
        if isinstance(self.eval_dataset, dict):
            yield from ((f"eval_dataset[{name!r}]", dataset) for name, dataset in self.eval_dataset.items())
        elif self.eval_dataset is not None:
            yield "eval_dataset", self.eval_dataset

    def _reference_is(self) -> str:
        """What `DPOFacts` names so."""
        if self.ref_model is not None:
            return "model"
        return "initial" if self.own_reference is None else self.own_reference.words()

    def _adapters_of_reference(self) -> tuple[str, ...]:
        return () if self.own_reference is None else self.own_reference.adapters

    def _weights(self, ref_model: Any) -> ReferenceWeights:
        model = self.accelerator.unwrap_model(self.model if ref_model is None else ref_model)
        return ReferenceWeights(model, self._reference_adapters)

    def _identify(self, ref_model: Any) -> dict[str, Any]:
        """All that the reference's log-probs follow from, as the main process sees it."""
        weights = self._weights(ref_model)
        # Under FSDP's loading that spares memory, the main process alone has weights
        own = self.own_reference
        here = self.accelerator.is_main_process
        with nullcontext() if own is None else own.copies_in_place():
            hashed = weights.hash(maybe_gather_lm_head_ctx, here)
        facts = [
            identity_facts(
                hashed,
                weights.config,
                weights.in_memory(maybe_gather_lm_head_ctx, here),
                head=self.head_arguments.head,
                mixed_precision=self.accelerator.mixed_precision,
                device=self.accelerator.device.type,
                tf32=self.args.tf32,
                use_liger_kernel=self.args.use_liger_kernel,
            )
        ]
        broadcast_object_list(facts, from_process=0)
        return facts[0]

    # The plan

    def _make_plan(self) -> DPOPlan:
        args, arguments = self.args, StoreArguments.of(self.args)
        not_storable = None
        own = self.own_reference
        if (
            args.sync_ref_model
            or (own is not None and own.moves)
            or any(isinstance(callback, trl.SyncRefModelCallback) for callback in self.callback_handler.callbacks)
        ):
            not_storable = "it is moved towards the policy during training (`sync_ref_model`)"
            fixed = [name for name, there in self._with_columns.items() if there]
            if fixed:
                raise ValueError(
                    f"Rows of {' and '.join(f'`{name}`' for name in fixed)} bring fixed reference log-probs in "
                    "`ref_chosen_logps` and `ref_rejected_logps`, and `sync_ref_model` moves the reference. Remove the "
                    "columns, or set `sync_ref_model=False`."
                )
        elif self.takes_images:
            not_storable = "the data hold images, by which the store cannot tell two sequences apart"
        name, varies = self._drifts, self._varies
        if self._kind != "model":
            weights = self._weights(None)
            copied = set() if own is None else own.copied()
            name, varies = weights.trained(but=copied), self._why_it_varies(weights)
        drifts = f"it changes in training, which moves `{name}`, a tensor that it reads" if name else None
        if args.precompute_ref_log_probs and not_storable:
            raise ValueError(
                f"The reference cannot be precomputed: {not_storable}. Set `precompute_ref_log_probs=False`, or keep "
                "the reference as it is."
            )
        return plan_dpo(
            DPOFacts(
                loss_types=tuple(args.loss_type),
                best_metric=args.metric_for_best_model,
                reference=self._kind,
                datasets=tuple(self._with_columns),
                with_columns=tuple(name for name, there in self._with_columns.items() if there),
                precompute=args.precompute_ref_log_probs,
                storage=arguments.reference_store,
                folder=str(arguments.folder),
                not_storable=not_storable,
                drifts=drifts,
                varies=varies,
                untold=self._untold,
                own_loss=self._own_loss() if self._bypasses_loss else None,
            )
        )

    def _why_it_varies(self, weights: ReferenceWeights) -> str | None:
        args, own = self.args, self._kind == "model"
        random = weights.dropout(in_training=not own)
        rope = weights.rope_of_batch()
        if random:
            return f"dropout is on in it (`{random}`): same distribution, other random draws"
        if args.neftune_noise_alpha is not None and self.own_reference is not None:
            return "its embeddings are the policy's, with the noise of `neftune_noise_alpha`: other random draws"
        if not own and (args.bf16_full_eval or args.fp16_full_eval):
            name = "bf16_full_eval" if args.bf16_full_eval else "fp16_full_eval"
            return f"`{name}` casts the policy when it is evaluated, and the reference with it"
        return f'its positions (`rope_type="{rope}"`) follow the longest sequence of each batch' if rope else None

    def _why_untold(self, ref_model: Any) -> str | None:
        # Under FSDP's loading that spares memory, the main process alone has weights
        reason = [self._weights(ref_model).untold() if self.accelerator.is_main_process else None]
        broadcast_object_list(reason, from_process=0)
        return reason[0]

    def train(self, *positional: Any, **keywords: Any) -> Any:
        """TRL's own. From here on the policy is no longer what it was."""
        self._meet_adapters_that_changed()
        self._training_began = True
        return super().train(*positional, **keywords)  # type: ignore[misc]

    def evaluation_loop(self, *positional: Any, **keywords: Any) -> Any:
        """TRL's own, with what is the reference by then."""
        self._meet_adapters_that_changed()
        return super().evaluation_loop(*positional, **keywords)  # type: ignore[misc]

    def _save_beside(self, folder: Any) -> None:
        """What was scored before a checkpoint is on disk with it: in another batch a last bit of it may differ."""
        super()._save_beside(folder)  # type: ignore[misc]
        if self._stored is not None:
            self._stored.store.flush()

    # For each batch

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        """TRL's own loss, on reference log-probs from where the plan says."""
        self._loss_is_ours()
        self._check_same_rows(inputs["input_ids"])
        from_columns = have_columns(inputs, "A batch")
        self._fed_is_counted = False
        with self._reference_for(inputs, from_columns), self._policy_scored_here():
            loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)  # type: ignore[misc]
        if not self._fed_is_counted:
            every = self._gather_counts(self._tokens_fed())
            self._count_tokens_fed([sum(count) for count in zip(*every, strict=True)])
        if self.plan.source == "nothing" and not from_columns:
            self.drop_metrics("rewards/")
        return loss

    def _count_tokens_fed(self, counts: list[int]) -> None:
        """Count what was fed of a batch and what was not, on all ranks."""
        mode = "train" if self.model.training else "eval"
        self.skipped.add(mode, tokens=counts[0])
        self.fed.add(mode, counts[1:])
        self._fed_is_counted = True

    def _reference_for(self, inputs: dict[str, Any], from_columns: bool) -> AbstractContextManager[None]:
        if from_columns:
            check_batch(inputs)
        if self.plan.source == "pass" and self._any_rank_runs(not from_columns):
            log_probs = self.score_as_reference(self._reference_model(), inputs)
            return self.reference_given(None if from_columns else log_probs)
        wanted = self.plan.source == "store" and not from_columns
        answer = self.stored(inputs, lambda batch: self.score_as_reference(self._reference_model(), batch), wanted)
        if not self.args.precompute_ref_log_probs:  # with it, TRL runs no reference pass here either
            mode = "train" if self.model.training else "eval"
            self.skipped.add(mode, passes=1 - answer.passes, tokens=answer.tokens_of_batch - answer.tokens)
        return self.reference_given(None if from_columns else answer.log_probs)

    @property
    def stored(self) -> StoredReference:
        """The store."""
        if self._stored is None:
            identity, variants = "", None
            if self.plan.durable and self._identity is not None:
                identity = self._identity
                variants = Variants(
                    StoreArguments.of(self.args).folder,
                    identity,
                    self._open_store,
                    self._tolerance(),
                    self._fed_padded,
                    self.accelerator.is_main_process,
                )
            exchanges = self._gather_counts, self._gather_objects, self._same_hits
            self._stored = StoredReference(MemoryStore(), identity, *exchanges, variants)
        return self._stored

    def _open_store(self, name: str, canary: Canary) -> DiskStore:
        folder = StoreArguments.of(self.args).folder / name
        store = DiskStore(folder, name, writes=self._writes_to(folder), canary=canary)
        if self.accelerator.is_local_main_process:
            write_about(folder, self._identity_facts)
        return store

    def _tolerance(self) -> Tolerance:
        """How far two passes of the reference over one sequence may be apart."""
        weights = self._weights(self.ref_model)
        if (
            self.accelerator.mixed_precision != "no"
            or not multiplies_fp32(self.accelerator.device)
            or getattr(weights.base, "is_quantized", False)
            or not weights.dtypes <= {torch.float32, torch.float64}
        ):
            return COARSE
        # A router of experts can flip on the last bit, which changes a few tokens by much
        return EXACT._replace(share=COARSE.share) if has_experts(weights.base) else EXACT

    def _writes_to(self, folder: Any) -> bool:
        """One process for each file system: the main one, and on each node that does not see its files another."""
        if self.accelerator.num_processes == 1:  # tensor parallelism may spread it over several ranks
            return bool(self.accelerator.is_main_process)
        name = [f"{uuid.uuid4().hex}.seen"]
        broadcast_object_list(name, from_process=0)
        sign = folder / name[0]
        if self.accelerator.is_main_process:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                sign.touch()
            except OSError:
                pass  # the store will meet it too, and say so
        self.accelerator.wait_for_everyone()
        seen = sign.exists()
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            sign.unlink(missing_ok=True)
            return True
        return bool(self.accelerator.is_local_main_process and not seen)

    def _gather_counts(self, counts: list[int]) -> list[list[int]]:
        if self.accelerator.num_processes == 1:
            return [counts]
        gathered: list[list[int]] = self.accelerator.gather(
            torch.tensor([counts], device=self.accelerator.device)
        ).tolist()
        return gathered

    def _any_rank_runs(self, here: bool) -> bool:
        """Whether a pass runs: a sharded model needs every rank in it, also those whose rows bring their values."""
        return any(count[0] for count in self._gather_counts([int(here)]))

    def _gather_objects(self, value: Any) -> list[Any]:
        return [value] if self.accelerator.num_processes == 1 else gather_object([value])

    def fill_reference(self, dataset: Any, name: str, batch_size: int) -> None:
        """Score all of a map-style data set, for `precompute_ref_log_probs`."""
        if self.plan.source != "store" or have_columns(dataset.column_names, f"The {name} data set"):
            return
        loader = DataLoader(
            dataset,
            batch_size=batch_size,
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
        )
        for batch in tqdm(
            iterable=self.accelerator.prepare(loader),
            desc=f"Scoring the {name} dataset with the reference",
            disable=bool(os.environ.get("TQDM_DISABLE", "")),
        ):
            self.stored(batch, lambda fed: self.score_as_reference(self._reference_model(prepared=False), fed))
        self.stored.store.flush()
        self._tokens_fed()  # the logs speak of training and evaluation

    # The model

    def _reference_model(self, prepared: bool = True) -> Any:
        """The model of a reference pass.

        Args:
            prepared (`bool`): whether the policy is ready to be called, as it is in `compute_loss`.

        Raises:
            `ValueError`: the reference is no longer there.
        """
        if self.ref_model is None and self._kind == "model" and self._load_reference is not None:
            self._load_reference_again(self._load_reference)
        if self.ref_model is not None:
            return self.ref_model
        if self._kind == "model" or (self.plan.gone_in_training and self._training_began):
            raise ValueError(
                "Some sequences have no reference log-probs, and the reference is gone: with "
                "`precompute_ref_log_probs=True` and no `ref_model` it is the model before training, which scored the "
                "trainer's own data sets. Give these data as `eval_dataset` when the trainer is built, pass a "
                "`ref_model`, or set `precompute_ref_log_probs=False`."
            )
        return self.model if prepared else self.policy_before_training()


class _StoreCallback(TrainerCallback):
    """Puts what was scored on disk, and lets go of a reference model that has scored everything."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step > 0:
            self.trainer.meet_reference_again()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._flush()
        if state.global_step < state.max_steps and not control.should_training_stop:
            self.trainer.release_reference()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._flush()

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
        self._flush()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._flush()

    def _flush(self) -> None:
        if self.trainer._stored is not None:
            self.trainer._stored.store.flush()
