"""The site builds without a network and without a warning, loads nothing from elsewhere, and is whole."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

import rlinf_actors
from tests.browser import chromium, needs_chromium

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(path.relative_to(ROOT / "docs") for path in ROOT.glob("docs/**/*.md"))
HELP = "A new page needs a line in docs/index.md, which is the navigation. See CONTRIBUTING.md, The site"
LOADED = {
    "script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src", "video": "src", "audio": "src",
    "object": "data", "embed": "src", "image": "href", "use": "href",
}  # fmt: skip
BLOCKS = {"h1", "h2", "h3", "h4", "ul", "ol", "li", "pre", "table", "tr", "td", "th", "blockquote", "img"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),  # of the first test, which builds the site
    pytest.mark.skipif(
        sys.version_info < (3, 11) or (importlib.util.find_spec("mkdocs") is None and not os.environ.get("CI")),
        reason="needs the extra docs (on Python 3.11 or later): pip install -e '.[docs]' -c constraints.txt",
    ),
]


class Tags(HTMLParser):
    """The tags of a page: all of them, and those of its article."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.all: list[tuple[str, dict[str, str | None]]] = []
        self.article: list[str] = []
        self._inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.all.append((tag, dict(attrs)))
        self._inside |= tag == "article"
        if self._inside:
            self.article.append(tag)

    def handle_endtag(self, tag: str) -> None:
        self._inside &= tag != "article"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. root builds it without a network, so that a plugin that asks for something fails."""
    out = tmp_path_factory.mktemp("site")
    alone = ["unshare", "-n"] if os.geteuid() == 0 else []
    done = subprocess.run(
        [*alone, sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(out)],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, stdin=subprocess.DEVNULL, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{HELP}"
    return out


def built(site: Path, page: Path) -> str:
    return (site / page.with_suffix(".html")).read_text()


def test_nothing_is_loaded_from_elsewhere(site):
    foreign = re.compile(r"(https?:)?//", re.IGNORECASE)
    for path in site.rglob("*.html"):
        for tag, attributes in Tags(path.read_text()).all:
            loaded = [attributes.get(name) or "" for name in (LOADED[tag], "srcset")] if tag in LOADED else []
            assert [address for address in loaded if foreign.match(address)] == [], path
    for path in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*[\"']?(https?:)?//", path.read_text()), path


def test_every_page_is_in_the_navigation(site):
    links = {attributes.get("href") for tag, attributes in Tags((site / "index.html").read_text()).all if tag == "a"}
    assert [str(page) for page in PAGES if str(page.with_suffix(".html")) not in links] == [], HELP


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_a_page_has_the_same_parts_here_as_in_the_repository(site, page):
    """In both dialects of Markdown. What is below an item of a list is indented by four spaces to be part of it."""
    if page.name == "api.md":
        return  # whole docstrings here, summaries there
    there = Tags(f"<article>{MarkdownIt('commonmark').enable('table').render((ROOT / 'docs' / page).read_text())}")
    counts = [Counter(tag for tag in tags.article if tag in BLOCKS) for tags in (Tags(built(site, page)), there)]
    assert counts[0] == counts[1]


def test_every_public_name_has_its_whole_docstring(site):
    text = built(site, Path("reference/api.md"))
    entries = {name: entry for name, _, entry in (part.partition('"') for part in text.split('<h3 id="')[1:])}
    for name in [name for name in rlinf_actors.__all__ if name != "__version__"]:
        entry = entries[name.lower()]
        assert "doc-contents" in entry, f"{name}: mkdocstrings has written nothing"
        thing = getattr(rlinf_actors, name)
        if inspect.isclass(thing) and thing.__name__ == name and (said := thing.__doc__):
            words = " ".join(re.findall(r"\w+", said.split("\n\n")[0]))
            assert words in " ".join(re.findall(r"\w+", re.sub(r"<[^>]+>|&\w+;", "", entry))), name
    assert "\nrecv_tensor(\n" in re.sub(r"<[^>]+>", "", text), "no formatter has broken the signature into lines"


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    """A web server with the site."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()
        thread.join()


@needs_chromium
async def test_search_finds_a_page_from_a_server_and_from_files_and_asks_no_other_server(site, address):
    index = json.loads((site / "search" / "search_index.json").read_text())
    known = {entry["location"].partition("#")[0] for entry in index["docs"]}
    assert known >= {str(page.with_suffix(".html")) for page in PAGES}
    faults: list[str] = []
    async with chromium() as browser:
        for root in (address, f"{site.as_uri()}/"):
            page = await browser.new_page()
            page.on("request", lambda sent, root=root: sent.url.startswith(root) or faults.append(sent.url))
            page.on("pageerror", lambda error: faults.append(str(error)))
            await page.goto(f"{root}index.html")
            await page.get_by_role("textbox", name="Search").press_sequentially("deadlock")  # read at each key
            found = page.locator("a.md-search-result__link[href*='debug-a-hang.html']").first
            await found.click()
            await page.wait_for_url("**/debug-a-hang.html*")
    assert faults == []
