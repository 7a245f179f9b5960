"""Make the first part of RESULTS.md, its plots and the README's picture, from the lines in benchmarks/results/.

    python benchmarks/report.py   # writes the page's generated part, and the images on it and in the README

The report shows the newest run of each benchmark, shape and device. Every ratio compares two subjects of one run. Lines
without a subject are left out.
"""

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from report_overview import draw_error, draw_overview
from report_plots import draw_curves, draw_errors, draw_peaks, draw_times, slug
from report_real import (
    ERROR_HEADER,
    STEP_HEADER,
    TASK_HEADER,
    TITLES,
    draw_real,
    error_rows,
    step_rows,
    task_rows,
    title_of,
)
from report_runs import Run, newest_runs
from results import FOLDER

DOCS = Path(__file__).parents[1] / "docs"
PAGE = Path(__file__).parent / "RESULTS.md"
IMAGES = "../docs/images"
BEGIN, END = "<!-- made by benchmarks/report.py -->", "<!-- end of what it made -->"

NAMES = {
    "trl_ext": "ours",
    "trl_ext_torch": "ours, torch only",
    "trl": "TRL",
    "liger": "Liger",
    "liger_grpo": "Liger, GRPO loss",
    "cut_cross_entropy": "Cut Cross-Entropy",
    "torch_linear_cross_entropy": "torch",
    "logits": "whole logits",
    "logits_compiled": "whole logits, compiled",
    "matmul": "bare products",
}
USES = {
    "head_nograd": "Forward without a gradient",
    "head_frozen_fwd_bwd": "Forward and backward, frozen weight",
    "head_trained_fwd_bwd": "Forward and backward, trained weight",
    "head_nograd_entropy": "Forward without a gradient, with the entropy",
    "head_frozen_fwd_bwd_entropy": "Forward and backward, frozen weight, with the entropy",
    "head_trained_fwd_bwd_entropy": "Forward and backward, trained weight, with the entropy",
}
IN_TABLES = {
    "head_nograd": "forward",
    "head_frozen_fwd_bwd": "frozen",
    "head_trained_fwd_bwd": "trained",
    "head_nograd_entropy": "forward+entropy",
    "head_frozen_fwd_bwd_entropy": "frozen+entropy",
    "head_trained_fwd_bwd_entropy": "trained+entropy",
}
ERRORS = {
    "max_error": "log-prob, largest error",
    "gradient_error": "gradient of hidden states",
    "weight_gradient_error": "gradient of the weight",
}
NONE = "No results have been committed."


def number(value: float | None, form: str | None = None) -> str:
    if value is None:
        return "-"
    return format(value, form or (".0f" if value >= 100 else ".1f" if value >= 10 else ".2f"))


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    header = list(header)
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, ["---", *["---:"] * (len(header) - 1)], *rows])


def subjects_of(runs: list[Run]) -> list[str]:
    found = {subject for run in runs for subject in run.lines}
    return [name for name in NAMES if name in found]


def shape_text(run: Run) -> str:
    return "x".join(str(size) for size in run.shape.values())


def head_times(runs: list[Run]) -> str:
    """Return a table of our times in milliseconds, and the other subjects' over ours: above 1 is slower than ours."""
    others = [name for name in subjects_of(runs) if name not in ("trl_ext", "matmul")]
    others = [name for name in others if any(run.ours != name for run in runs)]
    header = ["use", "N x H x V", "ours, ms", "of the limit", *(f"{NAMES[x]} / ours" for x in others)]
    rows = []
    for run in runs:
        line = run.lines.get(run.ours)
        reached = None if line is None else max(line["products_ms"], line["bytes_ms"]) / line["median_ms"]
        ratios = [number(run.over(name, run.ours) if name != run.ours else None, ".2f") for name in others]
        of_ours = [number(line and line["median_ms"]), number(reached, ".0%")]
        rows.append([IN_TABLES[run.benchmark], shape_text(run), *of_ours, *ratios])
    return table(header, rows)


def head_peaks(runs: list[Run]) -> str:
    """Return a table of each call's peak memory, for the runs that measured it."""
    runs = [run for run in runs if has_peaks([run])]
    subjects = [name for name in subjects_of(runs) if name != "matmul"]
    rows = [
        [
            IN_TABLES[run.benchmark],
            shape_text(run),
            *(number(run.lines.get(name, {}).get("peak_mib"), ".0f") for name in subjects),
        ]
        for run in runs
    ]
    return table(["use", "N x H x V", *(NAMES[name] for name in subjects)], rows)


def worst_errors(runs: list[Run]) -> dict[str, dict[str, float | None]]:
    """Return each subject's worst error of every kind, over all its shapes and uses."""
    return {
        name: {
            title: max((x for run in runs if (x := run.lines.get(name, {}).get(kind)) is not None), default=None)
            for kind, title in ERRORS.items()
        }
        for name in subjects_of(runs)
        if name != "matmul"
    }


def has_peaks(runs: list[Run]) -> bool:
    return any(line["peak_mib"] is not None for run in runs for line in run.lines.values())


def head_section(runs: list[Run], device: str) -> list[str]:
    runs = sorted(runs, key=lambda run: list(USES).index(run.benchmark))
    text = ["#### The head", head_times(runs)]
    if has_peaks(runs):
        text += ["Peak memory of a call, MiB:", head_peaks(runs)]
    rows = [[NAMES[name], *(number(x, ".1e") for x in errors.values())] for name, errors in worst_errors(runs).items()]
    text += ["Errors against float64, the largest over all uses and shapes:", table(["head", *ERRORS.values()], rows)]
    plots = ["times", *(["peaks"] if has_peaks(runs) else []), "errors"]
    return [*text, *(f"![The head: {plot}]({IMAGES}/head-{plot}-{device}.png)" for plot in plots)]


def real_section(runs: list[Run]) -> list[str]:
    """Return the section on the real model: steps, errors and the task that it learns."""
    text = ["#### Whole steps of SmolLM2-135M-Instruct, generation included", table(STEP_HEADER, step_rows(runs))]
    text += [f"- {title_of(run)}: `{run.shape['arguments']}`" for run in runs if run.benchmark in TITLES]
    for run in runs:
        if run.benchmark == "real_head_bf16":
            text += ["#### Log-probs of SmolLM2-135M-Instruct in bf16", table(ERROR_HEADER, error_rows(run))]
        elif run.benchmark == "real_task_last_word":
            text += ["#### SmolLM2-135M-Instruct learns a task", table(TASK_HEADER, task_rows(run))]
    return text


def steps_section(runs: list[Run]) -> list[str]:
    """Return the section on runs of two subjects, of which the first is the baseline."""
    text = ["#### Whole steps"]
    for first, second in dict.fromkeys(tuple(run.lines) for run in runs):
        names = NAMES.get(first, first), NAMES.get(second, second)
        header = ["step", *(f"{name}, ms" for name in names), " / ".join(names), "share of the tokens", "peak, MiB"]
        text.append(table(header, (_step(run) for run in runs if tuple(run.lines) == (first, second))))
    shared = set.intersection(*({*run.shape.items()} for run in runs)) if runs[1:] else set()
    sizes = {"all": [x for x in runs[0].shape.items() if x in shared and x[1] is not None]} if shared else {}
    for run in runs:
        sizes[f"`{run.benchmark}`"] = [x for x in run.shape.items() if x not in shared]
    lines = [f"- {name}: {', '.join(f'{what} {size}' for what, size in of)}" for name, of in sizes.items()]
    return [*text, "\n".join(lines)]


def _step(run: Run) -> list[str]:
    before, after = run.lines.values()
    counted = before["peak_mib"] is not None
    peaks = [number(line["peak_mib"], ".0f") for line in (before, after)] if counted else ["-"]
    tokens = after["tokens"] / before["tokens"] if before.get("tokens") else None
    times = [number(line["median_ms"]) for line in (before, after)]
    ratio = number(before["median_ms"] / after["median_ms"], ".2f")
    return [f"`{run.benchmark}`", *times, ratio, number(tokens, ".2f"), " → ".join(peaks)]


def mismatch_section(runs: list[Run]) -> list[str]:
    """Return the section on router replay: the mismatch KL with the sampler, without and with replay."""
    rows = []
    for run in runs:
        own, replayed = (run.lines[subject]["mismatch_kl"] for subject in ("own", "replayed"))
        differing = f"{run.lines['own']['differing']:.1%}".replace("%", " %")
        values = [number(own, ".1e"), number(replayed, ".1e"), number(own / replayed, ".1f"), differing]
        rows.append([f"`{run.benchmark}`", *values])
    header = ["run", "mismatch KL, own experts", "replayed", "ratio", "choices that differ"]
    return ["#### Router replay in a small mixture of experts in bf16", table(header, rows)]


def divergence_section(runs: list[Run]) -> list[str]:
    """Return the section on the divergence of two heads."""
    header = ["`beta`", "heads", "student's head", "ours, ms", "TRL / ours", "peak, MiB", "error of the value"]
    rows = []
    for run in runs:
        stock, ours = (run.lines[subject] for subject in ("trl", "trl_ext"))
        about = [str(run.shape[name]) for name in ("beta", "heads", "student_head")]
        times = [number(ours["median_ms"]), number(run.over("trl", "trl_ext"), ".2f")]
        pairs = [
            " → ".join(number(line[name], form) for line in (stock, ours))
            for name, form in (("peak_mib", ".0f"), ("value_error", ".0e"))
        ]
        rows.append([*about, *times, *pairs])
    shape = runs[0].shape
    title = f"#### Divergence of two heads, bf16, {shape['N']} tokens, H {shape['H']}, V {shape['V']:,}"
    text = "Forward and backward. Arrows go from TRL to ours. The error is relative to the mean divergence."
    return [title, text, table(header, rows)]


def longest_section(runs: list[Run]) -> list[str]:
    rows = [
        [
            f"`{run.benchmark}`",
            NAMES[name],
            str(line["longest"]),
            number(line["fails_at"], "d"),
            number(line["peak_mib"]),
        ]
        for run in runs
        for name, line in run.lines.items()
    ]
    return [
        "#### The longest completion that fits",
        table(["run", "head", "fits, tokens", "does not fit", "MiB at most"], rows),
    ]


def curves_section(runs: list[Run]) -> list[str]:
    text = ["#### Loss curves"]
    for run in runs:
        found = run.lines["trl_ext"]["largest_difference"].items()
        different = " and ".join(f"{what} by at most {number(value, '.1e')}" for what, value in found)
        steps = len(run.lines["trl"]["loss"])
        text += [
            f"`{run.benchmark}`: over {steps} steps ours differs from TRL's in {different}.",
            f"![{run.benchmark}]({IMAGES}/curve-{slug(run.benchmark)}-{slug(run.device)}.png)",
        ]
    return text


def origins(runs: list[Run]) -> str:
    """Return the dates and versions, one line each, with the commits of all their runs."""
    commits: dict[str, list[str]] = {}
    for run in runs:
        named = ", ".join(f"{name} {of}" for name, of in run.versions.items() if of and name != "commit")
        found = commits.setdefault(f"- {run.date[:10]}: {named}", [])
        commit = run.versions.get("commit")
        if commit and commit not in found:
            found.append(commit)
    named = {line: f"; commits {', '.join(sorted(of))}" if of else "" for line, of in commits.items()}
    return "\n".join(f"{line}{of}" for line, of in sorted(named.items()))


def sections(runs: list[Run]) -> str:
    """Return the whole generated part of the page."""
    text: list[str] = []
    for device, of_device in groupby(runs, key=lambda run: run.device):
        here = list(of_device)
        head = [run for run in here if run.benchmark in USES]
        longest = [run for run in here if "longest" in run.benchmark]
        curves = [run for run in here if "curve" in run.benchmark]
        real = [run for run in here if run.benchmark.startswith("real_")]
        mismatches = [run for run in here if "mismatch" in run.benchmark]
        divergences = [run for run in here if run.benchmark == "divergence"]
        untimed = (*head, *longest, *curves, *real, *mismatches, *divergences)
        timed = [run for run in here if run not in untimed and len(run.lines) == 2]
        text += [f"### {device}", origins(here)]
        if head:
            text += head_section(head, slug(device))
        text += real_section(real) if real else []
        text += steps_section(timed) if timed else []
        text += mismatch_section(mismatches) if mismatches else []
        text += divergence_section(divergences) if divergences else []
        text += longest_section(longest) if longest else []
        text += curves_section(curves) if curves else []
    return "\n\n".join(text) or NONE


def with_part(page: str, part: str, begin: str = BEGIN) -> str:
    before, rest = page.split(begin)
    after = rest.partition(END)[2]
    return f"{before}{begin}\n\n{part}\n\n{END}{after}"


def draw(runs: list[Run], folder: Path) -> None:
    """Draw every plot of the generated part."""
    titles = {name: title for name, title in USES.items() if "entropy" not in name}
    for device, of_device in groupby(runs, key=lambda run: run.device):
        here = list(of_device)
        if head := [run for run in here if run.benchmark in USES]:
            draw_times(head, titles, NAMES, folder / f"head-times-{slug(device)}.png")
            draw_errors(worst_errors(head), NAMES, folder / f"head-errors-{slug(device)}.png")
            if has_peaks(head):
                draw_peaks(head, titles, NAMES, folder / f"head-peaks-{slug(device)}.png")
        for run in here:
            if "curve" in run.benchmark:
                draw_curves(run, NAMES, folder / f"curve-{slug(run.benchmark)}-{slug(device)}.png")


def main() -> None:
    runs = newest_runs(FOLDER)
    PAGE.write_text(with_part(PAGE.read_text(), sections(runs)))
    draw(runs, DOCS / "images")
    if runs:
        draw_overview(runs, NAMES, DOCS / "images" / "overview.png")
        draw_error(runs, NAMES, DOCS / "images" / "head-error.png")
        draw_real(runs, DOCS / "images" / "real-model.png")
    print(f"wrote {PAGE}, from {len(runs)} runs")


if __name__ == "__main__":
    main()
