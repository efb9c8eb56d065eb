"""The groups that a process has handles of: those that it launched, and those that it looked up at the head."""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from rlinf_actors.errors import ClusterTimeoutError, GroupNotFoundError, NameInUseError, RlinfActorsError
from rlinf_actors.model.restart import launch_of
from rlinf_actors.net.link import Network
from rlinf_actors.net.loop import IoThread, Tasks
from rlinf_actors.runtime.construction import Construction
from rlinf_actors.runtime.head_session import HEAD_GRACE_S, SILENT_HEAD_S, HeadSession
from rlinf_actors.runtime.remote_group import RemoteGroup, death
from rlinf_actors.wire.client_messages import (
    Detach,
    Done,
    FindGroup,
    Handles,
    Launch,
    Launched,
    StopGroup,
    WorkerChanged,
)
from rlinf_actors.wire.control_codec import Body
from rlinf_actors.wire.values import GroupState, WorkerState, orderly

log = logging.getLogger(__name__)

T = TypeVar("T")

FIND_TIMEOUT_S = 30.0
"""How long a look at a group waits for a head that is being restarted: for its start, and for the lease that it gives
its nodes to come back.
"""
STOP_TIMEOUT_S = 30.0
"""How long the end of a group may take beyond its grace, at least: a head that is away is waited for."""


class Ask(Protocol):
    """What the handles need of Runtime.ask."""

    async def __call__(
        self, body: Body, kind: type[T], timeout: float | None = None, on_reply: Callable[[Any], None] | None = None
    ) -> T:
        """See Runtime."""


class GroupRegistry:
    """One process's groups. Loop thread, unless said otherwise.

    Args:
        network: for the links.
        io: the process's I/O thread.
        identity: of this process.
        host: its host key.
        me: its worker id, "" of a driver.
        ask: asks the head.
        head: the session with it, None before there is one.

    Attributes:
        closed: the process is ending: nothing is begun any more.
        failures: groups that could not come up, and workers of our groups that died.
    """

    def __init__(
        self,
        network: Network,
        io: IoThread,
        identity: str,
        host: str,
        me: str,
        ask: Ask,
        head: Callable[[], HeadSession | None],
    ) -> None:
        self.closed = False
        self.failures = 0
        self._network = network
        self._io = io
        self._identity = identity
        self._host = host
        self._me = me
        self._ask = ask
        self._head = head
        self._tasks = Tasks()
        self._groups: dict[tuple[str, str], RemoteGroup] = {}
        self._launching: list[RemoteGroup] = []
        self._stopping: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._telling: dict[RemoteGroup, asyncio.Task[None]] = {}
        self._finding: dict[FindGroup, asyncio.Task[RemoteGroup]] = {}
        self._reaching: dict[RemoteGroup, asyncio.Task[Exception | None]] = {}
        self._lock = threading.Lock()
        self._known: weakref.WeakValueDictionary[tuple[str, str, str], RemoteGroup] = weakref.WeakValueDictionary()

    def all(self) -> list[RemoteGroup]:
        """Those that somebody here uses, or may."""
        return list(self._groups.values())

    def get(self, namespace: str, name: str) -> RemoteGroup | None:
        """The handle of that group, None if this process has none."""
        return self._groups.get((namespace, name))

    def new(
        self,
        namespace: str,
        name: str,
        node_names: Sequence[str],
        construction: Construction,
        launched: Sequence[str],
        wait_s: float = 0.0,
    ) -> RemoteGroup:
        """Return the owner's handle of a group that is about to be launched. Any thread.

        Args:
            namespace, name: of the group.
            node_names: node of each rank, for messages to people.
            construction: how its workers are constructed.
            launched: ids of its workers.
            wait_s: how long (seconds) the launch may wait for hardware.
        """
        group = RemoteGroup(
            self._network,
            self._identity,
            self._host,
            namespace,
            name,
            node_names,
            construction,
            self._construction_failed,
            me=self._me,
            on_constructed=self._detach,
        )
        group.launched = list(launched)
        group.patience_s = FIND_TIMEOUT_S + wait_s
        with self._lock:
            self._known[namespace, name, group.launch] = group
        return group

    def arrived(
        self,
        namespace: str,
        name: str,
        launch: str,
        node_names: Sequence[str],
        wait_s: float,
        connect: Callable[[], Awaitable[object]],
    ) -> RemoteGroup:
        """Return the handle of a group of which another process sent a handle. Any thread; nothing is asked yet.

        Args:
            namespace, name: of the group.
            launch: what tells it from a namesake.
            node_names: node of each rank, for messages to people.
            wait_s: how long (seconds) the head may take to hear of its launch.
            connect: waits until this process is in session with the head; runs on the loop.
        """
        with self._lock:
            group = self._known.get((namespace, name, launch))
            if group is None:
                reach = partial(self._begin_reach, connect=connect)
                group = self._new(namespace, name, node_names, launch, reach)
                group.patience_s = wait_s
            return group

    def _new(
        self,
        namespace: str,
        name: str,
        node_names: Sequence[str],
        launch: str,
        reach: Callable[[RemoteGroup], object] | None = None,
    ) -> RemoteGroup:
        """Return a handle of a group that another process launched. Called with the lock held."""
        group = RemoteGroup(
            self._network,
            self._identity,
            self._host,
            namespace,
            name,
            node_names,
            soon=self._io.call,
            me=self._me,
            launch=launch,
            reach=reach,
        )
        self._known[namespace, name, launch] = group
        return group

    def _begin_reach(self, group: RemoteGroup, connect: Callable[[], Awaitable[object]]) -> None:
        """Look up the group of a handle that another process sent, once."""
        if group not in self._reaching and not group.found and not group.closing and not group.ready.done():
            task = self._tasks.start(self._reach(group, connect), f"looking for group {group.name!r}")
            self._reaching[group] = task
            task.add_done_callback(lambda _: self._reaching.pop(group, None))

    async def reach(self, group: RemoteGroup) -> None:
        """Wait until the head has described the group of a handle that another process sent.

        Raises:
            GroupNotFoundError: it has ended.
        """
        group.look_up()
        task = self._reaching.get(group)
        error = await asyncio.shield(task) if task is not None else group.ready.error
        if error is not None and not group.found and not group.owned:
            raise error

    async def _reach(self, group: RemoteGroup, connect: Callable[[], Awaitable[object]]) -> Exception | None:
        """Look the group up; returns why that failed."""
        try:
            await connect()
            found = await self.find(
                group.namespace, group.name, ended=True, launch=group.launch, wait_s=group.patience_s
            )
            if found is not group:
                raise GroupNotFoundError(
                    f"the group {group.name!r} that this handle is of has ended, and another one has its name: get a "
                    f"handle of that by WorkerGroup.from_group_name"
                )
        except GroupNotFoundError as error:
            group.fail(error)
            return error
        except Exception as error:  # noqa: BLE001 - whatever it is, it reaches those who wait
            group.unreachable(error)
            return error
        return None

    def existing(self, namespace: str, name: str) -> RemoteGroup | None:
        """Return the handle that this process has of a group of this name, and that is not over. Any thread."""
        with self._lock:
            for (of, called, _), group in self._known.items():
                over = group.closing or group.gone.done() or (not group.found and group.ready.error is not None)
                if (of, called) == (namespace, name) and group.came_up and not over:
                    return group
        return None

    async def launch(self, message: Launch, group: RemoteGroup) -> None:
        """Reserve the name and start the workers of *group* (made by `new`).

        Where the name is a running group's, and the message says get_if_exists, *group* becomes that one's handle.

        Raises:
            NameInUseError: the name is taken in this namespace.
            HardwareInUseError: another group holds a robot, and `wait_s` is over.
        """
        key = (message.namespace, message.group)

        def adopt(launched: Launched) -> None:
            if _launch_of(launched.group) == group.launch:
                self._groups[key] = group
                group.adopt(launched.group)
            else:
                self._take(group, launched.group)

        try:
            claims = any(spec.claims for spec in message.workers)
            ending = [task for failed, task in self._stopping.items() if claims or failed == key]
            if ending:  # groups that could not come up: one of them has this name, or may have the hardware
                await asyncio.wait(ending)
            head = self._head()
            if head is not None and claims:
                head.own_robots()
            self._launching.append(group)
            await self._ask(message, Launched, self._head_grace_s() + message.wait_s, adopt)
        except BaseException as error:
            unanswered = isinstance(error, (asyncio.CancelledError, ClusterTimeoutError))
            if unanswered and group.owned and group in self._launching and not self.closed:
                self._stop_failed(group)  # withdrawn: the head may hold it, or have carried it out
            group.close(error if isinstance(error, Exception) else None)
            raise
        finally:
            if group in self._launching:
                self._launching.remove(group)

    def _take(self, group: RemoteGroup, state: GroupState) -> None:
        """Make the handle of a launch that of the group which has its name already."""
        launch = _launch_of(state)
        with self._lock:
            known = self._known.get((state.namespace, state.name, launch))
            if known is None or known.closing or known.gone.done():
                known = self._known[state.namespace, state.name, launch] = group
        if known is not group:  # found by this process since the launch was begun
            group.close(
                NameInUseError(f"group {group.name!r} is running already: launch() again, to get a handle of it")
            )
            return
        self._groups[state.namespace, state.name] = group
        group.become(state, self._io.call)

    def _detach(self, group: RemoteGroup) -> None:
        """Give up a group that is constructed."""
        self._tasks.start(self._give_up(group), f"detach {group.name}")

    async def _give_up(self, group: RemoteGroup) -> None:
        try:
            await self._ask(Detach(group.namespace, group.name, group.launched), Done, self._head_grace_s())
        except Exception as error:  # noqa: BLE001 - whatever it is, the launch fails by it
            group.construction_failed(error)
        else:
            group.detached()

    def withdraw(self, group: RemoteGroup) -> None:
        """End a group whose launcher does not wait for it any more. Any thread."""
        self._io.call(self._stop_failed, group)

    async def find(
        self, namespace: str, name: str, *, ended: bool = False, launch: str = "", wait_s: float = 0.0
    ) -> RemoteGroup:
        """A handle of a group.

        Args:
            namespace, name: of the group.
            ended: whether one that has ended will do; every call on it fails and says how its worker ended.
            launch: what tells it from a namesake, "" for any.
            wait_s: how long (seconds) the head is to wait for its launch.

        Raises:
            GroupNotFoundError: there is none of that name in the namespace.
        """
        known = self._groups.get((namespace, name))
        if known is not None and not known.closing and not known.gone.done() and launch in ("", known.launch):
            return known
        asked = FindGroup(namespace, name, ended, launch, wait_s)
        if asked not in self._finding:
            finding = self._tasks.start(self._find(asked), f"finding group {name!r}", expected=RlinfActorsError)
            self._finding[asked] = finding
            self._finding[asked].add_done_callback(lambda _: self._finding.pop(asked, None))
        return await asyncio.shield(self._finding[asked])

    async def _find(self, asked: FindGroup) -> RemoteGroup:
        """Ask for a group and subscribe to it; the handle is in place before the head's next notice."""
        key = (asked.namespace, asked.group)
        found: list[RemoteGroup] = []

        def adopt(launched: Launched) -> None:
            group = self._groups.get(key)
            if group is None or group.closing or not group.matches(launched.group):
                group = self._groups[key] = self._known_as(launched.group)
            group.adopt(launched.group)
            if group.gone.done() and not group.owned:
                self._groups.pop(key, None)  # it had ended: nothing more will be said of it
            found.append(group)

        await self._ask(asked, Launched, FIND_TIMEOUT_S + asked.wait_s, adopt)
        return found[0]

    def _known_as(self, state: GroupState) -> RemoteGroup:
        """Return the handle of a group that the head describes: one that is waiting for that, or a new one."""
        workers = sorted(state.workers, key=lambda worker: worker.rank)
        launch = _launch_of(state)
        with self._lock:
            known = self._known.get((state.namespace, state.name, launch))
            if known is not None and not known.closing and not known.gone.done() and len(known.peers) == len(workers):
                return known
            return self._new(state.namespace, state.name, [worker.node_ip for worker in workers], launch)

    async def stop(self, group: RemoteGroup, grace_s: float) -> None:
        """End the workers of a group and wait until they are gone.

        After a failure that is not known: the group can be stopped again.
        """
        group.closing = True
        try:
            stop = StopGroup(group.namespace, group.name, grace_s, group.launched)
            await self._ask(stop, Done, grace_s + max(STOP_TIMEOUT_S, self._head_grace_s()))
        except BaseException:
            group.end_calls()
            raise
        else:
            group.close()
        finally:  # after a failure too: a restarted head ends a group of ours that we do not tell it of
            if self._groups.get((group.namespace, group.name)) is group:
                del self._groups[(group.namespace, group.name)]

    async def stop_or_leave(self, group: RemoteGroup, grace_s: float) -> None:
        """As `stop`, but nobody waits for a head that says nothing: it is told when it is there again."""
        head = self._head()
        telling = self._telling.get(group)
        if telling is None:  # until it is done; the end of the session ends it
            stop = self.stop(group, grace_s)
            telling = self._tasks.start(stop, f"stopping group {group.name!r}", expected=RlinfActorsError)
            self._telling[group] = telling
            telling.add_done_callback(lambda _: self._telling.pop(group, None))
        silence = head.silent(SILENT_HEAD_S) if head is not None else _for_ever()
        silent = self._tasks.start(silence, "waiting for the head's silence")
        try:
            await asyncio.wait([telling, silent], return_when=asyncio.FIRST_COMPLETED)
        finally:
            silent.cancel()
        if telling.done():
            telling.result()
            return
        telling.remove_done_callback(self._left_alone)  # once, however often it was waited for
        telling.add_done_callback(self._left_alone)
        log.warning(
            "group %r is not stopped yet: the head has not answered for %g s. It is told when it is there again; when "
            "this process ends, the workers on this machine end too",
            group.name, SILENT_HEAD_S,
        )  # fmt: skip

    def _left_alone(self, stop: asyncio.Task[None]) -> None:
        """Tell how an end went that nobody waited for. What ends it at the end of this process is no news."""
        error = None if stop.cancelled() else stop.exception()
        if error is not None and not self.closed:
            log.warning("a group was not stopped by this process: %s", error)

    def _construction_failed(self, group: RemoteGroup) -> None:
        """A group that cannot come up does not stay half up. Loop thread or a user's."""
        self.failures += not group.came_up
        if self._io.inside():
            self._stop_failed(group)  # at once: whoever launches again under its name waits for that
        else:
            self._io.call(self._stop_failed, group)

    def _stop_failed(self, group: RemoteGroup) -> None:
        async def stop() -> None:
            try:
                await self.stop(group, 1.0)
            except RlinfActorsError as error:
                log.debug("stopping the failed group %r: %s", group.name, error)

        key = (group.namespace, group.name)
        task = self._stopping[key] = self._tasks.start(stop(), f"stopping the failed group {group.name!r}")
        task.add_done_callback(lambda _: self._stopping.pop(key, None))

    def _head_grace_s(self) -> float:
        """How long a launch waits for a head that is being restarted."""
        head = self._head()
        welcome = head.welcome if head is not None else None
        return welcome.head_grace_s if welcome is not None else HEAD_GRACE_S

    def changed(self, body: WorkerChanged) -> None:
        """The head says how workers are now."""
        group = self.get(body.namespace, body.group)
        if group is not None:
            self._note_deaths(group, body.workers)
            group.update(body.workers)
            if group.gone.done() and not group.owned:
                del self._groups[(body.namespace, body.group)]  # nothing more will be said of it

    def _note_deaths(self, group: RemoteGroup, workers: Sequence[WorkerState]) -> None:
        """Count workers of our own that died; say it of one that nothing waits for, whose callers would not hear it."""
        for worker in workers:
            before, exit = group.states.get(worker.rank), worker.exit
            if exit is None or orderly(group.name, exit) or group.closing or not group.owned:
                continue
            if before is None or before.exit is not None or not 0 <= worker.rank < len(group.peers):
                continue
            self.failures += 1
            peer = group.peers[worker.rank]
            if not peer.pending:
                log.warning("%s", death(exit, peer.name, peer.rank, peer.node))

    def told(self) -> Handles:
        """What a head that was restarted, and has taken this process back, is to know of them."""
        handles = [group.handle() for group in self._groups.values() if not group.gone.done()]
        return Handles(handles, [id for group in self._launching for id in group.launched])

    def close_all(self, error: Callable[[RemoteGroup], RlinfActorsError]) -> None:
        """End every call on every group with that error."""
        for group in self.all():
            group.close(error(group))

    def clear(self) -> None:
        """Forget them all."""
        self._tasks.cancel()
        self._groups.clear()


async def _for_ever() -> None:
    await asyncio.Event().wait()


def _launch_of(state: GroupState) -> str:
    """Return what tells a group that the head describes from a namesake."""
    return next((launch_of(worker.id) for worker in state.workers if worker.id), "")
