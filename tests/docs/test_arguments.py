"""config.py states each added field once: help(), `--help` and docs/arguments.md say the same."""

import inspect
import re
from dataclasses import fields
from typing import Any

import pytest

from doc_messages import ROOT
from trl_ext import config

ADDED = {
    "All configs": config.AddedCommonFields,
    "All but `DistillationConfig` and `RewardConfig`": config.AddedFields,
    "All but `SFTConfig`, `DistillationConfig` and `RewardConfig`": config.AddedReferenceFields,
    "`DPOConfig` and `GRPOConfig`": config.AddedStepFields,
    "`DPOConfig` and `KTOConfig`": config.AddedStoreFields,
    "`GRPOConfig` and `RLOOConfig`": config.AddedGroupFields,
    "`DPOConfig`": config.AddedDPOFields,
    "`GRPOConfig`": config.AddedGRPOFields,
    "`DistillationConfig`": config.AddedDistillationFields,
}


def stated(added: Any) -> list[tuple[str, str, str, str]]:
    """Of each field that a class itself adds: name, type, default and help, as Markdown."""
    by_name = {x.name: x for x in fields(added)}
    found = []
    # Not `field.type`, which transformers' parser changes
    for name, kind in inspect.get_annotations(added).items():
        default = by_name[name].default
        shown = f'"{default}"' if isinstance(default, str) else str(default)
        kind = kind.__name__ if isinstance(kind, type) else str(kind).removesuffix(" | None")
        found.append((name, kind, shown, by_name[name].metadata["help"]))
    return found


def rows(title: str) -> list[str]:
    """The rows of the page's table below a heading, without the links of names."""
    page = (ROOT / "docs" / "arguments.md").read_text()
    table = page.split(f"\n## {title}\n")[1].split("\n## ")[0]
    found = [line for line in table.splitlines() if line.startswith("| ") and not line.startswith("| field")]
    return [re.sub(r"^\| \[(`\w+`)\]\([^)]+\)", r"| \1", line) for line in found]


@pytest.mark.parametrize("title", ADDED)
def test_the_page_has_every_field_with_its_type_default_and_help(title: str):
    # A bar in a cell is escaped
    expected = [
        f"| `{name}` | `{kind.replace('|', chr(92) + '|')}` | `{default}` | {text} |"
        for name, kind, default, text in stated(ADDED[title])
    ]
    assert rows(title) == expected


@pytest.mark.parametrize("of", config.ADDED_FIELDS)
def test_the_docstring_has_every_field_with_its_type_default_and_help(of: Any):
    said = " ".join(inspect.getdoc(of).split())
    added = [cls for cls in ADDED.values() if issubclass(of, cls)]
    assert added
    for name, kind, default, text in [x for cls in added for x in stated(cls)]:
        defaults = "" if default == "None" else f", defaults to `{default}`"
        assert f"{name} (`{kind}`, *optional*{defaults}): {text}" in said
