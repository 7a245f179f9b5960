"""The documentation site: every page is in its navigation, and every file that the docs link to is there."""

import re
from pathlib import Path

from doc_blocks import ROOT, pages

LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)\s]*)?\)")
CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)


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


def test_the_images_of_the_pages_are_there_and_all_of_them_are_shown():
    shown = {Path(x).name for page in pages() for x in re.findall(r"!\[[^]]*\]\(([^)]+\.png)\)", page.read_text())}
    assert shown == {path.name for path in (ROOT / "docs" / "images").glob("*.png")}
