"""Logs of private clusters that failed: moved to one place, which is bounded."""

from __future__ import annotations

import os

import pytest

from rlinf_actors import kept_logs
from rlinf_actors.kept_logs import keep
from rlinf_actors.settings import Settings


@pytest.fixture
def run_dir(tmp_path):
    made = tmp_path / "rlinf-abc"
    (made / "logs" / "ns").mkdir(parents=True)
    (made / "logs" / "ns" / "g-0.out").write_text("what it said")
    (made / "agentd.log").write_text("why")
    (made / "lock").touch()
    return made


def earlier(parent, names, size=1):
    for name in names:
        (parent / name).mkdir(parents=True)
        (parent / name / "agentd.log").write_bytes(b"x" * size)


def test_logs_are_moved_and_nothing_else(run_dir, tmp_path):
    parent = tmp_path / "deep" / "kept"
    kept = keep(str(run_dir), str(parent), "its script failed: ValueError: boom")
    assert kept.startswith(f"{parent}{os.sep}")
    assert kept.endswith("-rlinf-abc")
    found = {os.path.relpath(os.path.join(root, name), kept) for root, _, names in os.walk(kept) for name in names}
    assert found == {"agentd.log", "logs/ns/g-0.out", "reason.txt"}
    assert (parent / kept / "reason.txt").read_text() == "its script failed: ValueError: boom\n"
    assert [path.name for path in run_dir.iterdir()] == ["lock"]
    assert parent.stat().st_mode & 0o077 == 0, "what workers print is nobody else's business"


def test_a_cluster_without_logs_leaves_nothing(tmp_path):
    assert keep(str(tmp_path), str(tmp_path / "kept"), "why") == ""
    assert not (tmp_path / "kept").exists()


def test_the_oldest_runs_beyond_the_count_are_removed(run_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(kept_logs, "KEPT_RUNS", 3)
    names = [f"rlinf-actors-2020010{day}-000000-x" for day in (1, 2, 3)]
    earlier(tmp_path / "kept", names)
    kept = keep(str(run_dir), str(tmp_path / "kept"), "why")
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {*names[1:], os.path.basename(kept)}


def test_directories_of_others_in_the_same_place_stay(run_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(kept_logs, "KEPT_RUNS", 1)
    monkeypatch.setattr(kept_logs, "KEPT_BYTES", 10)
    others = {"results", "20200101-000000-sweep", "zz"}
    earlier(tmp_path / "logs", others, size=1000)
    kept = keep(str(run_dir), str(tmp_path / "logs"), "why")
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {*others, os.path.basename(kept)}


def test_the_oldest_runs_beyond_the_size_are_removed_and_never_the_newest(run_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(kept_logs, "KEPT_BYTES", 10)
    earlier(tmp_path / "kept", ["rlinf-actors-20200101-000000-a"])
    kept = keep(str(run_dir), str(tmp_path / "kept"), "why")
    assert [path.name for path in (tmp_path / "kept").iterdir()] == [os.path.basename(kept)]


@pytest.mark.parametrize(
    ("env", "place"),
    [
        ({"XDG_STATE_HOME": "/state"}, "/state/rlinf-actors/kept-logs"),
        ({"RLINF_ACTORS_KEPT_LOGS": "/var/kept"}, "/var/kept"),
        ({"RLINF_ACTORS_KEPT_LOGS": "none"}, None),
    ],
)
def test_the_place_is_configured(env, place):
    assert Settings.load(env).kept_logs == place
