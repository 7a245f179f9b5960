"""Training with TRL 1.15 equals training with the installed TRL.

TRL 1.15's head needs Triton and cannot run on a CPU, so there is no comparison with stock. `TRL_EXT_OTHER_PYTHON` names
the interpreter of an environment with trl 1.15 and trl_ext, and both run the same cases from the same checkpoints.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from drop_in_cases import LOSS_TABLE
from run_losses import ALL_CASES as CASES
from tiny import REFERENCE_SEED, Workshop
from training_comparison import TOLERANCE, metric_scale

OTHER_PYTHON = os.environ.get("TRL_EXT_OTHER_PYTHON")

pytestmark = pytest.mark.skipif(
    not OTHER_PYTHON, reason="TRL_EXT_OTHER_PYTHON names no second environment; `make test-all` makes one"
)

# Every loss type of both trainers, each in the setup of the fast tier.
LOSS_CASES = [case.name for case in LOSS_TABLE if case.fast]
OTHER_CASES = [
    "dpo-use_weighting",
    "dpo-precompute",
    "dpo-experts",
    "grpo-defaults",
    "grpo-entropy-static",
    "grpo-checkpointing-lora",
    "grpo-dead-group",
    "grpo-steps_per_generation",
    "grpo-num_iterations",
    "sft-nll-full",
    "sft-packing",
    "kto-kto-lora",
    "kto-precompute",
    "rloo-defaults-full",
    "rloo-half-dead",
]

# Keys that only one version logs: none.
ONLY_HERE: frozenset[str] = frozenset()
ONLY_THERE: frozenset[str] = frozenset()


@pytest.fixture(scope="module")
def both(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the results of this environment and of the other one, by case."""
    assert OTHER_PYTHON is not None
    folder = tmp_path_factory.mktemp("versions")
    script = Path(__file__).parents[1] / "support" / "run_losses.py"
    for case in (CASES[name] for name in LOSS_CASES + OTHER_CASES):  # made here, before two processes need them
        workshop.model(case.model)
        workshop.model(case.model, seed=REFERENCE_SEED)
        if case.setup == "ref_adapter":
            workshop.adapter(case.model)
    runs = []
    for i, python in enumerate((sys.executable, OTHER_PYTHON)):
        out = folder / f"{i}.json"
        command = [python, str(script), "--checkpoints", str(workshop.root), "--out", str(out)]
        command += LOSS_CASES + OTHER_CASES
        runs.append((out, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)))
    results = []
    for out, process in runs:
        output, _ = process.communicate(timeout=900)
        assert process.returncode == 0, output[-4000:]
        results.append(json.loads(out.read_text()))
    here, there = results
    assert here["versions"]["trl"] != there["versions"]["trl"], "both interpreters have the same trl"
    return here, there


@pytest.mark.parametrize("name", LOSS_CASES + OTHER_CASES)
def test_training_is_the_same_with_both_trl_versions(name: str, both: tuple[dict[str, Any], dict[str, Any]]) -> None:
    here, there = (results["cases"][name] for results in both)
    wrong: list[str] = []

    def close(what: str, got: float | None, want: float | None, scale: float) -> None:
        if got != want and not (
            got is not None and want is not None and abs(got - want) <= TOLERANCE * max(abs(want), scale)
        ):
            wrong.append(f"{what}: there {got!r}, here {want!r}, scale {scale:.3g}")

    advantage = here["advantage"]
    assert len(here["losses"]) == len(there["losses"]) > 0
    for i, (want, got) in enumerate(zip(here["losses"], there["losses"], strict=True)):
        close(f"loss of micro-batch {i}", got, want, advantage)

    assert len(here["logs"]) == len(there["logs"]) > 0
    for i, (want_log, got_log) in enumerate(zip(here["logs"], there["logs"], strict=True)):
        assert want_log.keys() - got_log.keys() <= ONLY_HERE
        assert got_log.keys() - want_log.keys() <= ONLY_THERE
        for key in want_log.keys() & got_log.keys():
            scale = metric_scale(CASES[name], key, want_log, advantage, here["logit_size"])
            close(f"log {i} {key}", got_log[key], want_log[key], scale)

    steps = [
        (f"gradient of step {i}", *pair)
        for i, pair in enumerate(zip(here["gradients"], there["gradients"], strict=True))
    ]
    for what, want_digests, got_digests in [*steps, ("weight update", here["updates"], there["updates"])]:
        assert want_digests.keys() == got_digests.keys()
        total = sum(digest[0] ** 2 for digest in want_digests.values() if digest is not None) ** 0.5
        for tensor, want_digest in want_digests.items():
            assert (want_digest is None) == (got_digests[tensor] is None)
            for want, got in zip(want_digest or [], got_digests[tensor] or [], strict=True):
                close(f"{what} {tensor}", got, want, total)
    assert not wrong, "\n".join(wrong[:40])


def test_trl_1_15_has_every_internal_that_is_used():
    assert OTHER_PYTHON is not None
    names = str(Path(__file__).with_name("test_compat_names.py"))
    done = subprocess.run([OTHER_PYTHON, "-m", "pytest", "-q", "-n", "0", names], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
