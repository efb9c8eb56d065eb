"""`rlinf-actors paths`."""

from __future__ import annotations

import json

from rlinf_actors.messaging.routes import TABLE
from rlinf_actors.settings import PATHS


def test_the_table_is_shown(shown):
    code, out, err = shown("paths")
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert lines[0].split()[:3] == ["KIND", "SAME", "PROCESS"]
    assert len(lines) == 1 + len(TABLE)
    assert lines[-1].split()[:6] == ["accelerator", "-", "-", "-", "-", "-"]


def test_what_the_environment_asks_for_comes_first(shown, monkeypatch):
    monkeypatch.setenv(PATHS, "accelerator=staged")
    code, out, _ = shown("paths", "--json")
    rows = [row for row in json.loads(out) if row["kind"] == "accelerator"]
    assert code == 0
    assert [row["path"] for row in rows] == ["staged", "local", "ipc", "lane", "staged"]
    assert "RLINF_ACTORS_PATHS" in rows[0]["meaning"]


def test_a_wrong_setting_is_a_configuration_error(shown, monkeypatch):
    monkeypatch.setenv(PATHS, "gpu=lane")
    code, _, err = shown("paths")
    assert code == 78
    assert "RLINF_ACTORS_PATHS: has 'gpu=lane'" in err
