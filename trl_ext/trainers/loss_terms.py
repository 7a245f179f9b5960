"""DPO's loss: TRL's terms from TRL's code, and those that it does not have added to them."""

import logging
from typing import Any

import torch

from ..compat import Recorded
from ..engines import parameter_of
from ..losses import (
    PREFERENCE_LOSSES,
    READ_REWARDS,
    REWARD_COLUMNS,
    LossOptions,
    Pairs,
    margin_of,
    pairs_of,
    smoothing_term,
)
from .bounded_pairs import BoundedPairsMixin
from .loss_arguments import LossArguments, check_loss_arguments, ignored_smoothing
from .metrics_of_all_ranks import MetricsOfAllRanksMixin
from .reward_data import RewardDataMixin

logger = logging.getLogger("trl_ext")


class LossTermsMixin(BoundedPairsMixin, MetricsOfAllRanksMixin, RewardDataMixin):
    """Mixed in before what gives TRL's `DPOTrainer` its scoring forward and its reference.

    Attributes:
        loss_arguments (`LossArguments`): the fields of the config.
    """

    scoring_forwards: list[Any]
    _config_among: Any

    def __init__(self, *positional: Any, **keywords: Any) -> None:
        config = self._config_among(positional, keywords)
        self.loss_arguments = LossArguments.of(config)
        self._head_classes = 0
        if config is not None:
            check_loss_arguments(config)
            self._take_rewards(config.loss_type)
            ignored = ignored_smoothing(config)
            if ignored is not None:
                logger.warning(ignored)
        super().__init__(*positional, **keywords)
        self._collate_rewards()

    def _attach(self, model: Any, **options: Any) -> None:
        if not self.scoring_forwards and self.loss_arguments.sft_label_smoothing:
            options["outputs"] = (*options["outputs"], "mean_log_probs")
            weight = parameter_of(model.get_output_embeddings(), "weight")
            self._head_classes = getattr(weight, "ds_shape", weight.shape)[0]  # ZeRO-3 leaves none in `shape`
        super()._attach(model, **options)  # type: ignore[misc]

    def _loss_on_rank(self, model: Any, batch: dict[str, Any], return_outputs: bool) -> Any:
        own = [(x, w) for x, w in zip(self.loss_types, self.loss_weights, strict=True) if x in PREFERENCE_LOSSES]
        smoothed = [w for x, w in zip(self.loss_types, self.loss_weights, strict=True) if x == "sft"]
        if not self.loss_arguments.sft_label_smoothing:
            smoothed = []
        known = {name: x for name, x in batch.items() if name not in REWARD_COLUMNS}
        if not own and not smoothed:
            return self._trls_loss(model, known, return_outputs, but=())
        scored = Recorded(model)
        result = self._trls_loss(scored, known, return_outputs, but=PREFERENCE_LOSSES)
        loss = result[0] if return_outputs else result
        if own:
            loss = loss + self._of_pairs(own, scored.outputs, batch)
        for weight in smoothed:
            loss = loss + weight * self._of_smoothing(scored.outputs, batch["completion_mask"])
        return (loss, result[1]) if return_outputs else loss

    def _of_pairs(self, own: list[tuple[str, float]], outputs: Any, batch: dict[str, Any]) -> torch.Tensor:
        completion_mask = batch["completion_mask"]
        rewards = tuple(batch[name] for name in self._extra_columns)
        pairs = pairs_of(
            outputs.log_probs[:, 1 - completion_mask.shape[1] :],  # prompt learning puts tokens before
            completion_mask,
            self._reference_sums(batch),
            (rewards[0], rewards[1]) if rewards else None,
        )
        arguments = self.loss_arguments
        options = LossOptions(
            beta=self.beta,
            label_smoothing=self.label_smoothing,
            reward_scale=arguments.reward_scale,
            rpo_average_log_probs=arguments.rpo_average_log_probs,
        )
        if not READ_REWARDS.isdisjoint(name for name, _ in own):
            self._log_margins(pairs, options)
        return torch.stack([weight * PREFERENCE_LOSSES[name](pairs, options).mean() for name, weight in own]).sum()

    def _log_margins(self, pairs: Pairs, options: LossOptions) -> None:
        with torch.no_grad():
            margin, target = margin_of(pairs, options)
            self._log_metrics(
                {
                    "rewards/target_margins": target.mean().item(),
                    "rewards/margin_errors": (margin - target).abs().mean().item(),
                }
            )

    def _of_smoothing(self, outputs: Any, completion_mask: torch.Tensor) -> torch.Tensor:
        mask = completion_mask[:, 1:].chunk(2)[0]
        log_probs, mean_log_probs = (
            x[: len(mask), -mask.shape[1] :] for x in (outputs.log_probs, outputs.mean_log_probs)
        )
        arguments = self.loss_arguments
        return smoothing_term(
            *(log_probs, mean_log_probs, mask),
            smoothing=arguments.sft_label_smoothing,
            convention=arguments.sft_label_smoothing_convention,
            vocabulary=self._head_classes,
        )
