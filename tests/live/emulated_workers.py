"""Workers that measure how long what they send takes. One machine has one monotonic clock."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from rlinf_actors import Channel, Cluster, Worker


def since(sent: float) -> float:
    return time.monotonic() - sent


class Near(Worker):
    """Sends."""

    def send_to(self, group: str, count: int, size: int, rank: int = 0) -> None:
        for _ in range(count):
            self.send((time.monotonic(), np.zeros(size, np.uint8)), group, rank)

    def put(self, channel: Channel, count: int) -> None:
        for _ in range(count):
            channel.put(time.monotonic())

    def source(self, size: int, groups: Any) -> None:
        self.broadcast((time.monotonic(), np.zeros(size, np.uint8)), groups=groups)

    def call(self, group: Any, rank: int, count: int) -> list[float]:
        took = []
        for _ in range(count):
            began = time.monotonic()
            group.execute_on(rank).answer().wait()
            took.append(time.monotonic() - began)
        return took

    def launch_another(self) -> list[float]:
        """Launch a far group from here: workers that join later emulate the same network."""
        group = Far.create_group().launch(Cluster(), name="LateGroup")
        result = group.receive("NearGroup", 3)
        self.send_to("LateGroup", 3, 0)
        (took,) = result.wait()
        group.shutdown()
        return took


class Far(Worker):
    """Receives. Each method returns how long each message took."""

    def receive(self, group: str, count: int) -> list[float]:
        return [since(self.recv(group, 0)[0]) for _ in range(count)]

    def receive_first_and_last(self, group: str, count: int) -> tuple[float, float]:
        """Return the times of the first send and of the last arrival."""
        sent = [self.recv(group, 0)[0] for _ in range(count)]
        return sent[0], time.monotonic()

    def get(self, channel: Channel, count: int) -> list[float]:
        return [since(channel.get()) for _ in range(count)]

    def member(self, groups: Any) -> float:
        return since(self.broadcast(None, groups=groups)[0])

    def answer(self) -> None:
        pass
