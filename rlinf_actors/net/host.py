"""Which processes share a kernel, its network and its process ids, and which process a pid is."""

from __future__ import annotations

import hashlib
import os
import socket
from pathlib import Path

from rlinf_actors import procfs


def host_key() -> str:
    """A short key that is equal for processes that can use each other's unix sockets and pids.

    Made of the boot id, the network and pid namespaces and the user.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    spaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("net", "pid")]
    return hashlib.sha256(f"{boot} {spaces} {os.getuid()}".encode()).hexdigest()[:16]


def pid_start(pid: int) -> int:
    """When a process was started, in clock ticks since boot; with its pid it names the process for good. 0: none."""
    found = procfs.stat(pid)
    return 0 if found is None or found.state == "Z" else found.started


def route_ip(host: str) -> str:
    """The address that this machine's packets to *host* (an address or a name) carry; nothing is sent.

    Raises:
        OSError: the name has no address, or there is no route.
    """
    for family, kind, protocol, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    raise OSError(f"{host} has no address")


def free_port(below: int | None = None) -> int:
    """A TCP port that nobody listens on now, below *below* if given. Nothing holds it.

    Raises:
        OSError: there is none.
    """
    for port in (0,) if below is None else range(below - 1, 1023, -1):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise OSError(f"no TCP port below {below} is free")
