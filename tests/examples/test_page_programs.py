"""Programs of docs/how-to/ run, and print what their pages show. A program's first line is its file name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pace
import pytest

PAGES = Path(__file__).resolve().parents[2] / "docs" / "how-to"
PROGRAM = re.compile(
    r"^```python\n(?P<text># (?P<name>\S+\.py)\n.*?)^```$(?:\n(?!^```python).*?)??\n```text\n(?P<shown>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
PROGRAMS = {
    f"{page.stem}/{found['name']}": (found["text"], found["shown"])
    for page in sorted(PAGES.glob("*.md"))
    for found in PROGRAM.finditer(page.read_text())
}

pytestmark = pytest.mark.live


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_prints_what_its_page_shows(name, tmp_path):
    text, shown = PROGRAMS[name]
    path = tmp_path / Path(name).name
    path.write_text(text)
    clean = {key: value for key, value in os.environ.items() if not key.startswith("RLINF_HEAD")}
    done = subprocess.run(
        [sys.executable, str(path)], cwd=tmp_path, env=clean, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        check=False, timeout=pace.PATIENCE_S,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, shown), done.stderr
