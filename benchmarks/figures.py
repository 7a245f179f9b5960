"""Draw the figures of the documentation that need no measurement: formulas, and token counts by the package's code.

python benchmarks/figures.py   # writes docs/images/
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from report_plots import STYLE, WIDTH, save
from scaling_formulas import HeadCase, head_received

from trl_ext.losses.preference import PREFERENCE_LOSSES, LossOptions, Pairs
from trl_ext.packing.layout import Layout

IMAGES = Path(__file__).parents[1] / "docs" / "images"
MIB = 2**20
COLOURS = ("#0b6e4f", "#c1292e", "#235789", "#e08e0b", "#7b4fa3")


def draw_losses(axes: Any) -> None:
    """Draw each added loss over the margin of a pair, with a reward difference of 1."""
    margins = torch.linspace(-3, 4, 281, dtype=torch.float64)
    ones, none = torch.ones_like(margins), torch.zeros_like(margins)
    pairs = Pairs(margins, none, ones, ones, chosen_reward=ones, rejected_reward=none)
    options = LossOptions(beta=1.0, label_smoothing=0.1, reward_scale=1.0)
    for (name, loss), colour in zip(PREFERENCE_LOSSES.items(), COLOURS, strict=True):
        axes.plot(margins, loss(pairs, options), label=name, color=colour)
    axes.set_ylim(0, 3)
    axes.set_xlabel("βΔ, with ηΔr = 1, β = 1, ε = 0.1")
    axes.set_ylabel("loss of a pair")
    axes.figure.legend(loc="outside lower center", ncols=3, frameon=False)


def processed_share(prompt: int, completion: int, group: int, *, share: bool) -> float:
    """Return the share of a padded batch's tokens that a layout processes, with random lengths up to `completion`."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, completion + 1, (group,), generator=generator)
    ids_BS = torch.randint(10, 1000, (group, prompt + completion), generator=generator)
    ids_BS[:, :prompt] = ids_BS[:1, :prompt]
    # The last token of a row is not processed, because nothing is predicted from it
    needed_B, first_B = prompt + lengths - 1, torch.zeros_like(lengths)
    layout = Layout(ids_BS, needed_B, first_B, share=share, rebase=True, implementation="sdpa")
    return layout.tokens / ids_BS.numel()


def draw_packing(axes: Any) -> None:
    """Draw the share of a padded batch's tokens that is processed over the prompt's length."""
    prompts = (16, 64, 128, 256, 512, 1024)
    for group, colour in zip((4, 8, 16), COLOURS, strict=False):
        for share, style in ((False, ":"), (True, "-")):
            shares = [processed_share(prompt, 256, group, share=share) for prompt in prompts]
            label = f"{group} rows, prompt {'shared' if share else 'repeated'}"
            axes.plot(prompts, shares, style, color=colour, label=label, marker="o", markersize=3)
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, 1)
    axes.set_xlabel("tokens of the prompt; completions of 1 to 256")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylabel("tokens processed / tokens of the padded batch")
    axes.figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)


def draw_bytes(axes: Any) -> None:
    """Draw the bytes that a rank receives for the head over the number of ranks, for each way to exchange them."""
    ranks = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    for tokens, colour in zip((512, 4096), COLOURS, strict=False):
        cases = [HeadCase(ranks=R, tokens=tokens, hidden=4096, vocabulary=131072) for R in ranks]
        received = [head_received(case, "local") / MIB for case in cases]
        axes.plot(ranks, received, color=colour, label=f"local, {tokens} tokens a rank")
    received = [head_received(case, "in turn") / MIB for case in cases]
    axes.plot(ranks, received, "--", color="black", label="in turn, or gathered whole")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("ranks; H 4096, V 131072, bf16, frozen weight")
    axes.set_ylabel("MiB that reach a rank")
    axes.legend(frameon=False)


def draw_old_policy(axes: Any) -> None:
    """Draw the forwards for the old policy, from the table of the page that shows the figure."""
    page = (IMAGES.parent / "skipped-passes.md").read_text()
    found = re.findall(r"^\| ([^|]+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", page, re.MULTILINE)
    names = [" / ".join([x[0].split(", ")[0], x[1], x[2], *x[0].split(", ")[1:]]) for x in found]
    names = [name.replace(" / vLLM with correction", "\nvLLM") for name in names]
    for shift, column, name, colour in ((-0.2, 3, "TRL", COLOURS[1]), (0.2, 4, "here", COLOURS[0])):
        places = [row + shift for row in range(len(found))]
        bars = axes.barh(places, [int(x[column]) for x in found], 0.36, color=colour, label=name)
        axes.bar_label(bars, padding=3)
    axes.set_yticks(range(len(found)), names)
    axes.invert_yaxis()
    axes.set_xticks([])
    axes.set_xlim(0, 1.1 * max(int(x[3]) for x in found))
    axes.grid(visible=False)
    axes.set_ylabel("accumulation / steps per\ngeneration / iterations", fontsize=9)
    axes.set_xlabel("old-policy forwards per generation batch")
    axes.legend(frameon=False)


FIGURES: dict[str, Callable[[Any], None]] = {
    "losses.png": draw_losses,
    "packing-tokens.png": draw_packing,
    "head-bytes.png": draw_bytes,
    "old-policy-forwards.png": draw_old_policy,
}


def main() -> None:
    for name, draw in FIGURES.items():
        with plt.rc_context(STYLE):
            figure, axes = plt.subplots(figsize=(WIDTH, 3.8), layout="constrained")
            draw(axes)
            save(figure, IMAGES / name)


if __name__ == "__main__":
    main()
