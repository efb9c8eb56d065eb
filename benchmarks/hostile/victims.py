"""The head of a run with hostile members, and its victims: sessions that behave, and measure what they notice."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
from typing import Any, cast

import msgspec

from agentd.session import Session
from agentd.workers import Workers
from benchmarks.scale.agents import STDERR_TAIL
from benchmarks.timing import clock
from rlinf_actors.head.commands import Timing
from rlinf_actors.head.key_registry import OwnKeys
from rlinf_actors.head.server import HeadServer
from rlinf_actors.head.store import HeadStore
from rlinf_actors.net.host import host_key
from rlinf_actors.net.link import secret_identity
from rlinf_actors.net.rpc import ControlClient
from rlinf_actors.net.socket_security import Security
from rlinf_actors.net.zmq_network import ZmqNetwork
from rlinf_actors.runtime.head_session import HeadSession
from rlinf_actors.security.keypair import KeyPair
from rlinf_actors.wire.agent_messages import ClientHello, StartWorkers, WorkerExited, WorkerReady
from rlinf_actors.wire.client_messages import Events, FindGroup, GetEvents, GetNodes, GetStatus, Launch, StopGroup
from rlinf_actors.wire.control_codec import Body
from rlinf_actors.wire.key_messages import AddKey
from rlinf_actors.wire.protocol import PROTOCOL
from rlinf_actors.wire.values import Claim, Endpoint, ExitReport, NodeReport, WorkerSpec

LEASE_KINDS = ("lease_lost", "robot_conflict", "node_suspect", "node_lost", "node_heard")


async def serve_head(folder: str, lease_s: float) -> int:
    """Run a head until stdin ends; return 0. stdin has its key pair; stdout gets its endpoint.

    *lease_s* is the length of a robot's lease.
    """
    public, secret = sys.stdin.readline().split()
    pair = KeyPair.of_text(public, secret, "stdin")
    network = ZmqNetwork(asyncio.get_running_loop(), Security(pair=pair, head=pair.public))
    head = HeadServer(network, store=HeadStore(folder), own=OwnKeys(pair.public), timing=Timing(robot_lease_s=lease_s))
    print(head.start(["tcp://127.0.0.1:0"])[0], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    head.close()
    network.close()
    return 0


class RobotWorkers:
    """Stands in for `agentd.workers.Workers`: workers exist in messages only. Counts the leases that agentd ended.

    Attributes:
        lost: the stops of workers, by agentd or the head, while the victim's robot should run.
        renewals: times at which the lease was renewed.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.lost: list[str] = []
        self.renewals: list[float] = []

    def start(self, order: StartWorkers) -> None:
        for spec in order.workers:
            ready = WorkerReady(spec.id, 4000, Endpoint(host_key(), "ipc:///nowhere"), 5000, 6000)
            asyncio.get_running_loop().call_soon(self._session.report, ready)

    def stop(self, ids: list[str], grace_s: float, reason: str = "") -> None:
        self.lost += [f"{id}: {reason}" for id in ids if id.startswith("robot")]
        for id in ids:
            report = WorkerExited(id, ExitReport("stopped", stderr_tail=STDERR_TAIL))
            asyncio.get_running_loop().call_soon(self._session.report, report)

    def renew(self, *_: object) -> None:
        self.renewals.append(clock())

    async def close(self, grace_s: float, reason: str = "") -> None:
        pass

    def _ignore(self, *_: object) -> None:
        pass

    record_owner = acknowledged = credit_logs = registered = flush_logs = _ignore


class Outcome(msgspec.Struct):
    """Measurements of the victims, and the leases and sessions that they lost.

    Attributes:
        waits: seconds of each control round trip of the second driver, by kind of request.
        failed: errors of these requests.
        renewals: longest time between two renewals of the robot lease, in seconds.
        lost: lost leases and ended sessions.
        log: entries of the event log about leases and about hostile members.
    """

    waits: dict[str, list[float]]
    failed: list[str]
    renewals: float
    lost: list[str]
    log: list[str]


class Victims:
    """An agentd's session with a robot worker, the robot's owner and another driver. `open` before use.

    Args:
        endpoint: endpoint of the head.
        head: the head's own key pair.
    """

    def __init__(self, endpoint: str, head: KeyPair) -> None:
        self._endpoint = endpoint
        self._head = head
        self._loop = asyncio.get_running_loop()
        self._networks: list[ZmqNetwork] = []
        self._sessions: list[HeadSession] = []
        self._lost: list[str] = []
        self.admin = ControlClient(self._network(head), endpoint, secret_identity("admin"), lambda notice: None)
        self._ids = 0

    def _network(self, pair: KeyPair) -> ZmqNetwork:
        network = ZmqNetwork(self._loop, Security(pair=pair, head=self._head.public))
        self._networks.append(network)
        return network

    async def enroll(self, role: str, name: str) -> KeyPair:
        """List a new key of a member at the head."""
        pair = KeyPair.make()
        await self.admin.request(AddKey(pair.public, role, name, "bench"), 10)  # type: ignore[arg-type]
        return pair

    async def session(self, pair: KeyPair, name: str) -> HeadSession:
        """Open the session of a driver whose namespace is *name*."""
        hello = ClientHello(PROTOCOL, "1", name, "driver", name, "elsewhere", 0, 0)
        ended = lambda why: self._lost.append(f"{name}: {why}")  # noqa: E731
        session = HeadSession(
            self._network(pair), self._endpoint, hello, lambda notice: None, on_silence=ended, on_given_up=ended
        )
        await session.start(10)
        self._sessions.append(session)
        return session

    async def open(self) -> None:
        """Start the agentd's session, launch a worker with a robot, and open the session of the other driver."""
        report = NodeReport(
            "n0", "host0", "10.0.0.1", "host-0", num_cpus=64, memory_bytes=1 << 38, python="3.11.7",
            interpreter=sys.executable,
        )  # fmt: skip
        here = asyncio.Event()
        network = self._network(await self.enroll("agent", "n0"))
        self._agent = Session(network, self._endpoint, report, keeps=True, on_registered=here.set)
        self._workers = RobotWorkers(self._agent)
        self._agent.attach(cast(Workers, self._workers))
        self._running = self._loop.create_task(cast(Any, self._agent.run()))
        await here.wait()
        self._owner = await self.session(await self.enroll("driver", "owner"), "owner")
        await self._owner.request(GetNodes(1), 10)
        self._owner.own_robots()
        robot = WorkerSpec(
            "robot-0", "arm", "owner", 0, 1, 0, {}, claims=(Claim("arm", "the arm"),), owner_must_answer="always"
        )
        await self._settled(Launch("owner", "arm", "m:Arm", [robot], wait_s=20.0))
        self._other = await self.session(await self.enroll("driver", "other"), "other")

    async def _settled(self, launch: Launch) -> None:
        await self._owner.request(launch, 30)

    async def measure(self, seconds: float, pause_s: float = 0.01) -> Outcome:
        """Ask the head as the second driver, for some seconds."""
        outcome = Outcome({}, [], 0.0, [], [])
        end, number = clock() + seconds, 0
        self._workers.renewals.clear()
        begun = clock()
        while clock() < end:
            number += 1
            for body in self._round(number):
                start = clock()
                try:
                    await self._other.request(body, 20)
                except Exception as error:  # noqa: BLE001 - part of the outcome
                    outcome.failed.append(f"{type(body).__name__}: {error}"[:300])
                outcome.waits.setdefault(type(body).__name__, []).append(clock() - start)
            await asyncio.sleep(pause_s)
        times = [begun, *self._workers.renewals, clock()]
        outcome.renewals = max(later - before for before, later in itertools.pairwise(times))
        return outcome

    def _round(self, number: int) -> list[Body]:
        if number % 10:
            return [GetNodes(1)] if number % 2 else [GetStatus("other")]
        group = f"g{number}"
        spec = WorkerSpec(f"w{number}-0", group, "other", 0, 1, 0, {})
        return [Launch("other", group, "m:C", [spec]), FindGroup("other", group), StopGroup("other", group, 0.0)]

    async def ended(self, outcome: Outcome) -> Outcome:
        """Add to the outcome what the head's event log says, and what the sessions noticed."""
        outcome.lost = self._workers.lost + self._lost
        since = 0
        while True:
            events = cast(Events, await self.admin.request(GetEvents(since, limit=1000), 60))
            for event in events.events:
                if event.kind in LEASE_KINDS and "owner" in (event.namespace, *event.text.split("'")):
                    outcome.lost.append(f"{event.kind}: {event.text}")
                elif event.kind in LEASE_KINDS or event.kind == "refused":
                    outcome.log.append(f"{event.kind}: {event.text}"[:200])
            since = events.next
            if not events.more:
                return outcome

    async def close(self) -> None:
        self._running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._running
        for session in self._sessions:
            session.close("")
        self.admin.close()
        for network in self._networks:
            network.close()
