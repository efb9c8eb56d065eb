"""Hooks of MkDocs: set the order of pages, copy the project files that pages link to, and make the API page.

The pages are written for a reader of the repository. Here a link out of docs/ leads to a copy of that file on the site,
below project/, and each name in docs/reference/api.md gets its whole docstrings.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PROJECT = ("*.md", "LICENSE", "tests/README.md", "examples/**/*")
"""Files that pages may link to, beside those of docs/."""
_LINK = re.compile(r"\]\((?!\w+:|#)([^)\s#]+)(#[^)\s]*)?\)")
_copies: dict[str, str] = {}
"""The place on the site of each file of PROJECT."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Make the navigation from docs/index.md.

    A line in bold is a tab, and a line in italics a section of it. Pages are in the tab or section above their link,
    but those that are not in a folder of docs/, such as the glossary, are in the first tab. Links above all tabs
    have no place in it.
    """
    overview: list[Any] = [{config.site_name: "index.md"}]
    tabs: list[dict[str, Any]] = [{"Overview": overview}]
    here: list[Any] = []
    line = re.compile(r"^\*\*(.+?)\*\*|^\*([^*]+)\*$|\]\(([^)\s#]+\.md)\)", re.MULTILINE)
    for tab, section, link in line.findall(Path(config.docs_dir, "index.md").read_text()):
        if tab:
            here = of_tab = []
            tabs.append({tab: here})
        elif section:
            here = []
            of_tab.append({section: here})
        elif link.startswith("../"):
            overview.append(f"project/{link.removeprefix('../')}")
        else:
            (here if "/" in link else overview).append(link)
    config.nav = tabs
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files of PROJECT: pages and pictures as they are, other files as pages with their text."""
    for path in sorted(path for pattern in PROJECT for path in ROOT.glob(pattern) if path.is_file()):
        name = path.relative_to(ROOT).as_posix()
        if "__pycache__" in name:
            continue
        content, place = path.read_bytes(), f"project/{name}"
        if path.suffix not in (".md", ".png", ".svg"):
            place += ".md"
            content = b"# %s\n\n~~~~%s\n%s\n~~~~\n" % (name.encode(), path.suffix[1:].encode() or b"text", content)
        _copies[name] = place
        files.append(File.generated(config, place, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between docs/ and the rest of the project into links of the site, and write the API."""
    here = page.file.src_uri
    original = here.removeprefix("project/") if here.startswith("project/") else f"docs/{here}"

    def on_site(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(original), link[1]))
        if not (ROOT / target).exists():  # a wrong link, of which mkdocs warns; or code, such as handlers[0](event)
            return link[0]
        place = _copies.get(target, target.removeprefix("docs/"))
        return f"]({posixpath.relpath(place, posixpath.dirname(here))}{link[2] or ''})"

    if original.endswith(".md"):
        markdown = _LINK.sub(on_site, markdown)
    if here == "index.md":
        page.meta["title"] = config.site_description  # in the browser's title, before the name of the site
    if here == "reference/api.md":
        entry = re.compile(r"^### (\w+)\n.*?(?=^##|\Z)", re.MULTILINE | re.DOTALL)
        markdown = entry.sub(r"### \1\n\n::: rlinf_actors.\1\n\n", markdown)
    return markdown
