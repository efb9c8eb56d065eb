"""`rlinf-actors paths`."""

from __future__ import annotations

import json

from rlinf_actors.messaging.routes import TABLE
from rlinf_actors.settings import PATHS


def test_paths_shows_the_table(shown):
    code, out, err = shown("paths")
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert lines[0].split()[:3] == ["KIND", "SAME", "PROCESS"]
    assert len(lines) == 1 + len(TABLE)
    assert lines[-1].split()[:6] == ["accelerator", "-", "-", "-", "-", "-"]


def test_path_chosen_by_the_environment_comes_first(shown, monkeypatch):
    monkeypatch.setenv(PATHS, "accelerator=staged")
    code, out, _ = shown("paths", "--json")
    rows = [row for row in json.loads(out) if row["kind"] == "accelerator"]
    assert code == 0
    assert [row["path"] for row in rows] == ["staged", "local", "ipc", "lane", "staged"]
    assert "RLINF_ACTORS_PATHS" in rows[0]["meaning"]


def test_wrong_paths_setting_exits_with_78(shown, monkeypatch):
    monkeypatch.setenv(PATHS, "gpu=lane")
    code, _, err = shown("paths")
    assert code == 78
    assert "RLINF_ACTORS_PATHS: has 'gpu=lane'" in err
