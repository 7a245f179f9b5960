"""MkDocs hook: what the docs link to in the repository is in the site too, so that every link is checked and works.

The README is the first page. A file outside docs/ that a page links to becomes a page under repository/: Markdown as it
is, a notebook as its cells, anything else as a block of code. Links are written as they work in the repository, and are
turned here.
"""

import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(?<=\]\()([^)#:\s]+)(#[^)\s]*)?(?=\))")
CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
ALWAYS = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")  # also if no page links to them
LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".txt": "text", "": "text"}

on_site: dict[str, str] = {}  # a file of the repository -> its place among the site's sources


def linked_from(path: str) -> Iterator[str]:
    """The files of the repository that a Markdown file links to; of a folder its README."""
    for match in LINK.finditer(CODE.sub("", (ROOT / path).read_text())):
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), match[1]))
        yield readme_of(target)


def readme_of(target: str) -> str:
    return f"{target}/README.md" if (ROOT / target / "README.md").exists() else target


def place_of(path: str) -> str:
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"repository/{path}" if path.endswith(".md") else f"repository/{path}.md"


def on_files(files: Files, config: Any) -> Files:
    to_read = ["README.md", *ALWAYS, *(f"docs/{file.src_uri}" for file in files.documentation_pages())]
    on_site.clear()
    on_site.update({path: place_of(path) for path in to_read})
    files.append(File.generated(config, "index.md", content=(ROOT / "README.md").read_text()))
    for path in ALWAYS:
        files.append(File.generated(config, place_of(path), content=(ROOT / path).read_text()))
    while to_read:
        for path in linked_from(to_read.pop()):
            if path in on_site or path.startswith("docs/") or not (ROOT / path).is_file():
                continue  # mkdocs warns of links that lead nowhere, and --strict makes that an error
            on_site[path] = place_of(path)
            files.append(File.generated(config, place_of(path), content=page_of(path)))
            if path.endswith(".md"):
                to_read.append(path)
    return files


def notebook(text: str) -> str:
    """A notebook's cells as Markdown, each with what it printed."""
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"````python\n{source}\n````")
        parts += [f"````text\n{''.join(x['text']).rstrip()}\n````" for x in cell.get("outputs", ()) if "text" in x]
    return "\n\n".join(parts) + "\n"


def page_of(path: str) -> str:
    text = (ROOT / path).read_text()
    if path.endswith(".ipynb"):
        text = notebook(text)
    elif not path.endswith(".md"):
        text = f"# {path}\n\n````{LANGUAGES.get(Path(path).suffix, 'text')}\n{text}\n````\n"
    return f"---\nsearch:\n  exclude: true\n---\n\n{text}"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    here = page.file.src_uri
    path = next((path for path, place in on_site.items() if place == here), None)
    if path is None or not path.endswith(".md"):
        return markdown

    def turned(match: re.Match[str]) -> str:
        target = readme_of(posixpath.normpath(posixpath.join(posixpath.dirname(path), match[1])))
        place = on_site.get(target, target.removeprefix("docs/") if target.startswith("docs/") else None)
        return match[0] if place is None else posixpath.relpath(place, posixpath.dirname(here)) + (match[2] or "")

    parts, end = [], 0
    for code in CODE.finditer(markdown):
        parts += [LINK.sub(turned, markdown[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, LINK.sub(turned, markdown[end:])])
