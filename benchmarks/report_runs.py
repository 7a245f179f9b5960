"""Groups the lines in benchmarks/results/ into runs, and finds the newest."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class Run:
    """The lines of one run of a benchmark at one shape, by subject."""

    benchmark: str
    shape: dict[str, Any]
    device: str
    date: str
    versions: dict[str, str | None]
    lines: dict[str, dict[str, Any]]

    def over(self, subject: str, other: str) -> float | None:
        """Return the median of `subject` divided by that of `other`; None if either has none."""
        medians = [self.lines.get(name, {}).get("median_ms") for name in (subject, other)]
        return None if None in medians else medians[0] / medians[1]

    @property
    def ours(self) -> str:
        return "trl_ext" if "trl_ext" in self.lines else "trl_ext_torch"


def newest_runs(folder: Path) -> list[Run]:
    """Return the newest runs, in order of device, benchmark and shape."""
    runs: dict[str, Run] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in map(json.loads, path.read_text().splitlines()):
            if "subject" not in line:
                continue
            about = [line[name] for name in ("benchmark", "shape", "device", "date")]
            run = runs.setdefault(json.dumps([line["run"], *about]), Run(*about, line["versions"], {}))
            run.lines[line["subject"]] = line
    # If dates are equal, the later file wins
    newest = {
        json.dumps([run.device, run.benchmark, run.shape]): run for run in sorted(runs.values(), key=lambda x: x.date)
    }
    sizes = {key: [size for size in run.shape.values() if isinstance(size, int)] for key, run in newest.items()}
    order = sorted(newest, key=lambda key: (newest[key].device, newest[key].benchmark, sizes[key], key))
    return [newest[key] for key in order]
