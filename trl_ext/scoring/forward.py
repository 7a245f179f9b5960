"""The scoring forward of a model: it takes a padded batch and returns per-token log-probs.

It replaces TRL's fused head: `model(**inputs, labels=labels, fused_lm_head=True)` returns a `FusedCausalLMOutput`,
also through wrappers such as PEFT and DDP. Calls without `fused_lm_head` run the model's own forward.
"""

import functools
import logging
import types
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..compat.choices import FusedCausalLMOutput
from ..distributed.gradients import scale_grad
from ..distributed.sequence_parallel import SequenceGroup, Shard
from ..distributed.shards import is_zero3, parameter_of
from ..heads.kept import KeptClasses
from ..heads.linear_log_probs import run_head
from ..heads.logits import LinearLogProbs, LogitTransform
from ..packing.attention import index_select_fp32_grad, run_packed
from ..packing.layout import Layout
from ..packing.packing import Packing
from ..packing.randomness import Randomness, randomness_of
from ..packing.support import backbone_of
from .checks import check_adapter, check_decoder, check_head
from .head import LinearHead, OpaqueHead, logit_transform, resolve_head, score_by_module
from .model_check import ModelSample, difference_reason
from .model_logits import ForwardNotReadError, OwnForward, logits_of, read_transform, router_loss_of
from .weight_layout import WeightLayout, weight_layout_of

logger = logging.getLogger("trl_ext")

# Config fields with the number of experts that a token gets. TRL reads the first
_CHOSEN_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")


@dataclass(frozen=True)
class ScoringOptions:
    """How a model scores tokens."""

    temperature: float = 1.0  # divides the logits
    cast_lm_head_to_fp32: bool = False  # whether the head casts its operands to fp32 and turns autocast off
    outputs: tuple[str, ...] = ("log_probs",)  # per-token fields of `FusedCausalLMOutput` to compute
    head: str = "tiled"  # one of `HEADS`
    chunk_size: int | None = None  # tokens in a tile of the head
    kernels: str | None = None  # one of `KERNELS`; None chooses from the device
    entropy_requires_grad: bool = False  # whether a loss term needs the entropy's gradient
    padding_free: bool = True  # whether padding is removed, for models that allow it
    share_prompts: bool = True  # whether a prefix that rows share is computed once, where that is exact


class ScoringForward:
    """The scoring forward of one model."""

    sequence_group: SequenceGroup | None = None  # the ranks over which the tokens of a row are split
    is_compared = False  # whether log-probs were compared with the model's logits

    def __init__(self, model: Any, options: ScoringOptions, own_forward: OwnForward) -> None:
        self.options = options
        self.own_forward = own_forward  # the model's, which returns logits
        self.model_class = type(model).__name__
        self.trl_transform: LogitTransform = logit_transform(model.config, options.temperature)
        self.transform = self.trl_transform
        self.runs_model_code = False  # whether the model's forward computes the logits, because no transform gives them
        try:
            transform = read_transform(model, own_forward, self.trl_transform)
        except ForwardNotReadError:
            pass  # the first batch shows whether the config's numbers are right
        else:
            self._set_transform(transform)
        self.vocabulary: int = model.config.get_text_config().vocab_size
        self.used = False  # every call sets it; the caller resets and reads it
        self.token_counts = [0, 0, 0]  # tokens so far: processed with a gradient, without a gradient, and scored
        self.head_rows: str | None = None  # which rows of the head's weight the last pass used, and why
        self.packing = Packing(model, padding_free=options.padding_free, share_prompts=options.share_prompts)
        self._randomness: Randomness | None = None
        self._randomness_is_known = False
        self._checked: set[tuple[bool, bool, bool, str]] = set()

    def __call__(
        self,
        model: Any,
        *args: Any,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        head_outputs: tuple[str, ...] | None = None,
        kept: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> FusedCausalLMOutput:
        """Score the positions whose next-token label is not -100.

        Args:
            labels (`Tensor` of shape `(B, S)`): not shifted yet. The fields of the result have shape `(B, S - 1)`.
            shift_labels (`Tensor` of shape `(B, S)`): already shifted, as under context parallelism. The fields of the
                result have shape `(B, S)`.
            head_outputs (`tuple[str, ...]`, *optional*): per-token fields to compute, including `log_probs`. `None`
                computes those of the options.
            kept (`tuple[Tensor, Tensor]`, *optional*): with `labels`, the classes over which the last C tokens of each
                row are normalised: ids `(B, K)`, one token after another, and how many each token has, `(B, C)`. Tokens
                that have none keep every class.

        Raises:
            `ValueError`: neither `labels` nor `shift_labels` is given.
            `RuntimeError`: ranks that split a batch got different batches, or the head fails its check.
        """
        self.used = True
        if not self.is_compared:
            self.is_compared = True
            given = labels if labels is not None else shift_labels
            if given is not None:
                self._compare_with_model(model, given.device, has_mask=kwargs.get("attention_mask") is not None)
        kwargs["use_cache"] = False
        text_config = model.config.get_text_config()
        if getattr(text_config, "output_router_logits", False):
            kwargs.setdefault("output_router_logits", True)
        layout = None
        width = slice(None) if shift_labels is not None else slice(-1)  # the last token has no label to predict
        if shift_labels is None:
            if labels is None:
                raise ValueError("`fused_lm_head=True` needs `labels` or `shift_labels`, got neither. Pass one.")
            shift_labels = labels[:, 1:]
            drawn = self._drawn_by(model)
            if drawn is None or drawn.of_tokens:
                layout = self.packing.layout(model, args, kwargs, labels, share=drawn is None)
        shard, factor = self._split(layout, kwargs.get("input_ids"), kwargs.get("attention_mask"), shift_labels)
        # Looked up on each call, because FSDP and PEFT may replace backbone and head after the forward is attached
        backbone_outputs = backbone_of(model)(*args, **kwargs) if layout is None else run_packed(model, layout, kwargs)
        head, device = self._head(model)
        hidden = backbone_outputs.last_hidden_state
        shift_labels = shift_labels.to(device)
        mask_BS = shift_labels != -100
        outputs = self.options.outputs if head_outputs is None else head_outputs
        tokens = hidden.shape[:2].numel() if layout is None else layout.tokens
        self.token_counts[0 if torch.is_grad_enabled() else 1] += tokens
        if layout is None:
            targets_N = shift_labels[mask_BS]
            hidden_NH = hidden[:, width].to(mask_BS.device)[mask_BS]
            classes = None
            if kept is not None:
                index_BS = torch.where(mask_BS, mask_BS.flatten().cumsum(0).view(mask_BS.shape) - 1, -1)
                classes = _kept_classes(*kept, index_BS, len(targets_N))
            scored = self._score(hidden_NH, head, targets_N, outputs, classes)
        else:
            # By index, because with a mask the host would wait for the number of its tokens
            row_N, column_N, same_N = (x.to(device) for x in (layout.row_N, layout.column_N, layout.same_N))
            at_N = layout.at_N.to(hidden.device)
            targets_N = shift_labels[row_N, column_N]
            classes = None
            if kept is not None:
                index_BS = torch.full_like(shift_labels, -1)
                index_BS[row_N, column_N] = torch.arange(len(targets_N), device=device)
                classes = _kept_classes(*kept, index_BS, len(targets_N))
            scored = self._score_row(hidden.squeeze(0), at_N, shard, head, targets_N, outputs, classes)
            if layout.shared and scored.entropy is not None:
                # Rows that share a token may differ in its entropy, because rounding depends on the target. TRL
                # compares entropies (`top_entropy_quantile`)
                scored = scored._replace(entropy=scored.entropy[same_N])
        self.token_counts[2] += len(targets_N)
        if factor != 1.0:
            scored = LinearLogProbs(*(None if x is None else scale_grad(x, factor) for x in scored))

        def spread(x: Tensor) -> Tensor:
            zeros = x.new_zeros(mask_BS.shape)
            return zeros.masked_scatter(mask_BS, x) if layout is None else zeros.index_put_((row_N, column_N), x)

        # Without labels, the loss is 0 and still has a graph, so its backward runs
        fields = {name: None if x is None else spread(x) for name, x in scored._asdict().items()}
        assert scored.log_probs is not None
        count = max(1, len(targets_N)) if num_items_in_batch is None else num_items_in_batch
        loss = scored.log_probs.sum() / -count
        aux_loss = None
        if kwargs.get("output_router_logits"):
            router_logits = getattr(backbone_outputs, "router_logits", None)
            if shard is not None and router_logits:
                router_logits = tuple(shard.whole(x.flatten(0, -2)) for x in router_logits)
            aux_loss = _router_loss(model, self.own_forward, router_logits, kwargs.get("attention_mask"), layout)
            if factor != 1.0:
                aux_loss = scale_grad(aux_loss, factor).clone()  # FSDP2 warns about views in outputs
            loss = loss + getattr(text_config, "router_aux_loss_coef", 0.0) * aux_loss
        return FusedCausalLMOutput(loss=loss, label_mask=mask_BS, aux_loss=aux_loss, **fields)

    def _split(self, layout: Layout | None, *batch: Tensor | None) -> tuple[Shard | None, float]:
        """Return this rank's shard of the row, and the factor that scales the gradient."""
        group = self.sequence_group
        if group is None or group.processes is None:
            return None, 1.0
        tokens = -1 if layout is None else layout.tokens
        if not group.alike(*batch, torch.full((1,), tokens, device=group.device)):
            if not torch.is_grad_enabled():  # for example in evaluation: each rank scores its own batch
                return None, 1.0
            raise RuntimeError(
                f"The {group.size} ranks that split the tokens of a batch (`{group.kind}_size`) got different batches. "
                "If you use your own data loader or collator, make it return the same batch on these ranks, also where "
                "it draws random numbers."
            )
        if layout is None:
            return None, group.gradient_factor / group.size  # each rank scores the whole batch
        layout.shard = shard = group.shard(tokens)
        return shard, group.gradient_factor

    def forget_randomness(self) -> None:
        """Look again, in the next pass, at what the model draws at random."""
        self._randomness_is_known = False

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _drawn_by(self, model: Any) -> Randomness | None:
        """Return what makes equal tokens have different hidden states in this pass."""
        if not self._randomness_is_known:
            self._randomness = randomness_of(model)
            self._randomness_is_known = True
        drawn = self._randomness
        return None if drawn is not None and drawn.in_training_only and not model.training else drawn

    def _score_row(
        self,
        hidden_TH: Tensor,
        at_N: Tensor,
        shard: Shard | None,
        head: LinearHead | OpaqueHead,
        targets_N: Tensor,
        outputs: tuple[str, ...],
        kept: KeptClasses | None,
    ) -> LinearLogProbs:
        """Score each target at its index `at_N` in the packed row. `hidden_TH` is this rank's shard of the row."""
        device = targets_N.device
        if shard is None:
            return self._score(index_select_fp32_grad(hidden_TH, at_N).to(device), head, targets_N, outputs, kept)
        owner_N = shard.owner(at_N)
        own_N = owner_N == shard.rank
        own_on_head_N = own_N.to(device)
        hidden_NH = index_select_fp32_grad(hidden_TH, at_N[own_N] - shard.first).to(device)
        own_kept = None if kept is None else kept.of_tokens(own_on_head_N)
        scored = self._score(hidden_NH, head, targets_N[own_on_head_N], outputs, own_kept)
        owner_N = owner_N.to(device)
        return LinearLogProbs(*(None if x is None else shard.gathered(x, owner_N) for x in scored))

    def _score(
        self,
        hidden_NH: Tensor,
        head: LinearHead | OpaqueHead,
        targets_N: Tensor,
        outputs: tuple[str, ...],
        kept: KeptClasses | None,
        *,
        check: bool = True,
    ) -> LinearLogProbs:
        options = self.options
        common: dict[str, Any] = {
            "transform": self.transform,
            "outputs": outputs,
            "entropy_requires_grad": options.entropy_requires_grad,
            "chunk_size": options.chunk_size,
            "kept": kept,
        }
        if isinstance(head, OpaqueHead):
            self.head_rows = f"{head.described}, because {head.reason}"
            return score_by_module(
                *(head.run, hidden_NH, targets_N),
                vocabulary=self.vocabulary,
                head="dense" if head.at_once else options.head,
                **common,
            )
        autocast: AbstractContextManager[Any] = nullcontext()
        if options.cast_lm_head_to_fp32:
            hidden_NH = hidden_NH.float()
            autocast = torch.autocast(hidden_NH.device.type, enabled=False)
        entropy_grad = options.entropy_requires_grad and "entropy" in outputs
        whole = options.head == "dense"
        rows = weight_layout_of(
            *(head, hidden_NH), outputs=outputs, whole=whole, entropy_grad=entropy_grad, limited=kept is not None
        )
        self.head_rows = rows.reason
        # Every rank enters once, even one without a token to check
        with autocast, rows.readable():
            # Inference mode records no gradients, so the first batch outside of it is checked
            if check and options.head != "dense" and not torch.is_inference_mode_enabled():
                self._check(hidden_NH, head, rows, targets_N, outputs)
            return run_head(
                *(options.head, hidden_NH, rows.weight, targets_N),
                bias=rows.bias,
                kernels=options.kernels,
                readable=rows.readable,
                shard=rows.shard,
                **common,
                **rows.adapter.operands(hidden_NH, rows.weight),
            )

    def _set_transform(self, transform: LogitTransform | None) -> None:
        """Score with `transform`; if it is None, with the model's own code."""
        self.runs_model_code = transform is None
        self.transform = LogitTransform(self.options.temperature) if transform is None else transform

    def _head(self, model: Any) -> tuple[LinearHead | OpaqueHead, torch.device]:
        """Return what computes logits from hidden states, and its device: with `device_map`, not that of all layers."""
        lm_head = model.get_output_embeddings()
        if self.runs_model_code:
            run = functools.partial(logits_of, model, self.own_forward)
            reason = "it does more than a product, a scale and a softcap"
            # A call of a sharded module has collectives, so all ranks make one, not one for each of their tiles
            at_once = any(isinstance(x, DTensor) or is_zero3(x) for x in model.parameters())
            head = OpaqueHead(run, reason, described="the model's own forward computes the logits", at_once=at_once)
            return head, next(lm_head.parameters()).device
        found = resolve_head(lm_head)
        if isinstance(found, OpaqueHead):
            return found, next(lm_head.parameters()).device
        return found, parameter_of(found.linear, "weight").device

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _compare_with_model(self, model: Any, device: torch.device, *, has_mask: bool) -> None:
        """Compare log-probs of 8 tokens with those of the model's own logits. If they differ, run the model's code.

        Every rank runs the same forwards on the same tokens, so all decide the same.

        Raises:
            `RuntimeError`: they differ, and the model's code does not run without its backbone.
        """
        sample = ModelSample.of(model, self.own_forward, self.vocabulary, device, has_mask=has_mask)
        if sample is None:
            return
        difference = self._difference(model, sample)
        if difference is None:
            return
        # The tiled head or an adapter may be the cause: their checks say so
        self._difference(model, sample, check=True)
        transform = self.transform
        try:
            self._set_transform(None)
            if self._difference(model, sample) is None:
                reason = self.difference_from_trl
                logger.warning(f"Log-probs differ from TRL's, which are not those of the model's logits: {reason}.")
                return
        except Exception as error:  # of the model's code, on what a stand-in returns
            logger.debug(f"{self.model_class} does not run without its backbone: {error}")
        self._set_transform(transform)
        again = ModelSample.of(model, self.own_forward, self.vocabulary, device, has_mask=has_mask)
        # A forward that draws at random in evaluation mode too, for example in a user's hook, cannot be compared
        if again is not None and again.repeats(sample):
            raise RuntimeError(
                f"The log-probs of {self.model_class} differ from `log_softmax` of its logits {difference}. Training "
                "would be wrong, as it is in TRL. The forward must compute logits from the `last_hidden_state` of the "
                "backbone, and pass its inputs to the backbone unchanged. Change its code, or use another model."
            )

    def _difference(self, model: Any, sample: ModelSample, *, check: bool = False) -> str | None:
        """Return by how much the log-probs of our head differ from those of the model's logits, or None."""
        head, device = self._head(model)
        classes_K = sample.classes_K.to(device)
        hidden_NH = sample.hidden_NH.to(device).repeat_interleave(len(classes_K), 0)
        targets_N = classes_K.repeat(len(sample.hidden_NH))
        with nullcontext() if check else torch.no_grad():
            scored = self._score(hidden_NH, head, targets_N, ("log_probs",), None, check=check)
        assert scored.log_probs is not None
        return difference_reason(scored.log_probs, sample, self.options.temperature)

    @property
    def difference_from_trl(self) -> str | None:
        """Why log-probs differ from TRL's, which are then not those of the model's logits."""
        if self.runs_model_code:
            found = "computes more than a product between its last hidden states and its logits, which TRL leaves out"
        elif not self.transform.is_close(self.trl_transform):
            found = f"multiplies its logits by {self.transform.described}, and TRL by {self.trl_transform.described}"
        else:
            return None
        return f"{self.model_class} {found}"

    def _check(
        self, hidden_NH: Tensor, head: LinearHead, rows: WeightLayout, targets_N: Tensor, outputs: tuple[str, ...]
    ) -> None:
        """Compare the tiled head with its definition, once for each path through the head."""
        # A sharded weight is a separate path, so that either all ranks check it or none
        entropy_grad = self.options.entropy_requires_grad
        way = rows.sharded is not None, "mean_log_probs" in outputs, entropy_grad, head.description
        if way not in self._checked and check_head(
            *(hidden_NH, rows, targets_N),
            transform=self.transform,
            outputs=tuple(dict.fromkeys((*self.options.outputs, *outputs))),
            entropy_requires_grad=entropy_grad,
            kernels=self.options.kernels,
        ):
            self._checked.add(way)
            if head.module is not None:
                check_adapter(hidden_NH, head.module, rows)


def _kept_classes(ids_BK: Tensor, counts_BC: Tensor, index_BS: Tensor, tokens: int) -> KeptClasses:
    """Return the kept classes of the scored tokens, whose index is in `index_BS`, -1 elsewhere."""
    ids_BK, counts_BC = ids_BK.to(index_BS.device), counts_BC.to(index_BS.device)
    return KeptClasses.of_rows(ids_BK, counts_BC, index_BS[:, -counts_BC.size(1) :], tokens)


def attach_scoring_forward(model: Any, options: ScoringOptions, argument: str = "model") -> ScoringForward:
    """Make `model(..., fused_lm_head=True)` score tokens. `model` is the model inside its wrappers.

    Args:
        argument (`str`): the trainer's argument that is this model, for errors.

    Raises:
        `ValueError`: the model is no decoder-only language model, or `cast_lm_head_to_fp32` is set and the head has an
            adapter.
    """
    check_decoder(model, argument)
    if options.cast_lm_head_to_fp32:
        head = resolve_head(model.get_output_embeddings())
        if isinstance(head, OpaqueHead) or head.module is not None:
            # TRL would replace the head's forward by that of a linear layer, so generation would ignore the adapter
            raise ValueError(
                "`cast_lm_head_to_fp32=True` is not supported with an adapter on the LM head. Set it to False, leave "
                "`lm_head` out of the adapter, or train it with `modules_to_save`."
            )
    # None for the class's forward: then a deep copy of the model calls its own forward
    of_instance = model.__dict__.get("forward")

    def own_forward(model: Any, *args: Any, **kwargs: Any) -> Any:
        return type(model).forward(model, *args, **kwargs) if of_instance is None else of_instance(*args, **kwargs)

    scoring = ScoringForward(model, options, own_forward)

    # Keeps the model's signature, against which `generate` checks its arguments
    @functools.wraps(type(model).forward)
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if fused_lm_head:
            return scoring(self, *args, **kwargs)
        return own_forward(self, *args, **kwargs)

    model.forward = types.MethodType(forward, model)
    return scoring


def _router_loss(
    model: Any,
    own_forward: OwnForward,
    router_logits: tuple[Tensor, ...] | None,
    attention_mask: Tensor | None,
    layout: Layout | None,
) -> Tensor:
    """Return the load-balancing loss of a mixture of experts, from one tensor of router logits per layer."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    config = model.config.get_text_config()
    if not router_logits:
        # Doge and Flint, for example, can be configured without experts. Then there is no load, and TRL crashes
        return model.get_output_embeddings().weight.new_zeros((), dtype=torch.float32)
    if layout is not None:
        # A shared token counts once per row, as in the padded batch
        real_N = layout.real_places().to(router_logits[0].device)
        router_logits = tuple(index_select_fp32_grad(x.flatten(0, -2), real_N.to(x.device)) for x in router_logits)
        attention_mask = None
    experts = router_logits[0].shape[-1]
    chosen = next((x for name in _CHOSEN_EXPERTS if (x := getattr(config, name, None)) is not None), None)
    if getattr(config, "num_experts", None) != experts or chosen is None:
        # TRL crashes here. GraniteMoE has another name for `num_experts`, and the logits of Doge are not of experts
        try:
            loss = router_loss_of(model, own_forward, router_logits, attention_mask)
        except Exception as error:  # of the model's code, on what a stand-in returns
            logger.debug(f"{type(model).__name__} computes no router loss without its backbone: {error}")
            loss = None
        if loss is not None:
            return loss
    if chosen is None:
        raise ValueError(
            f"The router loss of {type(model).__name__} is unknown: its config does not say how many experts a token "
            "gets. Set `router_aux_loss_coef=0.0` to train without it."
        )
    return load_balancing_loss_func(router_logits, experts, chosen, attention_mask)
