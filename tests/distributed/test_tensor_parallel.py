"""DPO and GRPO with tensor parallelism train as one process does with the same batch.

Stock GRPO cannot be compared: the ranks of a group sample different completions, and a forward mixes them.
"""

import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TrainerCallback

import trl_ext
from ranks import Rank, run_on_ranks, split
from resumable_runs import made_up
from rewards import id_reward
from run_losses import WALL_CLOCK
from tiny import Workshop, lora_config, preferences, prompts
from token_counts import counted
from trained_weights import far, trained
from trl_ext.compat.replaced import names_replaced
from trl_ext.distributed.lora import make_adapter
from trl_ext.distributed.tensor_parallel import TensorParallel

COMMON = {
    "max_steps": 4,
    "gradient_accumulation_steps": 2,
    "learning_rate": 0.02,
    "lr_scheduler_type": "constant",
    "optim": "sgd",
    "seed": 3,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "gradient_checkpointing": False,
    "bf16": False,
    "report_to": "none",
    "save_strategy": "no",
    "logging_steps": 1,
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}
DPO = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}
GRPO = {
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "num_generations": 4,
    "max_completion_length": 6,
    "temperature": 1.0,
    "beta": 0.1,
    "num_iterations": 2,
}


SMOOTHED: dict[str, Any] = {
    "loss_type": ["cdpo", "sft"],
    "label_smoothing": 0.1,
    "sft_label_smoothing": 0.3,
    "sft_label_smoothing_convention": "megatron",
}
ADAMW: dict[str, Any] = {"optim": "adamw_torch", "gradient_checkpointing": True, "learning_rate": 1e-3}


BEST: dict[str, Any] = {
    "load_best_model_at_end": True,
    "eval_steps": 1,
    "metric_for_best_model": "eval_made_up",
    "prepare": partial(made_up, best_step=2),
}


def distinct_words(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Reward some groups with equal rewards, so that they have zero advantage."""
    return [float(len(set(ids)) // 2) for ids in completion_ids]


def random_reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Return a different value on each rank, however the ranks are seeded."""
    generator = random.SystemRandom()
    torch.rand(generator.randint(1, 9))
    return [generator.random() for _ in completion_ids]


def random_rollout(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
    """Return different completions on each rank, as from an environment without a seed."""
    generator = random.SystemRandom()
    completions = [[generator.randint(3, 96) for _ in range(generator.randint(1, 6))] for _ in prompts]
    return {
        "prompt_ids": trainer.processing_class(prompts)["input_ids"],
        "completion_ids": completions,
        "logprobs": None,
    }


def noise_on_scores(trainer: Any) -> None:
    """Add different noise on each rank, as from devices that round differently. Log-probs do not use this hook."""
    generator = torch.Generator().manual_seed(random.SystemRandom().getrandbits(32))

    def hook(module: torch.nn.Module, inputs: Any, logits: torch.Tensor) -> torch.Tensor:
        return logits + torch.randn(logits.shape, generator=generator)

    trainer.model.get_output_embeddings().register_forward_hook(hook)


@contextmanager
def recorded(trainer: Any) -> Iterator[dict[str, Any]]:
    """Record the training in the `with` block: logs, and tokens that the model processes."""
    logs: list[dict[str, float]] = []

    class Recorder(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
            record["logs"].append({name: x for name, x in logs.items() if not name.endswith(WALL_CLOCK)})

    record: dict[str, Any] = {"logs": logs}
    trainer.add_callback(Recorder())
    initial = trained(trainer.model)
    with counted() as tokens:
        yield record
    record |= {"fed": asdict(tokens), "weights": trained(trainer.model)}
    record["change"] = {name: weight - initial[name] for name, weight in record["weights"].items()}


def train(kind: str, folder: Path, model: str, place: dict[str, Any], adapter: str | None, **options: Any) -> Any:
    """Train, and return the trainer with its `record`."""
    reward_funcs, rollout_func = options.pop("reward", distinct_words), options.pop("rollout", None)
    peft_config, prepare = options.pop("peft_config", None), options.pop("prepare", None)
    resume = options.pop("resume", None)
    if "init_lora_weights" in options:
        peft_config = lora_config(init_lora_weights=options.pop("init_lora_weights"))
    policy: Any = model
    model_init_kwargs: dict[str, Any] | None = {**place, "dtype": "float32"}
    if adapter:
        policy = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(model, **model_init_kwargs), adapter, is_trainable=True
        )
        model_init_kwargs = None
    arguments = {**COMMON, "output_dir": str(folder / "out"), "model_init_kwargs": model_init_kwargs}
    trainer: Any
    if options.pop("precomputed", False):
        folder_of_store = str(folder / "store")
        options |= {"precompute_ref_log_probs": True, "reference_store": "disk", "reference_store_dir": folder_of_store}
    if kind == "dpo":
        trainer = trl_ext.DPOTrainer(
            model=policy,
            args=trl_ext.DPOConfig(**{**arguments, **DPO, "reference_store": "memory", **options}),
            train_dataset=preferences(13, seed=1),
            eval_dataset=preferences(3, seed=2),
            peft_config=peft_config,
        )
    else:
        trainer = trl_ext.GRPOTrainer(
            model=policy,
            args=trl_ext.GRPOConfig(**{**arguments, **GRPO, **options}),
            reward_funcs=reward_funcs,
            rollout_func=rollout_func,
            train_dataset=prompts(8, seed=1),
            eval_dataset=prompts(3, seed=2),
            peft_config=peft_config,
        )
    if prepare is not None:
        prepare(trainer)
    with recorded(trainer) as trainer.record:
        trainer.train(resume)
    return trainer


def on_rank(rank: Rank, kind: str, adapter: str | None, fsdp_size: int = 1, **options: Any) -> dict[str, Any]:
    folder = rank.folder / "-".join([kind, adapter or "full", *options])
    place = split(fsdp_size) if rank.engine == "tp" else {}
    if fsdp_size > 1:  # transformers' embedding gives FSDP the local tensor of a DTensor, which is never written to
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
    trainer = train(kind, folder, models(rank)["model"], place, adapter and models(rank)[adapter], **options)
    rank.check(trainer)
    trainer.save_model(str(folder / "saved"))
    return {**trainer.record, "saved": str(folder / "saved")}


def resumed(rank: Rank, kind: str, adapter: str | None, fsdp_size: int = 1, **options: Any) -> None:
    """A run resumed from the first of three steps, within GRPO's generation cycle, ends with the same weights."""
    folder = rank.folder / "-".join(["resumed", kind, adapter or "full", *options])
    if fsdp_size > 1:
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
    run = partial(
        train,
        *(kind, folder, models(rank)["model"], split(fsdp_size), adapter and models(rank)[adapter]),
        **{
            **ADAMW,
            "max_steps": 3,
            "save_strategy": "steps",
            "save_steps": 1,
            "lr_scheduler_type": "linear",
            **options,
        },
    )
    through = run()
    assert through.args.save_only_model is options.get("save_only_model", False)
    checkpoints = Path(through.args.output_dir)
    again = run(resume=str(checkpoints / "checkpoint-1"))
    rank.check(again)
    found = far(again.record["weights"], through.record["weights"])
    if options.get("save_only_model"):
        assert found > 1e-4  # another optimizer, as the warning says
    else:
        assert found == 0
        steps, after = (
            [(x["loss"], x["grad_norm"]) for x in trainer.record["logs"] if "loss" in x] for trainer in (through, again)
        )
        assert steps[1:] == after
    if options.get("load_best_model_at_end"):
        assert Path(again.state.best_model_checkpoint).name == "checkpoint-2"
        for trainer in (through, again):
            assert_saved([{**trainer.record, "saved": str(checkpoints / "checkpoint-2")}], bool(adapter))


def models(rank: Rank) -> dict[str, str]:
    found: dict[str, str] = torch.load(rank.folder / "models")
    return found


def refused(rank: Rank, words: str, kind: str = "grpo", fsdp_size: int = 1, **options: Any) -> None:
    with pytest.raises(ValueError, match=words):
        train(kind, rank.folder / "refused", models(rank)["model"], split(fsdp_size), None, **options)
    rank.checked = True  # no training, so no engine to check


def random_adapter(rank: Rank) -> list[torch.Tensor]:
    """Return the whole A of each row-wise layer, as PEFT draws it by default."""
    trainer = train(
        *("dpo", rank.folder / "random-adapter", models(rank)["model"], split(), None),
        peft_config=lora_config(target_modules=["o_proj", "q_proj"], init_lora_weights=True),
        learning_rate=0.0,
    )
    rank.check(trainer)
    assert all(not x.any() for name, x in trainer.record["weights"].items() if "lora_B" in name)
    return [x for name, x in trainer.record["weights"].items() if "o_proj.lora_A" in name]


SOME = {"target_modules": ["down_proj", "embed_tokens", "q_proj", "unsplit"]}
# PEFT's default initialization, options that change the draws, and the dtype of the model
FRESH: dict[str, tuple[dict[str, Any], str]] = {
    "default": ({"init_lora_weights": True}, "float32"),
    "gaussian": ({"init_lora_weights": "gaussian", **SOME}, "float32"),
    "random": ({"lora_bias": True, "rank_pattern": {"o_proj": 2}}, "float32"),
    "bfloat16": (SOME, "bfloat16"),
}


def fresh_adapters(folder: str, seed: int, place: dict[str, Any]) -> dict[str, Any]:
    """Return, for each of `FRESH`, the weights that PEFT makes for a trainer, and the random state afterwards."""
    made = {}
    for name, (options, dtype) in FRESH.items():
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **place)
        base.model.layers[0].unsplit = torch.nn.Linear(8, 8, dtype=base.dtype)  # in no plan
        torch.manual_seed(seed)
        with (
            warnings.catch_warnings(),
            names_replaced(trl.DPOTrainer, get_peft_model=partial(make_adapter, get_peft_model)),
        ):
            warnings.filterwarnings("ignore", "`lora_bias=True` was passed but")
            model = sys.modules[trl.DPOTrainer.__module__].get_peft_model(base, lora_config(**options))
        made[name] = {**trained(model), "the random state": torch.get_rng_state()}
    return made


def fresh_on_rank(rank: Rank) -> dict[str, Any]:
    rank.checked = True  # no training, so no engine to check
    return fresh_adapters(models(rank)["model"], 5 + rank.index, split())


def refused_adapters(rank: Rank) -> None:
    attempt = partial(refused, rank, kind="dpo")
    attempt(r"use_dora=True.*Set `use_dora=False`", peft_config=lora_config(use_dora=True))
    attempt(r"init_lora_weights='pissa'.*to True or 'gaussian'", peft_config=lora_config(init_lora_weights="pissa"))
    attempt(r"modules_to_save=\['lm_head'\]", peft_config=lora_config(modules_to_save=["lm_head"]))


def refused_arguments(rank: Rank) -> None:
    refused(rank, r"has 4 rows.*`num_generations`, which is 8.*Multiply", num_generations=8, steps_per_generation=1)
    refused(rank, r"`use_transformers_continuous_batching=True`", use_transformers_continuous_batching=True)
    refused(rank, r"reference_device='cpu'.*tensor parallelism", reference_device="cpu")


def refused_reward_model(rank: Rank) -> None:
    arguments = {**COMMON, "output_dir": str(rank.folder / "out"), "model_init_kwargs": split(1)}
    with pytest.raises(ValueError, match="`distributed_config` splits the model over 2 ranks, which `RewardTrainer`"):
        trl_ext.RewardTrainer(
            model=models(rank)["model"],
            args=trl_ext.RewardConfig(**arguments, per_device_train_batch_size=2),
            train_dataset=preferences(8, seed=1),
        )
    rank.checked = True


def different_rows(rank: Rank) -> None:
    model = AutoModelForCausalLM.from_pretrained(models(rank)["model"], **split())
    ranks = TensorParallel.of(model)
    assert ranks is not None
    assert (ranks.rank, ranks.size, ranks.copy, ranks.copies) == (rank.index, 2, 0, 1)
    ranks.check_same(torch.arange(6).view(2, 3))
    with pytest.raises(ValueError, match="were given different batches"):
        ranks.check_same(torch.arange(6).view(2, 3) + rank.index)
    with pytest.raises(ValueError, match="were given different batches"):
        ranks.check_same(torch.arange(6 + rank.index))
    with pytest.raises(ValueError, match="were given different batches"):
        ranks.check_same(torch.tensor([3, 1] if rank.index else [1, 2]))  # their sums of id * position are equal
    assert TensorParallel.of(torch.nn.Linear(2, 2)) is None
    rank.checked = True


CASES: dict[str, Callable[[Rank], Any]] = {
    f"{kind}-{adapter or 'full'}": partial(on_rank, kind=kind, adapter=adapter)
    for kind in ("dpo", "grpo")
    for adapter in (None, "adapter")
}
CASES |= {
    "grpo-parts": partial(on_rank, kind="grpo", adapter=None, max_tokens_per_micro_batch=24, dynamic_sampling=True),
    "grpo-dapo": partial(on_rank, kind="grpo", adapter=None, loss_type="dapo", scale_rewards="batch", beta=0.0),
    "grpo-kept": partial(on_rank, kind="grpo", adapter=None, keep_sampling_mask=True, top_k=8, top_p=0.9),
    # The head's rows are split, trained and frozen
    "dpo-smoothed": partial(on_rank, kind="dpo", adapter=None, **SMOOTHED),
    "dpo-smoothed-adapter": partial(on_rank, kind="dpo", adapter="adapter", **SMOOTHED),
    "dpo-precomputed": partial(on_rank, kind="dpo", adapter=None, precomputed=True),
    "grpo-adamw": partial(on_rank, kind="grpo", adapter=None, **ADAMW),
    **{
        f"resumed-{kind}-{adapter or 'full'}": partial(resumed, kind=kind, adapter=adapter)
        for kind in ("dpo", "grpo")
        for adapter in (None, "adapter")
    },
    "resumed-2d-dpo": partial(resumed, kind="dpo", adapter=None, fsdp_size=2),
    "resumed-2d-grpo": partial(resumed, kind="grpo", adapter=None, fsdp_size=2),
    "resumed-best": partial(resumed, kind="dpo", adapter=None, **BEST),
    "resumed-best-adapter": partial(resumed, kind="dpo", adapter="adapter", **BEST),
    "resumed-without-optimizer": partial(resumed, kind="dpo", adapter=None, save_only_model=True),
    "random-adapter": random_adapter,
    "fresh": fresh_on_rank,
    "dpo-fresh": partial(on_rank, kind="dpo", adapter=None, init_lora_weights=True),
    "grpo-fresh": partial(on_rank, kind="grpo", adapter=None, init_lora_weights="gaussian"),
    "grpo-random": partial(on_rank, kind="grpo", adapter=None, reward=random_reward, rollout=random_rollout),
    "grpo-noise": partial(on_rank, kind="grpo", adapter="adapter", reward=id_reward, prepare=noise_on_scores),
    "refused-adapters": refused_adapters,
    "refused-arguments": refused_arguments,
    "refused-reward-model": refused_reward_model,
    "different-rows": different_rows,
    "grpo-2d": partial(on_rank, kind="grpo", adapter=None, fsdp_size=2),
    "dpo-2d": partial(on_rank, kind="dpo", adapter=None, fsdp_size=2),
    "refused-2d-adapter": partial(
        refused, words="shards it with FSDP2 over 2 such groups", kind="dpo", fsdp_size=2, peft_config=lora_config()
    ),
}


@pytest.fixture
def launch(workshop: Workshop, tmp_path: Path) -> Callable[..., dict[str, list[Any]]]:
    paths = {"model": workshop.model("untied"), "adapter": workshop.adapter("untied")}

    def launched(*cases: str, engine: str = "tp", processes: int = 2) -> dict[str, list[Any]]:
        folder = tmp_path / f"{engine}-{processes}"
        folder.mkdir()
        torch.save(paths, folder / "models")
        return run_on_ranks(__file__, cases, engine, folder, processes)

    return launched


def on_one_process(workshop: Workshop, folder: Path, kind: str, adapter: bool = False, **options: Any) -> Any:
    path = workshop.adapter("untied") if adapter else None
    return train(kind, folder, workshop.model("untied"), {}, path, use_cpu=True, **options).record


def assert_same_training(on_ranks: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    for of_rank in on_ranks:
        assert of_rank["fed"] == alone["fed"]
        assert len(of_rank["logs"]) == len(alone["logs"])
        for ours, one in zip(of_rank["logs"], alone["logs"], strict=True):
            assert ours.keys() == one.keys()
            for name, value in one.items():
                assert ours[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
        assert far(of_rank["change"], alone["change"]) <= 1e-4
    assert far(on_ranks[0]["weights"], on_ranks[1]["weights"]) == 0


def assert_saved(on_ranks: list[dict[str, Any]], adapter: bool) -> None:
    """Check that the whole trained weights were saved."""
    folder = Path(on_ranks[0]["saved"])
    if adapter:
        saved = load_file(folder / "adapter_model.safetensors")
        weights = {name.replace(".default.", "."): x for name, x in on_ranks[0]["weights"].items()}
    else:
        saved = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
        weights = on_ranks[0]["weights"]
    assert far({name: x.detach() for name, x in saved.items()}, weights) == 0


def assert_fresh(on_ranks: list[dict[str, Any]], workshop: Workshop) -> None:
    """Check that a fresh adapter has the initial values of a single process."""
    alone = fresh_adapters(workshop.model("untied"), 5, {})
    for name, one in alone.items():
        for of_rank in on_ranks:
            assert of_rank[name].keys() == one.keys()
            assert [key for key, x in one.items() if not torch.equal(of_rank[name][key], x)] == [], name


@pytest.mark.parametrize(
    "cases",
    [
        ["dpo-full", "grpo-adapter", "different-rows", "resumed-grpo-full", "fresh"],
        pytest.param(
            [
                *("dpo-adapter", "dpo-precomputed", "dpo-smoothed", "dpo-smoothed-adapter"),
                *("grpo-full", "grpo-adamw", "grpo-dapo", "grpo-parts", "grpo-kept"),
            ],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["fast", "slow"],
)
def test_two_ranks_that_hold_one_model_train_as_one_process(
    cases: list[str], launch: Callable[..., Any], workshop: Workshop, tmp_path: Path
):
    results = launch(*cases)
    for case in cases:
        if results[case][0] is None:
            continue
        if case == "fresh":
            assert_fresh(results[case], workshop)
            continue
        kind, variant = case.split("-", 1)
        adapter = variant.endswith("adapter")
        options = {**CASES[case].keywords}  # type: ignore[attr-defined]
        del options["kind"], options["adapter"]
        alone = on_one_process(workshop, tmp_path / case, kind, adapter, **options)
        assert len([log for log in alone["logs"] if "loss" in log]) == COMMON["max_steps"]
        assert any("eval_loss" in log for log in alone["logs"])
        assert_same_training(results[case], alone)
        assert_saved(results[case], adapter)


@pytest.mark.slow
def test_a_fresh_adapter_trains_as_on_one_process(launch: Callable[..., Any], workshop: Workshop, tmp_path: Path):
    results = launch("dpo-fresh", "grpo-fresh")
    for kind, start in (("dpo", True), ("grpo", "gaussian")):
        case = f"{kind}-fresh"
        alone = on_one_process(workshop, tmp_path / case, kind, init_lora_weights=start)
        assert_same_training(results[case], alone)
        assert_saved(results[case], adapter=True)
        for of_rank in results[case]:
            assert far(of_rank["weights"], alone["weights"]) <= 2e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cases", "processes"),
    [
        (
            [
                *("resumed-dpo-full", "resumed-dpo-adapter", "resumed-grpo-adapter"),
                *("resumed-best", "resumed-best-adapter", "resumed-without-optimizer"),
            ],
            2,
        ),
        (["resumed-2d-dpo", "resumed-2d-grpo"], 4),
    ],
    ids=["tp", "tp-and-fsdp2"],
)
def test_a_resumed_run_ends_with_the_same_weights(cases: list[str], processes: int, launch: Callable[..., Any]):
    launch(*cases, processes=processes)


@pytest.mark.slow
def test_random_values_are_the_same_on_all_ranks_of_a_group(launch: Callable[..., Any]):
    refusals = ("refused-adapters", "refused-arguments", "refused-reward-model")
    results = launch("grpo-random", "grpo-noise", "random-adapter", *refusals)
    for a, of_other in zip(*results["random-adapter"], strict=True):
        assert torch.equal(a, of_other)
        here, there = a.chunk(2, dim=1)
        assert not torch.equal(here, there)
        assert here.abs().max() <= a.shape[1] ** -0.5  # PEFT's bound depends on the whole width
    for case in ("grpo-random", "grpo-noise"):
        ours, other = results[case]
        assert ours["logs"] == other["logs"]
        assert far(ours["weights"], other["weights"]) == 0
        assert any(x.count_nonzero() for x in ours["change"].values())


@pytest.mark.slow
def test_two_copies_on_two_ranks_each_train_as_two_processes(launch: Callable[..., Any]):
    ranks, copies = (
        launch("grpo-2d", "dpo-2d", "refused-2d-adapter", processes=4),
        launch("grpo-full", "dpo-full", engine="ddp"),
    )
    for kind in ("grpo", "dpo"):
        of_ranks, of_copies = ranks[f"{kind}-2d"], copies[f"{kind}-full"]
        for pair, of_copy in ((of_ranks[:2], of_copies[0]), (of_ranks[2:], of_copies[1])):
            assert_same_training(pair, of_copy)


def test_a_split_model_without_a_named_mesh_is_refused():
    model = torch.nn.Linear(2, 2)
    model._tp_size = 2  # as in transformers 5.17, whose device mesh has no names
    with pytest.raises(ValueError, match=r'device mesh has no dimension named "tp".*Update transformers'):
        TensorParallel.of(model)
