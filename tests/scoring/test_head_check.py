"""A wrong head, or a policy that our head does not score, stops training at the first batch."""

import gc
import tempfile

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import trl_ext.heads.tiled as tiled
from head_definition import ALL, FROZEN
from tiny import Workshop, lora_config, preferences
from trl_ext import DPOConfig, DPOTrainer
from trl_ext.heads.logits import LogitTransform
from trl_ext.scoring.checks import check_head, self_test
from trl_ext.scoring.forward import ScoringOptions, attach_scoring_forward
from trl_ext.scoring.head import LinearHead
from trl_ext.scoring.weight_layout import weight_layout_of


def trainer(workshop: Workshop, folder: str, setup: str = "lora", **options) -> DPOTrainer:
    path = workshop.model("untied")
    return DPOTrainer(
        AutoModelForCausalLM.from_pretrained(path),
        args=DPOConfig(
            folder,
            bf16=False,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            max_steps=1,
            gradient_checkpointing=False,
            disable_tqdm=True,
            dataloader_pin_memory=False,
            per_device_train_batch_size=2,
            **options,
        ),
        train_dataset=preferences(4, 0),
        processing_class=AutoTokenizer.from_pretrained(path),
        peft_config=lora_config() if setup == "lora" else None,
    )


def wrong_values(monkeypatch):
    results = tiled.RunningStatistics.results

    def wrong(self, *args):
        right = results(self, *args)
        return right._replace(log_probs=right.log_probs + 0.01)

    monkeypatch.setattr(tiled.RunningStatistics, "results", wrong)


def wrong_rescaling(monkeypatch):
    fold = tiled.RunningStatistics.fold_
    monkeypatch.setattr(tiled.RunningStatistics, "fold_", lambda self, *args: fold(self, *args) * 1.5)


def wrong_recomputation(monkeypatch):
    of_others = tiled.Coefficients.nontarget_grad_
    monkeypatch.setattr(tiled.Coefficients, "nontarget_grad_", lambda self, *args: of_others(self, *args).mul_(1.5))


def wrong_weight_gradient(monkeypatch):
    with_target = tiled.Coefficients.add_target_grad_
    monkeypatch.setattr(tiled.Coefficients, "add_target_grad_", lambda self, *args: with_target(self, *args).mul_(1.5))


@pytest.mark.parametrize(
    ("break_it", "setup", "named"),
    [
        (wrong_values, "lora", "log_probs"),
        (wrong_rescaling, "lora", "gradient of the hidden states"),
        (wrong_recomputation, "full", "gradient of the hidden states"),
        (wrong_weight_gradient, "full", "gradient of the weight"),
    ],
)
def test_a_head_that_differs_from_its_definition_stops_training(workshop, monkeypatch, break_it, setup, named):
    break_it(monkeypatch)
    with tempfile.TemporaryDirectory() as folder:
        with pytest.raises(RuntimeError, match=f"differs from its definition on the first batch: {named}"):
            trainer(workshop, folder, setup).train()
        trainer(workshop, folder, setup, head="dense").train()  # the error recommends this


@pytest.mark.parametrize("trained", [(False, False), (True, True), (False, True)], ids=str)
@pytest.mark.parametrize(("entropy", "mean"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("certainty", [0.0, 10.0, 100.0])
def test_a_right_head_passes_for_policies_of_any_confidence(dtype, certainty, trained, entropy, mean):
    outputs = ALL if mean else FROZEN
    for tokens, vocabulary, softcap in ((40, 301, None), (2, 4, None), (40, 301, 30.0), (40, 301, 3.0), (3, 4, 30.0)):
        generator = torch.Generator().manual_seed(tokens)
        weight = torch.randn(vocabulary, 64, generator=generator).to(dtype)
        bias = torch.randn(vocabulary, generator=generator).to(dtype)
        targets = torch.randint(vocabulary, (tokens,), generator=generator)
        hidden = torch.randn(tokens, 64, generator=generator) / 8
        # With a softcap the logits saturate
        hidden = (hidden + certainty / 64 * weight[targets].float()).to(dtype)
        transform = LogitTransform(0.5, 1.0, softcap)
        head = torch.nn.Linear(64, vocabulary, dtype=dtype)
        for parameter, values, grad in zip((head.weight, head.bias), (weight, bias), trained, strict=True):
            parameter.data = values
            parameter.requires_grad_(grad)
        rows = weight_layout_of(LinearHead(head), hidden, outputs=outputs, whole=False, entropy_grad=entropy)
        assert check_head(hidden, rows, targets, transform, outputs, entropy)


def test_the_check_runs_once_and_leaves_no_trace(workshop, monkeypatch):
    import trl_ext.scoring.forward as forward

    checks, check = [], forward.check_head

    def counted(*args, **kwargs):
        checked = check(*args, **kwargs)
        checks.extend([1] * checked)
        return checked

    monkeypatch.setattr(forward, "check_head", counted)
    model = AutoModelForCausalLM.from_pretrained(workshop.model("untied"))
    attach_scoring_forward(model, ScoringOptions())
    ids = torch.arange(3, 15).view(2, 6)
    for _ in range(3):
        model(input_ids=ids, labels=torch.full_like(ids, -100), fused_lm_head=True)  # nothing to check yet
    assert not checks
    with torch.inference_mode():
        model(input_ids=ids, labels=ids, fused_lm_head=True)  # no gradient can be checked here
    assert not checks
    with torch.no_grad():
        model(input_ids=ids, labels=ids, fused_lm_head=True)
    model(input_ids=ids, labels=ids, fused_lm_head=True)
    assert len(checks) == 1
    assert all(p.grad is None for p in model.parameters())


def test_an_output_that_is_first_used_later_is_checked_then(workshop, monkeypatch):
    start = tiled.Coefficients.__init__
    monkeypatch.setattr(tiled.Coefficients, "__init__", lambda self, *args: start(self, *args[:-1], 2 * args[-1]))
    model = AutoModelForCausalLM.from_pretrained(workshop.model("untied"))
    attach_scoring_forward(model, ScoringOptions())
    ids = torch.arange(3, 15).view(2, 6)
    model(input_ids=ids, labels=ids, fused_lm_head=True)
    with pytest.raises(RuntimeError, match="differs from its definition"):
        model(input_ids=ids, labels=ids, fused_lm_head=True, head_outputs=("log_probs", "mean_log_probs"))


def test_a_policy_whose_forward_was_replaced_stops_training(workshop):
    from trl.trainer.utils import add_fused_lm_head

    with tempfile.TemporaryDirectory() as folder:
        ours = trainer(workshop, folder)
        add_fused_lm_head(ours.model.get_base_model(), outputs=("log_probs", "entropy", "mean_logits", "is_top1"))
        with pytest.raises(RuntimeError, match=r"because something replaced `model\.forward`"):
            ours.train()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head": "fast"}, r"`head` must be one of \['tiled', 'dense'\], got 'fast'"),
        ({"head_chunk_size": 0}, "`head_chunk_size` must be .* at least 1, got 0"),
        ({"head_chunk_size": "128"}, "`head_chunk_size` must be .* an integer .* got '128'"),
    ],
)
def test_the_error_names_a_bad_config_field(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        DPOConfig(str(tmp_path), bf16=False, use_cpu=True, report_to="none", **options)


def test_a_check_leaves_no_tensor_behind():
    def alive() -> int:
        gc.collect()
        return sum(type(x) is torch.Tensor and x.dtype == torch.float64 for x in gc.get_objects())

    self_test(torch.device("cpu"))
    before = alive()
    self_test(torch.device("cpu"))
    assert alive() == before
