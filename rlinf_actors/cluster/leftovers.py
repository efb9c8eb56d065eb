"""What is left of a private cluster whose agentd was killed: its driver ends it, since nobody else may be there."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from pathlib import Path

from rlinf_actors import procfs
from rlinf_actors.settings import CLUSTER_MARK

PATIENCE_S = 3.0
"""One that is in an uninterruptible call is not waited for longer."""


def processes_of(run_dir: str) -> list[int]:
    """Living processes that come from the agentd of this run directory, by what they inherited of its environment."""
    wanted, found = f"{CLUSTER_MARK}={run_dir}".encode(), []
    for pid in procfs.pids():
        with contextlib.suppress(OSError):
            if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                state = procfs.stat(pid)
                if state is not None and state.state not in "ZX":
                    found.append(pid)
    return found


def end_all(run_dir: str) -> None:
    """Kill them, and what they start meanwhile; returns when all are gone. Blocks, PATIENCE_S at most.

    The cluster's keeper ends what hides, and then itself: its end is waited for.
    """
    deadline = time.monotonic() + PATIENCE_S
    while (left := processes_of(run_dir)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                pidfd = procfs.pidfd_of(pid)
                try:
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                    procfs.has_ended(pidfd, max(0.0, deadline - time.monotonic()))
                finally:
                    os.close(pidfd)
    _wait_for_keeper(run_dir, deadline)


def _wait_for_keeper(run_dir: str, deadline: float) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as keeper:
        try:
            keeper.connect(f"{run_dir}/keeper")
            keeper.send(b'{"do": "wait"}')
        except OSError:  # it has ended
            return
        keeper.settimeout(max(0.01, deadline - time.monotonic()))
        with contextlib.suppress(OSError):
            keeper.recv(1)  # says nothing; it closes the socket when it ends
