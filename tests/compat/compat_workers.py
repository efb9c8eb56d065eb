"""Workers and a driver for clusters of two versions: plain names only, imported by both."""

from __future__ import annotations

import os
import sys

from rlinf_actors import Channel, Cluster, NodePlacementStrategy, Worker


class Mixed(Worker):
    """Exercises the traffic between versions: calls, messages between ranks, channels."""

    def pid(self) -> int:
        return os.getpid()

    def protocol(self) -> int:
        """The newest protocol of this worker's code; the class may have been sent by value, with its globals."""
        return sys.modules["rlinf_actors.wire.protocol"].PROTOCOL

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
    """Streams."""

    async def numbers(self, count):
        for number in range(count):
            yield number


class CountingPlainly(Worker):
    """Streams from a plain generator: since protocol 7."""

    def numbers(self, count):
        yield from range(count)


def exercise(cluster: Cluster, name: str, nodes: list[int]) -> list[int]:
    """Launch groups with a rank on each of two nodes and use all of them; return the protocol of each rank's code."""
    mixed = Mixed.create_group().launch(cluster, NodePlacementStrategy(nodes), name=name)
    counting = Counting.create_group().launch(cluster, NodePlacementStrategy(nodes), name=f"{name}-counting")
    use(mixed, counting, Channel.create(f"{name}-items", node_rank=nodes[1]))
    protocols = mixed.protocol().wait()
    counting.shutdown()
    mixed.shutdown()
    return protocols


def use(mixed, counting, channel):
    """Call, send, receive, put, take and stream."""
    assert mixed.double([1, 2]).wait() == [[1, 2, 1, 2]] * 2
    assert mixed.swap().wait() == [1, 0]
    mixed.execute_on(0).put(channel, list(range(5))).wait()
    assert mixed.execute_on(1).take(channel, 5).wait() == [list(range(5))]
    channel.close()
    assert sorted(counting.numbers(3)) == [(rank, number) for rank in (0, 1) for number in range(3)]


def main() -> None:
    """A driver that carries out each line of its stdin and answers it with a line."""
    head, num_nodes = sys.argv[1], int(sys.argv[2])
    with Cluster(num_nodes=num_nodes, head=head, namespace="old") as cluster:
        group = Mixed.create_group().launch(cluster, NodePlacementStrategy([0, 1]), name="steady")
        print(*group.pid().wait(), flush=True)
        for line in sys.stdin:
            what, *rest = line.split()
            if what == "call":
                print(*group.double(int(rest[0])).wait(), *group.pid().wait(), *group.swap().wait(), flush=True)
            else:
                print(*exercise(cluster, rest[0], [0, 1]), flush=True)


if __name__ == "__main__":
    main()
