"""GRPO's plan: what `explain()` says of each pass, that it is logged once, and which arguments it refuses."""

import html
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import trl

import trl_ext
from drop_in_cases import Case
from later_trl import environment_of, make_later_trl, run_python
from run_losses import Record, Trainers, build
from tiny import Workshop
from trl_ext.planning.plan import Decision, Plan

OURS = Trainers.of(trl_ext)


@contextmanager
def built(workshop: Workshop, options: dict[str, Any] | None = None, /, **fields: Any) -> Iterator[Any]:
    """Our trainer of a case of one step; `options` are fields of our config alone."""
    trainers = replace(OURS, grpo_config=partial(OURS.grpo_config, **(options or {})))
    keys = {key: fields.pop(key) for key in ("setup", "model", "lora", "rollout", "rewards", "vllm") if key in fields}
    with TemporaryDirectory() as output_dir:
        case = Case("plan", "grpo", steps=1, config=fields, ours={}, **keys)
        yield build(case, trainers, workshop, output_dir, Record())


def explained(workshop: Workshop, options: dict[str, Any] | None = None, /, **fields: Any) -> Plan:
    with built(workshop, options, **fields) as trainer:
        return trainer.explain()


PLANS: dict[str, tuple[dict[str, Any], dict[str, tuple[str, str]]]] = {
    "on-policy": (
        {},
        {
            "policy": ("run", "zero-advantage and fully masked completions are skipped"),
            "old policy": ("reuse", "as in TRL"),
            "reference": ("skip", "`beta` is 0"),
        },
    ),
    "iterations": ({"num_iterations": 2}, {"old policy": ("reuse", "kept for the later iterations")}),
    "misaligned": (
        {"gradient_accumulation_steps": 3, "steps_per_generation": 4, "per_device_train_batch_size": 4},
        {"old policy": ("reuse", "scored just before")},
    ),
    "beta": (
        {"setup": "ref_model", "beta": 0.1},
        {"policy": ("run", "KL term (`beta=0.1`)"), "reference": ("run", "each generation batch once")},
    ),
    "entropy bonus": ({"entropy_coef": 0.05}, {"policy": ("run", "entropy bonus")}),
    "entropy quantile": ({"top_entropy_quantile": 0.2}, {"policy": ("run", "`top_entropy_quantile=0.2`")}),
    "router loss": ({"model": "experts"}, {"policy": ("run", "router loss")}),
    "vllm": ({"vllm": True, "rollout": "sampler"}, {"old policy": ("reuse", "ratio to the sampler")}),
}


def test_completions_stay_if_their_positions_depend_on_the_micro_batch(workshop: Workshop) -> None:
    options, schedule = {"keep_groups_together": True}, {"gradient_accumulation_steps": 2}
    with built(workshop, options, per_device_train_batch_size=4, **schedule) as trainer:
        assert trainer.explain()["micro-batches"].action == "run"
        trainer.model.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
        with pytest.raises(ValueError, match="rotary embeddings depend on the longest row"):
            trainer.explain()


def test_an_unknown_row_of_the_plan_is_a_key_error(workshop: Workshop) -> None:
    with pytest.raises(KeyError, match=r"no row `old_policy`\. Choose from: .*, policy, "):
        explained(workshop)["old_policy"]


@pytest.mark.parametrize("name", PLANS)
def test_the_plan_says_what_runs_and_why(name: str, workshop: Workshop) -> None:
    fields, decisions = PLANS[name]
    plan = explained(workshop, **fields)
    assert [decision.name for decision in plan.decisions] == [
        "engine",
        "generation",
        "policy",
        "old policy",
        "reference",
        "micro-batches",
        "balance",
        "packing",
        "head",
        "first batch",
    ]
    for pass_name, (action, reason) in decisions.items():
        assert plan[pass_name].action == action
        assert reason in plan[pass_name].reason
    table = replace(plan, verbose=True).table()
    assert max(map(len, table.splitlines())) <= 80
    for decision in plan.decisions:
        assert f"{decision.name:<15}{decision.action:<7}{decision.reason.split()[0]}" in table
        assert set(decision.reason.split()) <= set(table.split())
    shown = [line.split("  ")[0] for line in plan.table().splitlines() if not line.startswith(" ")]
    assert shown == [decision.name for decision in plan.decisions if not decision.routine]
    assert {"policy", "packing"} <= set(shown)


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({}, ["policy", "packing"]),
        ({"num_iterations": 2}, ["policy", "old policy", "packing"]),
        ({"setup": "lora", "beta": 0.1}, ["policy", "reference", "packing"]),
        ({"gradient_accumulation_steps": 2, "loss_type": "bnpo"}, ["policy", "micro-batches", "packing"]),
        (
            {"gradient_accumulation_steps": 2, "setup": "lora", "lora": {"lora_dropout": 0.1}},
            ["policy", "packing"],
        ),
    ],
    ids=["defaults", "iterations", "adapter", "bnpo", "dropout"],
)
def test_the_table_leaves_out_what_is_as_in_trl(fields: dict[str, Any], shown: list[str], workshop: Workshop) -> None:
    with built(workshop, **fields) as trainer:
        rows, every = (
            [line[:15].rstrip() for line in str(trainer.explain(verbose=x)).splitlines() if line[0] != " "]
            for x in (False, True)
        )
    assert rows == shown
    passes = ["generation", "policy", "old policy", "reference", "micro-batches", "balance"]
    assert every == ["engine", *passes, "packing", "head", "first batch"]


@pytest.mark.parametrize("option", [{"head": "dense"}, {"head_kernels": "torch"}], ids=str)
def test_a_head_that_was_asked_for_is_in_the_table(option: dict[str, Any], workshop: Workshop) -> None:
    assert "\nhead  " in str(explained(workshop, option))


@pytest.mark.parametrize(("columns", "widest"), [("60", 60), ("80", 80), ("300", 100), ("", 80)])
def test_the_table_is_as_wide_as_the_terminal(columns: str, widest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)  # as shells set it; without it and a terminal, the width is 80
    home = os.path.expanduser("~")
    reason = "A reason of many words, which is longer than any line of the table can be. It goes on and on. Kept."
    for folder, path in ((f"{home}/{'long/' * 12}name", f"~/{'long/' * 12}name"), (f"{home}-2/x", f"{home}-2/x")):
        plan = Plan(decisions=(Decision("reference", "reuse", reason, folder=folder),))
        first, *others = str(plan).splitlines()
        assert first.startswith("reference      reuse  A reason")
        assert all(line.startswith(" " * 22) and line[22] != " " for line in others)
        assert path in others[-1]  # in one piece, whatever its length
        assert all(len(line) <= widest for line in (first, *others) if path not in line)
        assert f"Kept: {path}" in " ".join(str(plan).split())
        assert path not in plan.table(folders=False)


def test_dropout_is_said_once(workshop: Workshop, caplog: pytest.LogCaptureFixture) -> None:
    with built(workshop, setup="lora", lora={"lora_dropout": 0.1}) as trainer:
        trainer.train()
    said = [record.getMessage() for record in caplog.records if record.name == "trl_ext"]
    assert sum(message.count("dropout is active") for message in said) == 1
    assert not [record for record in caplog.records if record.levelno == logging.WARNING and "ropout" in record.msg]


def test_trls_own_config_has_a_plan_too(workshop: Workshop) -> None:
    trainers = replace(OURS, grpo_config=trl.GRPOConfig)
    with TemporaryDirectory() as output_dir:
        trainer = build(Case("plan", "grpo", steps=1), trainers, workshop, output_dir, Record())
        assert str(trainer.explain()) == str(explained(workshop))


def test_the_plan_is_logged_once_by_the_main_process(workshop: Workshop, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="trl_ext")
    with built(workshop, num_iterations=2) as trainer:
        assert trainer.args.show_plan
        plan = str(trainer.explain())
        assert not [record for record in caplog.records if record.name == "trl_ext"]
        trainer.train()
        records = [record for record in caplog.records if record.name == "trl_ext"]
        assert [plan in record.getMessage() for record in records] == [True, False, False]  # what ran, and times
        assert {record.levelno for record in records} == {logging.INFO}
        assert str(trainer.explain()) == plan


def test_the_plan_can_be_left_out_of_the_log(workshop: Workshop, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="trl_ext")
    with built(workshop, {"show_plan": False}, vllm=True, rollout="sampler", top_p=0.9) as trainer:
        trainer.train()
    records = [record for record in caplog.records if record.name == "trl_ext"]
    assert [record.levelno for record in records] == [logging.WARNING]  # warnings are given all the same
    assert "biased" in records[0].getMessage()


@pytest.mark.parametrize(
    ("fields", "sizes"),
    [
        ({"steps_per_generation": 2}, ("16", "8")),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 1}, ("8", "16")),
        ({"num_iterations": 2}, ("8", "num_iterations")),
    ],
)
def test_force_on_policy_ratio_refuses_batches_that_differ(
    fields: dict[str, Any], sizes: tuple[str, str], workshop: Workshop
) -> None:
    with pytest.raises(ValueError, match="force_on_policy_ratio") as error:
        _start(workshop, {"force_on_policy_ratio": True}, **fields)
    for part in (*sizes, "steps_per_generation", "gradient_accumulation_steps"):
        assert part in str(error.value)


def _start(workshop: Workshop, options: dict[str, Any], **fields: Any) -> None:
    with built(workshop, options, **fields) as trainer:
        trainer.train()


def test_trust_sampling_log_probs_refuses_a_sampler_without_log_probs(workshop: Workshop) -> None:
    with pytest.raises(ValueError, match=r"trust_sampling_log_probs.*use_vllm.*rollout_func"):
        _start(workshop, {"trust_sampling_log_probs": True}, rollout="generate")
    # A rollout function is there, and returns None
    with pytest.raises(ValueError, match="logprobs"):
        _start(workshop, {"trust_sampling_log_probs": True}, rollout="scripted")


def test_trust_sampling_log_probs_is_called_an_approximation(workshop: Workshop) -> None:
    plan = explained(workshop, {"trust_sampling_log_probs": True}, rollout="sampler")
    assert plan["old policy"].action == "skip"
    for part in ("trust_sampling_log_probs", "approximation", "bias"):
        assert part in plan["old policy"].reason


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.1}], ids=lambda cut: next(iter(cut)))
def test_a_truncated_sampler_makes_the_ratio_biased(
    cut: dict[str, Any], workshop: Workshop, caplog: pytest.LogCaptureFixture
) -> None:
    (name,) = cut
    with built(workshop, vllm=True, rollout="sampler", **cut) as trainer:
        trainer.train()
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [name in warning and "biased" in warning for warning in warnings if "ratio" in warning] == [True]


@pytest.mark.parametrize(
    "fields",
    [
        {"vllm": True, "rollout": "sampler", "top_p": 1.0, "top_k": 0},
        {"vllm": True, "rollout": "sampler", "top_p": 0.9, "vllm_importance_sampling_correction": False},
        {"rollout": "sampler", "top_p": 0.9},
    ],
    ids=["whole", "not corrected", "no vllm"],
)
def test_no_warning_where_the_ratio_is_not_biased(
    fields: dict[str, Any], workshop: Workshop, caplog: pytest.LogCaptureFixture
) -> None:
    with built(workshop, **fields) as trainer:
        trainer.train()
    assert not [record for record in caplog.records if "biased" in record.getMessage()]


def print_warnings(root: str) -> None:
    with built(Workshop(Path(root)), vllm=True, rollout="sampler", top_p=0.9) as trainer:
        print(*trainer.explain().warnings)


@pytest.mark.slow
def test_a_later_trl_is_not_taken_for_one_that_corrects_the_ratio(workshop: Workshop, tmp_path: Path) -> None:
    workshop.model("tied")
    make_later_trl(tmp_path, [])
    code = f"import test_pass_plan; test_pass_plan.print_warnings({str(workshop.root)!r})"
    done = run_python(code, environment_of(tmp_path, Path(__file__).parent))
    assert "The importance ratio to the sampler is biased" in done.stdout, done.stderr[-4000:]


DROPOUT: dict[str, dict[str, Any]] = {
    "attention": {"model_init_kwargs": {"attention_dropout": 0.1}},
    "module": {"model": "head_bias", "model_init_kwargs": {"resid_pdrop": 0.1}},
    "lora": {"setup": "lora", "lora": {"lora_dropout": 0.1}},
}


@pytest.mark.parametrize("where", DROPOUT)
def test_active_dropout_is_named(where: str, workshop: Workshop) -> None:
    reason = explained(workshop, **DROPOUT[where], num_iterations=2)["old policy"].reason
    assert "dropout is active, so two passes differ" in reason


@pytest.mark.parametrize("fields", [{}, {"disable_dropout": True, **DROPOUT["module"]}], ids=["none", "disabled"])
def test_dropout_that_is_not_active_is_not_named(fields: dict[str, Any], workshop: Workshop) -> None:
    assert "ropout" not in explained(workshop, **fields, num_iterations=2)["old policy"].reason


@pytest.mark.parametrize("ours", [{}, {"force_on_policy_ratio": True}], ids=["default", "forced ratio"])
def test_with_dropout_the_old_policy_runs_as_in_trl(ours: dict[str, Any], workshop: Workshop) -> None:
    """Between two passes of the same weights the ratio is not 1."""
    schedule = {} if ours else {"num_iterations": 2}
    with built(workshop, ours, **DROPOUT["attention"], **schedule) as trainer:
        grad_modes: list[bool] = []
        trainer.scoring_forwards[0].packing.checked = True
        trainer.scoring_forwards[0].is_compared = True
        trainer.model.get_input_embeddings().register_forward_hook(
            lambda *_: grad_modes.append(torch.is_grad_enabled())
        )
        trainer.train()
        assert grad_modes == ([True] if ours else [False, True])


def test_a_notebook_shows_the_plan_as_a_table() -> None:
    reason = "Kept for <b>`x & y`</b>, 'as' in \"TRL\"."
    plan = Plan(decisions=(Decision("engine", "run", "One process.", True), Decision("head", "skip", reason)))
    table = plan._repr_html_()
    assert table.count("<tr>") == 2  # a header, and one row that is not routine
    assert [html.unescape(x) for x in re.findall("<td[^>]*>(.*?)</td>", table)[3:]] == ["head", "skip", reason]
    assert set(re.findall("</?(\\w+)", table)) == {"table", "tr", "td"}
    assert replace(plan, verbose=True)._repr_html_().count("<tr>") == 3


def test_each_plan_is_readable_where_it_is_not_printed(workshop: Workshop) -> None:
    plan = explained(workshop)
    assert repr(plan) == f"GRPOPlan:\n{plan}"
    kinds = [Plan, *Plan.__subclasses__(), *(x for cls in Plan.__subclasses__() for x in cls.__subclasses__())]
    assert {x.__name__ for x in kinds} == {"Plan", "DPOPlan", "ReferencePlan", "GRPOPlan", "RLOOPlan"}
    assert all(cls.__repr__ is Plan.__repr__ for cls in kinds)
