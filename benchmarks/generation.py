"""Measure transformers' `generate` on TRL's batch, on all rows and on fewer; and whole GRPO steps by phase; in turns.

    python benchmarks/generation.py           # small models on the CPU, about 6 minutes; on a GPU the same shapes
    python benchmarks/generation.py --smoke   # tiny models: a check that it runs; its times mean nothing

Prompts have different lengths. Each is repeated for its completions and padded on the left. One token in 64 ends a
completion, so that lengths differ. Subjects are `trl`, plain `generate`, and `trl_ext`. Both return the same samples on
the CPU, which this checks. Milliseconds are those of a call, `tokens` those that the model runs in it.

The subjects of a GRPO step are both libraries with `generate`, and both with transformers' continuous batching.
`phases_ms` are medians of its phases on the clock of the process: generation, rewards, passes without a loss, and
training, which is the rest.
"""

import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import results
import torch
import trl
from datasets import Dataset
from steps import Shape, common, policy, text, tokenizer, words
from torch import Tensor
from transformers import PrinterCallback
from turns import WARM_UP_STEPS, Line, Step, Steps, begin, line_of, now, sizes_of, take

import trl_ext
from trl_ext.compat.generate import GenerateRows

PAD = 0
SMALL = Shape(hidden=256, layers=4, vocabulary=1024, prompt=200, completion=128, steps=1, rounds=5)
SMOKE = Shape(hidden=32, layers=1, vocabulary=64, prompt=8, completion=4, steps=1, rounds=2)


@dataclass(frozen=True)
class Groups:
    """The batch of a call."""

    prompt: int  # tokens of the longest prompt
    completion: int
    vocabulary: int
    group: int
    prompts: int = 4


CASES = {
    "generate_long_prompts": Groups(prompt=200, completion=128, vocabulary=1024, group=8),
    "generate_short_prompts": Groups(prompt=64, completion=128, vocabulary=1024, group=8),
    "generate_large_vocabulary": Groups(prompt=200, completion=128, vocabulary=32768, group=8),
    "generate_little_to_share": Groups(prompt=8, completion=32, vocabulary=1024, group=2),
}
STEP = Shape(hidden=256, layers=4, vocabulary=1024, prompt=200, completion=128, steps=WARM_UP_STEPS + 4, rounds=2)
SMOKE_STEP = Shape(hidden=32, layers=1, vocabulary=64, prompt=8, completion=4, steps=WARM_UP_STEPS + 1, rounds=1)
CONTINUOUS = {
    "use_transformers_continuous_batching": True,
    "transformers_continuous_batching_config": {"num_blocks": 1024, "max_batch_tokens": 512},
}
SUBJECTS_OF_STEP: dict[str, tuple[Any, dict[str, Any]]] = {
    "trl": (trl, {}),
    "trl_ext": (trl_ext, {}),
    "trl_continuous": (trl, CONTINUOUS),
    "trl_ext_continuous": (trl_ext, CONTINUOUS),
}


def batch(groups: Groups) -> dict[str, Tensor]:
    """Return prompts as TRL gives them to `generate`: `(B, P)` ids and mask."""
    generator = torch.Generator().manual_seed(5)
    shorter = torch.randint(groups.prompt // 2, groups.prompt, (groups.prompts - 1,), generator=generator)
    lengths = torch.tensor([groups.prompt, *shorter.tolist()])[:, None]
    mask = torch.arange(groups.prompt) >= groups.prompt - lengths
    first = groups.vocabulary // 32  # no token that ends a completion
    ids = torch.randint(first, groups.vocabulary, mask.shape, generator=generator).masked_fill(~mask, PAD)
    return {
        "input_ids": ids.repeat_interleave(groups.group, 0),
        "attention_mask": mask.long().repeat_interleave(groups.group, 0),
    }


def ends(vocabulary: int) -> list[int]:
    """Return the tokens that end a completion."""
    return list(range(2, 2 + max(1, vocabulary // 64)))


def compared(benchmark: str, shape: Shape, groups: Groups, _: float) -> list[Line]:
    model = policy(shape).eval()
    inputs = {name: x.to(model.device) for name, x in batch(groups).items()}
    options = {"max_new_tokens": groups.completion, "do_sample": True, "pad_token_id": PAD}
    options["eos_token_id"] = ends(groups.vocabulary)
    times: dict[str, list[float]] = {"trl": [], "trl_ext": []}
    samples: dict[str, Tensor] = {}
    rows = None

    def plain() -> Any:
        return model.generate(**inputs, **options)

    def fewer() -> Any:
        nonlocal rows
        rows = GenerateRows(model, looks_for_state=False)
        with rows.running():
            return plain()

    for call in range(shape.rounds + 1):  # the first one warms up
        for name, run in (("trl", plain), ("trl_ext", fewer)):
            torch.manual_seed(1)
            begun = now()
            with torch.no_grad():
                samples[name] = run()
            if call:
                times[name].append(1e3 * (now() - begun))
    assert rows is not None
    if model.device.type == "cpu" and not torch.equal(samples["trl"], samples["trl_ext"]):
        raise AssertionError(f"{benchmark}: the samples differ")
    run_name = results.new_run()
    sizes = {**sizes_of(shape), "group": groups.group, "prompts": groups.prompts}
    tokens = {"trl": rows.trl_tokens, "trl_ext": rows.tokens}
    return [line_of(benchmark, sizes, name, run_name, times[name]) | {"tokens": tokens[name]} for name in times]


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(sum(ids) % 2) for ids in completion_ids]


def train(library: Any, config: dict[str, Any], shape: Shape, group: int) -> tuple[list[Step], dict[str, list[float]]]:
    """Return the steps after the first ones, and the milliseconds of each phase of these."""
    rows = [{"prompt": text(words(row, shape.prompt - row % 4, shape.vocabulary))} for row in range(64)]
    with tempfile.TemporaryDirectory() as folder:
        trainer = library.GRPOTrainer(
            policy(shape),
            reward_funcs=reward,
            args=library.GRPOConfig(
                **{**common(shape), "output_dir": folder, "logging_steps": 1, "num_generations": group},
                **{"per_device_train_batch_size": 4 * group, "max_completion_length": shape.completion},
                **config,
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer(shape.vocabulary),
        )
        trainer.eos_token_ids = ends(shape.vocabulary)
        trainer.generation_config.eos_token_id = trainer.eos_token_ids
        steps = Steps(trainer)
        trainer.remove_callback(PrinterCallback)
        if library is trl:
            log_phases(trainer)
        trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log][WARM_UP_STEPS:]
    names = {name for log in logs for name in log if name.startswith("seconds/")}
    phases = {name.removeprefix("seconds/"): [1e3 * log.get(name, 0.0) for log in logs] for name in sorted(names)}
    return steps.taken[WARM_UP_STEPS:], phases


def log_phases(trainer: Any) -> None:
    """Make a trainer of TRL log the `seconds/*` that ours log."""
    seconds: dict[str, float] = defaultdict(float)
    log = trainer.log
    logged_at = time.monotonic()

    def measured(phase: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*positional: Any, **keywords: Any) -> Any:
            if phase == "passes" and torch.is_grad_enabled():
                return method(*positional, **keywords)
            begun = time.monotonic()
            output = method(*positional, **keywords)
            seconds[phase] += time.monotonic() - begun
            return output

        return run

    def log_with_phases(logs: dict[str, float], *positional: Any) -> None:
        nonlocal logged_at
        elapsed = time.monotonic() - logged_at
        logs |= {f"seconds/{phase}": x for phase, x in seconds.items()}
        logs["seconds/training"] = elapsed - sum(seconds.values())
        seconds.clear()
        logged_at = time.monotonic()
        log(logs, *positional)

    methods = {
        "generation": "_generate",
        "rewards": "_calculate_rewards",
        "passes": "_get_per_token_logps_and_entropies",
    }
    for phase, name in methods.items():
        setattr(trainer, name, measured(phase, getattr(trainer, name)))
    trainer.log = log_with_phases


def steps_compared(benchmark: str, shape: Shape, group: int, _: float) -> list[Line]:
    steps: dict[str, list[Step]] = defaultdict(list)
    phases: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in SUBJECTS_OF_STEP}
    for _ in range(shape.rounds):
        for name, (library, config) in SUBJECTS_OF_STEP.items():
            taken, of_phases = train(library, config, shape, group)
            steps[name] += taken
            for phase, values in of_phases.items():
                phases[name][phase] += values
    run_name = results.new_run()
    sizes = {**sizes_of(shape), "group": group, "prompts": 4}
    return [
        {
            **line_of(benchmark, sizes, name, run_name, [step.milliseconds for step in steps[name]]),
            "phases_ms": {phase: statistics.median(values) for phase, values in phases[name].items()},
            "tokens": statistics.fmean(step.tokens for step in steps[name]),
            "steps": len(steps[name]),
        }
        for name in SUBJECTS_OF_STEP
    ]


def measurements(smoke: bool) -> dict[str, Callable[[float], list[Line]]]:
    found: dict[str, Callable[[float], list[Line]]] = {}
    for name, groups in CASES.items():
        if smoke:
            groups = Groups(SMOKE.prompt, SMOKE.completion, SMOKE.vocabulary, group=2)
        base = SMOKE if smoke else SMALL
        sizes = {"prompt": groups.prompt, "completion": groups.completion, "vocabulary": groups.vocabulary}
        found[name] = partial(compared, name, Shape(**{**vars(base), **sizes}), groups)
    found["grpo_step_by_phase"] = partial(
        steps_compared, "grpo_step_by_phase", SMOKE_STEP if smoke else STEP, 2 if smoke else 8
    )
    return found


def main() -> None:
    chosen = begin(__doc__, budget=900)
    take(measurements(chosen.smoke), chosen)


if __name__ == "__main__":
    main()
