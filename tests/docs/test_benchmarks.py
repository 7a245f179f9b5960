"""The head's benchmark measures the same function for every subject and says what it left out; the report's figures are
those of the lines."""

import json
import sys
from pathlib import Path

import balance
import head
import head_inputs
import head_subjects
import head_tiles
import pytest
import report
import report_overview
import report_runs
import results
import store
import torch
from head_uses import ENTROPY_USES, USES, limits, step_of
from timing import Ceilings

CPU = torch.device("cpu")
TINY = {"N": 24, "H": 16, "V": 120}
CEILINGS = Ceilings(flops=790e12, bandwidth=4.3e12)
KEYS = {"benchmark", "shape", "subject", "run", "median_ms", "min_ms", "max_ms", "peak_mib", "max_error", "device"}
KEYS |= {"versions", "date"}


def lines_in(folder):
    return [json.loads(line) for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]


@pytest.fixture
def problem():
    inputs = head_inputs.fresh_inputs(**TINY, device=CPU, seed=0)
    return head.Problem(TINY, inputs, head_inputs.float64_reference(inputs))


@pytest.fixture
def few_rounds(monkeypatch):
    monkeypatch.setattr(head, "ROUNDS", 2)


@pytest.mark.slow  # CI runs `make bench`
def test_a_run_on_the_cpu_writes_a_line_for_each_subject_and_use(tmp_path, few_rounds):
    heads = head_subjects.load(CPU, without=[])
    assert {"trl_ext_torch", "trl", "torch_linear_cross_entropy", "logits"} <= heads.keys()
    head.measure_all([TINY, TINY], heads, CPU, tmp_path, budget=100)
    lines = lines_in(tmp_path)
    first, second = lines[: -3 * (len(heads) + 1)], lines[-3 * (len(heads) + 1) :]
    assert {line["benchmark"] for line in first} == {*USES, *ENTROPY_USES}
    for name in USES:
        for of_shape in (first, second):
            of_use = [line for line in of_shape if line["benchmark"] == name]
            assert [line["subject"] for line in of_use] == [*heads, "matmul"]
            assert len({line["run"] for line in of_use}) == 1
    for name in ENTROPY_USES:
        of_use = [line["subject"] for line in first if line["benchmark"] == name]
        assert of_use == ["trl_ext_torch", "trl", "matmul"]
    for line in lines:
        assert line.keys() >= KEYS
        assert line["shape"] == TINY
        assert 0 < line["min_ms"] <= line["median_ms"] <= line["max_ms"]
        bare = line["subject"] == "matmul"
        for name, measured in (
            ("max_error", True),
            ("gradient_error", "nograd" not in line["benchmark"]),
            ("weight_gradient_error", "trained" in line["benchmark"]),
        ):
            assert (line[name] is not None) == (measured and not bare), line
        if not bare:
            # All of them are the same function: what bf16 logits and bf16 log-probs are off by
            assert line["max_error"] < (1e-5 if line["subject"] == "trl_ext_torch" else 0.2)
            assert (line["gradient_error"] or 0) < 0.1
            assert (line["weight_gradient_error"] or 0) < 0.1


def test_what_cannot_be_imported_or_needs_a_gpu_is_said(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    heads = head_subjects.load(CPU, without=["logits"])
    said = capsys.readouterr().out
    assert "left out: liger_grpo cannot be imported (" in said
    assert "left out: cut_cross_entropy, which needs a GPU" in said
    assert "left out: logits (`--without`)" in said
    assert not heads.keys() & {"liger_grpo", "cut_cross_entropy", "logits"}


def test_a_subject_that_fails_is_said_and_the_others_go_on(capsys, few_rounds, problem):
    def out_of_memory(inputs, outputs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    def broken(inputs, outputs):
        raise TypeError("no such option\nand much more")

    def wrong(inputs, outputs):
        return torch.full_like(inputs.upstream, torch.nan)

    heads = {"trl": out_of_memory, "liger": broken, "logits_compiled": wrong, "logits": head_subjects.logits()}
    lines = head.measure("head_nograd", USES["head_nograd"], problem, heads, CPU, CEILINGS)
    assert [line["subject"] for line in lines] == ["logits", "matmul"]
    said = capsys.readouterr().out.splitlines()
    assert said == [
        f"left out: trl in head_nograd at {TINY}, out of memory",
        f"left out: liger in head_nograd at {TINY}, TypeError: no such option",
        f"left out: logits_compiled in head_nograd at {TINY}, FloatingPointError: its max_error is nan",
    ]


@pytest.mark.slow
def test_shapes_past_the_budget_are_said_in_one_line(capsys, tmp_path, few_rounds):
    heads = {"logits": head_subjects.logits()}
    head.measure_all([TINY, head.FIRST, TINY, head.FIRST], heads, CPU, tmp_path, budget=100)
    said = capsys.readouterr().out
    assert said.endswith("left out: 8192x4096x131072, 8192x4096x131072 (N x H x V), past the budget of 100 s\n")
    assert len(lines_in(tmp_path)) == 15  # uses with entropy have no subject but the bare products


def test_the_judged_shape_comes_first_and_every_shape_once():
    shapes = [tuple(shape.values()) for shape in head.shapes_in_order()]
    assert shapes[0] == (8192, 4096, 131072)
    assert len(shapes) == len(set(shapes)) == 80
    assert [N for N, _, _ in shapes] == [8192] * 20 + [5000] * 20 + [2048] * 20 + [32768] * 20


def test_the_limit_of_the_judged_shape():
    frozen = limits(USES["head_frozen_fwd_bwd"], head.FIRST, CEILINGS)
    assert frozen["products_ms"] == pytest.approx(2 * 11.13, rel=1e-3)
    # Hidden states twice, the weight once, and 16 bytes a token
    assert frozen["bytes_ms"] == pytest.approx((4 * 8192 * 4096 + 2 * 131072 * 4096 + 16 * 8192) / 4.3e9)
    trained = limits(USES["head_trained_fwd_bwd"], head.FIRST, CEILINGS)
    assert trained["products_ms"] == pytest.approx(4 * 11.13, rel=1e-3)


def test_the_reference_is_the_definition(monkeypatch):
    monkeypatch.setattr(head_inputs, "SLICE", 50)
    monkeypatch.setattr(head_inputs, "TOKENS", 7)
    inputs = head_inputs.fresh_inputs(**TINY, device=CPU, seed=1)
    reference = head_inputs.float64_reference(inputs)
    hidden, weight = inputs.hidden.double().requires_grad_(), inputs.weight.double().requires_grad_()
    log_probs = (hidden @ weight.t()).log_softmax(-1).gather(1, inputs.targets[:, None])[:, 0]
    grad_hidden, grad_weight = torch.autograd.grad(log_probs, (hidden, weight), inputs.upstream.double())
    torch.testing.assert_close(reference.log_probs, log_probs.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(reference.grad_hidden, grad_hidden[reference.tokens], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(reference.grad_weight, grad_weight[reference.rows], rtol=1e-12, atol=1e-12)


def test_a_loss_in_place_of_log_probs_has_the_same_gradients(problem):
    def loss(inputs, outputs):
        return (inputs.upstream * head_subjects.plain(*inputs[:3])).sum()

    trained = USES["head_trained_fwd_bwd"]
    of_loss = step_of(loss, trained, problem.inputs)()
    of_log_probs = step_of(head_subjects.logits(), trained, problem.inputs)()
    assert of_loss.log_probs is None
    assert torch.equal(of_loss.grad_hidden, of_log_probs.grad_hidden)
    assert torch.equal(of_loss.grad_weight, of_log_probs.grad_weight)


@pytest.mark.slow
def test_the_sweep_names_the_fastest_tile_first(capsys, monkeypatch):
    monkeypatch.setattr(head_tiles, "TOKENS", (8,))
    monkeypatch.setattr(head_tiles, "COLUMNS", (4, 64))
    head_tiles.sweep(TINY, CPU)
    tables = capsys.readouterr().out.split("\n\n")
    assert len(tables) == len(USES)
    for table in tables:
        rows = [line.rsplit(maxsplit=2) for line in table.strip().splitlines()[2:]]
        assert {row[0] for row in rows} == {"chosen", "8 x 4", "8 x 64"}
        times = [float(row[1]) for row in rows]
        assert times == sorted(times)


def line(subject, run, median, *, date="2026-01-02T00:00:00+00:00", benchmark="head_nograd", **more):
    about = {"benchmark": benchmark, "shape": TINY, "subject": subject, "run": run, "median_ms": median}
    figures = {"peak_mib": 10 * median, "max_error": 1e-5 * median, "gradient_error": None, "products_ms": 3.0}
    return {**about, **figures, "bytes_ms": 1.0, "device": "A GPU", "versions": {"torch": "2"}, "date": date, **more}


def shown_in(text):
    """The images of a text."""
    return {part.split(")")[0] for part in text.split(f"]({report.IMAGES}/")[1:]}


def test_ratios_are_of_the_newest_run_alone(tmp_path):
    older = [line(name, "a", 100.0, date="2026-01-01T00:00:00+00:00") for name in ("trl_ext", "trl", "liger")]
    newer = [line("trl_ext", "b", 4.0), line("trl", "b", 6.0), line("matmul", "b", 3.2)]
    (tmp_path / "one.jsonl").write_text("".join(json.dumps(x) + "\n" for x in [*newer, *older]))
    (run,) = report_runs.newest_runs(tmp_path)
    assert run.over("trl", "trl_ext") == 1.5
    assert run.over("liger", "trl_ext") is None
    text = report.sections([run])
    assert "| forward | 24x16x120 | 4.00 | 75% | 1.50 |" in text
    assert "| forward | 24x16x120 | 40 | 60 |" in text
    assert "| TRL | 6.0e-05 | - | - |" in text
    assert "Liger" not in text
    report.draw([run], tmp_path)
    assert {path.name for path in tmp_path.glob("*.png")} == shown_in(text)


def test_each_device_and_shape_keeps_its_run(tmp_path):
    lines = [line("trl", "a", 1.0), line("trl", "b", 2.0, device="B"), line("trl", "c", 3.0, shape={**TINY, "N": 2})]
    (tmp_path / "one.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    assert [list(run.lines["trl"].values())[3] for run in report_runs.newest_runs(tmp_path)] == ["c", "a", "b"]


def test_whole_steps_are_before_over_after(tmp_path):
    steps = [line("trl", "a", 900.0, benchmark="grpo_step_lora", tokens=100, shape={"hidden": 8, "ragged": True})]
    steps += [line("trl_ext", "a", 300.0, benchmark="grpo_step_lora", tokens=25, shape={"hidden": 8, "ragged": True})]
    found = {"median_ms": None, "longest": 512, "fails_at": 544}
    longest = [line(name, "b", 1.0, benchmark="grpo_longest_lora", **found) for name in ("trl", "trl_ext")]
    curve = {"median_ms": None, "loss": [2.0, 1.0], "grad_norm": [1.0, 1.0]}
    different = {"largest_difference": {"loss": 0.001}}
    curves = [line("trl", "c", 1.0, benchmark="dpo_loss_curve", **curve)]
    curves += [line("trl_ext", "c", 1.0, benchmark="dpo_loss_curve", **curve, **different)]
    (tmp_path / "one.jsonl").write_text("".join(json.dumps(x) + "\n" for x in steps + longest + curves))
    runs = report_runs.newest_runs(tmp_path)
    text = report.sections(runs)
    assert "| `grpo_step_lora` | 900 | 300 | 3.00 | 0.25 | 9000 → 3000 |" in text
    assert "- `grpo_step_lora`: hidden 8, ragged True" in text
    assert "| `grpo_longest_lora` | TRL | 512 | 544 | 10.0 |" in text
    assert "over 2 steps ours differs from TRL's in loss by at most 1.0e-03." in text
    report.draw(runs, tmp_path)
    assert {path.name for path in tmp_path.glob("*.png")} == shown_in(text)


def test_the_readmes_picture_is_of_what_was_measured(tmp_path):
    gpu = [line(name, "a", time, benchmark="head_frozen_fwd_bwd") for name, time in (("trl_ext", 4.0), ("trl", 6.0))]
    steps = [line(name, "b", time, benchmark="grpo_step_lora") for name, time in (("trl", 8.0), ("trl_ext", 6.0))]
    cpu = [line("trl", "c", 1.0, device="CPU x, 1 thread", date="2026-06-01T00:00:00+00:00", max_error=1.0)]
    (tmp_path / "one.jsonl").write_text("".join(json.dumps(x) + "\n" for x in [*cpu, *gpu, *steps]))
    runs = report_runs.newest_runs(tmp_path)
    assert report_overview.shown_device(runs) == "A GPU"
    here = [run for run in runs if run.device == "A GPU"]
    assert report_overview.largest_errors(here) == {x["subject"]: x["max_error"] for x in gpu}
    limit = max(gpu[0]["products_ms"], gpu[0]["bytes_ms"])
    frozen = report_overview.USES["head_frozen_fwd_bwd"]
    assert report_overview.over_limit(here) == {frozen: {"trl_ext": 4.0 / limit, "trl": 6.0 / limit}}
    assert report_overview.step_times(here) == {"GRPO, LoRA": 0.75}
    assert report_overview.step_peaks(here) == {"GRPO, LoRA": 0.75}
    assert report_overview.peaks(here)[frozen].keys() == {"trl_ext", "trl"}
    report_overview.draw_overview(runs, report.NAMES, tmp_path / "overview.png")
    committed = report_overview.largest_errors(report_runs.newest_runs(results.FOLDER))
    assert committed["trl_ext_torch"] < committed["trl"] / 400


def test_the_page_has_the_tables_of_the_committed_results():
    page = report.PAGE.read_text()
    assert report.with_part(page, report.sections(report_runs.newest_runs(results.FOLDER))) == page, "make bench-report"
    for name in shown_in(page):
        assert (report.DOCS / "images" / name).exists()


# A step in the table of docs/performance.md -> its benchmark
STEPS_ON_THE_H200 = {
    "GRPO, full fine-tuning": "grpo_step_full",
    "GRPO, LoRA": "grpo_step_lora",
    "DPO, LoRA, first epoch": "dpo_step_lora_epoch_1",
    "DPO, LoRA, later epochs": "dpo_step_lora_epoch_2",
    "DPO, LoRA, a Qwen3-VL on text, first epoch": "dpo_step_multimodal_epoch_1",
    "the same, later epochs": "dpo_step_multimodal_epoch_2",
    "GRPO, full, a Qwen3.5 without its CUDA kernels": "grpo_step_hybrid",
}


def test_the_performance_page_has_the_figures_of_the_lines():
    page = " ".join((report.DOCS / "performance.md").read_text().replace("**", "").split())
    runs = report_runs.newest_runs(results.FOLDER)
    of_gpu = {run.benchmark: run for run in runs if run.device == "NVIDIA H200"}
    for title, benchmark in STEPS_ON_THE_H200.items():
        run = of_gpu[benchmark]
        memory = run.lines["trl_ext"]["peak_mib"] / run.lines["trl"]["peak_mib"]
        assert f"| {title} | {run.over('trl', 'trl_ext'):.2f} | {memory:.0%} |".replace("%", " %") in page
    of_cpu = {run.benchmark: run for run in runs if run.device.startswith("CPU")}
    grpo = of_cpu["grpo_step_lora"].over("trl_ext", "trl")
    assert f"a GRPO step with LoRA takes {grpo:.2f} times TRL's time" in page
    first, later = (of_cpu[f"dpo_step_lora_epoch_{epoch}"].over("trl_ext", "trl") for epoch in (1, 2))
    assert f"takes {first:.2f} times in the first epoch and {later:.2f} times in later ones" in page
    for shape, device, words in (
        ((512, 2048, 32000), "CPU", "with a trained weight, but {frozen:.1f} times with a frozen"),
        ((8192, 4096, 131072), "NVIDIA", "times with a frozen weight and {trained:.1f} times with a trained one"),
    ):
        over = {
            report.IN_TABLES[run.benchmark]: run.over(run.ours, "trl")
            for run in runs
            if run.benchmark in report.USES and tuple(run.shape.values()) == shape and run.device.startswith(device)
        }
        assert f"{over['forward']:.1f} times TRL's time in a forward pass" in page
        assert words.format(**over) in page


def test_the_page_on_exactness_has_the_largest_errors_of_the_lines():
    page = (report.DOCS / "exactness.md").read_text()
    runs = report_runs.newest_runs(results.FOLDER)
    for device, row in (
        ("CPU", "three shapes on a CPU, logits like a trained model's"),
        ("NVIDIA H200", "an H200, hidden sizes 1,024 to 8,192"),
    ):
        here = [run for run in runs if run.device.startswith(device) and run.benchmark in report.USES]
        errors = report.worst_errors(here)
        ours = errors.get("trl_ext", errors["trl_ext_torch"])
        shown = [f"{x[report.ERRORS['max_error']]:.1e}".replace("e-0", "e-") for x in (errors["trl"], ours)]
        assert f"| {row} | {' | '.join(shown)} |" in page


def test_the_benchmark_of_the_store_counts_what_it_wrote(tmp_path):
    lines = {line["benchmark"]: line for line in store.measure(1500, 7, tmp_path / "one")}
    assert list(lines) == ["store_write", "store_open", "store_read", "store_merge"]
    assert all(line["sequences"] == 1500 and line["seconds"] > 0 for line in lines.values())
    assert lines["store_write"]["files"] == 1
    assert (lines["store_merge"]["files_before"], lines["store_merge"]["files"]) == (2, 2)
    assert store.measure_flushes(20, 7, tmp_path / "two")["files"] == 20 - 2 * 7


def test_the_documentation_has_the_newest_simulation_of_balance() -> None:
    page = (Path(__file__).parents[2] / "benchmarks" / "balance.md").read_text()
    for table in balance.tables(balance.newest()).split("\n\n"):
        assert table in page
