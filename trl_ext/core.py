"""Exact log-probs for a training loop of your own, without TRL: packed rows, shared prompts, the tiled head.

```python
from trl_ext import core

core.attach(model)  # before `accelerator.prepare(model)`
scores = core.score(model, input_ids, attention_mask, labels)
```
"""

import math
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from .distributed.ranks import Ranks
from .distributed.shards import gathered_by_zero3
from .heads.kernels.work import KERNELS
from .heads.linear_log_probs import HEADS
from .packing.packing import has_other_ranks, padded_in
from .packing.support import padded_reason
from .reference.canary import Canary, tolerance_of
from .reference.store import DiskStore, MemoryStore
from .reference.stored import StoredReference, Variants
from .reference.weights import ReferenceWeights, base_of, identity_facts, identity_of, uncompiled, write_about
from .scoring.forward import ScoringForward, ScoringOptions, attach_scoring_forward
from .scoring.output import FusedCausalLMOutput
from .scoring.scorer import agree_on_packing

__all__ = ["FusedCausalLMOutput", "Reference", "attach", "rows_with_gradient", "score"]

_REPLACED = (
    "The exact LM head did not score the model, because something replaced `model.forward` after `attach(model)`. Call "
    "`attach` last, just before `accelerator.prepare`."
)
_SWITCHES = ("padding_free", "share_prompts", "entropy_requires_grad", "cast_lm_head_to_fp32")
_OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "mean_log_probs")

# Of models of transformers, and of what wraps them. The model's `forward` holds the scoring forward, and it the model
_attached: WeakKeyDictionary[nn.Module, ReferenceType[ScoringForward]] = WeakKeyDictionary()
_scored: WeakSet[nn.Module] = WeakSet()


def attach(model: nn.Module, **options: Any) -> None:
    """Give a causal language model the scoring forward: after `get_peft_model`, before `accelerator.prepare(model)`.

    The model's own forward, `generate` and checkpoints stay as they are. A second call with the same options does
    nothing.

    Args:
        model (`PreTrainedModel` or `PeftModel`): a causal language model of transformers.
        options:
            `temperature` (`float`, 1.0) divides the logits. `padding_free` and `share_prompts` (`bool`, True) remove
            padding, and compute leading tokens that rows share once, where that is exact. `outputs` are computed in
            each call that names none, `("log_probs",)`. `entropy_requires_grad` (`bool`, False) gives the entropy a
            gradient. `cast_lm_head_to_fp32` (`bool`, False), `head` (`str`, "tiled"), `chunk_size` (`int`) and
            `kernels` (`str`) are [`DPOConfig`]'s arguments about the head.

    Raises:
        `ValueError`: an option is unknown or out of range, or `attach` was called on the model with other options.
        `RuntimeError`: Accelerate has wrapped the model's forward, and the scoring forward would run outside of its
            mixed precision.
    """
    scoring_options = _options_of(options)
    causal_model = _causal_model_of(model)
    scoring = _known(causal_model)
    if scoring is not None:
        if scoring.options != scoring_options:
            raise ValueError(
                f"`attach` was called on this model with other options: {scoring.options}. Call it once for each model."
            )
        return
    if "_original_forward" in causal_model.__dict__ or "_original_forward" in model.__dict__:
        raise RuntimeError(
            "`accelerator.prepare` has wrapped this model's forward for mixed precision. Scoring that `attach` adds "
            "now would run without mixed precision. Call `attach(model)` before `accelerator.prepare(model)`."
        )
    _attached[causal_model] = ref(attach_scoring_forward(causal_model, scoring_options))


def score(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor,
    labels: Tensor,
    *,
    outputs: tuple[str, ...] | None = None,
    **inputs: Any,
) -> FusedCausalLMOutput:
    """Return the log-probs of a padded batch's labels, from one forward pass of `model`.

    On several ranks, every rank calls it for its first batch at the same time: they agree on what is packed.

    Args:
        model (`nn.Module`): one that [`attach`] was called on, as `accelerator.prepare` returned it.
        input_ids (`Tensor`): token ids with padding on either side, int64 `(B, S)`.
        attention_mask (`Tensor`): 0 on padding, 1 elsewhere, `(B, S)`.
        labels (`Tensor`):
            the token ids to score at their own positions, not shifted, and -100 elsewhere, int64 `(B, S)`.
        outputs (`tuple[str, ...]`, *optional*):
            the per-token fields to compute: `log_probs` and any of `entropy`, `log_sum_sq_probs`, `mean_logits`,
            `is_top1`, `mean_log_probs`.
        inputs: further inputs of the model, such as `pixel_values`.

    Returns:
        [`FusedCausalLMOutput`]: fields of shape `(B, S - 1)`, whose column t is about the token in column t + 1.

    Raises:
        `ValueError`: a tensor is missing, empty or of another shape, an output is unknown, or `attach` was not called.
        `RuntimeError`: something replaced the model's forward after `attach`.
    """
    _check_batch(input_ids, attention_mask, labels)
    scoring = _scoring_of(model)
    if model not in _scored:
        _begin(model, scoring, labels)
    # Only the trainers know when a plan is made. Modules and rates of dropout may have changed since the last call
    scoring.forget_randomness()
    scoring.was_called = False
    output: FusedCausalLMOutput = model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        labels=labels,
        fused_lm_head=True,
        head_outputs=None if outputs is None else _with_log_probs(outputs),
        **inputs,
    )
    if not scoring.was_called:
        raise RuntimeError(_REPLACED)
    if has_other_ranks():
        agree_on_packing([scoring.packing])
    # Prompt tuning puts virtual tokens before those of the batch
    width = input_ids.shape[1] - 1
    for name, field in output.items():
        if isinstance(field, Tensor) and field.ndim == 2:
            output[name] = field[:, field.shape[1] - width :]
    return output


class Reference:
    """Log-probs of a model that does not change: each sequence is scored once.

    Build it before `accelerator.prepare(model)`, on every rank. A model whose log-probs differ between passes, because
    it draws at random or its positions depend on the batch, is run in each call.

    Args:
        model (`PreTrainedModel` or `PeftModel`):
            The reference. [`attach`] is called if it was not: pass the policy's `temperature` in `options` then.
        accelerator (`Accelerator`): whose ranks share what each of them has scored.
        folder (`str` or `Path`, *optional*):
            Keeps log-probs on disk, for later runs with the same model, code and versions. Four stored sequences are
            scored again first, and the folder is not used if they differ. None keeps them in memory.
        within (`Callable`, *optional*):
            Returns a context in which `model` is the reference: `model.disable_adapter`, for a LoRA policy.
        options: those of [`attach`].

    Raises:
        `ValueError`: `within` returns no context, the reference reads weights with `requires_grad`, or `folder` is
            given, and Accelerate shards the model, or a later run could not recognise it.
    """

    def __init__(
        self,
        model: nn.Module,
        accelerator: Any,
        folder: str | Path | None = None,
        within: Callable[[], AbstractContextManager[Any]] = nullcontext,
        **options: Any,
    ) -> None:
        if options or _known(_causal_model_of(model)) is None:
            attach(model, **options)
        self._model = _unwrapped(model)
        if not hasattr(within(), "__enter__"):
            raise ValueError(
                "`within` must return a context. Pass the method `model.disable_adapter`, without calling it."
            )
        self._within = within
        self._ranks = Ranks()
        self._ranks.accelerator = accelerator
        self._first_state: list[Any] | None = None  # of the weights, in the first pass
        with _in_evaluation(self._model), within():
            weights = ReferenceWeights.of_model(self._model)
            rope = weights.rope_of_batch()
            self._varies = weights.randomness(in_training=False)
            trained = next((name for name, _ in weights.trained_parameters()), None)
        if trained is not None:
            raise ValueError(
                f"The reference reads `{trained}`, which has `requires_grad=True`, so training may change it. Call "
                "`model.requires_grad_(False)` on a separate reference. For a LoRA policy, pass "
                "`within=model.disable_adapter`."
            )
        if rope:
            self._varies = f'its positions (`rope_type="{rope}"`) depend on the longest sequence of each batch'
        variants = None if folder is None else self._variants(Path(folder))
        self._stored = StoredReference(
            MemoryStore(),
            "" if variants is None else variants.identity,
            self._ranks.gather_counts,
            self._ranks.gather_objects,
            variants=variants,
        )

    def log_probs(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        """Return the log-probs of the labels without a gradient, fp32 `(B, S - 1)`; the arguments are those of `score`.

        Every rank calls it, each with its own batch. A pass runs if any rank has a sequence that was not scored.

        Raises:
            `ValueError`: a label is not the token at its position.
            `RuntimeError`: weights or active adapters of the reference have changed since its first pass.
        """
        _check_batch(input_ids, attention_mask, labels)
        is_labelled = labels != -100
        if not torch.equal(labels[is_labelled], input_ids[is_labelled]):
            raise ValueError("`labels` must be `input_ids` or -100, not shifted.")
        batch = {"input_ids": input_ids, "attention_mask": attention_mask, "completion_mask": is_labelled.long()}
        return self._run(batch) if self._varies else self._stored(batch, self._run).log_probs

    def flush(self) -> None:
        """Write new entries to `folder`. Call it at the end of training; it also happens every 30 seconds."""
        self._stored.store.flush()

    def _run(self, batch: dict[str, Any]) -> Tensor:
        labels = batch["input_ids"].masked_fill(batch["completion_mask"] == 0, -100)
        # The model may not be prepared, and must run in the precision of the policy
        autocast = self._ranks.accelerator.autocast()
        with torch.no_grad(), autocast, _in_evaluation(self._model), self._within():
            self._check_unchanged()
            scores = score(self._model, batch["input_ids"], batch["attention_mask"], labels, outputs=("log_probs",))
        assert scores.log_probs is not None
        return scores.log_probs

    def _check_unchanged(self) -> None:
        """Raise `RuntimeError` if torch has counted a write to the reference's weights, or other adapters are on."""
        if self._ranks.is_sharded:  # gathering writes too
            return
        weights = ReferenceWeights.of_model(self._model)
        state: list[Any] = [weights.adapters, *((name, x._version) for name, x in weights.tensors())]
        if self._first_state is None:
            self._first_state = state
        if state != self._first_state:
            raise RuntimeError(
                "The reference has changed since its first pass: its weights were trained, or other adapters are on. "
                "Give `Reference` a model that is not trained, or, for a LoRA policy, `within=model.disable_adapter`."
            )

    def _variants(self, folder: Path) -> Variants:
        accelerator = self._ranks.accelerator
        if self._ranks.is_sharded:
            raise ValueError(
                "`folder` is not supported with FSDP or DeepSpeed. Leave it out, to keep log-probs in memory."
            )
        packing = _scoring_of(self._model).packing
        with _in_evaluation(self._model), self._within():
            weights = ReferenceWeights.of_model(self._model)
            reason = self._varies or weights.uncacheable_reason()
            if reason is not None:
                raise ValueError(f"`folder` cannot store log-probs of this reference: {reason}. Leave `folder` out.")
            facts = identity_facts(
                weights.hash(gathered_by_zero3),
                weights.config,
                weights.in_memory(gathered_by_zero3),
                head=_scoring_of(self._model).options.head,
                temperature=_scoring_of(self._model).options.temperature,
                mixed_precision=accelerator.mixed_precision,
                device=accelerator.device.type,
            )
        facts = self._ranks.of_main(lambda: facts)

        def open_store(name: str, canary: Canary) -> DiskStore:
            store = DiskStore(folder / name, name, writes=self._ranks.writes_to(folder / name), canary=canary)
            if accelerator.is_local_main_process:
                write_about(folder / name, facts)
            return store

        return Variants(
            root=folder,
            identity=identity_of(facts),
            open=open_store,
            tolerance=tolerance_of(weights, accelerator),
            padded=lambda: padded_in([packing]),
            is_main=accelerator.is_main_process,
            tokens=getattr(weights.base.get_input_embeddings(), "num_embeddings", None),
        )


def rows_with_gradient(advantages: Tensor, completion_mask: Tensor) -> Tensor:
    """Return which rows a policy-gradient loss needs: bool `(B,)`.

    The loss of a row is its advantage times a function of the row, without a KL or entropy term. A row whose advantage
    is 0, or whose mask is empty, has no gradient then, and does not have to be scored. With DDP, a rank without such
    rows must still score one: the other ranks wait for its gradients.

    Args:
        advantages (`Tensor`): `(B,)`.
        completion_mask (`Tensor`): 0 on tokens that are not in the loss, `(B, C)`.

    Raises:
        `ValueError`: a tensor has another shape.
    """
    if completion_mask.ndim != 2 or advantages.shape != completion_mask.shape[:1]:
        raise ValueError(
            "`advantages` must have the shape (B,) and `completion_mask` (B, C), got "
            f"{tuple(advantages.shape)} and {tuple(completion_mask.shape)}."
        )
    return (advantages != 0) & (completion_mask != 0).any(dim=1)


def _options_of(options: dict[str, Any]) -> ScoringOptions:
    option_names = sorted(field.name for field in fields(ScoringOptions))
    unknown = sorted(options.keys() - {*option_names})
    if unknown:
        raise ValueError(f"Unknown option '{unknown[0]}'. Choose from: {', '.join(option_names)}.")
    if "outputs" in options:
        options = {**options, "outputs": _with_log_probs(options["outputs"])}
    scoring_options = ScoringOptions(**options)
    for name in _SWITCHES:
        if not isinstance(getattr(scoring_options, name), bool):
            raise ValueError(f"`{name}` must be True or False, got {getattr(scoring_options, name)!r}.")
    for name, value, choices in (
        ("head", scoring_options.head, HEADS),
        ("kernels", scoring_options.kernels, (None, *KERNELS)),
    ):
        if value not in choices:
            raise ValueError(f"Unknown `{name}` {value!r}. Choose from: {', '.join(map(repr, choices))}.")
    temperature = scoring_options.temperature
    if not isinstance(temperature, int | float) or not 0 < temperature < math.inf:
        raise ValueError(f"`temperature` must be a positive number, got {temperature!r}.")
    if scoring_options.chunk_size is not None and scoring_options.chunk_size < 1:
        raise ValueError(f"`chunk_size` must be at least 1, got {scoring_options.chunk_size}.")
    return scoring_options


def _with_log_probs(outputs: tuple[str, ...]) -> tuple[str, ...]:
    if isinstance(outputs, str):
        raise ValueError(f"`outputs` must be a tuple of names, got {outputs!r}. Write ({outputs!r},).")
    unknown = [name for name in outputs if name not in _OUTPUTS]
    if unknown:
        raise ValueError(f"Unknown `outputs` '{unknown[0]}'. Choose from: {', '.join(_OUTPUTS)}.")
    return tuple(dict.fromkeys(("log_probs", *outputs)))


def _check_batch(input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> None:
    if input_ids.ndim != 2 or input_ids.shape[0] == 0 or input_ids.shape[1] < 2:
        raise ValueError(f"`input_ids` must have rows of two tokens or more, got the shape {tuple(input_ids.shape)}.")
    for name, tensor in (("attention_mask", attention_mask), ("labels", labels)):
        if not isinstance(tensor, Tensor):
            raise ValueError(f"`{name}` must be a tensor of the shape of `input_ids`, got {tensor!r}.")
        if tensor.shape != input_ids.shape:
            raise ValueError(
                f"`{name}` must have the shape of `input_ids`, {tuple(input_ids.shape)}, got {tuple(tensor.shape)}."
            )


def _begin(model: nn.Module, scoring: ScoringForward, labels: Tensor) -> None:
    """Check what the first batch of a model, or of a new wrapper, shows.

    Raises:
        `ValueError`: a label is no token id and not -100. Its log-prob would be NaN.
    """
    causal_model = _causal_model_of(model)
    last = scoring.vocabulary - 1
    outside = labels[((labels < 0) | (labels > last)) & (labels != -100)]
    if outside.numel():
        raise ValueError(f"`labels` must be -100 or token ids from 0 to {last}, got {outside[0].item()}.")
    if scoring.packing.padded_reason is None:  # adapters may have come since `attach`
        scoring.packing.padded_reason = padded_reason(causal_model)
    if any(isinstance(x, DTensor) or hasattr(x, "ds_status") for x in causal_model.parameters()):
        warnings.warn(
            "`trl_ext.core` was not tested with sharded weights (FSDP2, DeepSpeed ZeRO-3, tensor parallelism). Compare "
            "the first log-probs with those of the model's own logits.",
            stacklevel=3,
        )
    _scored.add(model)


def _known(model: nn.Module) -> ScoringForward | None:
    reference = _attached.get(model)
    return None if reference is None else reference()


def _scoring_of(model: nn.Module) -> ScoringForward:
    scoring = _known(model)
    if scoring is None:
        causal_model = _causal_model_of(model)
        scoring = _known(causal_model)
        if scoring is None and causal_model in _attached:
            raise RuntimeError(_REPLACED)
        if scoring is None:
            raise ValueError(
                f"{type(causal_model).__name__} has no scoring forward. Call `attach(model)` before "
                "`accelerator.prepare(model)`."
            )
        _attached[model] = ref(scoring)
    return scoring


def _unwrapped(model: Any) -> Any:
    """Return the model inside the wrappers of engines and of `torch.compile`, which is still in that of PEFT."""
    deepspeed = sys.modules.get("deepspeed")
    wrappers: tuple[Any, ...] = (DistributedDataParallel, DataParallel)
    wrappers += () if deepspeed is None else (deepspeed.DeepSpeedEngine,)
    while True:
        inner = uncompiled(model)
        if isinstance(inner, wrappers):
            inner = inner.module
        if inner is model:
            return model
        model = inner


def _causal_model_of(model: Any) -> Any:
    """Return the model of transformers inside all wrappers."""
    return uncompiled(base_of(_unwrapped(model)))


@contextmanager
def _in_evaluation(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode in the `with` block, and each module back into its own mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
