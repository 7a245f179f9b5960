"""DPO's store of reference log-probs: each sequence is scored once, and training equals stock's."""

import logging
import weakref
from dataclasses import replace

import pytest
import torch
import trl
from peft import PeftModel, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import trl_ext
from drop_in_cases import SETUPS, Case
from reference_runs import logged, of_check, trainer, with_values
from run_losses import Trainers, train
from tiny import REFERENCE_SEED, Workshop, lora_config, preferences
from token_counts import counted, total
from training_comparison import assert_same

STOCK, OURS = Trainers.of(trl), Trainers.of(trl_ext).padded()


def case(setup: str, steps: int = 9, **config) -> Case:
    """Return the case of three epochs with three batches, shuffled in each epoch."""
    return Case(f"dpo-epochs-{setup}", "dpo", setup, config={"num_train_epochs": 3, **config}, steps=steps)


def run(case: Case, trainers: Trainers, workshop: Workshop):
    """Return the record of a run, and the shapes of its reference passes."""
    with counted() as tokens:
        record = train(case, trainers, workshop)
    return record, tokens.without[:-1]  # the last pass is the recorder's


def ours_in(folder, case: Case) -> Case:
    return replace(case, config={**case.config, "reference_store_dir": str(folder)})


@pytest.mark.parametrize(("setup", "store"), [*((setup, "disk") for setup in SETUPS), ("lora", "memory")])
def test_three_epochs_take_one_epoch_of_reference_passes(setup, store, workshop):
    ours, ours_passes = run(case(setup, reference_store=store), OURS, workshop)
    stock, stock_passes = run(case(setup), STOCK, workshop)
    assert_same(case(setup), ours, stock)
    assert len(stock_passes) == 9
    assert ours_passes == stock_passes[:3]
    skipped = [log for log in ours.logs if "skipped/passes" in log]
    assert len(skipped) == 9
    assert sum(log["skipped/tokens"] for log in skipped) == total(stock_passes) - total(ours_passes) > 0
    assert sum(log["skipped/passes"] for log in skipped) == 6
    assert not any(key.startswith("skipped/") for key in ours.logs[-1])  # the summary has no micro-batch


@pytest.mark.parametrize("setup", ["lora", "full"])
def test_a_later_run_with_the_same_reference_only_checks_it(setup, workshop, tmp_path):
    first, passes = run(ours_in(tmp_path, case(setup, steps=3)), OURS, workshop)
    assert len(passes) == 3
    # Another seed changes the order, the batches and the random adapter
    changes = {"learning_rate": 0.02, "beta": 0.3, "seed": 8, "ld_alpha": 0.5, "per_device_train_batch_size": 3}
    later = case(setup, steps=4, **changes)
    ours, passes = run(ours_in(tmp_path, later), OURS, workshop)
    assert passes == of_check(passes)
    counted = [log for log in ours.logs if "skipped/passes" in log]
    stock, stock_passes = run(later, STOCK, workshop)
    assert sum(log["skipped/passes"] for log in counted) == len(stock_passes) - 1
    assert sum(log["skipped/tokens"] for log in counted) == total(stock_passes) - total(passes)
    assert_same(later, ours, stock)
    assert first.losses[1] != ours.losses[1]  # the first is ln 2 if the policy is its reference


@pytest.mark.filterwarnings("ignore:.*keep_end.*deprecated:FutureWarning")
@pytest.mark.parametrize("mode", ["keep_start", "keep_end"])
@pytest.mark.parametrize("cut", ["some", "all"])
def test_only_sequences_truncated_at_another_length_are_scored_again(cut, mode, workshop, tmp_path):
    run(ours_in(tmp_path, case("ref_model", steps=3)), OURS, workshop)
    tokenizer = AutoTokenizer.from_pretrained(workshop.model("tied"))
    rows = preferences(12, seed=1)
    prompts = [len(tokenizer(row["prompt"])["input_ids"]) for row in rows]
    lengths = [
        [len(tokenizer(row["prompt"] + row[which])["input_ids"]) + 1 for which in ("chosen", "rejected")]
        for row in rows
    ]
    max_length = 9 if cut == "some" else min(min(pair) for pair in lengths) - 1
    # TRL removes rows whose prompt alone is that long if the start is kept
    kept = [pair for prompt, pair in zip(prompts, lengths, strict=True) if mode == "keep_end" or prompt < max_length]
    steps = min(3, -(-len(kept) // 4))
    shorter = case("ref_model", steps=steps, max_length=max_length, truncation_mode=mode, ld_alpha=0.5)
    ours, passes = run(ours_in(tmp_path, shorter), OURS, workshop)
    scored = sum(length > max_length for pair in kept for length in pair)
    passes = passes[len(of_check(passes)) :]
    assert sum(rows for rows, _ in passes) == scored > 0
    assert cut == "some" or scored == 2 * len(kept)
    assert {width for _, width in passes} == {max_length}
    # Values that were precomputed only once would be those of the whole sequences
    assert_same(shorter, ours, run(shorter, STOCK, workshop)[0])


@pytest.mark.parametrize(
    "change", [{"head": "dense"}, {"bf16": True}, {"model_init_kwargs": {"attn_implementation": "eager"}}], ids=str
)
def test_a_reference_that_is_computed_differently_is_scored_again(change, workshop, tmp_path):
    run(ours_in(tmp_path, case("lora", steps=3)), OURS, workshop)
    _, passes = run(ours_in(tmp_path, case("lora", steps=3, **change)), OURS, workshop)
    assert len(passes) == 3


def test_another_reference_is_scored_anew(workshop, tmp_path):
    for setup in ("full", "ref_model", "ref_adapter"):  # three references of one policy
        _, passes = run(ours_in(tmp_path, case(setup, steps=3)), OURS, workshop)
        assert len(passes) == 3, setup


def test_evaluation_reads_and_writes_the_store(workshop):
    config = {"eval_strategy": "epoch", "per_device_eval_batch_size": 2, "logging_steps": 3}
    evaluated = case("ref_model", **config)
    (ours, ours_passes), (stock, stock_passes) = (run(evaluated, x, workshop) for x in (OURS, STOCK))
    assert_same(evaluated, ours, stock)
    # Three evaluation batches of policy and reference after three steps, later only of the policy
    assert len(stock_passes) == 3 * (3 + 6)
    assert len(ours_passes) == 3 + 6 + 3 + 3
    seen = [log for log in ours.logs if "eval_loss" in log]
    assert [log["eval_skipped/passes"] for log in seen] == [0, 3, 3]
    skipped = sum(log.get("skipped/tokens", 0) + log.get("eval_skipped/tokens", 0) for log in ours.logs)
    assert skipped == total(stock_passes) - total(ours_passes)


def test_streaming_data_are_scored_once(workshop):
    streaming = replace(case("lora"), streaming=True)
    (ours, ours_passes), (stock, stock_passes) = (run(streaming, x, workshop) for x in (OURS, STOCK))
    assert_same(streaming, ours, stock)
    assert ours_passes == stock_passes[:3]


# Tests with one trainer


def test_precomputing_fills_the_store_and_a_later_run_finds_it(workshop, tmp_path):
    with counted() as tokens:
        first = trainer(workshop, tmp_path, precompute_ref_log_probs=True, eval_dataset=preferences(5, 2))
        assert len(tokens.without) == 5
        first.train()
        assert len(tokens.without) == 5
        first.evaluate()
        assert len(tokens.without) == 7  # the policy
        assert "ref_chosen_logps" not in first.train_dataset.column_names
        assert logged(first, "skipped/passes") == []  # with precomputing, TRL runs none in training either
    # And a run without precomputing, whose reference is a model
    for config in ({"precompute_ref_log_probs": True, "learning_rate": 0.1}, {}):
        with counted() as tokens:
            trainer(workshop, tmp_path, seed=3, **config).train()
        assert tokens.without == of_check(tokens.without)


@pytest.mark.parametrize("trains_twice", [False, True])
def test_a_missing_reference_is_an_error_and_never_the_trained_policy(trains_twice, workshop, tmp_path):
    subject = trainer(workshop, tmp_path, precompute_ref_log_probs=True, reference_store="memory")
    subject.train()
    if trains_twice:  # the step count starts again from 0, but the weights do not
        subject.state.global_step = 0
    with pytest.raises(ValueError, match="reference"):
        subject.evaluate(preferences(4, seed=9))


def test_streaming_data_cannot_be_precomputed(workshop, tmp_path):
    data = preferences(8, 1).to_iterable_dataset()
    with pytest.raises(ValueError, match="not supported with IterableDataset"):
        trainer(workshop, tmp_path, data=data, precompute_ref_log_probs=True, max_steps=2)


@pytest.mark.parametrize("device", [None, "cpu"])
def test_a_loaded_reference_is_released_when_all_rows_are_stored_and_loaded_again_for_new_data(
    device, workshop, tmp_path
):
    subject = trainer(workshop, tmp_path, num_train_epochs=3, reference_device=device)
    models = [weakref.ref(subject.ref_model)]
    there = []
    subject.callback_handler.add_callback(OnStep(lambda: there.append(subject.ref_model is not None)))
    subject.train()
    assert there == [True] * 3 + [False] * 6
    assert models[0]() is None
    new = preferences(4, seed=9)
    found = subject.evaluate(new)
    assert subject.ref_model is not None
    kept = trainer(workshop, tmp_path, trl, num_train_epochs=3)
    kept.train()
    wanted = kept.evaluate(new)
    for key in ("eval_loss", "eval_rewards/margins", "eval_logps/chosen"):
        assert found[key] == pytest.approx(wanted[key], rel=1e-5)
    models.append(weakref.ref(subject.ref_model))
    subject._release_reference()
    assert subject.ref_model is models[1]() is None


def test_a_reference_that_was_released_and_has_changed_on_disk_is_an_error(workshop, tmp_path):
    copy = tmp_path / "model"
    AutoModelForCausalLM.from_pretrained(workshop.model("untied")).save_pretrained(copy)
    AutoTokenizer.from_pretrained(workshop.model("untied")).save_pretrained(copy)
    subject = trainer(workshop, tmp_path, policy=str(copy), num_train_epochs=2)
    subject.train()
    assert subject.ref_model is None
    AutoModelForCausalLM.from_pretrained(workshop.model("untied", seed=REFERENCE_SEED)).save_pretrained(copy)
    with pytest.raises(ValueError, match="is no longer the same model"):
        subject.evaluate(preferences(4, seed=9))


def test_a_reference_model_of_the_user_is_not_released(workshop, tmp_path):
    subject = trainer(workshop, tmp_path, ref_model=REFERENCE_SEED, num_train_epochs=2)
    subject.train()
    assert subject.ref_model is not None


def test_the_reference_is_not_released_while_evaluation_needs_it(workshop, tmp_path):
    subject = trainer(
        workshop, tmp_path, num_train_epochs=3, eval_strategy="steps", eval_steps=5, eval_dataset=preferences(5, 2)
    )
    there = []
    subject.callback_handler.add_callback(OnStep(lambda: there.append(subject.ref_model is not None)))
    subject.train()
    assert there == [True] * 6 + [False] * 3


class OnStep(trl.trainer.dpo_trainer.TrainerCallback):
    def __init__(self, do):
        self.do = do

    def on_step_begin(self, *args, **kwargs):
        self.do()


# The user's values


def test_the_users_reference_log_probs_are_used(workshop, tmp_path):
    data, beta = with_values(12, 1), 0.5
    with counted() as tokens:
        subject = trainer(workshop, tmp_path, data=data, beta=beta, eval_dataset=preferences(5, 2), ld_alpha=0.5)
        subject.train()
        assert tokens.without == []
        for i, chosen in enumerate(logged(subject, "logps/chosen")):
            assert logged(subject, "rewards/chosen")[i] == pytest.approx(beta * (chosen + 20.0), rel=1e-5)
        assert sum(logged(subject, "skipped/passes")) == 3
        assert sum(logged(subject, "skipped/tokens")) == total(tokens.with_gradient)
        subject.evaluate()  # its rows have no values
        assert len(tokens.without) == 4
    assert "Rows of `train_dataset` have reference log-probs" in subject.explain()["reference"].reason
    # And no weight is hashed
    assert "kept in memory" in trainer(workshop, tmp_path, data=data).explain()["reference"].reason


def test_the_users_reference_log_probs_are_used_with_precomputing_and_streaming(workshop, tmp_path):
    with counted() as tokens:
        trainer(workshop, tmp_path, data=with_values(8, 1), precompute_ref_log_probs=True).train()
        streaming = with_values(8, 1).to_iterable_dataset()
        trainer(workshop, tmp_path, data=streaming, max_steps=2).train()
    assert tokens.without == []


@pytest.mark.parametrize("column", ["ref_chosen_logps", "ref_rejected_logps"])
def test_one_column_alone_is_an_error_at_start(column, workshop, tmp_path):
    data = with_values(8, 1).remove_columns(column)
    with pytest.raises(ValueError, match=f"`train_dataset` has the column .* but not `{column}`"):
        trainer(workshop, tmp_path, data=data)


@pytest.mark.parametrize("value", [None, float("nan"), float("inf")])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_missing_value_is_an_error_that_says_what_to_do(value, streaming, workshop, tmp_path):
    rows = preferences(8, 1)
    data = rows.add_column("ref_chosen_logps", [-1.0] * 7 + [value]).add_column("ref_rejected_logps", [-1.0] * 8)
    with pytest.raises(ValueError, match=r"`ref_chosen_logps` must be a finite number, got .* Set it to the sum"):
        trainer(workshop, tmp_path, data=data.to_iterable_dataset() if streaming else data, max_steps=2).train()


# Losses that do not read the reference


def test_sft_alone_runs_no_reference_and_logs_no_rewards(workshop, tmp_path):
    with counted() as tokens:
        subject = trainer(workshop, tmp_path, loss_type=["sft"], eval_dataset=preferences(5, 2))
        subject.train()
        evaluated = subject.evaluate()
    assert len(tokens.without) == 2  # the policy in evaluation
    assert not any("rewards/" in key for log in subject.state.log_history for key in log)
    assert not any("rewards/" in key for key in evaluated)
    assert sum(logged(subject, "skipped/tokens")) == total(tokens.with_gradient)
    assert logged(subject, "eval_skipped/passes") == [2]
    assert subject.explain()["reference"].action == "skip"


@pytest.mark.parametrize("name", ["eval_rewards/margins", "rewards/accuracies"])
def test_sft_alone_runs_the_reference_for_the_best_model_by_rewards(name, workshop, tmp_path):
    subject = trainer(workshop, tmp_path, loss_type=["sft"], metric_for_best_model=name)
    with counted() as tokens:
        subject.train()
    assert len(tokens.without) == 3
    assert len(logged(subject, "rewards/margins")) == 3
    assert name in subject.explain()["reference"].reason


# References that cannot be stored


def test_a_reference_that_moves_is_not_stored(workshop, tmp_path):
    config = {"sync_ref_model": True, "ref_model_sync_steps": 1, "num_train_epochs": 2}
    subject = trainer(workshop, tmp_path, **config)
    with counted() as tokens:
        subject.train()
    assert len(tokens.without) == 6
    assert "sync_ref_model" in subject.explain()["reference"].reason
    assert not (tmp_path / "datasets" / "trl_ext_reference_log_probs").exists()


def test_biases_trained_outside_the_adapter_are_copied_and_scored_once(workshop, tmp_path):
    lora = {"model": "head_bias", "num_train_epochs": 2}
    subject = trainer(workshop, tmp_path, peft_config=lora_config(bias="all"), **lora)
    with counted() as tokens:
        subject.train()
    assert len(tokens.without) == 3
    assert "bias` and " in subject.explain()["reference"].reason
    # The reference is the base model before training, also for an adapter without a bias and after training
    for again, passes in ((subject, 0), (trainer(workshop, tmp_path, peft_config=lora_config(), **lora), 1)):
        with counted() as tokens:
            again.train()
        assert len(tokens.without) == passes
    subject._source.refresh()
    assert subject._source._identity == again._source._identity


def test_a_reference_with_active_dropout_is_not_stored(workshop, tmp_path):
    init = {"attention_dropout": 0.1, "dtype": "float32"}
    config = {"peft_config": lora_config(), "model_init_kwargs": init, "num_train_epochs": 2}
    subject = trainer(workshop, tmp_path, **config)
    with counted() as tokens:
        subject.train()
    assert len(tokens.without) == 6
    assert "two passes can differ" in subject.explain()["reference"].reason
    kept_in_training_mode = AutoModelForCausalLM.from_pretrained(workshop.model("untied"), **init).train()
    assert trainer(workshop, tmp_path, ref_model=kept_in_training_mode).explain()["reference"].action == "run"
    asked_beforehand = trainer(workshop, tmp_path, precompute_ref_log_probs=True, **config).explain()["reference"]
    assert asked_beforehand.action == "reuse"
    assert "kept in memory" in asked_beforehand.reason  # random draws are not shared between runs
    # The reference has no adapter, and a reference model is in evaluation mode
    for other in (
        {"peft_config": lora_config(lora_dropout=0.1), "disable_dropout": False},
        {"model_init_kwargs": init},
    ):
        assert trainer(workshop, tmp_path, **other).explain()["reference"].action == "reuse"


def test_a_reference_that_shares_trained_weights_is_not_stored(workshop, tmp_path):
    policy = AutoModelForCausalLM.from_pretrained(workshop.model("untied"))
    shares = AutoModelForCausalLM.from_pretrained(workshop.model("untied", seed=REFERENCE_SEED))
    shares.model.layers[0] = policy.model.layers[0]
    subject = trainer(workshop, tmp_path, policy=policy, ref_model=shares)
    assert "layers.0" in subject.explain()["reference"].reason
    assert subject.explain()["reference"].action == "run"


def test_a_batch_with_other_model_inputs_is_not_stored(workshop, tmp_path):
    class WithPositions(trl.trainer.dpo_trainer.DataCollatorForPreference):
        def torch_call(self, examples):
            batch = super().torch_call(examples)
            return {
                **batch,
                "position_ids": 2 * torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"]),
            }

    subjects = [
        trainer(workshop, tmp_path, library, data_collator=WithPositions(pad_token_id=0), num_train_epochs=2)
        for library in (trl_ext, trl)
    ]
    counts = []
    for subject in subjects:
        with counted() as tokens:
            subject.train()
        counts.append(len(tokens.without))
    assert counts == [6, 6]
    assert logged(subjects[0], "rewards/margins") == pytest.approx(logged(subjects[1], "rewards/margins"), abs=1e-5)


def test_off_runs_the_reference_as_trl(workshop, tmp_path):
    subject = trainer(workshop, tmp_path, reference_store="off", num_train_epochs=2)
    with counted() as tokens:
        subject.train()
    assert len(tokens.without) == 6
    assert logged(subject, "skipped/passes") == []
    assert 'reference_store="off"' in str(subject.explain())


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"reference_store": "ram"}, r"`reference_store` must be one of \['disk', 'memory', 'off'\], got 'ram'"),
        ({"reference_store": "memory", "reference_store_dir": "x"}, 'needs `reference_store="disk"`'),
        ({"reference_store": "off", "precompute_ref_log_probs": True}, "must be 'disk' or 'memory', got 'off'"),
    ],
)
def test_arguments_that_contradict_are_an_error(config, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        trl_ext.DPOConfig(str(tmp_path), bf16=False, **config)


def test_the_plan_says_what_the_reference_is_and_where_its_values_are_stored(workshop, tmp_path, caplog):
    adapted = AutoModelForCausalLM.from_pretrained(workshop.model("untied"))
    adapted = PeftModel.from_pretrained(adapted, workshop.adapter("untied"), is_trainable=True)
    kinds = [
        ({}, "a copy of the policy before training"),
        ({"policy": AutoModelForCausalLM.from_pretrained(workshop.model("untied"))}, "loaded a second time"),
        ({"ref_model": AutoModelForCausalLM.from_pretrained(workshop.model("untied", seed=1))}, "given as `ref_model`"),
        ({"peft_config": lora_config()}, "the base model, with the adapter off"),
        ({"policy": adapted}, 'the frozen adapter "ref"'),
        ({"precompute_ref_log_probs": True}, "the policy as it is before training"),
    ]
    for options, words in kinds:
        text = " ".join(str(trainer(workshop, tmp_path, **options).explain()).split())
        assert words in text
        assert f"kept on disk: {tmp_path / 'datasets' / 'trl_ext_reference_log_probs'}" in text
    subject = trainer(workshop, tmp_path, reference_store="memory")
    with caplog.at_level(logging.INFO, "trl_ext"):
        subject.train()
    plan, *_ = caplog.messages
    assert plan == f"DPOTrainer: what runs, and why\n{subject.explain()}"
    assert "kept in memory" in subject.explain()["reference"].reason


def test_a_reference_adapter_from_a_checkpoint_is_scored_again(workshop, tmp_path):
    """Resuming replaces the trainer's adapter "ref" by the checkpoint's."""

    def policy(scale):
        base = AutoModelForCausalLM.from_pretrained(workshop.model("untied"))
        model = PeftModel.from_pretrained(base, workshop.adapter("untied"), is_trainable=True)
        with torch.no_grad():
            for name, param in model.named_parameters():
                if ".default." in name:
                    param.mul_(scale)
        return model

    config = {"save_strategy": "steps", "save_steps": 3, "num_train_epochs": 2}
    for library in (trl, trl_ext):
        trainer(workshop, tmp_path, library, policy=policy(1.0), max_steps=3, **config).train()
        logs = []
        for subject in (trl, trl_ext):
            resumed = trainer(workshop, tmp_path, subject, policy=policy(3.0), **config)
            resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
            logs.append(logged(resumed, "rewards/margins")[3:])
        assert len(logs[0]) == 3
        assert logs[1] == pytest.approx(logs[0], rel=1e-4, abs=1e-5)
    with counted() as tokens:
        subject = trainer(workshop, tmp_path, policy=policy(3.0))
        subject.train()
    assert len(tokens.without) == 3  # nothing was stored under the identity of this adapter


def test_a_reference_adapter_of_virtual_tokens_is_scored_as_in_trl(workshop, tmp_path):
    margins = []
    for library in (trl, trl_ext):
        torch.manual_seed(3)
        base = AutoModelForCausalLM.from_pretrained(workshop.model("untied"))
        policy = get_peft_model(base, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
        subject = trainer(workshop, tmp_path, library, policy=policy, num_train_epochs=2, learning_rate=1.0)
        with counted() as tokens:
            subject.train()
        margins.append(logged(subject, "rewards/margins"))
    assert "adapter" in subject.explain()["reference"].reason
    assert len(tokens.without) == 3
    assert margins[1] == pytest.approx(margins[0], rel=1e-4, abs=1e-5)
