"""The end of a node of a LocalCluster as if its machine had lost power: all its processes at once."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from rlinf_actors import procfs


def templates(run_dir: str) -> list[int]:
    """The templates of a node that run, by what they wrote down for an agentd to come (agentd.templates.Record)."""
    found = []
    for path in Path(run_dir, "t").glob("*.json"):
        try:
            record = json.loads(path.read_bytes())
        except FileNotFoundError:  # it has just ended
            continue
        stat = procfs.stat(record["pid"])
        if stat is not None and stat.started == record["started"]:
            found.append(record["pid"])
    return found


def keepers(run_dir: str) -> list[int]:
    """The keepers of a node that run: each names its socket on its command line."""
    wanted, found = os.fsencode(f"{run_dir}/keeper"), []
    for pid in procfs.pids():
        with contextlib.suppress(OSError):
            if wanted in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                found.append(pid)
    return found


def kill_all(pids: Sequence[int]) -> None:
    """SIGKILL processes and all their descendants; stopped first, so that none makes another meanwhile."""
    stopped: list[int] = []
    while fresh := [found for pid in pids for found in procfs.subtree(pid) if found not in stopped]:
        for found in fresh:
            with contextlib.suppress(ProcessLookupError):
                os.kill(found, signal.SIGSTOP)
        stopped += fresh
    pidfds = []
    for found in stopped:
        with contextlib.suppress(ProcessLookupError):
            pidfds.append(procfs.pidfd_of(found))
            os.kill(found, signal.SIGKILL)
    for pidfd in pidfds:
        procfs.has_ended(pidfd, None)
        os.close(pidfd)
