"""Each key of a batch that the package uses stands in the table of `planning/batch_keys.py`."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from trl_ext.compat.sampled import _IMAGE_KEYS, _MERGED
from trl_ext.planning import batch_keys

PACKAGE = Path(batch_keys.__file__).parents[1]
ROOMS = ("trainers", "planning", "compat", "losses", "reference")
# Names that the package gives to a batch
BATCHES = {"batch", "trl_batch", "inputs", "draw", "pairs", "merging"}
# Where a dict is built from a batch: what a model's call takes besides, and an array of a file of the store
OF_OTHER_DICTS = {"fused_lm_head", "output_router_logits", "use_cache", "values"}


def rows() -> list[list[str]]:
    """Return the cells of the tables' rows."""
    lines = [line for line in (batch_keys.__doc__ or "").splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]


def in_table() -> set[str]:
    return {key for row in rows() for key in re.findall(r"`(\w+)`", row[0])} | set(_IMAGE_KEYS)


def is_batch(node: ast.expr) -> bool:
    if isinstance(node, ast.Subscript):  # one of several batches
        node = node.value
    return isinstance(node, ast.Name) and node.id in BATCHES


def keys_in(tree: ast.AST) -> Iterator[str]:
    """Yield the literal keys with which batches are read, asked or written."""
    for node in ast.walk(tree):
        keys: list[ast.expr | None] = []
        if isinstance(node, ast.Subscript) and is_batch(node.value):
            keys = [node.slice]
        elif isinstance(node, ast.Compare) and any(is_batch(x) for x in node.comparators):
            keys = [node.left]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and is_batch(node.func.value):
            if node.func.attr in ("get", "pop", "setdefault"):
                keys = list(node.args[:1])
        elif isinstance(node, ast.Dict) and any(key is None and is_batch(x) for key, x in _items(node)):
            keys = list(node.keys)
        for key in keys:
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                yield key.value


def _items(node: ast.Dict) -> Iterator[tuple[ast.expr | None, ast.expr]]:
    return zip(node.keys, node.values, strict=True)


def test_the_table_has_each_literal_key() -> None:
    used: dict[str, set[str]] = {}
    for room in ROOMS:
        for path in sorted((PACKAGE / room).glob("*.py")):
            for key in keys_in(ast.parse(path.read_text())):
                used.setdefault(key, set()).add(f"{room}/{path.name}")
    # The search finds the keys that every batch has
    assert {"completion_ids", "input_ids", "old_per_token_logps"} <= used.keys()
    unknown = {key: files for key, files in used.items() if key not in in_table() | OF_OTHER_DICTS}
    assert not unknown


def test_the_table_has_each_key_that_we_add() -> None:
    added = {value for name, value in vars(batch_keys).items() if name.isupper() and isinstance(value, str)}
    added |= {*batch_keys.SAMPLING_MASK_KEYS, *batch_keys.TOKEN_KEYS, _MERGED}
    assert added <= in_table()


def test_a_key_stands_once_with_all_that_is_said_of_it() -> None:
    assert all(len(row) == 4 and all(row) for row in rows())
    for table in (batch_keys.__doc__ or "").split("| key |")[1:]:
        keys = [key for line in table.splitlines() for key in re.findall(r"`(\w+)`", line[2:].partition(" | ")[0])]
        assert len(keys) == len(set(keys)) > 5


def test_keys_that_checkpoints_hold_stay() -> None:
    assert batch_keys.OLD_POLICY == "old_policy_log_probs"
    assert batch_keys.OLD_POLICY_SCORED == "old_policy_scored"
    assert batch_keys.OLD_POLICY_SAMPLER_RATIO == "old_policy_sampler_ratio"
    assert batch_keys.OLD_POLICY_SUMS == "old_policy_sums"
    assert batch_keys.SAMPLING_MASK_KEYS == ("kept_ids", "kept_counts")
    assert _MERGED == "merged_micro_batches"
