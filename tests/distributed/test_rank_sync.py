"""Random batches on two ranks, where one often has nothing to train on, do not hang and equal one process.

Both ranks run the same collectives in the same order, including those of DDP and FSDP2, as torch dispatches them.
"""

import os
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, TrainerCallback
from trl.trainer.dpo_trainer import DataCollatorForPreference

import trl_ext
from drop_in_cases import DPO_LEARNING_RATES, DPO_LOSSES, GRPO_LOSSES
from ranks import Rank, run_on_ranks
from rewards import id_reward
from tiny import ROLLOUTS, Workshop, lora_config, preferences, prompts
from token_counts import as_of_a_library
from trained_weights import far, trained
from trl_ext.scoring.forward import ScoringOptions, attach_scoring_forward

STEPS = 5
GENERATIONS = 4
TOLERANCE = 1e-4


class Collectives(TorchDispatchMode):
    """Records each collective that this process starts: its name and the sizes of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            sizes = tuple(x.numel() for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, torch.Tensor))
            # Each rank sends other numbers of bytes when rows move
            self.seen.append((func.name(), () if "alltoall" in func.name() else sizes))
        return func(*args, **(kwargs or {}))


class Calls(TrainerCallback):
    """Counts the micro-batches, and the forwards and backwards of the policy."""

    def __init__(self) -> None:
        self.batches = 0
        self.forwards = {"train": 0, "no gradient": 0}
        self.backwards = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, model: torch.nn.Module, **kwargs: Any) -> None:
        def after(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
            with_gradient = torch.is_grad_enabled()
            self.forwards["train" if with_gradient else "no gradient"] += 1
            if with_gradient:
                output.register_hook(self._back)

        layers = [module for module in model.modules() if type(module).__name__.endswith("DecoderLayer")]
        layers[-1].register_forward_hook(as_of_a_library(after))

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.batches += 1

    on_step_end = on_substep_end

    def _back(self, gradient: torch.Tensor) -> None:
        self.backwards += 1


class SomeUnlabelled(DataCollatorForPreference):
    """Masks the completions of the rows that `marks` names by the first token of their prompt."""

    marks: frozenset[int] = frozenset()

    def torch_call(self, examples: list[Any]) -> dict[str, Any]:
        batch = super().torch_call(examples)
        for row, ids in enumerate(batch["input_ids"].tolist()):
            if ids[0] in self.marks:
                batch["completion_mask"][row] = 0
        return batch


def some_dead(seed: int, share: float) -> Any:
    """Return rewards that are equal for all completions of some prompts, and sometimes for all prompts of a rank."""

    def reward(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        scores = id_reward(completion_ids)
        rows = [int(prompt.split()[0][1:]) for prompt in prompts]
        return [0.5 if _dead(row, seed, share) else score for row, score in zip(rows, scores, strict=True)]

    return reward


def _dead(row: int, seed: int, share: float) -> bool:
    of_run, of_row = random.Random(f"{seed}|{row // 2}"), random.Random(f"{seed}|{row}|row")
    return of_run.random() < share or of_row.random() < share / 2


def common(folder: Path, draw: random.Random, processes: int) -> dict[str, Any]:
    return {
        "output_dir": str(folder / "out"),
        "max_steps": STEPS,
        "gradient_accumulation_steps": draw.choice([1, 2, 3]),
        "optim": "sgd",
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "max_grad_norm": draw.choice([0.0, 0.5]),
        "gradient_checkpointing": draw.random() < 0.3,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "bf16": False,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "ddp_timeout": 60,
        **({"use_cpu": True} if processes == 1 else {}),
    }


def quantile(seed: int) -> float:
    """Use one seed only: if equal completions put an entropy on the quantile, rounding picks the token."""
    return 0.47 if seed == 5 else 1.0


def is_beside_stock(kind: str, seed: int) -> bool:
    """Return whether one process sees other batches: if Accelerate fills the last batch with earlier rows, or
    if each micro-batch picks its tokens of high entropy, because each rank shuffles its rows."""
    return seed % 2 == 1 if kind == "dpo" else quantile(seed) < 1


def dpo(folder: Path, seed: int, processes: int, library: Any = trl_ext) -> Any:
    draw = random.Random(f"dpo {seed}")
    config = common(folder, draw, processes)
    loss_type = draw.choice([x for x in DPO_LOSSES if x not in ("sft", "bco_pair", "aot", "aot_unpaired")])
    config["learning_rate"] = DPO_LEARNING_RATES.get(loss_type, 1e-2)
    a_rank = draw.choice([1, 2])
    config |= {"loss_type": [loss_type], **DPO_LOSSES[loss_type]}
    # Not compared with stock, which writes them into a folder of each rank, as these tests set up `datasets`
    precomputed = draw.random() < 0.3 and not is_beside_stock("dpo", seed)
    # Rows whose whole completion is truncated are dropped, and the others may not fill the last batch
    longest = draw.choice([None, 6]) if is_beside_stock("dpo", seed) else None
    config |= {"max_length": longest, "precompute_ref_log_probs": precomputed}
    store = "memory" if config["precompute_ref_log_probs"] else draw.choice(["memory", "off"])
    fed = {"padding_free": draw.choice([None, False]), "share_prompts": draw.choice([None, False])}
    config |= {"reference_store": store, **fed} if library is trl_ext else {}
    collator = SomeUnlabelled(pad_token_id=0, max_length=config["max_length"])
    collator.marks = frozenset(draw.sample(range(3, 97), 30))
    torch.manual_seed(0)
    return library.DPOTrainer(
        model=os.environ["TINY_MODEL"],
        args=library.DPOConfig(
            per_device_train_batch_size=2 * a_rank // processes,
            per_device_eval_batch_size=2 * a_rank // processes,
            **config,
        ),
        train_dataset=preferences(11 if is_beside_stock("dpo", seed) else 12, seed=seed),
        eval_dataset={"a": preferences(5, seed=seed + 1), "b": preferences(3, seed=seed + 2)},
        data_collator=collator,
        peft_config=lora_config() if draw.random() < 0.5 else None,
    )


def grpo(folder: Path, seed: int, processes: int, library: Any = trl_ext) -> Any:
    draw = random.Random(f"grpo {seed}")
    config = common(folder, draw, processes)
    loss_type = draw.choice([x for x in GRPO_LOSSES if x != "bnpo"])  # which divides by each rank's tokens
    config |= {"loss_type": loss_type, **GRPO_LOSSES[loss_type]}
    config |= {"beta": draw.choice([0.0, 0.1]), "num_iterations": draw.choice([1, 1, 2])}
    config |= {"importance_sampling_level": draw.choice(["token", "token", "sequence"])}
    config |= {"mask_truncated_completions": draw.random() < 0.3}
    config |= {"top_entropy_quantile": quantile(seed)}
    # Tokens of high entropy are picked in each micro-batch, which therefore is not split
    parts = draw.choice([None, 20, 40]) if quantile(seed) == 1.0 else None
    fed = {"padding_free": draw.choice([None, False]), "share_prompts": draw.choice([None, False])}
    config |= {"max_tokens_per_micro_batch": parts, **fed} if library is trl_ext else {}
    a_rank = GENERATIONS * draw.choice([1, 2])  # the rollout counts a prompt's completions on each rank
    rollout = draw.choice(["scripted", "masked", "masked_whole"])
    share = draw.choice([0.2, 0.4, 0.6])
    return library.GRPOTrainer(
        model=os.environ["TINY_MODEL"],
        reward_funcs=some_dead(seed, share),
        rollout_func=ROLLOUTS[rollout],
        args=library.GRPOConfig(
            num_generations=GENERATIONS,
            per_device_train_batch_size=2 * a_rank // processes,
            per_device_eval_batch_size=2 * a_rank // processes,
            max_completion_length=8,
            shuffle_dataset=False,
            **config,
        ),
        train_dataset=prompts(40, seed=seed),
        eval_dataset=prompts(3, seed=seed + 1),
        peft_config=lora_config() if draw.random() < 0.5 else None,
    )


TRAINERS = {"dpo": dpo, "grpo": grpo}


def run(folder: Path, kind: str, seed: int, processes: int = 2, library: Any = trl_ext) -> tuple[Any, dict[str, Any]]:
    trainer = TRAINERS[kind](folder, seed, processes, library)
    calls = Calls()
    trainer.add_callback(calls)
    initial = trained(trainer.model)
    with Collectives() as collectives:
        trainer.train()
    change = {name: weight - initial[name] for name, weight in trained(trainer.model).items()}
    return trainer, {
        "change": change,
        "calls": (calls.forwards, calls.backwards),
        "collectives": collectives.seen,
        "losses": [log["loss"] for log in trainer.state.log_history if "loss" in log],
        "batches": calls.batches,
    }


def on_rank(rank: Rank, kind: str, seed: int, library: Any = trl_ext) -> dict[str, Any]:
    trainer, result = run(rank.folder, kind, seed, library=library)
    for module in trainer.model_wrapped.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # the evaluation at the end leaves the last layers gathered
    rank.check(trainer)
    return result


SEEDS = range(14)
CASES = {f"{kind}-{seed}": partial(on_rank, kind=kind, seed=seed) for kind in TRAINERS for seed in SEEDS}
CASES |= {
    f"stock-{kind}-{seed}": partial(on_rank, kind=kind, seed=seed, library=trl)
    for kind in TRAINERS
    for seed in SEEDS
    if is_beside_stock(kind, seed)
}


def cannot_pack_on_rank_1(rank: Rank) -> tuple[str, bool]:
    """Make packing fail in the first batch of rank 1 only; return the shapes of the forwards after it."""
    trainer = grpo(rank.folder, seed=1, processes=2)
    assert trainer.padding_free
    shapes = []

    class Embedding(torch.nn.Embedding):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            shapes.append(tuple(ids.shape))
            return super().forward(ids) * (1.5 if rank.index == 1 and len(ids) == 1 else 1.0)

    trainer.model.get_input_embeddings().__class__ = Embedding
    trainer.train()
    rank.check(trainer)
    return str(trainer.explain()["packing"]), max(rows for rows, _ in shapes[-5:]) > 1


def spread_after_a_batch_without_labels(rank: Rank) -> tuple[float, bool]:
    """Run with a whole weight and no label on rank 1, then with a sharded one; return the differences, if checked."""
    model = AutoModelForCausalLM.from_pretrained(os.environ["TINY_MODEL"])
    model.lm_head.requires_grad_(False)
    scoring = attach_scoring_forward(model, ScoringOptions(outputs=("log_probs", "entropy")))
    torch.manual_seed(rank.index)
    ids = torch.randint(3, 97, (2, 5 + rank.index))
    first = torch.full_like(ids, -100) if rank.index == 1 else ids
    model(input_ids=ids, labels=first, fused_lm_head=True).log_probs.sum().backward()
    with torch.inference_mode():  # in which nothing is checked
        whole = model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs.clone()
    mesh = init_device_mesh("cpu", (rank.processes,))
    weight = distribute_tensor(model.lm_head.weight.data, mesh, [Shard(0)])
    model.lm_head.weight = torch.nn.Parameter(weight, requires_grad=False)
    log_probs = model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs
    log_probs.sum().backward()
    rank.checked = True
    sharded_weight_is_checked = any(is_sharded for is_sharded, *_ in scoring._checked_paths)
    return (log_probs.detach() - whole).abs().max().item(), sharded_weight_is_checked


CASES |= {"cannot-pack": cannot_pack_on_rank_1, "spread": spread_after_a_batch_without_labels}


@pytest.mark.slow
def test_ranks_take_the_same_decisions(workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TINY_MODEL", workshop.model("untied"))
    results = run_on_ranks(__file__, ["cannot-pack", "spread"], "ddp", tmp_path)
    for off, checked in results["spread"]:
        assert off <= 1e-5
        assert checked
    (first, fed_padded), (second, _) = results["cannot-pack"]
    assert first == second
    assert "hidden states differ" in first
    assert fed_padded


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_random_batches_train_as_on_one_process(
    engine: str, workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TINY_MODEL", workshop.model("untied"))
    names = {f"{kind}-{seed}": (kind, seed) for seed in SEEDS for kind in TRAINERS}
    of_stock = [f"stock-{name}" for name in names]
    results = run_on_ranks(__file__, [x for x in (*names, *of_stock) if x in CASES], engine, tmp_path, timeout=900)
    wrong = {}
    for name, (kind, seed) in names.items():
        first, second = results[name]
        stock = f"stock-{name}"
        _, want = (None, results[stock][0]) if stock in results else run(tmp_path, kind, seed, processes=1)
        found: dict[str, Any] = {what: (first[what], second[what]) for what in ("calls", "collectives")}
        found = {what: counts for what, counts in found.items() if counts[0] != counts[1]}
        apart = {"ranks": far(second["change"], first["change"]), "weights": far(first["change"], want["change"])}
        found |= {what: distance for what, distance in apart.items() if not distance <= TOLERANCE}
        if first["losses"] != pytest.approx(want["losses"], rel=1e-3, abs=1e-5):
            found["losses"] = (first["losses"], want["losses"])
        if found:
            wrong[name] = found
        assert first["collectives"]
        assert first["calls"][1] == first["calls"][0]["train"] > 0
    assert not wrong, "\n".join(f"{name}: {found}" for name, found in wrong.items())
    assert sum(results[name][0]["batches"] for name in names) >= 200
