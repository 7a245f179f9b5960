"""Draw the figures of the documentation that need no measurements: they show formulas, and counts of tokens.

python benchmarks/figures.py   # writes docs/images/
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from report_plots import STYLE, WIDTH, save

from trl_ext.losses.preference import PREFERENCE_LOSSES, LossOptions, Pairs
from trl_ext.packing.layout import Layout

IMAGES = Path(__file__).parents[1] / "docs" / "images"
MIB = 2**20
DRAWS = 20  # of completion lengths
COLOURS = ("#0b6e4f", "#c1292e", "#235789", "#e08e0b", "#7b4fa3")


def draw_losses(axes: Any) -> None:
    """Draw each added loss against the margin of a pair, for a reward difference of 1."""
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
    """Return the share of a padded batch's tokens that a layout processes: the mean over random completion lengths."""
    generator, shares = torch.Generator().manual_seed(0), []
    for _ in range(DRAWS):
        lengths = torch.randint(1, completion + 1, (group,), generator=generator)
        ids_BS = torch.randint(10, 1000, (group, prompt + int(lengths.max())), generator=generator)
        ids_BS[:, :prompt] = ids_BS[:1, :prompt]
        # The last token of a row is not processed, because nothing is predicted from it
        needed_B, first_B = prompt + lengths - 1, torch.zeros_like(lengths)
        on_host = (x.numpy() for x in (ids_BS, needed_B, first_B))
        layout = Layout(*on_host, share=share, rebase=True, implementation="sdpa")
        shares.append(layout.tokens / ids_BS.numel())
    return sum(shares) / DRAWS


def draw_packing(axes: Any) -> None:
    """Draw the share of a padded batch's tokens that is processed against the prompt's length."""
    prompts = (16, 64, 128, 256, 512, 1024)
    for group, colour in zip((4, 8, 16), COLOURS, strict=False):
        for share, style in ((False, ":"), (True, "-")):
            shares = [processed_share(prompt, 256, group, share=share) for prompt in prompts]
            label = f"{group} rows, prompt {'shared' if share else 'repeated'}"
            axes.plot(prompts, shares, style, color=colour, label=label, marker="o", markersize=3)
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, 1)
    axes.set_xlabel(f"prompt length in tokens, log scale\ncompletions of 1 to 256 tokens, mean of {DRAWS} draws")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylabel("processed / padded batch's tokens\nlower is better")
    axes.figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9, columnspacing=1)


def draw_bytes(axes: Any) -> None:
    """Draw the bytes that a rank receives for the head against the number of ranks, for each way to exchange them."""
    ranks = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    hidden, vocabulary = 4096, 131072
    for tokens, colour in zip((512, 4096), COLOURS, strict=False):
        # docs/design-notes.md has both formulas
        received = [(R - 1) * tokens * (6 * hidden + 32) / MIB for R in ranks]
        axes.plot(ranks, received, color=colour, label=f"hidden states travel, {tokens} tokens per rank")
    received = [(R - 1) / R * 2 * hidden * vocabulary / MIB for R in ranks]
    axes.plot(ranks, received, "--", color="black", label="the weight travels")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("ranks, log scale; hidden size 4096, vocabulary 131072,\nbf16, frozen weight")
    axes.set_ylabel("MiB received per rank, log scale\nlower is better")
    axes.figure.legend(loc="outside lower center", ncols=1, frameon=False)


FIGURES: dict[str, Callable[[Any], None]] = {
    "losses.png": draw_losses,
    "packing-tokens.png": draw_packing,
    "head-bytes.png": draw_bytes,
}


def main() -> None:
    for name, draw in FIGURES.items():
        with plt.rc_context(STYLE):
            figure, axes = plt.subplots(figsize=(WIDTH, 3.8), layout="constrained")
            draw(axes)
            save(figure, IMAGES / name)


if __name__ == "__main__":
    main()
