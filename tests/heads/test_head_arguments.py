"""Bad input to the head raises one error that names the argument, the value given and what is allowed."""

import pytest
import torch

from trl_ext import linear_log_probs

HIDDEN, WEIGHT, TARGETS = torch.randn(2, 3, 8), torch.randn(11, 8), torch.zeros(2, 3, dtype=torch.long)

REFUSED = {
    "hidden as integers": ({"hidden": torch.zeros(2, 3, 8, dtype=torch.long)}, TypeError, "`hidden`.*torch.int64"),
    "weight as integers": ({"weight": torch.zeros(11, 8, dtype=torch.uint8)}, TypeError, "`weight`.*torch.uint8"),
    "bias as integers": ({"bias": torch.zeros(11, dtype=torch.int)}, TypeError, "`bias`.*torch.int32"),
    "targets as floats": ({"targets": torch.zeros(2, 3)}, TypeError, "`targets`.*torch.float32"),
    "targets as a mask": ({"targets": torch.zeros(2, 3, dtype=torch.bool)}, TypeError, "`targets`.*torch.bool"),
    "hidden as a list": ({"hidden": [[1.0]]}, TypeError, "`hidden`.*list"),
    "weight of three dimensions": ({"weight": torch.randn(1, 11, 8)}, ValueError, r"`weight`.*\(1, 11, 8\)"),
    "a vocabulary of one": ({"weight": torch.randn(1, 8)}, ValueError, r"`weight`.*at least 2.*\(1, 8\)"),
    "another hidden size": ({"hidden": torch.randn(2, 3, 9)}, ValueError, r"`hidden`.*\(2, 3, 9\)"),
    "no hidden size": ({"hidden": torch.tensor(1.0)}, ValueError, r"`hidden`.*\(\)"),
    "other targets": ({"targets": torch.zeros(2, 4, dtype=torch.long)}, ValueError, r"`targets`.*\(2, 3\).*\(2, 4\)"),
    "another bias": ({"bias": torch.randn(10)}, ValueError, r"`bias`.*\(11,\).*\(10,\)"),
    "a target too high": ({"targets": TARGETS + 11}, ValueError, r"`targets`.*\[0, 11\).*11 to 11"),
    "the ignored label": ({"targets": TARGETS - 100}, ValueError, r"`targets`.*-100 to -100"),
    "another device": ({"weight": torch.empty(11, 8, device="meta")}, ValueError, "`weight`.*cpu.*meta"),
    "temperature 0": ({"temperature": 0.0}, ValueError, "`temperature`.*above 0.*0.0"),
    "negative temperature": ({"temperature": -1.0}, ValueError, "`temperature`.*-1.0"),
    "temperature NaN": ({"temperature": float("nan")}, ValueError, "`temperature`.*nan"),
    "infinite scale": ({"logit_scale": float("inf")}, ValueError, "`logit_scale`.*inf"),
    "softcap 0": ({"softcap": 0.0}, ValueError, "`softcap`.*0.0"),
    "an unknown output": ({"outputs": ("log_probs", "perplexity")}, ValueError, "`outputs`.*entropy.*perplexity"),
    "one output as a string": ({"outputs": "entropy"}, ValueError, "`outputs`.*tuple.*'entropy'"),
    "no outputs": ({"outputs": ()}, ValueError, "`outputs`.*non-empty"),
    "chunks of 0": ({"chunk_size": 0}, ValueError, "`chunk_size`.*0"),
    "chunks of a half": ({"chunk_size": 0.5}, ValueError, "`chunk_size`.*0.5"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_named(case):
    changes, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        linear_log_probs(**{"hidden": HIDDEN, "weight": WEIGHT, "targets": TARGETS, **changes})


def test_good_input_is_accepted():
    assert linear_log_probs(HIDDEN, WEIGHT, TARGETS.int()).log_probs.shape == (2, 3)
