"""A node of a world: an agentd with a real session, and workers with real servers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from chaos_net import HEAD, Seen
from msgspec.structs import replace

from agentd.node_state import Policy
from agentd.session import Session
from rlinf_actors.model.restart import rank_id
from rlinf_actors.wire import frames
from rlinf_actors.wire.agent_messages import StartWorkers, WorkerExited, WorkerReady
from rlinf_actors.wire.values import Endpoint, ExitReport, NodeReport, RunningWorker, WorkerSpec
from rlinf_actors.worker.worker_server import WorkerServer

if TYPE_CHECKING:
    from chaos_world import World


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
        """Handle a Create."""
        if not self._open:
            self._open = True
            self._server.answer(creation.peer, frames.Ok(creation.frame.id))
            self._server.open(self)  # type: ignore[arg-type]

    def submit(self, invocation: Any) -> None:
        self.world.loop.call_later(self.world.rng.uniform(0, 0.05), self._run, invocation)

    def waiting(self) -> int:
        return 0

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
    """Stands in for agentd's Workers and templates; outlives the session."""

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
        """The inventory of the next agentd: workers, and unacknowledged ends."""
        return list(self._known.values())

    def renew(self, until: float, lease_s: float) -> None: ...

    def credit_logs(self, chars: int, owner: str) -> None: ...

    def flush_logs(self, owner: str, wait_s: float) -> None: ...

    def registered(self, keep_s: float, packet: object) -> None: ...

    def acknowledged(self, ids: Any) -> None:
        for id in ids:
            self._known.pop(id, None)

    async def close(self, grace_s: float, reason: str = "") -> None:
        for id in list(self.workers):
            self.end(id, ExitReport("stopped", None, 15))


class Agent:
    """An agentd.

    Args:
        world: its world.
        rank: its node's rank.
        keeper: the workers of an earlier agentd.
    """

    def __init__(self, world: World, rank: int, keeper: Keeper) -> None:
        self.rank = rank
        self.keeper = keeper
        self._world = world
        report = NodeReport(
            f"n{rank}", hostname=f"n{rank}", ip=f"10.0.0.{rank}", host=f"h{rank}", num_cpus=1, memory_bytes=1,
            python="3", interpreter="/py", rank=rank,
        )  # fmt: skip
        seen: Any = Seen(world, self)
        secret = f"of run directory {rank}"
        self._session = Session(seen, HEAD, report, keeps=True, secret=secret, policy=Policy(30.0, 0.1))
        keeper.report = self._session.report
        self._session.attach(keeper)
        self._session.adopt(keeper.left(), {}, 0.0)
        self.task = world.loop.create_task(self._session.run())

    def owns(self, identity: bytes) -> bool:
        return identity == self._session.identity

    def kill(self) -> None:
        """kill -9 of agentd alone."""
        self._world.cut.add(self)
        self.task.cancel()
        self.keeper.report = None
