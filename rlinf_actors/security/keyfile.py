"""Key files: their format, place and protection. A machine needs one such text file per identity to join a cluster.

    # rlinf-actors: key of agent 'gpu-1'. Whoever reads this file is that agent.
    role agent
    name gpu-1
    public ...
    secret ...
    head ...
    node ...
    address ...

`head` is the head's public key; the head's own file has none. `node` is the id of an agent's node, `address` that of
the head when this machine joined by a token. `find` chooses the file of this process.

Any user of a machine can connect to a loopback port, or bind a free one before another user's head does. So in a
cluster without keys, both ends on loopback prove that they belong to one user, by a "local" key file that only that
user can read. `key` makes the file. Processes that use it are `members.LOCAL`.
"""

from __future__ import annotations

import contextlib
import errno
import getpass
import os
import pwd
import socket
import stat
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TextIO

from rlinf_actors.config_files import open_regular
from rlinf_actors.errors import ConfigError
from rlinf_actors.security.keypair import KeyPair
from rlinf_actors.security.members import check_name, check_public
from rlinf_actors.settings import HEAD_KEY, KEY_DIR, Settings

ROLES = ("head", "agent", "driver", "viewer", "local")
MAX_BYTES = 4096
_FIELDS = ("role", "name", "public", "secret", "head", "node", "address")
_OPTIONAL = ("node", "address")


@dataclass(frozen=True)
class KeyFile:
    """The contents of a key file, by which a process proves which member of the cluster it is.

    Attributes:
        role: head, agent, driver, viewer, or local (this user's own processes on loopback).
        name: the name of the node or driver in the head's list of keys.
        pair: the key pair that proves this identity.
        head: the head's public key; "" in the head's own file.
        path: the file that this was read from; "" if it was not read from a file.
        node: the only node id that an agent's key may speak for; "" if the key is not limited to one.
        address: HOST:PORT of the head, "" if unknown.
    """

    role: str
    name: str
    pair: KeyPair
    head: str = ""
    path: str = field(default="", compare=False)
    node: str = ""
    address: str = ""

    @property
    def server(self) -> str:
        """The public key of the cluster's head. In the head's own key file that is the file's own public key."""
        return self.head or self.pair.public


def directory(settings: Settings) -> Path:
    if settings.key_dir:
        return Path(settings.key_dir)
    return Path(settings.config_home).expanduser() / "rlinf-actors" / "keys"


def path_of(folder: Path, role: str) -> Path:
    return folder / f"{role}.key"


def locate(settings: Settings, role: str) -> Path | None:
    """Return the path of this process's key file for *role*, None if there is none.

    If RLINF_ACTORS_KEYS is set, only that directory is searched. Otherwise the credentials of the systemd unit come
    first, then the user's key directory. A blank credential counts as missing, because systemd writes a blank one for a
    file that it did not find (SetCredential= in the units).

    Raises:
        ConfigError: a credential cannot be read.
    """
    if settings.credentials_dir and not settings.key_dir:
        path = path_of(Path(settings.credentials_dir), role)
        try:
            with open_regular(path) as file:
                if file.read(MAX_BYTES).strip():
                    return path
        except FileNotFoundError:
            pass
        except OSError as error:
            raise ConfigError(f"cannot be read: {error.strerror}", path=str(path)) from None
    path = path_of(directory(settings), role)
    return path if path.exists() else None


def load(path: str | Path, user: int | None = None) -> KeyFile:
    """Read the key file *path*, after checking that only one user, and root, can read and change it.

    *user* is the uid of that user, None for this process's user. Root passes another user's uid to read the key of that
    user's head.

    Raises:
        ConfigError: the file is missing, others can read it, or it is not a key file. The text says what to do.
        ValueError: the path has a null byte.
    """
    path, where = Path(path), str(path)
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # nobody writes to a FIFO; another user may hold a lease
    if user not in (None, os.geteuid()):
        flags |= os.O_NOFOLLOW  # root must not open a device because another user has linked to it
    try:
        folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _check_owner(path.parent, os.fstat(folder), "chmod 700", user)
            fd = os.open(path.name, flags, dir_fd=folder)
        finally:
            os.close(folder)
        try:
            info = os.fstat(fd)
            _check_owner(path, info, "chmod 600", user)
            if not stat.S_ISREG(info.st_mode):
                raise ConfigError("is not a regular file", path=where)
            data = os.read(fd, MAX_BYTES + 1)
        finally:
            os.close(fd)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", path=where) from None
    return _parse(data, where)


def inherited(fd: int, role: str, head: str | None = None) -> KeyFile:
    """Read the key file for *role* that is open as the inherited descriptor *fd*. The descriptor stays open, and is not
    passed on to programs that this process executes.

    So a process can have a key that its user may not read: whoever starts it opens the file.

    *head* is the head's public key from the configuration, None to use the one in the file.

    Raises:
        ConfigError: the descriptor is no key file of that role, or of a kind that cannot be read twice, such as a pipe.
    """
    where = f"--key-fd {fd}"
    try:
        os.set_inheritable(fd, False)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ConfigError("is not a regular file", path=where)
        data = os.pread(fd, MAX_BYTES + 1, 0)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", path=where) from None
    found = _parse(data, where)
    if found.role != role:
        raise ConfigError(f"is a key file for role {found.role}, but this process needs one for {role}", path=where)
    return found if head is None or role == "head" else replace(found, head=head)


def save(path: Path, key: KeyFile, in_private: bool = True) -> None:
    """Write *key* to the file *path* with mode 0600, replacing an existing file atomically.

    The file is synced to disk before this returns, because the head may list the key next.

    Args:
        path: the file.
        key: its contents.
        in_private: True to make the file's directory with mode 0700 and to refuse a directory that others can read.
            False for a file that is to be copied elsewhere.

    Raises:
        ConfigError: *in_private* is True, and others can read the directory.
        OSError: the file cannot be written.
    """
    if in_private:
        _make_private(path.parent)
    beside = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    try:
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
            _write(file, key)
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(beside)
        raise
    _sync(path.parent)


def save_new(path: Path, key: KeyFile) -> None:
    """Write *key* to a new file *path*, as `save` does.

    Raises:
        FileExistsError: the file exists, perhaps because another process has made it meanwhile.
    """
    _make_private(path.parent)
    try:
        fd = os.open(
            path.parent, os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC, 0o600
        )  # without a name: kill -9 leaves none
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
        beside = path.with_name(f".{path.name}.{os.urandom(8).hex()}")  # a file system that has only named files
        save(beside, key)
        try:
            os.link(beside, path)
        finally:
            os.unlink(beside)
    else:
        with open(fd, "w") as file:
            _write(file, key)
            os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd)  # without a dir_fd, os.link follows no link
    _sync(path.parent)


def _make_private(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_owner(folder, os.stat(folder), "chmod 700")


def _write(file: TextIO, key: KeyFile) -> None:
    file.write(text(key))
    file.flush()
    os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def is_private(mode: int, owner: int, user: int) -> bool:
    """Return True if only uid *user* and root can read and change a file with permissions *mode* and owner uid *owner*.

    If root owns the file, its group may read it too: systemd presents its credentials like that.
    """
    if owner not in (user, 0):
        return False
    group = stat.S_IWGRP if owner == 0 else stat.S_IRWXG
    return not mode & (stat.S_IRWXO | group)


def _check_owner(path: Path, info: os.stat_result, fix: str, user: int | None = None) -> None:
    user = os.geteuid() if user is None else user
    if not is_private(info.st_mode, info.st_uid, user):
        mode = stat.S_IMODE(info.st_mode)
        raise ConfigError(
            f"must be private to the user with uid {user}, but has mode {mode:04o} and owner {info.st_uid}, so other "
            "users may be able to read or replace the key. If one may have done so, make a new key. To make this path "
            f"private, run: chown {user} {path} && {fix} {path}",
            path=str(path),
        )


def text(key: KeyFile) -> str:
    lines = [f"# rlinf-actors: key of {key.role} {key.name!r}. Whoever reads this file is that {key.role}."]
    values = {"role": key.role, "name": key.name, "public": key.pair.public, "secret": key.pair.secret}
    rest = {"head": key.head, "node": key.node, "address": key.address}
    values |= {name: value for name, value in rest.items() if value}
    lines += [f"{name} {value}" for name, value in values.items()]
    return "\n".join(lines) + "\n"


def _parse(data: bytes, where: str) -> KeyFile:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = ""
    found: dict[str, str] = {}
    for line in text.splitlines() if len(data) <= MAX_BYTES else ():
        name, _, value = line.partition(" ")
        if name in _FIELDS:
            found[name] = value.strip()
        elif line and not line.startswith("#"):
            raise ConfigError("is not a key file of rlinf-actors: it has a line that no key file has", path=where)
    optional = (*_OPTIONAL, "head") if found.get("role") == "head" else _OPTIONAL
    missing = [name for name in _FIELDS if not found.get(name) and name not in optional]
    if missing:
        raise ConfigError(
            f"is not a key file of rlinf-actors: these lines are missing: {', '.join(missing)}", path=where
        )
    if found["role"] not in ROLES:
        raise ConfigError(f"has role {found['role']!r}; the roles are {', '.join(ROLES)}", path=where)
    check_name(found["name"], where)
    if found["role"] != "head":
        check_public(found["head"], where)
    pair = KeyPair.of_text(found["public"], found["secret"], where)
    head = "" if found["role"] == "head" else found["head"]
    return KeyFile(found["role"], found["name"], pair, head, where, found.get("node", ""), found.get("address", ""))


def find(
    settings: Settings, *roles: str, given: str | None = None, head: str | None = None, loopback: bool = False
) -> KeyFile | None:
    """Return the key file of this process, None if it has none.

    Args:
        settings: the settings from environment variables and configuration files.
        roles: the roles that this process may have, in order of preference. The first role that has a file is used
            (`locate`).
        given: the path of the key file from the configuration, None to search. The file must exist.
        head: the head's public key from the configuration, None to use the one in the file.
        loopback: True if the head listens on loopback. A key of a cluster on another machine is then ignored
            (`is_for_elsewhere`).

    Raises:
        ConfigError: the file is missing, is no key file, has another role, or others can read it.
    """
    path = given or settings.key_file
    if path:
        found = load(Path(path))
        if found.role not in roles:
            raise ConfigError(
                f"is the key file of a process with role {found.role}, but this process needs one with role "
                f"{' or '.join(roles)}",
                path=path,
            )
    else:
        there = next(filter(None, (locate(settings, role) for role in roles)), None)
        if there is None or (loopback and is_for_elsewhere(there, settings)):
            return None
        found = load(there)
    expected = head or settings.head_key
    if expected and found.role != "head":
        check_public(expected, "head_key" if head else HEAD_KEY)
        found = replace(found, head=expected)
    return found


def is_for_elsewhere(path: Path, settings: Settings) -> bool:
    """Return True if the key file at *path* belongs to a cluster whose head is on another machine.

    This holds for a file in the user's default key directory if the directory has no head.key. A file from
    RLINF_ACTORS_KEYS or a credential gives False, because the user chose it for this process.
    """
    usual = settings.key_dir is None and path.parent == directory(settings)
    return usual and not path_of(path.parent, "head").exists()


ROLE = "local"


def who() -> str:
    """Return ``USER@HOST`` of this process, for messages. USER is the uid if the user has no name (containers)."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # the latter since Python 3.13
        name = str(os.getuid())
    return f"{name}@{socket.gethostname()}"


def user() -> str:
    """Return the name of the user as whom this process runs, the uid if the user has no name. Environment variables do
    not change it.
    """
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def key(settings: Settings) -> KeyFile:
    """Return this user's own "local" key file; make the file if it is missing.

    Several processes may call this at once: all get the same key.

    Raises:
        ConfigError: others can read the file, it is not a key file, or it cannot be written. The text says what to do.
    """
    path = path_of(directory(settings), ROLE)
    if not path.exists():
        pair = KeyPair.make()
        try:
            save_new(path, KeyFile(ROLE, ROLE, pair, pair.public))
        except FileExistsError:
            pass  # another process of this user was first: its key counts
        except OSError as error:
            raise ConfigError(
                f"cannot be written: {error.strerror}. Your processes need this key file to prove to one another on "
                f"loopback (127.0.0.1) that they belong to the same user. Set {KEY_DIR} to a directory that is yours "
                "and that you can write to",
                path=str(path),
            ) from None
    return load(path)
