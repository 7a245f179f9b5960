"""In a running bf16 trainer, log-probs and gradients equal float64's on the operands that the head gets."""

import tempfile

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import trl_ext.scoring.forward as scoring_forward
from head_definition import defined, floats_apart, relative
from rewards import id_reward
from tiny import Workshop, lora_config, preferences, prompts
from trl_ext import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer


@pytest.fixture
def heads_calls(monkeypatch):
    """Records every call of the head: its operands as they are multiplied, and its results."""
    calls = []
    run_head = scoring_forward.run_head

    def recording(name, hidden, weight, targets, **options):
        results = run_head(name, hidden, weight, targets, **options)
        autocast = torch.is_autocast_enabled("cpu")
        gradients = {}
        if results.log_probs.requires_grad:
            hidden.register_hook(lambda grad: gradients.update(hidden=grad))
            results.log_probs.register_hook(lambda grad: gradients.update(upstream=grad))
        operands = (hidden.detach(), weight.detach().clone(), targets, options["transform"], autocast)
        calls.append((name, *operands, results, gradients))
        return results

    monkeypatch.setattr(scoring_forward, "run_head", recording)
    return calls


def config(kind, folder, **options):
    return kind(
        output_dir=folder,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        max_steps=2,
        gradient_checkpointing=False,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        logging_steps=1,
        learning_rate=1e-3,
        **options,
    )


def worst_error(calls):
    """Return the largest error of log-probs and entropies over all calls, in units of 1e-5 max(1, |z| / 32)."""
    worst = 0.0
    for name, hidden, weight, targets, transform, autocast, results, _ in calls:
        assert name == "tiled"
        if autocast:
            hidden, weight = hidden.bfloat16(), weight.bfloat16()
        exact = defined(hidden, weight, targets, None, transform.temperature, transform.logit_scale, transform.softcap)
        unit = 1e-5 * max(1.0, float(exact.logits.abs().max()) / 32)
        for field in ("log_probs", "entropy"):
            value = getattr(results, field)
            if value is not None:
                worst = max(worst, floats_apart(value, getattr(exact, field)) / unit)
    return worst


def worst_gradient(calls):
    """Return the largest relative error of hidden-state gradients over all calls, over the dtype's rounding floor."""
    ratios = []
    for _, hidden, weight, targets, transform, autocast, _, gradients in calls:
        if not gradients:
            continue
        dtype, temperature = hidden.dtype, transform.temperature
        if autocast:
            hidden, weight = hidden.bfloat16(), weight.bfloat16()
        exact_hidden = hidden.double().requires_grad_()
        exact = defined(exact_hidden, weight, targets, None, temperature).log_probs
        exact.backward(gradients["upstream"].double())
        # Under autocast hidden states are fp32, whose rounding floor is below the 1e-6 of the products
        floor = max(relative(exact_hidden.grad.to(dtype), exact_hidden.grad), 1e-6)
        ratios.append(relative(gradients["hidden"], exact_hidden.grad) / floor)
    assert ratios
    return max(ratios)


def run(workshop: Workshop, kind: str, dtype: torch.dtype, calls, **options):
    """Train two steps in bf16 with a fresh LoRA adapter, without recording the calls of checks; return the logs."""
    path = workshop.model("tied")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    tokenizer = AutoTokenizer.from_pretrained(path)
    lora = lora_config(init_lora_weights=True)
    with tempfile.TemporaryDirectory() as folder:
        if kind == "dpo":
            trainer = DPOTrainer(
                model,
                args=config(DPOConfig, folder, bf16=True, per_device_train_batch_size=2, **options),
                train_dataset=preferences(8, 0),
                processing_class=tokenizer,
                peft_config=lora,
            )
        else:
            trainer = GRPOTrainer(
                model,
                id_reward,
                args=config(
                    GRPOConfig,
                    folder,
                    bf16=True,
                    per_device_train_batch_size=4,
                    num_generations=4,
                    max_completion_length=8,
                    beta=0.1,
                    num_iterations=2,
                    **options,
                ),
                train_dataset=prompts(8, 0),
                processing_class=tokenizer,
                peft_config=lora,
            )
        for scoring in trainer.scoring_forwards:
            scoring.is_compared = True  # the check of the logits runs 8 tokens twice
        trainer.train()
    calls[:] = [call for call in calls if call[0] == "tiled" and call[1].shape[0] > 8]
    return trainer.state.log_history


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["autocast", "pure bf16"])
@pytest.mark.parametrize("precompute", [False, True], ids=["reference beside", "precompute"])
def test_dpo_gets_exact_log_probs_and_gradients(workshop, heads_calls, dtype, precompute):
    run(workshop, "dpo", dtype, heads_calls, precompute_ref_log_probs=precompute)
    assert len(heads_calls) >= 4
    assert worst_error(heads_calls) < 1
    assert worst_gradient(heads_calls) < 1.15


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["autocast", "pure bf16"])
def test_grpo_gets_exact_log_probs_and_gradients(workshop, heads_calls, dtype):
    run(workshop, "grpo", dtype, heads_calls)
    assert len(heads_calls) == 3  # one pass of the reference, two of the policy
    assert worst_error(heads_calls) < 1
    assert worst_gradient(heads_calls) < 1.15


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["autocast", "pure bf16"])
def test_a_fresh_adapter_is_its_precomputed_reference(workshop, heads_calls, dtype):
    logs = run(
        workshop,
        "dpo",
        dtype,
        heads_calls,
        precompute_ref_log_probs=True,
        precompute_ref_batch_size=2,
        pad_to_multiple_of=32,  # the same width in both passes, because the backbone's bf16 rounding depends on it
    )
    first = logs[0]
    for metric in ("rewards/chosen", "rewards/rejected", "rewards/margins"):
        assert abs(first[metric]) <= 1e-5, (metric, first[metric])
    assert any(abs(logs[1][metric]) > 1e-4 for metric in ("rewards/chosen", "rewards/rejected"))


def test_stock_trls_head_fails_on_the_same_operands(workshop, heads_calls):
    """The measure notices the errors of TRL's function on the operands of a running trainer."""
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    run(workshop, "dpo", torch.bfloat16, heads_calls)
    worst = 0.0
    for _, hidden, weight, targets, _, _, _, _ in heads_calls:
        stock = ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, 32768, None, 1.0, ())[0]
        worst = max(worst, floats_apart(stock, defined(hidden, weight, targets).log_probs))
    assert worst > 1e-3
