"""The identity of a reference: equal in two runs exactly where its log-probs of a sequence are the same."""

import enum
import hashlib
import json
import uuid
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ..version import __version__

_VERSIONS = ("torch", "transformers", "peft")


def identity_facts(
    weights_hash: str, config: dict[str, Any], in_memory: dict[str, str], **computed_with: Any
) -> dict[str, Any]:
    """All that the reference's log-probs follow from, beside the sequence, as far as it can be listed.

    Args:
        weights_hash (`str`): from `ReferenceWeights.hash`.
        config (`dict`): from `ReferenceWeights.config`.
        in_memory (`dict`): from `ReferenceWeights.in_memory`.
        computed_with (`Any`): head, mixed precision, device type, kernels.
    """
    versions = {**{name: version(name) for name in _VERSIONS}, "trl_ext": __version__}
    return {
        "weights": weights_hash,
        "config": config,
        "in_memory": in_memory,
        "computed_with": computed_with,
        "versions": versions,
    }


def identity_of(facts: dict[str, Any]) -> str:
    """32 hexadecimal digits that name the reference."""
    return hashlib.blake2b(_as_json(facts).encode(), digest_size=16).hexdigest()


def write_about(folder: Path, facts: dict[str, Any]) -> None:
    """Say in `about.json`, for people, which reference the folder belongs to."""
    unfinished = folder / f"{uuid.uuid4().hex}.unfinished"
    try:
        if not (folder / "about.json").exists():
            unfinished.write_text(_as_json(facts))
            unfinished.rename(folder / "about.json")
    except OSError:
        pass  # nothing reads it


def _as_json(facts: dict[str, Any]) -> str:
    """The same text for equal facts, in whatever order they were collected."""

    def plain(value: Any) -> Any:
        if isinstance(value, (set, frozenset)):
            return sorted(value, key=str)
        return value.value if isinstance(value, enum.Enum) else str(value)

    def with_string_keys(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(key): with_string_keys(item) for key, item in value.items()}
        return [with_string_keys(item) for item in value] if isinstance(value, (list, tuple)) else value

    return json.dumps(with_string_keys(facts), default=plain, sort_keys=True, indent=1)
