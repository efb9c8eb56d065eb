"""A flood of log lines from eight workers: the files have each byte, and the driver counts what it does not show."""

from __future__ import annotations

import pytest

from benchmarks.logs import measure

pytestmark = pytest.mark.live


def test_files_are_exact_and_lost_lines_of_the_view_are_counted(tmp_path, monkeypatch):
    monkeypatch.setenv("RLINF_ACTORS_LOG_RATE", "20")
    found = measure(8, 10_000, 2.0, tmp_path)
    assert found.exact
    assert found.lines > 8
    assert 0 < found.shown < found.lines
    seen = found.shown + found.held + found.left
    assert seen == found.lines if found.counted else seen <= found.lines
    assert "[rlinf-actors] flood:" in (tmp_path / "stderr").read_text()
