"""A driver of a world: a real session and real groups, and an endless job."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

from chaos_invariants import SCENE
from chaos_net import HEAD, Seen

from rlinf_actors.errors import ClusterTimeoutError, NodeLostError, RlinfActorsError
from rlinf_actors.model.restart import RestartPolicy
from rlinf_actors.runtime.construction import Construction
from rlinf_actors.runtime.head_session import HeadSession
from rlinf_actors.runtime.remote_group import RemoteGroup
from rlinf_actors.wire import frames, payload
from rlinf_actors.wire.agent_messages import ClientHello, Goodbye
from rlinf_actors.wire.client_messages import Handles, Launch, StopGroup, WorkerChanged
from rlinf_actors.wire.payload import AuthenticatedParts
from rlinf_actors.wire.protocol import PROTOCOL
from rlinf_actors.wire.values import WorkerSpec

if TYPE_CHECKING:
    from chaos_world import World

LIMIT_S = 60.0
"""Time limit in seconds of every operation, and of the cleanup at the end."""
CALLS = 30


class _Answer:
    """A call that is under way."""

    def __init__(self, future: asyncio.Future[Any]) -> None:
        self._future = future
        self.ends = 0

    def answer(self, frame: Any, parts: Any) -> bool:
        self.ends += 1
        if not self._future.done():
            self._future.set_result(payload.decode(AuthenticatedParts(parts)))
        return True

    def fail(self, error: Exception) -> None:
        self.ends += 1
        if not self._future.done():
            self._future.set_exception(error)


class Driver:
    """A driver that launches one group after the other, under one name."""

    def __init__(self, world: World, lasting: bool) -> None:
        self._world = world
        self._lasting = lasting
        self._pid = next(world.numbers)
        self._who = f"d{self._pid}"
        self._numbers = itertools.count(1)
        self._groups: dict[str, RemoteGroup] = {}
        hello = ClientHello(PROTOCOL, "1", self._who, "driver", str(self._pid), "elsewhere", self._pid, 1)
        seen: Any = Seen(world, self)
        self._link = HeadSession(seen, HEAD, hello, self._noticed, self._lost, self._returned, self._lost)
        self._gone: Exception | None = None
        self._launching: list[str] = []
        world.write(self._who, "driver", pid=self._pid)
        self.task = world.loop.create_task(self._live())

    def owns(self, identity: bytes) -> bool:
        return identity.startswith(f"driver:{self._who}#".encode())

    def kill(self) -> None:
        self._world.cut.add(self)
        self.task.add_done_callback(lambda _: self._link.close(""))
        self.task.cancel()
        self._world.write(SCENE, "ended", pid=self._pid, who=self._who)

    # --- in place of Runtime in a real driver ---

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
        construction = Construction("m:C", [b""], 0)
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

    # --- the job ---

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
