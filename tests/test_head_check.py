"""A wrong head, or a policy scored by something else, stops training before it does harm."""

import tempfile

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import trl_ext.heads.tiled as tiled
from tiny import Workshop, lora_config, preferences
from trl_ext import DPOConfig, DPOTrainer
from trl_ext.scoring import ScoringOptions, attach_scoring_forward


def trainer(workshop: Workshop, folder: str, **options) -> DPOTrainer:
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
        peft_config=lora_config(),
    )


def wrong_values(statistics, monkeypatch):
    results = statistics.results
    monkeypatch.setattr(
        statistics,
        "results",
        lambda self, outputs: (r := results(self, outputs))._replace(log_probs=r.log_probs + 0.01),
    )


def wrong_gradient(statistics, monkeypatch):
    fold = statistics.fold_

    def folding(self, *args):
        return fold(self, *args) * 1.5

    monkeypatch.setattr(statistics, "fold_", folding)
    # Several tiles, so that what the gradient is rescaled by matters
    monkeypatch.setattr("trl_ext.heads.tiles._FEWEST_COLUMNS", 16)
    monkeypatch.setitem(tiled.rows_per_tile.__globals__["_ELEMENTS"], "cpu", 1)


@pytest.mark.parametrize(
    ("break_it", "named"), [(wrong_values, "log_probs"), (wrong_gradient, "gradient of the hidden states")]
)
def test_a_head_that_disagrees_with_its_definition_stops_training(workshop, monkeypatch, break_it, named):
    break_it(tiled.RunningStatistics, monkeypatch)
    with tempfile.TemporaryDirectory() as folder:
        with pytest.raises(RuntimeError, match=f"disagrees with the dense definition on the first batch: {named}"):
            trainer(workshop, folder).train()
        trainer(workshop, folder, head="dense").train()  # the way out that the error names


def test_the_check_runs_once_and_leaves_no_trace(workshop, monkeypatch):
    import trl_ext.scoring.forward as forward

    checks = []
    check = forward.check_against_dense
    monkeypatch.setattr(forward, "check_against_dense", lambda *args: (checks.append(1), check(*args)))
    model = AutoModelForCausalLM.from_pretrained(workshop.model("untied"))
    attach_scoring_forward(model, ScoringOptions())
    ids = torch.arange(3, 15).view(2, 6)
    for _ in range(3):
        model(input_ids=ids, labels=torch.full_like(ids, -100), fused_lm_head=True)  # nothing to check yet
    assert not checks
    with torch.no_grad():
        model(input_ids=ids, labels=ids, fused_lm_head=True)
    model(input_ids=ids, labels=ids, fused_lm_head=True)
    assert len(checks) == 1
    assert all(p.grad is None for p in model.parameters())


def test_a_policy_whose_forward_was_replaced_stops_training(workshop):
    from trl.trainer.utils import add_fused_lm_head

    with tempfile.TemporaryDirectory() as folder:
        ours = trainer(workshop, folder)
        add_fused_lm_head(ours.model.get_base_model(), outputs=("log_probs", "entropy", "mean_logits", "is_top1"))
        with pytest.raises(RuntimeError, match=r"not scored by the exact head: something replaced `model\.forward`"):
            ours.train()


@pytest.mark.parametrize(
    ("options", "message"),
    [({"head": "fast"}, r"`head` must be one of \['tiled', 'dense'\], got 'fast'"), ({"head_chunk_size": 0}, "got 0")],
)
def test_a_bad_config_field_is_named(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        DPOConfig(str(tmp_path), bf16=False, use_cpu=True, report_to="none", **options)
