"""Records of heads: by what a head, or an agentd that has joined one, is found on its machine.

Each leaves a record: a file of mode 0600 that its process holds locked for as long as it lives. The kernel drops the
lock with the process, so a record without a lock is of a process that was killed; the next head of that user removes
it. A record is found whatever TMPDIR, XDG_RUNTIME_DIR and RLINF_ACTORS_RUN_DIR are in the shell that looks.

`rlinf-actors estop` imports this module: no asyncio, click or rich here.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import itertools
import os
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from rlinf_actors.net.socket_security import Security, is_tcp
from rlinf_actors.settings import Settings
from rlinf_actors.wire.protocol import printable

PLACES = ("/tmp", "/dev/shm")
"""Where records lie, in the order in which they are tried: a disk may be full. Not TMPDIR: shells differ in it."""
UNIT_DIR = "/run/rlinf-"
OF_UNITS = (f"{UNIT_DIR}*", f"{UNIT_DIR}*/*")
"""RuntimeDirectory= of units, which may have a /tmp of their own: their records lie there."""
PREFIX, SUFFIX = "rlinf-head-", ".json"
MAX_BYTES = 65536
MAX_OF_OTHERS = 64
"""Records of one other user that root reads; whoever leaves more keeps root's emergency stop from nothing else."""
MAX_ENDPOINTS = 8
"""Of a record: each costs whoever stops its head a few descriptors."""
SOCKET = "head"
"""Name of the head's socket in its agentd's run directory."""
SCRIPT_CHARS = 80


class HeadRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a head, or an agentd that has joined one, says of itself.

    Attributes:
        kind: "head" (a standing one), "private" (it ends with a driver) or "node" (an agentd of a head elsewhere).
        pid: of its process; of a private cluster its driver's.
        since: when it started, in seconds since the epoch.
        endpoints: of the head, unix sockets first.
        script: the command line of that process, for people.
        key: path of the key file that its process uses, "" without.
        head_key: public key of the head, "" without.
        insecure: whether its TCP ports take no keys (closed test networks).
        user: uid of its process.
        path: of the record; "" of a head of an earlier version, which leaves none.
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
        """What --head takes: HOST:PORT, else the run directory."""
        for endpoint in self.endpoints:
            if is_tcp(endpoint):
                return _reachable(endpoint).removeprefix("tcp://")
        return os.path.dirname(self.endpoints[0].removeprefix("ipc://"))

    @property
    def ways(self) -> list[str]:
        """Endpoints to try, the best first."""
        return [_reachable(endpoint) for endpoint in self.endpoints]

    def security(self) -> Security:
        """What a process of this user, or of root, comes to that head with.

        Raises:
            ConfigError: the key file cannot be used.
        """
        if not self.key:
            return Security(self.insecure)
        from rlinf_actors.security import keyfile

        return Security(self.insecure, keyfile.load(self.key, user=self.user).pair, self.head_key)

    def told(self) -> str:
        """The process, for people: script, pid and age."""
        what = {"head": "head", "private": "private cluster", "node": "head of this node's agentd"}[self.kind]
        whose = f", user {self.user}" if self.user != os.geteuid() else ""
        pid = f", pid {self.pid}" if self.pid else ""
        age = f", up {ago(time.time() - self.since)}" if self.since else ""
        return f"{what}{pid}{whose}{age}: {printable(self.script, SCRIPT_CHARS) or 'an earlier version'}"


# --- leaving a record ---


def publish(record: HeadRecord, settings: Settings, unit_dir: str | None = None) -> Callable[[], None]:
    """Leave a record of this process. Call what is returned at its end; the lock ends with the process in any case.

    Where it can be written nowhere, the log says so: such a head works, but nobody finds it without its address.

    Args:
        record: what it says.
        settings: the environment's, for where.
        unit_dir: RuntimeDirectory= of our unit, None without.
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
    """Lock it before it has its name: who finds it without a lock takes it for that of a killed process."""
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
    """Remove what processes of this user that were killed have left, in *more* directories too."""
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
    """The command line of a process, for people; "" if it cannot be read."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = [word.decode(errors="replace") for word in file.read().split(b"\0")[:-1]]
    except OSError:
        return ""
    return script_in(words)


def script_in(words: list[str]) -> str:
    """A command line without its interpreter, as ``train.py --epochs 3``."""
    if words and os.path.basename(words[0]).startswith("python"):
        rest = words[1:]
        while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c"):
            rest = rest[2:] if rest[0] in ("-X", "-W") else rest[1:]
        if rest[:1] == ["-c"]:
            rest = ["python -c", *rest[1:]]
        elif rest[:1] == ["-m"]:
            rest = rest[1:]
        words = rest or words[:1]
    if words:
        words[0] = os.path.basename(words[0])
    return " ".join(words)


# --- finding records ---


def places(settings: Settings) -> list[str]:
    """Where heads of this user publish their records."""
    return [settings.heads_dir] if settings.heads_dir else list(PLACES)


def watched(settings: Settings) -> list[str]:
    """Every directory that exists and in which a record of anybody can appear."""
    found = [] if settings.heads_dir else [path for pattern in OF_UNITS for path in glob.glob(pattern)]
    units = [path for path in found if not os.path.islink(path)]  # a unit's user could have made the link
    return [path for path in (*places(settings), *units) if os.path.isdir(path)]


def parents(settings: Settings) -> list[str]:
    """Where this user's agentds may have their run directories."""
    if settings.heads_dir:
        return [settings.run_dir] if settings.run_dir else []
    usual = (tempfile.gettempdir(), "/tmp", os.environ.get("XDG_RUNTIME_DIR") or "/run")
    return list(dict.fromkeys([settings.run_dir, *usual] if settings.run_dir else usual))


@dataclass(frozen=True)
class MachineRecords:
    """What runs on this machine.

    Attributes:
        records: of this user, the oldest first; then, for root, of the others, by turns: who has many holds up no
            other.
        unreadable: path of each record that cannot be read, and why: a head may run that nobody can ask.
        others: uids of other users whose records this user may not read.
    """

    records: Sequence[HeadRecord]
    unreadable: Sequence[tuple[str, str]] = ()
    others: Sequence[int] = ()


def find_records(settings: Settings, everybody: bool = False) -> MachineRecords:
    """Find the heads of this machine, and the agentds that have joined a head elsewhere.

    Args:
        settings: the environment's.
        everybody: with those of other users, if this is root.
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
            continue  # no head leaves that
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
    known = {endpoint for record in found[me] for endpoint in record.endpoints}  # what others say hides none of ours
    found[me] += [record for record in _without_record(settings) if known.isdisjoint(record.endpoints)]
    lists = [sorted(records, key=lambda record: record.since) for records in found.values()]
    turns = itertools.chain.from_iterable(itertools.zip_longest(*lists[1:]))
    records = [*lists[0], *(record for record in turns if record is not None)]
    return MachineRecords(tuple(records), tuple(unreadable), tuple(sorted(_living(others))))


def _names(directories: Sequence[str]) -> Iterator[str]:
    for directory in dict.fromkeys(directories):
        yield from sorted(glob.glob(f"{glob.escape(directory)}/{PREFIX}*{SUFFIX}"))


def _read(path: str, owner: int) -> HeadRecord | None:
    """A record, None if its process has ended. Raises OSError, and ValueError if it is no record."""
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
            return None
        data = os.read(fd, MAX_BYTES)
    finally:
        os.close(fd)
    record = msgspec.json.decode(data, type=HeadRecord)
    if record.kind not in ("head", "private", "node") or not 0 < len(record.endpoints) <= MAX_ENDPOINTS:
        raise ValueError(f"a record of kind {record.kind!r} with {len(record.endpoints)} endpoints")
    return msgspec.structs.replace(record, user=owner, path=path)


def _living(others: Mapping[tuple[int, int], int]) -> set[int]:
    """Return which users have a locked file among these: of a process that lives. This user may not open them."""
    if not others:
        return set()
    from rlinf_actors import procfs

    return {others[file] for file in others.keys() & procfs.flocks().keys()}


def _without_record(settings: Settings) -> Iterator[HeadRecord]:
    """Heads of earlier versions, by their sockets in run directories; of this user only."""
    units = [] if settings.heads_dir else [path for pattern in OF_UNITS for path in glob.glob(pattern)]
    directories = [path for parent in parents(settings) for path in sorted(glob.glob(f"{glob.escape(parent)}/rlinf-*"))]
    for directory in dict.fromkeys([*units, *directories]):
        path = f"{directory}/{SOCKET}"
        with contextlib.suppress(OSError):
            info = os.lstat(directory)
            private = stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid() and not info.st_mode & 0o077
            if private and os.path.exists(path) and _answers(path):
                yield HeadRecord("private", 0, 0.0, [f"ipc://{path}"], user=os.geteuid())


def _answers(path: str) -> bool:
    """True if a process listens on this unix socket; that of a process that was killed refuses."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except BlockingIOError:
            return True  # it stands still, and its queue is full
        except OSError:
            return False
    return True


def _reachable(endpoint: str) -> str:
    """An endpoint to connect to: of a head that listens on every address, that on loopback."""
    return endpoint.replace("tcp://0.0.0.0:", "tcp://127.0.0.1:").replace("tcp://[::]:", "tcp://[::1]:")


def ago(seconds: float) -> str:
    """A duration as people say it: ``12 s``, ``3 min``, ``5 h``, ``2 d``."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
