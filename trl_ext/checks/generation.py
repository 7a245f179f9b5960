"""Checks of what GRPO and RLOO sample: options of `generate` or vLLM, ends of completions, and images of prompts."""

import difflib
import logging
from collections.abc import Mapping
from typing import Any

from datasets import Dataset
from transformers import GenerationConfig, ProcessorMixin

from ..losses.loss_types import grpo_loss_type

logger = logging.getLogger("trl_ext")


def check_generation(config: Any) -> None:
    """Raise `ValueError` if `generation_kwargs` has an option that TRL's trainers cannot follow; warn of doubtful ones.

    For completions that the trainer samples itself, with transformers or vLLM.
    """
    options = config.generation_kwargs
    if options is None:
        return
    copies = "n" if config.use_vllm else "num_return_sequences"
    if options.get(copies) not in (None, 1):
        raise ValueError(
            f"`generation_kwargs` has `{copies}={options[copies]!r}`, but TRL samples one completion for each row of a "
            "batch. Set `num_generations` instead."
        )
    temperature = options.get("temperature")
    # The importance ratio to vLLM corrects for another temperature
    is_corrected = config.use_vllm and getattr(config, "vllm_importance_sampling_correction", False)
    if temperature is not None and temperature != config.temperature and not is_corrected:
        logger.warning(
            f"`generation_kwargs` has `temperature={temperature!r}`, but log-probs are computed with `temperature="
            f"{config.temperature!r}`, so the gradient is that of another distribution. Remove it from "
            "`generation_kwargs`, and set `temperature`."
        )
    if not config.use_vllm:
        _check_transformers(options, config)


def _check_transformers(options: Mapping[str, Any], config: Any) -> None:
    if options.get("stop_strings"):
        raise ValueError(
            f"`generation_kwargs` has `stop_strings={options['stop_strings']!r}`, but TRL calls `generate` without the "
            "tokenizer that stop strings need, and would train on the padding after a stop string. End completions "
            "with a token (`model.generation_config.eos_token_id`), or sample with vLLM and `stop`."
        )
    if options.get("return_dict_in_generate"):
        raise ValueError(
            "`generation_kwargs` has `return_dict_in_generate=True`, but TRL expects only the tokens. Leave it out."
        )
    samples = options.get("do_sample", True)
    if samples and options.get("temperature") is not None and not options["temperature"] > 0:
        raise ValueError(
            f"`generation_kwargs` has `temperature={options['temperature']!r}`, which must be above 0. For less random "
            "samples, set a small `temperature`."
        )
    # Distillation has no `steps_per_generation`
    batches = getattr(config, "steps_per_generation", config.gradient_accumulation_steps)
    rows = config.per_device_train_batch_size * batches
    if options.get("prompt_lookup_num_tokens") and rows > 1:
        raise ValueError(
            f"`generation_kwargs` has `prompt_lookup_num_tokens={options['prompt_lookup_num_tokens']!r}`, which "
            f"`generate` supports for one row at a time, but each process samples {rows}. Leave it out."
        )
    if not samples and (options.get("num_beams") or 1) == 1:
        logger.warning(
            "`generation_kwargs` has `do_sample=False`, so all completions of a prompt are equal, and their advantages "
            "are zero unless the rewards are random. Leave `do_sample` out to sample."
        )
    known_options = vars(GenerationConfig())
    for name in options:
        if name not in known_options:
            close_names = difflib.get_close_matches(name, known_options, n=1)
            hint = f" Did you mean `{close_names[0]}`?" if close_names else ""
            logger.warning(f"`generation_kwargs` has `{name}`, which `generate` does not know, and may ignore.{hint}")


def check_ends(trainer: Any) -> None:
    """Raise `ValueError` if `generate` ends rows at a token at which TRL does not cut completions."""
    end_tokens = (trainer.args.generation_kwargs or {}).get("eos_token_id")
    ends = getattr(trainer, "eos_token_ids", None)  # TRL 1.16 and later
    if trainer.use_vllm or end_tokens is None or ends is None:
        return
    uncut_tokens = [
        token for token in (end_tokens if isinstance(end_tokens, list) else [end_tokens]) if token not in ends
    ]
    # Padding cuts a completion if it is one of the ends
    if uncut_tokens and trainer._tokenizer.pad_token_id not in ends:
        raise ValueError(
            f"`generation_kwargs` has `eos_token_id={end_tokens!r}`, but TRL cuts completions after {list(ends)}, and "
            f"would train on the padding after {uncut_tokens[0]!r}. Set `model.generation_config.eos_token_id`."
        )


def check_has_length(config: Any, *, has_tools: bool, own_loss: bool) -> None:
    """Raise `ValueError` if `max_completion_length` is None where TRL computes with it."""
    if config.max_completion_length is not None:
        return
    divides = grpo_loss_type(config.loss_type).divides_by_completion_length and not own_loss
    if divides or has_tools:
        reason = (
            f'`loss_type="{config.loss_type}"` divides by it'
            if divides
            else "completions with tools are cut at that length"
        )
        raise ValueError(f"`max_completion_length` is None, but {reason}. Set it to a number of tokens.")


def check_images(dataset: Any, name: str, processing_class: Any) -> None:
    """Raise `ValueError` if a data set has a column of images, and the model reads none, or no row has one.

    TRL reads such a column in each row, and then looks for the pixels of every batch.
    """
    columns = getattr(dataset, "column_names", None) or ()
    column = next((x for x in ("images", "image") if x in columns), None)
    if column is None or not isinstance(dataset, Dataset) or not len(dataset):
        return
    values = dataset.data.column(column)
    if values.null_count == len(values):
        state = "is None in every row"
    # Read without decoding. An empty list is no image
    elif not isinstance(processing_class, ProcessorMixin) and dataset.with_format("arrow")[0][column][0].as_py() != []:
        state = "is for images, but the model reads none"
    else:
        return
    raise ValueError(f'`{column}` of `{name}` {state}. Remove the column: `dataset.remove_columns("{column}")`.')
