"""GRPO and RLOO generate on fewer rows: samples, logs, weights and the generator's state are those of all rows."""

from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from peft import PromptTuningConfig
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM

import trl_ext
from image_models import CONFIGS, fresh, image_data, processor
from short_training import Bench
from tiny import Workshop, lora_config, prompts, word_tokenizer
from token_counts import counted, total
from trl_ext.compat import generate
from trl_ext.compat.generate import GenerateRows

KINDS = ("grpo", "rloo")
STEPS = {"max_steps": 3, "max_completion_length": 12, "per_device_train_batch_size": 8, "num_generations": 4}


class Run:
    """A training whose reward function notes the samples, and whose embeddings count the tokens of `generate`."""

    def __init__(self, kind: str, workshop: Workshop, folder: Path, package: Any = trl_ext, **arguments: Any) -> None:
        self.samples: list[list[list[int]]] = []
        self.prompts: list[list[str]] = []
        bench = Bench(workshop, folder, package)
        arguments = {
            **STEPS,
            **{"reward_funcs": self._reward, "train_dataset": prompts(8, seed=1), "learning_rate": 0.01},
            **{"logging_steps": 1, "seed": 3, **arguments},
        }
        with counted() as self._tokens:
            getattr(bench, kind)(**arguments)
        self.trainer = bench.trainer
        self.random_state = torch.get_rng_state()
        names = ("runtime", "per_second", "step_time", "generation", "checks", "seconds/")
        self.logs = [
            {name: x for name, x in log.items() if not any(y in name for y in names)}
            for log in self.trainer.state.log_history
        ]
        self.weights = {name: x.detach().clone() for name, x in self.trainer.model.named_parameters()}

    def _reward(self, prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        self.generation = list(self._tokens.without)  # shapes of what `generate` has embedded
        self.samples.append([list(ids) for ids in completion_ids])
        self.prompts.append(list(prompts))
        return [float(sum(ids) % 5) for ids in completion_ids]

    def logged(self, name: str) -> list[float]:
        return [log[name] for log in self.trainer.state.log_history if name in log]


def assert_bitwise_equal(ours: Run, other: Run) -> None:
    assert ours.samples == other.samples
    assert torch.equal(ours.random_state, other.random_state)
    assert ours.logs == other.logs
    for name, weight in other.weights.items():
        assert torch.equal(ours.weights[name], weight), name


CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"peft_config": lora_config()},
    "checkpointing": {"gradient_checkpointing": True},
    "top-k and penalties": {"top_k": 9, "repetition_penalty": 1.2, "generation_kwargs": {"min_new_tokens": 3}},
    "iterations": {"num_iterations": 2, "max_steps": 4},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": prompts(4, seed=2)},
    "pairs": {"num_generations": 2},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_training_is_bitwise_that_of_all_rows(name: str, kind: str, workshop: Workshop, tmp_path: Path) -> None:
    ours = Run(kind, workshop, tmp_path / "a", **CASES[name])
    all_rows = Run(kind, workshop, tmp_path / "b", generate_fewer_rows=False, **CASES[name])
    assert_bitwise_equal(ours, all_rows)
    assert ours.trainer.explain()["generation"].reason.startswith("`generate` runs each distinct prompt once")
    assert "`generate_fewer_rows=False`" in all_rows.trainer.explain()["generation"].reason
    skipped = sum(ours.logged("skipped/generation_tokens"))
    processed = sum(ours.logged("tokens_processed/generation"))
    assert processed + skipped == sum(all_rows.logged("tokens_processed/generation"))
    assert 0.2 < processed / (processed + skipped) < 0.9
    other = Run(kind, workshop, tmp_path / "c", **CASES[name], **{"seed": 4})
    assert other.samples != ours.samples


@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_those_of_stock_trl(kind: str, workshop: Workshop, tmp_path: Path) -> None:
    ours = Run(kind, workshop, tmp_path / "a", max_steps=1)
    stock = Run(kind, workshop, tmp_path / "b", trl, max_steps=1)
    assert ours.samples == stock.samples
    assert torch.equal(ours.random_state, stock.random_state)


@pytest.mark.parametrize("kind", KINDS)
def test_only_distinct_prompts_and_unfinished_rows_are_embedded(kind: str, workshop: Workshop, tmp_path: Path) -> None:
    run = Run(kind, workshop, tmp_path / "a", max_steps=1, beta=0.0)
    tokenizer = run.trainer.processing_class
    (samples,), (texts,) = run.samples, run.prompts
    width = max(len(tokenizer(text)["input_ids"]) for text in texts)
    expected = len(set(texts)) * width + sum(len(ids) - 1 for ids in samples)
    assert run.logged("tokens_processed/generation") == [expected]
    # The check of the first generation runs without hooks of users, such as that of this test
    assert total(run.generation) == expected
    check_tokens = len(set(texts)) * (width + max(map(len, samples)) - 1)  # a row of each prompt
    other_checks = Run(kind, workshop, tmp_path / "b", max_steps=1, beta=0.0, generate_fewer_rows=False)
    of_checks = "tokens_processed/checks"
    assert run.logged(of_checks)[0] - other_checks.logged(of_checks)[0] == check_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_active_dropout_keeps_all_rows(kind: str, workshop: Workshop, tmp_path: Path) -> None:
    dropout = {"peft_config": lora_config(lora_dropout=0.3)}
    ours = Run(kind, workshop, tmp_path / "a", max_steps=1, **dropout)
    assert "dropout is active" in ours.trainer.explain()["generation"].reason
    assert ours.logged("skipped/generation_tokens") == []
    assert ours.samples == Run(kind, workshop, tmp_path / "b", trl, max_steps=1, **dropout).samples


UNPROVEN = {
    "its cache is a `StaticCache`": {"cache_implementation": "static"},
    "it has no cache": {"use_cache": False},
    "it uses beam_sample": {"num_beams": 2},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reason", UNPROVEN)
def test_what_is_not_proven_keeps_all_rows(reason: str, kind: str, workshop: Workshop, tmp_path: Path) -> None:
    options = {"max_steps": 2, "generation_kwargs": UNPROVEN[reason]}
    ours = Run(kind, workshop, tmp_path / "a", **options)
    stock = Run(kind, workshop, tmp_path / "b", trl, **options)
    assert ours.samples[0] == stock.samples[0]
    assert torch.equal(ours.random_state, stock.random_state)
    assert f"as in TRL: {reason}" in ours.trainer.explain()["generation"].reason
    assert ours.logged("skipped/generation_tokens") == []
    without_a_try = Run(kind, workshop, tmp_path / "c", generate_fewer_rows=False, **options)
    assert ours.logged("tokens_processed/generation") == without_a_try.logged("tokens_processed/generation")


@pytest.mark.filterwarnings("ignore:Position ids are not supported:UserWarning")
def test_virtual_tokens_keep_all_rows(workshop: Workshop, tmp_path: Path) -> None:
    virtual_tokens = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    ours = Run("grpo", workshop, tmp_path / "a", max_steps=1, peft_config=virtual_tokens)
    assert "virtual tokens" in ours.trainer.explain()["generation"].reason
    assert ours.samples == Run("grpo", workshop, tmp_path / "b", trl, max_steps=1, peft_config=virtual_tokens).samples


class KeepsState(torch.nn.Module):
    """Adds what the prefill's last token was in each row: a state by row outside the cache."""

    def __init__(self, module: torch.nn.Module, kept: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.module = module
        self.kept = kept

    def forward(self, hidden: torch.Tensor, **options: Any) -> torch.Tensor:
        rows = self.kept.get("rows")
        if hidden.size(1) > 1 or rows is None:
            self.kept["rows"] = hidden[:, -1:]
            return self.module(hidden, **options)
        return self.module(hidden + 5 * rows[torch.arange(len(hidden)) % len(rows)], **options)


def test_a_check_finds_a_state_that_no_attribute_shows(
    workshop: Workshop, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without the check, samples are others: the state is in a dictionary, which the search of modules does not see."""
    runs = {}
    for name, package in (("ours", trl_ext), ("stock", trl)):
        model = AutoModelForCausalLM.from_pretrained(workshop.model("tied"))
        layer = model.model.layers[1]
        layer.mlp = KeepsState(layer.mlp, {})
        runs[name] = Run("grpo", workshop, tmp_path / name, package, max_steps=1, model=model, learning_rate=0.0)
    assert "in a check, its logits differ" in runs["ours"].trainer.explain()["generation"].reason
    assert any("in a check, its logits differ" in x for x in caplog.messages)
    assert runs["ours"].samples == runs["stock"].samples


@pytest.mark.parametrize(
    ("wrong_rows", "rows", "is_noticed"), [(1, 2, True), (1, 4, False), (2, 4, True), (4, 4, True)]
)
def test_in_bf16_fewer_than_half_of_the_rows_may_differ(
    wrong_rows: int, rows: int, is_noticed: bool, workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last_step = GenerateRows.last_step

    def with_wrong_logits(self: GenerateRows, most: int) -> Any:
        places, logits_RV = last_step(self, most)
        logits_RV = logits_RV[:rows].clone()
        logits_RV[:wrong_rows] *= 1.1
        return places[:rows], logits_RV

    monkeypatch.setattr(GenerateRows, "last_step", with_wrong_logits)
    model = AutoModelForCausalLM.from_pretrained(workshop.model("tied"), dtype=torch.bfloat16)
    options = {"per_device_train_batch_size": 16, "max_steps": 1, "top_p": 1.0}
    run = Run("grpo", workshop, tmp_path, model=model, **options)
    assert ("in a check" in run.trainer.explain()["generation"].reason) == is_noticed


@pytest.mark.parametrize(
    ("options", "dtype", "is_noticed"),
    [
        ({"bf16": False}, torch.float32, True),
        ({"bf16": True}, torch.float32, False),
        ({"bf16": False, "cast_lm_head_to_fp32": True}, torch.bfloat16, False),
    ],
    ids=["fp32", "autocast", "fp32 head"],
)
def test_fp32_logits_of_a_model_in_bf16_may_be_rounded(
    options: dict[str, Any],
    dtype: torch.dtype,
    is_noticed: bool,
    workshop: Workshop,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    last_step = GenerateRows.last_step

    def with_rounded_logits(self: GenerateRows, most: int) -> Any:
        places, logits_RV = last_step(self, most)
        assert logits_RV.dtype == torch.float32
        return places, logits_RV * 1.01

    monkeypatch.setattr(GenerateRows, "last_step", with_rounded_logits)
    model = AutoModelForCausalLM.from_pretrained(workshop.model("untied"), dtype=dtype)
    run = Run("grpo", workshop, tmp_path, model=model, max_steps=1, top_p=1.0, **options)
    assert ("in a check" in run.trainer.explain()["generation"].reason) == is_noticed


def with_state(workshop: Workshop) -> Any:
    model = AutoModelForCausalLM.from_pretrained(workshop.model("tied"))
    layer = model.model.layers[1]
    layer.mlp = KeepsState(layer.mlp, {})
    return model


def test_a_second_try_records_its_own_sampling_mask(workshop: Workshop, tmp_path: Path) -> None:
    options = {"max_steps": 1, "top_k": 9, "keep_sampling_mask": True}
    ours = Run("grpo", workshop, tmp_path / "a", model=with_state(workshop), **options)
    all_rows = Run("grpo", workshop, tmp_path / "b", model=with_state(workshop), generate_fewer_rows=False, **options)
    assert "in a check" in ours.trainer.explain()["generation"].reason
    assert_bitwise_equal(ours, all_rows)


class RunningMean(torch.nn.Module):
    """Adds a running mean of each row's hidden states, which it keeps outside the cache."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module
        self.kept: dict[str, torch.Tensor] = {}

    def forward(self, hidden: torch.Tensor, **options: Any) -> torch.Tensor:
        begins = hidden.size(1) > 1 or "mean" not in self.kept
        mean = torch.zeros_like(hidden[:, :1]) if begins else self.kept["mean"]
        means = []
        for token in range(hidden.size(1)):
            mean = 0.9 * mean + 0.1 * hidden[:, token : token + 1]
            means.append(mean)
        self.kept["mean"] = mean.detach()
        return self.module(hidden + 3 * torch.cat(means, dim=1), **options)


def test_the_first_row_that_leaves_is_checked_whenever_it_leaves(workshop: Workshop, tmp_path: Path) -> None:
    """In the first generations no row ends, so that only later ones show what a row leaves behind."""
    runs = {}
    for name, package in (("ours", trl_ext), ("stock", trl)):
        model = AutoModelForCausalLM.from_pretrained(workshop.model("tied"))
        model.model.layers[1].mlp = RunningMean(model.model.layers[1].mlp)
        data = Dataset.from_list([{"prompt": f"w{i} w{i + 1} w{i + 2}"} for i in range(8)])
        options = {"train_dataset": data, "num_generations": 8, "max_completion_length": 6, "learning_rate": 0.0}
        runs[name] = Run("grpo", workshop, tmp_path / name, package, model=model, **options)
    assert runs["ours"].samples == runs["stock"].samples
    assert "with fewer rows, it raises RuntimeError" in runs["ours"].trainer.explain()["generation"].reason


def rotary(rope_type: str) -> Any:
    torch.manual_seed(0)
    rope = {"rope_type": rope_type, "factor": 4.0, "rope_theta": 1e4}
    config = LlamaConfig(
        **{"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "max_position_embeddings": 24, "initializer_range": 0.3},
        **{"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, "rope_parameters": rope},
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=[1, *range(60, 68)], pad_token_id=0)
    return model


@pytest.mark.parametrize(("rope_type", "is_by_length"), [("dynamic", True), ("linear", False)])
def test_rotary_embeddings_by_length_keep_all_rows(
    rope_type: str, is_by_length: bool, workshop: Workshop, tmp_path: Path
) -> None:
    options = {"max_completion_length": 36, "learning_rate": 0.0, "processing_class": word_tokenizer()}
    ours = Run("grpo", workshop, tmp_path / "a", model=rotary(rope_type), **options)
    assert ours.samples == Run("grpo", workshop, tmp_path / "b", trl, model=rotary(rope_type), **options).samples
    reason = ours.trainer.explain()["generation"].reason
    assert ("depend on the longest row" in reason) == is_by_length


def test_a_generate_of_the_user_keeps_all_rows(workshop: Workshop, tmp_path: Path) -> None:
    runs = {}
    for name, package in (("ours", trl_ext), ("stock", trl)):
        model = AutoModelForCausalLM.from_pretrained(workshop.model("tied"))
        plain = model.generate

        def my_generate(*positional: Any, plain: Any = plain, **keywords: Any) -> Any:
            return plain(*positional, **keywords)[:, :]

        model.generate = my_generate
        runs[name] = Run("grpo", workshop, tmp_path / name, package, max_steps=1, model=model)
    assert runs["ours"].samples == runs["stock"].samples
    assert "`generate` runs your function `my_generate`" in runs["ours"].trainer.explain()["generation"].reason


def test_a_wrong_cache_of_a_later_prompt_is_noticed(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    distinct_rows = generate._distinct_rows

    def all_of_the_first(*positional: Any) -> Any:
        first_R, distinct_B = distinct_rows(*positional)
        return first_R, torch.zeros_like(distinct_B)

    monkeypatch.setattr(generate, "_distinct_rows", all_of_the_first)
    # The check finds rows of different prompts by what `_distinct_rows` returns, so one prompt is left of them
    monkeypatch.setattr(GenerateRows, "last_step", every_row)
    run = Run("grpo", workshop, tmp_path, max_steps=1)
    assert "in a check" in run.trainer.explain()["generation"].reason


def every_row(rows: GenerateRows, _: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows_R, logits_R1V = rows._last_step
    return rows_R, logits_R1V[:, -1]


def test_modules_are_searched_once(workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[bool] = []
    init = GenerateRows.__init__

    def note(self: Any, model: Any, *, looks_for_state: bool, **options: Any) -> None:
        looked.append(looks_for_state)
        init(self, model, looks_for_state=looks_for_state, **options)

    monkeypatch.setattr(GenerateRows, "__init__", note)
    Run("grpo", workshop, tmp_path)
    assert looked[0]
    assert not looked[-1]


@pytest.mark.parametrize("name", sorted(CONFIGS.keys() - {"llava"}))  # the processor is Qwen's
def test_a_model_of_images_runs_fewer_rows_on_text(name: str, workshop: Workshop, tmp_path: Path) -> None:
    text = [{"prompt": [{"role": "user", "content": f"w{row} w{row + 1}"}]} for row in range(8)]

    def run(folder: str, **arguments: Any) -> Run:
        arguments = {"train_dataset": Dataset.from_list(text), "max_steps": 2, **arguments}
        return Run(
            "grpo", workshop, tmp_path / folder, model=fresh(CONFIGS[name]()), processing_class=processor(), **arguments
        )

    ours, all_rows = run("a"), run("b", generate_fewer_rows=False)
    assert "each distinct prompt once" in ours.trainer.explain()["generation"].reason
    assert_bitwise_equal(ours, all_rows)
    assert total(ours.generation) < total(all_rows.generation)
    with_images = trl_ext.GRPOTrainer(
        fresh(CONFIGS[name]()),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=trl_ext.GRPOConfig(str(tmp_path / "c"), use_cpu=True, bf16=False, report_to="none"),
        train_dataset=image_data("grpo", 8),
        processing_class=processor(),
    )
    assert "prompts may have images" in with_images.explain()["generation"].reason
