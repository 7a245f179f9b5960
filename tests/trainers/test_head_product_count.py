"""Counts the matrix products with the vocabulary in a trainer step, as torch dispatches them."""

import tempfile

import torch
import trl
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoTokenizer

import trl_ext
from rewards import id_reward
from tiny import V_WORDS, Workshop, lora_config, preferences, prompts, scripted_rollout
from trl_ext import GRPOConfig, GRPOTrainer


class CountProducts(TorchDispatchMode):
    """Counts matrix products one of whose dimensions is V."""

    def __init__(self, vocabulary):
        super().__init__()
        self.vocabulary, self.count = vocabulary, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func._schema.name.rstrip("_") in ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"):
            shapes = [x.shape for x in (*args, out) if isinstance(x, torch.Tensor)]
            self.count += any(self.vocabulary in shape for shape in shapes)
        return out


def counting(trainer_class, counts):
    """Return a `trainer_class` that counts the products of its forwards, and of forward and backward, per step."""

    class Counting(trainer_class):
        def training_step(self, *args, **kwargs):
            with CountProducts(V_WORDS) as counted:
                loss = super().training_step(*args, **kwargs)
            counts.append(counted.count)
            return loss

    return Counting


def config(kind, folder, **options):
    return kind(
        output_dir=folder,
        bf16=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        max_steps=3,
        gradient_checkpointing=False,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **options,
    )


def train_dpo(workshop: Workshop, setup: str, library=trl_ext, **options):
    path = workshop.model("untied")
    counts: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        counting(library.DPOTrainer, counts)(
            model=AutoModelForCausalLM.from_pretrained(path),
            args=config(library.DPOConfig, folder, per_device_train_batch_size=2, **options),
            train_dataset=preferences(8, 0),
            processing_class=AutoTokenizer.from_pretrained(path),
            peft_config=lora_config() if setup == "lora" else None,
        ).train()
    return counts


def train_grpo(workshop: Workshop, **options):
    path = workshop.model("untied")
    counts: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        counting(GRPOTrainer, counts)(
            model=AutoModelForCausalLM.from_pretrained(path),
            reward_funcs=id_reward,
            args=config(
                GRPOConfig,
                folder,
                per_device_train_batch_size=4,
                num_generations=4,
                max_completion_length=8,
                **options,
            ),
            train_dataset=prompts(8, 0),
            processing_class=AutoTokenizer.from_pretrained(path),
            rollout_func=scripted_rollout,
            peft_config=lora_config(),
        ).train()
    return counts


# The first step also checks the head against the dense definition, so the tests read later steps
def test_dpo_lora_takes_two_for_the_policy_and_one_for_the_reference(workshop):
    assert train_dpo(workshop, "lora")[1:] == [3, 3]


def test_stock_trl_takes_three_for_the_policy(workshop):
    assert train_dpo(workshop, "lora", trl)[1:] == [4, 4]


def test_dpo_lora_with_a_precomputed_reference_takes_two(workshop):
    assert train_dpo(workshop, "lora", precompute_ref_log_probs=True)[1:] == [2, 2]


def test_a_trained_weight_takes_four_and_the_reference_one(workshop):
    assert train_dpo(workshop, "full")[1:] == [5, 5]


def test_grpo_lora_takes_two_with_the_entropy_as_a_metric(workshop):
    assert train_grpo(workshop)[1:] == [2, 2]


def test_grpo_lora_takes_one_more_for_the_reference(workshop):
    assert train_grpo(workshop, beta=0.1)[1:] == [3, 3]


def test_grpo_lora_takes_three_with_the_entropy_bonus(workshop):
    assert train_grpo(workshop, entropy_coef=0.1)[1:] == [3, 3]


def test_the_count_sees_a_plain_head():
    hidden, weight = torch.randn(5, 16, requires_grad=True), torch.randn(V_WORDS, 16, requires_grad=True)
    with CountProducts(V_WORDS) as counted:
        (hidden @ weight.t()).log_softmax(-1).sum().backward()
    assert counted.count == 3


def test_the_dense_head_is_what_the_config_says_it_is(workshop):
    assert train_dpo(workshop, "lora", head="dense")[1:] == [3, 3]
