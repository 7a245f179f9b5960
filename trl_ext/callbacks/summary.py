"""What a run says when it ends: tokens that ran, time by phase, and where the model is."""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peft import PeftModel

from .progress import show

# Phases of a GRPO or RLOO step, besides training
_OF_STEP = ("generation", "rewards", "passes")


class PhaseTimes:
    """The seconds of each phase of a training, on the clock of this process. No device is waited for."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._in_phase = False
        self._begun = time.monotonic()
        self._has_generation = False
        self._logged_step = 0
        self._logged_at = self._begun
        self._logged_seconds: dict[str, float] = {}

    @contextmanager
    def measured(self, phase: str) -> Iterator[None]:
        """Count the `with` block as `phase`. A phase within another one counts as the outer one."""
        if self._in_phase:
            yield
            return
        begun = time.monotonic()
        self._in_phase = True
        try:
            yield
        finally:
            self._in_phase = False
            self.seconds[phase] += time.monotonic() - begun

    def steps_begin(self, step: int, *, has_generation: bool) -> None:
        """Start counting when the first optimizer step of this training, the one after `step`, begins."""
        self._has_generation = has_generation
        self._logged_step = step
        self._mark_logged()

    def take(self, step: int) -> dict[str, float]:
        """Return the mean seconds of each phase of an optimizer step since the last call, by their names in the logs.

        Empty for a training without generation. A phase that did not run is absent.
        """
        steps = step - self._logged_step
        if not steps or not self._has_generation:
            return {}
        new_seconds = {name: x - self._logged_seconds.get(name, 0.0) for name, x in self.seconds.items()}
        elapsed = time.monotonic() - self._logged_at
        phases = {name: new_seconds[name] for name in _OF_STEP if new_seconds.get(name)}
        phases["training"] = elapsed - sum(new_seconds.values())
        self._logged_step = step
        self._mark_logged()
        return {f"seconds/{name}": x / steps for name, x in phases.items()}

    def _mark_logged(self) -> None:
        self._logged_at = time.monotonic()
        self._logged_seconds = dict(self.seconds)

    def line(self) -> str:
        """Return the time since this object was made, and that of each phase. The rest is steps and start-up."""
        total = time.monotonic() - self._begun
        phases = {**self.seconds, "other (steps, start-up)": total - sum(self.seconds.values())}
        # Not "0.0 s"
        times = [f"{name} {_readable(seconds)}" for name, seconds in phases.items() if seconds >= 0.05]
        parts = f": {', '.join(times)}" if len(times) > 1 else ""
        return f"Training took {_readable(total)}{parts}."


def tokens_line(processed: int, skipped: Counter[str], processes: int) -> str | None:
    """Return what a training processed, and what TRL would have; `None` if no token was counted.

    Args:
        processed (`int`): tokens of all passes and processes.
        skipped (`Counter[str]`): `tokens`, `generation_tokens` and `rows` of all processes, `passes` of each. A pass
            that checks stored values counts as -1.
    """
    if not processed:
        return None
    text = f"Processed {processed:,} tokens"
    trl_tokens = processed + skipped["tokens"] + skipped["generation_tokens"]
    if trl_tokens != processed:
        share = 100 * processed / trl_tokens
        text += f", {share:{'.0f' if share >= 10 else '.2g'}} % of the {trl_tokens:,} that TRL would have processed"
    counts = [("forward pass", "forward passes", skipped["passes"]), ("row", "rows", skipped["rows"])]
    parts = [f"{count:,} {one if count == 1 else several}" for one, several, count in counts if count > 0]
    if skipped["passes"] > 0 and processes > 1:
        parts[0] += " on each process"
    if parts:
        text += f"; {' and '.join(parts)} skipped"
    return f"{text}."


def show_saved(trainer: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
    """Show where `save_model`, which takes these arguments, has saved the model, and whether it is an adapter.

    An engine may have saved no weights. Transformers saves checkpoints with `_internal_call`.
    """
    if _internal_call:
        return
    model = trainer.model
    folder = Path(output_dir or trainer.args.output_dir)
    # PEFT saves adapters that are not "default" in folders of their own
    places = [folder, *(folder / name for name in getattr(model, "peft_config", ()))]
    adapters = [path for place in places for path in place.glob("adapter_model.*")]
    if adapters and (isinstance(model, PeftModel) or getattr(model, "_hf_peft_config_loaded", False)):
        base = getattr(model.config, "_name_or_path", "")
        show(f"The adapter is in {folder}, without its base model{f' ({base})' if base else ''}.")
    elif any("model" in path.name for pattern in ("*.safetensors", "*.bin") for path in folder.glob(pattern)):
        show(f"The model is in {folder}.")


def _readable(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, left = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {left} s"
    return f"{minutes // 60} h {minutes % 60} min"
