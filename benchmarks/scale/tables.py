"""CPU time of the head's tables for each event. There is no socket and no other process."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator

from benchmarks.scale.roles import Answer
from rlinf_actors.head.commands import Identity, NoticeReceived, Refuse, RequestReceived, Snapshot, Timing
from rlinf_actors.head.coordinator import Coordinator
from rlinf_actors.head.key_registry import OwnKeys
from rlinf_actors.security.members import LOCAL
from rlinf_actors.wire.agent_messages import AgentHello, Beat, ClientHello, WorkerExited, WorkerReady
from rlinf_actors.wire.client_messages import GetNodes, Launch
from rlinf_actors.wire.control_codec import Body
from rlinf_actors.wire.protocol import PROTOCOL
from rlinf_actors.wire.values import Endpoint, ExitReport, NodeReport, WorkerSpec

SAMPLE = 1000
"""Most events of one kind."""


class Tables:
    """A coordinator to which events of simulated peers are given."""

    def __init__(self) -> None:
        self._now = 1000.0
        identity, tokens = Identity("epoch", "1", embedded=False), itertools.count()
        self._coordinator = Coordinator(
            identity, Timing(), lambda: f"token{next(tokens)}", self._now, Snapshot(), OwnKeys(), lambda token: token
        )
        self._requests = itertools.count(1)
        self.cpu_s: dict[str, float] = {}
        self.events: dict[str, int] = {}

    def request(self, peer: str, body: Body) -> None:
        self._handle(RequestReceived(peer.encode(), next(self._requests), body, LOCAL))

    def notice(self, peer: str, body: Body) -> None:
        self._handle(NoticeReceived(peer.encode(), body, LOCAL))

    def _handle(self, event: RequestReceived | NoticeReceived) -> None:
        for command in self._coordinator.handle(event, self._now, 0.0):
            if isinstance(command, Refuse):
                raise RuntimeError(f"the head refused {event}: {command.text}")
        self._coordinator.next_deadline()

    @contextlib.contextmanager
    def timed(self, name: str, events: int) -> Iterator[None]:
        start = time.process_time()
        yield
        self.cpu_s[name], self.events[name] = time.process_time() - start, events


def agent_hello(n: int) -> AgentHello:
    ip = f"10.{n >> 16 & 255}.{n >> 8 & 255}.{n & 255}"
    report = NodeReport(f"n{n}", f"host{n}", ip, f"host-{n}", 64, 1 << 38, "3.11.7", "/usr/bin/python3")
    return AgentHello(PROTOCOL, "1", f"n{n}-1", report, secret=f"of n{n}")


def measure(nodes: int, per_node: int) -> Answer:
    """Return the CPU microseconds of the tables for each event, with *per_node* workers on each of *nodes* nodes."""
    tables, workers = Tables(), nodes * per_node
    with tables.timed("hello", nodes):
        for n in range(nodes):
            tables.request(f"a:n{n}", agent_hello(n))
    with tables.timed("hello_again", min(nodes, SAMPLE)):
        for n in range(min(nodes, SAMPLE)):
            tables.request(f"a:n{n}", agent_hello(n))
    hello = ClientHello(PROTOCOL, "1", "driver", "driver", "ns", "elsewhere", 100, 5)
    tables.request("driver", hello)
    tables.request("driver", GetNodes(nodes))
    with tables.timed("beat", min(nodes, SAMPLE)):
        for n in range(min(nodes, SAMPLE)):
            tables.notice(f"a:n{n}", Beat(f"n{n}-1"))
    specs = [WorkerSpec(f"g-{rank}", "g", "ns", rank, workers, rank % nodes, {}) for rank in range(workers)]
    with tables.timed("launch_per_worker", workers):
        tables.request("driver", Launch("ns", "g", "module:Class", specs))
    with tables.timed("ready", workers):
        for rank in range(workers):
            ready = WorkerReady(f"g-{rank}", 4000, Endpoint(f"host-{rank % nodes}", ipc="ipc:///run/w"))
            tables.notice(f"a:n{rank % nodes}", ready)
    with tables.timed("exit", min(workers, SAMPLE)):
        for rank in range(min(workers, SAMPLE)):
            ended = WorkerExited(f"g-{rank}", ExitReport("signalled", signal=9))
            tables.notice(f"a:n{rank % nodes}", ended)
    return {f"{name}_us": tables.cpu_s[name] / tables.events[name] * 1e6 for name in tables.cpu_s}
