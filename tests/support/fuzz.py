"""Trains random option combinations with our trainers and stock TRL's; compares gradients, final weights and metrics.

Run with `make fuzz N=400` or `python tests/support/fuzz.py --draws 400 --first 0`. A draw depends only on its seed: to
repeat a draw that differs, pass `--draws 1 --first SEED`. Every field of the configs is drawn, or `NOT_DRAWN` says
why not.
"""

import argparse
import logging
import math
import os
import random
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
import trl

import training_comparison
import trl_ext
from drop_in_cases import DPO_LEARNING_RATES, DPO_LOSSES, F_DIVERGENCE_LOSSES, GRPO_LOSSES, Case
from run_losses import Record, Trainers, train
from tiny import Workshop
from training_comparison import metrics_differ, tensors_differ

STOCK, OURS = Trainers.of(trl), Trainers.of(trl_ext)
# Rounding errors grow over a few steps; a wrong loss differs by much more
TOLERANCE = 1e-4

NOT_DRAWN = {
    "model_init_kwargs": "of the model, not of the training",
    "balance": "for several ranks",
    "show_plan": "changes what is logged",
    "trust_remote_code": "needs code from the Hub",
    "dataset_num_proc": "of the data, before training",
    "disable_dropout": "random draws: the distribution is TRL's, the draws are not",
    "pad_token": "of the tokenizer",
    "sync_ref_model": "with `ref_model_mixup_alpha` and `ref_model_sync_steps`, where there is a reference model",
    "ref_model_mixup_alpha": "with `sync_ref_model`",
    "ref_model_sync_steps": "with `sync_ref_model`",
    "padding_free": "TRL warns and pads; ours is drawn below",
    "activation_offloading": "needs a GPU in TRL, and changes no number",
    "ds3_gather_for_generation": "needs DeepSpeed",
    "shuffle_dataset": "of the data loader",
    "generation_batch_size": "the same as `steps_per_generation`",
    "top_p": "completions are scripted: of generation alone",
    "top_k": "of generation alone",
    "min_p": "of generation alone",
    "generation_kwargs": "of generation alone",
    "chat_template_kwargs": "of generation alone",
    "repetition_penalty": "of generation alone",
    "cache_implementation": "of generation alone",
    "use_vllm": "set once the trainer is built: a rollout stands for vLLM",
    "log_completions": "prints",
    "log_multimodal": "prints",
    "num_completions_to_print": "prints",
    "log_unique_prompts": "prints",
    "log_completions_hub_repo": "needs the Hub",
    "max_tool_calling_iterations": "of generation alone",
    "use_transformers_continuous_batching": "of generation alone",
    "transformers_continuous_batching_config": "of generation alone",
    "use_transformers_paged": "of generation alone",
    "vllm_importance_sampling_cap": "TRL's old name of `vllm_importance_sampling_clip_max`",
    "head_kernels": "Triton's, in its interpreter: too slow",
    "reference_store_dir": "each run has a folder of its own",
    "reference_device": "on the CPU it moves nothing",
    "policy_adapter_name": "TRL has no counterpart",
    "ref_adapter_name": "TRL has no counterpart",
    "reward_scale": "of loss types that TRL lacks",
    "rpo_average_log_probs": "of loss types that TRL lacks",
    "sft_label_smoothing": "TRL has no counterpart",
    "sft_label_smoothing_convention": "TRL has no counterpart",
    "force_on_policy_ratio": "a check of the schedule",
    "sampler_check": "needs vLLM: tests/sampler",
    "vllm_engine_args": "needs vLLM: tests/sampler",
    "keep_sampling_mask": "other numbers than TRL's with a truncated distribution",
    "trust_sampling_log_probs": "an approximation: other numbers than TRL's",
    "dynamic_sampling": "other data than TRL's",
    "dynamic_sampling_max_draws": "with `dynamic_sampling`",
}


def draw(seed: int) -> tuple[Case, dict[str, Any]]:
    """Return the case of a seed, and the arguments that only our config has."""
    rng = random.Random(seed)
    return (_dpo if rng.random() < 0.4 else _grpo)(rng, seed)


class _Options(dict[str, Any]):
    """Draws arguments, each with some probability."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng

    def maybe(self, name: str, *values: Any, chance: float = 0.3) -> None:
        if self._rng.random() < chance:
            self[name] = self._rng.choice(values)


def _of_both(rng: random.Random, config: _Options, ours: _Options) -> None:
    config.maybe("gradient_accumulation_steps", 2, 3)
    config.maybe("gradient_checkpointing", True, chance=0.2)
    config.maybe("max_grad_norm", 0.05, 1.0, chance=0.2)
    config.maybe("weight_decay", 0.1, chance=0.2)
    config.maybe("lr_scheduler_type", "linear", "cosine", chance=0.2)
    config.maybe("pad_to_multiple_of", None, 4, 8, chance=0.2)
    if rng.random() < 0.25:
        config.update(eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=4)
    if rng.random() < 0.3:  # its default epsilon would turn gradients that are rounding errors into full steps
        config.update(optim="adamw_torch", adam_epsilon=1e-4)
    ours.maybe("padding_free", False, False, True, chance=0.25)
    if ours.get("padding_free") is None:
        ours.maybe("share_prompts", False, chance=0.2)
    ours.maybe("head", "dense", chance=0.1)
    ours.maybe("head_chunk_size", 1, 3, 17, chance=0.2)
    ours.maybe("on_non_finite_loss", "stop", "skip", chance=0.2)


_MODELS = (
    "tied",
    "tied",
    "untied",
    "untied",
    "softcap",
    "logits_scaling",
    "logit_scale",
    "head_bias",
    "experts",
    "chat",
)


def _dpo(rng: random.Random, seed: int) -> tuple[Case, dict[str, Any]]:
    config, ours = _Options(rng), _Options(rng)
    _of_both(rng, config, ours)
    setup = rng.choice(("full", "lora", "lora", "ref_adapter", "ref_model", "lora_ref_model", "prompt_tuning"))
    model = rng.choice(_MODELS)
    rate = 0.03
    if rng.random() < 0.2:
        names = rng.sample([name for name in DPO_LOSSES if name not in DPO_LEARNING_RATES], rng.randint(2, 3))
        config["loss_type"] = names
        config.maybe("loss_weights", [0.7, 0.2, 1.1][: len(names)], chance=0.6)
        for name in names:
            config.update(DPO_LOSSES[name])
    else:
        name = rng.choice(list(DPO_LOSSES))
        config.update(loss_type=name, **DPO_LOSSES[name])
        rate = DPO_LEARNING_RATES.get(name, rate)
        if name in F_DIVERGENCE_LOSSES and rng.random() < 0.3:
            config["f_divergence_type"] = rng.choice(("forward_kl", "js_divergence", "alpha_divergence"))
            config.maybe("f_alpha_divergence_coef", 0.8, 1.0, chance=0.5)
            rate *= 0.2
    config.maybe("label_smoothing", 0.1, 0.2, chance=0.15)
    config.maybe("beta", 0.05, 0.5)
    config.maybe("discopop_tau", 0.5, chance=0.1)
    config.maybe("ld_alpha", 0.0, 0.5, chance=0.2)
    if "aot" not in str(config["loss_type"]):
        config.maybe("use_weighting", True, chance=0.15)
    config.maybe("max_length", 8, 11, None, chance=0.2)
    config.maybe("truncation_mode", "keep_end", chance=0.15)
    config.maybe("precompute_ref_log_probs", True, chance=0.2)
    config.maybe("precompute_ref_batch_size", 3, chance=0.1)
    if model == "experts":
        config.maybe("router_aux_loss_coef", 0.0, 0.5)
    if setup in ("full", "ref_model") and not config.get("precompute_ref_log_probs") and rng.random() < 0.1:
        config.update(sync_ref_model=True, ref_model_sync_steps=1, ref_model_mixup_alpha=0.3)
    config.maybe("per_device_train_batch_size", 1, 2, 6, chance=0.5)
    ours.maybe("reference_store", "memory", *(["off"] * (not config.get("precompute_ref_log_probs"))), chance=0.4)
    if setup == "prompt_tuning":
        ours.pop("padding_free", None)
    steps = rng.randint(2, 4)
    streams = rng.random() < 0.1 and not config.get("precompute_ref_log_probs")
    case = Case(f"fuzz-{seed}", "dpo", setup, model, dict(config, seed=seed), steps=steps, streaming=streams)
    rate = 1.0 if setup == "prompt_tuning" else rate
    case = replace(case, learning_rate=rate, lora=_lora(rng, setup, model))
    ours.maybe("max_tokens_per_micro_batch", 1, 30, 80, chance=0.2)
    return case, dict(ours)


def _lora(rng: random.Random, setup: str, model: str) -> dict[str, Any]:
    if not setup.startswith("lora"):
        return {}
    if model == "experts":
        return {"target_modules": ["q_proj", "v_proj"]}
    return rng.choice(({}, {"use_dora": True}, {"use_rslora": True}, {"target_modules": ["q_proj", "v_proj"]}))


def _grpo(rng: random.Random, seed: int) -> tuple[Case, dict[str, Any]]:
    config, ours = _Options(rng), _Options(rng)
    _of_both(rng, config, ours)
    setup = rng.choice(("full", "full", "lora", "lora", "ref_adapter", "ref_model", "prompt_tuning"))
    model = rng.choice(_MODELS)
    name = rng.choice(list(GRPO_LOSSES))
    config.update(loss_type=name, **GRPO_LOSSES[name])
    config["num_generations"] = generations = rng.choice((2, 4, 4, 8))
    config["per_device_train_batch_size"] = generations * rng.choice((1, 1, 2))
    config.maybe("steps_per_generation", 1, 2, 3, 4, chance=0.5)
    config.maybe("num_iterations", 2, 3, chance=0.5)
    config.maybe("importance_sampling_level", "sequence")
    config["max_completion_length"] = rng.choice((1, 2, 5, 8, 8, 16))
    if setup != "full":
        config.maybe("beta", 0.05, 0.2, chance=0.5)
    config.maybe("use_bias_correction_kl", False, chance=0.2)
    config.maybe("epsilon", 0.01, 0.1, chance=0.2)
    if name not in ("cispo", "vespo", "sapo"):
        config.maybe("epsilon_high", 0.05, 0.3, chance=0.2)
        config.maybe("delta", 1.5, 4.0, chance=0.1)
    if name == "sapo":
        config.maybe("sapo_temperature_neg", 2.0)
        config.maybe("sapo_temperature_pos", 0.5)
    if name == "vespo":
        for key, value in (("k_pos", 1.0), ("lambda_pos", 2.0), ("k_neg", 2.0), ("lambda_neg", 1.0)):
            config.maybe(f"vespo_{key}", value)
    config.maybe("scale_rewards", "batch", "none")
    if model != "chat" and config["max_completion_length"] > 1:  # otherwise every completion is truncated
        config.maybe("mask_truncated_completions", True, chance=0.3)
    config.maybe("top_entropy_quantile", 0.2, 0.5, 0.8, chance=0.15)
    if rng.random() < 0.2:
        config.maybe("entropy_coef", 0.05, chance=0.7)
        if "entropy_coef" not in config:
            config.update(use_adaptive_entropy=True, entropy_target=10.0)
            config.maybe("entropy_coef_min", 0.01)
            config.maybe("entropy_coef_max", 0.02)
            config.maybe("entropy_coef_delta", 0.01)
    config.maybe("off_policy_mask_threshold", 0.01, 0.5, chance=0.15)
    config.maybe("temperature", 0.7, 1.6)
    if model == "untied":
        config.maybe("cast_lm_head_to_fp32", True, chance=0.15)
    if model == "experts":
        config.maybe("router_aux_loss_coef", 0.0, 0.5)
    if "eval_strategy" in config:
        config["per_device_eval_batch_size"] = generations
        config.maybe("num_generations_eval", 2)
    rewards = rng.choice(
        (("id",), ("id",), ("half_dead",), ("half_dead",), ("short",), ("unscorable",), ("id", "short"))
    )
    if len(rewards) == 2:
        config.maybe("reward_weights", [1.0, 0.5], chance=0.6)
        config.maybe("multi_objective_aggregation", "normalize_then_sum", chance=0.4)
    if setup == "ref_model" and rng.random() < 0.2:
        config.update(sync_ref_model=True, ref_model_sync_steps=1, ref_model_mixup_alpha=0.3)
    rollout, vllm = rng.choice(("scripted", "scripted", "masked", "masked_whole", "near_sampler")), False
    if rollout == "near_sampler":
        vllm = rng.random() < 0.8
        config.maybe("vllm_importance_sampling_correction", False, chance=0.2)
        config.maybe("vllm_importance_sampling_mode", "token_truncate", "token_mask", "sequence_truncate", chance=0.7)
        config.maybe("vllm_importance_sampling_clip_min", 0.7, chance=0.4)
        config.maybe("vllm_importance_sampling_clip_max", 1.5, chance=0.6)
        if name == "vespo":
            config["vllm_importance_sampling_mode"] = rng.choice(("token_truncate", "token_mask"))
    if rng.random() < 0.4:
        ours["keep_groups_together"] = False
    ours.maybe("max_tokens_per_micro_batch", 1, 30, 80, chance=0.2)
    ours.maybe("zero_advantages_of_equal_rewards", False, chance=0.1)
    if setup == "prompt_tuning":
        ours.pop("padding_free", None)
    case = Case(f"fuzz-{seed}", "grpo", setup, model, dict(config, seed=seed), steps=rng.randint(2, 5), rewards=rewards)
    rate = 1.0 if setup == "prompt_tuning" else 0.01
    case = replace(case, learning_rate=rate, rollout=rollout, vllm=vllm, prompts=24, lora=_lora(rng, setup, model))
    return replace(case, ours=dict(ours)), dict(ours)


# Errors that ours may raise although TRL trains: a part of the message, and the option that causes it
REFUSED: dict[str, str] = {
    "`max_tokens_per_micro_batch=": "max_tokens_per_micro_batch",
    "`padding_free=True` is not supported here": "padding_free",
    "`precompute_ref_log_probs=True` fills the store, so `reference_store`": "reference_store",
}

# Draws that may differ, and why
EXPLAINED = {
    202: "entropies of tokens of one context tie; stock's own rounding parts them at the quantile, ours takes all",
}


def outcome(
    seed: int, workshop: Workshop, change: Callable[[Trainers], Trainers] = lambda ours: ours
) -> list[str] | str:
    """Return the differences in the draw of `seed`, or one word that says why nothing was compared.

    Args:
        change (`Callable`): changes our trainers, to check that a difference is found.
    """
    case, options = draw(seed)
    ours = change(replace(OURS, dpo_config=partial(OURS.dpo_config, **options)) if case.trainer == "dpo" else OURS)
    found = [_run(case, trainers, workshop) for trainers in (ours, STOCK)]
    if isinstance(found[0], Exception):
        refused = any(text in str(found[0]) and options.get(name) for text, name in REFUSED.items())
        if refused:
            return f"refused: {str(found[0])[:90]}"
        if type(found[1]) is type(found[0]):
            return f"both raise: {str(found[0])[:90]}"
        return [f"ours raises {type(found[0]).__name__}: {found[0]}"]
    if isinstance(found[1], Exception):
        return f"stock raises: {str(found[1])[:90]}"
    if not all(math.isfinite(x) for x in found[1].losses) or not _finite(found[1]):
        return "stock is not finite"
    wrong = _differences(case, *found)
    if not wrong:
        return (
            [] if any(training_comparison._norm(gradients) > 0 for gradients in found[1].gradients) else "no gradient"
        )
    # Stock against itself on wider batches shows the effect of rounding alone
    padded = _run(replace(case, config={**case.config, "pad_to_multiple_of": 32}), STOCK, workshop)
    if isinstance(padded, Exception):
        return wrong
    own = next((x for x in (1e-4, 3e-4, 1e-3, 3e-3, 1e-2) if _within(padded, found[1], x)), math.inf)
    if own < 1 and not _differences(case, *found, tolerance=3 * own):
        return f"rounding: {len(wrong)} differences, within 3 times those of stock itself on wider batches ({own:.0e})"
    return wrong


def _within(padded: Record, stock: Record, tolerance: float) -> bool:
    """Return whether two runs of stock agree, also in the gradient norm, which is a rounding error if terms cancel."""
    norms = ([training_comparison._norm(gradients) for gradients in record.gradients] for record in (padded, stock))
    return not _tensors_differ(padded, stock, tolerance) and all(
        abs(a - b) <= tolerance * max(a, b) for a, b in zip(*norms, strict=True)
    )


def _run(case: Case, trainers: Trainers, workshop: Workshop) -> Any:
    try:
        return train(case, trainers, workshop)
    except Exception as error:
        return error


def _finite(record: Record) -> bool:
    return all(bool(update.isfinite().all()) for update in record.updates.values())


def _differences(case: Case, ours: Record, stock: Record, tolerance: float = TOLERANCE) -> list[str]:
    with patch.object(training_comparison, "TOLERANCE", tolerance):
        wrong = metrics_differ(case, ours, stock)
        if case.trainer == "dpo" or case.ours.get("keep_groups_together") is False:  # otherwise other rows share one
            for i, (got, want) in enumerate(zip(ours.losses, stock.losses, strict=True)):
                if not training_comparison._close(got, want, stock.advantage):
                    wrong.append(f"loss of micro-batch {i}: ours {got!r}, stock {want!r}")
    return wrong + _tensors_differ(ours, stock, tolerance)


def _tensors_differ(ours: Record, stock: Record, tolerance: float) -> list[str]:
    wrong = []
    largest = max(training_comparison._norm(gradients) for gradients in stock.gradients)
    with patch.object(training_comparison, "TOLERANCE", tolerance):
        for i, (got, want) in enumerate(zip(ours.gradients, stock.gradients, strict=True)):
            # Without an advantage, the gradient of a step is a rounding error
            wrong += tensors_differ(f"gradient of step {i}", got, want, at_least=largest / 100)
        # 1e-7 is the rounding of a weight
        return wrong + tensors_differ("weight update", ours.updates, stock.updates, at_least=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=40)
    parser.add_argument("--first", type=int, default=0, help="seed of the first draw")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    counts: Counter[str] = Counter()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        workshop = Workshop(Path(folder))
        for seed in range(arguments.first, arguments.first + arguments.draws):
            with open(os.devnull, "w") as nowhere, patch.object(sys, "stdout", nowhere):
                found = outcome(seed, workshop)
            word = found.split(":")[0] if isinstance(found, str) else "differs" if found else "same"
            if word == "differs" and seed in EXPLAINED:
                word, found = "explained", f"explained: {EXPLAINED[seed]}"
            counts[word] += 1
            if word == "differs":
                print(f"seed {seed}: {draw(seed)}")
                print("\n".join(f"    {line}" for line in found[:8]), flush=True)
            elif isinstance(found, str):
                print(f"seed {seed}: {found}", flush=True)
    summary = ", ".join(f"{count} {word}" for word, count in counts.most_common())
    print(f"{arguments.draws} draws from {arguments.first}: {summary}; {time.monotonic() - began:.0f} s")
    sys.exit(bool(counts["differs"]))


if __name__ == "__main__":
    main()
