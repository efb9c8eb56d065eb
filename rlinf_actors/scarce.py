"""What to do when something of the machine has run out, or before it does."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

AGAIN_S = 0.5
"""When to try again what no descriptor was left for: nothing tells when there is one."""
_PORT_RANGE = "/proc/sys/net/ipv4/ip_local_port_range"


def explain(error: OSError) -> str:
    """What the system said, with the limit that was met, and how to raise it, where it is one of those known here.

    EADDRINUSE is taken as "no port is left", so it is for those who asked for any port.
    """
    said = os.strerror(error.errno) if error.errno else str(error)
    if error.errno == errno.EMFILE:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        return (
            f"{said}: this process may have {soft}, and at most {hard}; raise both with 'ulimit -n 65536', "
            "LimitNOFILE= in a systemd unit or --ulimit nofile=65536 for docker"
        )
    if error.errno == errno.ENFILE:
        return f"{said}: the whole machine's limit is met; raise it with 'sysctl fs.file-max=…'"
    if error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
        return (
            f"no TCP port is free: the kernel gives out {_ports()}, and all are taken; 'ss -tanp' shows by whom, "
            "'sysctl net.ipv4.ip_local_port_range=\"10000 65535\"' adds more"
        )
    if error.errno == errno.EAGAIN:
        return f"{said}: a limit of processes is met (ulimit -u, pids.max of the cgroup): raise it, or start fewer"
    return said


def raise_file_limit() -> None:
    """Let this process have as many descriptors as it may.

    Two go with every worker that one talks to, and one with each connection of a stranger until it is closed: whoever
    listens must have room for those it waits for. The soft limit of 1024 is for programs that use select().
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _ports() -> str:
    try:
        first, last = Path(_PORT_RANGE).read_text().split()
    except (OSError, ValueError):
        return "a range"
    return f"{first}-{last}"
