"""Workers that the driver of test_keyed_nodes launches."""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
from pathlib import Path

from rlinf_actors import Worker

LISTEN, ACCEPTS = "0A", 0x10000
GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
"""A greeting of ZMTP 3.1 with CURVE, from a client that leaves before it proves its key."""


def listening() -> list[tuple[str, str]]:
    """Every listening socket of this network namespace: its address or path, and its protection."""
    found = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state = line.split()[:4]
        if state == LISTEN:
            ip, port = local.split(":")
            host = socket.inet_ntoa(struct.pack("<I", int(ip, 16)))
            found.append((f"{host}:{int(port, 16)}", _mechanism(host, int(port, 16))))
    tcp6 = Path("/proc/net/tcp6")
    if tcp6.exists():  # the kernel may lack IPv6
        found += [(line, "tcp6") for line in tcp6.read_text().splitlines()[1:] if f" {LISTEN} " in line]
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        words = line.split(maxsplit=7)
        if int(words[3], 16) & ACCEPTS:
            path = words[7]
            found.append((path, "nothing" if path.startswith("@") else oct(os.stat(os.path.dirname(path)).st_mode)))
    return found


def _mechanism(host: str, port: int) -> str:
    """The security mechanism that a ZeroMQ socket requires."""
    with socket.create_connection((host, port), timeout=10) as probe:
        probe.sendall(GREETING)
        said = b""
        while len(said) < len(GREETING):
            more = probe.recv(100)
            if not said and more[:1] != GREETING[:1]:
                probe.shutdown(socket.SHUT_WR)  # no ZeroMQ: a bulk port, which sends a random number first
            if not more and len(said) == 16:
                return "bulk"
            if not more:
                return f"said {said!r}"
            said += more
        return said[12:32].rstrip(b"\0").decode()


class Refusals(logging.Filter):
    """Sets `logged` when this process logs that it refused a connection. A filter: with a handler of the program's own,
    Python would not print warnings to stderr any more."""

    def __init__(self) -> None:
        super().__init__()
        self.logged = threading.Event()

    def filter(self, record: logging.LogRecord) -> bool:
        if "refused a connection" in record.getMessage():
            self.logged.set()
        return True


class Carrier(Worker):
    def __init__(self) -> None:
        super().__init__()
        self.refusals = Refusals()
        logging.getLogger("rlinf_actors.worker.joining").addFilter(self.refusals)

    def wait_for_refusal(self) -> bool:
        return self.refusals.logged.wait(20)

    def echo(self, text: str) -> str:
        self.log_info(f"log line: {text}")
        print(f"output: {text}", flush=True)
        return text

    def listening(self) -> list[tuple[str, str]]:
        return listening()

    def swap(self, text: str) -> str:
        """Send to the other rank, and return its message."""
        other = 1 - self._rank
        sent = self.send({"text": text}, self._group_name, other, async_op=True)
        got = self.recv(self._group_name, other)
        sent.wait()
        return got["text"]

    def through(self, channel, text: str) -> str:
        if self._rank == 0:
            channel.put({"text": text})
            return text
        return channel.get()["text"]
