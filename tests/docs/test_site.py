"""The documentation site: each page is in the navigation and keeps its length, and what pages name exists."""

import pydoc
import re
from pathlib import Path

import pytest

from doc_blocks import ROOT, pages

LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)\s]*)?\)")
NAMED = re.compile(r"`([\w.-]+/[\w./-]*(?:\.py|/))`")
CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)

# The most words of a page. A longer page is two pages, or says something twice
WORDS = {
    "README.md": 1000,
    # Guides
    "faster-grpo.md": 800,
    "less-memory.md": 800,
    "several-gpus.md": 850,
    "adapters.md": 800,
    "vllm.md": 900,
    "migrating.md": 800,
    "watching.md": 400,
    "checkpoints.md": 500,
    # Reference
    "supported.md": 1000,
    "comparison.md": 900,
    "arguments.md": 1250,
    "losses.md": 800,
    "metrics.md": 600,
    "command-line.md": 1275,
    "errors.md": 1800,
    "skipped-work.md": 1030,
    "reference-log-probs.md": 700,
    "performance.md": 1050,
    "exactness.md": 1600,
    "api.md": 200,
    # Design notes
    "architecture.md": 1200,
    "design-notes.md": 1100,
    "exact-head.md": 880,
    "packing.md": 720,
    "overflow.md": 450,
    "sharding.md": 900,
    "scaling.md": 1100,
    "extending.md": 600,
    "safety.md": 300,
}
ALL_WORDS = 24_050


def words_of(page: Path) -> int:
    """What has a letter or a digit between spaces: not the bars of tables, which `wc -w` counts too."""
    return sum(bool(re.search(r"\w", word)) for word in page.read_text().split())


def test_every_page_has_a_length():
    assert {"README.md", *(path.name for path in (ROOT / "docs").glob("*.md"))} == WORDS.keys()


@pytest.mark.parametrize("name", WORDS)
def test_a_page_keeps_its_length(name: str):
    page = ROOT / name if name == "README.md" else ROOT / "docs" / name
    assert words_of(page) <= WORDS[name]


def test_all_pages_together_are_short():
    assert words_of(ROOT / "README.md") + sum(map(words_of, (ROOT / "docs").glob("*.md"))) < ALL_WORDS


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text().split("\nnav:")[1]
    listed = set(re.findall(r": (\S+\.md)$", navigation, re.MULTILINE))
    assert {path.name for path in (ROOT / "docs").glob("*.md")} == {x for x in listed if "/" not in x} - {"index.md"}


def test_every_link_leads_to_a_file():
    gone = []
    for page in pages():
        for target in LINK.findall(CODE.sub("", page.read_text())):
            if not (page.parent / target).resolve().exists():
                gone.append(f"{page.relative_to(ROOT)}: {target}")
    assert gone == []


def test_every_file_that_the_pages_name_exists():
    roots = (ROOT, ROOT / "trl_ext")
    named, gone = set(), []
    for page in pages():
        # The architecture names packages without their root
        if page.name != "architecture.md":
            named |= (found := {x for x in NAMED.findall(page.read_text()) if x.endswith(".py") or "trl_ext/" in x})
            gone += [f"{page.name}: {x}" for x in sorted(found) if not any((root / x).exists() for root in roots)]
    assert len(named) > 10
    assert gone == []


def test_the_python_api_names_what_exists():
    named = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert len(named) > 5
    assert [x for x in named if pydoc.locate(x) is None] == []


def test_pages_show_every_image_and_every_image_exists():
    shown = {Path(x).name for page in pages() for x in re.findall(r"!\[[^]]*\]\(([^)]+\.png)\)", page.read_text())}
    assert shown == {path.name for path in (ROOT / "docs" / "images").glob("*.png")}
