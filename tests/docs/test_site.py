"""The documentation site: each page is in the navigation, and what pages name exists."""

import pydoc
import re
from pathlib import Path

from doc_blocks import ROOT, pages

LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)\s]*)?\)")
NAMED = re.compile(r"`([\w.-]+/[\w./-]*(?:\.py|/))`")
CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)


def test_every_page_is_in_the_navigation_or_for_contributors():
    settings, navigation = (ROOT / "mkdocs.yml").read_text().split("\nnav:")
    listed = re.findall(r"^  - .+: (\S+\.md)$", navigation, re.MULTILINE)
    contributors = re.findall(r"^  ([\w-]+\.md)$", settings.split("not_in_nav: |\n")[1].split("\n\n")[0], re.MULTILINE)
    pages_of_docs = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert pages_of_docs == {*listed, *contributors} - {"index.md"}
    assert not {*listed} & {*contributors}
    assert len(listed) == 16


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
