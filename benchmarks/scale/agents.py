"""Agents of a simulation: real sessions of agentd, whose workers exist in messages only."""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import os
import random
import sys
from collections.abc import Callable
from typing import Any, cast

from agentd.session import Session
from agentd.workers import Workers
from benchmarks.scale.roles import Answer, obey_in_loop
from benchmarks.timing import clock
from rlinf_actors.exhaustion import raise_file_limit
from rlinf_actors.net.host import host_key
from rlinf_actors.net.loop import new_event_loop
from rlinf_actors.net.socket_security import Security
from rlinf_actors.net.zmq_network import ZmqNetwork
from rlinf_actors.settings import Settings
from rlinf_actors.wire import frames
from rlinf_actors.wire.agent_messages import LogLines, StartWorkers, WorkerExited, WorkerReady
from rlinf_actors.wire.figure_values import (
    DeviceFigures,
    DiskFigures,
    FigureQuestion,
    MethodFigures,
    NodeFigures,
    PathFigures,
    ProcessFigures,
    WorkerFigures,
)
from rlinf_actors.wire.values import Endpoint, ExitReport, NodeReport

STDERR_TAIL = ["a line of some length, as a traceback has"] * 5


class SimulatedFigures:
    """Stands in for `agentd.figures.FigureCollector`: answers for all workers, with figures that change."""

    def __init__(self, ids: dict[str, None]) -> None:
        self._ids = ids

    def ask(self, asked: FigureQuestion, send: Callable[[NodeFigures], object]) -> None:
        now, some = clock(), random.Random()
        buckets = [0, 0, 3, 50, 40, 20, 4, 1, 0, 0, 0, 0, 0, 0, 0]
        workers = [
            WorkerFigures(
                id, ProcessFigures(now * some.random(), some.randrange(1 << 30, 8 << 30), 24, 80), "train_step",
                some.random(), some.randrange(5), [MethodFigures("train_step", int(now * 8), 0, now, buckets)],
                [PathFigures("shared", int(now), int(now) << 20)], some.randrange(1 << 20), 0, None, 0.0003,
            )
            for id in self._ids
        ]  # fmt: skip
        devices = [DeviceFigures("NV_GPU", some.randrange(100), 60, 80 << 30, 40 << 30) for _ in range(8)]
        disks = [DiskFigures(purpose, f"/{purpose}", 1 << 40, 1 << 39) for purpose in ("run", "logs", "memory")]
        used = ProcessFigures(now, 60 << 20, 3, 100)
        figures = NodeFigures(
            workers, used, now * 30, 64, 20.0, 1 << 38, 1 << 37, 0.0002, devices, 3.0, disks, some.random()
        )
        send(figures)

    def close(self) -> None:
        pass


class SimulatedWorkers:
    """Stands in for `agentd.workers.Workers`: reports workers as ready without starting a process."""

    def __init__(self, agents: Agents, node: int, session: Session) -> None:
        self._agents = agents
        self._node = node
        self._session = session
        self.ids: dict[str, None] = {}
        self.figures = SimulatedFigures(self.ids)

    def start(self, order: StartWorkers) -> None:
        loop = asyncio.get_running_loop()
        for spec in order.workers:
            self.ids[spec.id] = None
            ready = WorkerReady(spec.id, 4000, self._agents.new_endpoint(self._node), 5000, 6000)
            loop.call_soon(self._session.report, ready)  # as of a process: after the order was handled

    def stop(self, ids: list[str], grace_s: float, reason: str = "") -> None:
        for id in ids:
            if id in self.ids:
                asyncio.get_running_loop().call_soon(self.exit, id, ExitReport("stopped"))

    def exit(self, id: str, report: ExitReport) -> None:
        if id in self.ids:
            del self.ids[id]
            self._session.report(WorkerExited(id, report))

    def flush_logs(self, owner: str, wait_s: float) -> None:
        self._session.report(LogLines(owner, "a host", [], final=True))

    async def close(self, grace_s: float, reason: str = "") -> None:
        self.ids.clear()

    def _ignore(self, *_: object) -> None:
        pass

    record_owner = renew = acknowledged = credit_logs = registered = _ignore


class Agents:
    """The agents of the nodes from *first* on, *count* in all, and one socket that answers for their workers."""

    def __init__(self, head: str, folder: str, first: int, count: int) -> None:
        self._head = head
        self._loop = asyncio.get_running_loop()
        self._network = ZmqNetwork(self._loop, Security.toward(head, Settings.load(), "agent"))
        self._listener = self._network.listener(self._answer_as_worker)
        self._ipc = self._listener.bind(f"ipc://{folder}/workers-{first}")
        keyed = self._network._security.pair is not None
        # the socket runs nothing, so others may reach it; it needs all addresses of 127.0.0.0/8
        self._port = 0 if keyed else int(self._listener.bind("tcp://0.0.0.0:0").rpartition(":")[2])
        self._addresses = itertools.count(1 << 16)
        self._registered: dict[int, float] = {}
        self._awaited = count
        self._all_registered = asyncio.Event()
        self._workers: dict[int, SimulatedWorkers] = {}  # these three by the number of the node
        self._sessions = {n: self._new_session(n) for n in range(first, first + count)}
        self._running: dict[int, asyncio.Task[Any]] = {}

    def new_endpoint(self, n: int) -> Endpoint:
        """Return an address for a worker of node *n*: on another machine, with an address of its own.

        With keys it is on this machine, because only the workers of a job have the job's key.
        """
        if not self._port:
            return Endpoint(host_key(), self._ipc)
        at = next(self._addresses)
        return Endpoint(f"host-{n}", tcp=f"tcp://127.{at >> 16 & 255}.{at >> 8 & 255}.{at & 255}:{self._port}")

    def _new_session(self, n: int) -> Session:
        ip = f"10.{n >> 16 & 255}.{n >> 8 & 255}.{n & 255}"
        report = NodeReport(
            f"n{n}", f"host{n}", ip, f"host-{n}", num_cpus=64, memory_bytes=1 << 38, python="3.11.7",
            interpreter=sys.executable, interfaces={"eth0": ip, "ib0": "10.1.0.1"},
        )  # fmt: skip
        session = Session(
            self._network, self._head, report, keeps=True, on_registered=lambda: self._on_registered(n, session)
        )
        self._workers[n] = SimulatedWorkers(self, n, session)
        session.attach(cast(Workers, self._workers[n]))
        return session

    def _on_registered(self, n: int, session: Session) -> None:
        if self._sessions[n] is session:
            self._registered[n] = clock()
            if len(self._registered) == self._awaited:
                self._all_registered.set()

    def _answer_as_worker(self, peer: bytes, header: Any, parts: Any) -> None:
        """Answer the frames of a driver as a worker whose constructor and methods do nothing."""
        frame = frames.decode(header)
        if isinstance(frame, frames.Memory):
            self._listener.send(peer, frames.encode(frames.Memory()))
        elif isinstance(frame, (frames.Create, frames.Call)):
            self._listener.send(peer, frames.encode(frames.Ok(frame.id)))
        elif isinstance(frame, frames.WhatRuns):
            self._listener.send(peer, frames.encode(frames.Runs(frame.id, "")))

    # --- orders ---

    async def join(self, limit_s: float) -> Answer:
        """Start all sessions at once. Return after how many seconds each has registered."""
        start = clock()
        self._running = {n: self._loop.create_task(session.run()) for n, session in self._sessions.items()}
        return await self._registrations(start, limit_s)

    async def forget(self) -> None:
        """Forget who has registered, so that `returned` waits for all agents."""
        self._registered.clear()
        self._all_registered.clear()

    async def returned(self, since: float, limit_s: float) -> Answer:
        """Wait until all agents have registered again. Return how many seconds after *since* each has."""
        return await self._registrations(since, limit_s)

    async def _registrations(self, since: float, limit_s: float) -> Answer:
        try:
            await asyncio.wait_for(self._all_registered.wait(), limit_s)
        except (asyncio.TimeoutError, TimeoutError):
            text = f"{len(self._registered)} of {self._awaited} agents have registered in {limit_s:g} s"
            raise RuntimeError(text) from None
        return {"times": [at - since for at in self._registered.values()]}

    async def kill_workers(self, count: int, pause_s: float) -> dict[str, float]:
        """Report the ends of *count* workers one after the other. Return when, by worker id."""
        all_ids = [(workers, id) for workers in self._workers.values() for id in workers.ids]
        told = {}
        for workers, id in all_ids[:: max(1, len(all_ids) // count)][:count]:
            told[id] = clock()
            workers.exit(id, ExitReport("signalled", signal=9, stderr_tail=STDERR_TAIL))
            await asyncio.sleep(pause_s)
        return told

    async def kill_workers_of(self, node: int) -> dict[str, float]:
        """Report the ends of all workers of a node at once. Return when, by worker id."""
        told = {}
        for id in list(self._workers[node].ids):
            told[id] = clock()
            self._workers[node].exit(id, ExitReport("signalled", signal=9))
        return told

    async def lose(self, node: int) -> dict[str, float]:
        """End the agent of a node without a message. Return when, for each worker of the node."""
        told = dict.fromkeys(self._workers[node].ids, clock())
        self._running[node].cancel()
        await asyncio.wait([self._running[node]])
        return told

    async def rejoin(self, node: int, limit_s: float) -> None:
        """Start a new agent of a node, without workers, and wait until it has registered."""
        self._all_registered.clear()
        self._registered.pop(node)
        self._sessions[node] = self._new_session(node)
        self._running[node] = self._loop.create_task(self._sessions[node].run())
        await self._registrations(clock(), limit_s)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("head")
    parser.add_argument("folder")
    parser.add_argument("first", type=int)
    parser.add_argument("count", type=int)
    given = parser.parse_args()
    raise_file_limit()
    gc.disable()  # a collection among thousands of agents takes 0.1 s; a real agent is alone in its process
    await obey_in_loop(Agents(given.head, given.folder, given.first, given.count))
    sys.stdout.flush()
    os._exit(0)  # thousands of goodbyes would be a storm of their own


if __name__ == "__main__":
    new_event_loop().run_until_complete(main())
