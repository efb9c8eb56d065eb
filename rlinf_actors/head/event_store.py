"""The event log on disk: a sqlite file of its own beside the head's state, so that events survive a restart.

The file has the entries that the event log keeps in memory (`head.event_log`), which bounds it in rows and bytes. A
thread of its own writes, all changes since its last write in one transaction. The head never waits for it. If the disk
is full, entries wait in memory for a later attempt; one line in the log, and `rlinf-actors status`, say so. A power cut
may cost the last entries, a crash of the head those of some milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sqlite3
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from rlinf_actors.head.commands import KeptEvent, PastEvents
from rlinf_actors.plurals import counted
from rlinf_actors.wire.event_values import ClusterEvent

log = logging.getLogger(__name__)

FILE = "events.sqlite3"
DAMAGED = f"{FILE}.damaged"
"""Name to which a file is moved that cannot be read. It replaces an earlier one."""
MAX_FILE_BYTES = 256 << 20
"""Largest size of the file. The entries that an event log keeps have at most a quarter of it."""
RUNS = 1000
"""Number of runs of heads that the file remembers."""
AGAIN_S = 10.0
"""Seconds after a failed write until the next attempt: no event reports that a disk has room again."""

_TABLES = """
    CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
    CREATE TABLE IF NOT EXISTS events (
        seq INTEGER PRIMARY KEY, whose TEXT NOT NULL, owner TEXT NOT NULL, event BLOB NOT NULL
    );
    CREATE TABLE IF NOT EXISTS runs (run INTEGER PRIMARY KEY, last INTEGER NOT NULL);
"""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ClusterEvent).decode


class EventStore:
    """The sqlite file with the event log of one head. Opening it begins a new run. Loop thread only.

    A file that is damaged is moved aside, and a new one begun. If there can be no file, the head goes on without; one
    line in the log says so, and `trouble`.

    Args:
        directory: the head's state directory, which exists and belongs to this user alone.
        again_s: seconds after a failed write until the next attempt.

    Attributes:
        remembered: the log that earlier heads left; an empty log if there is no file.
        trouble: why entries are not on disk, "" if all are.
    """

    def __init__(self, directory: str, again_s: float = AGAIN_S) -> None:
        self.path = os.path.join(directory, FILE)
        self.trouble = ""
        self._again_s = again_s
        self._again: asyncio.TimerHandle | None = None
        self._added: dict[int, KeptEvent] = {}  # entries that are not on disk yet
        self._dropped: set[int] = set()  # numbers of entries that are on disk still
        self._lost = 0  # entries that the event log has dropped before they were on disk
        self._writing = False
        self._writer = ThreadPoolExecutor(1, "head-events")
        self._database: sqlite3.Connection | None = None
        self.remembered = PastEvents(uuid.uuid4().hex)
        try:
            self._begin()
        except (OSError, sqlite3.Error, ValueError) as error:
            self._close()
            self.trouble = f"{self.path} cannot be used ({error}): the event log ends with this head. Make room there, "
            self.trouble += "or move the file away, and restart the head"
            log.error("%s", self.trouble)

    def write(self, added: Sequence[KeptEvent], dropped: Sequence[int], done: Callable[[], None]) -> None:
        """Write entries that were added, delete those that were dropped; then call *done* on the loop, if `trouble` has
        changed.
        """
        if self._database is None:
            return
        self._added.update((one.event.seq, one) for one in added)
        for seq in dropped:
            if self._added.pop(seq, None) is None:
                self._dropped.add(seq)
            elif self.trouble:
                self._lost += 1
        if not self._writing and self._again is None and (self._added or self._dropped):
            self._start_write(done)

    def close(self) -> None:
        """Write what is not on disk, and close the file. A second call has no effect."""
        if self._again is not None:
            self._again.cancel()
            self._again = None
        self._writer.shutdown(wait=True)
        if self._database is not None and (self._added or self._dropped):
            error = self._write(list(self._added.values()), list(self._dropped))
            lost = self._lost + len(self._added)
            if error:
                log.error("%s lost: %s could not be written: %s", counted(lost, "event", "is|are"), self.path, error)
        self._close()

    # --- inside ---

    def _start_write(self, done: Callable[[], None]) -> None:
        self._again = None
        added, self._added = self._added, {}
        dropped, self._dropped = self._dropped, set()
        self._writing = True
        loop = asyncio.get_running_loop()
        writing = loop.run_in_executor(self._writer, self._write, list(added.values()), list(dropped))
        writing.add_done_callback(lambda writing: self._written(writing, added, dropped, done))

    def _written(
        self,
        writing: asyncio.Future[str],
        added: dict[int, KeptEvent],
        dropped: set[int],
        done: Callable[[], None],
    ) -> None:
        self._writing = False
        if writing.cancelled() or self._database is None:
            return
        error, before = writing.result(), self.trouble
        if error:
            for seq in [seq for seq in self._dropped if seq in added]:  # the event log dropped them meanwhile
                self._dropped.discard(seq)
                del added[seq]
                self._lost += 1
            self._added = {**added, **self._added}
            self._dropped |= dropped
            self._again = asyncio.get_running_loop().call_later(self._again_s, self._start_write, done)
            lost = f", and {counted(self._lost, 'event', 'is|are')} lost" if self._lost else ""
            waiting = counted(len(self._added), "event", "waits|wait")
            self.trouble = f"{self.path} could not be written: {error}. {waiting} in memory{lost}"
            if not before:
                log.error("%s; the next head will not know them. Make room there", self.trouble)
        elif before:
            lost = f"; {counted(self._lost, 'event', 'is|are')} missing in it" if self._lost else ""
            log.warning("%s is written again%s", self.path, lost)
            self.trouble, self._lost = "", 0
        if self.trouble != before:
            done()
        if not error and (self._added or self._dropped):
            self._start_write(done)

    def _write(self, added: list[KeptEvent], dropped: list[int]) -> str:
        """Write a batch in one transaction. Return "", or why that failed. Writer's thread."""
        database = self._database
        assert database is not None
        try:
            database.execute("BEGIN IMMEDIATE")
            database.executemany("DELETE FROM events WHERE seq = ?", [(seq,) for seq in dropped])
            rows = [(one.event.seq, one.whose, one.owner, _encode(one.event)) for one in added]
            database.executemany("INSERT OR REPLACE INTO events VALUES (?, ?, ?, ?)", rows)
            database.execute("COMMIT")
        except sqlite3.Error as error:
            with contextlib.suppress(sqlite3.Error):
                if database.in_transaction:
                    database.execute("ROLLBACK")
            return str(error)
        return ""

    def _begin(self) -> None:
        try:
            self._open()
        except (sqlite3.DatabaseError, ValueError) as error:
            if isinstance(error, sqlite3.OperationalError):  # a full disk, or a lock: the file itself may be whole
                raise
            self._close_database()
            aside = os.path.join(os.path.dirname(self.path), DAMAGED)
            os.replace(self.path, aside)
            for suffix in ("-wal", "-shm"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self.path + suffix)
            log.error("the event log %s is damaged (%s): it is now %s, and another is begun", self.path, error, aside)
            self._open()

    def _open(self) -> None:
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        database = sqlite3.connect(self.path, timeout=0, isolation_level=None, check_same_thread=False)
        self._database = database
        database.execute("PRAGMA locking_mode = EXCLUSIVE")
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
        database.execute("PRAGMA journal_size_limit = 4194304")
        (page,) = database.execute("PRAGMA page_size").fetchone()
        database.execute(f"PRAGMA max_page_count = {MAX_FILE_BYTES // page}")
        (state,) = database.execute("PRAGMA quick_check(1)").fetchone()
        if state != "ok":
            raise sqlite3.DatabaseError(state)
        database.executescript(_TABLES)
        facts = dict(database.execute("SELECT name, value FROM facts").fetchall())
        name = str(facts.setdefault("log", uuid.uuid4().hex))
        past, unread = PastEvents(name), 0
        for seq, whose, owner, blob in database.execute("SELECT seq, whose, owner, event FROM events ORDER BY seq"):
            try:
                event = _decode(blob)
            except msgspec.DecodeError:
                unread += 1
                continue
            past.events.append(KeptEvent(msgspec.structs.replace(event, seq=seq), str(whose), str(owner)))
        if unread:
            log.warning("%s of %s not shown: another version wrote them", counted(unread, "event", "is|are"), self.path)
        runs = {int(run): int(last) for run, last in database.execute("SELECT run, last FROM runs ORDER BY run")}
        past.run = max(runs, default=0) + 1
        past.ends = runs
        runs[past.run] = max([past.events[-1].event.seq if past.events else 0, *_last_known(runs)])
        database.execute("BEGIN IMMEDIATE")
        database.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", facts.items())
        database.execute("INSERT INTO runs VALUES (?, ?)", (past.run, runs[past.run]))
        database.execute("DELETE FROM runs WHERE run <= ?", (past.run - RUNS,))
        database.execute("COMMIT")
        self.remembered = past

    def _close_database(self) -> None:
        database, self._database = self._database, None
        if database is not None:
            database.close()

    def _close(self) -> None:
        self._writer.shutdown(wait=True)
        self._close_database()


def _last_known(runs: dict[int, int]) -> list[int]:
    return list(runs.values())[-1:]
