"""The users as which agentd starts workers (``users`` in [workers] of agentd.toml), and their private directories.

Without ``users``, all workers run as agentd's own user. With it, the name of a driver's key decides as which user the
workers of its jobs run. agentd then needs the capabilities of procfs.CHANGES_USERS, which root has. The keeper changes
the user before it executes a template (agentd.keeper.drop), so templates and workers never have agentd's rights.

Each user has a directory for sockets and one for logs, both of mode 0700 and owned by that user. Whatever agentd does
inside, it does `as_user`: a link that the user has put there leads agentd only to what the user may reach anyway.
Loop thread, except `as_user`.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import pwd
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path

import msgspec

from agentd.config_fields import Config
from agentd.run_dir import MAX_RUN_DIR, link_package
from rlinf_actors import procfs
from rlinf_actors.errors import ConfigError
from rlinf_actors.settings import CACHE_DIR, CONFIG_FILE, HEADS_DIR, KEPT_LOGS, KEY_DIR, LOG_DIR, RUN_DIR
from rlinf_actors.wire.launch_rules import ANYONE

log = logging.getLogger(__name__)

_OF_AGENTD = re.compile(
    "(HOME|USER|LOGNAME|SHELL|MAIL|PWD|OLDPWD|TMPDIR|KRB5CCNAME|XAUTHORITY|GNUPGHOME|VIRTUAL_ENV"
    "|XDG_.*|SUDO_.*|SSH_.*|DBUS_.*"
    f"|{RUN_DIR}|{LOG_DIR}|{HEADS_DIR}|{CONFIG_FILE}|{KEPT_LOGS}|{KEY_DIR}|{CACHE_DIR})"
)
"""Variables that name agentd's own user, or places and services of that user."""
_SETGROUPS = {"x86_64": 116, "aarch64": 159}
"""The number of the system call by machine."""
_CAPABILITY_VERSION = 0x20080522
_RETURN = sum(1 << procfs.CHANGES_USERS[name] for name in ("CAP_SETGID", "CAP_SETUID"))
_SUFFIX = "-users"
"""Of the directory beside agentd's run directory, which has the users' run directories."""
REMOVE_S = 3.0  # seconds for the removal of a directory of a user, who may have filled it
_Account = tuple[pwd.struct_passwd, tuple[int, ...]]
_libc = ctypes.CDLL(None, use_errno=True)


class User(msgspec.Struct, frozen=True):
    """A user of this machine, as which agentd starts workers. agentd's own user is no User, but None."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str
    shell: str
    run_dir: str  # private directory for the sockets of its templates and workers
    log_dir: str  # private parent directory of its workers' log files
    umask: int = 0o077
    limits: dict[str, int] = msgspec.field(default_factory=dict)  # resource limits by name; -1 for none

    def start_order(self) -> dict[str, object]:
        """Return what the keeper needs to start a template as this user."""
        return {
            "uid": self.uid,
            "gid": self.gid,
            "groups": list(self.groups),
            "umask": self.umask,
            "limits": self.limits,
        }

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return the environment *env* for processes of this user: without the variables that agentd inherited for its
        own user. Variables of the node's configuration stay.
        """
        kept = {
            name: value
            for name, value in env.items()
            if not _OF_AGENTD.fullmatch(name) or os.environ.get(name) != value
        }
        return {"HOME": self.home, "USER": self.name, "LOGNAME": self.name, "SHELL": self.shell, **kept}


@contextlib.contextmanager
def as_user(user: User | None) -> Iterator[None]:
    """Let this thread open, make and remove files with the rights of *user*. None stands for agentd's own user.

    Only the calling thread changes: its access to files (setfsuid), its supplementary groups and its capabilities. With
    CAP_SYS_PTRACE a link of the user to /proc/PID/cwd would lead to what only the user of that process can reach.
    Begin no work of an executor meanwhile: a thread that it starts for that would keep the rights of *user*.

    Raises:
        PermissionError: this process may not change users.
    """
    if user is None:
        yield
        return
    groups, gid, uid = os.getgroups(), _libc.setfsgid(user.gid), _libc.setfsuid(user.uid)
    changed = False
    try:
        if _libc.setfsuid(-1) != user.uid:  # an invalid uid changes nothing, and returns the present one
            raise PermissionError(f"this process may not act as user {user.name}")
        _set_groups(user.groups)
        changed = True
        with _few_capabilities():
            yield
    finally:
        _libc.setfsuid(uid)
        _libc.setfsgid(gid)
        if changed:
            _set_groups(groups)


@contextlib.contextmanager
def _few_capabilities() -> Iterator[None]:
    """Let this thread have only the capabilities that are effective by which it returns to its own user."""
    before = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable: 32 of each, then the others of each
    _capabilities(_libc.capget, before)
    few = (ctypes.c_uint32 * 6)(*before)
    few[0], few[3] = before[0] & _RETURN, 0
    _capabilities(_libc.capset, few)
    try:
        yield
    finally:
        _capabilities(_libc.capset, before)


def _capabilities(call: Callable[..., int], data: ctypes.Array[ctypes.c_uint32]) -> None:
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    if call(header, data) != 0:
        raise OSError(ctypes.get_errno(), "capabilities")


def _set_groups(groups: Sequence[int]) -> None:
    """Set the supplementary groups of this thread. Raises PermissionError."""
    number = _SETGROUPS.get(os.uname().machine)
    if number is None:
        os.setgroups(groups)  # of all threads: glibc has no other
        return
    listed = (ctypes.c_uint32 * len(groups))(*groups)
    if _libc.syscall(ctypes.c_long(number), ctypes.c_long(len(groups)), listed) != 0:
        raise PermissionError(ctypes.get_errno(), "setgroups")


class Users:
    """Decides as which user the workers of a driver run, and makes the private directories of these users.

    Args:
        config: ``users``, ``umask`` and ``limits`` in [workers].
        run_dir: agentd's run directory; those of the users are below RUN_DIR-users.
        log_dir: parent directory of log files; those of the users are in directories with their names.
        in_unit: True if agentd runs in a unit of ours. In rlinf-agentd.service it is root, to start workers as others;
            that workers of all drivers run as root must then be said (`users = {"*" = "root"}`).

    Raises:
        ConfigError: agentd may not change users, a user does not exist, or a directory cannot be used.
    """

    def __init__(self, config: Config, run_dir: str, log_dir: str, in_unit: bool = False) -> None:
        self._mapping = {} if config.embedded else config.users
        if in_unit and not self._mapping and not procfs.missing_capabilities(procfs.CHANGES_USERS):
            raise ConfigError(
                "is not set, so the workers of every driver would run as root: name the user of each driver's key, or "
                'say users = {"*" = "root"}. For one user: rlinf-agentd@USER.service',
                path="workers.users",
            )
        self._config = config
        self._parent = f"{run_dir}{_SUFFIX}"
        self._log_dir = log_dir
        self._users: dict[str, User] = {}
        self._accounts: dict[str, _Account] = {}
        others = [name for name in dict.fromkeys(self._mapping.values()) if not self._is_own(name)]
        if not others:
            return
        if missing := procfs.missing_capabilities(procfs.CHANGES_USERS):
            raise ConfigError(
                f"names other users ({', '.join(others)}), but this agentd may not change users: it lacks "
                f"{', '.join(missing)}. Use rlinf-agentd.service, or start agentd as root",
                path="workers.users",
            )
        if procfs.missing_capabilities(procfs.FINDS_LEFTOVERS):
            log.warning("without CAP_SYS_PTRACE agentd does not find all processes that workers of other users leave")
        for path, key in ((self._parent, "paths.run_dir"), (log_dir, "paths.log_dir")):
            make_public(path)
            for name in others:
                self._check_reach(name, path, key)
        link_package(Path(self._parent))

    @classmethod
    def of_agentd(cls) -> Users:
        """Return the Users of an agentd whose workers all run as its own user."""
        return cls(Config(), "", "")

    @property
    def is_used(self) -> bool:
        """True if the driver's key decides as which user a worker runs."""
        return bool(self._mapping)

    @property
    def import_path(self) -> str:
        """Directory with only the package rlinf_actors in it, which every user can read."""
        return os.path.join(self._parent, "pkg")

    def of_driver(self, driver: str) -> User | None:
        """Return the user as which the workers of *driver* (name of a driver's key, "" if unknown) run; None for
        agentd's own user.

        Raises:
            ValueError: this node's configuration maps the driver to no user, or that user cannot be used.
        """
        if not self._mapping:
            return None
        name = self._mapping.get(driver) if driver else None
        name = name or self._mapping.get(ANYONE)
        if name is None:  # LaunchRules.users refuses such a driver before
            raise ValueError(f"its configuration has no user for driver {driver!r}")
        if self._is_own(name):
            return None
        try:
            return self.named(name)
        except (ConfigError, OSError) as error:
            raise ValueError(f"user {name!r}, whom users in [workers] names, cannot be used: {error}") from None

    def first(self, most: int) -> list[User | None]:
        """Return the users of the first drivers in the configuration, *most* at most; None is agentd's own user."""
        if not self._mapping:
            return [None]
        found: dict[str, User | None] = {}
        for name in dict.fromkeys(self._mapping.values()):
            with contextlib.suppress(ConfigError, OSError):  # a launch says why
                found[name] = None if self._is_own(name) else self.named(name)
        return list(found.values())[:most]

    def named(self, name: str) -> User | None:
        """Return the user *name* with its directories; None for "", agentd's own user.

        Raises:
            ConfigError: there is no such user, or a directory of the user cannot be used.
            OSError: a directory cannot be made.
        """
        if not name or name in self._users:
            return self._users.get(name)
        entry, groups = self._account(name)
        run_dir, log_dir = f"{self._parent}/{entry.pw_uid}", os.path.join(self._log_dir, name)
        found = User(
            name,
            entry.pw_uid,
            entry.pw_gid,
            groups,
            entry.pw_dir,
            entry.pw_shell or "/bin/sh",
            run_dir,
            log_dir,
            self._config.umask,
            dict(self._config.limits),
        )
        if len(os.fsencode(run_dir)) > MAX_RUN_DIR:
            raise ConfigError(f"{run_dir} is too long for unix sockets: choose a shorter run_dir", path="run_dir")
        make_private(run_dir, found)
        make_private(log_dir, found)
        with as_user(found):
            for part in ("w", "t"):
                os.makedirs(os.path.join(run_dir, part), mode=0o700, exist_ok=True)
        self._users[name] = found
        return found

    def _check_reach(self, name: str, path: str, key: str) -> None:
        """Raise ConfigError if the user *name* cannot pass through the directories above *path*."""
        entry, groups = self._account(name)
        try:
            with as_user(User(name, entry.pw_uid, entry.pw_gid, groups, "", "", "", "")):
                os.stat(os.path.join(path, "."))
        except PermissionError:
            text = f"workers of user {name} need to pass through {path}, but a directory above keeps them out"
            raise ConfigError(f"{text}: choose another, such as one in /run or /var", path=key) from None

    def _is_own(self, name: str) -> bool:
        return self._account(name)[0].pw_uid == os.geteuid()

    def _account(self, name: str) -> _Account:
        """Return the account and groups of a user, as they were when agentd first asked for them: at its start, since a
        directory service may take long to answer.
        """
        if name not in self._accounts:
            try:
                entry = pwd.getpwnam(name)
            except KeyError:
                raise ConfigError(
                    f"names the user {name!r}, who does not exist here: useradd {name}", path="workers.users"
                ) from None
            self._accounts[name] = entry, tuple(sorted(os.getgrouplist(name, entry.pw_gid)))
        return self._accounts[name]

    def all(self) -> list[User]:
        """Return the users as which this agentd has started or taken over workers."""
        return list(self._users.values())

    def with_logs(self) -> list[User]:
        """Return the users of the configuration that have log files here, perhaps of an earlier agentd."""
        found = []
        for name in dict.fromkeys(self._mapping.values()):
            with contextlib.suppress(ConfigError, OSError):  # a launch says why
                if not self._is_own(name) and os.path.isdir(os.path.join(self._log_dir, name)):
                    found.append(self.named(name))
        return [user for user in found if user is not None]

    def close(self) -> None:
        """Remove the run directories of all users, because all workers have ended."""
        if self._users:
            remove_run_dirs(self._parent.removesuffix(_SUFFIX))


def remove_run_dirs(run_dir: str) -> None:
    """Remove what an agentd with the run directory *run_dir* has made for users, after the end of all workers. What
    users keep there themselves stays.
    """
    parent = f"{run_dir}{_SUFFIX}"
    if not os.path.isdir(parent):
        return
    for uid in filter(str.isdigit, os.listdir(parent)):
        path = os.path.join(parent, uid)
        owner = os.lstat(path)
        with contextlib.suppress(OSError):
            with as_user(User(uid, owner.st_uid, owner.st_gid, (), "", "", path, "")):
                for name in ("w", "t", "trace"):
                    remove_tree(os.path.join(path, name))
            os.rmdir(path)
    remove_tree(os.path.join(parent, "pkg"))
    with contextlib.suppress(OSError):  # a user keeps something else there
        os.rmdir(parent)


def remove_tree(path: str) -> None:
    """Remove the directory *path* with what is in it, for REMOVE_S seconds at most. What cannot be removed stays.

    A user may have made it deeper than any path, or than this process has descriptors. So each directory below is moved
    up to *path* before it is emptied. No link is followed.
    """
    until, numbers = time.monotonic() + REMOVE_S, count()
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    with contextlib.suppress(OSError):
        top = os.open(path, flags)
        try:
            found = _empty(top, top, numbers, until)
            while found and time.monotonic() < until:
                name = found.pop()
                with contextlib.suppress(OSError):
                    directory = os.open(name, flags, dir_fd=top)
                    try:
                        found += _empty(directory, top, numbers, until)
                    finally:
                        os.close(directory)
                    os.rmdir(name, dir_fd=top)
        finally:
            os.close(top)
        os.rmdir(path)


def _empty(directory: int, top: int, numbers: Iterator[int], until: float) -> list[str]:
    """Remove the files in *directory*, and move its directories to *top*. Return their names there."""
    found = []
    with os.scandir(directory) as entries:
        for entry in entries:
            if time.monotonic() > until:
                break
            with contextlib.suppress(OSError):
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.name, dir_fd=directory)
                elif directory == top:
                    found.append(entry.name)
                else:
                    name = f".removed-{os.getpid()}-{next(numbers)}"
                    os.rename(entry.name, name, src_dir_fd=directory, dst_dir_fd=top)
                    found.append(name)
    return found


def make_public(path: str) -> None:
    """Make the directory *path*, which others may pass through but not list or change.

    Raises:
        ConfigError: it exists, and belongs to another user, or others may change it or not pass through it.
        OSError: it cannot be made.
    """
    if not os.path.isdir(path):
        os.makedirs(path, mode=0o711)
        os.chmod(path, 0o711)  # whatever the umask is
    found = os.stat(path)
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid not in (os.geteuid(), 0) or mode & 0o022 or not mode & 0o001:
        raise ConfigError(
            f"has mode {mode:04o} and owner {found.st_uid}, but workers of several users need to pass through it, and "
            f"only agentd may change it: chown {os.geteuid()} {path} && chmod 711 {path}",
            path=path,
        )


def make_private(path: str, user: User) -> None:
    """Make the directory *path*, of mode 0700, for *user*. Its parent must be a directory that only agentd can change.

    Raises:
        ConfigError: it exists, and is not private to the user.
        OSError: it cannot be made.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    found = os.lstat(path)
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() != user.uid and not os.listdir(path):
        os.chown(path, user.uid, user.gid, follow_symlinks=False)  # just made, perhaps by an agentd that was killed
        found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != user.uid or found.st_mode & 0o077:
        raise ConfigError(
            f"must be a directory of mode 0700 that belongs to user {user.name}: move it away, or run chown "
            f"{user.name} {path} && chmod 700 {path}",
            path=path,
        )
