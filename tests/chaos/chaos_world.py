"""A whole cluster in one loop: head, agents' sessions, drivers' sessions and workers' servers over the memory network.

Stand-ins: a worker's process (its server is real) and a driver's glue (its session and its groups are real). Time is
virtual: it goes on when nothing is left to do, so that a minute takes as long as its messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import selectors
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from msgspec.structs import replace

from agentd.session import Session
from agentd.state import Policy
from rlinf_actors.errors import ClusterTimeoutError, NodeLostError, RlinfActorsError
from rlinf_actors.head.commands import Timing
from rlinf_actors.head.server import HeadServer
from rlinf_actors.head.store import Store
from rlinf_actors.model.restart import RestartPolicy, rank_id
from rlinf_actors.net.link import Sight
from rlinf_actors.net.memory import MemoryNetwork
from rlinf_actors.runtime.headlink import HeadLink
from rlinf_actors.runtime.remote import Construction, RemoteGroup
from rlinf_actors.testing import faults
from rlinf_actors.testing.chaos.invariants import SCENE
from rlinf_actors.testing.chaos.record import Line
from rlinf_actors.wire import frames, payload
from rlinf_actors.wire.agents import StartWorkers, WorkerExited, WorkerReady
from rlinf_actors.wire.clients import Handles, Launch, StopGroup, WorkerChanged
from rlinf_actors.wire.protocol import PROTOCOL
from rlinf_actors.wire.session import ClientHello, Goodbye
from rlinf_actors.wire.values import Endpoint, ExitReport, NodeReport, RunningWorker, WorkerSpec
from rlinf_actors.worker.server import WorkerServer

HEAD = "ipc:///head"
TIMING = Timing(beat_s=0.2, lease_s=2.0, rank_hold_s=2.0, orphan_grace_s=0.2)
LIMIT_S = 60.0
CALLS = 30
KILLED = ExitReport("signalled", None, 9)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its clock goes on only while it would wait."""

    def __init__(self) -> None:
        self.now = 1000.0
        super().__init__(_Jump(self))

    def time(self) -> float:
        return self.now


class _Jump(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "nothing will ever happen: somebody waits for ever"
        self._loop.now += max(0.0, timeout)
        return super().select(0)


class _Seen:
    """The network as one process sees it: behind a cut it finds nobody."""

    def __init__(self, world: World, who: Any) -> None:
        self._world = world
        self._who = who

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world.network, name)

    async def look(self, endpoint: str, timeout_s: float = 1.0) -> Sight:
        if self._who in self._world.cut:
            await asyncio.sleep(timeout_s)
            return Sight.SILENT
        return await self._world.network.look(endpoint, timeout_s)


class _Store(Store):
    """Written on the loop, so that time stands still meanwhile."""

    def write(self, changes: Any, done: Callable[[bool], None]) -> None:
        self._asked.extend(changes)
        asyncio.get_running_loop().call_soon(done, self._write())


class LoneWorker:
    """A worker's process: a real server, and calls that take a moment."""

    def __init__(self, world: World, spec: WorkerSpec, owner: int) -> None:
        self.world = world
        self.spec = spec
        self.running = True
        self._open = False
        self.pid = next(world.numbers)
        self._me = rank_id(spec.id)
        self._who = f"{spec.id}.{self.pid}"
        self._server = WorkerServer(world.network, spec.id, self._me, spec.token)  # type: ignore[arg-type]
        self._server.creations = self  # type: ignore[assignment]
        self.endpoint = Endpoint("h", self._server.bind(f"ipc:///w/{self._who}"))
        world.write(self._who, "born", me=self._me, group=spec.group, rank=spec.rank, owner=owner, pid=self.pid)

    def put(self, creation: Any) -> None:
        """A Create came."""
        if not self._open:
            self._open = True
            self._server.answer(creation.peer, frames.Ok(creation.frame.id))
            self._server.open(self)  # type: ignore[arg-type]

    def submit(self, invocation: Any) -> None:
        self.world.loop.call_later(self.world.rng.uniform(0, 0.05), self._run, invocation)

    def idle(self) -> bool:
        return True

    def _run(self, invocation: Any) -> None:
        if self.running:
            invocation.run(self)

    def step(self, call: str) -> str:
        self.world.write(self._who, "ran", call=call)
        return call

    def end(self) -> None:
        self.running = False
        self._server.close(0)
        self.world.write(self._who, "alive")


class Keeper:
    """What agentd's Children, and the templates below them, are to a session; outlives it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.report: Callable[[Any], None] | None = None
        self.workers: dict[str, LoneWorker] = {}
        self._known: dict[str, RunningWorker] = {}

    def start(self, order: StartWorkers) -> None:
        for spec in order.workers:
            worker = self.workers[spec.id] = LoneWorker(self._world, spec, int(spec.namespace))
            self._known[spec.id] = RunningWorker(spec, order.owner, order.cls, order.detail, worker.pid)
            self._world.soon(self._up, worker)

    def _up(self, worker: LoneWorker) -> None:
        if worker.running:
            id = worker.spec.id
            self._known[id] = replace(self._known[id], endpoint=worker.endpoint, master_port=4000)
            self._say(WorkerReady(id, worker.pid, worker.endpoint, 0, 4000))

    def _say(self, report: Any) -> None:
        if self.report is not None:
            self.report(report)

    def stop(self, ids: Any, grace_s: float, reason: str = "") -> None:
        for id in ids:
            self._world.soon(self.end, id, ExitReport("stopped", None, 15))

    def end(self, id: str, exit: ExitReport) -> None:
        worker = self.workers.pop(id, None)
        if worker is not None:
            worker.end()
            self._known[id] = replace(self._known[id], exit=exit)
            self._world.soon(self._say, WorkerExited(id, exit))

    def left(self) -> list[RunningWorker]:
        """What an agentd that takes over finds: workers, and ends that no head is known to have heard of."""
        return list(self._known.values())

    def renew(self, until: float, lease_s: float) -> None: ...

    def log_credit(self, chars: int, owner: str) -> None: ...

    def registered(self, keep_s: float) -> None: ...

    def settled(self, ids: Any) -> None:
        for id in ids:
            self._known.pop(id, None)

    async def close(self, grace_s: float, reason: str = "") -> None:
        for id in list(self.workers):
            self.end(id, ExitReport("stopped", None, 15))


class Agent:
    """An agentd.

    Args:
        world: where.
        rank: of its node.
        keeper: with what an earlier one left.
    """

    def __init__(self, world: World, rank: int, keeper: Keeper) -> None:
        self.rank = rank
        self.keeper = keeper
        self._world = world
        report = NodeReport(
            f"n{rank}", hostname=f"n{rank}", ip=f"10.0.0.{rank}", host=f"h{rank}", num_cpus=1, memory_bytes=1,
            python="3", interpreter="/py", rank=rank,
        )  # fmt: skip
        seen: Any = _Seen(world, self)
        self._session = Session(
            seen, HEAD, report, self._made, keeps=True, policy=Policy(30.0, 0.1), hello_timeout_s=0.5
        )
        self._session.adopt(keeper.left(), {}, 0.0)
        self.task = world.loop.create_task(self._session.run())

    def _made(self, report: Callable[[Any], None]) -> Keeper:
        self.keeper.report = report
        return self.keeper

    def owns(self, identity: bytes) -> bool:
        return identity == self._session.identity

    def kill(self) -> None:
        """kill -9 of agentd alone."""
        self._world.cut.add(self)
        self.task.cancel()
        self.keeper.report = None


class _Answer:
    """A call that is under way."""

    def __init__(self, future: asyncio.Future[Any]) -> None:
        self._future = future
        self.ends = 0

    def answer(self, frame: Any, parts: Any) -> bool:
        self.ends += 1
        if not self._future.done():
            self._future.set_result(payload.decode(parts))
        return True

    def fail(self, error: Exception) -> None:
        self.ends += 1
        if not self._future.done():
            self._future.set_exception(error)


class Driver:
    """A driver: one group after the other, under one name."""

    def __init__(self, world: World, lasting: bool) -> None:
        self._world = world
        self._lasting = lasting
        self._pid = next(world.numbers)
        self._who = f"d{self._pid}"
        self._numbers = itertools.count(1)
        self._groups: dict[str, RemoteGroup] = {}
        hello = ClientHello(PROTOCOL, "1", self._who, "driver", str(self._pid), "elsewhere", self._pid, 1)
        seen: Any = _Seen(world, self)
        self._link = HeadLink(seen, HEAD, hello, self._noticed, self._lost, self._returned, self._lost)
        self._gone: Exception | None = None
        self._launching: list[str] = []
        world.write(self._who, "driver", pid=self._pid)
        self.task = world.loop.create_task(self._live())

    def owns(self, identity: bytes) -> bool:
        return identity.startswith(f"driver:{self._who}#".encode())

    def kill(self) -> None:
        self._world.cut.add(self)
        self.task.cancel()
        self._link.close("")
        self._world.write(SCENE, "ended", pid=self._pid, who=self._who)

    # --- the glue that Runtime is in a real driver ---

    def _noticed(self, body: Any) -> None:
        if isinstance(body, WorkerChanged) and body.group in self._groups:
            self._groups[body.group].update(body.workers)
        elif isinstance(body, Goodbye):
            self._lost(body.reason)

    def _lost(self, reason: str) -> None:
        self._gone = NodeLostError(reason)
        for group in self._groups.values():
            group.close(self._gone)

    def _returned(self) -> None:
        handles = [group.handle() for group in self._groups.values() if not group.gone.done()]
        self._link.notify(Handles(handles, self._launching))

    async def _launch(self, label: str) -> RemoteGroup:
        nodes = [self._world.rng.randrange(self._world.nodes) for _ in range(2)]
        construction = Construction("m:C", [b""], 0, lambda raised, parts, peer: RlinfActorsError(raised.text))
        policy = RestartPolicy.on_failure(5, 30.0, 0.05) if self._lasting else None
        construction.again = policy is not None
        network: Any = self._world.network
        group = RemoteGroup(network, f"driver:{self._who}", "h", str(self._pid), "g", ["n", "n"], construction)
        specs = [
            WorkerSpec(f"{label}-{rank}", "g", str(self._pid), rank, 2, node, {}, restart=policy)
            for rank, node in enumerate(nodes)
        ]

        def adopt(launched: Any) -> None:
            self._groups["g"] = group
            group.adopt(launched.group)

        self._launching = [spec.id for spec in specs]
        try:
            await self._link.request(Launch(str(self._pid), "g", "m:C", specs), LIMIT_S, adopt)
        finally:
            self._launching = []
        await group.ready
        return group

    async def _stop(self) -> None:
        group = self._groups.get("g")
        if group is not None:
            group.closing = True
            try:
                await self._link.request(StopGroup(str(self._pid), "g", 0.1), LIMIT_S)
            finally:
                group.close()
                self._groups.pop("g", None)

    async def _call(self, group: RemoteGroup, rank: int, call: str) -> Any:
        future = self._world.loop.create_future()
        pending = _Answer(future)
        peer = group.peers[rank]
        number = peer.open(pending)
        peer.send(frames.Call(number, "step"), payload.encode_call((call,), {}))
        result = await future
        if pending.ends != 1 or result != call:
            self._world.write(self._who, "wrong", text=f"call {call} ended {pending.ends} times, with {result}")
        return result

    # --- what it does ---

    async def _live(self) -> None:
        try:
            await self._link.start(LIMIT_S)
            for round in itertools.count():
                if self._world.over or self._gone is not None:
                    break
                await self._round(f"{self._who}-{round}")
                await asyncio.sleep(0.1)
        finally:
            if self not in self._world.cut:
                self._link.close("the end")
                self._world.write(self._who, "bye")
                self._world.write(SCENE, "ended", pid=self._pid, who=self._who)

    async def _round(self, label: str) -> None:
        group = await self._do("launch", self._launch(label))
        for n in range(CALLS if group is not None else 0):
            call = f"{label}/{n}"
            result = await self._do("call", self._call(group, n % 2, call), call=call, ranks=1)
            if result is None and not self._lasting:
                break
            await asyncio.sleep(0.02)
        await self._do("shutdown", self._stop())

    async def _do(self, doing: str, wait: Awaitable[Any], **more: Any) -> Any:
        number, outcome, text, result = next(self._numbers), "ok", "", None
        self._world.write(self._who, "begin", id=number, doing=doing, label=self._who, **more)
        try:
            result = await asyncio.wait_for(wait, LIMIT_S)
        except (asyncio.TimeoutError, ClusterTimeoutError) as error:
            outcome, text = "CallTimeoutError", str(error)
        except RlinfActorsError as error:
            outcome, text = type(error).__name__, str(error)
        self._world.write(self._who, "end", id=number, outcome=outcome, text=text)
        return result


class World:
    """All of it, and the faults.

    Args:
        seed: of everything that is random.
        folder: what the head remembers is there.
        nodes: how many there are.
    """

    def __init__(self, seed: int, folder: str, nodes: int = 3) -> None:
        self.loop = asyncio.get_running_loop()
        self.rng = random.Random(seed)
        self.nodes = nodes
        self._folder = folder
        self.numbers = itertools.count(1)
        self.records: defaultdict[str, list[Line]] = defaultdict(list)
        self.network = MemoryNetwork(self.loop)
        self.network.drop = self._lost
        self.cut: set[Any] = set()
        self.over = False
        self._everybody: list[Any] = []
        self.head: HeadServer | None = self._start_head()
        self.agents: list[Agent | None] = [self._start(Agent(self, rank, Keeper(self))) for rank in range(nodes)]
        self.drivers = [self._start(Driver(self, lasting)) for lasting in (False, True, False)]

    def _start_head(self) -> HeadServer:
        head = HeadServer(self.network, timing=TIMING, store=_Store(self._folder))  # type: ignore[arg-type]
        head.start([HEAD])
        return head

    def _start(self, who: Any) -> Any:
        self._everybody.append(who)
        return who

    def _lost(self, identity: bytes, header: bytes) -> bool:
        return any(who.owns(identity) for who in self.cut)

    def soon(self, function: Callable[..., object], *args: Any) -> None:
        self.loop.call_later(self.rng.uniform(0, 0.1), function, *args)

    def write(self, who: str, what: str, /, **more: Any) -> None:
        self.records[who].append(Line(self.loop.time(), what, more))

    # --- faults ---

    @contextlib.contextmanager
    def noise(self) -> Iterator[None]:
        """Control messages and calls come late and twice. None is lost: connections that live lose nothing."""
        seed = self.rng.randrange(1 << 30)
        with contextlib.ExitStack() as stack:
            noises: list[tuple[str, faults.Action, Any, float]] = [
                # connections repeat nothing: an agent does not look whether it was told before to start what has ended
                ("rpc.notice", faults.duplicate(), lambda kind: kind != "StartWorkers", 0.05),
                ("rpc.request", faults.duplicate(), "*", 0.05),
                ("rpc.reply", faults.duplicate(), "*", 0.05),
                ("transport.send", faults.duplicate(), "ipc:///w/*", 0.05),
                ("transport.receive", faults.delay(0.3), "*", 0.01),
            ]
            for point, action, where, chance in noises:
                stack.enter_context(faults.inject(point, action, where, chance=chance, seed=seed))
            yield

    def strike(self) -> None:
        """One fault."""
        kind = self.rng.choice(("worker", "worker", "worker", "agentd", "head", "driver", "cut"))
        # as long as TCP would keep what was sent, nothing is lost: a cut outlasts the lease
        away = self.rng.uniform(0.05, 1.5) + (TIMING.lease_s + 1.0 if kind == "cut" else 0.0)
        if kind == "head" and self.head is not None:
            self.head.close()
            self.head = None
            self.loop.call_later(away, self._return_head)
        elif kind == "driver":
            place = self.rng.randrange(len(self.drivers))
            self.drivers[place].kill()
            self.drivers[place] = self._start(Driver(self, place == 1))
        else:
            agent = self.rng.choice(self.agents)
            if agent is None or agent in self.cut:
                return
            if kind == "worker" and agent.keeper.workers:
                agent.keeper.end(self.rng.choice(sorted(agent.keeper.workers)), KILLED)
            elif kind == "agentd":
                agent.kill()
                self.agents[agent.rank] = None
                self.loop.call_later(away, self._return_agent, agent.rank, agent.keeper)
            elif kind == "cut":
                self.cut.add(agent)
                self.loop.call_later(away, self._heal, agent)
        name = "cut agentd" if kind == "cut" else f"kill {kind}"
        self.write(SCENE, "fault", kind=name, pid=0, seconds=away)

    def _return_head(self) -> None:
        self.head = self._start_head()

    def _return_agent(self, rank: int, keeper: Keeper) -> None:
        self.agents[rank] = self._start(Agent(self, rank, keeper))

    def _heal(self, agent: Agent) -> None:
        if agent in self.agents:
            self.cut.discard(agent)

    # --- the end ---

    async def end(self) -> None:
        """Let all drivers end in good order; what is left then is written down."""
        self.over = True
        await asyncio.wait([driver.task for driver in self.drivers])
        await asyncio.sleep(LIMIT_S)
        for agent in filter(None, self.agents):
            for worker in agent.keeper.workers:
                self.write(SCENE, "wrong", text=f"worker {worker} is left on node {agent.rank}")
        if self.head is not None:
            status = self.head.status()
            for group in status.groups:
                self.write(SCENE, "wrong", text=f"the head still has group {group.name} of {group.namespace}")
            if len(status.nodes) != self.nodes or len(status.clients) > 0:
                self.write(SCENE, "wrong", text=f"the head has {status.nodes} and {status.clients}")
        for who in self._everybody:
            who.task.cancel()
        await asyncio.gather(*(who.task for who in self._everybody), return_exceptions=True)
        if self.head is not None:
            self.head.close()
        self.network.close()
