"""How many kernels the head launches at a size for GPUs, and how many bytes they move, counted on the pretended GPU."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch

import head_counts
import pretended_gpu

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="the pretended GPU needs g++"),
    pytest.mark.skipif(torch.version.cuda is not None, reason="the pretended GPU needs a build of torch for the CPU"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="runs Triton's kernels by its interpreter"),
]
RESULTS = Path(__file__).parents[2] / "benchmarks" / "RESULTS.md"


def test_launches_and_bytes_are_those_that_the_page_gives():
    found = json.loads(pretended_gpu.python(head_counts.__file__))
    assert found.keys() == {"forward", "frozen", "trained"}
    page = RESULTS.read_text()
    for use, counts in found.items():
        assert f"| {use} | {counts['launches']} | {counts['bytes'] / 1e9:.1f} | {counts['milliseconds']:.1f} |" in page
