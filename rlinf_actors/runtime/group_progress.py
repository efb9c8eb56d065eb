"""The driver's line about groups that start or end (`runtime.progress`): how far they are, and what late workers do.

While groups start, and while something is done for a launch, the line is shown only if code of the driver waits: a
driver that goes on may print. Loop thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from rlinf_actors.last_line import last_line
from rlinf_actors.net.loop import Tasks, call_threadsafe
from rlinf_actors.plurals import counted
from rlinf_actors.runtime import progress
from rlinf_actors.runtime.construction import Readiness
from rlinf_actors.runtime.progress import Facts
from rlinf_actors.runtime.waits import all_waits
from rlinf_actors.wire.node_questions import AskNode, NodeAnswered, answer_of
from rlinf_actors.wire.stack_values import StackAnswer, StackQuestion
from rlinf_actors.wire.values import CHANNEL_GROUPS, RELAY_GROUPS

if TYPE_CHECKING:
    from rlinf_actors.runtime.remote_group import RemoteGroup
    from rlinf_actors.runtime.runtime import Runtime

T = TypeVar("T")

ASK_S = 5.0
"""Seconds after which the late workers are asked again what they do."""
ANSWER_S = 12.0
"""Seconds that the head has to answer for a node."""
_BESIDE = (RELAY_GROUPS, "code@")
"""Prefixes of groups of this library that nobody waits for by themselves."""


class GroupProgress:
    """Shows the groups of this process that start or end, while there are any."""

    def __init__(self, runtime: Runtime, enabled: bool) -> None:
        self._runtime = runtime
        self._enabled = enabled
        self._tasks = Tasks()
        self._task: asyncio.Task[None] | None = None
        self._groups: list[RemoteGroup] = []
        self._said = ""
        self._said_at = 0.0

    def add(self, group: RemoteGroup) -> None:
        """Show *group* until it is ready, or until it has ended if it ends. May be called again."""
        if not self._enabled or not group.owned or group.name.startswith(_BESIDE):
            return
        if group not in self._groups:
            self._groups.append(group)
            loop = asyncio.get_running_loop()
            done = partial(self._done, loop)
            if isinstance(group.ready, Readiness):
                group.ready.watch(done)  # a callback would count as somebody who waits for it and gets its error
            else:  # of a channel's hosts
                group.ready._on_done(done)
            group.gone._on_done(done)
        if self._task is None:
            self._said, self._said_at = "", 0.0
            self._task = self._tasks.start(progress.show(self._look), "showing groups that start or end")

    async def during(self, work: Awaitable[T], facts: str | Callable[[], Facts], always: bool = False) -> T:
        """Await *work* and return its result. Show *facts* meanwhile, if not *always* only while code of the driver
        waits.
        """

        async def look(_missing: bool) -> Facts | None:
            if not (always or all_waits()):
                return None
            return Facts(facts) if isinstance(facts, str) else facts()

        if not self._enabled:
            return await work
        async with progress.showing(look):
            return await work

    def close(self) -> None:
        """End. May be called again."""
        self._enabled = False
        self._tasks.cancel()

    def _done(self, loop: asyncio.AbstractEventLoop) -> None:
        """Remove the line before the driver's code goes on and prints. Any thread."""
        if self._task is not None:
            last_line.clear()
        call_threadsafe(loop, self._changed)

    def _changed(self) -> None:
        self._groups = [group for group in self._groups if _is_shown(group)]
        if not self._groups and self._task is not None:
            self._task.cancel()
            self._task = None

    async def _look(self, detailed: bool) -> Facts | None:
        starting = [group for group in self._groups if not group.closing]
        ending = [group for group in self._groups if group.closing]
        if not ending and not all_waits():
            return None
        parts = [f"{_up(group)} of {_all_of(group)} up" for group in starting]
        parts += [f"{_ended(group)} of {_all_of(group)} ended" for group in ending]
        shown = progress.named("", parts)
        if not detailed:
            return Facts(shown)
        now = asyncio.get_running_loop().time()
        if now - self._said_at >= ASK_S:
            late = [text for group in starting for text in await self._late(group)]
            late += [f"{peer} still runs" for group in ending for peer in _running(group)]
            self._said, self._said_at = progress.named("", late), now
        return Facts(shown, self._said) if any(map(_is_shown, self._groups)) else None

    async def _late(self, group: RemoteGroup) -> list[str]:
        """Return a text for each worker that is not up: what it does, as its I/O thread says."""
        if not group.states:
            return [f"the head has not launched {group.name}"]
        late = group._late()
        known = {peer.rank: group.states.get(peer.rank) for peer in late}
        begun = {rank: state for rank, state in known.items() if state is not None and state.state == "running"}
        asked = [begun[peer.rank] for peer in late if peer.rank in begun][: progress.MOST_NAMED]
        found: dict[str, str] = {}
        if asked:
            status = await self._runtime.status("")  # the nodes only: no job has this name
            ids = {node.rank: node.report.node_id for node in status.nodes}
            for rank in {state.node_rank for state in asked} & ids.keys():
                question = StackQuestion(group.namespace, [state.id for state in asked if state.node_rank == rank])
                reply = await self._runtime.ask(AskNode(ids[rank], question), NodeAnswered, ANSWER_S)
                found |= {one.id: progress.doing(one) for one in answer_of(reply, StackAnswer).workers}
        texts = []
        preload = " and ".join(group.preload)
        unborn = f"waits for its interpreter, which first imports {preload}" if preload else "waits for its interpreter"
        for peer in late:
            state = begun.get(peer.rank)
            what = unborn if state is None else found.get(state.id, "is constructed")
            texts.append(f"{peer.name} on {peer.node} {what}")
        return texts


def _is_shown(group: RemoteGroup) -> bool:
    return not group.gone.done() and (group.closing or not group.ready.done())


def _all_of(group: RemoteGroup) -> str:
    channel = group.name.removeprefix(CHANNEL_GROUPS)
    what, of = ("worker", channel) if channel == group.name else ("process", f"channel {channel}")
    return f"{counted(len(group.peers), what)} of {of}"


def _up(group: RemoteGroup) -> int:
    return len(group.peers) - len(group._late())


def _ended(group: RemoteGroup) -> int:
    return sum(state.state == "gone" for state in group.states.values())


def _running(group: RemoteGroup) -> Sequence[str]:
    alive = [rank for rank, state in sorted(group.states.items()) if state.state != "gone"]
    return [f"{group.peers[rank].name} on {group.peers[rank].node}" for rank in alive if rank < len(group.peers)]
