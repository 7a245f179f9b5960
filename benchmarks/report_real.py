"""The table and the plot of whole steps of a real model, from the lines of benchmarks/real.py."""

from pathlib import Path

import matplotlib.pyplot as plt
from report_plots import LOOKS, STYLE, save
from report_runs import Run

# In the order of the table
TITLES = {
    "real_grpo_lora": "GRPO, LoRA, completions of 8 tokens",
    "real_grpo_lora_64_tokens": "GRPO, LoRA, completions of 64 tokens",
    "real_rloo_lora": "RLOO, LoRA, completions of 8 tokens",
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
PLOTTED = [name for name in TITLES if name not in ("real_dpo_lora_checkpointing", "real_dpo_lora_batch_8")]
HEADER = [
    "step",
    "TRL, s",
    "trl_ext, s",
    "TRL / trl_ext",
    "of it generation, s",
    "tokens",
    "peak, MiB",
    "loss differs by",
]


def real_runs(runs: list[Run]) -> dict[str, Run]:
    """Return the runs of the table, in its order."""
    measured = {run.benchmark: run for run in runs if run.benchmark in TITLES}
    return {name: measured[name] for name in TITLES if name in measured}


def rows(runs: list[Run]) -> list[list[str]]:
    """Return the cells of the table."""
    return [_cells(name, run) for name, run in real_runs(runs).items()]


def _cells(name: str, run: Run) -> list[str]:
    stock, ours = run.lines["trl"], run.lines["trl_ext"]
    seconds = [f"{line['median_ms'] / 1e3:.2f} ({line['min_ms'] / 1e3:.2f}-{line['max_ms'] / 1e3:.2f})" for line in (stock, ours)]
    generation = [f"{line['generation_ms'] / 1e3:.2f}" for line in (stock, ours)]
    return [
        TITLES[name],
        *seconds,
        f"{run.over('trl', 'trl_ext'):.2f}",
        " → ".join(generation) if stock["generation_ms"] else "-",
        f"{stock['tokens']:.0f} → {ours['tokens']:.0f}",
        f"{stock['peak_mib']:.0f} → {ours['peak_mib']:.0f}",
        f"{ours['differences']['loss']:.0e}",
    ]


def draw_real(runs: list[Run], path: Path) -> None:
    """Draw time and peak memory of each step relative to TRL's, a row each; the line at 1 is TRL."""
    chosen = {TITLES[name]: run for name, run in real_runs(runs).items() if name in PLOTTED}
    time = [run.over("trl_ext", "trl") or 0.0 for run in chosen.values()]
    memory = [run.lines["trl_ext"]["peak_mib"] / run.lines["trl"]["peak_mib"] for run in chosen.values()]
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(1, 2, figsize=(9.0, 0.6 + 0.32 * len(chosen)), sharey=True, layout="constrained")
        for axes, values, title in zip(panels, (time, memory), ("time", "peak memory"), strict=True):
            bars = axes.barh(range(len(values)), values, color=LOOKS["trl_ext"][1], height=0.7, zorder=3)
            axes.bar_label(bars, [f"{value:.2f}" for value in values], padding=3)
            axes.axvline(1, color=LOOKS["trl"][1], linewidth=1.5, zorder=3)
            axes.set_xlim(0, 1.2)
            axes.grid(visible=False, axis="y")
            axes.set_title(f"{title} of a step; red line: TRL", fontsize=10, loc="left")
        panels[0].set_yticks(range(len(chosen)), list(chosen))
        panels[0].invert_yaxis()
        save(figure, path)
