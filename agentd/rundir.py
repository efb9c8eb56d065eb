"""The run directory: of one agentd at a time, private, and where it is written down that this one was told to stop."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass

from rlinf_actors.errors import ConfigError

log = logging.getLogger(__name__)

MAX_RUN_DIR = 80
"""Bytes; a unix socket's path holds 107, and the names below add up to 25."""
_STOPPING = "stopping"
"""File in a run directory whose agentd was told to end; `agentd --reap` looks for it."""


@dataclass
class RunDir:
    """A directory of mode 0700 that is ours alone, held by a lock until `close`."""

    path: str
    lock: int

    @classmethod
    def open(cls, wanted: str | None, environ: Mapping[str, str]) -> RunDir:
        """Make it, or take the one that is there.

        Raises:
            ConfigError: its path is too long for unix sockets, others can read it, or another agentd uses it.
            OSError: it cannot be made.
        """
        path = os.path.abspath(wanted or default_run_dir(environ))
        if len(os.fsencode(path)) > MAX_RUN_DIR:
            raise ConfigError(
                f"is {len(os.fsencode(path))} bytes long; unix sockets allow {MAX_RUN_DIR}: choose a shorter one",
                path=f"run_dir {path}",
            )
        os.makedirs(path, mode=0o700, exist_ok=True)
        if (owner := os.lstat(path).st_uid) not in (os.getuid(), 0):
            raise ConfigError(f"belongs to user {owner}, whose link it is, not to us", path=f"run_dir {path}")
        found = os.stat(path)
        if found.st_uid != os.getuid():
            raise ConfigError(f"belongs to user {found.st_uid}, not to us ({os.getuid()})", path=f"run_dir {path}")
        if stat.S_IMODE(found.st_mode) & 0o077:
            raise ConfigError(f"can be used by others: chmod 700 {path}", path=f"run_dir {path}")
        lock = os.open(os.path.join(path, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise ConfigError(
                "is used by another agentd: give this one another --run-dir", path=f"run_dir {path}"
            ) from None
        return cls(path, lock)

    def begin(self) -> None:
        """An agentd begins here: what the last one was asked is over."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self.path, _STOPPING))

    def stop_asked(self) -> None:
        """Write down that this agentd will end and no other takes its workers over; twice is fine."""
        try:
            os.close(os.open(os.path.join(self.path, _STOPPING), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError as error:  # a full disk must not keep it from ending
            log.warning("cannot write down that this agentd was stopped: %s", error)

    def close(self) -> None:
        """Let it go. Twice is fine."""
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1


def default_run_dir(environ: Mapping[str, str]) -> str:
    """The user's."""
    runtime = environ.get("XDG_RUNTIME_DIR")
    if runtime and os.path.isdir(runtime) and os.stat(runtime).st_uid == os.getuid():
        return os.path.join(runtime, "rlinf-actors")
    return f"/tmp/rlinf-actors-{os.getuid()}"


def was_stopping(path: str) -> bool:
    """Whether the last agentd there was asked to end, and its workers with it, whether it came to that or not."""
    return os.path.exists(os.path.join(path, _STOPPING))
