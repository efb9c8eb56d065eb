"""Ports that are held for somebody who will listen on them later, such as torch's TCPStore, or a head that is away."""

from __future__ import annotations

import socket

from rlinf_actors.errors import UsageError
from rlinf_actors.scarce import explain


class HeldPorts:
    """Ports bound on every address of the machine, but not listened on, until `release` or `close`.

    The kernel gives a bound port to nobody who asks for any port, nor to outgoing connections. A listener on the
    very number is let in if it sets SO_REUSEADDR or SO_REUSEPORT, since the socket here sets both: that is
    asyncio, http.server, ZeroMQ, TCPStore and gRPC, on one address or all. So it is a reservation against accidents,
    not against a program that asks for this number. One that sets neither option needs `release` first.
    """

    def __init__(self) -> None:
        self._held: dict[int, socket.socket] = {}

    def hold(self) -> int:
        """Reserve a port that is free on every address and return its number.

        Raises:
            OSError: there is no free port; the text says what to do.
        """
        try:
            held = _bound()
        except OSError as error:
            raise OSError(error.errno, explain(error)) from None
        port: int = held.getsockname()[1]
        self._held[port] = held
        return port

    def release(self, port: int) -> None:
        """Hold *port* no more.

        Raises:
            UsageError: it is not held.
        """
        held = self._held.pop(port, None)
        if held is None:
            raise UsageError(f"port {port} is not held here; held: {', '.join(map(str, self._held)) or 'none'}")
        held.close()

    def close(self) -> None:
        """Give all ports back."""
        for port in list(self._held):
            self.release(port)


def _bound() -> socket.socket:
    """A socket bound to a free port of IPv6 and IPv4, or of IPv4 alone where there is no IPv6."""
    try:
        return _bind(socket.AF_INET6, "::")
    except OSError:
        return _bind(socket.AF_INET, "0.0.0.0")


def _bind(family: socket.AddressFamily, address: str) -> socket.socket:
    held = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind((address, 0))
    except OSError:
        held.close()
        raise
    return held
