"""Trains GRPO for a few steps with a vLLM engine in this process, and writes `result.json`.

    python tests/sampler/run_vllm.py '{"model": FOLDER, "output": FOLDER, ...}'

Options: `trainer` ("ours", "stock": TRL's with our engine, "untouched": TRL's with its own), `lora`, `peft`
(arguments of `LoraConfig`), `delayed` (TRL's samples with older weights), `dtype` (of the policy), `changed` (a
weight that is not as on disk), `steps`, `engine` (arguments of vLLM), `config` (arguments of the trainer), `broken`,
what the sync leaves out from step 3 on: "everything", "cache" (the prefix cache stays), or a part of the names of the
weights; and `syncs`, how often the adapter is then merged for a sync, by our way and by TRL's.
"""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM

import trl_ext
from lagged_sampling import DelayedTurns
from trl_ext.compat.replaced import names_replaced
from trl_ext.compat.vllm import VLLMGeneration
from trl_ext.sampler.engine import EngineGeneration

ENGINE = {"dtype": "float32", "max_num_seqs": 8, "max_num_batched_tokens": 256, "enforce_eager": True, "block_size": 32}
BROKEN_AT = 3


def distinct(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [len(set(ids)) + 0.01 * sum(ids) for ids in completion_ids]


def break_sync(trainer: Any, broken: str) -> None:
    """Leave something out of the syncs from step `BROKEN_AT` on."""
    generation = trainer.vllm_generation
    sync, reload, reset = generation.sync_weights, generation.runner.reload_weights, generation.llm.reset_prefix_cache

    def is_broken() -> bool:
        return trainer.state.global_step >= BROKEN_AT

    if broken == "everything":
        generation.sync_weights = lambda: None if is_broken() else sync()
    elif broken == "cache":
        generation.llm.reset_prefix_cache = lambda: None if is_broken() else reset()
    else:
        generation.runner.reload_weights = lambda weights_iterator: reload(
            weights_iterator=((n, x) for n, x in weights_iterator if not (is_broken() and broken in n))
        )


def main(case: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    output, engine = Path(case["output"]), {**ENGINE, **case.get("engine", {})}
    kind = case.get("trainer", "ours")
    config = {
        "output_dir": str(output),
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 12,
        "max_steps": case.get("steps", 6),
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "seed": 1,
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "logging_steps": 1,
        "save_strategy": "no",
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.1,
        "vllm_max_model_length": 64,
        "model_init_kwargs": {"dtype": case.get("dtype", "float32")},
        **case.get("config", {}),
    }
    # Two prompts in turn, each longer than a block of the prefix cache
    prompts = [" ".join(f"w{first + j}" for j in range(40)) for first in (0, 30)]
    given = {
        "model": case["model"],
        "reward_funcs": distinct,
        "train_dataset": Dataset.from_list([{"prompt": prompts[i % 2]} for i in range(64)]),
        "peft_config": LoraConfig(r=4, target_modules="all-linear", **case.get("peft", {}))
        if case.get("lora")
        else None,
    }
    if case.get("changed"):
        given["model"] = AutoModelForCausalLM.from_pretrained(case["model"])
        given["model"].get_parameter(case["changed"]).data += 0.02
    if kind == "ours":
        trainer = trl_ext.GRPOTrainer(args=trl_ext.GRPOConfig(vllm_engine_args=engine, **config), **given)
    else:
        used = partial(EngineGeneration, engine_args=engine)
        with names_replaced(trl.GRPOTrainer, **({"VLLMGeneration": used} if kind == "stock" else {})):
            trainer = trl.GRPOTrainer(args=trl.GRPOConfig(**config), **given)
    if case.get("delayed"):
        trainer._generate_single_turn = DelayedTurns(trainer, [prompts[:1] * 4 + prompts[1:] * 4] * config["max_steps"])
    if "broken" in case:
        break_sync(trainer, case["broken"])
    before = {name: x.detach().clone() for name, x in trainer.model.named_parameters()}
    error = None
    try:
        trainer.train()
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    drift = {}
    for way, named_params in (
        ("ours", EngineGeneration._iter_named_params),
        ("trl", VLLMGeneration._iter_named_params),
    ):
        start = {name: x.detach().clone() for name, x in trainer.model.named_parameters()}
        for _ in range(case.get("syncs", 0)):
            sum(1 for _ in named_params(trainer.vllm_generation))
        ended = trainer.model.named_parameters()
        drift[way] = max(float((x - start[name]).abs().max()) for name, x in ended)
    weights = {name: x.detach() for name, x in trainer.model.named_parameters()}
    torch.save(weights, output / "weights.pt")
    result = {
        "error": error,
        "log": trainer.state.log_history,
        "weights": str(output / "weights.pt"),
        "changed": [name for name, x in weights.items() if not torch.equal(x, before[name])],
        "drift": drift,
        "bytes_sent": getattr(trainer.vllm_generation, "bytes_sent", None),
    }
    (output / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
