"""GRPO and RLOO with transformers' continuous batching: one request for a group, log-probs kept and checked."""

import copy
import logging
import math
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from test_generate_rows import KINDS, Run
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation import ContinuousBatchingConfig

import trl_ext
from short_training import Bench
from tiny import Workshop, lora_config
from trl_ext.compat import continuous
from trl_ext.compat.continuous import complete

ON_CPU = {"use_cuda_graph": False, "num_blocks": 64, "max_batch_tokens": 256}
BATCHING = {"use_transformers_continuous_batching": True, "transformers_continuous_batching_config": ON_CPU}
REPORT = "continuous batching's log-probs differ from the policy's"


class Requests:
    """Notes the requests that `generate_batch` gets, and log-probs that it returns, which may be changed first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.prompts: list[Counter[tuple[int, ...]]] = []
        self.log_probs: list[dict[tuple[tuple[int, ...], tuple[int, ...]], list[float]]] = []
        self.change: Any = lambda output: output

        def noted(generate_batch: Any, inputs: Any, **options: Any) -> Any:
            self.prompts.append(Counter(map(tuple, inputs)))
            outputs = generate_batch(inputs, **options)
            outputs = {name: self.change(output) for name, output in outputs.items()}
            self.log_probs.append(
                {(tuple(x.prompt_ids), tuple(x.generated_tokens)): x.logprobs for x in outputs.values()}
            )
            return outputs

        monkeypatch.setattr(continuous, "complete", lambda run, *x, **y: complete(partial(noted, run), *x, **y))


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Requests:
    return Requests(monkeypatch)


@pytest.mark.parametrize("options", [{}, {"peft_config": lora_config()}], ids=["full", "lora"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_is_one_request_and_the_ratio_of_the_first_pass_is_one(
    kind: str, options: dict[str, Any], workshop: Workshop, tmp_path: Path, requests: Requests
) -> None:
    long_prompts = Dataset.from_list([{"prompt": f"w{row} w{row + 1} w7"[: 5 + 3 * (row % 2)]} for row in range(8)])
    run = Run(kind, workshop, tmp_path, train_dataset=long_prompts, **BATCHING, **options)
    assert [sorted(prompts.values()) for prompts in requests.prompts] == [[1, 1]] * 3
    assert len({tuple(ids) for ids in run.samples[0][:4]}) > 1  # the completions of a prompt are drawn one by one
    differences = run.logged("sampling/sampling_logp_difference/max")
    assert len(differences) == 3
    assert max(differences) < 1e-5
    assert max(map(abs, run.logged("sampling/mismatch_kl"))) < 1e-5
    ratios = [x for end in ("min", "max") for x in run.logged(f"sampling/importance_sampling_ratio/{end}")]
    assert len(ratios) == (6 if kind == "grpo" else 0)
    assert all(abs(x - 1) < 1e-5 for x in ratios)


def with_other_log_probs(output: Any) -> Any:
    output.logprobs = [x - 0.1 + 0.3 * math.sin(place) for place, x in enumerate(output.logprobs)]
    return output


@pytest.mark.parametrize("mode", ["sequence_mask", "token_truncate"])
def test_the_ratio_enters_grpos_loss_as_with_vllm(
    mode: str, workshop: Workshop, tmp_path: Path, requests: Requests
) -> None:
    requests.change = with_other_log_probs
    options = {
        "vllm_importance_sampling_mode": mode,
        "vllm_importance_sampling_clip_max": 1.2,
        "beta": 0.1,
        "learning_rate": 1e-3,
    }
    ours = Run("grpo", workshop, tmp_path / "a", sampler_check="off", **BATCHING, **options)
    batches = zip(ours.samples, requests.log_probs, strict=True)

    class Replaying(trl.GRPOTrainer):
        """Stock TRL as with vLLM, which gives the same completions and log-probs."""

        def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> Any:
            self.use_vllm = True
            completion_ids, log_probs = next(batches)
            rows = zip(prompt_ids, completion_ids, strict=True)
            return completion_ids, [log_probs[tuple(prompt), tuple(ids)] for prompt, ids in rows]

    stock = Run("grpo", workshop, tmp_path / "b", package=trl, subclass=lambda _: Replaying, **options)
    assert ours.samples == stock.samples
    unbounded = ours.logged("sampling/importance_sampling_ratio_unclipped/max")
    assert max(unbounded) > 1.2  # so that bounds matter
    for name in ("loss", "grad_norm", "reward", "kl"):
        assert ours.logged(name) == pytest.approx(stock.logged(name), rel=1e-4, abs=1e-6), name
    for name, weight in stock.weights.items():
        assert torch.allclose(ours.weights[name], weight, rtol=1e-4, atol=1e-6), name


@pytest.mark.filterwarnings("ignore:Passing `repetition_penalty`:UserWarning")  # of transformers, which ignores it
@pytest.mark.parametrize(
    "options",
    [
        {"vllm_importance_sampling_correction": False},
        {"generate_fewer_rows": False},
        {"top_k": 9},
        {"repetition_penalty": 1.2},
        {"generation_kwargs": {"min_new_tokens": 3}},
        {"neftune_noise_alpha": 5.0},
    ],
    ids=lambda options: next(iter(options)),
)
def test_where_the_log_probs_are_not_the_policys_the_loss_is_trls(
    options: dict[str, Any], workshop: Workshop, tmp_path: Path, requests: Requests
) -> None:
    requests.change = with_other_log_probs
    run = Run("grpo", workshop, tmp_path, max_steps=1, **BATCHING, **options)
    assert run.trainer.plan.facts.sampler_ratio is None
    assert "sampling_per_token_logps" not in run.trainer._buffered_inputs[0]  # some of TRL's losses would read them
    assert not any(name.startswith("sampling/") for log in run.logs for name in log)
    assert not run.trainer.plan.warnings


@pytest.mark.parametrize(
    "options",
    [
        {"generation_kwargs": {"temperature": 0.5}},
        {"top_p": 0.9},
        {"peft_config": lora_config(lora_dropout=0.3), "disable_dropout": False},
    ],
    ids=lambda options: next(iter(options)),
)
def test_rloo_compares_nothing_with_another_distribution(
    options: dict[str, Any], workshop: Workshop, tmp_path: Path
) -> None:
    run = Run("rloo", workshop, tmp_path, **BATCHING, **options)
    assert not any(name.startswith("sampling/") for log in run.logs for name in log)


def test_a_prompt_of_one_token_and_evaluation_train(
    workshop: Workshop, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """TRL goes on in training mode after an evaluation with continuous batching."""
    one_token = Dataset.from_list([{"prompt": "w5"}, {"prompt": "w6 w7"}] * 4)
    evaluation = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": one_token.select(range(4))}
    schedule = {"steps_per_generation": 2, "gradient_accumulation_steps": 1, "max_steps": 4}
    for kind in KINDS:
        run = Run(kind, workshop, tmp_path / kind, train_dataset=one_token, **BATCHING, **evaluation, **schedule)
        evaluated = [log for log in run.trainer.state.log_history if "eval_loss" in log]
        assert len(evaluated) == 4
        assert all("eval_reward" in log and "eval_num_tokens" in log for log in evaluated)
        assert run.trainer._step == 4
    assert REPORT not in caplog.text


def test_training_twice_in_the_middle_of_a_generation_batch(
    workshop: Workshop, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    schedule = {"steps_per_generation": 4, "gradient_accumulation_steps": 1, "max_steps": 2, "beta": 0.0}
    run = Run("rloo", workshop, tmp_path, **BATCHING, **schedule)
    run.trainer.train()
    assert REPORT not in caplog.text


@pytest.mark.parametrize(
    ("config", "reason"),
    [({"use_async_batching": True}, "`use_async_batching` is not tested"), ({}, "before 5.18 returns one completion")],
)
def test_where_a_request_has_one_completion_the_log_probs_are_kept(
    config: dict[str, Any],
    reason: str,
    workshop: Workshop,
    tmp_path: Path,
    requests: Requests,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not config:
        monkeypatch.setattr(continuous, "RETURNS_ALL_COMPLETIONS", False)
    options = {**BATCHING, "transformers_continuous_batching_config": {**ON_CPU, **config}}
    bench = Bench(workshop, tmp_path)
    if config:  # which needs a GPU
        monkeypatch.setattr(trl_ext.GRPOTrainer, "train", lambda *_: None)
    bench.grpo(**options)
    assert reason in bench.trainer.explain()["generation"].reason
    if not config:
        assert [max(prompts.values()) for prompts in requests.prompts] == [4]
        assert "sampling/mismatch_kl" in bench.trainer.state.log_history[0]


def test_a_function_of_the_user_runs_as_in_trl(workshop: Workshop, tmp_path: Path) -> None:
    model = model_of(workshop).requires_grad_(True)
    generate_batch = model.generate_batch

    def of_user(*positional: Any, **options: Any) -> Any:
        outputs = generate_batch(*positional, **options)
        for output in outputs.values():
            output.logprobs = []
        return outputs

    model.generate_batch = of_user
    run = Run("grpo", workshop, tmp_path, model=model, max_steps=1, **BATCHING)
    assert run.trainer.plan.facts.sampler_ratio is None
    assert "your function" in str(run.trainer.plan.facts.generation.all_rows_reason)


@pytest.mark.parametrize("kind", KINDS)
def test_stale_weights_are_reported(
    kind: str, workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    copies: list[Any] = []

    def of_first_step(generate_batch: Any, *positional: Any, **options: Any) -> Any:
        copies.append(copies[0] if copies else copy.deepcopy(generate_batch.__self__))
        # The copy also has the trainer's replacement of the method
        return complete(partial(type(copies[0]).generate_batch, copies[0]), *positional, **options)

    with caplog.at_level(logging.WARNING):
        Run(kind, workshop, tmp_path / "a", **BATCHING, learning_rate=1e-3)
    assert REPORT not in caplog.text
    monkeypatch.setattr(continuous, "complete", of_first_step)
    with caplog.at_level(logging.WARNING):
        Run(kind, workshop, tmp_path / "b", **BATCHING, learning_rate=1e-3)
    assert caplog.text.count(REPORT) == 1
    assert f"since step 1, {REPORT}" in caplog.text


def test_stale_weights_can_stop_grpo(workshop: Workshop, tmp_path: Path, requests: Requests) -> None:
    requests.change = with_other_log_probs
    with pytest.raises(RuntimeError, match=REPORT):
        Run("grpo", workshop, tmp_path, sampler_check="stop", **BATCHING)


@pytest.mark.parametrize("options", [{"num_iterations": 2, "max_steps": 4}, {"steps_per_generation": 4, "beta": 0.1}])
@pytest.mark.parametrize("kind", KINDS)
def test_schedules_with_an_old_policy_train(
    kind: str, options: dict[str, Any], workshop: Workshop, tmp_path: Path
) -> None:
    if kind == "rloo":
        options = {name: x for name, x in options.items() if name != "beta"}
    run = Run(kind, workshop, tmp_path, **BATCHING, **options)
    differences = run.logged("sampling/sampling_logp_difference/max")
    assert differences or kind == "rloo"
    assert all(x < 1e-5 for x in differences)


def test_log_probs_can_be_trusted_as_the_old_policys(workshop: Workshop, tmp_path: Path) -> None:
    run = Run("grpo", workshop, tmp_path, trust_sampling_log_probs=True, num_iterations=2, max_steps=2, **BATCHING)
    assert run.trainer.plan["old policy"].action == "skip"


# The function alone


def model_of(workshop: Workshop, name: str = "tied") -> Any:
    return AutoModelForCausalLM.from_pretrained(workshop.model(name)).eval().requires_grad_(False)


def completed(model: Any, prompt_ids: list[list[int]], **options: Any) -> Any:
    config = GenerationConfig(max_new_tokens=4, do_sample=True, eos_token_id=1, pad_token_id=0, top_k=0)
    return continuous.complete(
        model.generate_batch, prompt_ids, config, ContinuousBatchingConfig(**{**ON_CPU, **options})
    )


def test_uneven_groups_keep_the_order_of_rows(workshop: Workshop, requests: Requests) -> None:
    groups = [[5, 6, 7], [8, 9], [5, 6, 7], [5, 6, 7], [8, 9], [5, 6, 7], [4, 4, 4, 4], [4, 4, 4, 4]]
    model = model_of(workshop)
    outputs, log_probs = completed(model, groups)
    assert requests.prompts == [Counter({(5, 6, 7): 2, (8, 9): 1, (4, 4, 4, 4): 1})]
    assert [output.prompt_ids for output in outputs.values()] == groups
    for prompt, output, values in zip(groups, outputs.values(), log_probs, strict=True):
        ids = torch.tensor([prompt + output.generated_tokens])
        expected = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        picked = expected.gather(1, ids[0, len(prompt) :, None])[:, 0]
        assert torch.allclose(torch.tensor(values), picked, atol=1e-5)


@pytest.mark.parametrize("one_token", [[[5]], [[5], [6, 7]], [[5], [5, 6], [5, 7]]])
def test_prompts_of_one_token(one_token: list[list[int]], workshop: Workshop) -> None:
    groups = [ids for ids in one_token for _ in range(4)]
    outputs, _ = completed(model_of(workshop), groups)
    assert [output.prompt_ids for output in outputs.values()] == groups


@pytest.mark.parametrize("longer", [0, 1, 2])
def test_prompts_that_share_whole_pages(longer: int, workshop: Workshop) -> None:
    beginning = [2 + place % 30 for place in range(32 + longer)]
    groups = [[*beginning, last][: len(beginning) + (last > 0)] for last in (0, 3, 4) for _ in range(4)]
    outputs, _ = completed(model_of(workshop), groups, page_size=16, max_batch_tokens=48)
    assert [output.prompt_ids for output in outputs.values()] == groups


def test_a_failed_request_is_an_error(workshop: Workshop) -> None:
    model = model_of(workshop)

    def failing(*positional: Any, **options: Any) -> Any:
        outputs = model.generate_batch(*positional, **options)
        next(iter(outputs.values())).error = "out of blocks"
        return outputs

    def losing(*positional: Any, **options: Any) -> Any:
        outputs = model.generate_batch(*positional, **options)
        return dict(list(outputs.items())[1:])

    config = GenerationConfig(max_new_tokens=2, do_sample=True, eos_token_id=1, pad_token_id=0)
    for generate_batch, message in (
        (failing, "The first error is: out of blocks"),
        (losing, "some of the 2 completions of a generation batch are missing"),
    ):
        with pytest.raises(RuntimeError, match=message):
            complete(generate_batch, [[5, 6], [5, 6]], config, ContinuousBatchingConfig(**ON_CPU))


def test_first_tokens_are_independent_draws_of_the_model(workshop: Workshop) -> None:
    model = model_of(workshop)
    prompt = [5, 6, 7, 8]
    outputs, _ = completed(model, [prompt] * 400)
    expected = 400 * model(torch.tensor([prompt])).logits[0, -1].softmax(-1)
    drawn = torch.bincount(torch.tensor([x.generated_tokens[0] for x in outputs.values()]), minlength=len(expected))
    is_likely = expected >= 5
    chi_squared = float(((drawn - expected) ** 2 / expected)[is_likely].sum())
    classes = int(is_likely.sum())
    # Six standard deviations above its mean
    assert chi_squared < classes + 6 * math.sqrt(2 * classes)
