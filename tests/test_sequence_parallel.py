"""The tokens of a batch split over two ranks, by accelerate's context and sequence parallelism, train as on one."""

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from accelerate import ParallelismConfig
from accelerate.utils import DeepSpeedSequenceParallelConfig
from torch.distributed.tensor import DTensor

import trl_ext
from ranks import Rank
from rewards import id_reward
from run_losses import Trainers
from tiny import lora_config, preferences, prompts, scripted_rollout


def trained(trainer: Any) -> dict[str, torch.Tensor]:
    """Copies of the trained weights, whole on every rank."""
    weights = {name: param for name, param in trainer.model.named_parameters() if param.requires_grad}
    if any(hasattr(x, "ds_status") for x in weights.values()):
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(weights.values())):
            return {name: x.detach().clone() for name, x in weights.items()}
    return {n: (x.detach().full_tensor() if isinstance(x, DTensor) else x.detach()).clone() for n, x in weights.items()}


def parallelism(engine: str) -> dict[str, Any]:
    """The arguments that ask for two ranks of one group."""
    if engine == "one":
        return {}
    if engine == "fsdp2":
        return {"parallelism_config": ParallelismConfig(cp_size=2)}
    handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
    return {"parallelism_config": ParallelismConfig(sp_size=2, sp_handler=handler), "ddp_backend": "gloo"}


def common(folder: Path, **config: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder / "run"),
        "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 2,
        "max_steps": 5,
        "learning_rate": 0.05,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.5,
        "gradient_checkpointing": False,
        "bf16": False,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        **config,
    }


def run(trainer: Any, rank: Rank | None) -> dict[str, Any]:
    fed: list[int] = []
    trainer.model.get_input_embeddings().register_forward_hook(lambda m, args, out: fed.append(args[0].numel()))
    initial = trained(trainer)
    trainer.train()
    if rank is not None:
        rank.check(trainer)
    logs = [log for log in trainer.state.log_history if "loss" in log]
    return {"logs": logs, "change": {n: x - initial[n] for n, x in trained(trainer).items()}, "fed": fed}


def dpo(rank: Rank | None, trainers: Trainers, folder: Path, lora: bool, engine: str, **config: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    trainer = trainers.dpo_trainer(
        model=os.environ["TINY_MODEL"],
        args=trainers.dpo_config(**common(folder, **parallelism(engine), **config)),
        train_dataset=preferences(24, seed=1),
        peft_config=lora_config() if lora else None,
    )
    return run(trainer, rank)


def grpo(rank: Rank | None, trainers: Trainers, folder: Path, lora: bool, engine: str, **config: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    config = {"num_generations": 3, "max_completion_length": 8, "beta": 0.1, **config}
    rollout = config.pop("rollout_func", scripted_rollout)
    trainer = trainers.grpo_trainer(
        model=os.environ["TINY_MODEL"],
        reward_funcs=id_reward,
        args=trainers.grpo_config(**common(folder, **parallelism(engine), **config)),
        train_dataset=prompts(24, seed=1),
        rollout_func=rollout,
        peft_config=lora_config() if lora else None,
    )
    return run(trainer, rank)


def on_rank(method: Any, **options: Any) -> Any:
    def case(rank: Rank) -> Any:
        if rank.engine != "fsdp2":
            from deepspeed.runtime.sequence_parallel import parallel_state_sp
            from deepspeed.utils import groups

            parallel_state_sp._release_sequence_parallel_groups()
            groups.mpu = None
        with warnings.catch_warnings():
            if rank.engine != "fsdp2":
                warnings.simplefilter("ignore")  # DeepSpeed imports and configures with many of its own
            return method(rank, folder=rank.folder, engine=rank.engine, **options)

    return case


METHODS = {"dpo": dpo, "grpo": grpo}
OURS = Trainers.of(trl_ext)
CASES = {
    f"{name}-{'lora' if lora else 'full'}": on_rank(method, trainers=OURS, lora=lora)
    for name, method in METHODS.items()
    for lora in (True, False)
}
CASES["grpo-draws"] = on_rank(grpo, trainers=OURS, lora=False, rollout_func=None)
