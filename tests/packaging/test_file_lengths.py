"""The length of the packages' files, as CONTRIBUTING.md says."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MOST_LINES = 500


def test_no_file_of_the_packages_is_longer_than_the_limit():
    assert f"A file has at most {MOST_LINES} lines" in (ROOT / "CONTRIBUTING.md").read_text()
    files = (path for package in ("rlinf_actors", "agentd") for path in (ROOT / package).rglob("*.py"))
    lengths = {str(path.relative_to(ROOT)): path.read_text().count("\n") for path in files}
    assert {path: lines for path, lines in lengths.items() if lines > MOST_LINES} == {}
