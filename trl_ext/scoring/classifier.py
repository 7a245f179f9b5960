"""The forward of a sequence classifier on a packed row: its own score head runs on one hidden state of each row.

It replaces the model's forward, inside wrappers such as PEFT and DDP, and returns equal logits. Where that is not
certain, the model's own forward runs, and the plan says why.

Dimensions: B rows, S columns, H hidden size, L labels, T packed tokens.
"""

import functools
import logging
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..packing.attention import index_select_fp32_grad, run_packed
from ..packing.first_batch import is_coarse, is_of_libraries, undisturbed
from ..packing.packing import Packing, has_other_ranks
from ..packing.randomness import randomness_without_hooks
from ..packing.support import backbone_of, has_batch_norm
from .backbone import BackboneForward
from .model_check import COARSE_TOLERANCE, TOLERANCE, token_ids
from .model_logits import ModelForward
from .scorer import Scorer

logger = logging.getLogger("trl_ext")

_PADDING = 3  # of the second row that is compared
# Arguments of the model's own forward that its logits do not depend on. TRL passes a batch's margins to the model
_UNREAD_ARGUMENTS = ("margin",)
# What the model returns besides logits
_FURTHER_OUTPUTS = ("output_hidden_states", "output_attentions")


def pooled_columns(ids_BS: Tensor, pad_id: int) -> Tensor:
    """Return `(B,)`, the column whose logits transformers returns: that of the last token other than `pad_id`.

    It is 0 in a row that has no other token. The attention mask plays no part, so that with a padding token that also
    ends rows, it is the column before that end.
    """
    columns_S = torch.arange(ids_BS.shape[1], device=ids_BS.device)
    return (columns_S * (ids_BS != pad_id)).argmax(dim=1)


def unknown_reason(model: Any) -> str | None:
    """Return why it is not known that the logits are those of the score head at the pooled column; None if it is."""
    if _replaced_forward(model) is not None and not hasattr(model, "_hf_hook"):
        return f"something has replaced the forward of `{type(model).__name__}`"
    return unknown_class_reason(model)


def unknown_class_reason(model: Any) -> str | None:
    """Return why the class of `model` or of its score head leaves that unknown."""
    from transformers.modeling_layers import GenericForSequenceClassification

    name = type(model).__name__
    if type(model).forward is not GenericForSequenceClassification.forward:
        return f"`{name}` has a forward of its own, so which token it pools is not known"
    score = getattr(model, "score", None)
    if score is None or has_batch_norm(score) or not is_of_libraries(score):
        return f"the score head of `{name}` may do more than score each token"
    return None


def _replaced_forward(model: Any) -> Any:
    """Return the forward in place of the class's; None if there is none, or it is of an earlier trainer."""
    forward = vars(model).get("forward")
    return None if hasattr(forward, "of_classifier") else forward


class ClassifierForward(BackboneForward):
    """The forward of one sequence classifier."""

    def __init__(self, model: Any, model_forward: ModelForward, *, padding_free: bool, share_prompts: bool) -> None:
        super().__init__(model, Packing(model, padding_free=padding_free, share_prompts=share_prompts))
        self.model_forward = model_forward
        self.packing.padded_reason = self.packing.padded_reason or unknown_reason(model)

    @property
    def facts(self) -> dict[str, Any]:
        return {"forward": "classifier"}

    def __call__(self, model: Any, *args: Any, **inputs: Any) -> Any:
        """Return what the model's own forward returns for a batch of B rows: logits `(B, L)`, and no more."""
        from transformers.modeling_outputs import SequenceClassifierOutputWithPast

        self.was_called = True
        logits_BL = self._score_packed(model, args, {name: x for name, x in inputs.items() if x is not None})
        if logits_BL is not None:
            return SequenceClassifierOutputWithPast(logits=logits_BL)
        ids_BS = inputs.get("input_ids")
        if ids_BS is not None:
            self._count(ids_BS.numel(), ids_BS.numel())
        return self.model_forward(model, *args, **inputs)

    def _score_packed(self, model: Any, args: tuple[Any, ...], inputs: dict[str, Any]) -> Tensor | None:
        """Return the logits, `(B, L)`; None if the model's own forward must compute them."""
        pad_id = model.config.get_text_config().pad_token_id
        ids_BS = inputs.get("input_ids")
        if ids_BS is None or pad_id is None or "labels" in inputs or _returns_more(model, inputs):
            return None
        inputs = {name: x for name, x in inputs.items() if name not in _UNREAD_ARGUMENTS} | {"use_cache": False}
        # A label marks the token before it, so the last token needs one more column
        labels_BS = torch.full((ids_BS.shape[0], ids_BS.shape[1] + 1), -100, device=ids_BS.device)
        labels_BS.scatter_(1, pooled_columns(ids_BS, pad_id)[:, None] + 1, 0)
        layout = self._layout(model, args, inputs, labels_BS)
        # After the layout, which every rank makes, and which checks its first batch
        if not self.is_compared and self.packing.padded_reason is None:
            self.is_compared = True
            self._compare_with_model(model, ids_BS.device, pad_id)
        if layout is None or self.packing.padded_reason is not None:
            return None
        hidden_TH = run_packed(model, layout, inputs).last_hidden_state[0]
        logits_BL = self._score(model, index_select_fp32_grad(hidden_TH, layout.at_N.to(hidden_TH.device)))
        self._count(layout.tokens, len(ids_BS))
        return logits_BL.to(ids_BS.device) if hasattr(model, "_hf_hook") else logits_BL

    def _score(self, model: Any, hidden_BH: Tensor) -> Tensor:
        device = next((x.device for x in model.score.parameters()), hidden_BH.device)
        return model.score(hidden_BH.to(device))  # type: ignore[no-any-return]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _compare_with_model(self, model: Any, device: torch.device, pad_id: int) -> None:
        """Compare the logits of two rows, of which one has padding, with those of the model's own forward.

        If they differ, batches stay padded. Every rank runs the same forwards on the same tokens.
        """
        if not has_other_ranks() and randomness_without_hooks(model) is not None:
            return  # one more forward would change the user's draws
        row_S = torch.tensor(token_ids(model.config, model.config.get_text_config().vocab_size), device=device)
        ids_BS = torch.stack([row_S, row_S.flip(0)])
        mask_BS = torch.ones_like(ids_BS)
        ids_BS[1, -_PADDING:] = pad_id
        mask_BS[1, -_PADDING:] = 0
        inputs: dict[str, Any] = {"input_ids": ids_BS, "attention_mask": mask_BS, "use_cache": False}
        self.counts = self.counts._replace(checks=self.counts.checks + 2 * ids_BS.numel())
        with undisturbed(model, device):
            expected_logits_BL = self.model_forward(model, **inputs).logits
        with undisturbed(model, device):
            hidden_BSH = backbone_of(model)(**inputs).last_hidden_state
            columns_B = pooled_columns(ids_BS, pad_id).to(hidden_BSH.device)
            logits_BL = self._score(model, hidden_BSH[torch.arange(len(columns_B), device=columns_B.device), columns_B])
        tolerance = COARSE_TOLERANCE if is_coarse(model, hidden_BSH) else TOLERANCE
        difference = float((logits_BL.to(expected_logits_BL) - expected_logits_BL).double().norm())
        # NaN in both means that the weights are not finite
        is_finite = bool(expected_logits_BL.isfinite().all())
        if difference <= tolerance * float(expected_logits_BL.double().norm()) or not is_finite:
            self.agrees_with_model = True
            return
        self.packing.padded_reason = (
            f"on the first batch, the score head's logits differ from those of `{self.model_class}` by {difference:.2g}"
        )
        logger.warning(f"Batches of {self.model_class} stay padded: {self.packing.padded_reason}.")


def _returns_more(model: Any, inputs: dict[str, Any]) -> bool:
    """Whether the model's own forward returns more than logits, or a tuple."""
    config = model.config
    if inputs.get("return_dict", config.return_dict) is False:
        return True
    return any(inputs.get(name, getattr(config, name, False)) for name in _FURTHER_OUTPUTS)


def attach_classifier_forward(model: Any, *, padding_free: bool, share_prompts: bool) -> ClassifierForward:
    """Make `model(...)` score the rows of a batch without padding. `model` is the model inside its wrappers."""
    # None for the class's forward: then a deep copy of the model calls its own forward
    instance_forward = _replaced_forward(model)

    def model_forward(model: Any, *args: Any, **inputs: Any) -> Any:
        if instance_forward is None:
            return type(model).forward(model, *args, **inputs)
        return instance_forward(*args, **inputs)

    classifier = ClassifierForward(model, model_forward, padding_free=padding_free, share_prompts=share_prompts)

    # Keeps the model's signature, from which wrappers read the names of its arguments
    @functools.wraps(type(model).forward)
    def forward(self: Any, *args: Any, **inputs: Any) -> Any:
        return classifier(self, *args, **inputs)

    forward.of_classifier = True  # type: ignore[attr-defined]
    model.forward = types.MethodType(forward, model)
    return classifier


class ClassifierScorer(Scorer):
    """The forward of a sequence classifier, whose score head is its own."""

    forwards: list[ClassifierForward]  # type: ignore[assignment]
    scorer_of_policy = "The packed forward"
    comparison = "2 rows of 8 tokens run twice, to compare logits with those of the model's own forward"

    def attach(self, model: Any, **_: Any) -> None:
        self.forwards.append(
            attach_classifier_forward(
                model,
                padding_free=self.options.padding_free is not False,
                share_prompts=self.options.share_prompts is not False,
            )
        )

    def set_entropy_gradient(self, requires_grad: bool) -> None:
        """Do nothing: a classifier has no entropy."""

    @contextmanager
    def scoring_options(self, entropy_requires_grad: bool | None) -> Iterator[None]:
        yield

    def check(self, device: Any, padded_reason: str | None) -> None:
        """Keep all batches padded if there is a `padded_reason`."""
        if padded_reason:
            self.policy.packing.padded_reason = padded_reason

    def describe(self, device: Any, alone: bool) -> str:
        """Return the text of the plan's row `head`."""
        if self.policy.packing.padded_reason is not None:
            return "The model's own score head scores each token, as in TRL."
        return "The model's own score head scores one token of each row."

    @property
    def differs_from_trl(self) -> bool:
        return False

    @property
    def is_usual(self) -> bool:
        return self.policy.packing.padded_reason is None
