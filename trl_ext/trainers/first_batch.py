"""Which checks of the first batch an earlier run has passed: with the same model, code, versions and options.

A check that is wrongly skipped can let wrong numbers pass, and one that is repeated costs a part of a step. So it runs
wherever something is not known: with code of users, a hook that may change a forward, or weights split over ranks.
"""

import hashlib
import logging
import platform
from contextlib import nullcontext, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import datasets
import torch
from torch import Tensor, nn

from ..distributed.ranks import Ranks
from ..packing.first_batch import ROWS, columns_to_check, is_of_libraries, multiplies_fp32
from ..planning.plan import Decision
from ..reference.code import source_hash
from ..reference.segments import write_file
from ..reference.weights import ReferenceWeights, as_json, identity_of
from ..scoring.backbone import BackboneForward
from ..scoring.scorer import Scorer

logger = logging.getLogger("trl_ext")

_FOLDER = "trl_ext_first_batch"
# Packages whose code a forward may run, without a name on a module that says so
_PACKAGES = (
    "torch",
    "transformers",
    "peft",
    "trl",
    "accelerate",
    "triton",
    "kernels",
    "flash_attn",
    "flash_attn_3",
    "flash-linear-attention",
    "causal_conv1d",
    "mamba_ssm",
    "bitsandbytes",
    "torchao",
    "liger_kernel",
)
_SDP_BACKENDS = ("flash", "mem_efficient", "math", "cudnn")
_SAMPLED = 16  # numbers of each weight


class FirstBatchChecks:
    """Skips the checks of the first batch that an earlier run has passed, and records those that this run passes.

    Each model has a file of its own, because a store of reference log-probs may leave the reference out of this run.
    """

    def __init__(self, ranks: Ranks, scorer: Scorer) -> None:
        self.ranks = ranks
        self.scorer = scorer
        self.pass_file: Path | None = None  # the file that says so of the policy
        self._facts: list[tuple[BackboneForward, dict[str, Any]]] = []  # of the models that this run checks

    @property
    def folder(self) -> Path:
        return Path(datasets.config.HF_DATASETS_CACHE) / _FOLDER

    def look_up(self, models: list[Any], args: Any) -> None:
        """Skip the checks that an earlier run has passed. Every rank calls it before the first forward in training.

        Args:
            models (`list[nn.Module]`): the policy, then the reference model if there is one.
        """
        ranks = self.ranks
        self._facts = []
        if ranks.is_sharded or ranks.tensor_parallel is not None or ranks.sequence is not None or args.torch_compile:
            return
        # A reference model that was freed has no forward
        for forward, model in zip(self.scorer.forwards, models, strict=False):
            facts = self._facts_of(forward, model, args)
            # Ranks run the checks together, so all skip them, or none
            facts_of_ranks = ranks.gather_objects(facts)
            if facts is None or None in facts_of_ranks or len(set(map(as_json, facts_of_ranks))) > 1:
                continue
            if ranks.of_main(lambda facts=facts: _is_written(self._path(facts), facts)):
                forward.is_compared = True
                forward.packing.checked = True
                if forward is self.scorer.policy:
                    self.pass_file = self._path(facts)
            else:
                self._facts.append((forward, facts))

    def record(self) -> None:
        """Write what passed in this run's first step, after the ranks have agreed on it."""
        if self.ranks.accelerator.is_main_process:
            for forward, facts in self._facts:
                # Packing may be against a rule, and then there is nothing to check
                packing = forward.packing
                is_packing_same = packing.reasons == facts["packing"]
                was_checked = packing.padded_reason is not None or packing.checked_completely
                if forward.agrees_with_model and is_packing_same and was_checked:
                    path = self._path(facts)
                    with suppress(OSError):  # a full disk, or one without write access: the next run checks again
                        path.parent.mkdir(parents=True, exist_ok=True)
                        write_file(path, as_json(facts).encode())
        self._facts = []

    def decisions(self, model: Any, *, packs: bool) -> tuple[Decision, ...]:
        """Return the plan's row about the checks of `model`, the policy. There is none if nothing can be compared."""
        if self.pass_file is not None:
            reason = "An earlier run of the same model, code, versions and options has passed these checks."
            return (Decision("first batch", "reuse", reason, routine=True, folder=str(self.pass_file)),)
        is_known = is_of_libraries(model)
        if not packs and not is_known:
            return ()
        reason = f"In the first step, {self.scorer.comparison}."
        if packs:
            rows = f"Up to {ROWS + 1} rows of at most {columns_to_check(model)} tokens"
            reason += f" {rows} run padded and packed, to compare hidden states."
        if not is_known:
            reason += " These rows are long, because the model runs code that is not part of a library."
        return (Decision("first batch", "run", reason, routine=is_known),)

    def _path(self, facts: dict[str, Any]) -> Path:
        return self.folder / f"{identity_of(facts)}.json"

    def _facts_of(self, forward: BackboneForward, model: Any, args: Any) -> dict[str, Any] | None:
        """Return what the result of the checks depends on; `None` if that is not known, or they have run."""
        if forward.is_compared or forward.packing.checked:
            return None
        try:
            return self._known_facts(forward, self.ranks.accelerator.unwrap_model(model), args)
        except Exception as error:  # of a model's attributes, which may be anything
            logger.debug(f"The checks of the first batch run again: {error}")
            return None

    def _known_facts(self, forward: BackboneForward, model: Any, args: Any) -> dict[str, Any] | None:
        weights = ReferenceWeights.of_model(model)
        is_moved = hasattr(model, "hf_device_map") or any(hasattr(x, "_hf_hook") for x in model.modules())
        if is_moved or not is_of_libraries(weights.base):
            return None
        accelerator = self.ranks.accelerator
        device = accelerator.device
        return {
            "model": weights.config,
            "in_memory": weights.in_memory(lambda _: nullcontext()),  # raises an error for code of users
            "weights": _weights_of(weights, model),
            "classes": _sources_of(model),
            **forward.facts,
            "packing": forward.packing.reasons,
            "columns": columns_to_check(weights.base),
            "training": {
                "mixed_precision": accelerator.mixed_precision,
                "processes": accelerator.num_processes,
                "gradient_checkpointing": args.gradient_checkpointing,
                "use_liger_kernel": args.use_liger_kernel,
            },
            "precision": {
                "fp32": multiplies_fp32(device),
                "default": str(torch.get_default_dtype()),
                "deterministic": torch.are_deterministic_algorithms_enabled(),
                "mkldnn": torch.backends.mkldnn.enabled,
                "sdp": [getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in _SDP_BACKENDS],
            },
            "machine": {
                "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
                "processor": (platform.machine(), torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()),
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            "versions": {name: _version(name) for name in _PACKAGES},
            "trl_ext": _own_source(),
        }


def _is_written(path: Path, facts: dict[str, Any]) -> bool:
    """Whether the whole file is there: what was damaged on disk is not the same text."""
    with suppress(OSError):
        return path.read_bytes() == as_json(facts).encode()
    return False


def _weights_of(weights: ReferenceWeights, model: nn.Module) -> dict[str, Any]:
    """Return dtype and shape of each tensor, and a few of its numbers.

    A trained checkpoint may show a fault that zeros hide. The adapters' numbers are drawn anew in each run, so of
    them only counts whether they are all 0.
    """
    base = dict(ReferenceWeights(model).tensors())
    samples: list[Tensor] = []
    facts: dict[str, Any] = {}
    for name, tensor in weights.tensors():
        place = f"{tensor.dtype} {tuple(tensor.shape)} {tensor.device.type}"
        if name in base:
            facts[name] = place
            numbers = tensor.detach().flatten()
            at = torch.linspace(0, max(len(numbers) - 1, 0), min(_SAMPLED, len(numbers)), device=numbers.device)
            samples.append(numbers[at.long()].double())
        else:
            facts[name] = [place, bool(tensor.detach().any())]
    by_device: dict[torch.device, list[Tensor]] = {}
    for sample in samples:
        by_device.setdefault(sample.device, []).append(sample)
    numbers_of_devices = [torch.cat(parts).cpu().numpy().tobytes() for parts in by_device.values()]
    digest = hashlib.blake2b(b"".join(numbers_of_devices), digest_size=16).hexdigest()
    return {"tensors": identity_of(facts), "sample": digest}


def _sources_of(model: nn.Module) -> list[str]:
    """Return the classes of all modules, and of their bases, with a hash of each one's source file."""
    classes: set[Any] = {part for module in model.modules() for part in type(module).__mro__}
    return sorted(f"{part.__module__}.{part.__qualname__} {_source_of(part)}" for part in classes)


@cache
def _source_of(part: Any) -> str:
    return source_hash(part)


@cache
def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def _own_source() -> str:
    """Return a hash of our own code, which may change without its version in a checkout."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
