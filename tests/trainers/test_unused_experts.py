"""An expert module that only padding or dead rows reach gets a gradient of zero, as in stock TRL.

Without a gradient, AdamW would skip its moments and weight decay.
"""

from typing import Any

import pytest
import torch
import trl
from torch import nn
from transformers import AutoModelForCausalLM, TrainerCallback

import trl_ext
from rewards import half_dead_reward
from short_training import Bench
from tiny import Workshop, lora_config, preferences, prompts, scripted_rollout

ADAMW = {"optim": "adamw_torch", "weight_decay": 0.1, "learning_rate": 1e-2, "max_steps": 6, "seed": 7}


class Experts(nn.Module):
    """A block of sixteen experts, with one expert per token."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, 16, bias=False)
        self.experts = nn.ModuleList(nn.Linear(hidden, hidden, bias=False) for _ in range(16))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(hidden).softmax(-1).max(-1)
        output = torch.zeros_like(hidden)
        for number in chosen.unique().tolist():
            here = chosen == number
            output[here] = self.experts[number](hidden[here]) * weights[here].unsqueeze(-1)
        return output


def model(workshop: Workshop, frozen: int = 0) -> Any:
    """Build a model whose first `frozen` layers are not trained."""
    made = AutoModelForCausalLM.from_pretrained(workshop.model("untied"))
    torch.manual_seed(3)
    for layer in made.model.layers:
        layer.mlp = Experts(made.config.hidden_size)
    for layer in made.model.layers[:frozen]:
        layer.requires_grad_(False)
    return made


class Gradients(TrainerCallback):
    """Records which parameters have no gradient, and which have a zero one, before each optimizer step."""

    def __init__(self) -> None:
        self.missing: list[set[str]] = []
        self.zero: list[set[str]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        trained = {name: x.grad for name, x in model.named_parameters() if x.requires_grad}
        self.missing.append({name for name, grad in trained.items() if grad is None})
        self.zero.append({name for name, grad in trained.items() if grad is not None and not grad.any()})


def run(
    kind: str, package: Any, workshop: Workshop, folder: Any, frozen: int = 0, **arguments: Any
) -> tuple[Gradients, torch.Tensor, Any]:
    bench, seen = Bench(workshop, folder, package), Gradients()
    if kind == "grpo":
        arguments = {"reward_funcs": half_dead_reward, "rollout_func": scripted_rollout, **arguments}
        arguments = {"train_dataset": prompts(12, seed=1), "shuffle_dataset": False, "num_iterations": 2, **arguments}
    else:
        arguments = {"train_dataset": preferences(12, seed=1), **arguments}
    getattr(bench, kind)(
        model=model(workshop, frozen), callbacks=[seen], gradient_checkpointing=False, **ADAMW, **arguments
    )
    weights = torch.cat([x.detach().flatten() for _, x in sorted(bench.trainer.model.named_parameters())])
    return seen, weights, bench.trainer


@pytest.mark.parametrize("setup", ["full", "frozen-first", pytest.param("lora", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["dpo", "grpo"])
def test_an_expert_that_only_unscored_tokens_reach_is_trained_as_in_trl(
    kind: str, setup: str, workshop: Workshop, tmp_path: Any
) -> None:
    options: dict[str, Any] = {"frozen": 1 if setup == "frozen-first" else 0}
    if setup == "lora":
        options["peft_config"] = lora_config(target_modules=r".*experts\.\d+")
    stock, weights, _ = run(kind, trl, workshop, tmp_path, **options)
    ours, our_weights, trainer = run(kind, trl_ext, workshop, tmp_path, **options)
    assert any(stock.zero), "no expert is reached by unscored tokens alone: the case proves nothing"
    assert ours.missing == stock.missing
    assert (our_weights - weights).norm() <= 1e-5 * weights.norm()
    assert "experts are separate modules" in trainer.explain()["packing"].reason


def test_experts_that_are_not_trained_cost_nothing(workshop: Workshop, tmp_path: Any) -> None:
    adapter = {"peft_config": lora_config(target_modules=["q_proj", "v_proj"])}
    _, _, trainer = run("grpo", trl_ext, workshop, tmp_path, **adapter)
    assert trainer.explain()["packing"].action == "run"
    assert trainer.plan.skips_zero_advantages
