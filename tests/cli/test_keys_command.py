"""`rlinf-actors keys` without a network: key files, the state of a stopped head, a head's unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading

import pace
import pytest
from test_json_page import keys_of

from rlinf_actors.cli import app
from rlinf_actors.head.server import HeadServer
from rlinf_actors.head.store import HeadStore, own_keys
from rlinf_actors.net.zmq_network import ZmqNetwork
from rlinf_actors.security import job, keyfile
from rlinf_actors.settings import Settings

TITLES = {"init": "Made keys", "list": "The listed keys", "rotate": "A rotated key", "trust": "A trusted key"}
"""The verbs, and the section of docs/reference/json.md that has the keys of their objects."""


@pytest.fixture
def keys(tmp_path, monkeypatch, capsys):
    """Return a function that runs `rlinf-actors keys ...` in directories of the test and parses JSON output."""
    monkeypatch.delenv("RLINF_HEAD", raising=False)
    monkeypatch.setenv("RLINF_ACTORS_KEYS", str(tmp_path / "keys"))

    def run(*arguments: str, code: int = 0):
        found = app.run(["keys", *arguments])
        out, err = capsys.readouterr()
        assert found == code, err
        if "--json" not in arguments:
            return out, err
        said = json.loads(out)
        if arguments[0] in TITLES:
            assert set(said) == set(keys_of(TITLES[arguments[0]]))
        if arguments[0] == "enroll":
            assert set(said) < set(keys_of("An enrolled key"))
        return said

    return run


@pytest.fixture
def state(tmp_path):
    return ("--state-dir", str(tmp_path / "state"))


def names(listing) -> dict[str, str]:
    return {key["name"]: key["state"] for key in listing["keys"]}


# --- key files ---


def test_init_makes_key_pairs_for_head_and_driver(keys, tmp_path):
    made = keys("init", "--name", "kim", "--json")
    head = keyfile.load(tmp_path / "keys" / "head.key")
    driver = keyfile.load(tmp_path / "keys" / "driver.key")
    assert made == {
        "dir": str(tmp_path / "keys"), "head": head.pair.public, "driver": driver.pair.public, "name": "kim"
    }  # fmt: skip
    assert (driver.role, driver.name, driver.head) == ("driver", "kim", head.pair.public)


def test_two_inits_at_once_make_one_pair(keys, tmp_path):
    """The other command's key appears between this command's check and its write."""
    (tmp_path / "keys").mkdir(mode=0o700)
    (tmp_path / "keys" / "head.key").symlink_to(tmp_path / "coming.key")
    _, err = keys("init", code=64)
    assert "head.key is there already" in err
    assert os.listdir(tmp_path / "keys") == ["head.key"]


def test_init_never_overwrites(keys, tmp_path):
    keys("init")
    before = (tmp_path / "keys" / "head.key").read_text()
    _, err = keys("init", code=64)
    assert "is there already" in err
    assert (tmp_path / "keys" / "head.key").read_text() == before


def test_no_command_prints_a_secret(keys, tmp_path, state):
    said = [*keys("init"), *keys("enroll", "n1", "--file", str(tmp_path / "n1.key"), *state)]
    said += [*keys("list", *state), *keys("rotate", "--role", "head"), json.dumps(keys("list", "--json", *state))]
    for file in (tmp_path / "keys" / "head.key", tmp_path / "keys" / "driver.key", tmp_path / "n1.key"):
        assert not any(keyfile.load(file).pair.secret in text for text in said)


def test_key_directory_readable_by_others_exits_with_78_and_the_fix(keys, tmp_path):
    (tmp_path / "keys").mkdir(mode=0o755)
    os.chmod(tmp_path / "keys", 0o755)
    _, err = keys("init", code=78)
    assert f"chmod 700 {tmp_path / 'keys'}" in err
    assert os.listdir(tmp_path / "keys") == []


def test_trust_accepts_a_new_head_key(keys, tmp_path):
    keys("init")
    new = keys("rotate", "--role", "head", "--json")
    assert keyfile.load(tmp_path / "keys" / "driver.key").head == new["public"]
    assert keys("trust", "x" * 40, "--json")["files"] == [str(tmp_path / "keys" / "driver.key")]
    assert keyfile.load(tmp_path / "keys" / "driver.key").head == "x" * 40
    keys("trust", "short", code=78)


def test_rotate_without_a_key_asks_for_the_role(keys, tmp_path):
    _, err = keys("rotate", code=64)
    assert "there is no agent.key or driver.key" in err


def test_damaged_token_is_refused_before_any_file_is_made(keys, tmp_path):
    _, err = keys("join", "rlinf-join-abc", code=78)
    assert "copy the whole line again" in err
    assert not (tmp_path / "keys").exists()


# --- the state of a head that is not running ---


def test_state_dir_changes_the_list_of_a_stopped_head(keys, state, tmp_path):
    keys("init", "--name", "kim")
    token = job.parse(keys("enroll", "n1", "--address", "10.0.0.1:6380", "--json", *state)["token"])
    assert (token.address, token.role, token.name) == ("10.0.0.1:6380", "agent", "n1")
    assert token.head == keyfile.load(tmp_path / "keys" / "head.key").pair.public
    keys("enroll", "bob", "--driver", "--file", str(tmp_path / "bob.key"), *state)
    listing = keys("list", "--json", *state)
    assert names(listing) == {"kim": "good", "n1": "token", "bob": "good"}
    assert listing["head"] == token.head
    _, err = keys("revoke", "bob", *state)
    assert "no head is asked" in err
    assert names(keys("list", "--json", *state))["bob"] == "ended"
    _, err = keys("revoke", "bbo", *state, code=1)
    assert "no key or join token of 'bbo'" in err


def test_table_hides_ended_keys(keys, state, tmp_path):
    keys("init", "--name", "kim")
    keys("enroll", "n1", "--file", str(tmp_path / "n1.key"), *state)
    keys("revoke", "n1", *state)
    assert [line.split()[0] for line in keys("list", *state)[0].splitlines()] == ["NAME", "kim"]
    assert "revoked it" in keys("list", "--all", *state)[0]


def test_enrolment_without_the_heads_pair_is_refused(keys, state):
    _, err = keys("enroll", "n1", "--address", "10.0.0.1:6380", *state, code=64)
    assert "rlinf-actors keys init" in err


def test_an_offline_enrolment_needs_the_address(keys, state):
    keys("init")
    _, err = keys("enroll", "n1", *state, code=64)
    assert "--address" in err


# --- a running head ---


@contextlib.contextmanager
def running_head(tmp_path, writes=True):
    """A head with keys on a unix socket, in a thread with its own loop. Without *writes*, its disk fails."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="head")
    thread.start()
    run = tmp_path / "run"
    run.mkdir(mode=0o700)

    async def start():
        settings = Settings.load()
        own = own_keys(keyfile.load(tmp_path / "keys" / "head.key"), settings)
        network = ZmqNetwork(loop)
        store = HeadStore(str(tmp_path / "state"))
        store._database.execute(f"PRAGMA query_only = {not writes}")
        head = HeadServer(network, store=store, own=own)
        head.start([f"ipc://{run}/head"])
        return network, head

    async def stop():
        head.close()
        network.close()

    network, head = asyncio.run_coroutine_threadsafe(start(), loop).result(pace.PATIENCE_S)
    try:
        yield "--head", str(run)
    finally:
        asyncio.run_coroutine_threadsafe(stop(), loop).result(pace.PATIENCE_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(pace.PATIENCE_S)
        loop.close()


def test_running_head_is_asked_over_its_socket(keys, state, tmp_path):
    keys("init", "--name", "kim")
    with running_head(tmp_path) as head:
        _, err = keys("enroll", "n1", *head, code=78)
        assert "does not listen on TCP" in err
        made = keys("enroll", "n1", "--address", "10.0.0.1:6380", "--json", *head)
        assert job.parse(made["token"]).name == "n1"
        assert names(keys("list", "--json", *head)) == {"kim": "good", "n1": "token"}
        assert [key["name"] for key in keys("revoke", "n1", "--json", *head)["revoked"]] == ["n1"]
        _, err = keys("list", *state, code=78)
        assert "To ask a running head, leave --state-dir out" in err
    assert names(keys("list", "--json", *state)) == {"kim": "good", "n1": "ended"}


def test_revocation_that_cannot_be_written_is_an_error(keys, tmp_path):
    keys("init")
    with running_head(tmp_path, writes=False) as head:
        _, err = keys("enroll", "n1", "--address", "10.0.0.1:6380", *head)
        assert "warning: the head could not write that down" in err
        out, err = keys("revoke", "n1", *head, code=69)
        assert "of agent n1" in out, "the key has ended despite the error"
        assert "error: the head could not write that down: one that is restarted will not know it" in err


def test_changes_of_keys_are_in_the_event_log(keys, tmp_path, capsys):
    keys("init")
    with running_head(tmp_path) as head:
        keys("enroll", "n1", "--address", "10.0.0.1:6380", *head)
        keys("revoke", "n1", *head)
        assert app.run(["events", "--json", *head]) == 0
        kinds = [json.loads(line)["kind"] for line in capsys.readouterr().out.splitlines()]
    assert kinds == ["head_started", "key_added", "key_added", "key_ended"]


def test_a_member_rotates_its_own_key(keys, tmp_path):
    keys("init")
    before = (tmp_path / "keys" / "driver.key").read_text()
    with running_head(tmp_path) as head:
        _, err = keys("rotate", *head, code=78)
    assert "over TCP" in err
    assert (tmp_path / "keys" / "driver.key").read_text() == before
    assert sorted(os.listdir(tmp_path / "keys")) == ["driver.key", "head.key"]


def test_unwritable_key_file_leaves_no_key_listed(keys, state, tmp_path):
    keys("init", "--name", "kim")
    keys("enroll", "n1", "--file", str(tmp_path / "nowhere" / "n1.key"), *state, code=69)
    assert names(keys("list", "--json", *state)) == {"kim": "good"}


def test_refused_enrolment_leaves_no_file(keys, state, tmp_path):
    keys("enroll", "n1", "--file", str(tmp_path / "n1.key"), *state, code=64)  # this head has no keys
    assert not (tmp_path / "n1.key").exists()


def test_unfinished_rotation_is_reported_with_the_remedy(keys, tmp_path, monkeypatch):
    keys("init", "--name", "kim")
    left = tmp_path / "keys" / "driver.key.new"
    left.write_text((tmp_path / "keys" / "driver.key").read_text())
    left.chmod(0o600)
    before = left.read_text()
    _, err = keys("rotate", "--head", "127.0.0.1:1", code=64)
    assert f"mv {left} {tmp_path / 'keys' / 'driver.key'}" in err
    assert left.read_text() == before


def test_a_rotation_without_an_answer_keeps_both_keys(keys, tmp_path, monkeypatch):
    monkeypatch.setattr("rlinf_actors.cli.key_requests.TIMEOUT_S", 0.2)
    keys("init", "--name", "kim")
    before = (tmp_path / "keys" / "driver.key").read_text()
    _, err = keys("rotate", "--head", "127.0.0.1:1", code=69)
    assert "If it has taken the new key" in err
    assert (tmp_path / "keys" / "driver.key").read_text() == before
    assert keyfile.load(tmp_path / "keys" / "driver.key.new").name == "kim"


def test_concurrent_rotations_do_not_use_each_others_key(keys, tmp_path):
    """The other command's file appears between this one's check and write; the head may know that key."""
    keys("init", "--name", "kim")
    (tmp_path / "keys" / "driver.key.new").symlink_to(tmp_path / "coming")
    _, err = keys("rotate", "--head", "127.0.0.1:1", code=78)
    assert "driver.key.new: cannot be read" in err
    assert os.readlink(tmp_path / "keys" / "driver.key.new") == str(tmp_path / "coming")


@pytest.mark.parametrize("command", [("keys", "rotate", "--keep", "nan"), ("node", "drain", "n1", "--wait", "nan")])
def test_nan_is_refused_before_any_request(command, capsys):
    assert app.run(command) == 64
    assert "is no number" in capsys.readouterr().err
