"""A head's state is kept over reboots: not in /tmp, nor in a run directory."""

import os

import pytest

from rlinf_actors.errors import ConfigError
from rlinf_actors.head.state_place import default_state_dir, named


def test_state_is_below_the_users_state_directory(monkeypatch):
    assert default_state_dir("head-1", {"XDG_STATE_HOME": "/s"}) == "/s/rlinf-actors/head-1"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert default_state_dir("head-1", {}) == "/var/lib/rlinf-actors/head-1"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("HOME", "/home/me")
    assert default_state_dir("head-1", {"XDG_STATE_HOME": "relative"}) == "/home/me/.local/state/rlinf-actors/head-1"


def test_named_directory_that_a_reboot_empties_is_warned_of(tmp_path, caplog):
    (tmp_path / "link").symlink_to("/tmp/state")
    assert named("/var/lib/state") == "/var/lib/state"
    assert caplog.messages == []
    for path in ("/tmp/state", "/run/state", str(tmp_path / "link")):
        assert named(path) == path
        assert f"the head's state is in {path}, which is empty after a reboot" in caplog.messages.pop()
        caplog.clear()


def test_without_a_home_a_head_is_refused(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # no HOME, and no entry in passwd
    with pytest.raises(ConfigError, match="user 4711 has no home directory: name one that is kept over reboots"):
        default_state_dir("head-1", {})
