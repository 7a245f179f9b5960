"""The teacher's hidden states from the store on disk and, for rows that it lacks, from one pass of the teacher.

With completions of a data set, the teacher's hidden states are the same in each epoch and run.
"""

import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from datasets import Dataset
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.constants import HF_HUB_OFFLINE
from torch import Tensor

from ..compat.distillation import DistilledRows
from ..config import AddedDistillationFields
from ..distributed.ranks import Ranks
from ..distributed.shards import gathered_by_zero3
from ..heads.logits import LogitTransform
from ..packing.support import can_rebase
from ..reference.segments import write_file
from ..reference.teacher_states import StoredHead, TeacherStates, digest_of_files
from ..reference.weights import ReferenceWeights, as_json, identity_facts, identity_of, write_about
from ..scoring.divergence import whole_head
from ..scoring.forward import HeadInputs
from ..scoring.head import LinearHead
from .column_completions import ColumnCompletions
from .counts import SkipCounts

logger = logging.getLogger("trl_ext")

_ROWS_PER_BATCH = 64
_ROWS_MEASURED = 256  # to predict the size of the store


# The arguments of `from_pretrained` with which the model is that of the folder's files
_LOADING_ARGUMENTS = {"dtype", "attn_implementation", "device_map", "low_cpu_mem_usage", "use_cache"}
_SECONDS = 10.0  # to wait for the Hub


class TeacherModel(Protocol):
    """The teacher, perhaps not in memory yet."""

    @property
    def is_loaded(self) -> bool: ...

    def run(self, rows: DistilledRows) -> HeadInputs: ...

    def head(self) -> tuple[LinearHead, LogitTransform]: ...


class Trainer(Protocol):
    """The trainer members that are read."""

    accelerator: Any
    model: Any
    train_dataset: Any
    eval_dataset: Any
    skip_counts: SkipCounts
    max_completion_length: int | None

    def _tokenize_prompts(self, prompts: list[Any]) -> Any: ...


class TeacherStore:
    """The stored hidden states of one trainer's teacher.

    Args:
        args (`DistillationConfig`): the trainer's config.
        completions (`ColumnCompletions`): the completions of the data set.
    """

    def __init__(self, trainer: Trainer, ranks: Ranks, completions: ColumnCompletions, args: Any) -> None:
        self.trainer = trainer
        self.ranks = ranks
        self.folder = AddedDistillationFields.of(args).teacher_folder
        self._completions = completions
        self._args = args
        self._head: StoredHead | None = None
        self._states: TeacherStates | None = None
        self._identity = ""
        self._facts: dict[str, Any] = {}
        self._source: str | None = None  # of a teacher that is loaded by name: its files and arguments
        self._keeps_padding = False
        self._vocabulary = 0
        self._is_watched = False  # whether a change of the teacher in memory can be noticed
        self._state: list[Any] | None = None  # of the teacher when training began, or when it was loaded later

    # Which teacher

    def find(self, name: str) -> bool:
        """Look for a teacher by its name or folder. Return whether every rank has its head. Every rank calls it."""
        self.learn_name(name)
        if self._source is not None:
            with suppress(OSError, ValueError, KeyError, TypeError):
                self._identity = json.loads(self._path_of(self._source).read_text())["identity"]
                self._head = StoredHead.read(self.folder / self._identity)
        return all(gather_object([self._head is not None]))

    def learn_name(self, name: str) -> None:
        """Find out which files `name` stands for, unless that is known. Every rank calls it."""
        if self._source is None:
            # Not the trainer's process, because TRL makes its accelerator later
            sources = [self._source_of(name) if PartialState().is_main_process else None]
            (self._source,) = broadcast_object_list(sources)

    def _source_of(self, name: str) -> str | None:
        """Return what identifies the files of a saved model and how it is loaded; `None` if that is not known."""
        args = self._args
        keywords = dict(args.teacher_model_init_kwargs or {})
        if args.trust_remote_code:
            return None
        try:
            folder = Path(name)
            if not folder.is_dir():
                revision = args.teacher_model_revision
                if not HF_HUB_OFFLINE:  # the newest commit, which is the one that is loaded
                    revision = HfApi().model_info(name, revision=revision, timeout=_SECONDS).sha
                folder = Path(snapshot_download(name, revision=revision, local_files_only=True))
            model_config = json.loads((folder / "config.json").read_text())
            if not keywords.keys() <= _LOADING_ARGUMENTS | model_config.keys():
                return None
            files = digest_of_files(folder)
        except Exception:  # no such name, not on this machine, or not readable. The other ranks wait
            return None
        if "adapter_config.json" in files:  # the base model has its files elsewhere
            return None
        settings = {key: value for key, value in os.environ.items() if key.startswith(("ACCELERATE_", "FSDP_"))}
        return identity_of(
            identity_facts(
                "",
                files,
                {},
                arguments=keywords,
                precision=[args.bf16, args.fp16],
                engine=[args.fsdp, args.fsdp_config, args.deepspeed, settings],
                device=args.device.type,
                tf32=args.tf32,
            )
        )

    def _path_of(self, source: str) -> Path:
        return self.folder / "sources" / f"{source}.json"

    @property
    def vocabulary(self) -> int:
        """The number of tokens of the stored teacher."""
        assert self._head is not None
        return self._head.vocabulary

    def take(self, model: Any, *, is_hosted: bool) -> None:
        """Take a teacher in memory, before an engine shards it. Every rank calls it.

        Raises:
            `ValueError`: its hidden states depend on more than a row's tokens, or a later run could not tell it from
                another teacher.
        """
        weights = ReferenceWeights.of_model(model)
        rope = weights.rope_of_batch()
        reason = weights.randomness(in_training=False)
        if rope is not None:
            reason = f'positions (`rope_type="{rope}"`) depend on the longest sequence of each batch'
        if reason is not None:
            raise ValueError(f"`teacher_store='disk'` is not supported here: {reason}. Leave `teacher_store` out.")
        self._identify(model)
        self._is_watched = not is_hosted and not self.ranks.is_sharded  # both move the weights

    def begin(self, model: Any) -> None:
        """Identify the teacher again, which code of the user may have changed. Every rank calls it."""
        if self._is_watched:
            identity = self._identity
            if self._identity_of(model) != identity:
                self._identify(model)
        self.watch(model)

    def watch(self, model: Any) -> None:
        """Note the state of a teacher that the store has identified, for `check_unchanged`."""
        if self._is_watched:
            self._state = _state_of(model)

    def forget_name(self) -> None:
        """Note that the teacher is not the model of its name."""
        self._source = None

    def _identify(self, model: Any) -> None:
        identity = self._identity_of(model)
        if self._identity not in ("", identity):
            self.forget_name()
        self._identity = identity
        self._keeps_padding = not can_rebase(model)
        self._vocabulary = model.config.get_text_config().vocab_size
        self._head = StoredHead.read(self.folder / self._identity)
        self._states = None
        self.open()

    def _identity_of(self, model: Any) -> str:
        weights = ReferenceWeights.of_model(model)
        reason = self.ranks.of_main(weights.uncacheable_reason)
        if reason is not None:
            raise ValueError(f"`teacher_store='disk'` is not supported here: {reason}. Leave `teacher_store` out.")
        accelerator = self.ranks.accelerator
        gather_arguments = gathered_by_zero3, accelerator.is_main_process
        plugin = getattr(accelerator.state, "fsdp_plugin", None)
        facts = identity_facts(
            weights.hash(*gather_arguments),
            weights.config,
            weights.in_memory(*gather_arguments),
            mixed_precision=[accelerator.mixed_precision, str(getattr(plugin, "mixed_precision_policy", None))],
            device=accelerator.device.type,
            tf32=self._args.tf32,
        )
        self._facts = self.ranks.of_main(lambda: facts)
        return identity_of(self._facts)

    def open(self) -> None:
        """Open the store, if it has the teacher's head on every rank. Every rank calls it."""
        head = self._head
        if all(self.ranks.gather_objects(head is not None)) and head is not None:
            merges = self.ranks.writes_to(self.folder)
            self._states = TeacherStates(self.folder, self._identity, head, merges=merges)
            self._write(self._write_source)

    def _create(self, inputs: HeadInputs) -> None:
        """Write the head of a teacher that the store does not know, and open the store. Every rank calls it."""
        weight, bias = whole_head(inputs)
        tensors = {"weight": weight} | ({} if bias is None else {"bias": bias})
        transform = inputs.transform
        metadata = {
            "logit_scale": repr(transform.logit_scale),
            "softcap": "" if transform.softcap is None else repr(transform.softcap),
            "dtype": str(inputs.hidden.dtype).removeprefix("torch."),
            "keeps_padding": str(self._keeps_padding),
            "vocabulary": str(self._vocabulary),
        }
        self._head = StoredHead(tensors, metadata)
        self._write(self._write_head)
        self.open()

    def _write(self, file: Callable[[], None]) -> None:
        """Write a file on one process of each node. If the disk is full, the teacher is loaded in a later run."""
        if self.ranks.accelerator.is_local_main_process:
            try:
                file()
            except OSError as error:
                logger.warning(
                    "Cannot write to %s: %s. A later run loads the teacher. Free space, or set `teacher_store_dir`.",
                    self.folder,
                    error,
                )

    def _write_head(self) -> None:
        assert self._head is not None
        folder = self.folder / self._identity
        self._head.write(folder)
        write_about(folder, self._facts)

    def _write_source(self) -> None:
        path = None if self._source is None else self._path_of(self._source)
        content = as_json({"identity": self._identity}).encode()
        if path is not None and (not path.exists() or path.read_bytes() != content):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, content)

    # What is stored

    def has_all_rows(self) -> bool:
        """Return whether every row of the data sets is stored, on every rank. Every rank calls it."""
        eval_dataset = self.trainer.eval_dataset
        datasets = list(eval_dataset.values()) if isinstance(eval_dataset, dict) else [eval_dataset]
        datasets = [self.trainer.train_dataset, *(x for x in datasets if x is not None)]
        # With padding, an entry also depends on the rows of its batch
        is_by_row = self._states is not None and not self._states.head.keeps_padding
        has_rows = is_by_row and all(isinstance(x, Dataset) and self._has_rows_of(x) for x in datasets)
        return all(self.ranks.gather_objects(has_rows))

    def _has_rows_of(self, dataset: Dataset) -> bool:
        assert self._states is not None
        for prompt_ids, completion_ids in self._token_ids(dataset):
            ids_1S = torch.tensor([[*prompt_ids, *completion_ids]])
            labels_1S = ids_1S.clone()
            labels_1S[:, : len(prompt_ids)] = -100
            (key,) = self._states.keys(ids_1S, torch.ones_like(ids_1S), labels_1S)
            tokens = len(completion_ids)
            # Damage shows when states are read: now, if the teacher is sharded, which cannot be loaded in training
            is_stored = self._states.is_listed(key, tokens)
            if not is_stored or (self.ranks.is_sharded and self._states.get(key, tokens) is None):
                return False
        return True

    def _token_ids(self, dataset: Dataset) -> Iterator[tuple[list[int], list[int]]]:
        """Yield the token ids of each row's prompt and completion."""
        limit = self.trainer.max_completion_length
        for first in range(0, len(dataset), _ROWS_PER_BATCH):
            rows = [dataset[i] for i in range(first, min(first + _ROWS_PER_BATCH, len(dataset)))]
            prompt_ids, *_ = self.trainer._tokenize_prompts([row["prompt"] for row in rows])
            for row, ids in zip(rows, prompt_ids, strict=True):
                yield list(ids), self._completions.completion_ids(row, list(ids))[:limit]

    def expected_size(self, width: int, itemsize: int) -> str:
        """Return how much the hidden states of the training data take on disk, as text.

        Args:
            width (`int`): the teacher's hidden size H.
            itemsize (`int`): the bytes of a number.
        """
        token_size = f"{width * itemsize:,} bytes for each token of a completion"
        dataset = self.trainer.train_dataset
        if not isinstance(dataset, Dataset) or not len(dataset):
            return token_size
        measured_rows = dataset.select(range(0, len(dataset), max(1, len(dataset) // _ROWS_MEASURED)))
        tokens = [len(completion_ids) for _, completion_ids in self._token_ids(measured_rows)]
        mebibytes = sum(tokens) / len(tokens) * len(dataset) * width * itemsize / 2**20
        size = f"{mebibytes:,.1f} MiB" if mebibytes >= 1 else f"{mebibytes * 1024:,.1f} KiB"
        return f"{token_size}, about {size} for {len(dataset):,} rows"

    # For each batch

    def head_inputs(self, rows: DistilledRows, teacher: TeacherModel) -> HeadInputs:
        """Return what the divergence reads of the teacher for a batch. Every rank calls it.

        Raises:
            `RuntimeError`: a row is not stored, and the teacher cannot be loaded any more.
        """
        device = self.trainer.accelerator.device
        mask_BS = (rows.labels[:, 1:] != -100).to(device)
        tokens_B = mask_BS.sum(dim=1).tolist()
        states_B: list[Tensor | None] = [None] * len(tokens_B)
        if self._states is not None:
            keys_B = self._keys(rows)
            states_B = [self._states.get(key, tokens) for key, tokens in zip(keys_B, tokens_B, strict=True)]
        missing_rows = [row for row, states in enumerate(states_B) if states is None]
        processed_tokens = 0
        if self.ranks.any(bool(missing_rows)):
            if not teacher.is_loaded and self.ranks.is_sharded:
                raise RuntimeError(
                    "A row is not stored, and the teacher is not loaded, because all rows of the data sets were stored "
                    "when training began. Pass every evaluation set as `eval_dataset`, or leave `teacher_store` out."
                )
            # A pass needs all ranks, also one that lacks no row
            part = rows.subset(missing_rows or [0])
            identity = self._identity
            inputs = teacher.run(part)
            if self._identity != identity:
                raise RuntimeError(
                    "The files of `teacher_model` have changed since the trainer was built, so its stored hidden "
                    "states are another model's. Start the run again."
                )
            processed_tokens = part.labels.numel()
            if self._states is None:
                self._create(inputs)
            new_states = inputs.hidden.split([tokens_B[row] for row in missing_rows or [0]])
            self._add(rows, dict(zip(missing_rows, new_states, strict=False)))
            for row, states_nH in zip(missing_rows, new_states, strict=False):
                states_B[row] = states_nH
        mode = "train" if self.trainer.model.training else "eval"
        self.trainer.skip_counts.add(
            mode, passes=int(processed_tokens == 0), tokens=rows.labels.numel() - processed_tokens
        )
        hidden_NH = torch.cat([states_nH.to(device) for states_nH in states_B if states_nH is not None])
        if teacher.is_loaded:
            head, transform = teacher.head()
        else:
            assert self._head is not None
            head = LinearHead(self._head.to(device))
            transform = LogitTransform(self._args.temperature, self._head.logit_scale, self._head.softcap)
        return HeadInputs(hidden_NH, head, transform, mask_BS)

    def _add(self, rows: DistilledRows, states_by_row: dict[int, Tensor]) -> None:
        if self._states is not None and states_by_row:
            keys_B = self._keys(rows)
            finite_states = {row: states_nH for row, states_nH in states_by_row.items() if states_nH.isfinite().all()}
            self._states.add({keys_B[row]: states_nH for row, states_nH in finite_states.items()})

    def _keys(self, rows: DistilledRows) -> list[bytes]:
        assert self._states is not None
        return self._states.keys(rows.inputs["input_ids"], rows.inputs["attention_mask"], rows.labels)

    def check_unchanged(self, model: Any) -> None:
        """Raise `RuntimeError` if the weights or adapters of the teacher have changed since `watch`."""
        if self._state is not None and self._state != _state_of(model):
            raise RuntimeError(
                "The weights or adapters of `teacher_model` have changed during training, so its stored hidden states "
                "are another model's. Leave `teacher_store` out, or change the teacher before training."
            )

    def flush(self) -> None:
        """Write new entries, and find those of the other ranks. Every rank calls it."""
        if self._states is not None:
            self._states.flush()
            self.ranks.accelerator.wait_for_everyone()
            self._states.flush()


def _state_of(model: Any) -> list[Any]:
    """Return what changes with a write to a tensor that torch counts, another tensor or another choice of adapters."""
    tensors = [*model.parameters(), *model.buffers()]
    adapters = ReferenceWeights.of_model(model).adapters
    return [adapters, *((id(tensor), tensor.data_ptr(), tensor._version) for tensor in tensors)]
