"""Reentrant checkpointing under DDP is an error before the first step if, and only if, torch's backward would fail."""

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from peft import get_peft_model
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

import trl_ext
from ranks import Rank, run_on_ranks
from rewards import id_reward
from run_losses import Trainers
from tiny import MODELS, Workshop, lora_config, preferences, prompts, scripted_rollout
from trained_weights import far, trained
from trl_ext.distributed.gradients import check_checkpointing
from worker_ranks import WorkerRanks

FAILS = "Expected to mark a variable ready only once"


def outcomes(group: Any, trains: str, reentrant: bool | None, **ddp: bool) -> tuple[bool, bool]:
    """Return whether the model is refused, and whether torch fails to train it."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(MODELS["untied"]())
    if trains == "lora":
        model = get_peft_model(model, lora_config())
        model.enable_input_require_grads()
    for name, param in model.named_parameters():
        param.requires_grad_(param.requires_grad and (trains in ("lora", "all") or trains in name))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # a new name
        warnings.filterwarnings("ignore", "You passed find_unused_parameters=true to .*_set_static_graph")
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        wrapped = DistributedDataParallel(model.train(), process_group=group, **ddp)
    refused = fails = False
    try:
        check_checkpointing(wrapped)
    except ValueError:
        refused = True
    ids = torch.arange(12).view(2, 6)
    try:
        wrapped(input_ids=ids, labels=ids).loss.backward()
    except RuntimeError as error:
        if FAILS not in str(error):
            raise
        fails = True
    return refused, fails


@pytest.mark.parametrize(
    ("trains", "reentrant", "ddp", "expected"),
    [
        ("lora", True, {"find_unused_parameters": True}, True),
        ("all", True, {"find_unused_parameters": True}, True),
        ("layers.1", True, {"find_unused_parameters": True}, True),
        ("lora", True, {}, False),
        ("all", True, {}, False),
        ("lm_head", True, {"find_unused_parameters": True}, False),
        ("lora", True, {"find_unused_parameters": True, "static_graph": True}, False),
        ("lora", False, {"find_unused_parameters": True}, False),
        ("lora", None, {"find_unused_parameters": True}, False),
    ],
)
def test_a_model_is_refused_if_torch_cannot_train_it(
    trains: str, reentrant: bool | None, ddp: dict[str, bool], expected: bool, ranks: WorkerRanks
):
    found = ranks.run(partial(outcomes, trains=trains, reentrant=reentrant, **ddp), 2)
    assert found == [(expected, expected)] * 2


SETTINGS: dict[str, dict[str, Any]] = {
    "lora": {},
    "lora-found": {"ddp_find_unused_parameters": False},
    "full": {},
    "full-sought": {"ddp_find_unused_parameters": True},
}
STOPS = {"lora", "full-sought"}


def run(rank: Rank, kind: str, setting: str, library: Any) -> Any:
    """Return the change of the weights after two steps, or the error message if the first one fails."""
    trainers = Trainers.of(library)
    common = {
        "output_dir": str(rank.folder / "run"),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 2,
        "optim": "sgd",
        "learning_rate": 0.05,
        "max_grad_norm": 0.0,
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
        "bf16": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        **SETTINGS[setting],
    }
    model = Workshop(rank.folder.parent).model("untied")
    lora = lora_config() if setting.startswith("lora") else None
    trainer: Any
    torch.manual_seed(0)
    if kind == "dpo":
        config = trainers.dpo_config(**common)
        trainer = trainers.dpo_trainer(model, args=config, train_dataset=preferences(32, seed=1), peft_config=lora)
    else:
        config = trainers.grpo_config(num_generations=4, max_completion_length=6, beta=0.1, **common)
        data = prompts(8, seed=1)
        trainer = trainers.grpo_trainer(
            model, id_reward, args=config, train_dataset=data, rollout_func=scripted_rollout, peft_config=lora
        )
    before = trained(trainer.model)
    try:
        trainer.train()
    except (RuntimeError, ValueError) as error:
        assert trainer.state.global_step == 0
        rank.checked = True
        return f"{type(error).__name__}: {error}"
    rank.check(trainer)
    return {name: x - before[name] for name, x in trained(trainer.model).items()}


CASES = {
    f"{kind}-{setting}-{library.__name__}": partial(run, kind=kind, setting=setting, library=library)
    for kind in ("dpo", "grpo")
    for setting in SETTINGS
    for library in (trl, trl_ext)
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dpo", "grpo"])
def test_trainers_stop_where_stock_trl_fails_and_train_where_it_trains(kind: str, tmp_path: Path):
    (tmp_path / "ranks").mkdir()
    Workshop(tmp_path).model("untied")
    found = run_on_ranks(__file__, [case for case in CASES if case.startswith(kind)], "ddp", tmp_path / "ranks")
    for setting in SETTINGS:
        for ours, stock in zip(found[f"{kind}-{setting}-trl_ext"], found[f"{kind}-{setting}-trl"], strict=True):
            if setting in STOPS:
                assert stock.startswith(f"RuntimeError: {FAILS}")
                assert ours.startswith("ValueError: `gradient_checkpointing_kwargs={'use_reentrant': True}` does not")
            else:
                assert far(ours, stock) <= 1e-5
