"""Where a trainer's reference log-probs come from: the store or a forward pass, of an adapter, a model or a copy."""

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from accelerate.utils import is_peft_model, tqdm
from accelerate.utils.memory import clear_device_cache
from datasets import Dataset
from torch.utils.data import DataLoader

from ..compat import reference as internals
from ..compat.features import Features
from ..compat.overrides import STEP, overrides
from ..compat.replaced import unrecorded_pass
from ..config import AddedStoreFields
from ..distributed.ranks import Ranks
from ..distributed.shards import gathered_by_zero3
from ..packing.randomness import NEFTUNE, Randomness
from ..planning.reference import REFERENCES, ReferencePlan
from ..reference.canary import Canary, tolerance_of
from ..reference.store import DiskStore, MemoryStore
from ..reference.stored import ReferencePass, StoredReference, Variants, preserve_random_state
from ..reference.weights import ReferenceWeights, identity_facts, identity_of, write_about
from ..scoring.scorer import Scorer
from .counts import SkipCounts
from .reference_weights import ReferenceOfPolicy

_ROWS_CHECKED_TOGETHER = 64
# Methods of which a subclass's version may run the reference model
_MAY_RUN_IT = ("_compute_loss", "_compute_kl_logps", "compute_ref_log_probs")


class Host(internals.ReferenceInternals, Protocol):
    """The trainer members that the reference reads. It sets only `ref_model`, when it frees or loads the model."""

    train_dataset: Any
    eval_dataset: Any
    data_collator: Any
    _in_steps: bool
    _overridden_below: list[str]
    skip_counts: SkipCounts
    _features: Features

    @property
    def plan(self) -> ReferencePlan: ...

    def _plan_again(self) -> None: ...

    def _for_all_ranks(self, facts: Any) -> Any: ...

    def _randomness(self) -> Randomness | None: ...

    def _bypassed_by(self) -> str | None: ...

    def _attach_model(self, model: Any) -> None: ...


class ReferenceSource:
    """The reference of one trainer, its `host`. A subclass makes the plan, and gives the log-probs to TRL's loss.

    The trainer creates it before TRL's `__init__`, and calls `register` when both models exist and none is sharded yet.
    """

    host: Host

    def __init__(self, host: Any, ranks: Ranks, scorer: Scorer, weights: ReferenceOfPolicy) -> None:
        self.host = host
        self.ranks = ranks
        self.scorer = scorer
        self.weights = weights
        self.loaded: list[tuple[Any, Callable[[], Any]]] = []  # models that TRL loaded, with their loaders
        self.registered = False
        self.training_began = False
        self._shared: str | None = None  # name of a tensor of the reference model that training changes
        self._origin = "model"  # of a reference model: a key of `REFERENCES` in planning/reference.py
        self._varies: str | None = None
        self._uncacheable: str | None = None
        self._facts: dict[str, Any] = {}
        self._identity: str | None = None
        self._stored: StoredReference | None = None
        self._writes_before: int | None = None
        self._load: Callable[[], Any] | None = None
        self._adapters: dict[str, Any] = {}

    @property
    def options(self) -> AddedStoreFields:
        """The added fields, read at each use because a user may change `trainer.args`."""
        return AddedStoreFields.of(self.host.args)

    # Construction

    def recorded_loads(self, trainer_class: type) -> dict[str, Any]:
        """Return replacements for names in TRL's module, which record each model that TRL loads, with its loader."""
        if self.host._features.why_off("freeing the reference") is not None:
            return {}
        return internals.recorded_loads(trainer_class, self.loaded)

    def register(self) -> None:
        """Find out what the reference is, and check what the user gives in its place."""
        host = self.host
        self.registered = True
        self._describe()
        if self.kind == "model":
            if not self.ranks.is_sharded:
                self._load = next((load for model, load in self.loaded if model is host.ref_model), None)
            loaded = [model for model, _ in self.loaded]
            if any(model is host.ref_model for model in loaded):
                self._origin = "copy" if any(model is host.model for model in loaded) else "loaded"
            reference = ReferenceWeights.of_model(host.ref_model)
            if adapters := reference.describe():
                self._origin = REFERENCES[self._origin] + adapters
            self._shared = reference.shares_with(host.model)
            self._varies = self._varies_reason(reference)
        self._uncacheable = self._find_uncacheable()
        self._check_own_values()
        if self.plan().durable:
            self._identity = self._identify()

    def _check_own_values(self, instead: str = "Remove the override.") -> None:
        """Raise `ValueError` if `precompute_ref_log_probs` would ignore an override of `compute_ref_log_probs`."""
        if self.host.args.precompute_ref_log_probs and overrides(self.host, "compute_ref_log_probs") is not None:
            raise ValueError(
                f"`precompute_ref_log_probs=True` does not call `{type(self.host).__name__}.compute_ref_log_probs`, "
                f"because trl_ext stores a log-prob per token. {instead}"
            )

    def _describe(self) -> None:
        policy_reference = self.weights.policy_reference
        if self.host.ref_model is not None:
            self.kind = "model"
        else:
            self.kind = "initial" if policy_reference is None else policy_reference.describe()
        self._on = self.weights.adapters_on
        self._adapters = self._policy_adapters()

    def refresh(self) -> None:
        """Find out what the reference is now: a user may have loaded or deleted an adapter "ref"."""
        if self.weights.policy_reference is None:
            return
        before = self._on
        self._describe()
        if not before and not self._on and not self.weights.policy_reference.copies:
            return
        if before != self._on and self.host.args.precompute_ref_log_probs:
            raise ValueError(
                "`precompute_ref_log_probs=True` scored the data when the trainer was built, and the reference has "
                'changed since then: an adapter named "ref" was loaded or deleted. Load or delete it before you build '
                "the trainer, or set `precompute_ref_log_probs=False`."
            )
        self._uncacheable = None if self.ranks.is_sharded else self._find_uncacheable()
        self.host._plan_again()
        known_identity = self._identity
        self._identity = None
        if self.host.plan.durable and not self.ranks.is_sharded:
            self._identity = self._identify()
            if before == self._on and known_identity == self._identity:
                return
        self._stored = None

    def _find_uncacheable(self) -> str | None:
        """Return why a later run cannot tell the reference from another one, as the main process finds it."""
        moved: str | None = self.host._features.why_off("store")
        return moved or self.ranks.of_main(lambda: self._weights().uncacheable_reason())  # type: ignore[no-any-return]

    def refresh_if_adapters_changed(self) -> None:
        adapters = self._policy_adapters()
        if adapters.keys() != self._adapters.keys() or any(
            x is not self._adapters[name] for name, x in adapters.items()
        ):
            self.refresh()

    # Facts

    @property
    def with_columns(self) -> dict[str, bool]:
        """Whether each data set has the user's own reference log-probs."""
        return {name: False for name, _ in self.datasets()}

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
        host, unwrap = self.host, self.ranks.accelerator.unwrap_model
        if host.ref_model is not None:
            return ReferenceWeights.of_model(unwrap(host.ref_model))
        return ReferenceWeights(unwrap(host.model), self._on)

    def _identify(self) -> str:
        """Return the identity of the reference, and keep the facts behind it in `self._facts`."""
        weights = self._weights()
        accelerator = self.ranks.accelerator
        args = self.host.args
        gathering = gathered_by_zero3, accelerator.is_main_process
        with (
            nullcontext() if self.weights.policy_reference is None else self.weights.policy_reference.copies_in_place()
        ):
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
        args = self.host.args
        is_policy = self.kind != "model"  # perhaps with other adapters
        rope = weights.rope_of_batch()
        policy_randomness = self.host._randomness()
        randomness = None
        if not is_policy or policy_randomness is not None:
            randomness = weights.randomness(in_training=is_policy)
        if randomness is None and is_policy and policy_randomness == NEFTUNE:
            randomness = NEFTUNE.reason
        late_randomness = self.scorer.forwards[0 if is_policy else -1].late_randomness
        if randomness is None and late_randomness is not None:
            randomness = late_randomness.reason
        if randomness is not None:
            return f"{randomness}, so two passes can differ"
        if is_policy and (args.bf16_full_eval or args.fp16_full_eval):
            name = "bf16_full_eval" if args.bf16_full_eval else "fp16_full_eval"
            return f"`{name}` casts the policy in evaluations, and the reference with it"
        return f'positions (`rope_type="{rope}"`) depend on the longest sequence of each batch' if rope else None

    def _is_rewritten(self) -> bool:
        """Whether torch has counted writes to the weights of a reference model since the first step."""
        host = self.host
        if host.ref_model is None or not host._in_steps or self.ranks.is_sharded or self.options.reference_device:
            return False
        writes = sum(weight._version for weight in host.ref_model.parameters())
        if self._writes_before is None:
            self._writes_before = writes
        return writes != self._writes_before

    def plan(self) -> ReferencePlan:
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        """Return the fields of [`ReferenceFacts`] that are no arguments."""
        args = self.host.args
        not_storable: str | None = self.host._features.why_off("store")
        remedy = "Set it to False."
        if not_storable is not None:
            pass
        elif self.weights.moves:
            not_storable = "`sync_ref_model` updates it during training"
            remedy = "Set one of the two to False."
        elif internals.holds_images(self.host):
            not_storable = "the data contains images, and the store identifies sequences by their tokens only"
        if args.precompute_ref_log_probs and not_storable:
            raise ValueError(
                f"`precompute_ref_log_probs=True`, but the reference cannot be precomputed: {not_storable}. {remedy}"
            )
        if not args.precompute_ref_log_probs and self._is_rewritten():
            not_storable = "weights of the reference have changed during training"
        trained = self._shared
        varies = self._varies
        if self.kind == "model" and self.host.ref_model is not None:
            varies = self._varies_reason(self._weights())
            self._varies = varies
        if self.kind != "model":
            weights = self._weights()
            policy_reference = self.weights.policy_reference
            copied = set() if policy_reference is None else policy_reference.copied()
            trained = next((name for name, x in weights.trained_parameters() if id(x) not in copied), None)
            varies = self._varies_reason(weights)
        return {
            "reference": self._origin if self.kind == "model" else self.kind,
            "folder": str(self.options.folder),
            "not_storable": not_storable,
            "drifts": f"training changes the weight `{trained}`, which the reference reads" if trained else None,
            "varies": varies,
            "uncacheable": self._uncacheable,
            "own_loss": self.host._bypassed_by(),
        }

    # For each batch

    def sequences_of(self, batch: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the inputs of the reference's passes over a batch."""
        return [batch]

    def _from_store(
        self, batch: dict[str, Any], run_pass: ReferencePass, *, is_needed: bool = True, passes: int = 1
    ) -> torch.Tensor:
        """Return the reference's log-probs of `batch`, and count what was skipped of TRL's `passes`."""
        batch_log_probs = self.stored(batch, run_pass, is_needed=is_needed)
        if not self.host.args.precompute_ref_log_probs:
            mode = "train" if self.host.model.training else "eval"
            skipped_tokens = batch_log_probs.tokens_of_batch - batch_log_probs.tokens
            self.host.skip_counts.add(mode, passes=passes - batch_log_probs.passes, tokens=skipped_tokens)
        return batch_log_probs.log_probs

    def run_pass(self, batch: dict[str, Any], prepared: bool = True) -> torch.Tensor:
        """Return the reference's log-probs of `batch`. `prepared`: whether Accelerate has prepared the policy."""
        with unrecorded_pass(self.host), self.weights.entered():
            return internals.score_as_reference(self.host, self._model(prepared), batch, internals.labels_of(batch))

    @property
    def stored(self) -> StoredReference:
        if self._stored is None:
            ranks = self.ranks
            identity = ""
            variants = None
            if self.host.plan.durable and self._identity is not None:
                identity = self._identity
                variants = Variants(
                    root=self.options.folder,
                    identity=identity,
                    open=self._open_store,
                    tolerance=tolerance_of(self._weights(), ranks.accelerator),
                    padded=self.scorer.padded,
                    is_main=ranks.accelerator.is_main_process,
                    tokens=getattr(self._weights().base.get_input_embeddings(), "num_embeddings", None),
                )
            self._stored = StoredReference(
                MemoryStore(), identity, ranks.gather_counts, ranks.gather_objects, ranks.shared, variants
            )
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
        if host.plan.source != "store":
            # TRL's data loader draws its seed; later draws must not differ
            torch.empty((), dtype=torch.int64).random_()
            return
        self._check_own_values()  # also of a data set that `evaluate` gets later
        workers = {"num_workers": args.dataloader_num_workers, "pin_memory": args.dataloader_pin_memory}
        loader = DataLoader(dataset, batch_size=batch_size, collate_fn=host.data_collator, **workers)
        batches = self.ranks.accelerator.prepare(loader)
        hidden = bool(os.environ.get("TQDM_DISABLE"))
        for batch in tqdm(iterable=batches, desc=f"Scoring the {name} dataset with the reference", disable=hidden):
            for part in self.sequences_of(batch):
                self.stored(part, partial(self.run_pass, prepared=False))
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
                "`precompute_ref_log_probs=True` and no `ref_model`, only the trainer's datasets are scored, before "
                "training. Pass this data as `eval_dataset` when you build the trainer, pass a `ref_model`, "
                "or set `precompute_ref_log_probs=False`."
            )
        return host.model if prepared else internals.policy_before_training(self.host)

    @property
    def is_read(self) -> bool:
        """Whether code of the user may read log-probs that TRL would have precomputed into each batch."""
        return (
            bool(self.host.args.precompute_ref_log_probs) and overrides(self.host, *STEP, "_compute_loss") is not None
        )

    # Memory

    def release(self) -> None:
        """Free a reference model that TRL loaded, once no dataset of the run needs it."""
        host, accelerator = self.host, self.ranks.accelerator
        if host.ref_model is None or self._load is None or self._uncacheable or overrides(host, *_MAY_RUN_IT):
            return
        if not self._holds_all_data():
            return
        # A callback may have added a hook since: the model could not be compared when it is loaded again
        if self.ranks.of_main(lambda: self._weights().uncacheable_reason()) is not None:
            return
        if self._identity is None:
            self._identity = self._identify()
        model = accelerator.unwrap_model(host.ref_model)
        accelerator._models[:] = [x for x in accelerator._models if accelerator.unwrap_model(x) is not model]
        # The last references to the model, whose memory is freed below
        del self.scorer.forwards[1:]
        del model
        host.ref_model = None
        clear_device_cache(garbage_collection=True)

    def _load_again(self, load: Callable[[], Any]) -> None:
        host = self.host
        model = internals.made_as_reference(self.host, load)
        host.ref_model = model
        host._attach_model(model)
        is_same_model = self._identify() == self._identity
        if is_same_model:
            host.ref_model = self.ranks.accelerator.prepare_model(model, evaluation_mode=True)
        if not is_same_model or self.stored.difference(self.run_pass, self.ranks.device) is not None:
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
        datasets = [x for name, x in self.datasets() if not columns[name] and (evaluates or name == "train_dataset")]
        with preserve_random_state():
            has_all = all(isinstance(dataset, Dataset) and self._holds(dataset) for dataset in datasets)
        return all(count[0] for count in self.ranks.gather_counts([int(has_all)]))

    def _holds(self, dataset: Dataset) -> bool:
        """Return whether the store has this rank's part of `dataset`."""
        dataset = internals.training_columns(self.host, dataset)
        accelerator, step = self.ranks.accelerator, _ROWS_CHECKED_TOGETHER
        starts = range(accelerator.process_index * step, len(dataset), accelerator.num_processes * step)
        parts = ([dataset[i] for i in range(start, min(start + step, len(dataset)))] for start in starts)
        batches = (self.host.data_collator(rows) for rows in parts)
        return all(self.stored.holds(x) for batch in batches for x in self.sequences_of(batch))
