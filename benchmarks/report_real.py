"""The tables and the plot of a real model, from the lines of real.py, real_head.py and real_task.py."""

from pathlib import Path

import matplotlib.pyplot as plt
from report_plots import LOOKS, STYLE, save
from report_runs import Run

# In the order of the table
TITLES = {
    "real_grpo_lora": "GRPO, LoRA",
    "real_grpo_lora_mixed": "GRPO, LoRA",
    "real_grpo_lora_64_tokens": "GRPO, LoRA, 64 tokens",
    "real_rloo_lora": "RLOO, LoRA",
    "real_dpo_lora": "DPO, LoRA, short answers",
    "real_dpo_lora_checkpointing": "the same, gradient checkpointing",
    "real_dpo_lora_batch_8": "the same, batches of 8 pairs",
    "real_dpo_lora_long": "DPO, LoRA, rows of up to 512 tokens",
    "real_dpo_full_autocast": "DPO, full, bf16 autocast, short answers",
    "real_dpo_lora_bf16_equal": "DPO, LoRA, bf16, equal lengths",
    "real_kto_lora": "KTO, LoRA, short answers",
    "real_sft_lora": "SFT, LoRA, rows of equal lengths",
    "real_sft_full_bf16_short": "SFT, full, bf16, one row of 68 tokens",
}
# Shown in the README, but for variants, and for a median step that has no group to train on
_ON_THE_PAGE_ONLY = ("real_dpo_lora_checkpointing", "real_dpo_lora_batch_8", "real_grpo_lora_64_tokens")
PLOTTED = [name for name in TITLES if name not in _ON_THE_PAGE_ONLY]
STEP_HEADER = [
    "step",
    "TRL, s",
    "trl_ext, s",
    "TRL / trl_ext",
    "of it generation, s",
    "tokens",
    "peak, MiB",
    "loss differs by",
]
ERROR_HEADER = ["head", "largest error, head alone", "with the backbone, largest", "with the backbone, mean"]
HEADS = {"trl": "TRL", "trl_ext_torch": "trl_ext"}
TASK_HEADER = ["trained by", "seed 0", "seed 1", "seed 2", "untrained", "best constant answer", "CPU s"]
TRAINED_BY = {"trl_ext": "trl_ext", "trl": "TRL", "learning_rate_0": "trl_ext, learning rate 0"}


def title_of(run: Run) -> str:
    """Return the name of a step, with the share of groups whose rewards are equal: GRPO does not run these."""
    share = run.lines["trl"]["equal_rewards"]
    return TITLES[run.benchmark] + ("" if share is None else f", {100 * share:.0f} % equal rewards")


def real_runs(runs: list[Run]) -> dict[str, Run]:
    """Return the runs of the table, in its order."""
    measured = {run.benchmark: run for run in runs if run.benchmark in TITLES}
    return {name: measured[name] for name in TITLES if name in measured}


def step_rows(runs: list[Run]) -> list[list[str]]:
    """Return the cells of the table."""
    return [_cells(run) for run in real_runs(runs).values()]


def _cells(run: Run) -> list[str]:
    stock, ours = run.lines["trl"], run.lines["trl_ext"]
    seconds = [
        f"{line['median_ms'] / 1e3:.2f} ({line['min_ms'] / 1e3:.2f}-{line['max_ms'] / 1e3:.2f})"
        for line in (stock, ours)
    ]
    generation = [f"{line['generation_ms'] / 1e3:.2f}" for line in (stock, ours)]
    return [
        title_of(run),
        *seconds,
        f"{run.over('trl', 'trl_ext'):.2f}",
        " → ".join(generation) if stock["generation_ms"] else "-",
        f"{stock['tokens']:.0f} → {ours['tokens']:.0f}",
        f"{stock['peak_mib']:.0f} → {ours['peak_mib']:.0f}",
        f"{ours['differences']['loss']:.0e}",
    ]


def error_rows(run: Run) -> list[list[str]]:
    """Return the errors of log-probs against float64, a row for each head."""
    return [
        [
            title,
            f"{run.lines[name]['max_error']:.1e}",
            f"{run.lines[name]['with_backbone']['max']:.2f}",
            f"{run.lines[name]['with_backbone']['mean']:.3f}",
        ]
        for name, title in HEADS.items()
    ]


def task_rows(run: Run) -> list[list[str]]:
    """Return the right answers of each seed, a row for each training."""
    held_out = run.shape["held_out"]
    return [
        [
            title,
            *(f"{count} of {held_out}" for count in line["after"]),
            ", ".join(str(count) for count in line["before"]),
            ", ".join(str(count) for count in line["constant"]),
            ", ".join(f"{seconds:.0f}" for seconds in line["seconds"]),
        ]
        for name, title in TRAINED_BY.items()
        if (line := run.lines.get(name))
    ]


def draw_real(runs: list[Run], path: Path) -> None:
    """Draw time and peak memory of each step relative to TRL's, a row each; the line at 1 is TRL."""
    chosen = {title_of(run): run for name, run in real_runs(runs).items() if name in PLOTTED}
    if not chosen:
        return
    time = [run.over("trl_ext", "trl") or 0.0 for run in chosen.values()]
    memory = [run.lines["trl_ext"]["peak_mib"] / run.lines["trl"]["peak_mib"] for run in chosen.values()]
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(1, 2, figsize=(9.0, 0.9 + 0.32 * len(chosen)), sharey=True, layout="constrained")
        for axes, values, title in zip(panels, (time, memory), ("time", "peak memory"), strict=True):
            axes.barh(range(len(values)), values, color=LOOKS["trl_ext"][1], height=0.7, zorder=3)
            for row, value in enumerate(values):
                beside = value if value < 0.8 else max(value, 1.0)  # a label does not cross the line
                axes.text(beside + 0.02, row, f"{value:.2f}", va="center")
            axes.axvline(1, color=LOOKS["trl"][1], linewidth=1.5, zorder=3)
            axes.set_xlim(0, 1.2)
            axes.grid(visible=False, axis="y")
            axes.set_title(f"{title} of a step; red line: TRL", fontsize=10, loc="left")
        panels[0].set_yticks(range(len(chosen)), list(chosen))
        panels[0].invert_yaxis()
        figure.suptitle("SmolLM2-135M-Instruct, one CPU thread", fontsize=10, color="#555555")
        save(figure, path)
