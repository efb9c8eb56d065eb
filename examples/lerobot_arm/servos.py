"""Simulates the six servos of an SO-101 arm: a process that moves them and records every command.

The protocol is lines of text over TCP: `read`, `goal` with six angles, and `hold`. Each is answered by six angles. The
process prints its port, and ends when its standard input is closed.
"""

from __future__ import annotations

import json
import os
import socketserver
import sys
import threading
import time
from typing import ClassVar

SPEED = 90.0
"""Largest speed of a servo, in degrees per second."""


class Servos(socketserver.StreamRequestHandler):
    """One connection to the servos."""

    lock = threading.Lock()
    at: ClassVar[list[float]] = [0.0] * 6
    goal: ClassVar[list[float]] = [0.0] * 6
    since: ClassVar[float] = time.monotonic()
    record: ClassVar[int]

    def handle(self) -> None:
        """Obey the lines of the connection."""
        for line in self.rfile:
            with self.lock:
                self.wfile.write(" ".join(f"{angle:.4f}" for angle in self._obey(line.decode())).encode() + b"\n")

    def _obey(self, line: str) -> list[float]:
        word, *angles = line.split()
        now = time.monotonic()
        reach = SPEED * (now - Servos.since)
        Servos.at = [at + max(-reach, min(reach, goal - at)) for at, goal in zip(self.at, self.goal, strict=True)]
        Servos.since = now
        if word == "hold":
            Servos.goal = self.at
        elif word == "goal":
            Servos.goal = [float(angle) for angle in angles]
        if word != "read":
            os.write(self.record, json.dumps({"at": now, "command": word}).encode() + b"\n")
        return self.at


def main() -> None:
    """Serve until standard input is closed. The argument is the file of the record."""
    Servos.record = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Servos) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, name="connections").start()
        print(server.server_address[1], flush=True)
        sys.stdin.read()
        server.shutdown()


if __name__ == "__main__":
    main()
