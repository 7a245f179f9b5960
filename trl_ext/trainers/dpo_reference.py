"""DPO's reference log-probs: from the store, the user's columns or a pass, as the plan says for each batch."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from accelerate.utils import is_peft_model, tqdm
from accelerate.utils.memory import clear_device_cache
from datasets import Dataset
from torch.utils.data import DataLoader

from ..compat import dpo as internals
from ..compat.choices import maybe_gather_lm_head_ctx
from ..compat.dpo import Loaded
from ..compat.replaced import unrecorded_pass
from ..config import AddedDPOFields
from ..distributed.ranks import Ranks
from ..planning.dpo import DPOFacts, DPOPlan, plan_dpo
from ..reference.canary import Canary, tolerance_of
from ..reference.sequences import check_batch, check_column_values, have_columns
from ..reference.store import DiskStore, MemoryStore
from ..reference.stored import StoredReference, Variants, random_state_kept
from ..reference.weights import ReferenceWeights, identity_facts, identity_of, write_about
from ..scoring.scorer import Scorer
from .reference_weights import ReferenceOfPolicy

_ROWS_CHECKED_TOGETHER = 64


class Host(Protocol):
    """What of a trainer the reference reads. It sets `ref_model` alone, where it releases or loads one."""

    args: Any
    model: Any
    ref_model: Any
    train_dataset: Any
    eval_dataset: Any
    data_collator: Any

    @property
    def plan(self) -> DPOPlan: ...

    def plan_again(self) -> None: ...

    def bypassed_by(self) -> str | None: ...

    def attach_model(self, model: Any) -> None: ...


class DPOReference:
    """Made before TRL's `__init__`; `meet` is called when policy and reference model are there and whole.

    Args:
        host (`Host`): the trainer.
        trl (`DPOInternals`): the trainer, for what of it is TRL's.
        weights (`ReferenceOfPolicy`): what is the reference.
        options (`AddedDPOFields`): where log-probs are kept.
        count (`Callable`): called with the passes and tokens that were skipped.
    """

    def __init__(
        self,
        host: Host,
        trl: internals.DPOInternals,
        weights: ReferenceOfPolicy,
        ranks: Ranks,
        scorer: Scorer,
        options: AddedDPOFields,
        count: Callable[..., None],
    ) -> None:
        self.host, self.trl, self.weights, self.ranks, self.scorer = host, trl, weights, ranks, scorer
        self.options, self._count = options, count
        self.loaded: list[Loaded] = []
        self.training_began = False
        self._columns_seen: dict[str, tuple[Any, bool]] = {}
        self._drifts: str | None = None
        self._varies: str | None = None
        self._untold: str | None = None
        self._identity: str | None = None
        self._facts: dict[str, Any] = {}
        self._stored: StoredReference | None = None
        self._load: Callable[[], Any] | None = None
        self._adapters: dict[str, Any] = {}

    # When the trainer is built

    def meet(self, overrides_ref_log_probs: bool) -> None:
        host = self.host
        self.kind, self._on = self._what(), self.weights.adapters_on
        if not self.ranks.is_sharded:
            self._load = next((x.load for x in self.loaded if x.model is host.ref_model), None)
        if self.kind == "model":
            reference = ReferenceWeights(host.ref_model)
            self._drifts = reference.shares_with(host.model)
            self._varies = self._why_it_varies(reference)
        self._untold = self._uncacheable_reason(host.ref_model)
        self._adapters = self._policy_adapters()
        if host.args.precompute_ref_log_probs and overrides_ref_log_probs and not all(self.with_columns.values()):
            raise ValueError(
                f"`{type(host).__name__}` overrides `compute_ref_log_probs`, which `precompute_ref_log_probs=True` "
                "does not call here: log-probs are stored for each token. Give the values of your own as the columns "
                "`ref_chosen_logps` and `ref_rejected_logps` of the data sets, or remove the override."
            )
        for name, dataset in self.datasets():
            if self.with_columns[name] and isinstance(dataset, Dataset):
                check_column_values(dataset, f"`{name}`")
        if self.plan().durable:
            self._facts = self._identify(host.ref_model)
            self._identity = identity_of(self._facts)

    def meet_again(self) -> None:
        """What is the reference now: an adapter called "ref" may have come or gone, and a checkpoint brings one."""
        if self.weights.own is None:
            return
        was, self.kind, self._adapters = self._on, self._what(), self._policy_adapters()
        self._on = now = self.weights.adapters_on
        if not was and not now and not self.weights.own.copied():
            return
        if was != now and self.host.args.precompute_ref_log_probs:
            raise ValueError(
                "`precompute_ref_log_probs=True` scored the data with the reference that was there when the trainer "
                'was built, and an adapter named "ref" has come or gone since, which makes another reference. Load or '
                "delete it before building the trainer, or set `precompute_ref_log_probs=False`."
            )
        self._untold = None if self.ranks.is_sharded else self._uncacheable_reason(None)
        self.host.plan_again()
        plan = self.host.plan
        if plan.durable and not self.ranks.is_sharded:
            self._facts = self._identify(None)
            identity = identity_of(self._facts)
            if was == now and identity == self._identity:
                return
            self._identity = identity
        else:
            self._identity = None
        self._stored = None

    def meet_changed_adapters(self) -> None:
        found = self._policy_adapters()
        if found.keys() != self._adapters.keys() or any(found[name] is not self._adapters[name] for name in found):
            self.meet_again()

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

    def _what(self) -> str:
        if self.host.ref_model is not None:
            return "model"
        return "initial" if self.weights.own is None else self.weights.own.describe()

    def _policy_adapters(self) -> dict[str, Any]:
        policy = self.ranks.accelerator.unwrap_model(self.host.model)
        return dict(policy.peft_config) if is_peft_model(self.host.model) else {}

    def _weights(self, ref_model: Any) -> ReferenceWeights:
        model = self.ranks.accelerator.unwrap_model(self.host.model if ref_model is None else ref_model)
        return ReferenceWeights(model, self._on)

    def _identify(self, ref_model: Any) -> dict[str, Any]:
        weights, accelerator, args = self._weights(ref_model), self.ranks.accelerator, self.host.args
        with nullcontext() if self.weights.own is None else self.weights.own.copies_in_place():
            digest = weights.hash(maybe_gather_lm_head_ctx, accelerator.is_main_process)
        facts = identity_facts(
            digest,
            weights.config,
            weights.in_memory(maybe_gather_lm_head_ctx, accelerator.is_main_process),
            head=self.scorer.options.head,
            mixed_precision=accelerator.mixed_precision,
            device=accelerator.device.type,
            tf32=args.tf32,
            use_liger_kernel=args.use_liger_kernel,
        )
        return self.ranks.of_main(lambda: facts)

    def _uncacheable_reason(self, ref_model: Any) -> str | None:
        return self.ranks.of_main(lambda: self._weights(ref_model).uncacheable())

    def _why_it_varies(self, weights: ReferenceWeights) -> str | None:
        args, own = self.host.args, self.kind == "model"
        random_in, rope = weights.dropout(in_training=not own), weights.rope_of_batch()
        if random_in:
            return f"dropout is on in it (`{random_in}`): same distribution, other random draws"
        if args.neftune_noise_alpha is not None and self.weights.own is not None:
            return "its embeddings are the policy's, with the noise of `neftune_noise_alpha`: other random draws"
        if not own and (args.bf16_full_eval or args.fp16_full_eval):
            name = "bf16_full_eval" if args.bf16_full_eval else "fp16_full_eval"
            return f"`{name}` casts the policy when it is evaluated, and the reference with it"
        return f'its positions (`rope_type="{rope}"`) follow the longest sequence of each batch' if rope else None

    def plan(self) -> DPOPlan:
        args, own = self.host.args, self.weights.own
        not_storable = None
        if self.weights.moves:
            not_storable = "it is moved towards the policy during training (`sync_ref_model`)"
            fixed = [name for name, there in self.with_columns.items() if there]
            if fixed:
                raise ValueError(
                    f"Rows of {' and '.join(f'`{name}`' for name in fixed)} bring fixed reference log-probs in "
                    "`ref_chosen_logps` and `ref_rejected_logps`, and `sync_ref_model` moves the reference. Remove the "
                    "columns, or set `sync_ref_model=False`."
                )
        elif internals.holds_images(self.trl):
            not_storable = "the data hold images, by which the store cannot tell two sequences apart"
        name, varies = self._drifts, self._varies
        if self.kind != "model":
            weights = self._weights(None)
            name, varies = weights.trained(but=set() if own is None else own.copied()), self._why_it_varies(weights)
        if args.precompute_ref_log_probs and not_storable:
            raise ValueError(
                f"The reference cannot be precomputed: {not_storable}. Set `precompute_ref_log_probs=False`, or keep "
                "the reference as it is."
            )
        return plan_dpo(
            DPOFacts(
                loss_types=tuple(args.loss_type),
                best_metric=args.metric_for_best_model,
                reference=self.kind,
                datasets=tuple(self.with_columns),
                with_columns=tuple(name for name, there in self.with_columns.items() if there),
                precompute=args.precompute_ref_log_probs,
                storage=self.options.reference_store,
                folder=str(self.options.folder),
                not_storable=not_storable,
                drifts=f"it changes in training, which moves `{name}`, a tensor that it reads" if name else None,
                varies=varies,
                uncacheable=self._untold,
                own_loss=self.host.bypassed_by(),
            )
        )

    # For each batch

    def given_for(self, inputs: dict[str, Any], from_columns: bool) -> AbstractContextManager[None]:
        """Within, TRL's loss reads the batch's reference log-probs from where the plan says."""
        plan = self.host.plan
        if from_columns:
            check_batch(inputs)
        if plan.source == "pass" and self.ranks.any(not from_columns):
            log_probs = self._pass(self._model(), inputs)
            return internals.reference_given(self.trl, None if from_columns else log_probs)
        wanted = plan.source == "store" and not from_columns
        answer = self.stored(inputs, lambda batch: self._pass(self._model(), batch), wanted)
        if not self.host.args.precompute_ref_log_probs:
            self._count(passes=1 - answer.passes, tokens=answer.tokens_of_batch - answer.tokens)
        return internals.reference_given(self.trl, None if from_columns else answer.log_probs)

    def _pass(self, model: Any, batch: dict[str, Any]) -> torch.Tensor:
        with unrecorded_pass(self.trl), self.weights.entered():
            return internals.score_as_reference(self.trl, model, batch)

    @property
    def stored(self) -> StoredReference:
        if self._stored is None:
            ranks, identity, variants = self.ranks, "", None
            if self.host.plan.durable and self._identity is not None:
                identity = self._identity
                variants = Variants(
                    self.options.folder,
                    identity,
                    self._open_store,
                    tolerance_of(self._weights(self.host.ref_model), self.ranks.accelerator),
                    self.scorer.padded,
                    ranks.accelerator.is_main_process,
                )
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
        host = self.host
        if host.plan.source != "store" or have_columns(dataset.column_names, f"The {name} data set"):
            return
        loader = DataLoader(
            dataset,
            batch_size=batch_size,
            collate_fn=host.data_collator,
            num_workers=host.args.dataloader_num_workers,
            pin_memory=host.args.dataloader_pin_memory,
        )
        for batch in tqdm(
            iterable=self.ranks.accelerator.prepare(loader),
            desc=f"Scoring the {name} dataset with the reference",
            disable=bool(os.environ.get("TQDM_DISABLE", "")),
        ):
            self.stored(batch, lambda fed: self._pass(self._model(prepared=False), fed))
        self.flush()
        self.scorer.take_counts()

    def _model(self, prepared: bool = True) -> Any:
        host = self.host
        if host.ref_model is None and self.kind == "model" and self._load is not None:
            self._load_again(self._load)
        if host.ref_model is not None:
            return host.ref_model
        if self.kind == "model" or (host.plan.gone_in_training and self.training_began):
            raise ValueError(
                "Some sequences have no reference log-probs, and the reference is gone: with "
                "`precompute_ref_log_probs=True` and no `ref_model` it is the model before training, which scored the "
                "trainer's own data sets. Give these data as `eval_dataset` when the trainer is built, pass a "
                "`ref_model`, or set `precompute_ref_log_probs=False`."
            )
        return host.model if prepared else internals.policy_before_training(self.trl)

    # Memory

    def release(self) -> None:
        """Drop a reference model that TRL loaded, if no data set of the run needs it any more."""
        host, accelerator = self.host, self.ranks.accelerator
        if host.ref_model is None or self._load is None or self._untold or not self._covers_the_run():
            return
        if self._identity is None:
            self._facts = self._identify(host.ref_model)
            self._identity = identity_of(self._facts)
        held = accelerator.unwrap_model(host.ref_model)
        accelerator._models[:] = [x for x in accelerator._models if accelerator.unwrap_model(x) is not held]
        del self.scorer.forwards[1:], held
        host.ref_model = None
        clear_device_cache(garbage_collection=True)

    def _load_again(self, load: Callable[[], Any]) -> None:
        host = self.host
        host.ref_model = model = internals.made_as_reference(self.trl, load)
        host.attach_model(model)
        same = identity_of(self._identify(model)) == self._identity
        if same:
            host.ref_model = self.ranks.accelerator.prepare_model(model, evaluation_mode=True)
        if not same or self._gives_others():
            host.ref_model = None
            raise ValueError(
                "The reference model was released from memory when every sequence had been scored, and is needed for "
                f"others now; but what lies at {model.config._name_or_path!r} is no longer the same model. Put it "
                "back, or pass a `ref_model`, which is kept."
            )

    def _gives_others(self) -> bool:
        """Whether the reference model gives other values than are stored."""
        score = partial(self._pass, self.host.ref_model)
        return self.stored.why_another(score, self.ranks.device) is not None

    def _covers_the_run(self) -> bool:
        if self.host.plan.source != "store":
            return False
        needed = [
            dataset
            for name, dataset in self.datasets()
            if not self.with_columns[name] and (name == "train_dataset" or self.host.args.eval_strategy != "no")
        ]
        with random_state_kept():
            covers = all(isinstance(dataset, Dataset) and self._covers(dataset) for dataset in needed)
        return all(count[0] for count in self.ranks.gather_counts([int(covers)]))

    def _covers(self, dataset: Dataset) -> bool:
        dataset = internals.training_columns(self.trl, dataset)
        accelerator = self.ranks.accelerator
        size, step = accelerator.num_processes, _ROWS_CHECKED_TOGETHER
        for start in range(accelerator.process_index * step, len(dataset), size * step):
            rows = [dataset[i] for i in range(start, min(start + step, len(dataset)))]
            if not self.stored.holds(self.host.data_collator(rows)):
                return False
        return True
