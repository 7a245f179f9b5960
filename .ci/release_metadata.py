"""Write the repository's address into what PyPI shows: project URLs, and absolute links in the README.

    python .ci/release_metadata.py https://github.com/OWNER/NAME v0.1.0

The publishing workflow runs this on its checkout, with the repository that it runs in and the tag that it builds. A
clone does not know where it is published, so pyproject.toml has no address that could be wrong.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINK_TO_FILE = re.compile(
    r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?!https?:|#)(?P<target>[^)\s]+)\)"
)  # to a file of the repository
URLS = """[project.urls]
Source = "{url}"
Documentation = "{url}/tree/{tag}/docs"
Changelog = "{url}/blob/{tag}/CHANGELOG.md"
Issues = "{url}/issues"

[project.scripts]"""


PLACEHOLDER = "https://github.com/OWNER/trl-ext"  # the repository's address in the README


def absolute_links(readme: str, url: str, tag: str) -> str:
    """The README with the repository's address, links to its files at `tag`, and images in their raw form."""

    def absolute(match: re.Match[str]) -> str:
        kind = "raw" if match["image"] else "blob"
        return f"{match['image']}[{match['text']}]({url}/{kind}/{tag}/{match['target']})"

    return LINK_TO_FILE.sub(absolute, readme.replace(PLACEHOLDER, url))


def with_urls(project: str, url: str, tag: str) -> str:
    """The text of pyproject.toml with the table of project URLs."""
    return project.replace("[project.scripts]", URLS.format(url=url, tag=tag), 1)


def main(url: str, tag: str) -> None:
    for name, written in (("README.md", absolute_links), ("pyproject.toml", with_urls)):
        path = ROOT / name
        path.write_text(written(path.read_text(encoding="utf-8"), url, tag), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
