"""Programs of docs/how-to/ run, and print what their pages show. A program's first line is its file name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pace
import pytest

README = Path(__file__).resolve().parents[2] / "README.md"
PAGES = README.parent / "docs" / "how-to"
PROGRAM = re.compile(
    r"^```python\n(?P<text># (?P<name>\S+\.py)\n.*?)^```$(?:\n(?!^```python).*?)??\n```text\n(?P<shown>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
PROGRAMS = {
    f"{page.stem}/{found['name']}": (found["text"], found["shown"])
    for page in sorted(PAGES.glob("*.md"))
    for found in PROGRAM.finditer(page.read_text())
}

TESTS = {
    f"{page.stem}/{name}": text
    for page in sorted(PAGES.glob("*.md"))
    for text, name in re.findall(r"^```python\n(# (test_\w+\.py)\n.*?)^```$", page.read_text(), re.M | re.S)
}

pytestmark = pytest.mark.live


def run(path: Path, text: str, *command: str) -> subprocess.CompletedProcess[str]:
    path.write_text(text)
    clean = {key: value for key, value in os.environ.items() if not key.startswith("RLINF_HEAD")}
    return subprocess.run(
        [sys.executable, *command, str(path)], cwd=path.parent, env=clean, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, check=False, timeout=pace.PATIENCE_S,
    )  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_prints_what_its_page_shows(name, tmp_path):
    text, shown = PROGRAMS[name]
    done = run(tmp_path / Path(name).name, text)
    assert (done.returncode, done.stdout) == (0, shown), done.stderr


def test_first_programs_of_the_readme(tmp_path):
    asynchronous, plain, *_ = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    done = run(tmp_path / "readme.py", asynchronous + plain)
    assert (done.returncode, done.stdout) == (0, "['hi, you, from rank 0', 'hi, you, from rank 1']\n" * 2), done.stderr


@pytest.mark.parametrize("name", TESTS)
def test_tests_of_a_page_pass(name, tmp_path):
    done = run(tmp_path / Path(name).name, TESTS[name], "-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert done.returncode == 0, done.stdout + done.stderr
