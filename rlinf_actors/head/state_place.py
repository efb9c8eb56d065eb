"""Where a head keeps its state if no directory is named: never in /tmp, which is empty after a reboot.

State is keys, revocations, emergency stops and ranks of nodes. Earlier versions kept it in the run directory, or in
/tmp; state that is found there is taken over once.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import sqlite3
import stat
from collections.abc import Mapping

from rlinf_actors.errors import ConfigError
from rlinf_actors.head.audit import DIRECTORY as AUDIT
from rlinf_actors.head.store import FILE

log = logging.getLogger(__name__)

NAMED = "name one that is kept over reboots ([paths] state_dir, --state-dir)"


def named(path: str) -> str:
    """Return *path*, a directory for the state of a head that its administrator has named. Log a warning if it is empty
    after a reboot.
    """
    if f"{os.path.realpath(path)}/".startswith(("/tmp/", "/run/", "/dev/shm/")):
        log.warning(
            "the head's state is in %s, which is empty after a reboot: emergency stops are over then, and no key is "
            "valid. %s", path, NAMED[0].upper() + NAMED[1:],
        )  # fmt: skip
    return path


def default_state_dir(name: str, environ: Mapping[str, str]) -> str:
    """Return the directory for the state of the head *name*: below XDG_STATE_HOME, else /var/lib for root, else the
    home directory.

    Raises:
        ConfigError: the user has no home directory.
    """
    parent = environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(parent):
        parent = "/var/lib" if os.geteuid() == 0 else os.path.expanduser("~/.local/state")
    if not os.path.isabs(parent):
        raise ConfigError(
            f"has no default, because user {os.geteuid()} has no home directory: {NAMED}. The head keeps there which "
            "keys are revoked, and which emergency stops are in force",
            path="state_dir",
        )
    return os.path.join(parent, "rlinf-actors", name)


def of_agentd(run_dir: str, usual: bool, environ: Mapping[str, str]) -> str:
    """Return the directory for the state of the head in the agentd of *run_dir*; it has taken over what an earlier
    version kept in *run_dir*. *usual* is True for the default run directory of the user, whose path may vary.

    Raises:
        ConfigError: the user has no home directory, or the earlier state cannot be moved.
    """
    mark = "" if usual else f"-{hashlib.sha256(os.fsencode(run_dir)).hexdigest()[:12]}"
    found = default_state_dir(f"agentd{mark}", environ)
    take_over(run_dir, found)
    return found


def take_over(old: str, new: str) -> None:
    """Move the state of a head from the directory *old*, where an earlier version kept it, to *new*.

    Nothing happens if *new* has state, or *old* has none of this user's.

    Raises:
        ConfigError: a head that runs uses the state in *old*, or it cannot be moved.
    """
    path = os.path.join(old, FILE)
    if os.path.exists(os.path.join(new, FILE)) or not _is_ours(old) or not _is_ours(path):
        return
    try:
        _merge_journal(path)
        os.makedirs(new, mode=0o700, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            shutil.move(os.path.join(old, AUDIT), os.path.join(new, AUDIT))
        beside = os.path.join(new, f".{FILE}.taken")
        shutil.copyfile(path, beside)
        os.chmod(beside, 0o600)
        fd = os.open(beside, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(beside, os.path.join(new, FILE))
        os.unlink(path)
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(
            f"cannot be moved to {new} ({error}): end the head that uses it, or move it by hand", path=path
        ) from None
    log.warning("the head's state was moved from %s to %s, because it must be kept over reboots", old, new)


def _is_ours(path: str) -> bool:
    """Return True if *path* is no link, and only this user can write to it: anyone can make directories in /tmp."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return not stat.S_ISLNK(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def _merge_journal(path: str) -> None:
    """Write sqlite's journal into the file *path*. Raises sqlite3.OperationalError if a process uses the file."""
    with contextlib.closing(sqlite3.connect(path, timeout=0, isolation_level=None)) as database:
        database.execute("PRAGMA locking_mode = EXCLUSIVE")
        database.execute("BEGIN EXCLUSIVE")
        database.execute("COMMIT")
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        database.execute("PRAGMA journal_mode = DELETE")
