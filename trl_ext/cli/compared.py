"""One run of `trl-ext compare`, in a process of its own: a few steps of TRL's trainer or of ours, measured.

Only the run of ours imports our trainers. Both read the same words, and count tokens at the input embeddings.
"""

import contextlib
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import trl
from transformers import GenerationMixin, TrainerCallback, set_seed

from .arguments import OneLineParser, Parsed, dataclasses_of
from .line import class_name, read
from .training import build, trainer_class_of

# The files of a run
JOB, RESULT, WEIGHTS = "job.json", "result.json", "weights.pt"


@dataclass
class Job:
    """What to run."""

    method: str
    library: str  # "trl" or "trl_ext"
    words: list[str]  # the arguments of the training
    steps: int
    rows: int  # at most, of each data set


@dataclass
class StepCost:
    """What an optimizer step took, generation apart."""

    seconds: float  # of the process on a CPU, of the clock on a GPU
    tokens: int  # at the input embeddings, padding and passes without gradients included
    generation_seconds: float
    generated_tokens: int  # at the input embeddings in `generate`


@dataclass
class RunResult:
    """What a run measured."""

    steps: list[StepCost] = field(default_factory=list)
    log: list[dict[str, float]] = field(default_factory=list)  # one entry a step
    samples: list[str] = field(default_factory=list)  # a hash of what each call of `generate` returned
    initial_weights: str = ""  # a hash
    change: float = 0.0  # the norm of the change of all trained weights
    peak_mib: float | None = None  # above what was there before the trainer
    precision: str = ""  # of the weights and of autocast
    device: str = ""
    micro_batches: int = 1  # of an optimizer step
    drops_out: bool = False  # whether dropout is active
    modules: list[str] = field(default_factory=list)  # of trl_ext, in this process


class Meter(TrainerCallback):
    """Counts the tokens and the time of each optimizer step."""

    def __init__(self) -> None:
        self.steps: list[StepCost] = []
        self.samples: list[str] = []
        self._total = StepCost(0.0, 0, 0.0, 0)
        self._generates = False

    def watch(self, trainer: Any) -> None:
        for model in (trainer.model, getattr(trainer, "ref_model", None)):
            if model is not None:
                model.get_input_embeddings().register_forward_hook(self._count)
        trainer.add_callback(self)

    def _count(self, module: Any, inputs: Any, output: Any) -> None:
        tokens = inputs[0].numel()
        if self._generates:
            self._total.generated_tokens += tokens
        else:
            self._total.tokens += tokens

    @contextlib.contextmanager
    def generation(self) -> Iterator[None]:
        """Count what `generate` takes in the `with` block apart."""
        plain = GenerationMixin.generate

        def generate(*positional: Any, **keywords: Any) -> Any:
            begun = now()
            outer, self._generates = self._generates, True
            try:
                output = plain(*positional, **keywords)
            finally:
                self._generates = outer
                self._total.generation_seconds += now() - begun
            if isinstance(output, torch.Tensor):  # TRL's call, and not a check of the first generation
                self.samples.append(hashlib.sha256(output.cpu().numpy().tobytes()).hexdigest())
            return output

        GenerationMixin.generate = generate
        try:
            yield
        finally:
            GenerationMixin.generate = plain

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._before = StepCost(**asdict(self._total))
        self._begun = now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        generation_seconds = self._total.generation_seconds - self._before.generation_seconds
        self.steps.append(
            StepCost(
                seconds=now() - self._begun - generation_seconds,
                tokens=self._total.tokens - self._before.tokens,
                generation_seconds=generation_seconds,
                generated_tokens=self._total.generated_tokens - self._before.generated_tokens,
            )
        )


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()  # other load on the machine counts less


def measured(job: Job, folder: Path) -> RunResult:
    """Train for a few steps, and write the weights to `folder`."""
    parsed_arguments = _parsed(job, folder)
    training = parsed_arguments.training
    trainer_class = (
        getattr(trl, class_name(job.method, "Trainer")) if job.library == "trl" else trainer_class_of(job.method)
    )
    set_seed(training.seed)
    peak = _peak_of_process()
    meter = Meter()
    with meter.generation():
        trainer = build(job.method, parsed_arguments, trainer_class=trainer_class, most_rows=job.rows)
        meter.watch(trainer)
        initial = _trained_weights(trainer.model)
        set_seed(training.seed)  # the constructors may draw differently, the steps must not
        trainer.train()
    weights = _trained_weights(trainer.model)
    torch.save(weights, folder / WEIGHTS)
    squares = [(weights[name].double() - x.double()).square().sum().item() for name, x in initial.items()]
    precision = str(next(trainer.model.parameters()).dtype).removeprefix("torch.")
    autocast = trainer.accelerator.mixed_precision
    return RunResult(
        steps=meter.steps,
        log=[_numbers(entry) for entry in trainer.state.log_history if "loss" in entry],
        samples=meter.samples,
        initial_weights=_hash_of(initial),
        change=sum(squares) ** 0.5,
        peak_mib=peak(),
        precision=precision if autocast in ("no", None) else f"{precision}, {autocast} autocast",
        device=trainer.accelerator.device.type,
        drops_out=any(isinstance(x, torch.nn.Dropout) and x.p > 0 for x in trainer.model.modules()),
        micro_batches=trainer.args.gradient_accumulation_steps,
        modules=sorted(name for name in sys.modules if name.startswith("trl_ext.")),
    )


def _parsed(job: Job, folder: Path) -> Parsed:
    script_class, config_class, model_class, mixture_class = dataclasses_of(job.method)
    if job.library == "trl":
        config_class = getattr(trl, class_name(job.method, "Config"))
    line = read(job.method, "trl-ext compare", job.words)
    parser = OneLineParser((script_class, config_class, model_class, mixture_class), prog=line.prog)
    # What only our config has is left over for TRL's
    script, training, model, mixture, _ = parser.parse_args_and_config(line.all_words, return_remaining_strings=True)
    training.output_dir = str(folder / "output")
    training.max_steps = job.steps
    training.logging_strategy = "steps"
    training.logging_steps = 1
    training.logging_first_step = True
    training.save_strategy = "no"
    training.eval_strategy = "no"
    training.report_to = []
    training.push_to_hub = False
    training.disable_tqdm = True
    if hasattr(training, "log_completions"):
        training.log_completions = False
    if hasattr(training, "reference_store_dir"):
        training.reference_store_dir = str(folder / "store")  # nothing from an earlier run
    if hasattr(training, "show_plan"):
        training.show_plan = False
    return Parsed(script, training, model, mixture, None, [], [])


def _peak_of_process() -> Callable[[], float | None]:
    """Return a function that returns the peak of memory since now, in MiB; `None` where it cannot be read."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        return lambda: (torch.cuda.max_memory_allocated() - before) / 2**20
    try:
        Path("/proc/self/clear_refs").write_text("5")
        resident = _status("VmRSS")
        return lambda: _status("VmHWM") - resident
    except OSError:
        return lambda: None


def _status(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key))


def _trained_weights(model: Any) -> dict[str, torch.Tensor]:
    named = ((name, x) for name, x in model.named_parameters() if x.requires_grad)
    return {name: x.detach().to("cpu", copy=True) for name, x in named}


def _hash_of(weights: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name, weight in sorted(weights.items()):
        digest.update(name.encode())
        digest.update(weight.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _numbers(entry: dict[str, Any]) -> dict[str, float]:
    return {name: float(x) for name, x in entry.items() if isinstance(x, int | float)}


def main() -> None:
    folder = Path(sys.argv[1])
    job = Job(**json.loads((folder / JOB).read_text()))
    result = measured(job, folder)
    (folder / RESULT).write_text(json.dumps(asdict(result)))
