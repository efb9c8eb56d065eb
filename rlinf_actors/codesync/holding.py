"""Keep what this process runs from being removed: the code that its driver sent, and its environment. Any process.

A template calls `hold_own` before it imports anything else; the workers that it forks inherit the locks. The locks end
with the last of these processes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from rlinf_actors.codesync import locks
from rlinf_actors.settings import CODE_DIR

_held: list[locks.Lock] = []


def hold_own(environ: Mapping[str, str], prefix: str) -> str:
    """Hold the code directory of *environ* and the environment *prefix* (sys.prefix), if they are of the node's caches.

    Return why this process cannot run, "" if it can: a directory was removed since the launch was planned.
    """
    code = environ.get(CODE_DIR, "")
    entries = [code] if code else []
    if os.path.exists(prefix + locks.SUFFIX):
        entries.append(prefix)
    for entry in entries:
        lock = locks.hold(entry, wait=False) if os.path.isdir(entry) else None
        if lock is None or not os.path.isdir(entry):
            return f"{entry} is not there any more, because it was unused for long: launch the group again"
        lock.touch()
        _held.append(lock)
    return ""
