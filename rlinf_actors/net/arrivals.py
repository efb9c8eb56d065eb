"""Connections to one listener over TCP, from when they are accepted until they have proved themselves.

`net.crowd` decides who must go; here they are watched, and shut down below libzmq. Nothing is asked of those who have
proved themselves, and nothing of frames.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import select
import socket
import struct

from rlinf_actors.net.borrowed import Lens, moved
from rlinf_actors.net.crowd import BACKLOG, NEWCOMERS, Arrival, Crowd, Limits, Look
from rlinf_actors.net.handshakes import ACCEPTED, DISCONNECTED, FAILED_PROTOCOL, GateTally, at_server
from rlinf_actors.security.gate import Gate

AT_SERVER = ACCEPTED | DISCONNECTED | FAILED_PROTOCOL
"""What libzmq shall tell of."""
BATCH = 64
"""Newcomers that are looked at before other callbacks of the loop get a turn."""
CANDIDATES = 8
"""Newcomers that are looked at, for one that comes, until one is found that goes."""
LOOK_S = 0.25
"""How often all newcomers are looked at: epoll tells nothing of bytes that libzmq has read before it was asked."""
TOO_MANY = "too many connections have not proved themselves"
SLACK_S = 1.0
"""libzmq's timer of a handshake may be that late."""
_NO_LINGER = struct.pack("ii", 1, 0)
"""What is shut down ends by a reset when libzmq closes it, and nothing of it stays in the kernel."""


class Arrivals:
    """Watches the newcomers of one listener. Loop thread only.

    Args:
        loop: the loop that looks.
        ports: that it listens on.
        handshake_s: seconds after which libzmq closes who has not proved himself.
        gate: is told who was refused before there was a key.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, ports: set[int], handshake_s: float, gate: Gate) -> None:
        self._loop = loop
        self._ports = ports
        self._refused = GateTally(gate, loop)
        self._crowd = Crowd(limits(handshake_s))
        self._epoll = select.epoll()  # edge-triggered: bytes that libzmq leaves for later are told once
        self._unseen: list[int] = []  # who is yet to be looked at in this round
        self._timer: asyncio.TimerHandle | None = None
        self._lens = Lens()
        loop.add_reader(self._epoll.fileno(), self._drain)

    def close(self) -> None:
        """Watch nobody any more; connections are left as they are. Twice is fine."""
        if not self._epoll.closed:
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()
            self._lens.close()
            if self._timer is not None:
                self._timer.cancel()

    def happened(self, event: int, value: int) -> None:
        """One of AT_SERVER: libzmq tells of a connection."""
        if event == ACCEPTED:
            self._came(value)
        elif event == DISCONNECTED:
            self._crowd.gone(value)
        else:
            self._refused.note("", at_server(value))

    def _came(self, fd: int) -> None:
        now = self._loop.time()
        with self._lens.on(fd, self._ports) as peer:
            if peer is None:  # it has ended since, or came by the unix socket; and so has who had that descriptor
                self._crowd.gone(fd)
                return
            why = self._crowd.came(fd, peer, now)
            if why:
                self._shut(fd, peer, why)
                return
            with contextlib.suppress(OSError):  # closed since, or registered already when its number was another's
                self._epoll.register(fd, select.EPOLLIN | select.EPOLLET)
            if self._timer is None:
                self._timer = self._loop.call_later(LOOK_S, self._look_at_all)
        for _ in range(CANDIDATES):
            extra = self._crowd.surplus(now)
            if extra is None:
                break
            self._look(extra, TOO_MANY)

    def _drain(self) -> None:
        for fd, _ in self._epoll.poll(0, BATCH):
            newcomer = self._crowd.newcomer(fd)
            if newcomer is not None:
                self._look(newcomer)
            else:
                self._forget(fd)

    def _look_at_all(self) -> None:
        self._unseen = self._unseen or self._crowd.newcomers()
        for fd in self._unseen[:BATCH]:
            newcomer = self._crowd.newcomer(fd)
            if newcomer is not None:
                self._look(newcomer)
        self._unseen = self._unseen[BATCH:]
        self._timer = None
        if self._unseen or self._crowd.newcomers():
            self._timer = self._loop.call_later(0.0 if self._unseen else LOOK_S, self._look_at_all)

    def _look(self, newcomer: Arrival, too_many: str = "") -> None:
        """See how far a newcomer is, and shut it down if it must go: where there are *too_many*, if we wait for it."""
        fd = newcomer.fd
        with self._lens.on(fd, self._ports) as peer:
            if peer is None or peer != newcomer.peer:  # closed, or the next one that has this number: that is told soon
                self._crowd.gone(fd)
                return
            look = self._crowd.looked(fd, *moved(self._lens.connection))
            if look is Look.PROVED:
                self._forget(fd)
            elif look is Look.TOO_MUCH:
                self._shut(fd, peer, look.value)
            elif too_many and look is Look.NEW:
                self._shut(fd, peer, too_many)
            elif too_many:
                self._crowd.pass_over(fd, self._loop.time())

    def _shut(self, fd: int, peer: tuple[str, int], why: str) -> None:
        self._crowd.gone(fd)
        with contextlib.suppress(OSError):  # it has ended meanwhile
            self._lens.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            self._lens.connection.shutdown(socket.SHUT_RDWR)
        self._refused.note(peer[0], why)

    def _forget(self, fd: int) -> None:
        with contextlib.suppress(OSError):  # closed: the kernel has forgotten it already
            self._epoll.unregister(fd)


def limits(handshake_s: float) -> Limits:
    """What a listener of this process takes: a quarter of its descriptors are for other things."""
    total = resource.getrlimit(resource.RLIMIT_NOFILE)[0] * 3 // 4
    return Limits(total, min(NEWCOMERS, total // 4), min(BACKLOG, total // 2), settled_s=handshake_s + SLACK_S)
