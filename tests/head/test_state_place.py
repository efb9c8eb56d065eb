"""A head's state is kept over reboots: not in /tmp, nor in a run directory."""

import os
import sqlite3

import pytest

from rlinf_actors.errors import ConfigError
from rlinf_actors.head.state_place import default_state_dir, named, take_over
from rlinf_actors.head.store import FILE, HeadStore


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


def test_state_of_an_earlier_version_is_taken_over_once(tmp_path):
    old, new = tmp_path / "old", tmp_path / "state" / "head-1"
    HeadStore(str(old)).close()
    (old / "audit").mkdir()
    take_over(str(old), str(new))
    store = HeadStore(str(new))
    assert store.remembered.epoch == 2, "the second head on this state"
    store.close()
    assert (os.listdir(old), (new / "audit").is_dir()) == ([], True)
    HeadStore(str(old)).close()
    take_over(str(old), str(new))
    assert (old / FILE).exists(), "the new place has state already"


def test_state_of_a_running_head_is_not_taken(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    store = HeadStore(str(old))
    with pytest.raises(ConfigError, match="end the head that uses it"):
        take_over(str(old), str(new))
    store.close()
    assert not (new / FILE).exists()


@pytest.mark.parametrize("how", ["link", "others can write", "file of others"])
def test_state_that_another_user_may_have_made_is_not_taken(tmp_path, how):
    old, new = tmp_path / "old", tmp_path / "new"
    HeadStore(str(old)).close()
    if how == "link":
        old.rename(tmp_path / "there")
        old.symlink_to(tmp_path / "there")
    elif how == "others can write":
        old.chmod(0o777)
    else:
        (old / FILE).chmod(0o666)
    take_over(str(old), str(new))
    assert not new.exists()
    sqlite3.connect(":memory:").close()
