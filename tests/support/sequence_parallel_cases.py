"""Training runs in which the tokens of each batch are split over ranks, for `test_sequence_parallel.py` to launch."""

import contextlib
import os
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from accelerate import ParallelismConfig
from accelerate.utils import DeepSpeedSequenceParallelConfig
from transformers import TrainerCallback

from launch import LaunchedRank
from rewards import id_reward
from tiny import lora_config, preferences, prompts, scripted_rollout
from trl_ext import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer
from trl_ext.distributed import sequence_parallel

CP = ("fsdp2",)
# Wall-clock times, and a count that is 0 under ZeRO-3
NOT_COMPARED = ("runtime", "per_second", "step_time", "preparation_time", "total_flos", "seconds/")


class Seen(NamedTuple):
    """The record of one rank: logs, the change of the trained weights, and the tokens of each forward."""

    logs: list[dict[str, float]]
    change: dict[str, torch.Tensor]
    fed: list[int]


def parallelism(rank: LaunchedRank | None, size: int) -> dict[str, Any]:
    """Return the arguments that request groups of `size` ranks; none on one process."""
    if rank is None:
        return {}
    others = {"dp_shard_size": rank.processes // size}
    if rank.engine in CP:
        return {"parallelism_config": ParallelismConfig(cp_size=size, **others)}
    handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
    return {"parallelism_config": ParallelismConfig(sp_size=size, sp_handler=handler, **others)}


def arguments(rank: LaunchedRank | None, config: dict[str, Any]) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp()) if rank is None else rank.folder
    # One process gets the batches of both groups of two ranks
    groups = 1 if rank is None else rank.processes // 2
    rows = 6 // groups
    return {
        "output_dir": str(folder / "run"),
        "per_device_train_batch_size": rows,
        "per_device_eval_batch_size": rows,
        "gradient_accumulation_steps": 2,
        "max_steps": 5,
        "learning_rate": 0.05,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "gradient_checkpointing": False,
        "bf16": False,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        **({"use_cpu": True} if rank is None else {**parallelism(rank, 2), **rank.training_arguments()}),
        **config,
    }


def dpo(rank: LaunchedRank | None, model: str = "untied", lora: bool = False, **config: Any) -> Any:
    evaluated, rows = config.pop("evaluated", None), config.pop("rows", 40)
    return DPOTrainer(
        model=str(Path(os.environ["TINY_MODELS"]) / f"{model}-0"),
        args=DPOConfig(**arguments(rank, {"reference_store": "memory", **config})),
        train_dataset=preferences(rows, seed=1),
        eval_dataset=evaluated and preferences(evaluated, seed=2),
        peft_config=lora_config() if lora else None,
    )


def reward(rank: LaunchedRank | None, **config: Any) -> Any:
    return RewardTrainer(
        model=str(Path(os.environ["TINY_MODELS"]) / "untied-0"),
        args=RewardConfig(**arguments(rank, config)),
        train_dataset=preferences(8, seed=1),
    )


def grpo(rank: LaunchedRank | None, model: str = "untied", lora: bool = False, **config: Any) -> Any:
    rollout = config.pop("rollout_func", scripted_rollout)
    evaluated = config.pop("evaluated", None)
    config = {"num_generations": 3, "max_completion_length": 8, "beta": 0.1, **config}
    return GRPOTrainer(
        model=str(Path(os.environ["TINY_MODELS"]) / f"{model}-0"),
        reward_funcs=id_reward,
        args=GRPOConfig(**arguments(rank, config)),
        train_dataset=prompts(40, seed=1),
        eval_dataset=evaluated and prompts(evaluated, seed=2),
        rollout_func=rollout,
        peft_config=lora_config() if lora else None,
    )


def weights(rank: LaunchedRank | None, trainer: Any) -> dict[str, torch.Tensor]:
    """Return whole copies of the trained weights."""
    trained = {name: param for name, param in trainer.model.named_parameters() if param.requires_grad}
    return {name: x.detach().clone() for name, x in trained.items()} if rank is None else rank.whole(trained)


class _Check(TrainerCallback):
    """Checks the engine after each step, because an evaluation can leave sharded weights gathered."""

    def __init__(self, rank: LaunchedRank, trainer: Any) -> None:
        self.rank, self.trainer = rank, trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.rank.check(self.trainer)


def trained(rank: LaunchedRank | None, build: Callable[..., Any], **config: Any) -> Seen:
    """Train five steps; return the record."""
    torch.manual_seed(0)
    trainer = build(rank, **config)
    fed: list[int] = []
    trainer.model.get_input_embeddings().register_forward_hook(lambda module, args, out: fed.append(args[0].numel()))
    before = weights(rank, trainer)
    if rank is not None:
        trainer.add_callback(_Check(rank, trainer))
    trainer.train()
    logs = [
        {name: x for name, x in log.items() if not any(word in name for word in NOT_COMPARED)}
        for log in trainer.state.log_history
    ]
    return Seen(logs, {name: x - before[name] for name, x in weights(rank, trainer).items()}, fed)


def resumed(rank: LaunchedRank) -> None:
    """Check that a trainer that resumes from another's checkpoint takes the same last steps, of five."""
    # On disk, so that the second trainer has the first one's log-probs: pairs of other steps round otherwise
    store = {"reference_store": "disk", "reference_store_dir": str(rank.folder / "store")}
    common = {"output_dir": str(rank.folder / "resumed"), "optim": "adamw_torch", **store}
    torch.manual_seed(0)
    first = dpo(rank, save_strategy="steps", save_steps=2, **common)
    first.train()
    rank.check(first)
    torch.manual_seed(1)
    second = dpo(rank, **common)
    second.train(resume_from_checkpoint=str(rank.folder / "resumed" / "checkpoint-2"))
    after = weights(rank, second)
    assert all(torch.equal(x, after[name]) for name, x in weights(rank, first).items())


def unscaled(rank: LaunchedRank, **config: Any) -> Seen:
    """Train as a control, with the mean in place of the sum over the group, or the sum in place of the mean."""
    init = sequence_parallel.SequenceGroup.__init__

    def wrong(self: Any, *args: Any) -> None:
        init(self, *args)
        self.gradient_factor = 3 - self.gradient_factor  # 1 for 2

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequence_parallel.SequenceGroup, "__init__", wrong)
        return trained(rank, **config)


def unexchanged(rank: LaunchedRank, **config: Any) -> Seen:
    """Train as a control, without exchanging the gradients of exchanged tensors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequence_parallel._Exchanged, "backward", staticmethod(lambda ctx, gradient: (gradient, None)))
        return trained(rank, **config)


def refused(rank: LaunchedRank, build: Callable[..., Any], words: str, **config: Any) -> None:
    """Check that building the trainer raises `ValueError`."""
    with pytest.raises(ValueError, match=words):
        build(rank, **config)
    rank.checked = True  # there is no engine to check


def other_rows(rank: LaunchedRank) -> None:
    """Check that ranks of a group stop if they get different batches."""
    trainer = dpo(rank)
    collate = trainer.data_collator
    trainer.data_collator = lambda rows: collate(rows[rank.index : rank.index + 4])
    with pytest.raises(RuntimeError, match="got different batches"):
        trainer.train()
    rank.checked = True


def other_completions(rank: LaunchedRank) -> None:
    """Check that ranks of a group stop if they generate different completions."""

    def rollout(*args: Any, **kwargs: Any) -> dict[str, Any]:
        drawn = scripted_rollout(*args, **kwargs)
        drawn["completion_ids"] = [[ids[0] + rank.index, *ids[1:]] for ids in drawn["completion_ids"]]
        return drawn

    trainer = grpo(rank, rollout_func=rollout)
    with pytest.raises(RuntimeError, match="generated different completions"):
        trainer.train()
    rank.checked = True


def judged(rank: LaunchedRank | None) -> Seen:
    """Train with rewards and random numbers that differ on the ranks of a group, which must use its first rank's."""
    index = 0 if rank is None else rank.index

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        torch.rand(1 + index)
        return [(i % 3) ** (1 + index) for i in range(len(completion_ids))]

    def build(rank: LaunchedRank | None) -> Any:
        trainer = grpo(rank)
        trainer.reward_funcs[0] = reward
        return trainer

    return trained(rank, build)


RUNS = {
    "dpo-full": partial(trained, build=dpo, gradient_checkpointing=True),
    "dpo-lora": partial(trained, build=dpo, lora=True, max_grad_norm=0.3),
    # A number of rows that fills all batches of two groups; accelerate would fill the last ones with other rows
    "dpo-whole": partial(trained, build=dpo, rows=36),
    "dpo-tied": partial(trained, build=dpo, model="tied", max_grad_norm=0.3),
    "dpo-experts": partial(trained, build=dpo, model="experts"),
    "dpo-evaluated": partial(trained, build=dpo, evaluated=12, eval_strategy="steps", eval_steps=2),
    "grpo-full": partial(trained, build=grpo, max_grad_norm=0.3),
    "grpo-lora": partial(trained, build=grpo, lora=True),
    "grpo-batch": partial(trained, build=grpo, scale_rewards="batch", loss_type="dr_grpo"),
    "grpo-judged": judged,
    "grpo-draws": partial(trained, build=grpo, rollout_func=None, num_iterations=2),
    "grpo-evaluated": partial(
        trained, build=grpo, rollout_func=None, evaluated=4, eval_strategy="steps", eval_steps=2, beta=0.0
    ),
}
CONTROLS = {
    "dpo-full-unscaled": partial(unscaled, build=dpo),
    "dpo-full-unexchanged": partial(unexchanged, build=dpo),
    "grpo-full-unexchanged": partial(unexchanged, build=grpo),
}
REFUSALS = {
    "padded": partial(refused, build=dpo, padding_free=False, words=r"_size=2` .*`padding_free=False`"),
    "vllm": partial(
        refused, build=grpo, use_transformers_continuous_batching=True, words=r"_size=2`, .*different comp"
    ),
    "generations": partial(refused, build=grpo, num_generations=8, words=r"must be a multiple of `num_generations`"),
    "heads": partial(refused, build=dpo, model="odd_heads", words=r"`num_key_value_heads=1` is not a multiple of 2"),
    "reward": partial(refused, build=reward, words=r"`[cs]p_size=2` is not supported by `RewardTrainer`"),
    "other-rows": other_rows,
    "other-completions": other_completions,
}
CHECKPOINTS = {"resumed": resumed}


def quiet(case: Callable[..., Any]) -> Callable[[LaunchedRank], Any]:
    """Run `case` without DeepSpeed's warnings."""

    def run(rank: LaunchedRank) -> Any:
        with contextlib.ExitStack() as stack:
            if rank.is_zero:
                stack.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore")  # DeepSpeed has many
            return case(rank)

    return run


CASES = {name: quiet(case) for name, case in {**RUNS, **CONTROLS, **REFUSALS, **CHECKPOINTS}.items()}
