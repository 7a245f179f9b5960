"""The figures of speed, memory and precision in the README and on the performance page are those of the lines."""

import json
import re

import report_real
from report_runs import Run, newest_runs
from results import FOLDER

from doc_blocks import ROOT

RUNS = newest_runs(FOLDER)
CPU = {run.benchmark: run for run in RUNS if run.device.startswith("CPU")}
H200 = {run.benchmark: run for run in RUNS if run.device == "NVIDIA H200"}
FIGURE = re.compile(r"\d[\d.,]*\s(?:s|ms|MiB|GiB|times|%)(?!\w)")


def prose(name: str) -> str:
    """Return a page without code and with single spaces."""
    text = re.sub(r"^```.*?^```$", "", (ROOT / name).read_text(), flags=re.MULTILINE | re.DOTALL)
    return " ".join(text.replace("**", "").replace("\n> ", "\n").split())


def seconds(run: Run, subject: str, field: str = "median_ms") -> float:
    return run.lines[subject][field] / 1e3


def instead_of(run: Run) -> str:
    return f"{seconds(run, 'trl_ext'):.1f} s instead of {seconds(run, 'trl'):.1f} s"


def gib(run: Run, subject: str) -> float:
    return run.lines[subject]["peak_mib"] / 1024


def claims() -> list[str]:
    """Return the README's sentences on speed, memory and precision, with the figures of the newest lines."""
    grpo, mixed, dpo, long = (CPU[f"real_{x}"] for x in ("grpo_lora", "grpo_lora_mixed", "dpo_lora", "dpo_lora_long"))
    equal_rewards, fewer = (run.lines["trl"]["equal_rewards"] for run in (grpo, mixed))
    generation = [f"{seconds(grpo, x, 'generation_ms'):.1f} s" for x in ("trl_ext", "trl")]
    head = CPU["real_head_bf16"].lines
    errors = [head[name]["max_error"] for name in ("trl_ext_torch", "trl")]
    backbone = [head[name]["with_backbone"]["max"] for name in ("trl_ext_torch", "trl")]
    of_gpu, full = H200["grpo_step_lora"], H200["grpo_step_full"]
    slower = H200["dpo_step_lora_epoch_1"].over("trl_ext", "trl")
    multimodal = H200["dpo_step_multimodal_epoch_1"].over("trl_ext", "trl")
    return [
        f"With LoRA in fp32, a DPO step on short answers takes {instead_of(dpo)}; with rows of up to 512 tokens, "
        f"it takes {instead_of(long)}.",
        "With prompts of about 100 tokens, 8 answers of up to 8 tokens each, and equal rewards in "
        f"{equal_rewards:.0%} of the groups, a step takes {instead_of(grpo)}, generation {generation[0]} instead of "
        f"{generation[1]}. A smaller step, with equal rewards in {fewer:.0%}, takes {instead_of(mixed)}.",
        f"The larger GRPO step peaks at {gib(grpo, 'trl_ext'):.1f} GiB instead of {gib(grpo, 'trl'):.1f} GiB on a CPU, "
        "where TRL's fused LM head has no kernels. On an H200, where it has them, a GRPO step with LoRA on 0.6 billion "
        f"weights peaks at {gib(of_gpu, 'trl_ext'):.1f} GiB instead of {gib(of_gpu, 'trl'):.1f} GiB, without "
        "generation and gradient checkpointing.",
        "on an H200 with 0.6 billion weights, without generation, a GRPO step takes "
        f"{of_gpu.over('trl_ext', 'trl'):.1f} times TRL's time with LoRA and "
        f"{full.over('trl_ext', 'trl'):.1f} times with full fine-tuning. DPO with LoRA takes {slower:.1f} times in a "
        f"first epoch, and {multimodal:.1f} times for a Qwen3-VL on text.",
        "In bf16, our LM head does not round logits. TRL's does, which moves log-probs on SmolLM2's hidden states by "
        f"up to {errors[1]:.2f} (ours: {errors[0]:.6f}). A backbone in bf16 moves them by up to "
        f"{max(backbone):.1f} with either head.",
    ]


def spaced(text: str) -> str:
    return text.replace("%", " %").replace("  %", " %")


def test_the_readme_has_the_figures_of_the_lines() -> None:
    page = prose("README.md")
    assert [claim for claim in map(spaced, claims()) if claim not in page] == []


def test_the_readme_has_no_other_figure() -> None:
    page = prose("README.md")
    for claim in map(spaced, claims()):
        page = page.replace(claim, "")
    assert FIGURE.findall(page) == []
    assert FIGURE.findall("takes 0.5 s and 3 times, 12 % of 4 GiB") == ["0.5 s", "3 times", "12 %", "4 GiB"]


def test_the_performance_page_has_every_step_of_the_real_model() -> None:
    page = prose("docs/performance.md")
    runs = report_real.real_runs(RUNS)
    assert runs.keys() == report_real.TITLES.keys()
    for name, run in runs.items():
        stock, ours = run.lines["trl"], run.lines["trl_ext"]
        cells = [
            report_real.title_of(run),
            f"{stock['median_ms'] / 1e3:.2f}",
            f"{ours['median_ms'] / 1e3:.2f}",
            f"{run.over('trl', 'trl_ext'):.2f}",
            f"{stock['peak_mib']:,.0f} → {ours['peak_mib']:,.0f}",
        ]
        assert f"| {' | '.join(cells)} |" in page, name


def test_the_page_on_exactness_has_the_errors_of_the_real_model() -> None:
    page = prose("docs/exactness.md")
    lines = CPU["real_head_bf16"].lines
    stock, ours = (lines[name] for name in ("trl", "trl_ext_torch"))
    errors = [f"{line['max_error']:.1e}".replace("e-0", "e-") for line in (ours, stock)]
    logits = f"SmolLM2-135M's logits reach {ours['largest_logit']:.0f}"
    assert f"{logits}; its largest error is {errors[0]}, and TRL's {errors[1]}" in page
    backbone = [line["with_backbone"] for line in (ours, stock)]
    assert (
        f"off by at most {backbone[0]['max']:.2f} with our head and {backbone[1]['max']:.2f} with TRL's, on average by "
        f"{backbone[0]['mean']:.3f} and {backbone[1]['mean']:.3f}." in page
    )


def test_the_performance_page_has_the_task_that_the_model_learns() -> None:
    lines = CPU["real_task_last_word"].lines

    def three(subject: str, field: str) -> str:
        values = [f"{value:.0f}" for value in lines[subject][field]]
        return f"{values[0]}, {values[1]} and {values[2]}"

    assert lines["learning_rate_0"]["after"] == lines["trl_ext"]["before"] == lines["trl"]["before"]
    held_out = lines["trl"]["shape"]["held_out"]
    claims_of_task = (
        f"Of {held_out} held-out questions, it answers {three('trl_ext', 'before')} right before training (three "
        f"seeds) and {three('trl_ext', 'after')} after, in {three('trl_ext', 'seconds')} s of CPU time.",
        f"Stock TRL reaches {three('trl', 'after')} in {three('trl', 'seconds')} s. A learning rate of 0 changes "
        f"nothing, and the best constant answer is right in {three('trl_ext', 'constant')}.",
    )
    page = prose("docs/performance.md")
    assert [claim for claim in claims_of_task if claim not in page] == []


def test_the_performance_page_has_the_gain_of_sampling_ahead() -> None:
    page = prose("docs/performance.md")
    rows = {
        "`generation_lag=1`": "lag",
        "no lag, 2 generation batches in a step": "within_2",
        "no lag, 4 generation batches in a step": "within_4",
    }
    for title, name in rows.items():
        gains = [CPU[f"grpo_ahead_{x}_{name}"].over("in turn", "ahead") for x in ("sampler", "reward")]
        assert f"| {title} | {gains[0]:.2f} | {gains[1]:.2f} |" in page
    computed = CPU["grpo_ahead_python_reward_lag"]
    in_thread, in_process = (computed.over("in turn", subject) for subject in ("ahead", "pool"))
    assert f"the ratio is {in_thread:.2f} in a thread and {in_process:.2f} in another process." in page


def test_the_page_on_exactness_has_the_gain_of_router_replay() -> None:
    gains = []
    for head in ("", "_fp32_head"):
        runs = [CPU[f"grpo_routes_mismatch{head}_{seed}"] for seed in range(5)]
        own, replayed = (sum(run.lines[x]["mismatch_kl"] for run in runs) for x in ("own", "replayed"))
        gains.append(f"{own / replayed:.1f}")
        differing = f"{sum(run.lines['own']['differing'] for run in runs) / len(runs):.0%}".replace("%", " %")
        assert f"would choose other experts in {differing} of the cases." in prose("docs/exactness.md")
    claim = (
        f"Replay makes the mismatch with the sampler {gains[0]} times smaller, with `cast_lm_head_to_fp32=True` "
        f"{gains[1]} times. A step takes {CPU['grpo_routes_step'].over('replayed', 'own'):.2f} times as long."
    )
    assert claim in prose("docs/exactness.md")


def test_the_performance_page_says_what_packing_costs_where_it_saves_nothing() -> None:
    costs = [run.over("packed", "padded") for name, run in H200.items() if name.startswith("packing_nothing_to_share")]
    assert len(costs) == 4
    layers = H200["packing_nothing_to_share_1x64"].shape["layers"]
    claim = (
        "Packing rows of equal length that share nothing costs time: forward and backward pass of "
        f"{layers} layers take {min(costs):.2f} to {max(costs):.2f} times as long as padded."
    )
    assert claim in prose("docs/performance.md")


def test_the_performance_page_says_how_much_a_loss_in_bf16_differs() -> None:
    difference = CPU["real_dpo_lora_bf16_equal"].lines["trl_ext"]["differences"]["loss"]
    claim = f"In DPO with bf16 weights, the loss differs from TRL's by up to {difference:.0%}, because"
    assert spaced(claim) in prose("docs/performance.md")


def test_the_performance_page_has_the_seconds_of_generation() -> None:
    names = ("grpo_lora", "grpo_lora_mixed", "grpo_lora_64_tokens", "rloo_lora")

    def four(subject: str) -> str:
        first, second, third, last = (f"{seconds(CPU[f'real_{x}'], subject, 'generation_ms'):.1f}" for x in names)
        return f"{first}, {second}, {third} and {last} s"

    claim = f"Generation takes {four('trl_ext')} of our steps, and {four('trl')} of TRL's."
    assert claim in prose("docs/performance.md")


def test_the_performance_page_has_the_peak_of_another_run() -> None:
    lines = [json.loads(line) for path in FOLDER.glob("*.jsonl") for line in path.read_text().splitlines()]
    peaks = [x["peak_mib"] for x in lines if x["benchmark"] == "real_grpo_lora" and x["subject"] == "trl"]
    assert f"TRL's in the first row was {min(peaks):,.0f} MiB in another one." in prose("docs/performance.md")


def test_the_performance_page_says_how_fast_whole_logits_are() -> None:
    of_shape = [x for x in RUNS if x.device.startswith("CPU") and [*x.shape.values()] == [512, 2048, 32000]]
    ratios = [x.over("trl_ext_torch", "logits") for x in of_shape if "logits" in x.lines]
    assert len(ratios) == 3
    claim = f"Plain torch with whole logits is {min(ratios):.0f} to {max(ratios):.0f} times faster"
    assert claim in prose("docs/performance.md")
