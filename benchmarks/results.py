"""The lines that benchmarks write: each is one measurement, with the device, the versions and the date of its run."""

import json
import os
import platform
import re
import shutil
import subprocess
import uuid
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent / "results"


def new_run() -> str:
    """Return a name for a new run. Compare only subjects of one run."""
    return uuid.uuid4().hex[:12]


def device_name(device: str) -> str:
    """Return the device's name in results; for a CPU, with the number of threads."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    threads = torch.get_num_threads()
    return f"CPU {platform.machine()}, {threads} thread{'s' * (threads > 1)}"


def origin(device: str) -> dict[str, Any]:
    """Return the device, versions and date that end every line of a run."""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return {"device": device_name(device), "versions": versions(), "date": date}


def versions() -> dict[str, str | None]:
    from trl_ext import __version__

    found = {"python": platform.python_version(), "cuda": torch.version.cuda, "trl_ext": __version__}
    for package in ("torch", "triton", "transformers", "trl", "liger_kernel", "cut_cross_entropy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        found["commit"] = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        found["commit"] = None
    return found


def add(lines: list[dict[str, Any]], folder: Path) -> Path:
    """Add lines of one run to the file of their day and device, atomically.

    If the environment variable `OUT` names a folder, the file is also copied there.
    """
    slug = re.sub(r"[^a-z0-9]+", "-", lines[0]["device"].lower())
    path = folder / f"{lines[0]['date'][:10]}-{slug}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    earlier = path.read_text() if path.exists() else ""
    temporary.write_text(earlier + "".join(json.dumps(line) + "\n" for line in lines))
    os.replace(temporary, path)
    if os.environ.get("OUT"):
        shutil.copy(path, os.environ["OUT"])
    return path
