"""The event log over restarts of the head: what is on disk, and where readers continue."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from contextlib import closing

import pytest
from held_entries import held_entries
from keys_kit import KeysKit
from test_head_event_log import LogKit, texts

from rlinf_actors.head.commands import KeptEvent, LogEvent, PastEvents
from rlinf_actors.head.event_store import DAMAGED, FILE, EventStore
from rlinf_actors.head.server import HeadServer
from rlinf_actors.wire.agent_messages import Goodbye, Welcome
from rlinf_actors.wire.client_messages import GetEvents
from rlinf_actors.wire.event_values import ClusterEvent
from rlinf_actors.wire.values import ExitReport
from tests.memory_network import MemoryNetwork


def kept(*seqs: int, **fields: str) -> list[KeptEvent]:
    return [KeptEvent(ClusterEvent(seq, 5.0, "worker_died", f"e{seq}"), **fields) for seq in seqs]


async def write(store: EventStore, added: list[KeptEvent], dropped: tuple[int, ...] = (), fails: bool = False) -> None:
    """Write, and wait until the store says that its trouble has changed (*fails*), or until its thread is idle."""
    told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    store.write(added, dropped, lambda: told.done() or told.set_result(None))
    if fails:
        await asyncio.wait_for(told, 10)
    else:
        await asyncio.get_running_loop().run_in_executor(store._writer, int)
        await asyncio.sleep(0)


def reopened(tmp_path, store: EventStore) -> PastEvents:
    store.close()
    again = EventStore(str(tmp_path))
    again.close()
    assert not again.trouble
    return again.remembered


def going_on(before: PastEvents, *added: str) -> LogKit:
    kit = LogKit(before=before)
    kit.log.is_watched = True
    kit.add(*added)
    return kit


async def test_next_head_reads_the_events_that_were_kept(tmp_path):
    store = EventStore(str(tmp_path))
    end = ExitReport("signalled", signal=9, stderr_tail=["ouch"])
    died = KeptEvent(ClusterEvent(4, 7.0, "worker_died", "d", "n", "i", "ns", "g", 3, "w", 8, end), "driver 'a'", "a")
    await write(store, kept(1, 2, 3, whose="x"))
    await write(store, [died], (2,))
    store.write(kept(5), (3,), lambda: None)
    found = reopened(tmp_path, store)
    assert found.events == [*kept(1, whose="x"), died, *kept(5)]
    assert (found.log, found.run, found.ends) == (store.remembered.log, 2, {1: 0, 2: 5})
    assert os.stat(tmp_path / FILE).st_mode & 0o777 == 0o600


async def test_numbers_go_on_after_the_last_one_that_was_given_although_its_event_is_gone(tmp_path):
    store = EventStore(str(tmp_path))
    await write(store, kept(1, 2))
    found = reopened(tmp_path, store)
    store = EventStore(str(tmp_path))
    await write(store, [], (1, 2))
    found = reopened(tmp_path, store)
    kit = going_on(found, "new")
    assert [event.seq for event in kit.ask().events] == [3]


async def test_reader_that_follows_over_a_restart_reads_each_event_once(tmp_path):
    first = going_on(EventStore(str(tmp_path)).remembered, "a", "b", "c")
    seen = first.ask(limit=2)
    after = PastEvents("log", 2, first.log.take_changes()[0], {1: 0, 2: 3})
    after.log = seen.log.rpartition(".")[0]
    second = going_on(after, "d")
    assert texts(second.ask(since=seen.next, log=seen.log)) == ["c", "d"]
    assert texts(second.ask(since=3, log=second.ask().log)) == ["d"]


def test_reader_that_has_seen_events_which_no_disk_has_reads_all_later_ones():
    lost = PastEvents("log", 3, kept(1, 2), {1: 0, 2: 2, 3: 2})  # run 1 showed 3 and 4, which a crash took
    kit = going_on(lost, "third", "fourth", "fifth")
    assert texts(kit.ask(since=4, log="log.1")) == ["third", "fourth", "fifth"]
    assert texts(kit.ask(since=2, log="log.2")) == ["third", "fourth", "fifth"]
    assert texts(kit.ask(since=1, log="log.1")) == ["e2", "third", "fourth", "fifth"]
    for other in ("other.1", "log.4", "log", "log.x", ""):
        assert len(kit.ask(since=0 if not other else 4, log=other).events) == 5, other


def test_shares_and_bounds_hold_for_the_events_of_earlier_heads():
    before = PastEvents("log", 2, [*kept(1, 2, whose="quiet"), *kept(3, 4, 5, 6, whose="loud")], {2: 6})
    kit = LogKit(kept=4, before=before)
    assert texts(kit.ask()) == ["e1", "e2", "e5", "e6"]
    kit.log.is_watched = True
    kit.add("e7", namespace="loud")
    added, dropped = kit.log.take_changes()
    assert ([one.event.seq for one in added], dropped) == ([7], [5])
    assert kit.log.take_changes() == ([], [])


async def test_full_disk_keeps_events_in_memory_and_says_so_once(tmp_path, caplog):
    store = EventStore(str(tmp_path), again_s=0.01)
    await write(store, kept(1))
    (pages,) = store._database.execute("PRAGMA page_count").fetchone()
    limit = store._database.execute(f"PRAGMA max_page_count = {pages}").fetchone()
    big = [KeptEvent(ClusterEvent(n, 1.0, "worker_died", "x" * 4000)) for n in (2, 3, 4, 5)]
    await write(store, big, fails=True)
    assert "database or disk is full. 4 events wait in memory" in store.trouble
    store.write(kept(6), [2], lambda: None)  # the event log gives up one of those that wait
    cleared: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    for _ in range(3):  # it tries again, and says nothing more
        store._again.cancel()
        store._start_write(lambda: None)
        await asyncio.get_running_loop().run_in_executor(store._writer, int)
        await asyncio.sleep(0)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    store._database.execute(f"PRAGMA max_page_count = {limit[0] + 1000}")
    store._again.cancel()
    store._start_write(lambda: cleared.done() or cleared.set_result(None))
    await asyncio.wait_for(cleared, 10)
    assert store.trouble == ""
    assert "is written again; 1 event is missing" in caplog.records[-1].message
    assert [one.event.seq for one in reopened(tmp_path, store).events] == [1, 3, 4, 5, 6]


async def test_events_that_never_reach_the_disk_are_counted_at_the_end(tmp_path, caplog):
    store = EventStore(str(tmp_path))
    (pages,) = store._database.execute("PRAGMA page_count").fetchone()
    store._database.execute(f"PRAGMA max_page_count = {pages}")
    await write(store, [KeptEvent(ClusterEvent(n, 1.0, "refused", "x" * 9000)) for n in (1, 2)], fails=True)
    store.close()
    store.close()
    assert caplog.records[-1].message.startswith("2 events are lost")


@pytest.mark.parametrize("text", [b"not a database" * 100, b"SQLite format 3\0" + b"\7" * 4000, b""])
async def test_damaged_file_is_moved_aside_and_the_head_starts(tmp_path, caplog, text):
    (tmp_path / FILE).write_bytes(text)
    store = EventStore(str(tmp_path))
    await write(store, kept(1))
    assert len(reopened(tmp_path, store).events) == 1
    assert (tmp_path / DAMAGED).exists() == bool(text)
    assert [record.levelname for record in caplog.records] == ["ERROR"] * bool(text)


async def test_head_without_a_file_for_events_goes_on(tmp_path, caplog):
    (tmp_path / FILE).mkdir()
    store = EventStore(str(tmp_path))
    assert "the event log ends with this head" in store.trouble
    store.write(kept(1), [], lambda: None)
    store.close()
    assert store.remembered.events == []
    assert len(caplog.records) == 1


async def test_rows_of_a_version_with_other_kinds_of_events_are_left_out(tmp_path):
    store = EventStore(str(tmp_path))
    await write(store, kept(1, 2))
    store.close()
    with closing(sqlite3.connect(tmp_path / FILE)) as database:
        database.execute("UPDATE events SET event = ? WHERE seq = 1", (b"\x80",))
        database.commit()
    again = EventStore(str(tmp_path))
    assert [one.event.seq for one in again.remembered.events] == [2]
    again.close()


async def test_head_drops_events_of_earlier_heads_that_leave_its_log(tmp_path):
    store = EventStore(str(tmp_path))
    await write(store, kept(*range(1, 200)))
    store.close()
    loop = asyncio.get_running_loop()
    head = HeadServer(MemoryNetwork(loop), events=EventStore(str(tmp_path)))
    try:
        copies = [path for path, count in held_entries(head).items() if count >= 199]
    finally:
        head.close()
    assert len([path for path in copies if path.endswith("events")]) == 1, "the event log alone has them"


async def test_file_stays_small_while_events_come_and_go(tmp_path, monkeypatch):
    store = EventStore(str(tmp_path))
    kit = LogKit(kept=50)
    kit.log.is_watched = True
    sizes = []
    for n in range(40):
        for _ in range(50):
            kit.enter(LogEvent("worker_died", "x" * 500), whose=f"job {n % 7}")
        await write(store, *kit.log.take_changes())
        sizes.append(sum(path.stat().st_size for path in tmp_path.iterdir()))
    assert max(sizes) < 5 << 20
    store.close()
    assert (tmp_path / FILE).stat().st_size < 200_000
    assert len(EventStore(str(tmp_path)).remembered.events) == 50


def test_driver_reads_the_events_of_its_ended_job_after_a_restart_and_no_other_driver_does():
    kit = KeysKit()
    kit.disk.events = PastEvents("log")
    kit.restart()
    kit.head.log.is_watched = True
    for name, letter in (("ann", "A"), ("bob", "B")):
        kit.give(name, letter, role="driver")
    assert isinstance(kit.driver("ann", namespace="job"), Welcome)
    kit.tell("ann", Goodbye("done"))
    kit.disk.events = PastEvents("log", 2, kit.head.log.take_changes()[0], {2: 9})
    kit.restart()
    kinds = lambda answer: [event.kind for event in answer.events if event.namespace]  # noqa: E731
    ask = lambda peer: kinds(kit.ask(peer, GetEvents()))  # noqa: E731
    assert ask("ann") == ask("admin") == ["driver_joined", "driver_ended"]
    assert ask("bob") == []
    assert isinstance(kit.driver("bob", namespace="job"), Welcome)  # the name is free
    assert kinds(kit.ask("bob", GetEvents(namespace="job"))) == ["driver_joined"]
    assert ask("admin") == ["driver_joined", "driver_ended", "driver_joined"]
