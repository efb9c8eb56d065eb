"""NodeReachability: detects a cut network between this process and the nodes of workers that it waits for.

The head reports workers that died. But the head may reach two nodes that do not reach each other; a call or receive
between them would wait forever. Therefore, while this process waits for a worker on another machine and no message
arrives from that machine, it makes the same reachability checks as the head (`net.failure_detection`): the kernel of a
reachable machine answers even if the worker is stopped or busy; across a cut network there is no answer. After the
head's lease plus HEAD_FIRST_S, calls to workers of that machine fail.

Loop thread only.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable

from rlinf_actors.errors import NodeLostError
from rlinf_actors.net.failure_detection import FailureDetector, stalled_s
from rlinf_actors.net.link import Network, Reachability
from rlinf_actors.net.loop import Tasks, handling_failed
from rlinf_actors.runtime.peer import Peer
from rlinf_actors.runtime.remote_group import RemoteGroup

HEAD_FIRST_S = 1.0
"""Margin over the head's lease, so that the head is the first to report a dead node."""


class _Path:
    """One other machine with workers that this process waits for, and the failure detector of that machine.

    `received` has the number of messages that had arrived from each of these workers at the last check.
    """

    def __init__(self, detector: FailureDetector, now: float) -> None:
        self.detector = detector
        self.received: dict[Peer, int] = {}
        self.checks = Tasks()
        detector.heard(now)


class NodeReachability:
    """Fails calls to workers on machines that this process cannot reach, although the head may reach them.

    A driver or worker has one. It checks each other machine that has a worker for which this process waits.

    Args:
        network: makes the reachability checks.
        host: host key of this machine.
        groups: returns all groups that this process has handles of.
    """

    def __init__(self, network: Network, host: str, groups: Callable[[], Iterable[RemoteGroup]]) -> None:
        self._network = network
        self._host = host
        self._groups = groups
        self._paths: dict[str, _Path] = {}
        self._tasks = Tasks()

    def start(self, beat_s: float, lease_s: float) -> None:
        """Start checking. *beat_s* and *lease_s* are the head's heartbeat interval and lease, in seconds."""
        self._tasks.start(self._tend(beat_s, lease_s), "watching other nodes")

    def close(self) -> None:
        """Stop all checks. Calling twice is harmless."""
        for path in self._paths.values():
            path.checks.cancel()
        self._paths.clear()
        self._tasks.cancel()

    async def _tend(self, beat_s: float, lease_s: float) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + beat_s
            await asyncio.sleep(beat_s)
            try:
                self._turn(loop.time(), due, beat_s, lease_s)
            except Exception as error:  # noqa: BLE001 - without the next turns a call into a cut network would not end
                handling_failed(loop, "watching other nodes", error, None)

    def _turn(self, now: float, due: float, beat_s: float, lease_s: float) -> None:
        awaited = self._awaited()
        self._paths = {machine: path for machine, path in self._paths.items() if machine in awaited}
        for machine, peers in awaited.items():
            path = self._paths.get(machine)
            if path is None:
                detector = FailureDetector(math.inf, who=f"its node {machine}")
                detector.beat_s, detector.lease_s = beat_s, lease_s + HEAD_FIRST_S
                path = self._paths[machine] = _Path(detector, now)
            stall = stalled_s(due, now)
            if stall:
                path.detector.stalled(stall, now)
            for relay in {peer.relay for peer, _ in peers if peer.relay is not None}:
                relay.tend(now, stall)
            received = {peer: peer.received for peer, _ in peers}
            if any(path.received.get(peer) != count for peer, count in received.items()):
                path.detector.heard(now)  # or another worker is waited for from now on
            path.received = received
            self._judge(path, peers, now)

    def _awaited(self) -> dict[str, list[tuple[Peer, str]]]:
        """Return the Peer and TCP endpoint of each awaited worker, by machine. This machine is left out."""
        found: dict[str, list[tuple[Peer, str]]] = {}
        for group in self._groups():
            for peer in group.awaited():
                state = group.states.get(peer.rank)
                endpoint = None if state is None else state.endpoint
                if endpoint is None or not endpoint.tcp or endpoint.host == self._host:
                    continue
                machine = endpoint.tcp.removeprefix("tcp://").rpartition(":")[0]
                found.setdefault(machine, []).append((peer, endpoint.tcp))
        return found

    def _judge(self, path: _Path, peers: list[tuple[Peer, str]], now: float) -> None:
        reason = path.detector.verdict(now)
        if reason is not None:
            for peer, _ in peers:
                peer.fail(
                    NodeLostError(
                        f"{peer.name} on {peer.node} is out of reach from here: {reason}. The head has not given it "
                        "up, so it may be running; how far it got with what was under way is not known"
                    )
                )
                peer.close()
        elif path.detector.should_check(now):
            detector, clock = path.detector, asyncio.get_running_loop().time
            check = self._check(path, peers[0][1])
            path.checks.start(check, "checking a node", failed=lambda _: detector.check_failed(clock()))

    async def _check(self, path: _Path, endpoint: str) -> None:
        sight = await self._network.check_reachability(endpoint, path.detector.check_timeout_s)
        path.detector.checked(sight is not Reachability.SILENT, asyncio.get_running_loop().time())
