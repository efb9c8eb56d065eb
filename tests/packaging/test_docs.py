"""Links of pages lead to what is there, pages that code names exist, and generated pages are current."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

import msgspec
import pytest
import reference_pages

from rlinf_actors.config import cluster_config, component_rules

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "tests/*.md") for path in ROOT.glob(pattern)
)
NAMES = [str(path.relative_to(ROOT)) for path in PAGES]


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=NAMES)
def test_links_lead_to_pages_and_headings(path):
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_pictures_are_shown_have_a_text_and_are_small():
    shown = set()
    for path in PAGES:
        for text, link in re.findall(r"!\[(.*?)\]\(([^)\s]+)\)", path.read_text(), re.DOTALL):
            assert len(text) > 10, f"{path.name}: say what {link} shows"
            shown.add((path.parent / link).resolve())
    made = {path for kind in ("png", "svg") for path in ROOT.joinpath("docs").rglob(f"*.{kind}")}
    assert shown == made
    assert {path.name for path in made if path.stat().st_size >= 150_000} == set()


def test_every_page_of_docs_is_in_the_index():
    index = ROOT / "docs" / "index.md"
    linked = {(index.parent / link).resolve() for link in re.findall(r"\]\(([^)\s#]+)\)", index.read_text())}
    assert [name for name, path in zip(NAMES, PAGES, strict=True) if name.startswith("docs/") and path != index
            and path not in linked] == []  # fmt: skip


def test_the_index_begins_as_readme_does():
    """Its description, first command and chart are README's."""
    begins = ROOT.joinpath("docs", "index.md").read_text().partition("\n## What do you want to do?\n")[0]
    readme = ROOT.joinpath("README.md").read_text().replace("](docs/", "](").split("\n\n")
    assert [part for part in begins.strip().split("\n\n") if part not in readme] == []


def test_pages_that_code_names_exist():
    for package in ("rlinf_actors", "agentd", "tests", "examples", "benchmarks"):
        for path in ROOT.joinpath(package).rglob("*.py"):
            for name in re.findall(r"\bdocs/[\w/-]+\.md\b", path.read_text()):
                assert ROOT.joinpath(name).exists(), f"{path.relative_to(ROOT)} names {name}"


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="signatures and help texts differ between versions")
@pytest.mark.parametrize("name", reference_pages.PAGES)
def test_generated_pages_are_current(name):
    written = (reference_pages.FOLDER / name).read_text()
    assert written == reference_pages.PAGES[name](), "run: python -m tests.reference_pages"


def test_every_key_of_the_cluster_section_is_documented():
    structs = [
        kind
        for module in (cluster_config, component_rules)
        for kind in vars(module).values()
        if inspect.isclass(kind) and issubclass(kind, msgspec.Struct) and kind.__module__ == module.__name__
    ]
    keys = {field.encode_name for kind in structs for field in msgspec.structs.fields(kind)}
    page = (reference_pages.FOLDER / "configuration.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == keys
