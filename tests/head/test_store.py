"""The head's file: the next head reads all writes, and errors name the file."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading

import pytest
from head_kit import node_report
from msgspec.structs import replace

from rlinf_actors.errors import ConfigError
from rlinf_actors.head.commands import (
    KEPT,
    ForgetJob,
    ForgetKey,
    ForgetNode,
    ForgetTombstone,
    KnownJob,
    KnownNode,
    NodeDrained,
    NodeUndrained,
    StopPressed,
    StopReleased,
    Tombstone,
)
from rlinf_actors.head.store import FILE, HeadStore
from rlinf_actors.wire.key_messages import KeyState

KEY = KeyState("x", "agent", "n0", 17.5, "kim", True, 917.5)
ENDED = replace(KEY, ended_at=20.0, why="it was used")
NODE = KnownNode(node_report("n0"), "n0-1", True, 3)


async def write(store, *changes):
    done = asyncio.get_running_loop().create_future()
    store.write(changes, done.set_result)
    return await asyncio.wait_for(done, 10)


def opened(tmp_path):
    store = HeadStore(str(tmp_path))
    store.close()
    return store.remembered


async def test_next_head_reads_the_whole_state(tmp_path):
    store = HeadStore(str(tmp_path))
    assert store.remembered.epoch == 1
    assert await write(store, NODE, KnownNode(node_report("n1"), "n1-1"), Tombstone("client", "d1", "it was silent"))
    assert await write(store, StopPressed("*", "emergency stop by kim"), StopPressed("ns", "another"), ForgetNode("n1"))
    assert await write(
        store, NodeDrained("n0", "new disk"), NodeDrained("n1", "old disk"), NodeDrained("n0", "no disk")
    )
    assert await write(store, KnownNode(NODE.report, "n0-2", True, 3, True), StopReleased("ns"), NodeUndrained("n1"))
    assert await write(store, KEY, replace(KEY, public="y"), replace(KEY, public="z"))
    assert await write(store, ENDED, ForgetKey("y"))
    assert await write(store, KnownJob("a", "p", "kim"), KnownJob("b", "q", ""), KnownJob("a", "r", ""), ForgetJob("b"))
    store.close()
    found = opened(tmp_path)
    assert found.jobs == [KnownJob("a", "r", "")]
    assert found.keys == [replace(KEY, public="z"), ENDED]
    assert found.epoch == 2
    assert found.nodes == [KnownNode(NODE.report, "n0-2", True, 3, True)]
    assert found.given_up == {("client", "d1"): "it was silent"}
    assert found.stops == {"*": "emergency stop by kim"}
    assert found.drained == {"n0": "no disk"}
    assert opened(tmp_path).epoch == 3


async def test_changes_of_a_thousand_hellos_share_transactions(tmp_path, monkeypatch):
    store = HeadStore(str(tmp_path))
    told, transactions = asyncio.Queue(), []
    begin = store._transaction
    monkeypatch.setattr(store, "_transaction", lambda: transactions.append(1) or begin())
    for n in range(1000):
        store.write([StopPressed(str(n), "stop")], told.put_nowait)
    for _ in range(1000):
        assert await asyncio.wait_for(told.get(), 10)
    assert len(transactions) == 2
    store.close()
    assert len(opened(tmp_path).stops) == 1000


async def test_writes_before_close_are_durable(tmp_path):
    store = HeadStore(str(tmp_path))
    store.write([StopPressed("*", "stop")], lambda durable: None)
    store.write([StopPressed("*2", "stop")], lambda durable: None)
    store.close()
    assert opened(tmp_path).stops == {"*": "stop", "*2": "stop"}


async def test_tombstones_are_bounded(tmp_path):
    store = HeadStore(str(tmp_path))
    await write(store, Tombstone("node", "other", ""), *(Tombstone("client", str(n), "") for n in range(KEPT + 10)))
    await write(
        store, ForgetTombstone("client", "30"), ForgetTombstone("node", "40"), Tombstone("client", "20", "again")
    )
    store.close()
    clients = [id for kind, id in opened(tmp_path).given_up if kind == "client"]
    assert clients == [*(str(n) for n in range(9, KEPT + 10) if n not in (20, 30)), "20"]
    assert ("node", "other") in opened(tmp_path).given_up


def test_second_head_is_refused_while_the_first_runs(tmp_path):
    first = HeadStore(str(tmp_path))
    with pytest.raises(ConfigError, match="is used by another head that runs") as refused:
        HeadStore(str(tmp_path))
    assert refused.value.path == str(tmp_path / FILE)
    first.close()
    assert opened(tmp_path).epoch == 2


@pytest.mark.parametrize("text", [b"not a database" * 100, b"SQLite format 3\0" + b"\7" * 4000])
def test_damaged_file_is_refused_with_the_remedy(tmp_path, text):
    (tmp_path / FILE).write_bytes(text)
    with pytest.raises(ConfigError, match="Move it away and start the head again") as refused:
        HeadStore(str(tmp_path))
    assert str(tmp_path / FILE) in str(refused.value)
    assert (tmp_path / FILE).read_bytes() == text


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE facts SET value = 'abc' WHERE name = 'epoch'",
        "INSERT INTO keys VALUES ('x', 'text')",
        "INSERT INTO keys VALUES ('x', x'c1')",
        "INSERT INTO jobs VALUES ('x', x'ff', 'y')",
        "INSERT INTO stops VALUES (x'ff', 'y')",
    ],
)
def test_malformed_value_counts_as_damage(tmp_path, change):
    opened(tmp_path)
    with sqlite3.connect(tmp_path / FILE) as database:
        database.execute(change)
    database.close()
    with pytest.raises(ConfigError, match=r"is damaged \(.*Move it away and start the head again"):
        HeadStore(str(tmp_path))


def test_a_file_of_another_protocol_is_refused(tmp_path):
    opened(tmp_path)
    with sqlite3.connect(tmp_path / FILE) as database:
        database.execute("UPDATE facts SET value = 99 WHERE name = 'protocol'")
    database.close()
    with pytest.raises(
        ConfigError,
        match=r"is of a head of protocol 99, .* start the version that wrote it",
    ):
        HeadStore(str(tmp_path))


def test_error_names_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="give it a directory that it may write to") as refused:
        HeadStore(str(tmp_path / "file" / "state"))
    assert refused.value.path == str(tmp_path / "file" / "state" / FILE)


async def test_failed_write_is_reported_and_repeated_with_the_next_write(tmp_path):
    """Like a full disk for sqlite: the file cannot grow."""
    store = HeadStore(str(tmp_path))
    (pages,) = store._database.execute("PRAGMA page_count").fetchone()
    store._database.execute(f"PRAGMA max_page_count = {pages}")
    assert not await write(store, *(Tombstone("client", str(n), "x" * 100) for n in range(1000)))
    assert "database or disk is full" in store.trouble
    assert store.path in store.trouble
    assert not await write(store, StopPressed("*", "stop"))
    store._database.execute("PRAGMA max_page_count = 1000000")
    assert await write(store, StopReleased("none"))
    assert store.trouble == ""
    store.close()
    found = opened(tmp_path)
    assert len(found.given_up) == 1000
    assert found.stops == {"*": "stop"}


def test_other_users_cannot_read_the_state(tmp_path):
    HeadStore(str(tmp_path / "state")).close()
    assert os.stat(tmp_path / "state").st_mode & 0o777 == 0o700
    assert os.stat(tmp_path / "state" / FILE).st_mode & 0o777 == 0o600


@pytest.mark.parametrize(("where", "mode"), [("state", 0o777), ("state", 0o720), ("state/head.sqlite3", 0o666)])
def test_directory_writable_by_others_is_refused(tmp_path, where, mode):
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "head.sqlite3").touch()
    (tmp_path / where).chmod(mode)
    with pytest.raises(ConfigError, match=rf"can be written by others \(mode 0{mode:o}.*--state-dir"):
        HeadStore(str(tmp_path / "state"))


def test_a_link_to_another_file_is_not_followed(tmp_path):
    (tmp_path / "another").touch()
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "head.sqlite3").symlink_to(tmp_path / "another")
    with pytest.raises(ConfigError, match="cannot be written"):
        HeadStore(str(tmp_path / "state"))


@pytest.mark.skipif(os.getuid() != 0, reason="only root makes links that are another user's")
def test_another_user_s_link_to_a_directory_of_ours_is_not_followed(tmp_path):
    """The other file may be an earlier head's, which lists keys that were revoked since."""
    (tmp_path / "earlier").mkdir(mode=0o700)
    (tmp_path / "state").symlink_to(tmp_path / "earlier")
    HeadStore(str(tmp_path / "state")).close()
    os.chown(tmp_path / "state", 65534, 65534, follow_symlinks=False)
    with pytest.raises(ConfigError, match="is a link of user 65534: give the head a directory of this user's"):
        HeadStore(str(tmp_path / "state"))


async def test_a_failed_write_is_repeated_at_the_orderly_end(tmp_path):
    store = HeadStore(str(tmp_path))
    store._database.execute("PRAGMA query_only = 1")
    assert not await write(store, StopPressed("*", "stop"))
    store._database.execute("PRAGMA query_only = 0")
    store.close()
    assert opened(tmp_path).stops == {"*": "stop"}


@pytest.mark.parametrize("file", [FILE, f"{FILE}-wal"])
async def test_a_write_to_a_deleted_file_counts_as_failed_until_the_file_is_back(tmp_path, file):
    store = HeadStore(str(tmp_path))
    (tmp_path / file).rename(tmp_path / "away")
    assert not await write(store, StopPressed("*", "stop"))
    assert f"{store.path} was deleted or replaced" in store.trouble
    told, turn = asyncio.Queue(), threading.Event()
    store._writer.submit(turn.wait)
    for n in range(2):  # written together
        store.write([StopPressed(f"{n}", "stop")], told.put_nowait)
    turn.set()
    assert [await asyncio.wait_for(told.get(), 10) for _ in range(2)] == [False, False]
    (tmp_path / file).touch()  # another file
    assert not await write(store, StopPressed("ns", "stop"))
    (tmp_path / "away").rename(tmp_path / file)
    assert await write(store, StopReleased("ns"))
    assert store.trouble == ""
    store.close()
    assert opened(tmp_path).stops == {"*": "stop", "0": "stop", "1": "stop"}
