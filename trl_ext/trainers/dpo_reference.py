"""DPO's reference log-probs: each batch gets them from the store, the user's columns or a forward pass."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
import trl
from accelerate.utils import is_peft_model, tqdm
from accelerate.utils.memory import clear_device_cache
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers.training_args import OptimizerNames

from ..compat import dpo as internals
from ..compat.choices import STEP, maybe_gather_lm_head_ctx, overrides
from ..compat.replaced import unrecorded_pass
from ..config import AddedDPOFields
from ..distributed.ranks import Ranks
from ..packing.packing import LastResult
from ..packing.support import positions_by_length
from ..planning.dpo import DPOFacts, DPOPlan, plan_dpo
from ..planning.parts import few_parts
from ..planning.plan import PackingPlan, SkipCounts
from ..reference.canary import Canary, tolerance_of
from ..reference.sequences import check_batch, check_column_values, have_columns
from ..reference.store import DiskStore, MemoryStore
from ..reference.stored import StoredReference, Variants, random_state_kept
from ..reference.weights import ReferenceWeights, identity_facts, identity_of, write_about
from ..scoring.scorer import Scorer
from .dpo_batches import sequence_tokens
from .reference_weights import ReferenceOfPolicy

_ROWS_CHECKED_TOGETHER = 64


class Host(internals.DPOInternals, Protocol):
    """The trainer members that the reference reads. It sets only `ref_model`, when it frees or loads the model."""

    eval_dataset: Any
    data_collator: Any
    skipped: SkipCounts

    @property
    def plan(self) -> DPOPlan: ...

    def _packing_plan(self) -> PackingPlan: ...

    def _plan_again(self) -> None: ...

    def _bypassed_by(self) -> str | None: ...

    def _attach_model(self, model: Any) -> None: ...


class DPOReference:
    """The reference of one trainer, its `host`.

    The trainer creates it before TRL's `__init__`, and calls `register` when both models exist and none is sharded yet.
    """

    def __init__(self, host: Host, ranks: Ranks, scorer: Scorer, weights: ReferenceOfPolicy) -> None:
        self.host, self.ranks, self.scorer, self.weights = host, ranks, scorer, weights
        self.loaded: list[tuple[Any, Callable[[], Any]]] = []  # models that TRL loaded, with their loaders
        self.registered = self.training_began = False
        self._labels = LastResult()
        self._columns_seen: dict[str, tuple[Any, bool]] = {}
        self._shared: str | None = None  # name of a tensor of the reference model that training changes
        self._origin = "model"  # of a reference model: a key of `REFERENCES` in planning/dpo.py
        self._varies: str | None = None
        self._uncacheable: str | None = None
        self._facts: dict[str, Any] = {}
        self._identity: str | None = None
        self._stored: StoredReference | None = None
        self._load: Callable[[], Any] | None = None
        self._adapters: dict[str, Any] = {}

    @property
    def options(self) -> AddedDPOFields:
        """The added fields, read at each use because a user may change `trainer.args`."""
        return AddedDPOFields.of(self.host.args)

    # Construction

    def register(self) -> None:
        """Find out what the reference is, and check the columns of the datasets."""
        host, self.registered = self.host, True
        self._describe()
        if self.kind == "model":
            if not self.ranks.is_sharded:
                self._load = next((load for model, load in self.loaded if model is host.ref_model), None)
            loaded = [model for model, _ in self.loaded]
            if any(model is host.ref_model for model in loaded):
                self._origin = "copy" if any(model is host.model for model in loaded) else "loaded"
            reference = ReferenceWeights(host.ref_model)
            self._shared = reference.shares_with(host.model)
            self._varies = self._varies_reason(reference)
        self._uncacheable = self.ranks.of_main(lambda: self._weights().uncacheable_reason())
        overrides = type(host).compute_ref_log_probs is not trl.DPOTrainer.compute_ref_log_probs
        if host.args.precompute_ref_log_probs and overrides and not all(self.with_columns.values()):
            raise ValueError(
                f"`precompute_ref_log_probs=True` does not call `{type(host).__name__}.compute_ref_log_probs`, because "
                "trl_ext stores a log-prob per token. Put your values into the dataset columns `ref_chosen_logps` and "
                "`ref_rejected_logps`, or remove the override."
            )
        for name, dataset in self.datasets():
            if self.with_columns[name] and isinstance(dataset, Dataset):
                check_column_values(dataset, f"`{name}`")
        if self.plan().durable:
            self._identity = self._identify()

    def _describe(self) -> None:
        own = self.weights.own
        self.kind = "model" if self.host.ref_model is not None else "initial" if own is None else own.describe()
        self._on, self._adapters = self.weights.adapters_on, self._policy_adapters()

    def refresh(self) -> None:
        """Find out what the reference is now: a user may have loaded or deleted an adapter "ref"."""
        if self.weights.own is None:
            return
        before = self._on
        self._describe()
        if not before and not self._on and not self.weights.own.copies:
            return
        if before != self._on and self.host.args.precompute_ref_log_probs:
            raise ValueError(
                "`precompute_ref_log_probs=True` scored the data when the trainer was built, and the reference has "
                'changed since then: an adapter named "ref" was loaded or deleted. Load or delete it before you build '
                "the trainer, or set `precompute_ref_log_probs=False`."
            )
        self._uncacheable = None
        if not self.ranks.is_sharded:
            self._uncacheable = self.ranks.of_main(lambda: self._weights().uncacheable_reason())
        self.host._plan_again()
        known, self._identity = self._identity, None
        if self.host.plan.durable and not self.ranks.is_sharded:
            self._identity = self._identify()
            if before == self._on and known == self._identity:
                return
        self._stored = None

    def refresh_if_adapters_changed(self) -> None:
        found = self._policy_adapters()
        if found.keys() != self._adapters.keys() or any(found[name] is not self._adapters[name] for name in found):
            self.refresh()

    # Facts

    @property
    def with_columns(self) -> dict[str, bool]:
        for name, dataset in self.datasets():
            if self._columns_seen.get(name, (None,))[0] is not dataset:
                names = dataset.column_names or next(iter(dataset)).keys()
                self._columns_seen[name] = dataset, have_columns(names, f"`{name}`")
        return {name: self._columns_seen[name][1] for name, _ in self.datasets()}

    def datasets(self) -> Iterator[tuple[str, Any]]:
        evaluated = self.host.eval_dataset
        yield "train_dataset", self.host.train_dataset
        if isinstance(evaluated, dict):
            yield from ((f"eval_dataset[{name!r}]", dataset) for name, dataset in evaluated.items())
        elif evaluated is not None:
            yield "eval_dataset", evaluated

    def _policy_adapters(self) -> dict[str, Any]:
        policy = self.ranks.accelerator.unwrap_model(self.host.model)
        return dict(policy.peft_config) if is_peft_model(self.host.model) else {}

    def _weights(self) -> ReferenceWeights:
        host = self.host
        model = self.ranks.accelerator.unwrap_model(host.model if host.ref_model is None else host.ref_model)
        return ReferenceWeights(model, self._on)

    def _identify(self) -> str:
        """Return the identity of the reference, and keep the facts behind it in `self._facts`."""
        weights, accelerator, args = self._weights(), self.ranks.accelerator, self.host.args
        gathering = maybe_gather_lm_head_ctx, accelerator.is_main_process
        with nullcontext() if self.weights.own is None else self.weights.own.copies_in_place():
            digest = weights.hash(*gathering)
        facts = identity_facts(
            digest,
            weights.config,
            weights.in_memory(*gathering),
            head=self.scorer.options.head,
            mixed_precision=accelerator.mixed_precision,
            device=accelerator.device.type,
            tf32=args.tf32,
            use_liger_kernel=args.use_liger_kernel,
        )
        self._facts = self.ranks.of_main(lambda: facts)
        return identity_of(self._facts)

    def _varies_reason(self, weights: ReferenceWeights) -> str | None:
        args, own = self.host.args, self.kind != "model"
        random_in, rope = weights.dropout(in_training=own), weights.rope_of_batch()
        if random_in:
            return f"it has dropout (`{random_in}`), so each pass makes other random draws"
        if args.neftune_noise_alpha is not None and self.weights.own is not None:
            return "`neftune_noise_alpha` adds noise to its embeddings, so each pass makes other random draws"
        if own and (args.bf16_full_eval or args.fp16_full_eval):
            name = "bf16_full_eval" if args.bf16_full_eval else "fp16_full_eval"
            return f"`{name}` casts the policy in evaluations, and the reference with it"
        return f'its positions (`rope_type="{rope}"`) depend on the longest sequence of each batch' if rope else None

    def plan(self) -> DPOPlan:
        args = self.host.args
        columns = self.with_columns
        with_columns = tuple(name for name, there in columns.items() if there)
        not_storable = None
        if self.weights.moves:
            not_storable = "`sync_ref_model` updates it during training"
            if with_columns:
                raise ValueError(
                    "`sync_ref_model=True` changes the reference, but the columns `ref_chosen_logps` and "
                    f"`ref_rejected_logps` of {' and '.join(f'`{name}`' for name in with_columns)} fix its log-probs. "
                    "Remove the columns, or set `sync_ref_model=False`."
                )
        elif internals.holds_images(self.host):
            not_storable = "the data contains images, and the store identifies sequences by their tokens only"
        if args.precompute_ref_log_probs and not_storable:
            raise ValueError(
                f"`precompute_ref_log_probs=True`, but the reference cannot be precomputed: {not_storable}. Set it to "
                "False, or keep the reference fixed."
            )
        trained, varies = self._shared, self._varies
        if self.kind != "model":
            weights, copied = self._weights(), set() if self.weights.own is None else self.weights.own.copied()
            trained = next((name for name, x in weights.trained_parameters() if id(x) not in copied), None)
            varies = self._varies_reason(weights)
        facts = DPOFacts(
            loss_types=tuple(args.loss_type),
            best_metric=args.metric_for_best_model,
            reference=self._origin if self.kind == "model" else self.kind,
            datasets=tuple(columns),
            with_columns=with_columns,
            precompute=args.precompute_ref_log_probs,
            storage=self.options.reference_store,
            folder=str(self.options.folder),
            not_storable=not_storable,
            drifts=f"it changes in training, because it uses the trained weight `{trained}`" if trained else None,
            varies=varies,
            uncacheable=self._uncacheable,
            own_loss=self.host._bypassed_by(),
            is_packed=self.scorer.policy.packing.padded_reason is None,
            processes=self.ranks.accelerator.num_processes,
            balance=self.options.balance,
            max_tokens_per_micro_batch=self.options.max_tokens_per_micro_batch,
            optimizer=OptimizerNames(args.optim).value,
            has_images=internals.holds_images(self.host),
            has_router_loss=self.host.aux_loss_enabled,
            overrides_loss=overrides(self.host, "_compute_loss") is not None,
            own_step=overrides(self.host, *STEP, "get_batch_samples"),
            positions_by_length=positions_by_length(self.host.model, args.max_length, args.pad_to_multiple_of),
        )
        return plan_dpo(facts)

    # For each batch

    def supplied(self, inputs: dict[str, Any], from_columns: bool) -> AbstractContextManager[None]:
        """Give TRL's loss the batch's reference log-probs from the planned source, in the `with` block."""
        plan = self.host.plan
        self._labels = LastResult()  # new for each batch, because a collator may reuse the same tensors
        if from_columns:
            check_batch(inputs)
        if plan.source == "pass" and self.ranks.any(not from_columns):
            log_probs = self._pass(inputs)
        else:
            found = self.stored(inputs, self._pass, wanted=plan.source == "store" and not from_columns)
            log_probs = found.log_probs
            if not self.host.args.precompute_ref_log_probs:
                mode = "train" if self.host.model.training else "eval"
                self.host.skipped.add(mode, passes=1 - found.passes, tokens=found.tokens_of_batch - found.tokens)
        return internals.reference_given(self.host, None if from_columns else log_probs)

    def _pass(self, batch: dict[str, Any], prepared: bool = True) -> torch.Tensor:
        """Return the reference's log-probs of `batch`. `prepared`: whether Accelerate has prepared the policy."""
        if not prepared:
            self._labels = LastResult()
        model, labels, budget = self._model(prepared), self.labels_of(batch), self.options.max_tokens_per_micro_batch
        with unrecorded_pass(self.host), self.weights.entered():
            if budget is None or not self.host.model.training or not prepared:
                return internals.score_as_reference(self.host, model, batch, labels)
            parts = few_parts(sequence_tokens(batch, self.host._packing_plan()), list(range(len(labels))), budget)
            most = max(count[0] for count in self.ranks.gather_counts([len(parts)]))
            log_probs = labels.new_zeros(len(labels), labels.shape[1] - 1, dtype=torch.float32)
            for rows in parts + [[0]] * (most - len(parts)):  # every rank runs the same number of passes
                part = internals.rows_of(batch, torch.tensor(rows))
                log_probs[rows] = internals.score_as_reference(self.host, model, part, labels[rows]).float()
            return log_probs

    def labels_of(self, batch: dict[str, Any]) -> torch.Tensor:
        """Return the labels of a batch: the same tensor for the reference's and the policy's pass."""
        found: torch.Tensor = self._labels.of(
            batch["input_ids"], batch["completion_mask"], make=lambda: internals.labels_of(batch)
        )
        return found

    @property
    def stored(self) -> StoredReference:
        if self._stored is None:
            ranks, identity, variants = self.ranks, "", None
            if self.host.plan.durable and self._identity is not None:
                identity, is_main = self._identity, ranks.accelerator.is_main_process
                tolerance = tolerance_of(self._weights(), ranks.accelerator)
                folder, padded = self.options.folder, self.scorer.padded
                variants = Variants(folder, identity, self._open_store, tolerance, padded, is_main)
            exchanges = ranks.gather_counts, ranks.gather_objects, ranks.shared
            self._stored = StoredReference(MemoryStore(), identity, *exchanges, variants)
        return self._stored

    def _open_store(self, name: str, canary: Canary) -> DiskStore:
        folder = self.options.folder / name
        store = DiskStore(folder, name, writes=self.ranks.writes_to(folder), canary=canary)
        if self.ranks.accelerator.is_local_main_process:
            write_about(folder, self._facts)
        return store

    def flush(self) -> None:
        if self._stored is not None:
            self._stored.store.flush()

    def precompute(self, dataset: Any, name: str, batch_size: int) -> None:
        host, args = self.host, self.host.args
        if host.plan.source != "store" or have_columns(dataset.column_names, f"The {name} data set"):
            return
        workers = {"num_workers": args.dataloader_num_workers, "pin_memory": args.dataloader_pin_memory}
        loader = DataLoader(dataset, batch_size=batch_size, collate_fn=host.data_collator, **workers)
        batches = self.ranks.accelerator.prepare(loader)
        hidden = bool(os.environ.get("TQDM_DISABLE"))
        for batch in tqdm(iterable=batches, desc=f"Scoring the {name} dataset with the reference", disable=hidden):
            self.stored(batch, partial(self._pass, prepared=False))
        self.flush()
        self.scorer.take_counts()

    def _model(self, prepared: bool) -> Any:
        host = self.host
        if host.ref_model is None and self.kind == "model" and self._load is not None:
            self._load_again(self._load)
        if host.ref_model is not None:
            return host.ref_model
        if self.kind == "model" or (host.plan.gone_in_training and self.training_began):
            raise ValueError(
                "Some sequences have no reference log-probs, and the reference is gone: with "
                "`precompute_ref_log_probs=True` and no `ref_model`, the model before training scored only the "
                "trainer's datasets. Pass this data as `eval_dataset` when you build the trainer, pass a `ref_model`, "
                "or set `precompute_ref_log_probs=False`."
            )
        return host.model if prepared else internals.policy_before_training(self.host)

    # Memory

    def release(self) -> None:
        """Free a reference model that TRL loaded, once no dataset of the run needs it."""
        host, accelerator = self.host, self.ranks.accelerator
        if host.ref_model is None or self._load is None or self._uncacheable or not self._holds_all_data():
            return
        if self._identity is None:
            self._identity = self._identify()
        held = accelerator.unwrap_model(host.ref_model)
        accelerator._models[:] = [x for x in accelerator._models if accelerator.unwrap_model(x) is not held]
        del self.scorer.forwards[1:], held
        host.ref_model = None
        clear_device_cache(garbage_collection=True)

    def _load_again(self, load: Callable[[], Any]) -> None:
        host = self.host
        host.ref_model = model = internals.made_as_reference(self.host, load)
        host._attach_model(model)
        same = self._identify() == self._identity
        if same:
            host.ref_model = self.ranks.accelerator.prepare_model(model, evaluation_mode=True)
        if not same or self.stored.difference(self._pass, self.ranks.device) is not None:
            host.ref_model = None
            raise ValueError(
                "The reference model was freed after it had scored every sequence. New sequences need it, but "
                f"{model.config._name_or_path!r} is no longer the same model. Restore it, or pass a `ref_model`, which "
                "stays in memory."
            )

    def _holds_all_data(self) -> bool:
        """Return whether the store has every sequence of the run's datasets."""
        if self.host.plan.source != "store":
            return False
        evaluates, columns = self.host.args.eval_strategy != "no", self.with_columns
        needed = [x for name, x in self.datasets() if not columns[name] and (evaluates or name == "train_dataset")]
        with random_state_kept():
            held = all(isinstance(dataset, Dataset) and self._holds(dataset) for dataset in needed)
        return all(count[0] for count in self.ranks.gather_counts([int(held)]))

    def _holds(self, dataset: Dataset) -> bool:
        """Return whether the store has this rank's part of `dataset`."""
        dataset = internals.training_columns(self.host, dataset)
        accelerator, step = self.ranks.accelerator, _ROWS_CHECKED_TOGETHER
        starts = range(accelerator.process_index * step, len(dataset), accelerator.num_processes * step)
        parts = ([dataset[i] for i in range(start, min(start + step, len(dataset)))] for start in starts)
        return all(self.stored.holds(self.host.data_collator(rows)) for rows in parts)
