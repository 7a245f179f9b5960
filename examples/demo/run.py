"""Runs the demo: a small language model learns with DPO, goes on with GRPO, and a held-out test shows each gain.

    python examples/demo/run.py                      one run, a minute and a half on one CPU core
    python examples/demo/run.py --seeds 0 1 2        three runs, their mean on the last line
    python examples/demo/run.py --learning-rate 0    the control: nothing may change
    python examples/demo/run.py --short              half a minute: everything runs, no gain is asked for

Both stages go through `accelerate launch` and the same `examples/dpo_lora.py` and `examples/grpo_lora.py` that users
run. Per seed, the two adapters, `curves.png` and `results.json` are written under `--output`. The exit status is 0
only if the data sets are disjoint, both adapters load in PEFT and in plain transformers alike, and both stages gained
enough.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parent
# Nothing here needs the network; without this, set before their import, the libraries ask the Hub about local folders.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from peft import PeftModel  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase  # noqa: E402
from transformers.utils.logging import disable_progress_bar  # noqa: E402

from make_data import DATA  # noqa: E402
from task import SPLITS, final_number  # noqa: E402
from train_base import MODEL, web_problems  # noqa: E402

# The least that each stage has to add to the accuracy, and the most that the control may.
LEAST_GAIN = {"dpo": 0.15, "grpo": 0.05}
MOST_CONTROL_GAIN = 0.01
# A model this small gains little from a second thread, and on a busy machine every step waits for the thread that is
# not scheduled.
THREADS = 1


def read_rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def load_test() -> list[dict[str, str]]:
    """The held-out problems, after asserting that no training data holds one of them, nor its sum turned around."""

    def numbers(prompt: str) -> str:
        operation = "+" if "+" in prompt else "-"
        return operation.join(sorted(prompt.removesuffix("=?").split(operation)))

    train_web, held_out_web = web_problems(seed=0)
    seen = {
        "web": {numbers(problem.prompt) for problem in train_web + held_out_web},
        "dpo": {numbers(row["prompt"]) for row in read_rows(DATA / "dpo" / "train.jsonl")},
        "grpo": {numbers(row["prompt"]) for row in read_rows(DATA / "grpo" / "train.jsonl")},
    }
    test = read_rows(DATA / "test" / "test.jsonl")
    seen["test"] = {numbers(row["prompt"]) for row in test}
    assert list(seen) == list(SPLITS), "every split is checked"
    assert len({row["prompt"] for row in test}) == len(test) >= 500, "the test needs 500 different prompts"
    for one in seen:
        for other in seen:
            assert one == other or not seen[one] & seen[other], f"{one} and {other} share problems"
    return test


def complete(model: Any, tokenizer: PreTrainedTokenizerBase, prompts: list[str]) -> list[str]:
    """Greedy completions of a transformers or a PEFT model."""
    texts = []
    for start in range(0, len(prompts), 250):
        batch = tokenizer(prompts[start : start + 250], return_tensors="pt", padding=True, padding_side="left")
        inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
        ids = model.generate(**inputs, do_sample=False, max_new_tokens=36)
        texts += tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return texts


def accuracy(texts: list[str], test: list[dict[str, str]]) -> dict[str, float]:
    """The share of right answers: over all problems, and over the sums and the differences alone."""
    right = [final_number(text) == row["answer"] for text, row in zip(texts, test, strict=True)]
    sums = [hit for hit, row in zip(right, test, strict=True) if "+" in row["prompt"]]
    differences = [hit for hit, row in zip(right, test, strict=True) if "-" in row["prompt"]]
    return {name: sum(hits) / len(hits) for name, hits in [("all", right), ("+", sums), ("-", differences)]}


def train(stage: str, model: Path, output: Path, options: list[str]) -> None:
    """Runs one of the example scripts as a user would, from the root of the repository."""
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    command += ["--config_file", str(EXAMPLES / "accelerate_configs" / "cpu.yaml")]
    command += ["--num_cpu_threads_per_process", str(THREADS)]
    command += [str(EXAMPLES / f"{stage}_lora.py"), "--config", str(HERE / f"{stage}.yaml")]
    command += ["--model_name_or_path", str(model), "--dataset_name", str(DATA / stage), "--output_dir", str(output)]
    command += options
    print(f"\n{stage}: {' '.join(command)}", flush=True)
    finished = subprocess.run(command, cwd=EXAMPLES.parent)
    if finished.returncode != 0:
        sys.exit(f"demo: {stage} failed with exit status {finished.returncode}; its own message is above.")


def check_adapter(adapter: Path, tokenizer: PreTrainedTokenizerBase, test: list[dict[str, str]]) -> dict[str, float]:
    """The accuracy of a saved adapter, after checking that PEFT and plain transformers make the same model of it."""
    prompts = [row["prompt"] for row in test]
    by_peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(MODEL), adapter).eval()
    by_transformers = AutoModelForCausalLM.from_pretrained(adapter).eval()
    batch = tokenizer([row["prompt"] for row in test[:50]], return_tensors="pt", padding=True, padding_side="left")
    with torch.no_grad():
        logits = [
            model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, -1]
            for model in (by_peft, by_transformers)
        ]
    torch.testing.assert_close(*logits)
    texts = complete(by_peft, tokenizer, prompts)
    if texts != complete(by_transformers, tokenizer, prompts):
        sys.exit(f"demo: {adapter} completes differently in PEFT and in plain transformers.")
    return accuracy(texts, test)


def follow(
    stage: Path, tokenizer: PreTrainedTokenizerBase, test: list[dict[str, str]], start: float
) -> dict[str, list[list[float]]]:
    """What a finished stage logged on its way, as `[step, value]` points, and the accuracy of its checkpoints."""
    checkpoints = sorted(stage.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    history = json.loads((checkpoints[-1] / "trainer_state.json").read_text())["log_history"]
    curves = {
        name: [[entry["step"], entry[name]] for entry in history if name in entry]
        for name in ("loss", "rewards/margins", "reward", "grad_norm")
    }
    curves["accuracy"] = [[0, start]]
    for checkpoint in checkpoints:
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(MODEL), checkpoint).eval()
        texts = complete(model, tokenizer, [row["prompt"] for row in test])
        curves["accuracy"].append([int(checkpoint.name.split("-")[1]), accuracy(texts, test)["all"]])
    return curves


def plot(curves: dict[str, dict[str, list[list[float]]]], title: str, path: Path) -> None:
    """Draws DPO's column beside GRPO's: what it optimizes, and the held-out accuracy that comes of it."""
    panels = {
        "dpo": [("loss", "loss"), ("rewards/margins", "reward margin")],
        "grpo": [("loss", "loss"), ("reward", "mean reward")],
    }
    figure = Figure(figsize=(5, 6), layout="constrained")  # legible on a phone, at its width
    for column, (stage, logged) in zip(figure.subplots(3, 2).T, panels.items(), strict=True):
        for axis, (name, label) in zip(column, [*logged, ("accuracy", "held-out accuracy")], strict=True):
            axis.plot(*zip(*curves[stage][name], strict=True), marker="o", markersize=3)
            axis.set_title(f"{stage.upper()}: {label}", fontsize="medium")
            axis.grid(alpha=0.3)
        column[-1].set_ylim(0, 1.02)
        column[-1].set_xlabel("optimizer step")
    figure.suptitle(title, fontsize="medium")
    unfinished = path.with_suffix(".tmp.png")
    figure.savefig(unfinished, dpi=160)
    os.replace(unfinished, path)


def run_seed(seed: int, output: Path, options: list[str], short: bool, test: list[dict[str, str]]) -> dict[str, Any]:
    """Both stages of one seed, measured before and after each by the same code."""
    started = time.perf_counter()
    shutil.rmtree(output, ignore_errors=True)  # checkpoints of an earlier run would end up in the curves
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    base = AutoModelForCausalLM.from_pretrained(MODEL).eval()
    measured = {"base": accuracy(complete(base, tokenizer, [row["prompt"] for row in test]), test)}
    curves = {}
    model = MODEL
    for stage, steps in [("dpo", 12), ("grpo", 4)]:
        stage_options = ["--seed", str(seed), *options]
        if short:
            stage_options += ["--max_steps", str(steps), "--save_steps", str(steps), "--logging_steps", "2"]
        train(stage, model, output / stage, stage_options)
        model = output / stage
        before = list(measured.values())[-1]
        measured[stage] = check_adapter(model, tokenizer, test)
        curves[stage] = follow(model, tokenizer, test, start=before["all"])
        print(f"{stage}: held-out accuracy {before['all']:.3f} -> {measured[stage]['all']:.3f}", flush=True)

    plot(curves, f"trl_ext demo, seed {seed}: {len(test)} held-out problems", output / "curves.png")
    results = {"seed": seed, "accuracy": measured, "seconds": round(time.perf_counter() - started), "curves": curves}
    unfinished = output / "results.tmp"
    unfinished.write_text(json.dumps(results, indent=1))
    os.replace(unfinished, output / "results.json")
    return results


def summary(results: list[dict[str, Any]], seconds: float) -> str:
    base, dpo, grpo = (
        sum(result["accuracy"][name]["all"] for result in results) / len(results) for name in ("base", "dpo", "grpo")
    )
    return f"dpo {base:.2f} -> {dpo:.2f}, grpo {dpo:.2f} -> {grpo:.2f}, {seconds:.0f} s"


def complaints(result: dict[str, Any], control: bool) -> list[str]:
    """What is wrong with the gains of one seed, a sentence each."""
    found = []
    for before, stage in [("base", "dpo"), ("dpo", "grpo")]:
        gain = result["accuracy"][stage]["all"] - result["accuracy"][before]["all"]
        if control and abs(gain) >= MOST_CONTROL_GAIN:
            found.append(
                f"{stage} moved the accuracy by {gain:+.3f} without learning; less than {MOST_CONTROL_GAIN} is allowed"
            )
        if not control and gain < LEAST_GAIN[stage]:
            found.append(f"{stage} gained {gain:+.3f}; at least {LEAST_GAIN[stage]} is expected")
    return [f"demo: seed {result['seed']}: {sentence}." for sentence in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="one run per seed")
    parser.add_argument("--output", type=Path, default=EXAMPLES.parent / "runs" / "demo", help="where to write")
    parser.add_argument("--learning-rate", type=float, help="in place of both stages' own; 0 is the control")
    parser.add_argument("--short", action="store_true", help="a few steps of each stage, and no gain is asked for")
    arguments = parser.parse_args()

    started = time.perf_counter()
    torch.set_num_threads(THREADS)
    disable_progress_bar()  # of weights being loaded; the Trainer's own stay
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)  # PEFT still uses the old name
    options = [] if arguments.learning_rate is None else ["--learning_rate", str(arguments.learning_rate)]
    test = load_test()
    results = []
    for seed in arguments.seeds:
        output = arguments.output.resolve() / f"seed-{seed}"
        results.append(run_seed(seed, output, options, arguments.short, test))
        print(
            f"seed {seed}: {summary(results[-1:], results[-1]['seconds'])} (curves in {output / 'curves.png'})",
            flush=True,
        )

    control = arguments.learning_rate == 0
    if control or not arguments.short:
        wrong = [sentence for result in results for sentence in complaints(result, control)]
        if wrong:
            sys.exit("\n".join(wrong))
    print(f"demo: {summary(results, time.perf_counter() - started)}")


if __name__ == "__main__":
    main()
