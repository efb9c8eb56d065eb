"""A client of the head that is written by hand, so that it can record when each notice arrives."""

from __future__ import annotations

import argparse
import asyncio
import os

from benchmarks.scale.roles import Answer, obey_in_loop
from benchmarks.timing import clock
from rlinf_actors import version
from rlinf_actors.model.restart import launch_of
from rlinf_actors.net.link import secret_identity
from rlinf_actors.net.loop import new_event_loop
from rlinf_actors.net.rpc import ControlClient
from rlinf_actors.net.socket_security import Security
from rlinf_actors.net.zmq_network import ZmqNetwork
from rlinf_actors.settings import Settings
from rlinf_actors.wire.agent_messages import HELLO_AGAIN, Beat, ClientHello
from rlinf_actors.wire.client_messages import GetNodes, Launch, StopGroup, WorkerChanged
from rlinf_actors.wire.control_codec import Body
from rlinf_actors.wire.launch_messages import PART_RANKS, LaunchPart, parts_of
from rlinf_actors.wire.protocol import PROTOCOL
from rlinf_actors.wire.values import WorkerSpec

LIMIT_S = 400.0
ENVIRONMENT = {f"VARIABLE_{n}": f"value number {n}" for n in range(20)}


class Observer:
    """A driver's session with the head, from hello to notices."""

    def __init__(self, head: str) -> None:
        self._loop = asyncio.get_running_loop()
        network = ZmqNetwork(self._loop, Security.toward(head, Settings.load(), "driver"))
        incarnation = os.urandom(8).hex()
        self._hello = ClientHello(
            PROTOCOL, version.VERSION, incarnation, "driver", f"ns-{incarnation}", "another host", os.getpid(), 0,
        )  # fmt: skip
        self._client = ControlClient(network, head, secret_identity(f"driver:{incarnation}"), self._noticed)
        self._states: dict[str, str] = {}
        self._gone_at: dict[str, float] = {}
        self._notices = 0
        self._awaited: tuple[set[str], str, asyncio.Future[float]] | None = None

    def _noticed(self, body: Body) -> None:
        if isinstance(body, Beat) and body.incarnation == HELLO_AGAIN:
            self._loop.create_task(self._client.request(self._hello, LIMIT_S, first=True))
        if not isinstance(body, WorkerChanged):
            return
        self._notices += 1
        for worker in body.workers:
            self._states[worker.id] = worker.state
            if worker.state == "gone":
                self._gone_at.setdefault(worker.id, clock())
            if self._awaited is not None and worker.state == self._awaited[1]:
                self._awaited[0].discard(worker.id)
        if self._awaited is not None and not self._awaited[0]:
            self._awaited[2].set_result(clock())
            self._awaited = None

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(1)
            self._client.notify(Beat(self._hello.incarnation))

    async def _until(self, ids: set[str], state: str) -> float:
        """Return the time when the last of these workers has this state."""
        missing = {id for id in ids if self._states.get(id) != state}
        if not missing:
            return clock()
        self._awaited = (missing, state, self._loop.create_future())
        return await asyncio.wait_for(self._awaited[2], LIMIT_S)

    # --- orders ---

    async def connect(self) -> None:
        await self._client.request(self._hello, LIMIT_S, first=True)
        self._beats = self._loop.create_task(self._beat())

    async def get_nodes(self, count: int) -> Answer:
        start = clock()
        await self._client.request(GetNodes(count, LIMIT_S), LIMIT_S)
        return {"answer_s": clock() - start}

    async def launch(self, group: str, workers: int, nodes: int) -> Answer:
        """Launch a group. Return the seconds until the head has answered, and until all workers run."""
        namespace, start = self._hello.namespace, self._hello.incarnation[:10]
        specs = [
            WorkerSpec(
                f"{start}-{group}-{rank}", group, namespace, rank, workers, rank % nodes, ENVIRONMENT,
                sys_path=("/opt/project", "/opt/venv/lib/python3.11/site-packages"), cwd="/opt/project",
            )
            for rank in range(workers)
        ]  # fmt: skip
        notices, parts = self._notices, 0
        begin = clock()
        running = self._loop.create_task(self._until({spec.id for spec in specs}, "running"))
        if len(specs) > PART_RANKS:  # as `runtime.sliced_launch` does
            for part in parts_of(specs[:-1]):
                name = launch_of(specs[-1].id)
                await self._client.request(LaunchPart(namespace, group, name, parts, part), LIMIT_S)
                parts += 1
            specs = specs[-1:]
        await self._client.request(Launch(namespace, group, "module:Class", specs, parts=parts), LIMIT_S)
        answered = clock()
        return {
            "answer_s": answered - begin, "all_run_s": await running - begin, "notices": self._notices - notices,
        }  # fmt: skip

    async def stop(self, group: str) -> Answer:
        start = clock()
        await self._client.request(StopGroup(self._hello.namespace, group, 0.5), LIMIT_S)
        return {"stop_s": clock() - start}

    async def gone(self, ids: list[str]) -> dict[str, float]:
        """Wait until the head has announced the ends of these workers. Return when, by worker id."""
        await self._until(set(ids), "gone")
        return {id: self._gone_at[id] for id in ids}


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("head")
    await obey_in_loop(Observer(parser.parse_args().head))
    os._exit(0)


if __name__ == "__main__":
    new_event_loop().run_until_complete(main())
