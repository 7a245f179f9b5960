"""Measure router replay in a small mixture of experts: the mismatch with the sampler in bf16, and the time of a step.

    python benchmarks/routes.py           # on the CPU, about 8 minutes
    python benchmarks/routes.py --smoke   # few tokens: a check that it runs; its figures mean nothing

Transformers' continuous batching samples and gives its log-probs. `mismatch_kl` is the mean of exp(d) - d - 1 over
sampled tokens, where d is the policy's log-prob minus the sampler's: "own", if the policy's routers choose, and
"replayed", if they use the sampler's experts. Both are of the same samples and weights. Lines of time compare whole
optimizer steps without and with replay, which take turns; completions come from `generate`.
"""

import logging
import tempfile
from dataclasses import replace
from functools import partial
from typing import Any

import results
import torch
from datasets import Dataset
from steps import Shape, text, tokenizer, words
from transformers import PrinterCallback, Qwen3MoeConfig, Qwen3MoeForCausalLM
from turns import WARM_UP_STEPS, Line, Steps, begin, line_of, sizes_of, take

import trl_ext

SHAPE = Shape(hidden=128, layers=8, vocabulary=512, prompt=16, completion=64, steps=6, rounds=3)
SEEDS = range(5)
BATCHING = {
    "use_transformers_continuous_batching": True,
    "transformers_continuous_batching_config": {"use_cuda_graph": False, "num_blocks": 256, "max_batch_tokens": 512},
}


def mixture(shape: Shape, seed: int, dtype: torch.dtype) -> Any:
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=2 * shape.hidden,
        moe_intermediate_size=shape.hidden // 2,
        num_experts=32,
        num_experts_per_tok=4,
        norm_topk_prob=True,  # as in the released models
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.hidden // shape.heads,
        initializer_range=0.05,
        router_aux_loss_coef=0.0,
        pad_token_id=0,
        eos_token_id=1,
    )
    return Qwen3MoeForCausalLM(config).to(dtype)


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(ids) % 101 / 101 for ids in completion_ids]


def trainer_of(shape: Shape, model: Any, folder: str, **options: Any) -> Any:
    config = {
        "per_device_train_batch_size": 16,
        "num_generations": 4,
        "max_completion_length": shape.completion,
        "max_steps": shape.steps,
        "logging_steps": 1,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "show_plan": False,
        "bf16": False,
        **options,
    }
    trainer = trl_ext.GRPOTrainer(
        model,
        reward_funcs=reward,
        args=trl_ext.GRPOConfig(folder, **config),
        train_dataset=Dataset.from_list(
            [{"prompt": text(words(row, shape.prompt, shape.vocabulary))} for row in range(64)]
        ),
        processing_class=tokenizer(shape.vocabulary),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def mismatch(name: str, seed: int, shape: Shape, fp32_head: bool, _: float) -> list[Line]:
    with tempfile.TemporaryDirectory() as folder:
        options = {"cast_lm_head_to_fp32": fp32_head, "seed": seed, "replay_routes": "sampler", **BATCHING}
        model = mixture(shape, seed, torch.bfloat16)
        trainer = trainer_of(replace(shape, steps=1), model, folder, per_device_train_batch_size=32, **options)
        trainer.train()
        log = trainer.state.log_history[0]
    values = {"own": log["routes/mismatch_kl_without"], "replayed": log["sampling/mismatch_kl"]}
    run = results.new_run()
    sizes = {**sizes_of(shape), "seed": seed, "cast_lm_head_to_fp32": fp32_head}
    differing = log["routes/differing"]
    return [
        line_of(name, sizes, subject, run, []) | {"tokens": 0.0, "mismatch_kl": value, "differing": differing}
        for subject, value in values.items()
    ]


def time_of_step(name: str, shape: Shape, _: float) -> list[Line]:
    milliseconds: dict[str, list[float]] = {"own": [], "replayed": []}
    for _ in range(shape.rounds):
        for subject, source in (("own", None), ("replayed", "sampler")):
            with tempfile.TemporaryDirectory() as folder:
                trainer = trainer_of(shape, mixture(shape, 0, torch.float32), folder, replay_routes=source)
                steps = Steps(trainer)
                trainer.train()
            milliseconds[subject] += [step.milliseconds for step in steps.taken[WARM_UP_STEPS:]]
    run = results.new_run()
    return [line_of(name, sizes_of(shape), x, run, values) | {"tokens": 0.0} for x, values in milliseconds.items()]


def main() -> None:
    chosen = begin(__doc__, budget=1200)
    logging.disable(logging.WARNING)
    shape = replace(SHAPE, layers=2, completion=8, steps=3, rounds=1) if chosen.smoke else SHAPE
    measurements: dict[str, Any] = {"grpo_routes_step": partial(time_of_step, "grpo_routes_step", shape)}
    for head in ("", "_fp32_head"):
        for seed in SEEDS:
            name = f"grpo_routes_mismatch{head}_{seed}"
            measurements[name] = partial(mismatch, name, seed, shape, bool(head))
    take(measurements, chosen)


if __name__ == "__main__":
    main()
