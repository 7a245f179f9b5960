"""benchmarks/curves.py and its report: held-out tasks, runs that go on where they stopped, numbers from the lines."""

import json
import random
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import curves
import numpy as np
import pytest
import report_curves
from curve_tasks import Task, arithmetic, reversal
from scipy import stats

from doc_blocks import ROOT

STEPS = 5


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Task:
    return reversal(64, tmp_path_factory.mktemp("models"), steps=2, rows_of_step=4)


def lines(far: dict[str, float], seeds: int = 6) -> list[dict[str, Any]]:
    """Return the lines of a group whose arms are `far` from fp32 in each metric, with some noise."""
    draw, found = np.random.default_rng(0), []
    for seed in range(seeds):
        truth = draw.normal(size=STEPS)
        for arm in curves.ARMS:
            values = truth + far.get(arm, 0.0) * (1 + 0.1 * draw.random(STEPS))
            job = curves.Job("curves", "reversal-64", "dpo", "lora", arm, seed, curves.SMOKE)
            of_metrics = dict.fromkeys(curves.CURVES["dpo"], values.tolist())
            found.append({**asdict(job), "curves": of_metrics, "accuracy": {"2": 0.5, "10": 0.5 + far.get(arm, 0.0)}})
    return found


def test_the_page_has_the_numbers_of_the_committed_lines() -> None:
    found = curves.lines_in(curves.FOLDER)
    page = report_curves.PAGE.read_text()
    assert report_curves.with_part(page, report_curves.sections(found), report_curves.BEGIN) == page


def test_the_page_on_exactness_quotes_the_verdict() -> None:
    found = curves.lines_in(curves.FOLDER)
    verdict = report_curves.verdict(list(report_curves.comparisons_of(report_curves.groups_of(found))))
    page = (report_curves.DOCS / "exactness.md").read_text()
    assert f"\n> {verdict}\n" in page
    runs = sum(line["benchmark"] == "curves" for line in found)
    assert f"{runs} times for" in page


def test_every_arm_of_the_committed_lines_has_at_least_ten_seeds() -> None:
    found = report_curves.groups_of(curves.lines_in(curves.FOLDER))
    assert {(group.method, group.tuning) for group in found} == curves.RECIPES.keys()
    assert all(len(group.seeds) >= 10 for group in found)
    assert set(Counter(group.task for group in found).values()) == {len(curves.RECIPES)}


def test_a_distance_is_in_units_of_the_spread_over_seeds() -> None:
    (group,) = report_curves.groups_of(lines({"trl_bf16": 0.3}))
    truth = group.curves("trl_fp32", "loss")
    spread = np.mean([np.std(truth[:, step], ddof=1) for step in range(STEPS)])
    expected = np.abs(group.curves("trl_bf16", "loss") - truth) / spread
    np.testing.assert_allclose(group.differences("trl_bf16", "loss"), expected)
    assert not group.differences("ours_bf16", "loss").any()


def test_an_estimate_is_students() -> None:
    values = np.array([0.1, 0.4, 0.2, 0.9])
    found, low, high = report_curves.Estimate.of(values), *stats.ttest_1samp(values, 0).confidence_interval(0.95)
    np.testing.assert_allclose([found.mean, found.low, found.high], [0.4, low, high])


def test_the_paired_test_is_exact() -> None:
    """Of all 2^6 signs, only two give a mean as extreme as that of six differences of one sign."""
    first = np.arange(1.0, 7.0)
    assert report_curves.paired_p(first, np.zeros(6)) == pytest.approx(2 / 64)
    assert report_curves.paired_p(first, first) == 1.0


@pytest.mark.parametrize(("far", "said"), [({"trl_bf16": 0.3, "ours_bf16": 0.1}, (3, 0)), ({"ours_bf16": 0.3}, (0, 3))])
def test_the_verdict_names_the_closer_head(far: dict[str, float], said: tuple[int, int]) -> None:
    compared = list(report_curves.comparisons_of(report_curves.groups_of(lines(far))))
    ours, theirs = said
    text = report_curves.verdict(compared)
    assert f"closer to fp32 in {ours}, with TRL's in {theirs}." in text
    assert f"{ours} and {theirs} of these are significant" in text


def test_the_accuracy_is_that_of_the_last_step() -> None:
    (group,) = report_curves.groups_of(lines({"trl_bf16": 0.25}))
    assert group.accuracy("trl_bf16").tolist() == [0.75] * 6


def test_splits_share_no_problem_and_only_right_answers_are_rewarded(words: Task) -> None:
    for task in (words, arithmetic()):
        prompts = [{row["prompt"] for row in rows} for rows in (task.pairs, task.prompts, task.test)]
        assert not prompts[0] & prompts[1] | prompts[0] & prompts[2] | prompts[1] & prompts[2]
    texts, answers = [row["answer"] for row in words.test], [row["answer"] for row in words.test]
    assert set(words.reward(texts, answers)) == {1.0}
    random.Random(0).shuffle(texts)
    assert sum(words.reward(texts, answers)) < len(texts) / 10
    assert all(row["chosen"].split() == row["rejected"].split()[::-1] for row in words.pairs)


def test_a_line_has_the_key_of_its_job() -> None:
    jobs = curves.jobs(curves.SEEDS, smoke=False)
    keys = [curves.key_of(asdict(job)) for job in jobs]
    assert len(set(keys)) == len(keys)
    assert keys[0] == curves.key_of(json.loads(json.dumps({**asdict(jobs[0]), "largest": 0.0})))
    assert curves.key_of(asdict(replace(jobs[0], recipe=curves.Recipe(steps=7)))) not in keys


@pytest.mark.slow
def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "curves.py"), "--smoke", "--only", "reversal-64"]
    command += ["--results", str(tmp_path / "results"), "--models", str(tmp_path / "models")]
    told = [subprocess.run(command, check=True, capture_output=True, text=True).stdout for _ in range(2)]
    found = curves.lines_in(tmp_path / "results")
    assert len(found) == len({curves.key_of(line) for line in found}) > 30
    assert told[0].startswith(f"0 of {len(found)} runs")
    assert told[1].startswith(f"{len(found)} of {len(found)} runs")
    for line in found:
        if line["benchmark"] == "curves":
            steps = line["recipe"]["steps"]
            # The reward is logged once for the two steps on a batch
            assert {name: len(values) for name, values in line["curves"].items()} == {
                name: steps // 2 if name == "reward" else steps for name in curves.CURVES[line["method"]]
            }
        if line["arm"] == "ours_bf16" and line["benchmark"] != "curves":
            assert line["largest"] < 1e-4
        if line["benchmark"] == "head" and line["arm"] == "trl_bf16":
            assert line["largest"] > 1e-3
