"""Where a head keeps its state if no directory is named: never in /tmp, which is empty after a reboot.

State is keys, revocations, emergency stops and ranks of nodes.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping

from rlinf_actors.errors import ConfigError

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
    """Return the directory for the state of the head in the agentd of *run_dir*. *usual* is True for the default run
    directory of the user, whose path may vary.

    Raises:
        ConfigError: the user has no home directory.
    """
    mark = "" if usual else f"-{hashlib.sha256(os.fsencode(run_dir)).hexdigest()[:12]}"
    return default_state_dir(f"agentd{mark}", environ)
