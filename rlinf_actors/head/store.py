"""Persistent state of a head in one small sqlite file, and the head's own key files.

The store decides nothing: it writes the changes of the coordinator's `Persist` commands. A thread of its own writes
them in their order; each is durable before it is reported as written. A failed write is repeated with the next one.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import errno
import logging
import os
import sqlite3
import stat
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec

from rlinf_actors.errors import ConfigError
from rlinf_actors.head import commands
from rlinf_actors.head.key_registry import NO_OWN_KEYS, OwnKeys
from rlinf_actors.net import holders
from rlinf_actors.security import keyfile
from rlinf_actors.security.keyfile import KeyFile
from rlinf_actors.settings import Settings
from rlinf_actors.version import VERSION
from rlinf_actors.wire.key_messages import KeyState
from rlinf_actors.wire.protocol import PROTOCOL

log = logging.getLogger(__name__)

Row = TypeVar("Row")

FILE = "head.sqlite3"
ROOM = 256 << 10
"""Free bytes below which a file system counts as full."""
_FULL = (errno.ENOSPC, errno.EDQUOT)

_TABLES = """
    CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value INTEGER NOT NULL);
    CREATE TABLE IF NOT EXISTS nodes (id TEXT PRIMARY KEY, node BLOB NOT NULL);
    CREATE TABLE IF NOT EXISTS given_up (
        n INTEGER PRIMARY KEY AUTOINCREMENT, kind TEXT NOT NULL, id TEXT NOT NULL, reason TEXT NOT NULL
    );
    CREATE INDEX IF NOT EXISTS given_up_id ON given_up (id);
    CREATE TABLE IF NOT EXISTS stops (key TEXT PRIMARY KEY, text TEXT NOT NULL);
    CREATE TABLE IF NOT EXISTS drains (id TEXT PRIMARY KEY, why TEXT NOT NULL);
    CREATE TABLE IF NOT EXISTS keys (public TEXT PRIMARY KEY, key BLOB NOT NULL);
    CREATE TABLE IF NOT EXISTS jobs (namespace TEXT PRIMARY KEY, proof TEXT NOT NULL, owner TEXT NOT NULL);
"""
_TRIM = """
    DELETE FROM given_up WHERE kind = ?1 AND n <=
        (SELECT n FROM given_up WHERE kind = ?1 ORDER BY n DESC LIMIT 1 OFFSET ?2)
"""


_STATEMENTS: dict[type[commands.Change], tuple[str, ...]] = {
    commands.KnownNode: ("INSERT OR REPLACE INTO nodes VALUES (:id, :blob)",),
    commands.ForgetNode: ("DELETE FROM nodes WHERE id = :id",),
    commands.Tombstone: (
        "DELETE FROM given_up WHERE id = :id AND kind = :kind",
        "INSERT INTO given_up (kind, id, reason) VALUES (:kind, :id, :reason)",
    ),
    commands.ForgetTombstone: ("DELETE FROM given_up WHERE id = :id AND kind = :kind",),
    commands.StopPressed: ("INSERT OR REPLACE INTO stops VALUES (:key, :text)",),
    commands.StopReleased: ("DELETE FROM stops WHERE key = :key",),
    commands.NodeDrained: ("INSERT OR REPLACE INTO drains VALUES (:id, :why)",),
    commands.NodeUndrained: ("DELETE FROM drains WHERE id = :id",),
    KeyState: ("INSERT OR REPLACE INTO keys VALUES (:public, :blob)",),
    commands.ForgetKey: ("DELETE FROM keys WHERE public = :public",),
    commands.KnownJob: ("INSERT OR REPLACE INTO jobs VALUES (:namespace, :proof, :owner)",),
    commands.ForgetJob: ("DELETE FROM jobs WHERE namespace = :namespace",),
}
"""The SQL for each change. Tombstones are in table given_up, whose name is part of the file format."""


class HeadStore:
    """The sqlite file with the persistent state of one head. Opening the file begins a new epoch. Loop thread only.

    Args:
        directory: directory of the file head.sqlite3; created with mode 0700 if it does not exist.

    Attributes:
        remembered: the state that the earlier head left.
        trouble: why the last write would not survive a restart of the head, "" if it would.

    Raises:
        ConfigError: the file cannot be read or written, is damaged, or belongs to a running head; or other users can
            write to its directory. The message says what to do.
        OSError: the disk, or the user's quota, is full. A later attempt may find room.
    """

    def __init__(self, directory: str) -> None:
        self.path = os.path.join(directory, FILE)
        self.trouble = ""
        self._asked: collections.deque[commands.Change] = collections.deque()
        self._unwritten: list[commands.Change] = []
        self._waiting: list[Callable[[bool], None]] = []  # told by the next write
        self._writing = False
        try:
            os.makedirs(directory, mode=0o700, exist_ok=True)
            _check_owner(directory, os.stat(directory))
            _check_link(directory)
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with contextlib.closing(os.fdopen(fd, "rb")):
                _check_owner(self.path, os.fstat(fd))
        except OSError as error:
            if error.errno in _FULL:
                raise _no_room(self.path, os.strerror(error.errno)) from None
            raise ConfigError(
                f"cannot be written: {error.strerror}. The head keeps emergency stops, ranks and keys there: give it a "
                "directory that it may write to ([paths] state_dir, --state-dir)",
                path=self.path,
            ) from None
        self._database = sqlite3.connect(self.path, timeout=0, isolation_level=None, check_same_thread=False)
        try:
            self.remembered = self._open()
            self._files = {path: os.stat(path) for path in (self.path, f"{self.path}-wal")}
        except (sqlite3.Error, msgspec.DecodeError, ConfigError) as error:
            self._database.close()
            if isinstance(error, sqlite3.Error) and _says_full(error, directory):
                raise _no_room(self.path, str(error)) from None
            raise ConfigError(_advice(error, self.path), path=self.path) from None
        self._writer = ThreadPoolExecutor(1, "head-store")

    def write(self, changes: Sequence[commands.Change], done: Callable[[bool], None]) -> None:
        """Write *changes* to disk, then call *done* on the loop: with True, or with False if the write failed.

        Changes that could not be written are kept, and written with the next call. Changes of calls that come while
        others are being written are written together afterwards.
        """
        self._asked.extend(changes)
        self._waiting.append(done)
        if not self._writing:
            self._start_write()

    def close(self) -> None:
        """Write pending changes and those that could not be written before, and close the file. A second call has no
        effect.
        """
        self._writer.shutdown(wait=True)
        self._waiting.clear()
        self._write()
        self._database.close()

    # --- inside ---

    def _start_write(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._writing = True
        writing = asyncio.get_running_loop().run_in_executor(self._writer, self._write)
        writing.add_done_callback(lambda writing: self._written(writing, waiting))

    def _written(self, writing: asyncio.Future[bool], waiting: list[Callable[[bool], None]]) -> None:
        self._writing = False
        if writing.cancelled():
            return
        for done in waiting:
            done(writing.result())
        if self._waiting and not self._writing:  # not started by one of those
            self._start_write()

    def _open(self) -> commands.Snapshot:
        database = self._database
        database.execute("PRAGMA locking_mode = EXCLUSIVE")  # one head at a time; the kernel frees it with the process
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")  # in WAL mode NORMAL is not durable
        (state,) = database.execute("PRAGMA quick_check(1)").fetchone()
        if state != "ok":
            raise sqlite3.DatabaseError(state)
        database.executescript(_TABLES)
        facts = dict(self._rows("name, value FROM facts", tuple[str, int]))
        if facts.setdefault("protocol", PROTOCOL) != PROTOCOL:
            raise ConfigError(
                f"is of a head of protocol {facts['protocol']}, and this one is rlinf-actors {VERSION} (protocol "
                f"{PROTOCOL}): start the version that wrote it, or give this one another directory ([paths] state_dir, "
                "--state-dir), where it begins without keys, ranks and emergency stops"
            )
        epoch = facts.get("epoch", 0) + 1
        with self._transaction():
            for (kind,) in database.execute("SELECT DISTINCT kind FROM given_up").fetchall():
                database.execute(_TRIM, (kind, commands.KEPT))
            now = [("protocol", PROTOCOL), ("epoch", epoch)]
            database.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", now)
        decode = msgspec.msgpack.Decoder(commands.KnownNode).decode
        decode_key = msgspec.msgpack.Decoder(KeyState).decode
        return commands.Snapshot(
            epoch,
            [decode(node) for (node,) in self._rows("node FROM nodes ORDER BY id", tuple[bytes])],
            {
                (kind, id): reason
                for kind, id, reason in self._rows("kind, id, reason FROM given_up ORDER BY n", tuple[str, str, str])
            },
            dict(self._rows("key, text FROM stops ORDER BY rowid", tuple[str, str])),
            dict(self._rows("id, why FROM drains ORDER BY rowid", tuple[str, str])),
            [decode_key(key) for (key,) in self._rows("key FROM keys ORDER BY rowid", tuple[bytes])],
            [
                commands.KnownJob(*row)
                for row in self._rows("namespace, proof, owner FROM jobs ORDER BY rowid", tuple[str, str, str])
            ],
        )

    def _rows(self, what: str, row: type[Row]) -> list[Row]:
        """Return the rows that the query *what* selects, as tuples of type *row*.

        Raises:
            msgspec.ValidationError: a value is of another type; sqlite does not check the types of columns.
        """
        found: list[Row] = msgspec.convert(self._database.execute(f"SELECT {what}").fetchall(), list[row])  # type: ignore[valid-type]
        return found

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._database.execute("COMMIT")
        except BaseException:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            raise

    def _write(self) -> bool:
        """Write all pending changes to disk in one transaction. Writer's thread."""
        while self._asked:
            self._unwritten.append(self._asked.popleft())
        if not self._unwritten:
            return not self.trouble  # an earlier call has written ours too
        trouble = ""
        try:
            with self._transaction():
                for change in self._unwritten:
                    self._apply(change)
        except sqlite3.Error as error:
            trouble = f"{self.path} could not be written: {error}; a head that is restarted will not know the rest"
        else:
            self._unwritten.clear()
            if not all(_is_at(path, opened) for path, opened in self._files.items()):  # sqlite does not notice
                trouble = (
                    f"{self.path} was deleted or replaced while this head has it open: a head that is restarted will "
                    "know nothing that is written now. Move it back, or restart the head when no robot moves"
                )
        if trouble:
            log.error("%s", trouble)
        elif self.trouble:
            log.warning("%s is written again", self.path)
        self.trouble = trouble
        return not trouble

    def _apply(self, change: commands.Change) -> None:
        values = {**msgspec.structs.asdict(change), "blob": msgspec.msgpack.encode(change)}
        if isinstance(change, commands.KnownNode):
            values["id"] = change.report.node_id
        for statement in _STATEMENTS[type(change)]:
            self._database.execute(statement, values)


def _is_at(path: str, opened: os.stat_result) -> bool:
    """Return True if *path* still names the file that was *opened*."""
    try:
        return os.path.samestat(os.stat(path), opened)
    except OSError:
        return False


def _check_owner(path: str, found: os.stat_result) -> None:
    """Raise ConfigError if other users can write to this file or directory, because they could add keys."""
    if found.st_uid not in (os.geteuid(), 0) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"can be written by others (mode {stat.S_IMODE(found.st_mode):04o}, owner {found.st_uid}), and the head "
            "keeps there which keys are valid: give it one of this user's alone ([paths] state_dir, --state-dir)",
            path=path,
        )


def _check_link(directory: str) -> None:
    """Raise ConfigError if *directory* is a link of another user: it may lead to another head's directory."""
    owner = os.lstat(directory).st_uid
    if owner not in (os.geteuid(), 0):
        raise ConfigError(
            f"is a link of user {owner}: give the head a directory of this user's ([paths] state_dir, --state-dir)",
            path=directory,
        )


def _says_full(error: sqlite3.Error, directory: str) -> bool:
    """Return True if *error* means that the disk is full.

    For some calls sqlite says only that writing failed. The free room in *directory* then decides.
    """
    text = str(error)
    if "full" in text:
        return True
    if "I/O error" not in text and "unable to open" not in text:
        return False
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize < ROOM or (found.f_files > 0 and found.f_favail == 0)


def _no_room(path: str, said: str) -> OSError:
    """Return the error for a head that cannot start because the disk is full.

    It is no ConfigError, because the disk may have room later. With a ConfigError the head exits with code 78, and a
    supervisor leaves it down; with this error it exits with 69, and the supervisor starts it again.
    """
    mount = os.path.realpath(os.path.dirname(path))
    while not os.path.ismount(mount):
        mount = os.path.dirname(mount)
    found = os.statvfs(mount)
    free, size = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    inodes = f" and {found.f_favail:,} of {found.f_files:,} inodes" if found.f_files else ""
    return OSError(
        f"{path} cannot be written: {said}. The file system at {mount} has {free >> 10:,} of {size >> 10:,} KiB"
        f"{inodes} free for user {os.geteuid()}, or a quota is used up. The head keeps emergency stops, ranks and keys "
        "there, and does not begin without: free some space. A unit starts it again each second until there is room"
    )


def _advice(error: Exception, path: str) -> str:
    text = str(error)
    if isinstance(error, ConfigError):
        return text
    if "locked" in text:
        who = holders.of_lock(path, "POSIX")
        return (
            f"is used by another head that runs{who and f', {who}'}: end that one, or give this one another directory "
            "([paths] state_dir, --state-dir)"
        )
    if isinstance(error, sqlite3.OperationalError):
        return f"cannot be used: {text}. Give the head a directory that it may write to"
    return (
        f"is damaged ({text}). Move it away and start the head again: emergency stops that were in force, the "
        "nodes' ranks and all keys are forgotten then, so see first that every robot is safe"
    )


def own_keys(head: KeyFile | None, settings: Settings) -> OwnKeys:
    """Return the public keys of the head, and of the driver on its machine if that key is for this head.

    Args:
        head: the head's key file, or the key file of the user that runs it; None for a head without keys.
        settings: the values of the environment variables; they lead to the driver's key file.

    Raises:
        ConfigError: the driver's key file cannot be used.
    """
    if head is None:
        return NO_OWN_KEYS
    if head.role == keyfile.ROLE:
        return OwnKeys(local=head.pair.public)
    path = keyfile.locate(settings, "driver")
    if path is not None:
        driver = keyfile.load(path)
        if driver.head == head.pair.public:  # else this user drives another cluster
            return OwnKeys(head.pair.public, driver.pair.public, driver.name)
    return OwnKeys(head.pair.public)
