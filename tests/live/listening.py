"""What listens in a process, as the kernel says, and what it insists on."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

LISTEN, ACCEPTS = "0A", 0x10000
STREAM = 1
SIGNATURE = b"\xff" + bytes(8) + b"\x7f"


@dataclass(frozen=True)
class Listening:
    """One socket that takes connections. `path` is "" for TCP."""

    pid: int
    host: str = ""
    port: int = 0
    path: str = ""
    stream: bool = True

    def connect(self) -> socket.socket:
        """A connection, blocking: it waits while a queue of connections is full."""
        kind = socket.SOCK_STREAM if self.stream else socket.SOCK_SEQPACKET
        made = socket.socket(socket.AF_UNIX if self.path else socket.AF_INET, kind)
        try:
            made.connect(self.path or (self.host, self.port))
        except BaseException:
            made.close()
            raise
        return made

    def speaks(self, mechanism: str) -> bool:
        """Whether a ZeroMQ socket goes on with somebody who wants NULL or CURVE; else it closes the connection."""
        said = b""
        with self.connect() as probe, contextlib.suppress(ConnectionResetError):
            probe.sendall(greeting(mechanism))
            while len(said) < 64:
                more = probe.recv(64 - len(said))
                if not more:
                    break
                said += more
        return said[12:32].rstrip(b"\0") == mechanism.encode()


def greeting(mechanism: str) -> bytes:
    """Of ZMTP 3.1."""
    return SIGNATURE + b"\x03\x01" + mechanism.encode().ljust(20, b"\0") + bytes(32)


def listening(pids: Iterable[int], net: str = "/proc/net") -> list[Listening]:
    """Every socket of these processes that takes connections; a socket that several have is the first one's.

    *net* is what /proc shows of their network.
    """
    owners: dict[str, int] = {}
    for pid in pids:
        for fd in os.scandir(f"/proc/{pid}/fd"):
            try:
                target = os.readlink(fd.path)
            except FileNotFoundError:  # a file that it has just read, say; what listens stays open
                continue
            if target.startswith("socket:["):
                owners.setdefault(target[8:-1], pid)
    found = []
    for line in Path(f"{net}/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == LISTEN and words[9] in owners:
            ip, port = words[1].split(":")
            found.append(Listening(owners[words[9]], socket.inet_ntoa(struct.pack("<I", int(ip, 16))), int(port, 16)))
    tcp6 = Path(f"{net}/tcp6")
    for line in tcp6.read_text().splitlines()[1:] if tcp6.exists() else []:  # a kernel may be without IPv6
        words = line.split()
        if words[3] == LISTEN and words[9] in owners:
            found.append(Listening(owners[words[9]], "::", int(words[1].split(":")[1], 16)))
    for line in Path(f"{net}/unix").read_text().splitlines()[1:]:
        words = line.split(maxsplit=7)
        if int(words[3], 16) & ACCEPTS and words[6] in owners:
            found.append(Listening(owners[words[6]], path=words[7], stream=int(words[4], 16) == STREAM))
    return found
