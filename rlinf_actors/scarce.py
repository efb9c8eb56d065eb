"""What to do when something of the machine has run out. Changes nothing."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

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


def _ports() -> str:
    try:
        first, last = Path(_PORT_RANGE).read_text().split()
    except (OSError, ValueError):
        return "a range"
    return f"{first}-{last}"
