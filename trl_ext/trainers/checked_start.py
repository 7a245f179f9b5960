"""Both trainers: what cannot be trained with, or on, is one error that says what to do, before anything is trained."""

import inspect
import logging
from dataclasses import fields
from typing import Any

import trl
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from ..compat import DataInternals
from ..scoring import check_token_ids, missing_rows, watch_token_ids
from .checked_arguments import check_completion_length, check_dpo_arguments, check_grpo_arguments, check_model_name
from .checked_data import (
    check_enough_prompts,
    check_prompts,
    check_rewards,
    check_rows,
    check_rows_are_left,
    check_type,
    checked_pairs,
    named_datasets,
)

logger = logging.getLogger("trl_ext")

_ROWS_READ = 1000  # of the training data, where a tokenizer has more tokens than the model


class CheckedStartMixin(DataInternals):
    """Mixed in before all else of a trainer."""

    _trl_trainer: type
    _config_class: type

    def __init__(self, *positional: Any, **keywords: Any) -> None:
        signature = inspect.signature(self._trl_trainer.__init__)  # type: ignore[misc]
        if "tokenizer" in keywords:
            name = type(self).__name__
            raise TypeError(f"`tokenizer` of `{name}` is called `processing_class`, as in TRL. Rename it.")
        given = signature.bind(self, *positional, **keywords).arguments
        self._check_what_is_given(given, given.get("args"))
        super().__init__(*positional, **keywords)
        for model in (self.model, self.ref_model):
            if model is not None:
                watch_token_ids(model, len(self._text_tokenizer()))

    def _check_what_is_given(self, given: dict[str, Any], config: Any) -> None:
        name = type(self).__name__
        if given["model"] is None:
            raise ValueError(f"`model` of `{name}` is None. Pass a model, or the name or folder of one.")
        check_model_name(given["model"])
        wanted = self._config_class
        if config is not None and not all(hasattr(config, field.name) for field in fields(wanted)):
            raise TypeError(
                f"`args` of `{name}` is a `{type(config).__name__}`. Pass a `{wanted.__name__}` with these values."
            )
        tokenizer: Any = getattr(given.get("processing_class"), "tokenizer", given.get("processing_class"))
        padded_elsewhere = getattr(config, "pad_token", None) is not None or given.get("data_collator") is not None
        is_tokenizer: bool = isinstance(tokenizer, PreTrainedTokenizerBase)
        if is_tokenizer and tokenizer.pad_token is None and tokenizer.eos_token is None and not padded_elsewhere:
            raise ValueError(
                "`processing_class` has neither a `pad_token` nor an `eos_token`. Set one: "
                '`processing_class.pad_token = "..."`.'
            )
        if given.get("train_dataset") is not None:
            check_type(given["train_dataset"], "train_dataset")
            check_rows(given["train_dataset"], "train_dataset")


class CheckedDPOMixin(CheckedStartMixin):
    """Mixed in before all else of `DPOTrainer`."""

    _config_class = trl.DPOConfig

    def __init__(self, *positional: Any, **keywords: Any) -> None:
        super().__init__(*positional, **keywords)
        if isinstance(self.train_dataset, Dataset):
            check_rows_are_left(self.train_dataset, self.args.max_length)
        tokens = len(self._text_tokenizer())
        rows = missing_rows(self.model, tokens)
        if rows is not None:
            check_token_ids(self._largest_token_ids(_ROWS_READ), rows, tokens)

    def _check_what_is_given(self, given: dict[str, Any], config: Any) -> None:
        super()._check_what_is_given(given, config)
        reference = given.get("ref_model")
        if isinstance(reference, str):
            raise TypeError(
                f"`ref_model={reference!r}` is a name, and must be a model. Load it: "
                "`AutoModelForCausalLM.from_pretrained(...)`; leave it out where it is the model before training."
            )
        if config is not None:
            check_dpo_arguments(config, own_loss=self._replaces("loss"))

    def _before_preparing(self, dataset: Any, name: str, processing_class: Any) -> Any:
        dataset = checked_pairs(
            dataset,
            f"{name}_dataset" if name in ("train", "eval") else f"eval_dataset[{name!r}]",
            has_template=processing_class.chat_template is not None,
            has_end=self._text_tokenizer().eos_token is not None,
        )
        return super()._before_preparing(dataset, name, processing_class)  # type: ignore[misc]


class CheckedGRPOMixin(CheckedStartMixin):
    """Mixed in before all else of `GRPOTrainer`."""

    _config_class = trl.GRPOConfig

    def __init__(self, *positional: Any, **keywords: Any) -> None:
        super().__init__(*positional, **keywords)
        trainer: Any = self
        rolled_out = trainer.rollout_func is not None or self._replaces("generation")
        if not rolled_out:  # else they may be as long as they like
            check_completion_length(self.args, self.model)
        if self._replaces("batches") or trainer.environment_factories is not None:
            return
        renders = rolled_out or self._replaces("rendering") or trainer.processing_class.chat_template is not None
        evaluated = None if self.args.eval_strategy == "no" else self.eval_dataset
        for name, dataset in named_datasets(self.train_dataset, evaluated):
            check_prompts(dataset, name, has_template=renders)
            if isinstance(dataset, Dataset) and len(dataset) == 0:
                logger.warning("`%s` has no rows: nothing will be evaluated on it.", name)

    def _check_what_is_given(self, given: dict[str, Any], config: Any) -> None:
        super()._check_what_is_given(given, config)
        if not self._replaces("rewards"):
            check_rewards(
                given.get("reward_funcs"),
                None if getattr(config, "remove_unused_columns", False) else given.get("train_dataset"),
                has_environments=given.get("environment_factory") is not None,
                columns_are_added=given.get("rollout_func") is not None or self._replaces("rollouts"),
            )
        if config is not None:
            check_grpo_arguments(
                config,
                own_loss=self._replaces("loss"),
                own_advantages=self._replaces("batches"),
            )

    def train(self, *positional: Any, **keywords: Any) -> Any:
        """TRL's own.

        Raises:
            `ValueError`: the data set has fewer prompts than one generation batch.
        """
        if not self._replaces("sampler"):
            check_enough_prompts(self.train_dataset, self.args.generation_batch_size, self.args.num_generations)
        return super().train(*positional, **keywords)  # type: ignore[misc]
