"""A hostile member in a process of its own: sends as much as it can to the head, and reads as little as it likes."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Callable

import zmq

from rlinf_actors.net.framing import pack
from rlinf_actors.net.link import secret_identity
from rlinf_actors.wire import agent_messages as agent
from rlinf_actors.wire import client_messages as client
from rlinf_actors.wire.control_codec import Body, Notice, Request, encode
from rlinf_actors.wire.protocol import MAX_ASKED_BYTES, PROTOCOL
from rlinf_actors.wire.values import Claim, GroupHandle, WorkerSpec

CONNECTIONS = 24
"""Connections of one hostile member that are open at a time."""
PHASE_S = 1.0
"""Seconds of one attack. Then the member goes on with the next one."""
NAMES = 10_000
RANKS = 100_000
HANDLES = 100_000


class Hostile:
    """A member that floods the head.

    Args:
        endpoint: endpoint of the head.
        head: the head's public key.
        public, secret: key pair of this member.
        hello: its hello, which opens a session on each connection.
    """

    def __init__(self, endpoint: str, head: str, public: str, secret: str, hello: agent.ClientHello) -> None:
        self._endpoint, self._head, self._public, self._secret = endpoint, head, public, secret
        self._hello = hello
        self._context = zmq.Context()
        self._ids = itertools.count(1)
        self._sockets: list[zmq.Socket[bytes]] = []
        self._random = random.Random(os.getpid())
        self.sent: dict[str, int] = {}

    def connect(self, greet: bool = True) -> zmq.Socket[bytes]:
        """Open a connection with a session of its own, unless *greet* is False."""
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 4)
        socket.setsockopt(zmq.RCVHWM, 1)
        socket.setsockopt(zmq.RCVBUF, 4096)
        socket.setsockopt(zmq.ROUTING_ID, secret_identity("hostile"))
        socket.setsockopt(zmq.CURVE_SERVERKEY, self._head.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret.encode())
        socket.connect(self._endpoint)
        if greet:
            hello = self._hello_of(f"{self._hello.incarnation}-{next(self._ids)}")
            socket.send(self.chunk([hello]))
        return socket

    def _hello_of(self, incarnation: str) -> agent.ClientHello:
        hello = self._hello
        worker = hello.worker_id if hello.role == "worker" else ""
        return agent.ClientHello(
            PROTOCOL, "1", incarnation, hello.role, hello.namespace, "elsewhere", 0, 0, worker, hello.token
        )

    def chunk(self, bodies: list[Body], notices: bool = False) -> bytes:
        """Return messages as the bytes of one chunk."""
        rows = [(encode(Notice(body) if notices else Request(next(self._ids), body)), ()) for body in bodies]
        return pack(rows)[0]

    # --- attacks: each returns chunks to repeat ---

    def status(self) -> list[bytes]:
        return [self.chunk([client.GetStatus(), client.GetNodes(), client.FindGroup(self._hello.namespace, "g")] * 500)]

    def events(self) -> list[bytes]:
        return [self.chunk([client.GetEvents(0, limit=1000)] * 1000)]

    def waits(self) -> list[bytes]:
        """Requests that are answered late or never."""
        return [self.chunk([client.GetNodes(99_999), client.GetEvents(10**9, wait_s=60.0)] * 500)]

    def beats(self) -> list[bytes]:
        return [self.chunk([agent.Beat("x", 1.0)] * 60_000, notices=True), self.chunk([agent.Beat("x")], notices=True)]

    def watch(self) -> list[bytes]:
        names = [f"{n:06d}" for n in range(NAMES)]
        return [self.chunk([client.WatchClients(names)], notices=True)]

    def handles(self) -> list[bytes]:
        groups = [GroupHandle(self._hello.namespace, f"{n}", []) for n in range(HANDLES)]
        return [self.chunk([client.Handles(groups)], notices=True)]

    def launches(self) -> list[bytes]:
        """Launches that are refused, the longest ones first."""
        space = self._hello.namespace
        ranks = [WorkerSpec(f"x-{n}", "g", space, n, RANKS, 77, {}) for n in range(RANKS)]
        robots = [WorkerSpec("y-0", "y", space, 0, 1, 0, {}, claims=(Claim("robot", "the robot"),))]
        return [
            self.chunk([client.Launch(space, "g", "m:C", ranks)]),
            self.chunk([client.Launch(space, "y", "m:C", robots, wait_s=9.0), client.Launch(space, "g", "m:C", [])]),
        ]

    def groups(self) -> list[bytes]:
        """Launches that start workers, with equal names, and their ends."""
        space = self._hello.namespace
        rows: list[Body] = []
        for n in range(100):
            spec = WorkerSpec(f"z{os.getpid()}-{n}", "z", space, 0, 1, 0, {})
            rows += [client.Launch(space, "z", "m:C", [spec]), client.StopGroup(space, "z", 0.0)]
        return [self.chunk(rows)]

    def long(self) -> list[bytes]:
        """The longest messages: one string."""
        return [self.chunk([client.FindGroup(self._hello.namespace, "x" * (MAX_ASKED_BYTES - 200))])]

    def garbage(self) -> list[bytes]:
        return [os.urandom(1 << 20), pack([(os.urandom(50), ())] * 60_000)[0], b""]

    def verbs(self) -> list[bytes]:
        """Each request that there is, most of which this member may not send."""
        space = self._hello.namespace
        bodies: list[Body] = [
            client.EStop("me", "flood", space), client.EStop("me", "flood", space, True),
            client.EndGroup(space, "g", 0.0, "me"),
            client.DrainNode("n0", "me"), client.StopCluster(), client.RotateKey("x"), client.Enroll("x" * 40),
            client.AddKey("x" * 40, "driver", "me", "me"), client.RevokeKey("me", "me"), client.GetKeys(),
            client.Detach(space, "g", ["x"] * 1000), client.StopGroup(space, "g", 0.0, ["x"] * 1000),
            agent.LogCredit(space, "n0", 10), agent.Goodbye(), self._hello_of("same"),
        ]  # fmt: skip
        return [self.chunk(bodies * 50), self.chunk(bodies * 50, notices=True)]

    def reconnects(self) -> list[bytes]:
        """New connections, one after the other."""
        end = time.monotonic() + PHASE_S
        while time.monotonic() < end:
            socket = self.connect()
            socket.poll(20, zmq.POLLIN)
            socket.close()
            self.sent["reconnects"] = self.sent.get("reconnects", 0) + 1
        return []

    ATTACKS: tuple[Callable[[Hostile], list[bytes]], ...] = (
        status, events, beats, watch, launches, groups, waits, handles, long, verbs, garbage, reconnects,
    )  # fmt: skip

    def run(self, first: int, seconds: float) -> None:
        """Attack for some seconds, beginning with attack number *first*."""
        end = time.monotonic() + seconds
        for number in itertools.count(first):
            attack = self.ATTACKS[number % len(self.ATTACKS)]
            left = min(end - time.monotonic(), PHASE_S)
            if left <= 0:
                return
            chunks = attack(self)
            if chunks:
                self._flood(attack.__name__, chunks, left)

    def _flood(self, name: str, chunks: list[bytes], seconds: float) -> None:
        while len(self._sockets) < CONNECTIONS:
            self._sockets.append(self.connect())
        self._random.shuffle(self._sockets)
        self._sockets.pop().close(linger=0)  # sessions come and go
        end = time.monotonic() + seconds
        sent = 0
        for chunk in itertools.cycle(chunks):
            blocked = True
            for socket in self._sockets:
                with contextlib.suppress(zmq.Again):
                    socket.send(chunk, zmq.NOBLOCK)
                    sent, blocked = sent + 1, False
                if time.monotonic() >= end:
                    self.sent[name] = self.sent.get(name, 0) + sent
                    return
            if blocked:
                self._sockets[0].poll(5, zmq.POLLOUT)

    def close(self) -> None:
        self._context.destroy(linger=0)


def main() -> None:
    """Attack, as the line of stdin says."""
    print("ready", flush=True)
    endpoint, head, public, secret, role, space, token, worker, number, seconds = json.loads(sys.stdin.readline())
    hello = agent.ClientHello(PROTOCOL, "1", f"h{number}", role, space, "elsewhere", 0, 0, worker, token)
    hostile = Hostile(endpoint, head, public, secret, hello)
    try:
        hostile.run(int(number), float(seconds))
    finally:
        print(hostile.sent, flush=True)
        hostile.close()


if __name__ == "__main__":
    main()
