"""Micro-batches are planned in about n log n steps for n rows, and parts need the memory of one part at a time.

Steps are the interpreter's instructions, so a test does not depend on the machine.
"""

import math
import random
import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CONFIG_MAPPING, Gemma4TextConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from trl_ext.planning.cost import CostModel
from trl_ext.planning.micro_batches import RowTokens, StepRows, row_order
from trl_ext.planning.parts import Parts
from trl_ext.planning.rows import ScoredTokens


def instructions(call: Callable[[], Any]) -> int:
    """How many instructions of Python `call` runs."""
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        count += event == "opcode"
        return trace

    held = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(held)
    return count


def assert_grows_as_n_log_n(call_with: Callable[[int], Callable[[], Any]], rows: int) -> None:
    few, many = (instructions(call_with(n)) for n in (rows, 4 * rows))
    assert many < 5 * few


def shuffled_groups(rows: int, size: int, dead: float = 0.0) -> RowTokens:
    """Groups of `size` rows, some dead, with prompts and completions of many lengths."""
    draw = random.Random(0)
    prompt_B = [-1 if draw.random() < dead else row // size for row in range(rows)]
    lengths = [draw.randint(1, 2000) for _ in range(rows)]
    own_B = [0 if prompt == -1 else int(draw.lognormvariate(5, 1)) for prompt in prompt_B]
    order = draw.sample(range(rows), rows)
    prompt_tokens_B = [lengths[prompt] for prompt in prompt_B]
    return RowTokens(*([values[row] for row in order] for values in (prompt_B, prompt_tokens_B, own_B)))


SHAPES: dict[str, Callable[[int], tuple[RowTokens, int]]] = {
    "8 slices": lambda rows: (shuffled_groups(rows, 8), rows // 8),
    "groups are cut": lambda rows: (shuffled_groups(rows, 6), 8),
    "groups of many sizes": lambda rows: (shuffled_groups(rows, 8, dead=0.4), 16),
    "one group": lambda rows: (shuffled_groups(rows, rows), 4),
}


@pytest.mark.parametrize("name", SHAPES)
def test_four_times_the_rows_are_ordered_in_about_four_times_the_steps(name: str) -> None:
    def call_with(rows: int) -> Callable[[], Any]:
        fed, capacity = SHAPES[name](rows)
        return lambda: row_order(fed, StepRows(capacity, rows // capacity))

    assert_grows_as_n_log_n(call_with, 192)


def micro_batch(rows: int, prompts: int) -> tuple[dict[str, torch.Tensor], ScoredTokens]:
    generator = torch.Generator().manual_seed(0)
    prompt_ids = torch.arange(prompts).repeat_interleave(rows // prompts).unsqueeze(1)
    lengths_B = torch.randint(1, 17, (rows, 1), generator=generator)
    batch = {"prompt_ids": prompt_ids, "prompt_mask": torch.ones_like(prompt_ids)}
    return batch, ScoredTokens(torch.arange(rows), torch.arange(16) < lengths_B)


@pytest.mark.parametrize("group", [1, 4, None])
@pytest.mark.parametrize("budget", [1, 40])
def test_four_times_the_rows_are_cut_in_about_four_times_the_steps(group: int | None, budget: int) -> None:
    def call_with(rows: int) -> Callable[[], Any]:
        batch, scored = micro_batch(rows, rows // (group or rows))
        return lambda: Parts.of(batch, scored, budget, packed=True, shared=True)

    assert_grows_as_n_log_n(call_with, 192)


class _Largest(TorchDispatchMode):
    """The elements of the largest tensor that is made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.elements = max(self.elements, made.numel())
        return made


def test_parts_need_the_memory_of_one_at_a_time() -> None:
    batch, scored = micro_batch(32, 8)
    with _Largest() as largest:
        parts = Parts.of(batch, scored, 40, packed=True, shared=True)
        made: list[weakref.ref[torch.Tensor]] = []
        values = []
        for part in parts:
            assert all(mask() is None for mask in made)
            made.append(weakref.ref(part.tokens_BC))
            values.append(part.tokens_BC[part.rows_R].float())
        joined_RC = parts.join(values)
    assert len(parts) > 4
    assert torch.equal(joined_RC, scored.tokens_BC.float())
    # The copy for the host also holds ids and mask of the prompts
    assert largest.elements == scored.tokens_BC.numel() + 2 * batch["prompt_ids"].numel()


def test_every_causal_language_model_has_a_cost():
    """Also models whose layers differ, for which transformers refuses to give one number of heads."""
    known = 0
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            config = CONFIG_MAPPING[name]().get_text_config()
        except Exception:  # the config needs arguments or another library
            continue
        cost = CostModel.of(config)
        known += cost.of_pair > 0
        assert 0 < cost.of_token < math.inf, name
        assert 0 <= cost.of_scored_token < math.inf, name
    assert known > 100


def test_layers_with_different_heads_have_the_usual_proportions():
    config = Gemma4TextConfig(head_dim=16, global_head_dim=32, num_attention_heads=4, hidden_size=64)
    assert CostModel.of(config).of_pair > 0
