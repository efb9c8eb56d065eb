"""Ports that a worker holds for somebody who will listen on them later, such as torch's TCPStore."""

from __future__ import annotations

import socket


class HeldPorts:
    """Ports bound, but not listened on, until `close`.

    The kernel gives a bound port to nobody as an ephemeral one, and because both sides set
    SO_REUSEADDR, a later listener on the same address (TCPStore sets it) is let in. A program that
    binds the very number on purpose is let in too: this is a reservation against accidents.
    """

    def __init__(self) -> None:
        self._held: list[socket.socket] = []

    def hold(self, ip: str) -> int:
        """Reserve a free port on *ip* and return its number.

        Raises:
            OSError: there is no free port, or *ip* is not this machine's.
        """
        family = socket.AF_INET6 if ":" in ip else socket.AF_INET
        held = socket.socket(family, socket.SOCK_STREAM)
        try:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind((ip, 0))
        except OSError:
            held.close()
            raise
        self._held.append(held)
        port: int = held.getsockname()[1]
        return port

    def close(self) -> None:
        """Give all ports back."""
        for held in self._held:
            held.close()
        self._held.clear()
