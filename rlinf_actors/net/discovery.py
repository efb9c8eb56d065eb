"""Which heads run on this machine, and which head is meant where nobody says one.

Each head, and each agentd that has joined one, leaves a record: a file of mode 0600 that its process holds locked for
as long as it lives. The kernel drops the lock with the process, so a record without a lock is of a process that was
killed; the next head of that user removes it. A record is found whatever TMPDIR, XDG_RUNTIME_DIR and
RLINF_ACTORS_RUN_DIR are in the shell that looks.

| who asks | which head is meant |
|---|---|
| every command but estop | --head; RLINF_HEAD; client file; the one standing head here; the one private cluster here |
| Cluster() | its argument; RLINF_HEAD; the client file. Never one that nobody named |
| estop | all of them (`rlinf_actors.cli.estop`) |

`rlinf-actors estop` imports this module: no asyncio, click or rich here.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec

from rlinf_actors.errors import ConfigError
from rlinf_actors.net.address import DEFAULT_LISTEN, endpoint_of
from rlinf_actors.net.security import Security, is_tcp
from rlinf_actors.settings import CLIENT_CONFIG, HEAD, Settings
from rlinf_actors.wire.bounds import printable

PLACES = ("/tmp", "/dev/shm")
"""Where records lie, in the order in which they are tried: a disk may be full. Not TMPDIR: shells differ in it."""
OF_UNITS = ("/run/rlinf-*", "/run/rlinf-*/*")
"""RuntimeDirectory= of units, which may have a /tmp of their own: their records lie there."""
PREFIX, SUFFIX = "rlinf-head-", ".json"
MAX_BYTES = 65536
MAX_OF_OTHERS = 64
"""Records of one other user that root reads; whoever leaves more keeps root's emergency stop from nothing else."""
SOCKET = "head"
"""Name of the head's socket in its agentd's run directory."""
PRIVATE = "private"
"""As an address: a private cluster, also where the client file names a head."""
SCRIPT_CHARS = 80
CLIENT_FILE = "rlinf-actors/client.toml"
"""In /etc and in the user's directory of configuration."""
CLIENT_KEYS = ("head", "key_file")


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
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


def leave(record: Record, settings: Settings, unit_dir: str | None = None) -> Callable[[], None]:
    """Leave a record of this process. Call what is returned at its end; the lock ends with the process in any case.

    Where it can be written nowhere, the log says so: such a head works, but nobody finds it without its address.

    Args:
        record: what it says.
        settings: the environment's, for where.
        unit_dir: RuntimeDirectory= of our unit, None without.
    """
    clear_stale(settings)
    failed: OSError | None = None
    for place in [*([unit_dir] if unit_dir and unit_dir.startswith("/run/rlinf-") else []), *places(settings)]:
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


def _write(record: Record, place: str) -> tuple[str, int]:
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


def clear_stale(settings: Settings) -> None:
    """Remove what processes of this user that were killed have left."""
    for path in _names(places(settings)):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if os.fstat(fd).st_uid == os.geteuid():
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(path)
            finally:
                os.close(fd)


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
    """Where heads of this user leave their records."""
    return [settings.heads_dir] if settings.heads_dir else list(PLACES)


def watched(settings: Settings) -> list[str]:
    """Every directory that exists and in which a record of anybody can appear."""
    units = [] if settings.heads_dir else [path for pattern in OF_UNITS for path in glob.glob(pattern)]
    return [path for path in (*places(settings), *units) if os.path.isdir(path)]


def parents(settings: Settings) -> list[str]:
    """Where this user's agentds may have their run directories."""
    if settings.heads_dir:
        return [settings.run_dir] if settings.run_dir else []
    usual = (tempfile.gettempdir(), "/tmp", os.environ.get("XDG_RUNTIME_DIR") or "/run")
    return list(dict.fromkeys([settings.run_dir, *usual] if settings.run_dir else usual))


@dataclass(frozen=True)
class Seen:
    """What runs on this machine.

    Attributes:
        records: of this user, the oldest first; for root, of everybody.
        unreadable: path of each record that cannot be read, and why: a head may run that nobody can ask.
        others: uids of other users whose records this user may not read.
    """

    records: Sequence[Record]
    unreadable: Sequence[tuple[str, str]] = ()
    others: Sequence[int] = ()


def look(settings: Settings, everybody: bool = False) -> Seen:
    """Find the heads of this machine, and the agentds that have joined a head elsewhere.

    Args:
        settings: the environment's.
        everybody: with those of other users, if this is root.
    """
    me = os.geteuid()
    found, unreadable, others, counts = [], [], set(), dict[int, int]()
    for path in _names(watched(settings)):
        try:
            owner = os.lstat(path).st_uid
            if owner != me and (me != 0 or not everybody):
                if _is_locked(path):
                    others.add(owner)
                continue
            counts[owner] = counts.get(owner, 0) + 1
            if owner != me and counts[owner] > MAX_OF_OTHERS:
                continue
            record = _read(path, owner)
        except FileNotFoundError:
            continue  # its head has just ended
        except (OSError, ValueError) as error:
            unreadable.append((path, str(error)))
            continue
        if record is not None:
            found.append(record)
    known = {endpoint for record in found for endpoint in record.endpoints}
    found += [record for record in _without_record(settings) if known.isdisjoint(record.endpoints)]
    records = sorted(found, key=lambda record: record.since)
    return Seen(tuple(records), tuple(unreadable), tuple(sorted(others)))


def _names(directories: Sequence[str]) -> Iterator[str]:
    for directory in dict.fromkeys(directories):
        yield from sorted(glob.glob(f"{glob.escape(directory)}/{PREFIX}*{SUFFIX}"))


def _read(path: str, owner: int) -> Record | None:
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
    record = msgspec.json.decode(data, type=Record)
    if record.kind not in ("head", "private", "node") or not record.endpoints:
        raise ValueError(f"a record of kind {record.kind!r} with {len(record.endpoints)} endpoints")
    return msgspec.structs.replace(record, user=owner, path=path)


def _is_locked(path: str) -> bool:
    """True if another user's record, which this user may not open, is of a process that lives."""
    from rlinf_actors import procfs

    info = os.lstat(path)
    return (info.st_dev, info.st_ino) in procfs.flocks()


def _without_record(settings: Settings) -> Iterator[Record]:
    """Heads of earlier versions, by their sockets in run directories; of this user only."""
    units = [] if settings.heads_dir else [path for pattern in OF_UNITS for path in glob.glob(pattern)]
    directories = [path for parent in parents(settings) for path in sorted(glob.glob(f"{glob.escape(parent)}/rlinf-*"))]
    for directory in dict.fromkeys([*units, *directories]):
        path = f"{directory}/{SOCKET}"
        with contextlib.suppress(OSError):
            info = os.lstat(directory)
            private = stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid() and not info.st_mode & 0o077
            if private and os.path.exists(path) and _answers(path):
                yield Record("private", 0, 0.0, [f"ipc://{path}"], user=os.geteuid())


def _answers(path: str) -> bool:
    """True if a process listens on this unix socket; that of a process that was killed refuses."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
    return True


def _reachable(endpoint: str) -> str:
    """An endpoint to connect to: of a head that listens on every address, that on loopback."""
    return endpoint.replace("tcp://0.0.0.0:", "tcp://127.0.0.1:").replace("tcp://[::]:", "tcp://[::1]:")


# --- the client file ---


def client_settings() -> Settings:
    """The environment's settings, completed by the client files.

    /etc/rlinf-actors/client.toml counts for everybody on the machine; a key in ~/.config/rlinf-actors/client.toml
    wins over it, and the environment over both.

    Raises:
        ConfigError: a variable or a client file is wrong; `path` says which.
    """
    return with_client_file(Settings.load())


def with_client_file(settings: Settings) -> Settings:
    """These settings, completed by the client files. Raises ConfigError."""
    chosen = settings.client_config
    usual = (f"/etc/{CLIENT_FILE}", os.path.join(os.path.expanduser(settings.config_home), CLIENT_FILE))
    values: dict[str, tuple[str, str]] = {}
    for path in (chosen,) if chosen else usual:
        values.update({key: (value, path) for key, value in read_client_file(path, must_exist=bool(chosen)).items()})
    if settings.head is None and "head" in values:
        head, path = values["head"]
        settings = replace(settings, head=head, head_from=f"{path}: head")
    if settings.key_file is None and settings.key_dir is None and "key_file" in values:
        settings = replace(settings, key_file=os.path.expanduser(values["key_file"][0]))
    return settings


def read_client_file(path: str, must_exist: bool = False) -> dict[str, str]:
    """What a client file says; nothing if there is none.

    Raises:
        ConfigError: it is not TOML, has an unknown key, or others can write to it.
    """
    try:
        with open(path, "rb") as file:
            info = os.fstat(file.fileno())
            data = file.read(MAX_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        if must_exist:
            raise ConfigError("does not exist", path=f"{CLIENT_CONFIG} {path}") from None
        return {}
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", path=path) from None
    if info.st_uid not in (0, os.geteuid()) or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"others can write to it (mode {stat.S_IMODE(info.st_mode):04o}, owner {info.st_uid}), and it says which "
            f"head this user trusts: chown {os.geteuid()} {path} && chmod 644 {path}",
            path=path,
        )
    from rlinf_actors.compat import tomllib  # 10 ms: not where there is no file

    try:
        values = tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"is not TOML: {error}", path=path) from None
    for key, value in values.items():
        if key not in CLIENT_KEYS:
            import difflib

            nearest = difflib.get_close_matches(key, CLIENT_KEYS, n=1, cutoff=0.0)[0]
            known = ", ".join(CLIENT_KEYS)
            raise ConfigError(f"is not a key here; did you mean {nearest!r}? Known: {known}", path=f"{path}: {key}")
        if not isinstance(value, str) or not value:
            raise ConfigError(f"is {value!r}; it must be a text", path=f"{path}: {key}")
    return values


# --- which one is meant ---


def find_head(given: str | None, settings: Settings) -> tuple[str, str]:
    """The endpoint of the head that a command means; and what it is, for people, where nobody has named it.

    Args:
        given: the option's value, None without.
        settings: with the client file (`client_settings`).

    Raises:
        ConfigError: it is no address, or its name has no address; or none is named and there is not exactly one
            standing head, or without those one private cluster, of this user on this machine.
    """
    text, source = named(given, settings)
    if text:
        return endpoint_at(text, source), ""
    seen = look(settings)
    heads = [record for record in seen.records if record.kind != "node"]
    candidates = [record for record in heads if record.kind == "head"] or heads
    if len(candidates) == 1:
        return candidates[0].ways[0], f"{candidates[0].told()} ({candidates[0].address})"
    if candidates:
        raise ConfigError(
            f"{len(candidates)} heads of yours run on this machine; say which by --head, or by {HEAD}:\n{table(heads)}"
        )
    raise ConfigError(
        f"no head is known, and none of yours runs on this machine: pass --head HOST:PORT, set {HEAD}, or write "
        f'head = "HOST:PORT" into /etc/{CLIENT_FILE} or ~/.config/{CLIENT_FILE}{_hint(seen)}'
    )


def _hint(seen: Seen) -> str:
    """What else runs here, for who finds no head."""
    nodes = {record.address: record.pid for record in seen.records if record.kind == "node"}
    hints = [f"agentd (pid {pid}) of this machine has joined the head at {address}" for address, pid in nodes.items()]
    hints += [f"{path} cannot be read: {why}" for path, why in seen.unreadable]
    return "".join(f". {hint}" for hint in hints)


def table(records: Sequence[Record]) -> str:
    """Heads with the option that chooses each, one a line."""
    width = max(len(record.address) for record in records)
    return "\n".join(f"  --head {record.address.ljust(width)}  {record.told()}" for record in records)


def named(given: str | None, settings: Settings) -> tuple[str, str]:
    """The address that somebody has named and where, ("", "") without."""
    if given:
        return given, "--head"
    if settings.head and settings.head != PRIVATE:
        return settings.head, settings.head_from
    return "", ""


def endpoint_at(text: str, source: str, resolve: bool = True) -> str:
    """The endpoint that somebody means by HOST:PORT, an endpoint or the run directory of an agentd.

    Args:
        text: what they wrote.
        source: where.
        resolve: whether to see that a name has an address, which may block.

    Raises:
        ConfigError: it is none of these, a directory of another user's, or a name without an address.
    """
    if os.path.isdir(text):
        owner = os.stat(text).st_uid
        if not os.access(text, os.X_OK):
            raise ConfigError(f"{text!r} is a cluster of user {owner}, not of yours ({os.getuid()})", path=source)
        return f"ipc://{os.path.join(os.path.abspath(text), SOCKET)}"
    try:
        endpoint = endpoint_of(text, source)
    except ConfigError as error:
        message = f"{text!r} is neither HOST:PORT (such as {DEFAULT_LISTEN}) nor a run directory"
        raise ConfigError(message, path=source) from error
    if resolve:
        check_name(endpoint, source)
    return endpoint


def check_name(endpoint: str, source: str) -> None:
    """Refuse an endpoint whose host has no address. Blocks, for as long as the machine's resolver takes.

    Raises:
        ConfigError: the name cannot be resolved.
    """
    if not is_tcp(endpoint):
        return
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    try:
        socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        raise unresolved(host, source, error) from None


def unresolved(host: str, source: str, error: Exception) -> ConfigError:
    """The error for a head whose name has no address."""
    why = error.strerror if isinstance(error, OSError) else error
    return ConfigError(
        f"the head's name {host!r} cannot be resolved ({why}): is it spelt right? `getent hosts {host}` shows what "
        "this machine knows; an IP address needs no name service",
        path=source,
    )


def security_toward(endpoint: str, settings: Settings, *roles: str) -> Security:
    """What this process comes to a head with: its own key if it has one for that, else what the head itself uses, if
    the head is this user's and on this machine.

    Raises:
        ConfigError: there is a key file that cannot be used.
    """
    if is_tcp(endpoint) and settings.key_dir is None and settings.key_file is None:
        for record in look(settings).records:
            if record.key and record.kind == "head" and endpoint in record.ways:
                return record.security()
    return Security.toward(endpoint, settings, *roles)


def is_here(endpoint: str, listens: str) -> bool:
    """True if *endpoint* is an address of this machine at which *listens*, on every address, is reached too."""
    if not (is_tcp(endpoint) and is_tcp(listens)):
        return False
    (host, _, port), (every, _, its) = (one.removeprefix("tcp://").rpartition(":") for one in (endpoint, listens))
    if port != its or every.strip("[]") not in ("0.0.0.0", "::", "*"):
        return False
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host.strip("[]"), 0))  # the kernel takes no address that is not this machine's
    except (OSError, UnicodeError):
        return False
    return True


def ago(seconds: float) -> str:
    """A duration as people say it: ``12 s``, ``3 min``, ``5 h``, ``2 d``."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
