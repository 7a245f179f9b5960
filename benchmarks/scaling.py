"""Bytes received and held per rank, for the head and for a whole step: by formula, and counted on up to 8 ranks.

    python benchmarks/scaling.py            # counts at 2, 4 and 8 gloo ranks, times at 2, the tables; 3 minutes
    python benchmarks/scaling.py --tables   # only the tables
    python benchmarks/scaling.py --smoke    # 2 ranks, two calls of each: a check that it runs; its times mean nothing

Lines that it writes to benchmarks/results/:

- `scaling_head`: one pass of the head on tiny shapes. `payloads` of each kind of collective by formula and `counted`,
  the resulting `received` bytes over a ring, and the peak of bytes `held`, by formula and counted.
- `scaling_step`: the same for forward and backward of one micro-batch of a tiny Llama in fp32, head included.
- `scaling_time`: median milliseconds of one pass of the head, forward and backward, for a frozen weight. The ways take
  turns. `rule` is the way that moves fewer bytes. `ratio` is the time of the fastest other way divided by the time of
  `rule`: higher is better.

The formulas are in scaling_formulas.py, the runs in scaling_counts.py.
"""

import argparse
import statistics
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import results
from scaling_counts import LENGTH, LORA_RANK, ROWS, TINY, count_heads, count_steps, on_ranks, time_heads
from scaling_formulas import Engine, HeadCase, Step, Way, chosen_way, head_held, head_payloads, received, step_received
from scaling_tables import tables

GRADIENTS = (
    {"gradient": False},
    {"gradient": True},
    {"entropy_grad": True, "more_outputs": 4},
    {"trained": True},
    {"trained": True, "entropy_grad": True, "more_outputs": 1},
)
STEPS: tuple[tuple[Engine, bool], ...] = (
    *(("DDP", False), ("DDP", True)),
    *(("FSDP2", False), ("FSDP2", True)),
    ("TP", False),
)
# (tokens of a rank, V), at 2 ranks with H = 256
GRID = ((32, 1024), (32, 32768), (256, 1024), (256, 8192), (1024, 1024), (1024, 8192))
WAYS: tuple[Way, ...] = ("local", "in turn", "whole")


def head_cases(ranks: int) -> list[tuple[HeadCase, Way]]:
    """Return every combination of a way and gradients that it supports."""
    case = HeadCase(ranks, tokens=24, hidden=32, vocabulary=128 * ranks, item=4, device="cpu")
    ways: tuple[Way, ...] = (*WAYS, "tensor parallel")
    return [
        (replace(case, **gradient), way)
        for gradient in GRADIENTS
        for way in ways
        if not (way == "in turn" and gradient.get("trained"))
    ]


def step_formula(ranks: int, engine: Engine, lora: bool) -> float:
    """Return the bytes that a rank receives in one micro-batch of the tiny model, with its head."""
    # The last token of a row is not processed, because nothing is predicted from it
    step = Step(ranks, ROWS * (LENGTH - 1), LORA_RANK * lora, item=4, gradient_item=4)
    case = HeadCase(ranks, ROWS * (LENGTH - 1), TINY.hidden, TINY.vocabulary, item=4, trained=not lora)
    ways: dict[Engine, Way] = {"DDP": "here", "TP": "tensor parallel", "FSDP2": chosen_way(case) if lora else "whole"}
    return step_received(TINY, step, engine) + received(ranks, head_payloads(case, ways[engine]))


def heads(ranks: int) -> list[dict[str, Any]]:
    """Return the lines of `scaling_head`."""
    cases, lines = head_cases(ranks), []
    for number, (case, way) in enumerate(cases):
        if number == 0:
            seen = on_ranks(ranks, count_heads, cases)
        counts = [of_rank[number] for of_rank in seen]
        payloads = {kind: count for kind, count in head_payloads(case, way).items() if count}
        lines.append(
            {
                "benchmark": "scaling_head",
                "ranks": ranks,
                "way": way,
                **{name: getattr(case, name) for name in ("gradient", "trained", "entropy_grad")},
                "payloads": payloads,
                "counted": counts[0].payloads,
                "received": {
                    "formula": received(ranks, payloads),
                    "counted": statistics.fmean(x.received for x in counts),
                    "rule": counts[0].predicted,
                },
                "held": {"formula": head_held(case, way), "counted": max(x.peak for x in counts)},
                "case": asdict(case),
            }
        )
    return lines


def steps(ranks: int) -> list[dict[str, Any]]:
    """Return the lines of `scaling_step`."""
    seen = on_ranks(ranks, count_steps, list(STEPS))
    return [
        {
            "benchmark": "scaling_step",
            "ranks": ranks,
            "engine": engine,
            "lora": lora,
            "received": {
                "formula": step_formula(ranks, engine, lora),
                # FSDP2 with adapters: without the exchange of how many tokens each rank has
                "counted": statistics.fmean(of_rank[number][0].received for of_rank in seen)
                - (8 * (ranks - 1) if engine == "FSDP2" and lora else 0),
            },
            "payloads": seen[0][number][0].payloads,
            "peak": max(of_rank[number][0].peak for of_rank in seen),
            "head": seen[0][number][1],
        }
        for number, (engine, lora) in enumerate(STEPS)
    ]


def times(grid: tuple[tuple[int, int], ...], hidden: int, calls: int) -> list[dict[str, Any]]:
    """Return the lines of `scaling_time`."""
    cases = [HeadCase(2, tokens, hidden, vocabulary, item=4, device="cpu") for tokens, vocabulary in grid]
    seen = on_ranks(2, time_heads, cases, WAYS, calls)
    lines = []
    for number, case in enumerate(cases):
        # A pass ends when the last rank has finished
        ms = {way: statistics.median(map(max, *(of_rank[number][way] for of_rank in seen))) for way in WAYS}
        rule = chosen_way(case)
        others = min(count for way, count in ms.items() if way != rule)
        ratio = others / ms[rule]
        lines.append(
            {"benchmark": "scaling_time", "rule": rule, "ratio": ratio, "milliseconds": ms, "case": asdict(case)}
        )
    return lines


def show(line: dict[str, Any]) -> None:
    if line["benchmark"] == "scaling_time":
        case = line["case"]
        ms = ", ".join(f"{way} {count:.1f} ms" for way, count in line["milliseconds"].items())
        print(f"2 ranks, N {case['tokens']:5}, V {case['vocabulary']:6}: {ms}; the rule: {line['rule']}", flush=True)
        return
    both = line["received"]
    name = line["way"] if line["benchmark"] == "scaling_head" else f"{line['engine']}{', LoRA' if line['lora'] else ''}"
    extra = [key for key in ("gradient", "trained", "entropy_grad") if line.get(key)]
    same = "equal" if abs(both["formula"] - both["counted"]) < 1e-6 * max(1, both["formula"]) else "NOT EQUAL"
    print(
        f"{line['ranks']} ranks, {line['benchmark']} {name} {' '.join(extra)}: received {both['counted']:.0f}, by "
        f"formula {both['formula']:.0f}: {same}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="2 ranks, few calls")
    parser.add_argument("--tables", action="store_true", help="only print the tables of docs/scaling.md")
    parser.add_argument("--results", type=Path, default=results.FOLDER, help="folder to write to")
    arguments = parser.parse_args()
    if not arguments.tables:
        lines: list[dict[str, Any]] = []
        for ranks in (2,) if arguments.smoke else (2, 4, 8):
            lines += heads(ranks) + steps(ranks)
        lines += times(GRID[:1] if arguments.smoke else GRID, *(16, 2) if arguments.smoke else (256, 7))
        for line in lines:
            show(line)
        origin = results.origin("cpu")
        results.add([line | origin for line in lines], arguments.results)
    print(tables())


if __name__ == "__main__":
    main()
