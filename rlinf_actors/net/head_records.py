"""Records of heads: files by which programs find the heads of their machine, and the agentds that have joined a head.

Each head or agentd writes a record: a file of mode 0600 that its process keeps locked while it lives. The kernel drops
the lock with the process, so a record without a lock belongs to a killed process; the next head of that user removes
it. Records are found whatever TMPDIR, XDG_RUNTIME_DIR and RLINF_ACTORS_RUN_DIR are in the searching shell.

`rlinf-actors estop` imports this module: no asyncio, click or rich here.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import itertools
import os
import re
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from rlinf_actors.model.readable import duration
from rlinf_actors.net.socket_security import Security, is_tcp
from rlinf_actors.net.unix_sockets import peer_of
from rlinf_actors.settings import Settings
from rlinf_actors.wire.protocol import printable

PLACES = ("/tmp", "/dev/shm")
"""Directories for records. The first one that can be written is used. TMPDIR is none of them: it differs between
shells."""
UNIT_DIR = "/run/rlinf-"
OF_UNITS = (f"{UNIT_DIR}*", f"{UNIT_DIR}*/*")
"""Patterns of the RuntimeDirectory= of systemd units. A unit keeps its record there, because it may have a private
/tmp."""
OF_HEAD_UNIT = f"{UNIT_DIR}head"
"""RuntimeDirectory= of rlinf-head.service."""
PREFIX, SUFFIX = "rlinf-head-", ".json"
MAX_BYTES = 65536
MAX_OF_OTHERS = 64
"""Most records of one other user that root reads, so that a user with many files cannot delay root's emergency stop."""
MAX_ENDPOINTS = 8
"""Most endpoints of a record. `rlinf-actors estop` needs a few descriptors for each."""
SOCKET = "head"
"""File name of the head's unix socket in the run directory of its agentd."""
RUN_DIRS = ("rlinf-*", "rlt-*", "rlt-*/rl*-*")
"""Patterns of the run directories of agentds outside of units; the last two are of rlinf_actors.testing."""
SCRIPT_CHARS = 80


class HeadRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a record says about the process that wrote it: a head, or an agentd that has joined a head on another
    machine.

    Attributes:
        kind: "head" (a standing head), "private" (the head of a cluster that ends with its driver) or "node" (an agentd
            whose head is on another machine).
        pid: pid of the process; for a private cluster the pid of its driver.
        since: when the process started, in seconds since the epoch.
        endpoints: endpoints of the head, unix sockets first.
        script: command line of the process, for people.
        key: path of the key file that the process uses, "" if it uses none.
        head_key: public key of the head, "" if it has none.
        insecure: True if the head's TCP ports need no keys (closed test networks).
        user: uid of the process.
        path: path of the record; "" for a head that was found by its socket.
    """

    kind: str
    pid: int
    since: float
    endpoints: list[str]
    script: str = ""
    key: str = ""
    head_key: str = ""
    insecure: bool = False
    user: int = -1
    path: str = ""

    @property
    def address(self) -> str:
        """The head's address as --head takes it: HOST:PORT if the head listens on TCP, else the
        head's run directory.
        """
        for endpoint in self.endpoints:
            if is_tcp(endpoint):
                return _reachable(endpoint).removeprefix("tcp://")
        return os.path.dirname(self.endpoints[0].removeprefix("ipc://"))

    @property
    def ways(self) -> list[str]:
        """The endpoints by which a process on this machine can connect to the head, unix sockets first."""
        return [_reachable(endpoint) for endpoint in self.endpoints]

    def security(self) -> Security:
        """Return the keys with which a process of the record's user, or of root, connects to this head.

        Raises:
            ConfigError: the key file that the record names cannot be used.
        """
        if not self.key:
            return Security(self.insecure)
        from rlinf_actors.security import keyfile

        return Security(self.insecure, keyfile.load(self.key, user=self.user).pair, self.head_key)

    def told(self) -> str:
        """Return a description of the process for people: kind, pid, user, age and command line."""
        what = {"head": "head", "private": "private cluster", "node": "head of this node's agentd"}[self.kind]
        what = what if self.path else "head without a record"
        whose = f", user {self.user}" if self.user != os.geteuid() else ""
        pid = f", pid {self.pid}" if self.pid else ""
        age = f", up {duration(time.time() - self.since)}" if self.since else ""
        return f"{what}{pid}{whose}{age}: {printable(self.script, SCRIPT_CHARS) or 'its program is not known'}"


# --- leaving a record ---


def publish(record: HeadRecord, settings: Settings, unit_dir: str | None = None) -> Callable[[], None]:
    """Write *record*, so that commands on this machine find this head, or the head that this agentd has joined.

    If no directory can be written, only log a warning: the head works, but can be found only by its address.

    Args:
        record: the record of this process.
        settings: the settings of this process. They may name a directory for records.
        unit_dir: RuntimeDirectory= of this process's systemd unit, None outside of a unit.

    Returns:
        A function that removes the record; the caller calls it when this process ends. The record of a killed process
        is recognized by its missing lock.
    """
    of_unit = [unit_dir] if unit_dir and unit_dir.startswith(UNIT_DIR) and not settings.heads_dir else []
    clear_stale(settings, of_unit)
    failed: OSError | None = None
    for place in [*of_unit, *places(settings)]:
        try:
            path, lock = _write(record, place)
        except OSError as error:
            failed = error
            continue
        return lambda: _remove(path, lock)
    import logging  # not in an emergency stop

    logging.getLogger(__name__).warning(
        "no record of this head can be left on this machine (%s): `rlinf-actors estop` finds it by --head only", failed
    )
    return lambda: None


def _write(record: HeadRecord, place: str) -> tuple[str, int]:
    """Write *record* into the directory *place*. Return the file's path and the descriptor that holds its lock.

    The file is locked before it gets its final name, because a record without a lock counts as that of a killed
    process.
    """
    fd, hidden = tempfile.mkstemp(prefix=f".{PREFIX}", dir=place)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        os.write(fd, msgspec.json.encode(record))
        path = os.path.join(place, f"{os.path.basename(hidden)[1:]}{SUFFIX}")
        os.rename(hidden, path)
    except BaseException:
        os.unlink(hidden)
        os.close(fd)
        raise
    return path, fd


def _remove(path: str, lock: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    os.close(lock)


def clear_stale(settings: Settings, more: Sequence[str] = ()) -> None:
    """Remove the records that killed processes of this user have left in the usual directories and
    in those of *more*.
    """
    for path in _names([*more, *places(settings)]):
        with contextlib.suppress(OSError):
            if not _is_ours(os.lstat(path)):
                continue  # to open a FIFO of another user's takes until that user writes to it
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                if _is_ours(os.fstat(fd)):
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(path)
            finally:
                os.close(fd)


def _is_ours(info: os.stat_result) -> bool:
    return stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid()


def script_of(pid: int) -> str:
    """Return the command line of the process *pid* for people, "" if it cannot be read."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = [word.decode(errors="replace") for word in file.read().split(b"\0")[:-1]]
    except OSError:
        return ""
    return script_in(words)


_TOKEN = re.compile(r"(--token[ =]|keys join )[^ -][^ ]*")
_BOOTED = re.compile(r"  # (agentd|rlinf-actors)$")
"""End of the statements by which this project starts its programs (`cluster.local_daemon.boot`)."""


def script_in(words: list[str]) -> str:
    """Return a command line for people, such as ``train.py --epochs 3``: the words without Python and its options.

    A join token is left out: it is a secret until it is used.
    """
    if words and os.path.basename(words[0]).startswith("python"):
        rest = words[1:]
        while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c"):
            rest = rest[2:] if rest[0] in ("-X", "-W") else rest[1:]
        if rest[:1] == ["-c"]:
            booted = _BOOTED.search(rest[1]) if len(rest) > 1 else None
            rest = [booted[1], *rest[2:]] if booted else ["python -c", *rest[1:]]
        elif rest[:1] == ["-m"]:
            rest = rest[1:]
        words = rest or words[:1]
    if words:
        words[0] = os.path.basename(words[0])
    return _TOKEN.sub(r"\1...", " ".join(words))


# --- finding records ---


def places(settings: Settings) -> list[str]:
    """Return the directories in which heads of this user write their records if they run outside of systemd units."""
    return [settings.heads_dir] if settings.heads_dir else list(PLACES)


def _unit_dirs(settings: Settings) -> list[str]:
    return [] if settings.heads_dir else [path for pattern in OF_UNITS for path in glob.glob(pattern)]


def watched(settings: Settings) -> list[str]:
    """Return all existing directories in which heads and agentds of any user may write records."""
    units = [path for path in _unit_dirs(settings) if not os.path.islink(path)]  # a unit's user could have made it
    return [path for path in (*places(settings), *units) if os.path.isdir(path)]


def parents(settings: Settings) -> list[str]:
    """Return the directories in which agentds of this user may have made their run directories."""
    if settings.heads_dir:
        return [settings.run_dir] if settings.run_dir else []
    usual = (tempfile.gettempdir(), "/tmp", os.environ.get("XDG_RUNTIME_DIR") or "/run")
    return list(dict.fromkeys([settings.run_dir, *usual] if settings.run_dir else usual))


class MachineRecords(msgspec.Struct, frozen=True):
    """The records that were found on this machine.

    Attributes:
        records: the records of this user, the oldest first. If root asked for all users, the others' records follow,
            one of each user in turn, so that a user with many records delays no other user.
        unreadable: path of each record that cannot be read, and the reason. The head that wrote the record may still
            run.
        others: uids of other users who run heads or agentds but whose records this user may not read.
    """

    records: Sequence[HeadRecord]
    unreadable: Sequence[tuple[str, str]] = ()
    others: Sequence[int] = ()


def find_records(settings: Settings, everybody: bool = False) -> MachineRecords:
    """Return the records of the heads of this machine, and of agentds that have joined a head on another machine.

    *everybody* includes the records of other users. Only root can read those.
    """
    me = os.geteuid()
    unreadable, others, counts = list[tuple[str, str]](), dict[tuple[int, int], int](), dict[int, int]()
    found: dict[int, list[HeadRecord]] = {me: []}
    for path in _names(watched(settings)):
        try:
            info = os.lstat(path)
        except (FileNotFoundError, PermissionError):
            continue  # its head has just ended; or another user has mounted a file system there
        owner = info.st_uid
        if not stat.S_ISREG(info.st_mode):
            continue  # no record of a head
        try:
            if owner != me and (me != 0 or not everybody):
                others[info.st_dev, info.st_ino] = owner
                continue
            counts[owner] = counts.get(owner, 0) + 1
            if owner != me and counts[owner] > MAX_OF_OTHERS:
                if counts[owner] == MAX_OF_OTHERS + 1:
                    unreadable.append((path, f"user {owner} has left more than {MAX_OF_OTHERS}"))
                continue
            record = _read(path, owner)
        except FileNotFoundError:
            continue
        except (OSError, ValueError, RecursionError) as error:
            unreadable.append((path, str(error)))
            continue
        if record is not None:
            found.setdefault(owner, []).append(record)
    # own records only: a record of another user must not hide a head of this user
    known = {endpoint for record in found[me] for endpoint in record.endpoints}
    found[me] += [record for record in _without_record(settings) if known.isdisjoint(record.endpoints)]
    lists = [sorted(records, key=lambda record: record.since) for records in found.values()]
    turns = itertools.chain.from_iterable(itertools.zip_longest(*lists[1:]))
    records = [*lists[0], *(record for record in turns if record is not None)]
    return MachineRecords(tuple(records), tuple(unreadable), tuple(sorted(_living(others))))


def _names(directories: Sequence[str]) -> Iterator[str]:
    for directory in dict.fromkeys(directories):
        yield from sorted(glob.glob(f"{glob.escape(directory)}/{PREFIX}*{SUFFIX}"))


def _read(path: str, owner: int) -> HeadRecord | None:
    """Return the record in the file *path*, None if the process that wrote it has ended.

    *owner* is the uid that owns the file. The record of a unit whose process was killed counts as long as it is there:
    systemd keeps the directory while it restarts the unit, and no longer.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not a record, or others could have written it.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != owner or info.st_mode & 0o077:
            raise ValueError("others could have written it")
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        else:
            if not path.startswith(UNIT_DIR):
                return None
        data = os.read(fd, MAX_BYTES)
    finally:
        os.close(fd)
    record = msgspec.json.decode(data, type=HeadRecord)
    if record.kind not in ("head", "private", "node") or not 0 < len(record.endpoints) <= MAX_ENDPOINTS:
        raise ValueError(f"a record of kind {record.kind!r} with {len(record.endpoints)} endpoints")
    return msgspec.structs.replace(record, user=owner, path=path)


def _living(others: Mapping[tuple[int, int], int]) -> set[int]:
    """Return the uids of other users whose heads or agentds run.

    *others* maps device and inode of each of their records to the owner's uid. This process cannot open those files,
    but the kernel lists which of them are locked.
    """
    if not others:
        return set()
    from rlinf_actors import procfs

    return {others[file] for file in others.keys() & procfs.locks().keys()}


def _without_record(settings: Settings) -> Iterator[HeadRecord]:
    """Yield the running heads whose record is not there, or that could write none: no directory for it could be
    written, the directory was cleaned, or RLINF_ACTORS_HEADS differs, as in rlinf_actors.testing. They are found by
    sockets in this user's run directories.
    """
    found = [glob.glob(f"{glob.escape(parent)}/{pattern}") for parent in parents(settings) for pattern in RUN_DIRS]
    directories = sorted(path for paths in found for path in paths)
    for directory in dict.fromkeys([*_unit_dirs(settings), *directories]):
        path = f"{directory}/{SOCKET}"
        with contextlib.suppress(OSError):
            info = os.lstat(directory)
            private = stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid() and not info.st_mode & 0o077
            pid = _listener(path) if private and os.path.exists(path) else None
            if pid is not None:
                yield HeadRecord("private", pid, 0.0, [f"ipc://{path}"], script_of(pid), user=os.geteuid())


def _listener(path: str) -> int | None:
    """Return the process that listens on the unix socket *path*, 0 if it is not known, None if none does: the socket of
    a killed process refuses connections.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except BlockingIOError:
            return 0  # it stands still, and its queue is full
        except OSError:
            return None
        return peer_of(probe)[0]


def _reachable(endpoint: str) -> str:
    """Return the endpoint at which a process of this machine reaches a head that listens on *endpoint*.

    If the head listens on every address, this is the loopback address.
    """
    return endpoint.replace("tcp://0.0.0.0:", "tcp://127.0.0.1:").replace("tcp://[::]:", "tcp://[::1]:")
