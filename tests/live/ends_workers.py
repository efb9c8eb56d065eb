"""Workers that are watched: what they have open and mapped, how much memory and CPU they use."""

from __future__ import annotations

import gc
import os
import threading
import time
from typing import Any

import numpy as np
from message_workers import Talker, ended

import rlinf_actors.worker.worker_server as worker_server
from rlinf_actors.net.zmq_network import start_shared_thread
from rlinf_actors.wire import frames

MIB = 1 << 20
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def ticks(pid: int) -> int:
    """CPU that a process has used, user and system, in clock ticks."""
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def resident(field: str) -> int:
    """VmRSS or VmHWM of this process in bytes."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(field + ":"))


class Survivor(Talker):
    """Talks with a worker that is going to be killed."""

    def __init__(self) -> None:
        super().__init__()
        start_shared_thread()  # it stays, once something large was sent
        worker_server.LATE_S = 2.0  # how long memory of a worker that ended stays, for what it sent

    def meet(self, group: str, first: bool) -> None:
        """A large object each way, so that every kind of link and memory is there."""
        large = np.ones(2 * MIB, np.uint8)
        if first:
            self.send(large, group, 0)
        assert self.recv(group, 0)[0] == 1
        if not first:
            self.send(large, group, 0)

    def meet_all(self, groups: Any, source: Any) -> None:
        assert self.broadcast(np.ones(2 * MIB, np.uint8), groups=groups, src=source)[0] == 1

    def endures(self, what: str, group: str, groups: Any, source: Any) -> str:
        """How an operation ended that could not end well."""
        large = np.zeros(4 * MIB, np.uint8)
        if what == "send":
            works = [self.send(large, group, 0, async_op=True) for _ in range(40)]
            return max(ended(work) for work in works)
        if what == "256 MiB":
            works = [self.send(np.zeros(256 * MIB, np.uint8), group, 0, async_op=True) for _ in range(2)]
            return max(ended(work) for work in works)
        if what == "recv":
            return ended(self.recv(group, 0, async_op=True))
        if what == "256 MiB from it":
            works = [self.recv(group, 0, async_op=True) for _ in range(2)]
            assert ended(works[0]) in ("", "PeerDiedError")  # the whole of it, or nothing
            return ended(works[1])
        works = [self.broadcast(large, groups=groups, src=source, async_op=True) for _ in range(40)]
        return max(ended(work) for work in works)

    def start_filled(self, size: int, group: str) -> None:
        self.works = [self.send(np.ones(size, np.uint8), group, 0, async_op=True)]

    def has_open(self) -> dict[str, int]:
        """Descriptors, and pieces of shared memory that are mapped."""
        gc.collect()
        with open("/proc/self/maps") as maps:
            mapped = sum("memfd:" in line for line in maps)
        return {"descriptors": len(os.listdir("/proc/self/fd")), "mapped": mapped, "threads": threading.active_count()}

    def has_open_like(self, before: dict[str, int]) -> dict[str, int]:
        """The same, once it is as *before*; libzmq closes on threads of its own, silently."""
        deadline = time.monotonic() + 60
        while (now := self.has_open()) != before and time.monotonic() < deadline:
            threading.Event().wait(0.01)
        return now


class Bounded(Talker):
    """Sends much, or holds what it does not ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.changed = threading.Condition()
        assert self._context is not None
        server = self._context.server
        taken = server._handlers[frames.UserMessage]

        def noted(*message: Any) -> None:
            taken(*message)
            with self.changed:
                self.changed.notify_all()

        server.serve((frames.UserMessage,), noted)

    def begin(self) -> None:
        """From now on the peak of this process's memory is measured."""
        gc.collect()
        with open("/proc/self/clear_refs", "w") as clear:
            clear.write("5")
        self.before = resident("VmRSS")

    def grown(self) -> int:
        """Bytes by which the peak exceeds what it was at `begin`."""
        return resident("VmHWM") - self.before

    def start_many(self, size: int, count: int, group: str) -> int:
        """Sends of one array under way; how many have ended at once."""
        value = np.ones(size, np.uint8)
        self.works = [self.send(value, group, 0, async_op=True) for _ in range(count)]
        return sum(work.done() for work in self.works)

    def done_count(self) -> int:
        return sum(work.done() for work in self.works)

    def hold(self, count: int) -> int:
        """Wait until that many messages are held. Return how many there are."""
        assert self._context is not None
        messenger = self._context.messenger
        with self.changed:
            self.changed.wait_for(lambda: len(messenger._mailbox) >= count)
        return len(messenger._mailbox)

    def take(self, count: int, group: str) -> int:
        return sum(int(self.recv(group, 0)[-1]) for _ in range(count))


class Spinner(Talker):
    """Works, while others wait."""

    def spin(self, ticks_used: int) -> int:
        start = ticks(os.getpid())
        while ticks(os.getpid()) - start < ticks_used:
            sum(range(10_000))
        return ticks(os.getpid()) - start
