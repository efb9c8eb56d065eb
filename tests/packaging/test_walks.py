"""The maps of the code are true: the walks of the architecture page, its layers, and the answers of find.md."""

from __future__ import annotations

import ast
import configparser
import re
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
QUESTION = re.compile(r"^\| ([^|]+\?) \| `([^`]+)` \|$", re.MULTILINE)
MOST = 12
"""Files that a walk may name."""


def walks() -> dict[str, list[str]]:
    """The files of each walk, in order."""
    section = PAGE.partition("\n## Walks\n")[2]
    parts = re.split(r"^### (.*)$", section, flags=re.MULTILINE)[1:]
    return {
        title: re.findall(r"^\d+\. `([^`]+)`: ", text, re.MULTILINE)
        for title, text in zip(parts[::2], parts[1::2], strict=True)
    }


WALKS = walks()


def module(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@cache
def imported(path: str) -> frozenset[str]:
    """The modules that a file names in its imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(found)


def test_there_are_walks_of_a_call_a_launch_a_send_and_a_workers_end():
    assert [*WALKS][:4] == ["A call", "A launch", "A send", "A worker's end"]


@pytest.mark.parametrize("title", WALKS)
def test_each_file_of_a_walk_imports_or_is_imported_by_the_one_before(title):
    files = WALKS[title]
    assert [path for path in files if not (ROOT / path).is_file()] == []
    assert 5 <= len(set(files)) <= MOST
    strangers = [
        (one, other) for one, other in pairwise(files)
        if module(other) not in imported(one) and module(one) not in imported(other)
    ]  # fmt: skip
    assert strangers == []


@pytest.mark.parametrize("title", WALKS)
def test_a_walk_names_what_its_files_have(title):
    """Names in code font, such as `WorkerGroup.__getattr__`, are defined or used in the file of their line."""
    section = PAGE.partition(f"\n### {title}\n")[2].partition("\n### ")[0]
    for path, text in re.findall(r"^\d+\. `([^`]+)`: (.*)$", section, re.MULTILINE):
        source = (ROOT / path).read_text()
        for name in re.findall(r"`([^`]+)`", text) + re.findall(r"\b[A-Z]\w+[A-Z]\w+\b", text):
            for part in re.findall(r"\w+", name):
                if part not in ("ZeroMQ", "step"):
                    assert re.search(rf"\b{part}\b", source), f"{path} has no {part}"


def test_the_picture_of_layers_is_the_one_that_import_linter_checks():
    config = configparser.ConfigParser()
    config.read(ROOT / ".importlinter")
    layers = [line.strip() for line in config["importlinter:contract:layers"]["layers"].strip().splitlines()]
    drawn = PAGE.partition("\n## Layers\n")[2].partition("```text\n")[2].partition("```")[0]
    shown = [re.split(r"  +", line)[0].strip() for line in drawn.splitlines() if not line.startswith(" ")]
    assert shown == layers


def test_thirty_questions_have_their_files():
    answers = QUESTION.findall((ROOT / "docs" / "find.md").read_text())
    assert len(answers) >= 30
    assert [path for _, path in answers if not (ROOT / path).is_file()] == []
