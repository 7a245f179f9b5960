"""Short DPO runs for tests of the store of reference log-probs: the trainer, its data and its results."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import trl_ext
from tiny import preferences


def trainer(workshop, tmp_path, library=trl_ext, model="untied", ref_model=None, policy=None, data=None, **config):
    options = {"eval_dataset", "peft_config", "data_collator", "callbacks"} & config.keys()
    options = {name: config.pop(name) for name in options}
    if isinstance(ref_model, int):
        ref_model = AutoModelForCausalLM.from_pretrained(workshop.model(model, seed=ref_model))
    args = {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "num_train_epochs": 1,
        "learning_rate": 0.05,
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "gradient_checkpointing": False,
        **({"padding_free": False} if library is trl_ext else {}),
        **config,
    }
    torch.manual_seed(0)
    return library.DPOTrainer(
        workshop.model(model) if policy is None else policy,
        ref_model,
        library.DPOConfig(str(tmp_path / "run"), **args),
        train_dataset=preferences(12, 1) if data is None else data,
        processing_class=AutoTokenizer.from_pretrained(workshop.model(model)),
        **options,
    )


def logged(trainer, key):
    return [log[key] for log in trainer.state.log_history if key in log]


def with_values(rows, seed, chosen=-20.0, rejected=-25.0):
    data = preferences(rows, seed)
    return data.add_column("ref_chosen_logps", [chosen] * rows).add_column("ref_rejected_logps", [rejected] * rows)


def of_check(passes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the first of `passes`, in which a run checks the canary of a store."""
    assert 0 < passes[0][0] <= 4
    return passes[:1]
