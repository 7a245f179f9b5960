"""The scoring forward of a model: it takes a padded batch and returns per-token log-probs.

It replaces TRL's fused head: `model(**inputs, labels=labels, fused_lm_head=True)` returns a `FusedCausalLMOutput`,
also through wrappers such as PEFT and DDP. Calls without `fused_lm_head` run the model's own forward.
"""

import functools
import logging
import types
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..distributed.gradients import scale_grad
from ..distributed.sequence_parallel import SequenceGroup, Shard
from ..distributed.shards import is_zero3, parameter_of
from ..heads.linear_log_probs import run_head
from ..heads.logits import LinearLogProbs, LogitTransform
from ..heads.sampling_mask import SamplingMask
from ..packing.attention import index_select_fp32_grad, run_packed
from ..packing.layout import Layout
from ..packing.packing import Packing, has_other_ranks
from ..packing.randomness import (
    randomness_without_hooks,
)
from ..packing.support import backbone_of
from ..routing.routers import Routers, by_forward
from ..routing.routes import HostRoutes, PackedRoutes, of_batch
from .backbone import BackboneForward
from .checks import check_adapter, check_head
from .head import LinearHead, OpaqueHead, logit_transform, resolve_head, score_by_module
from .model_check import ModelSample, difference_reason
from .model_inputs import check_decoder
from .model_logits import ForwardNotReadError, ModelForward, logits_of, read_transform
from .output import FusedCausalLMOutput
from .router_loss import router_loss
from .weight_layout import WeightLayout, weight_layout_of

logger = logging.getLogger("trl_ext")


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


class _PaddedTokens:
    """The N scored tokens of a padded batch, in the order of their mask. Labels are shifted: `(B, S)`."""

    def __init__(self, labels_BS: Tensor) -> None:
        self.mask_BS = labels_BS != -100
        self.targets_N = labels_BS[self.mask_BS]

    def numbers(self) -> Tensor:
        """Return the number of each scored token among the N: `(B, S)`, -1 for the other tokens."""
        return torch.where(self.mask_BS, self.mask_BS.flatten().cumsum(0).view(self.mask_BS.shape) - 1, -1)

    def scatter(self, values_N: Tensor) -> Tensor:
        return values_N.new_zeros(self.mask_BS.shape).masked_scatter(self.mask_BS, values_N)


class _PackedTokens:
    """The N scored tokens of a packed row, in the order of its layout. Labels are shifted: `(B, S)`.

    They are found by index, because with a mask the host would wait for the number of its tokens.
    """

    def __init__(self, labels_BS: Tensor, layout: Layout) -> None:
        self.mask_BS = labels_BS != -100
        self.row_N = layout.row_N.to(labels_BS.device)
        self.column_N = layout.column_N.to(labels_BS.device)
        self.targets_N = labels_BS[self.row_N, self.column_N]

    def numbers(self) -> Tensor:
        """Return the number of each scored token among the N: `(B, S)`, -1 for the other tokens."""
        numbers_BS = torch.full(self.mask_BS.shape, -1, device=self.mask_BS.device)
        numbers_BS[self.row_N, self.column_N] = torch.arange(len(self.targets_N), device=self.mask_BS.device)
        return numbers_BS

    def scatter(self, values_N: Tensor) -> Tensor:
        return values_N.new_zeros(self.mask_BS.shape).index_put_((self.row_N, self.column_N), values_N)


class HeadInputs(NamedTuple):
    """What the head computes the logits of N tokens from. The tokens are in the order of rows, then columns."""

    hidden: Tensor  # (N, H), of the tokens that predict a label
    head: LinearHead
    transform: LogitTransform
    mask: Tensor  # (B, S - 1), bool: the tokens that predict a label

    def at_temperature(self, temperature: float) -> "HeadInputs":
        return self._replace(transform=replace(self.transform, temperature=temperature))


class ScoringForward(BackboneForward):
    """The scoring forward of one model."""

    sequence_group: SequenceGroup | None = None  # the ranks over which the tokens of a row are split

    def __init__(self, model: Any, options: ScoringOptions, model_forward: ModelForward) -> None:
        super().__init__(model, Packing(model, padding_free=options.padding_free, share_prompts=options.share_prompts))
        self.options = options
        self.model_forward = model_forward  # the model's, which returns logits
        self.trl_transform: LogitTransform = logit_transform(model.config, options.temperature)
        self.transform = self.trl_transform
        self.runs_model_code = False  # whether the model's forward computes the logits, because no transform gives them
        try:
            transform = read_transform(model, model_forward, self.trl_transform)
        except ForwardNotReadError:
            pass  # the first batch shows whether the config's numbers are right
        else:
            self._set_transform(transform)
        self.vocabulary: int = model.config.get_text_config().vocab_size
        self.head_rows: str | None = None  # which rows of the head's weight the last pass used, and why
        self.routers: Routers | None = None  # if routes are recorded or replayed
        self.recorded_routes: list[Tensor] | None = None  # `(B, S, L, k)` of each forward; None: not recorded
        # Of the packed rows since they were last read: tokens with the known route of another row, and other routes
        self.shared_routes = 0
        self.conflicts = 0
        self._checked_paths: set[tuple[bool, bool, bool, str]] = set()

    @property
    def facts(self) -> dict[str, Any]:
        return {
            "forward": asdict(self.options),
            "transform": repr(self.transform),
            "runs_model_code": self.runs_model_code,
        }

    def __call__(
        self,
        model: Any,
        *args: Any,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        head_outputs: tuple[str, ...] | None = None,
        sampling_mask: tuple[Tensor, Tensor] | None = None,
        routes: HostRoutes | None = None,
        **kwargs: Any,
    ) -> FusedCausalLMOutput:
        """Score the positions whose next-token label is not -100.

        Args:
            labels (`Tensor` of shape `(B, S)`): not shifted yet. The fields of the result have shape `(B, S - 1)`.
            shift_labels (`Tensor` of shape `(B, S)`): already shifted, as under context parallelism. The fields of the
                result have shape `(B, S)`.
            head_outputs (`tuple[str, ...]`, *optional*): per-token fields to compute, including `log_probs`. `None`
                computes those of the options.
            sampling_mask (`tuple[Tensor, Tensor]`, *optional*): with `labels`, the classes over which the last C tokens
                of each row are normalised: ids `(B, K)`, one token after another, and how many each token has,
                `(B, C)`. Tokens that have none are normalised over the vocabulary.
            routes (`HostRoutes`, *optional*): the experts that the routers use.

        Raises:
            `ValueError`: neither `labels` nor `shift_labels` is given.
            `RuntimeError`: ranks that split a batch got different batches, or the head fails its check.
        """
        self.was_called = True
        is_shifted = shift_labels is not None
        if shift_labels is None:
            if labels is None:
                raise ValueError("`fused_lm_head=True` needs `labels` or `shift_labels`, got neither. Pass one.")
            shift_labels = labels[:, 1:]
        if not self.is_compared:
            self.is_compared = True
            self._compare_with_model(model, shift_labels.device, has_mask=kwargs.get("attention_mask") is not None)
        kwargs["use_cache"] = False
        if getattr(model.config.get_text_config(), "output_router_logits", False):
            kwargs.setdefault("output_router_logits", True)
        # Shifted labels come with a shard of each sequence, as under context parallelism, which cannot be packed
        layout = None if is_shifted else self._layout(model, args, kwargs, labels)
        shard, gradient_factor = self._split(
            layout, kwargs.get("input_ids"), kwargs.get("attention_mask"), shift_labels
        )
        # Looked up on each call, because FSDP and PEFT may replace backbone and head after the forward is attached
        with self._routed(model, shift_labels if labels is None else labels, layout, routes):
            backbone_outputs = (
                backbone_of(model)(*args, **kwargs) if layout is None else run_packed(model, layout, kwargs)
            )
        hidden = backbone_outputs.last_hidden_state
        head, device = self._head(model)
        shift_labels = shift_labels.to(device)
        tokens = _PaddedTokens(shift_labels) if layout is None else _PackedTokens(shift_labels, layout)
        classes = None if sampling_mask is None else _classes_of(sampling_mask, tokens)
        outputs = self.options.outputs if head_outputs is None else head_outputs
        if layout is None:
            hidden_BSH = hidden if is_shifted else hidden[:, :-1]  # the last token has no label to predict
            hidden_NH = hidden_BSH.to(device)[tokens.mask_BS]
            scores = self._score(hidden_NH, head, tokens.targets_N, outputs, classes)
        else:
            scores = self._score_packed(hidden.squeeze(0), layout, shard, head, tokens.targets_N, outputs, classes)
        if gradient_factor != 1.0:
            # The engine averages over the ranks that split a sequence, whose gradients must be summed
            scores = LinearLogProbs(*(None if x is None else scale_grad(x, gradient_factor) for x in scores))
        self._count(hidden.shape[:2].numel() if layout is None else layout.tokens, len(tokens.targets_N))
        fields = {name: None if x is None else tokens.scatter(x) for name, x in scores._asdict().items()}
        assert scores.log_probs is not None
        # Without labels, the loss is 0 and still has a graph, so its backward runs
        items = max(1, len(tokens.targets_N)) if num_items_in_batch is None else num_items_in_batch
        loss = scores.log_probs.sum() / -items
        aux_loss = None
        if kwargs.get("output_router_logits"):
            router_logits = getattr(backbone_outputs, "router_logits", None)
            if shard is not None and router_logits:
                # The load of an expert is counted over all tokens, of which each rank has a shard
                router_logits = tuple(shard.whole(x.flatten(0, -2)) for x in router_logits)
            aux_loss = router_loss(model, self.model_forward, router_logits, kwargs.get("attention_mask"), layout)
            if gradient_factor != 1.0:
                aux_loss = scale_grad(aux_loss, gradient_factor).clone()  # FSDP2 warns about views in outputs
            loss = loss + getattr(model.config.get_text_config(), "router_aux_loss_coef", 0.0) * aux_loss
        return FusedCausalLMOutput(loss=loss, label_mask=tokens.mask_BS, aux_loss=aux_loss, **fields)

    @contextmanager
    def _routed(
        self, model: Any, labels_BS: Tensor, layout: Layout | None, routes: HostRoutes | None
    ) -> Iterator[None]:
        """Replay or record routes in the `with` block, which runs the backbone on the batch with these labels."""
        routers = self.routers
        if routers is not None and routes is not None:
            routes_NLk = routes.routes_BSLk.flatten(0, 1)
            if layout is not None:
                packed_routes = PackedRoutes.of(routes.routes_BSLk, layout)
                routes_NLk = packed_routes.routes_TLk
                self.shared_routes += packed_routes.shared
                self.conflicts += packed_routes.conflicts
            with routers.replaying(model, routes_NLk):
                yield
        elif routers is not None and self.recorded_routes is not None:
            with routers.recording() as calls:
                yield
            (routes_NLk,) = by_forward(calls)
            if layout is None:
                self.recorded_routes.append(routes_NLk.unflatten(0, labels_BS.shape))
            else:
                self.recorded_routes.append(of_batch(routes_NLk, layout))
        else:
            yield

    def head_inputs(self, model: Any, labels: Tensor, **kwargs: Any) -> HeadInputs:
        """Run the backbone, and return what a divergence of two heads reads.

        Args:
            labels (`Tensor` of shape `(B, S)`): not shifted yet, -100 where nothing is predicted.

        Raises:
            `ValueError`: the head is not a linear layer without adapters.
        """
        self.was_called = True
        if not self.is_compared:
            self.is_compared = True
            self._compare_with_model(model, labels.device, has_mask=kwargs.get("attention_mask") is not None)
        head, device = self.linear_head(model)
        kwargs["use_cache"] = False
        layout = self._layout(model, (), kwargs, labels)
        mask_BS = labels[:, 1:].to(device) != -100
        if layout is None:
            hidden_BSH = backbone_of(model)(**kwargs).last_hidden_state
            hidden_NH = hidden_BSH[:, :-1].to(device)[mask_BS]
            self._count(hidden_BSH.shape[:2].numel(), len(hidden_NH))
        else:
            hidden_TH = run_packed(model, layout, kwargs).last_hidden_state.squeeze(0)
            hidden_NH = index_select_fp32_grad(hidden_TH, layout.at_N.to(hidden_TH.device)).to(device)
            self._count(layout.tokens, len(hidden_NH))
        return HeadInputs(hidden_NH, head, self.transform, mask_BS)

    def linear_head(self, model: Any) -> tuple[LinearHead, torch.device]:
        """Return the model's head and its device.

        Raises:
            `ValueError`: it is not a linear layer without adapters.
        """
        head, device = self._head(model)
        if isinstance(head, OpaqueHead) or head.module is not None:
            reason = head.reason if isinstance(head, OpaqueHead) else f"it has an adapter ({head.description})"
            raise ValueError(
                f"The divergence of two heads needs a linear LM head, but that of `{self.model_class}` is another: "
                f"{reason}. Leave `lm_head` out of the adapter, or train it with `modules_to_save`."
            )
        return head, device

    def _split(self, layout: Layout | None, *batch_tensors: Tensor | None) -> tuple[Shard | None, float]:
        """Return this rank's shard of the row, and the factor that scales the gradient."""
        group = self.sequence_group
        if group is None or group.processes is None:
            return None, 1.0
        tokens = -1 if layout is None else layout.tokens
        if not group.alike(*batch_tensors, torch.full((1,), tokens, device=group.device)):
            if not torch.is_grad_enabled():  # for example in evaluation: each rank scores its own batch
                return None, 1.0
            raise RuntimeError(
                f"The {group.size} ranks that split the tokens of a batch (`{group.kind}_size`) got different batches. "
                "If you use your own data loader or collator, make it return the same batch on these ranks, also where "
                "it draws random numbers."
            )
        if layout is None:
            return None, group.gradient_factor / group.size  # each rank scores the whole batch
        shard = group.shard(tokens)
        layout.shard = shard
        return shard, group.gradient_factor

    def _score_packed(
        self,
        hidden_TH: Tensor,
        layout: Layout,
        shard: Shard | None,
        head: LinearHead | OpaqueHead,
        targets_N: Tensor,
        outputs: tuple[str, ...],
        classes: SamplingMask | None,
    ) -> LinearLogProbs:
        """Score each target at its index in the packed row. `hidden_TH` is this rank's shard of the row."""
        at_N = layout.at_N.to(hidden_TH.device)
        if shard is None:
            hidden_NH = index_select_fp32_grad(hidden_TH, at_N).to(targets_N.device)
            scores = self._score(hidden_NH, head, targets_N, outputs, classes)
        else:
            scores = self._score_shard(hidden_TH, at_N, shard, head, targets_N, outputs, classes)
        if layout.shares_tokens and scores.entropy is not None:
            # Rows that share a token may differ in its entropy, because rounding depends on the target. TRL compares
            # entropies (`top_entropy_quantile`)
            scores = scores._replace(entropy=scores.entropy[layout.same_N.to(targets_N.device)])
        return scores

    def _score_shard(
        self,
        hidden_cH: Tensor,
        at_N: Tensor,
        shard: Shard,
        head: LinearHead | OpaqueHead,
        targets_N: Tensor,
        outputs: tuple[str, ...],
        classes: SamplingMask | None,
    ) -> LinearLogProbs:
        """Score the targets whose tokens are in this rank's shard of the row, c long; gather those of all ranks."""
        device = targets_N.device
        # n of the N tokens are in this rank's shard
        owner_N = shard.owner(at_N)
        in_shard_N = owner_N == shard.rank
        scored_here_N = in_shard_N.to(device)
        hidden_nH = index_select_fp32_grad(hidden_cH, at_N[in_shard_N] - shard.first).to(device)
        classes_n = None if classes is None else classes.of_tokens(scored_here_N)
        scores = self._score(hidden_nH, head, targets_N[scored_here_N], outputs, classes_n)
        owner_N = owner_N.to(device)
        return LinearLogProbs(*(None if x is None else shard.gathered(x, owner_N) for x in scores))

    def _score(
        self,
        hidden_NH: Tensor,
        head: LinearHead | OpaqueHead,
        targets_N: Tensor,
        outputs: tuple[str, ...],
        classes: SamplingMask | None,
        *,
        check: bool = True,
    ) -> LinearLogProbs:
        options = self.options
        common: dict[str, Any] = {
            "transform": self.transform,
            "outputs": outputs,
            "entropy_requires_grad": options.entropy_requires_grad,
            "chunk_size": options.chunk_size,
            "sampling_mask": classes,
        }
        if isinstance(head, OpaqueHead):
            self.head_rows = f"{head.description}, because {head.reason}"
            return score_by_module(
                head.run,
                hidden_NH,
                targets_N,
                vocabulary=self.vocabulary,
                head="dense" if head.runs_once else options.head,
                **common,
            )
        autocast: AbstractContextManager[Any] = nullcontext()
        if options.cast_lm_head_to_fp32:
            hidden_NH = hidden_NH.float()
            autocast = torch.autocast(hidden_NH.device.type, enabled=False)
        rows = weight_layout_of(
            head,
            hidden_NH,
            outputs=outputs,
            whole=options.head == "dense",
            entropy_grad=options.entropy_requires_grad and "entropy" in outputs,
            has_sampling_mask=classes is not None,
        )
        self.head_rows = rows.reason
        # Every rank enters once, even one without a token to check
        with autocast, rows.readable():
            # Inference mode records no gradients, so the first batch outside of it is checked
            if check and options.head != "dense" and not torch.is_inference_mode_enabled():
                self._check(hidden_NH, head, rows, targets_N, outputs)
            return run_head(
                options.head,
                hidden_NH,
                rows.weight,
                targets_N,
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
            run = functools.partial(logits_of, model, self.model_forward)
            reason = "it does more than a product, a scale and a softcap"
            # A call of a sharded module has collectives, so all ranks make one, not one for each of their tiles
            is_sharded = any(isinstance(x, DTensor) or is_zero3(x) for x in model.parameters())
            description = "the model's own forward computes the logits"
            head: LinearHead | OpaqueHead = OpaqueHead(run, reason, description, runs_once=is_sharded)
        else:
            head = resolve_head(lm_head)
        if isinstance(head, OpaqueHead):
            return head, next(lm_head.parameters()).device
        return head, parameter_of(head.linear, "weight").device

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _compare_with_model(self, model: Any, device: torch.device, *, has_mask: bool) -> None:
        """Compare log-probs of 8 tokens with those of the model's own logits. If they differ, run the model's code.

        Every rank runs the same forwards on the same tokens, so all decide the same.

        Raises:
            `RuntimeError`: they differ, and the model's code does not run without its backbone.
        """
        randomness = None if has_other_ranks() else randomness_without_hooks(model)
        if randomness is not None:  # one more forward would change the user's draws
            logger.warning(
                f"The log-probs of {self.model_class} were not compared with its own logits: {randomness.reason}."
            )
            return
        sample = self._sample(model, device, has_mask)
        if sample is None:
            return
        difference = self._difference(model, sample)
        if difference is None:
            self.agrees_with_model = True
            return
        # The tiled head or an adapter may be the cause: their checks say so
        self._difference(model, sample, check=True)
        transform = self.transform
        try:
            self._set_transform(None)
            if self._difference(model, sample) is None:
                reason = self.difference_from_trl
                logger.warning(f"TRL's log-probs are not those of the model's logits, but trl_ext's are: {reason}.")
                return
        except Exception as error:  # of the model's code, on what a stand-in returns
            logger.debug(f"{self.model_class} does not run without its backbone: {error}")
        self._set_transform(transform)
        second_sample = self._sample(model, device, has_mask)
        # A forward that draws at random in evaluation mode too, for example in a user's hook, cannot be compared
        if second_sample is not None and second_sample.repeats(sample):
            raise RuntimeError(
                f"The log-probs of {self.model_class} differ from `log_softmax` of its logits {difference}. Training "
                "would be wrong, as it is in TRL. The forward must compute logits from the `last_hidden_state` of the "
                "backbone, and pass its inputs to the backbone unchanged. Change the model's code, or use another "
                "model."
            )

    def _sample(self, model: Any, device: torch.device, has_mask: bool) -> ModelSample | None:
        sample = ModelSample.of(model, self.model_forward, self.vocabulary, device, has_mask=has_mask)
        if sample is not None:
            self.counts = self.counts._replace(checks=self.counts.checks + sample.processed_tokens)
        return sample

    def _difference(self, model: Any, sample: ModelSample, *, check: bool = False) -> str | None:
        """Return by how much the log-probs of our head differ from those of the model's logits, or None."""
        head, device = self._head(model)
        classes_K = sample.classes_K.to(device)
        hidden_NH = sample.hidden_NH.to(device).repeat_interleave(len(classes_K), 0)
        targets_N = classes_K.repeat(len(sample.hidden_NH))
        with nullcontext() if check else torch.no_grad():
            scores = self._score(hidden_NH, head, targets_N, ("log_probs",), None, check=check)
        assert scores.log_probs is not None
        return difference_reason(scores.log_probs, sample, self.options.temperature)

    @property
    def difference_from_trl(self) -> str | None:
        """Why log-probs differ from TRL's, which are then not those of the model's logits."""
        if self.runs_model_code:
            difference = (
                "computes more than a product between its last hidden states and its logits, and TRL computes only the "
                "product"
            )
        elif not self.transform.is_close(self.trl_transform):
            scale, trl_scale = self.transform.description, self.trl_transform.description
            difference = f"multiplies its logits by {scale}, and TRL by {trl_scale}"
        else:
            return None
        return f"{self.model_class} {difference}"

    def _check(
        self, hidden_NH: Tensor, head: LinearHead, rows: WeightLayout, targets_N: Tensor, outputs: tuple[str, ...]
    ) -> None:
        """Compare the tiled head with its definition, once for each path through the head."""
        # A sharded weight is a separate path, so that either all ranks check it or none
        entropy_grad = self.options.entropy_requires_grad
        path = (rows.sharded is not None, "mean_log_probs" in outputs, entropy_grad, head.description)
        if path in self._checked_paths:
            return
        has_token = check_head(
            hidden_NH,
            rows,
            targets_N,
            transform=self.transform,
            outputs=tuple(dict.fromkeys((*self.options.outputs, *outputs))),
            entropy_requires_grad=entropy_grad,
            kernels=self.options.kernels,
        )
        if has_token:
            self._checked_paths.add(path)
            if head.module is not None:
                check_adapter(hidden_NH, head.module, rows)


def _classes_of(sampling_mask: tuple[Tensor, Tensor], tokens: _PaddedTokens | _PackedTokens) -> SamplingMask:
    """Return the classes over which the scored tokens are normalised, from those of the last C tokens of each row."""
    ids_BK, counts_BC = (x.to(tokens.targets_N.device) for x in sampling_mask)
    numbers_BC = tokens.numbers()[:, -counts_BC.size(1) :]
    return SamplingMask.of_rows(ids_BK, counts_BC, numbers_BC, len(tokens.targets_N))


def attach_scoring_forward(model: Any, options: ScoringOptions, argument: str = "model") -> ScoringForward:
    """Make `model(..., fused_lm_head=True)` score tokens. `model` is the model inside its wrappers.

    Args:
        argument (`str`): the trainer's argument that is this model, for errors.

    Raises:
        `ValueError`: the model is no decoder-only language model, or `cast_lm_head_to_fp32` is set and the head has an
            adapter or is no linear layer.
    """
    check_decoder(model, argument)
    if options.cast_lm_head_to_fp32:
        head = resolve_head(model.get_output_embeddings())
        if isinstance(head, OpaqueHead) and not head.in_adapter:
            raise ValueError(
                f"`cast_lm_head_to_fp32=True` is not supported with this model's LM head: {head.reason}, not a plain "
                "`torch.nn.Linear`. Set it to False."
            )
        if isinstance(head, OpaqueHead) or head.module is not None:
            # TRL would replace the head's forward by that of a linear layer, so generation would ignore the adapter
            raise ValueError(
                "`cast_lm_head_to_fp32=True` is not supported with an adapter on the LM head. Set it to False, leave "
                "`lm_head` out of the adapter, or train the head with `modules_to_save`."
            )
    # None for the class's forward: then a deep copy of the model calls its own forward
    instance_forward = model.__dict__.get("forward")

    def model_forward(model: Any, *args: Any, **kwargs: Any) -> Any:
        if instance_forward is None:
            return type(model).forward(model, *args, **kwargs)
        return instance_forward(*args, **kwargs)

    scoring = ScoringForward(model, options, model_forward)

    # Keeps the model's signature, against which `generate` checks its arguments
    @functools.wraps(type(model).forward)
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if fused_lm_head:
            return scoring(self, *args, **kwargs)
        return model_forward(self, *args, **kwargs)

    model.forward = types.MethodType(forward, model)
    return scoring
