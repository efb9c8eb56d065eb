"""Workers of test_versions.py."""

from __future__ import annotations

import os

from rlinf_actors import Worker


class Busy(Worker):
    """Calls, messages between ranks, channels."""

    def pid(self) -> int:
        return os.getpid()

    def double(self, value):
        return value + value

    def swap(self):
        """Send the own rank to the other rank and return the received value."""
        other = 1 - self._rank
        self.send([self._rank, b"x" * 300_000], self._group_name, other)
        return self.recv(self._group_name, other)[0]

    def put(self, channel, items):
        for item in items:
            channel.put(item)

    def take(self, channel, count):
        return [channel.get() for _ in range(count)]


class Counting(Worker):
    async def numbers(self, count):
        for number in range(count):
            yield number


def use(busy, counting, channel):
    """Call, send, receive, put, take and stream."""
    assert busy.double([1, 2]).wait() == [[1, 2, 1, 2]] * 2
    assert busy.swap().wait() == [1, 0]
    busy.execute_on(0).put(channel, list(range(5))).wait()
    assert busy.execute_on(1).take(channel, 5).wait() == [list(range(5))]
    channel.close()
    assert sorted(counting.numbers(3)) == [(rank, number) for rank in (0, 1) for number in range(3)]
