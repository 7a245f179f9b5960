"""Train a real model on a held-out task, three seeds each with trl_ext, with a learning rate of 0 and with stock TRL.

    make bench-real-task       # about half an hour on one CPU thread, most of it stock TRL's

Each training is a run of examples/real_model.py in a process of its own. A line has its right answers of all seeds.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import real_data
import results

EXAMPLE = Path(__file__).parents[1] / "examples" / "real_model.py"
# Subject of a line -> its arguments
TRAININGS = {
    "trl_ext": [],
    "learning_rate_0": ["--learning_rate", "0"],
    "trl": ["--library", "trl"],
}


def run_example(words: list[str]) -> dict[str, Any]:
    """Return what one training of the example measured."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", str(EXAMPLE), "--output_dir", folder, *words]
        subprocess.run([*command, "--model", str(real_data.checkpoint())], check=True, capture_output=True)
        return json.loads((Path(folder) / "result.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--results", type=Path, default=results.FOLDER, help="folder to write to")
    chosen = parser.parse_args()
    origin = results.origin("cpu")
    run = results.new_run()
    for subject, words in TRAININGS.items():
        trainings = []
        for seed in chosen.seeds:
            trainings.append(run_example([*words, "--seed", str(seed), "--steps", str(chosen.steps)]))
            print(subject, f"seed {seed}:", trainings[-1], flush=True)
        line = {"benchmark": "real_task_last_word", "subject": subject, "run": run, "median_ms": None, "peak_mib": None}
        line["shape"] = {"model": "SmolLM2-135M-Instruct", "steps": chosen.steps, "held_out": trainings[0]["held_out"]}
        line |= {name: [x[name] for x in trainings] for name in ("constant", "before", "after", "seconds")}
        results.add([line | origin], chosen.results)


if __name__ == "__main__":
    main()
