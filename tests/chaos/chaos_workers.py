"""The workers of a chaos run: they do small operations and record all of them."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator
from typing import Any

from chaos_record import Record

from rlinf_actors import PeerDiedError, Worker

ALIVE_S = 0.25
"""Seconds between two `alive` lines in a worker's record."""
STOP = "stop"


class Actor(Worker):
    """One worker.

    Args:
        folder: of the records.
        label: of the group, unique among all that ever were.
        owner: pid of its driver.
    """

    def __init__(self, folder: str, label: str, owner: int) -> None:
        super().__init__()
        self._me = f"{label}:{self._rank}"
        self._record = Record(folder, f"{self._me}.{os.getpid()}")
        self._record.write("born", me=self._me, group=self._group_name, rank=self._rank, owner=owner, pid=os.getpid())
        self._ending = threading.Event()
        threading.Thread(target=self._live, name="signs of life", daemon=True).start()

    def _live(self) -> None:
        while not self._ending.wait(ALIVE_S):
            self._record.write("alive")

    def produce(self, channel: Any, place: str, count: int) -> None:
        """Put *count* numbered items."""
        stream = ("queue", self._me, place)
        for n in range(count):
            self._item("offer", stream, n)
            channel.put((self._me, n))
            self._item("sent", stream, n)

    def consume(self, channel: Any, place: str) -> None:
        """Get items until a STOP comes."""
        while True:
            self._item("ask", ("queue", "", place))
            work = channel.get(async_op=True)
            value = work.wait()
            if value == STOP:
                self._item("stopped", ("queue", "", place))
                return
            source, n = value
            self._item("got", ("queue", source, place), n, "again" if work.redelivered else "")

    def talk(self, label: str, count: int) -> None:
        """Rank 0 sends *count* numbered messages to rank 1, which sends each back."""
        there, back = ("pair", f"{label}:0", f"{label}:1"), ("pair", f"{label}:1", f"{label}:0")
        outgoing, incoming = (there, back) if self._rank == 0 else (back, there)
        peer = 1 - self._rank
        for n in range(count):
            try:
                if self._rank == 1:
                    self._take(incoming, peer)
                self._item("offer", outgoing, n)
                self.send(n, self._group_name, peer)
                self._item("sent", outgoing, n)
                if self._rank == 0:
                    self._take(incoming, peer)
            except PeerDiedError:
                self._item("refused", outgoing, n, "send")
                raise

    def _take(self, stream: tuple[str, str, str], peer: int) -> None:
        n = self.recv(self._group_name, peer)
        self._item("got", stream, n)

    def rest(self) -> None:
        """Wait until all its takes have ended; its end then loses no item."""
        self._record.write("rest")

    def _item(self, what: str, stream: tuple[str, str, str], n: int = 0, note: str = "") -> None:
        self._record.write("item", what=what, stream=stream, n=n, note=note)


class Caller(Actor):
    """One that is called: on its event loop."""

    async def step(self, call: str) -> str:
        """Return the call's name."""
        self._record.write("ran", call=call)
        return call

    async def numbers(self, call: str, count: int) -> AsyncIterator[int]:
        """Streams 0, 1, 2, ..."""
        self._record.write("ran", call=call)
        for n in range(count):
            yield n
