"""`DistillationTrainer`: tokens by hooks, the teacher, its errors, and code of users. Drop-in cases are elsewhere."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import trl_ext
from tiny import N_WORDS, REFERENCE_SEED, Workshop, lora_config, preferences, prompts, word_tokenizer
from token_counts import counted, total


def _ragged_prompts(rows: int, longest: int) -> Dataset:
    rng = random.Random(3)
    texts = [" ".join(f"w{rng.randrange(N_WORDS)}" for _ in range(rng.randint(1, longest))) for _ in range(rows)]
    return Dataset.from_list([{"prompt": text} for text in texts])


def _ragged_completions(trainer_class: Any, longest: int) -> Any:
    class Scripted(trainer_class):
        def _generate_single_turn(self, prompt_ids: list[list[int]], *_: Any, **__: Any) -> list[list[int]]:
            draws = [random.Random(str(ids)) for ids in prompt_ids]
            return [[*(rng.randrange(3, 97) for _ in range(rng.randint(1, longest - 1))), 1] for rng in draws]

    return Scripted


def _trainer(workshop: Workshop, folder: Path, trainer_class: Any = trl_ext.DistillationTrainer, **changes: Any) -> Any:
    config_class = trl_ext.DistillationConfig if issubclass(trainer_class, trl_ext.DistillationTrainer) else None
    options = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "max_completion_length": 8,
        "max_steps": 2,
        "learning_rate": 0.1,
        "logging_steps": 1,
        "optim": "sgd",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    names = ("model", "teacher_model", "train_dataset", "peft_config", "tools")
    arguments = {name: changes.pop(name) for name in names if name in changes}
    return trainer_class(
        **{
            "model": workshop.model("tied"),
            "teacher_model": workshop.model("untied", seed=REFERENCE_SEED),
            "train_dataset": prompts(8, seed=1),
            **arguments,
        },
        args=(config_class or trl.DistillationConfig)(**{**options, **changes}),
    )


def test_student_and_teacher_process_at_most_65_percent_of_the_tokens(workshop: Workshop, tmp_path: Path) -> None:
    tokens = {}
    for base in (trl_ext.DistillationTrainer, trl.DistillationTrainer):
        trainer_class = _ragged_completions(base, longest=64)
        data = _ragged_prompts(32, longest=64)
        config = {"per_device_train_batch_size": 8, "max_completion_length": 64, "max_steps": 4}
        trainer = _trainer(workshop, tmp_path, trainer_class, train_dataset=data, **config)
        for forward in getattr(trainer, "scoring_forwards", ()):
            forward.packing.checked = forward.is_compared = True  # the first batch's checks cost a few rows, once
        with counted() as counts:
            trainer.train()
        tokens[base] = (total(counts.with_gradient), total(counts.without))
    for ours, stock in zip(tokens[trl_ext.DistillationTrainer], tokens[trl.DistillationTrainer], strict=True):
        assert 0 < ours <= 0.65 * stock, (ours, stock)


def test_the_division_of_a_step_into_micro_batches_changes_nothing(workshop: Workshop, tmp_path: Path) -> None:
    """`plan` chooses it."""
    changes = []
    for batch, accumulation in ((8, 1), (4, 2), (2, 4), (1, 8)):
        trainer = _trainer(
            workshop,
            tmp_path,
            _ragged_completions(trl_ext.DistillationTrainer, longest=8),
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation,
            train_dataset=_ragged_prompts(8, longest=8),
            max_steps=1,
            max_grad_norm=0.0,
        )
        before = {name: x.detach().clone() for name, x in trainer.model.named_parameters()}
        trainer.train()
        changes.append({name: x.detach() - before[name] for name, x in trainer.model.named_parameters()})
    largest = max(x.abs().max() for x in changes[0].values())
    assert largest > 1e-3
    for other_changes in changes[1:]:
        for name, change in changes[0].items():
            torch.testing.assert_close(other_changes[name], change, rtol=0.0, atol=1e-4 * largest.item())


@pytest.mark.parametrize("padded", [0, 1])
def test_a_packed_and_a_padded_model_score_the_same_tokens(padded: int, workshop: Workshop, tmp_path: Path) -> None:
    """The hidden states of both models are in one order."""
    losses = []
    for is_padded in (False, True):
        trainer = _trainer(workshop, tmp_path)
        if is_padded:
            trainer.scoring_forwards[padded].packing.padded_reason = "the test"
        trainer.train()
        losses.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_the_plan_names_the_base_model_as_the_teacher(workshop: Workshop, tmp_path: Path) -> None:
    trainer = _trainer(workshop, tmp_path, teacher_model=None, peft_config=LoraConfig(**_LORA))
    assert trainer.explain()["teacher"].reason.startswith("The teacher is the base model, with the adapter off")


_LORA = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"], "r": 4}


def test_dropout_of_the_student_is_off_in_the_base_model_as_teacher(workshop: Workshop, tmp_path: Path) -> None:
    """A new adapter changes nothing, so the first loss is 0 unless one of the passes draws dropout."""
    config = {"peft_config": LoraConfig(**_LORA, lora_dropout=0.5), "teacher_model": None, "max_steps": 1}
    trainer = _trainer(workshop, tmp_path, **config)
    seen: list[bool] = []
    embedding = trainer.model.get_input_embeddings()
    layer = trainer.model.get_base_model().model.layers[0]
    embedding.register_forward_hook(lambda *_: seen.append(layer.training))
    trainer.train()
    assert False in seen
    assert True in seen
    assert layer.training
    assert "is computed once in evaluation but not in training" in trainer.explain()["packing"].reason.replace(
        "are computed", "is computed"
    )


@pytest.mark.parametrize("action", ["stop", "skip"])
def test_a_divergence_that_is_not_finite_is_named(action: str, workshop: Workshop, tmp_path: Path) -> None:
    teacher = AutoModelForCausalLM.from_pretrained(workshop.model("untied", seed=REFERENCE_SEED))
    with torch.no_grad():
        teacher.lm_head.weight[3] = torch.nan
    trainer = _trainer(workshop, tmp_path, teacher_model=teacher, on_non_finite_loss=action)
    before = {name: param.clone() for name, param in trainer.model.named_parameters()}
    if action == "stop":
        with pytest.raises(FloatingPointError, match=r"step 1\. Rank 0: row 0 \(divergence\) of the prompt"):
            trainer.train()
    else:
        trainer.train()
    assert all(param.equal(before[name]) for name, param in trainer.model.named_parameters())


def test_a_teacher_is_needed(workshop: Workshop, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`teacher_model` is None\. Pass a model, its name or its folder\."):
        _trainer(workshop, tmp_path, teacher_model=None).train()


def test_a_subclass_may_supply_the_teacher_itself(workshop: Workshop, tmp_path: Path) -> None:
    class Remote(trl_ext.DistillationTrainer):
        def _compute_loss(self, unwrapped_student: Any, inputs: Any, num_items_in_batch: Any) -> Any:
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
            logits = unwrapped_student(input_ids=ids).logits
            tokens = inputs["completion_mask"].sum()
            return logits.square().mean(), torch.zeros(()), tokens

    trainer = _trainer(workshop, tmp_path, Remote, teacher_model=None)
    trainer.train()
    assert trainer.state.global_step == 2


def test_a_subclass_may_change_the_batch(workshop: Workshop, tmp_path: Path) -> None:
    """What it passes on is what both models score."""
    losses = {}
    for base in (trl_ext.DistillationTrainer, trl.DistillationTrainer):

        class FirstTokens(base):  # type: ignore[misc, valid-type]
            def _compute_loss(self, unwrapped_student: Any, inputs: Any, num_items_in_batch: Any) -> Any:
                mask = inputs["completion_mask"].clone()
                mask[:, 3:] = 0
                return super()._compute_loss(unwrapped_student, {**inputs, "completion_mask": mask}, num_items_in_batch)

        trainer = _trainer(workshop, tmp_path, FirstTokens)
        trainer.train()
        losses[base] = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    assert losses[trl_ext.DistillationTrainer] == pytest.approx(losses[trl.DistillationTrainer], rel=1e-5)


def test_a_teacher_of_the_students_weights_is_refused(workshop: Workshop, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(workshop.model("tied"))
    with pytest.raises(ValueError, match="`teacher_model` and `model` wrap the same base model"):
        _trainer(workshop, tmp_path, model=model, teacher_model=model)


def test_an_adapter_on_the_head_is_refused(workshop: Workshop, tmp_path: Path) -> None:
    adapter = lora_config(target_modules=["q_proj", "lm_head"])
    with pytest.raises(ValueError, match="PEFT adapter to `lm_head` is not supported"):
        _trainer(workshop, tmp_path, model=workshop.model("untied"), peft_config=adapter)


def _with_completions(rows: int, conversational: bool = False) -> Dataset:
    """Return rows with different prompts."""
    pairs = preferences(2 * rows, seed=2, conversational=conversational)
    data = pairs.rename_column("chosen", "answer").remove_columns("rejected")
    return data.filter(lambda row, i: i % 4 != 3, with_indices=True).select(range(rows))


def test_a_column_of_completions_is_distilled_as_if_it_had_been_sampled(workshop: Workshop, tmp_path: Path) -> None:
    data = _with_completions(8)
    tokenizer = word_tokenizer()
    answers = {row["prompt"]: [*tokenizer(row["answer"])["input_ids"], 1] for row in data}

    class Scripted(trl.DistillationTrainer):
        def _generate_single_turn(self, prompt_ids: list[list[int]], *_: Any, **__: Any) -> list[list[int]]:
            return [answers[tokenizer.decode(ids)][:5] for ids in prompt_ids]

    losses = []
    for trainer_class, options in ((trl_ext.DistillationTrainer, {"completion_column": "answer"}), (Scripted, {})):
        config = {"train_dataset": data, "max_completion_length": 5, "gradient_accumulation_steps": 2, **options}
        trainer = _trainer(workshop, tmp_path, trainer_class, remove_unused_columns=True, **config)
        trainer.train()
        losses.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_messages_of_a_column_are_rendered_after_their_prompt(workshop: Workshop, tmp_path: Path) -> None:
    data = _with_completions(8, conversational=True)
    models = {"model": workshop.model("chat"), "teacher_model": workshop.model("chat", seed=REFERENCE_SEED)}
    trainer = _trainer(
        workshop, tmp_path, train_dataset=data, completion_column="answer", max_completion_length=99, **models
    )
    batch = trainer._generate_and_score_completions([data[0], data[1]])
    for row, ids_C, mask_C in zip(data, batch["completion_ids"], batch["completion_mask"], strict=False):
        text = trainer.processing_class.decode(ids_C[mask_C.bool()])
        assert text == f"<think>\n\n</think>\n\n{row['answer'][0]['content']}<|im_end|>"  # as SFT renders it
    assert trainer.explain()["generation"].action == "skip"


@pytest.mark.parametrize(
    ("column", "change", "said"),
    [
        ("reply", None, r"`completion_column` is 'reply', but `train_dataset` has no such column\. Choose from: "),
        ("answer", "", r"`answer` is empty in row 3 of `train_dataset`"),
    ],
)
def test_a_column_without_completions_is_an_error(
    column: str, change: str | None, said: str, workshop: Workshop, tmp_path: Path
) -> None:
    data = _with_completions(8)
    if change is not None:
        data = Dataset.from_list([{**row, "answer": change if i == 3 else row["answer"]} for i, row in enumerate(data)])
    with pytest.raises(ValueError, match=said):
        _trainer(workshop, tmp_path, train_dataset=data, completion_column=column)


def test_a_teacher_in_host_memory_computes_the_same(workshop: Workshop, tmp_path: Path) -> None:
    losses = []
    for device in (None, "cpu"):
        trainer = _trainer(workshop, tmp_path, teacher_device=device, gradient_accumulation_steps=2)
        trainer.train()
        losses.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    "option", [{"teacher_device": "cpu"}, {"teacher_store": "disk", "completion_column": "answer"}]
)
def test_an_option_of_a_teacher_model_needs_one(option: dict[str, str], workshop: Workshop, tmp_path: Path) -> None:
    changes = {"teacher_model": None, "peft_config": LoraConfig(**_LORA), "train_dataset": _with_completions(8)}
    with pytest.raises(
        ValueError, match=r"`teacher_\w+` is for a `teacher_model`, but the teacher is the student's base"
    ):
        _trainer(workshop, tmp_path, **changes, **option)


@pytest.mark.parametrize("change", ["teacher", "temperature"])
def test_what_code_of_the_user_sets_after_the_trainer_is_built_is_used(
    change: str, workshop: Workshop, tmp_path: Path
) -> None:
    losses = []
    for base in (trl_ext.DistillationTrainer, trl.DistillationTrainer):

        class Changed(base):  # type: ignore[misc, valid-type]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                if change == "temperature":
                    self.temperature = 0.5
                else:
                    path = workshop.model("untied", seed=REFERENCE_SEED + 1)
                    self.teacher_model = AutoModelForCausalLM.from_pretrained(path)

        class Scripted(_ragged_completions(Changed, longest=8)):
            pass

        trainer = _trainer(workshop, tmp_path, Scripted)
        trainer.train()
        losses.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_teacher_of_another_vocabulary_is_refused(workshop: Workshop, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`teacher_model` has a vocabulary of 501 tokens"):
        _trainer(workshop, tmp_path, teacher_model=workshop.model("odd_vocab"))


def test_an_override_of_the_hidden_states_is_refused(workshop: Workshop, tmp_path: Path) -> None:
    class Other(trl_ext.DistillationTrainer):
        def _get_last_hidden_state(self, *args: Any, **kwargs: Any) -> Any:
            return super()._get_last_hidden_state(*args, **kwargs)

    with pytest.raises(ValueError, match=r"`Other\._get_last_hidden_state` is not called"):
        _trainer(workshop, tmp_path, Other)


def test_a_base_model_that_its_adapter_has_changed_is_no_teacher(workshop: Workshop, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(workshop.model("tied"))
    student = get_peft_model(model, LoraConfig(**_LORA, init_lora_weights="pissa"))
    with pytest.raises(ValueError, match="an adapter with `init_lora_weights='pissa'` has changed its weights"):
        _trainer(workshop, tmp_path, model=student, teacher_model=None)


def test_text_and_messages_in_one_row_are_refused(workshop: Workshop, tmp_path: Path) -> None:
    data = Dataset.from_list([{"prompt": "w1", "answer": [{"role": "assistant", "content": "w2"}]}] * 4)
    with pytest.raises(ValueError, match="has text in one of the columns `prompt` and `answer`"):
        _trainer(workshop, tmp_path, train_dataset=data, completion_column="answer")


def test_a_teacher_that_is_an_adapters_folder_is_refused(workshop: Workshop, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(workshop.model("untied"))
    get_peft_model(model, lora_config()).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="the folder of an adapter"):
        _trainer(workshop, tmp_path, teacher_model=str(tmp_path / "adapter"))


_SAID = {"role": "assistant", "content": "w2"}
_ASKED = {"role": "user", "content": "w1"}


@pytest.mark.parametrize(
    ("prompt", "answer", "said"),
    [
        ("w1", [_SAID], "has text in one of the columns `prompt` and `answer`"),
        ([{"role": "user", "content": "w1"}], "w2", "has text in one of the columns `prompt` and `answer`"),
        (
            [{"role": "user", "content": "w1"}],
            [_SAID, {"role": "user", "content": "w3"}, _SAID],
            "has messages of another role than 'assistant'",
        ),
    ],
)
def test_rows_of_streaming_data_are_checked_in_their_batch(
    prompt: Any, answer: Any, said: str, workshop: Workshop, tmp_path: Path
) -> None:
    data = Dataset.from_list([{"prompt": prompt, "answer": answer}] * 8).to_iterable_dataset()
    models = {"model": workshop.model("chat"), "teacher_model": workshop.model("chat", seed=REFERENCE_SEED)}
    trainer = _trainer(workshop, tmp_path, train_dataset=data, completion_column="answer", **models)
    with pytest.raises(ValueError, match=said):
        trainer.train()


def test_messages_that_repeat_their_prompt_are_refused_before_training(workshop: Workshop, tmp_path: Path) -> None:
    rows = [{"prompt": [_ASKED], "answer": [_SAID]} for _ in range(8)]
    rows[3]["answer"] = [_ASKED, _SAID]
    models = {"model": workshop.model("chat"), "teacher_model": workshop.model("chat", seed=REFERENCE_SEED)}
    said = "`prompt` of `train_dataset` is also at the start of `answer`, in row 3,"
    with pytest.raises(ValueError, match=said):
        _trainer(workshop, tmp_path, train_dataset=Dataset.from_list(rows), completion_column="answer", **models)
