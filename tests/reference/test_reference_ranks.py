"""DPO's store on two real ranks: no hang and stock's weights, also if only one rank lacks rows."""

import os
from functools import partial
from pathlib import Path

import pytest
import torch
import trl
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import trl_ext
from launch import launch
from ranks import Rank, run_on_ranks
from read_only import read_only
from reference_changes import unnoticed
from reference_runs import of_check, trainer
from tiny import lora_config, preferences
from token_counts import counted
from trained_weights import far, trained
from trl_ext.reference.segments import read_segment
from trl_ext.reference.weights import ReferenceWeights


def dpo(rank: Rank, library, name: str, data=None, factor=None, weights=True, **config):
    """Train three shuffled epochs; return the change of the weights, this rank's reference passes, and the logs."""
    options = {key: config.pop(key) for key in ("peft_config", "eval_dataset", "data_collator") if key in config}
    if library is trl_ext:
        config["padding_free"] = False  # so that the shapes of passes show their rows
    torch.manual_seed(0)
    model = os.environ["TINY_MODEL"]
    if factor is not None:
        model = AutoModelForCausalLM.from_pretrained(model)
        unnoticed(factor)(model)
    with counted() as tokens:
        trainer = library.DPOTrainer(
            model=model,
            args=library.DPOConfig(
                output_dir=str(rank.folder / name),
                per_device_train_batch_size=2,
                num_train_epochs=3,
                learning_rate=0.05,
                lr_scheduler_type="constant",
                optim="sgd",
                max_grad_norm=0.0,
                gradient_checkpointing=False,
                bf16=False,
                report_to="none",
                save_strategy="no",
                logging_steps=1,
                disable_tqdm=True,
                dataloader_pin_memory=False,
                **config,
            ),
            train_dataset=preferences(12, seed=1) if data is None else data,
            **options,
        )
        initial = trained(trainer.model) if weights else {}
        trainer.train()
    rank.check(trainer)
    return {
        "change": {name: weight - initial[name] for name, weight in trained(trainer.model).items() if initial},
        "passes": tokens.without,
        "logs": trainer.state.log_history,
        "has_reference": trainer.ref_model is not None,
    }


def ours(rank: Rank, name: str, **config):
    if config.get("reference_store") != "memory":
        config["reference_store_dir"] = str(rank.folder / config.pop("store", f"store-{name}"))
    result = dpo(rank, trl_ext, name, **config)
    files = Path(config.get("reference_store_dir", rank.folder / "none")).glob("*/*.safetensors")
    return {**result, "stored": [key for path in files for key in read_segment(path, path.parent.name).keys]}


def a_miss_on_one_rank(rank: Rank, **config):
    """Rank 1 opens an empty store, and rank 0 a store in which an earlier run has put half of the rows."""
    ours(rank, "half", store="half", data=preferences(6, seed=1), **config)
    # As on nodes that share no file system
    store = "half" if rank.index == 0 else "empty"
    return ours(rank, "one-rank", store=store, **config)


def a_read_only_store(rank: Rank, **config):
    """Read a store that an earlier run has filled, on a file system that is read-only now."""
    with read_only(rank.folder / "store-lora"):
        return ours(rank, "mounted-read-only", store="store-lora", **config)


class ValuesOnRank0(trl.trainer.dpo_trainer.DataCollatorForPreference):
    index: int

    def torch_call(self, examples):
        batch = super().torch_call(examples)
        if self.index == 0:
            pairs = len(examples)
            batch |= {
                "ref_chosen_logps": torch.full((pairs,), -20.0),
                "ref_rejected_logps": torch.full((pairs,), -25.0),
            }
        return batch


def values_on_one_rank(rank: Rank):
    """Rank 0's rows have reference log-probs, rank 1's have none, and the reference runs on every micro-batch."""
    collator = ValuesOnRank0(pad_token_id=0)
    collator.index = rank.index
    return dpo(rank, trl_ext, "values", data_collator=collator, reference_store="off")


def hash_of_shards(rank: Rank):
    """Return the hashes of a model with DTensors as parameters, and of the same model unsharded."""
    result = dpo(rank, trl_ext, "engine", reference_store="memory", max_steps=1)
    assert result["passes"]
    model = AutoModelForCausalLM.from_pretrained(os.environ["TINY_MODEL"])
    whole = ReferenceWeights(model).hash(None)
    mesh = init_device_mesh("cpu", (rank.processes,))
    for i, module in enumerate(model.modules()):
        for name, param in list(module.named_parameters(recurse=False)):
            place = [Shard(0) if i % 2 else Replicate()]
            setattr(module, name, torch.nn.Parameter(distribute_tensor(param.data, mesh, place)))
    return whole, ReferenceWeights(model).hash(None, is_hashed=rank.index == 0)


def of_one_process(rank: Rank, **config):
    """Return the passes of a run under any engine that reads what one process has stored."""
    if rank.engine == "tp":
        config["model_init_kwargs"] = {"distributed_config": DistributedConfig(tp_size=2, tp_plan="auto")}
    elif rank.engine.startswith("zero"):
        config |= rank.training_arguments()
    config["reference_store_dir"] = str(rank.folder / "store")
    return dpo(rank, trl_ext, "read", weights=False, max_steps=3, **config)["passes"]


LORA = {"peft_config": lora_config()}
CASES = {
    "stock-full": partial(dpo, library=trl, name="stock-full"),
    "stock-lora": partial(dpo, library=trl, name="stock-lora", **LORA),
    "full": partial(ours, name="full"),
    "lora": partial(ours, name="lora", **LORA),
    "again": partial(ours, name="again", store="store-lora", seed=5, **LORA),
    "mounted-read-only": partial(a_read_only_store, **LORA),
    "memory": partial(ours, name="memory", reference_store="memory", **LORA),
    "precompute": partial(ours, name="precompute", precompute_ref_log_probs=True, **LORA),
    "precompute-full": partial(ours, name="precompute-full", precompute_ref_log_probs=True),
    "one-rank": a_miss_on_one_rank,
    "one-rank-lora": partial(a_miss_on_one_rank, **LORA),
    "values": values_on_one_rank,
    # A factor is changed in memory, which the identity does not include
    "plain": partial(ours, name="plain", store="changed", factor=1.0, **LORA),
    "stock-plain": partial(dpo, library=trl, name="stock-plain", factor=1.0, **LORA),
    "stock-changed": partial(dpo, library=trl, name="stock-changed", factor=0.5, **LORA),
    "changed": partial(ours, name="changed", store="changed", factor=0.5, **LORA),
    "plain-again": partial(ours, name="plain-again", store="changed", factor=1.0, **LORA),
    "hash": hash_of_shards,
    "read": of_one_process,
    "read-lora": partial(of_one_process, peft_config=lora_config(target_modules=["q_proj", "o_proj"])),
}


OURS = {
    "full": "full",
    "lora": "lora",
    "mounted-read-only": "lora",
    "memory": "lora",
    "precompute": "lora",
    "precompute-full": "full",
    "one-rank": "full",
    "one-rank-lora": "lora",
    "plain": "plain",
    "changed": "changed",
    "plain-again": "plain",
}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_two_ranks_score_each_sequence_once_and_end_with_stocks_weights(engine, workshop, tmp_path, monkeypatch):
    monkeypatch.setenv("TINY_MODEL", workshop.model("untied"))
    results = run_on_ranks(__file__, [name for name in CASES if not name.startswith("read")], engine, tmp_path)
    for name in OURS:
        stock = results[f"stock-{OURS[name]}"]
        first, second = results[name]
        assert far(first["change"], second["change"]) == 0, name
        assert far(first["change"], stock[0]["change"]) <= 1e-5, name
    # 12 rows, 2 per rank: 3 batches per epoch
    for name in ("full", "lora"):
        ours, stock = results[name], results[f"stock-{name}"]
        assert [len(rank["passes"]) for rank in stock] == [9, 9]
        assert [rank["passes"] for rank in ours] == [rank["passes"][:3] for rank in stock]
        fed, without = (sum(rows * width for rank in x for rows, width in rank["passes"]) for x in (ours, stock))
        skipped = [log for log in ours[0]["logs"] if "skipped/tokens" in log]
        assert sum(log["skipped/tokens"] for log in skipped) == without - fed
        assert sum(log["skipped/passes"] for log in skipped) == 6
    # A later run has only the canary check, on both ranks
    for name in ("again", "mounted-read-only"):
        first, second = (rank["passes"] for rank in results[name])
        assert first == second == of_check(first), name
    assert far(results["stock-plain"][0]["change"], results["stock-changed"][0]["change"]) > 1e-3
    for name, checks in (("plain", 0), ("changed", 1), ("plain-again", 2)):
        for rank in results[name]:
            assert len(rank["passes"]) == (checks if name == "plain-again" else 3 + checks), name
    # One rank has written the values of both
    stored = results["lora"][0]["stored"]
    assert len(stored) == len(set(stored)) == 24
    # The same number of passes on both ranks, although only one lacks rows
    for name in ("one-rank", "one-rank-lora"):
        first, second = (rank["passes"] for rank in results[name])
        assert 3 <= len(first) == len(second) < 9
        assert sum(rows for rows, _ in first[:3]) < sum(rows for rows, _ in second[:3]) == 12
    # Otherwise a sharded reference would hang
    assert [len(rank["passes"]) for rank in results["values"]] == [9, 9]
    assert [len(rank["passes"]) for rank in results["memory"]] == [3, 3]
    # DDP's reference model is released when all rows are stored, a sharded one is not
    assert [rank["has_reference"] for rank in results["full"]] == [engine == "fsdp2"] * 2
    assert [rank["has_reference"] for rank in results["precompute-full"]] == [False, False]
    whole, sharded = results["hash"][0]
    assert whole == sharded


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "tp", "zero2", "zero3"])
def test_every_engine_finds_what_one_process_has_stored(engine, workshop, tmp_path, monkeypatch):
    monkeypatch.setenv("TINY_MODEL", workshop.model("untied"))
    for setup in ({}, LORA):
        trainer(workshop, tmp_path, reference_store_dir=str(tmp_path / "store"), **setup).train()
    run = launch if engine.startswith("zero") else run_on_ranks
    for name, passes in run(__file__, ["read", "read-lora"], engine, tmp_path).items():
        assert passes[0] == passes[1] == of_check(passes[0]), name
