"""GroupRegistry: the groups that this process has handles of, and this process's requests to the head about groups.

`_groups` holds the groups that the head reports on: launched here, or looked up. `_known` also holds groups whose
handle came from another process and was never used. An entry of `_known` lives only as long as a handle exists, so that
all handles of one group in this process share one RemoteGroup.

Everything runs on the loop thread unless a docstring says otherwise.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rlinf_actors.errors import ClusterTimeoutError, GroupNotFoundError, NameInUseError, RlinfActorsError
from rlinf_actors.model.restart import launch_of
from rlinf_actors.net.loop import Tasks
from rlinf_actors.runtime.construction import Construction
from rlinf_actors.runtime.head_session import HEAD_GRACE_S, SILENT_HEAD_S
from rlinf_actors.runtime.remote_group import RemoteGroup
from rlinf_actors.runtime.sliced_launch import send_launch
from rlinf_actors.runtime.worker_ends import note_deaths
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
from rlinf_actors.wire.values import CHANNEL_GROUPS, RELAY_GROUPS, GroupState

if TYPE_CHECKING:
    from rlinf_actors.runtime.runtime import Runtime

log = logging.getLogger(__name__)

FIND_TIMEOUT_S = 30.0
"""Seconds that a look-up waits for a restarting head: for the head's start, and for the nodes to reconnect."""
STOP_TIMEOUT_S = 30.0
"""Minimum seconds, beyond the grace, that a stop request waits for the head, which may be restarting."""


class GroupRegistry:
    """Knows every group that this process has a handle of, and sends this process's requests about groups to the head.

    Attributes:
        closed: True if the process is ending and must not start new requests.
        failures: number of groups that could not come up, plus the number of workers of owned groups that died.
        first_failure: what the first of them was, "" if there are none.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.closed = False
        self.failures = 0
        self.first_failure = ""
        self._runtime = runtime
        self._tasks = Tasks()
        self._groups: dict[tuple[str, str], RemoteGroup] = {}  # by namespace and name
        self._lock = threading.Lock()  # guards _known
        self._known: weakref.WeakValueDictionary[tuple[str, str, str], RemoteGroup] = weakref.WeakValueDictionary()
        self._launching: list[RemoteGroup] = []
        self._finding: dict[FindGroup, asyncio.Task[RemoteGroup]] = {}
        self._reaching: dict[RemoteGroup, asyncio.Task[Exception | None]] = {}
        self._stopping: dict[RemoteGroup, asyncio.Task[None]] = {}
        self._stopping_failed: dict[tuple[str, str], asyncio.Task[None]] = {}

    def all(self) -> list[RemoteGroup]:
        """Return the groups that this process has launched or looked up; the head reports changes of their workers."""
        return list(self._groups.values())

    def get(self, namespace: str, name: str) -> RemoteGroup | None:
        return self._groups.get((namespace, name))

    def existing(self, namespace: str, name: str) -> RemoteGroup | None:
        """Return the group of this name; None if this process has no handle of it, or knows its end. Any thread."""
        with self._lock:
            for (of, called, _), group in self._known.items():
                over = group.closing or group.gone.done() or (not group.found and group.ready.error is not None)
                if (of, called) == (namespace, name) and group.came_up and not over:
                    return group
        return None

    def handles(self) -> Handles:
        """Return the message by which a restarted head learns which groups this process uses or is about to launch."""
        handles = [group.handle() for group in self._groups.values() if not group.gone.done()]
        return Handles(handles, [id for group in self._launching for id in group.launched])

    # --- making groups; any thread ---

    def new(
        self,
        namespace: str,
        name: str,
        node_names: Sequence[str],
        construction: Construction,
        launched: Sequence[str],
        wait_s: float = 0.0,
    ) -> RemoteGroup:
        """Make the RemoteGroup of a group that this process is about to launch.

        Args:
            namespace, name: namespace and name of the group.
            node_names: node name of each rank, for error messages.
            construction: the class and arguments with which this process will construct the workers.
            launched: worker id of each rank.
            wait_s: seconds that the launch may wait until other groups have freed the robots that it needs.
        """
        group = self._make(
            namespace, name, node_names, construction=construction,
            on_failure=self._construction_failed, on_constructed=self._detach,
        )  # fmt: skip
        group.launched = list(launched)
        group.patience_s = FIND_TIMEOUT_S + wait_s
        with self._lock:
            self._known[namespace, name, group.launch] = group
        return group

    def of_handle(
        self,
        namespace: str,
        name: str,
        launch: str,
        node_names: Sequence[str],
        wait_s: float,
        connect: Callable[[], Awaitable[object]] | None,
    ) -> RemoteGroup:
        """Return the RemoteGroup of a group whose handle another process sent. Does not ask the head.

        The head is asked for the group's workers when the group is used for the first time.

        Args:
            namespace, name, launch: namespace, name and launch id of the group.
            node_names: node name of each rank, for error messages.
            wait_s: seconds that the head waits for the group's launch before it answers that there is no such group.
            connect: coroutine function that connects this process to the head; None if the process is connected. It
                runs on the loop thread, before the head is asked.
        """
        with self._lock:
            group = self._known.get((namespace, name, launch))
            if group is None:
                group = self._new_user(namespace, name, node_names, launch, partial(self._begin_reach, connect=connect))
                group.patience_s = wait_s
            return group

    def _new_user(
        self,
        namespace: str,
        name: str,
        node_names: Sequence[str],
        launch: str,
        reach: Callable[[RemoteGroup], object] | None = None,
    ) -> RemoteGroup:
        """Make and keep the RemoteGroup of a group that another process launched. The caller holds the lock.

        *reach* asks the head for the group when the group is first used; None if the head has described it already.
        """
        group = self._make(namespace, name, node_names, soon=self._runtime.io.call, launch=launch, reach=reach)
        self._known[namespace, name, launch] = group
        return group

    def _make(self, namespace: str, name: str, node_names: Sequence[str], **more: Any) -> RemoteGroup:
        runtime = self._runtime
        network, me = runtime.network, runtime.worker_id
        return RemoteGroup(network, runtime.identity, runtime.host, namespace, name, node_names, me=me, **more)

    # --- finding groups ---

    async def find(
        self, namespace: str, name: str, *, ended: bool = False, launch: str = "", wait_s: float = 0.0
    ) -> RemoteGroup:
        """Return the group of this name. If this process does not know a running group of the name, ask the head.

        Args:
            namespace, name: namespace and name of the group.
            ended: True to return a group that has ended too; calls on that group fail, and the error says why it ended.
            launch: launch id that the group must have, "" for any.
            wait_s: seconds for which the head waits if there is no such group yet, because it may be launched soon.

        Raises:
            GroupNotFoundError: the namespace has no such group.
        """
        known = self._groups.get((namespace, name))
        if known is not None and not known.closing and not known.gone.done() and launch in ("", known.launch):
            return known
        request = FindGroup(namespace, name, ended, launch, wait_s)
        if request not in self._finding:  # one request for all that look for the group
            finding = self._tasks.start(self._find(request), f"finding group {name!r}", expected=RlinfActorsError)
            self._finding[request] = finding
            finding.add_done_callback(lambda _: self._finding.pop(request, None))
        return await asyncio.shield(self._finding[request])

    async def _find(self, request: FindGroup) -> RemoteGroup:
        key, found = (request.namespace, request.group), list[RemoteGroup]()

        def adopt(launched: Launched) -> None:  # runs before the head's next notice is handled
            group = self._groups.get(key)
            if group is None or group.closing or not group.matches(launched.group):
                group = self._groups[key] = self._known_as(launched.group)
            group.adopt(launched.group)
            if group.gone.done() and not group.owned:
                self._groups.pop(key, None)  # it had ended: the head reports no more of it
            found.append(group)

        asked = self._runtime.ask(request, Launched, FIND_TIMEOUT_S + request.wait_s, adopt)
        await self._runtime.progress.during(asked, f"looking for group {request.group}")
        return found[0]

    def _known_as(self, state: GroupState) -> RemoteGroup:
        """Return the RemoteGroup of the group that *state* describes.

        If this process has a handle of the group that it has not used, return the RemoteGroup of that handle, so that
        all handles of the group share one. Otherwise make a new RemoteGroup.
        """
        workers = sorted(state.workers, key=lambda worker: worker.rank)
        launch = _launch_of(state)
        with self._lock:
            known = self._known.get((state.namespace, state.name, launch))
            if known is not None and not known.closing and not known.gone.done():
                return known
            return self._new_user(state.namespace, state.name, [worker.node_ip for worker in workers], launch)

    async def reach(self, group: RemoteGroup) -> None:
        """Ask the head for the workers of *group*, unless this process knows them, and wait for the answer.

        Only a group whose handle another process sent can be unknown.

        Raises:
            GroupNotFoundError: the group has ended.
            RlinfActorsError: the head could not be asked.
        """
        group.look_up()
        task = self._reaching.get(group)
        error = await asyncio.shield(task) if task is not None else group.ready.error
        if error is not None and not group.found and not group.owned:
            raise error

    def _begin_reach(self, group: RemoteGroup, connect: Callable[[], Awaitable[object]] | None) -> None:
        if group not in self._reaching and not group.found and not group.closing and not group.ready.done():
            task = self._tasks.start(self._reach(group, connect), f"looking for group {group.name!r}")
            self._reaching[group] = task
            task.add_done_callback(lambda _: self._reaching.pop(group, None))

    async def _reach(self, group: RemoteGroup, connect: Callable[[], Awaitable[object]] | None) -> Exception | None:
        """Connect to the head by *connect* and ask it for *group*. Return the error if that fails, else None."""
        try:
            if connect is not None:
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

    # --- launching ---

    async def launch(self, message: Launch, group: RemoteGroup) -> None:
        """Ask the head by *message* to launch *group*, which `new` has made, and wait for the answer.

        If *message* sets get_if_exists and a group of this name is running, *group* becomes a handle of that group.

        Raises:
            NameInUseError: the name is taken in this namespace.
            HardwareInUseError: another group still held a robot of this launch after `message.wait_s` seconds.
        """
        key = (message.namespace, message.group)

        def adopt(launched: Launched) -> None:
            if _launch_of(launched.group) == group.launch:
                self._groups[key] = group
                group.adopt(launched.group)
            else:
                self._become(group, launched.group)

        try:
            claims = any(spec.claims for spec in message.workers)
            # groups that could not come up: one of them has this name, or may hold the hardware
            ending = [task for failed, task in self._stopping_failed.items() if claims or failed == key]
            if ending:
                await asyncio.wait(ending)
            head = self._runtime.head
            if head is not None and claims:
                head.own_robots()
            self._launching.append(group)
            self._runtime.progress.add(group)
            await send_launch(self._runtime, message, self._head_grace_s() + message.wait_s, adopt)
        except BaseException as error:
            unanswered = isinstance(error, (asyncio.CancelledError, ClusterTimeoutError))
            if unanswered and group.owned and group in self._launching and not self.closed:
                self._stop_failed(group)  # the head may hold the launch, or have carried it out
            group.close(error if isinstance(error, Exception) else None)
            raise
        finally:
            if group in self._launching:
                self._launching.remove(group)

    def _become(self, group: RemoteGroup, state: GroupState) -> None:
        """Turn *group* into a handle of the running group that its launch with get_if_exists has found.

        If this process has got another handle of that group since the launch began, *group* fails instead.
        """
        launch = _launch_of(state)
        with self._lock:
            known = self._known.get((state.namespace, state.name, launch))
            if known is None or known.closing or known.gone.done():
                known = self._known[state.namespace, state.name, launch] = group
        if known is not group:  # this process has found it since the launch began
            group.close(
                NameInUseError(f"group {group.name!r} is running already: launch() again, to get a handle of it")
            )
            return
        self._groups[state.namespace, state.name] = group
        group.become(state, self._runtime.io.call)

    def _detach(self, group: RemoteGroup) -> None:
        """Ask the head to become the owner of *group*, which is constructed and shall outlive this process."""

        async def detach() -> None:
            try:
                message = Detach(group.namespace, group.name, group.launched)
                await self._runtime.ask(message, Done, self._head_grace_s())
            except Exception as error:  # noqa: BLE001 - whatever it is, the launch fails by it
                group.construction_failed(error)
            else:
                group.detached()

        self._tasks.start(detach(), f"detach {group.name}")

    def _construction_failed(self, group: RemoteGroup) -> None:
        """Stop *group*, because a worker of it could not be started or constructed. Any thread."""
        if not group.came_up:
            self._failed(f"group {group.name!r} could not start", 1)
        self.withdraw(group)

    def _failed(self, what: str, times: int) -> None:
        self.failures += times
        if times and not self.first_failure:
            self.first_failure = what

    def withdraw(self, group: RemoteGroup) -> None:
        """Stop *group*, because the launch failed or was interrupted, as by Ctrl-C. Returns at once. Any thread."""
        if self._runtime.io.inside():
            self._stop_failed(group)  # at once: the next launch under its name, or on its robots, waits for this
        else:
            self._runtime.io.call(self._stop_failed, group)

    def _stop_failed(self, group: RemoteGroup) -> None:
        async def stop() -> None:
            try:
                await self.stop(group, 1.0)
            except RlinfActorsError as error:
                log.debug("stopping the failed group %r: %s", group.name, error)

        key = (group.namespace, group.name)
        task = self._stopping_failed[key] = self._tasks.start(stop(), f"stopping the failed group {group.name!r}")
        task.add_done_callback(lambda _: self._stopping_failed.pop(key, None))

    def _head_grace_s(self) -> float:
        """Return how many seconds a request to the head may wait for its answer, because the head may be restarting."""
        head = self._runtime.head
        welcome = head.welcome if head is not None else None
        return welcome.head_grace_s if welcome is not None else HEAD_GRACE_S

    # --- stopping ---

    async def stop(self, group: RemoteGroup, grace_s: float) -> None:
        """Ask the head to stop *group*, and wait until its workers have ended.

        The workers get SIGTERM, and *grace_s* seconds later SIGKILL. If this raises, it may be called again.
        """
        group.closing = True
        self._runtime.progress.add(group)
        try:
            stop = StopGroup(group.namespace, group.name, grace_s, group.launched)
            await self._runtime.ask(stop, Done, grace_s + max(STOP_TIMEOUT_S, self._head_grace_s()))
        except BaseException:
            group.end_calls()
            raise
        else:
            group.close()
        finally:  # after a failure too: a restarted head stops owned groups that are not in `handles`
            if self._groups.get((group.namespace, group.name)) is group:
                del self._groups[(group.namespace, group.name)]

    async def stop_or_leave(self, group: RemoteGroup, grace_s: float) -> None:
        """Stop *group* and wait until its workers have ended, but do not wait for a head that may be restarting.

        The workers get SIGTERM, and *grace_s* seconds later SIGKILL. If the head stays silent for SILENT_HEAD_S, this
        logs a warning and returns; the request goes on in the background until the head is back.
        """
        stopping = self._stopping.get(group)
        if stopping is None:
            stop = self.stop(group, grace_s)
            stopping = self._tasks.start(stop, f"stopping group {group.name!r}", expected=RlinfActorsError)
            self._stopping[group] = stopping
            stopping.add_done_callback(lambda _: self._stopping.pop(group, None))
        if await self._ended_before_silence(stopping):
            stopping.result()
            return
        stopping.remove_done_callback(self._left_stop_ended)  # once, however often it was waited for
        stopping.add_done_callback(self._left_stop_ended)
        log.warning(
            "group %r is not stopped yet: the head has not answered for %g s. It is told when it is there again; when "
            "this process ends, the workers on this machine end too",
            group.name, SILENT_HEAD_S,
        )  # fmt: skip

    async def stop_owned(self, grace_s: float) -> bool:
        """Stop all groups that this process owns, because the process shuts down; wait until their workers have ended.

        The workers get SIGTERM, and *grace_s* seconds later SIGKILL. Return True if the head has answered. If the head
        stays silent for SILENT_HEAD_S, cancel the requests, log a warning and return False.
        """
        groups = [group for group in self.all() if group.owned and not group.gone.done()]
        stopped = self._tasks.start(self._stop_all(groups, grace_s), "stopping the groups of this process")
        if await self._ended_before_silence(stopped):
            for outcome in stopped.result():
                if isinstance(outcome, Exception):
                    log.warning("a group was not stopped by this process; the head does it: %s", outcome)
            return True
        head, left = self._runtime.head, [group.name for group in groups if not group.gone.done()]
        stopped.cancel()
        await asyncio.wait([stopped])
        log.warning(
            "the head at %s has not answered for %g s and was not told to end %s. Their workers may run as long as "
            "this process does. When it ends, its agentd ends those on this machine; those on others end when a "
            "head is there again. Without a head they end after its grace (120 s by default)",
            head.endpoint if head is not None else "", SILENT_HEAD_S, ", ".join(f"group {name!r}" for name in left),
        )  # fmt: skip
        return False

    async def _stop_all(self, groups: list[RemoteGroup], grace_s: float) -> list[BaseException | None]:
        """Stop *groups*: channels last, so that no worker's thread sees its channel break, and relays. Return what each
        raised.
        """
        outcomes: list[BaseException | None] = []
        for channels in (False, True):
            last = CHANNEL_GROUPS, RELAY_GROUPS
            stops = [self.stop(group, grace_s) for group in groups if group.name.startswith(last) == channels]
            outcomes += await asyncio.gather(*stops, return_exceptions=True)
        return outcomes

    async def _ended_before_silence(self, stop: asyncio.Future[Any]) -> bool:
        """Wait until *stop* has ended (return True), or until the head has been silent for SILENT_HEAD_S (False)."""
        waits, head = [stop], self._runtime.head
        if head is not None:
            waits.append(self._tasks.start(head.silent(SILENT_HEAD_S), "waiting for the head's silence"))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for silent in waits[1:]:
                silent.cancel()
        return stop.done()

    def _left_stop_ended(self, stop: asyncio.Task[None]) -> None:
        error = None if stop.cancelled() else stop.exception()
        if error is not None and not self.closed:  # the end of this process ends it too, which is no failure
            log.warning("a group was not stopped by this process: %s", error)

    def close_all(self, error: Callable[[RemoteGroup], RlinfActorsError]) -> None:
        """Fail every call on every group and close the links to the workers. *error* returns the error for a group."""
        for group in self.all():
            group.close(error(group))

    def clear(self) -> None:
        """Cancel all requests to the head and forget all groups, because this process closes its connections."""
        self._tasks.cancel()
        self._groups.clear()

    def workers_changed(self, body: WorkerChanged) -> None:
        """Handle the head's notice that workers of a group have started or ended, or were restarted."""
        group = self.get(body.namespace, body.group)
        if group is not None:
            group.resize(body.world_size, body.detail)
            self._failed(f"a worker of group {group.name!r} died", note_deaths(group, body.workers))
            group.update(body.workers)
            if group.gone.done() and not group.owned:
                del self._groups[(body.namespace, body.group)]  # the head reports no more of it


def _launch_of(state: GroupState) -> str:
    """Return the launch id in the worker ids of *state*, "" if no worker has an id."""
    return next((launch_of(worker.id) for worker in state.workers if worker.id), "")
