"""The files of tests: pytest imports them by their base names, and CI runs each of them once, as README.md says."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SUITE = ".venv/bin/python -m pytest -q"


@pytest.fixture(scope="module")
def listed() -> list[str]:
    """What CI would run, a command a line."""
    done = subprocess.run([ROOT / ".ci/run", "--list"], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_each_file_has_a_name_of_its_own():
    names = Counter(path.name for path in ROOT.joinpath("tests").rglob("*.py"))
    assert [name for name, times in names.items() if times > 1 and name != "conftest.py"] == []


def test_ci_runs_the_commands_of_the_readme(listed):
    section = re.search(r"^## Try it$(.*?)^## ", ROOT.joinpath("README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert section is not None
    first, second = re.findall(r"^    (.*)$", section[1], re.MULTILINE)
    hello, install, *groups = listed
    assert first == hello
    assert [second] * len(groups) == [f"{install} && {group[: len(SUITE)]}" for group in groups]


def test_ci_runs_each_test_once(listed):
    groups = [line.removeprefix(SUITE).split() for line in listed[2:]]
    assert ["rest"] in groups  # all that no other group names
    files = Counter[Path]()
    for pattern in [word for group in groups for word in group if word.startswith("tests/")]:
        found = [path for place in ROOT.glob(pattern) for path in ([place] if place.is_file() else place.rglob("*"))]
        assert found, pattern
        files.update(path for path in found if path.name.startswith("test_") and path.suffix == ".py")
    assert [path for path, times in files.items() if times > 1] == []
