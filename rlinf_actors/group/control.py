"""GroupControl: a group's own operations; and handles, looked up by name or received from another process.

`attach` asks the head for a group by its name. A handle that is sent to another process is encoded as a HandleState.
The class is not sent, so a process that cannot import the class can still call the group. `control_of` makes a handle
from a HandleState without asking the head. The first use of the handle asks the head, and calls sent meanwhile wait in
order. Any thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from rlinf_actors.cluster.connect import worker_job
from rlinf_actors.errors import (
    CallTimeoutError,
    GroupNotFoundError,
    ProtocolError,
    RlinfActorsError,
    SerializationError,
    UsageError,
)
from rlinf_actors.group import group_spec, resizing
from rlinf_actors.group.class_facts import YIELDING, ClassFacts, Method, facts_of, function_of, names_of_functions
from rlinf_actors.group.method import ONCE, RemoteMethod
from rlinf_actors.group.result import WorkerGroupFuncResult
from rlinf_actors.hardware.configured import info_of
from rlinf_actors.model.address import WorkerAddress, WorkerInfo
from rlinf_actors.runtime.future import AsyncWork
from rlinf_actors.shown import html_table
from rlinf_actors.wire import protocol
from rlinf_actors.wire.endings import ending

if TYPE_CHECKING:
    from rlinf_actors.cluster.cluster import Cluster
    from rlinf_actors.model.hardware import HardwareInfo
    from rlinf_actors.model.placement import Placement
    from rlinf_actors.placement.strategies import PlacementStrategy
    from rlinf_actors.runtime.remote_group import RemoteGroup
    from rlinf_actors.runtime.runtime import Runtime
    from rlinf_actors.wire.values import WorkerState

log = logging.getLogger(__name__)


class GroupControl:
    """The library's operations on a group, such as shutdown, as ``group.control``.

    A method of the worker class may hide an operation of the same name on the group itself; it never hides it here.

    Attributes:
        name: name of the group.
        cls_name: name of the worker class.
        methods: public methods of the worker class, by name.
        facts: names and properties of the methods of the worker class.
        yielded: names of the library's operations on a group that methods of the worker class hide.
    """

    _handle_cls: ClassVar[Any]  # WorkerGroup; its module imports this one and sets it

    def __init__(self, runtime: Runtime, group: RemoteGroup, facts: ClassFacts) -> None:
        self.runtime = runtime
        self.group = group
        self.name = group.name
        self.cls_name = facts.name
        self.methods = facts.methods
        self.facts = facts
        self.yielded = [name for name in YIELDING if name in facts.own]
        self._names: dict[Any, str] = {}
        self._read: tuple[str, group_spec.GroupDetail] = ("", group_spec.GroupDetail())
        self._shutdown: concurrent.futures.Future[None] | None = None
        group.handles.add(id(self))

    def __del__(self) -> None:
        self.group.handles.discard(id(self))
        self.group.ends_unheld()

    @property
    def control(self) -> GroupControl:
        """This object itself, so that ``group.control.control`` is ``group.control``."""
        return self

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.group.peers)

    @property
    def restarts(self) -> bool:
        """False if failed workers of the group are not restarted; True if they are, or if this is unknown."""
        return self._detail.restarts

    @property
    def placements(self) -> list[Placement]:
        """The placement of each rank, in rank order."""
        return self._detail.placements

    @property
    def node_ranks(self) -> list[int]:
        """The rank of the node of each rank of the group, in rank order."""
        placements = self.placements
        if placements:
            return [placement.cluster_node_rank for placement in placements]
        states = self.group.states  # of a channel's hosts
        return [states[rank].node_rank if rank in states else -1 for rank in range(self.world_size)]

    @property
    def models(self) -> dict[int, str]:
        """The accelerator model of each rank, "" for a rank without accelerators."""
        return dict(enumerate(self._detail.models))

    @property
    def hardware(self) -> dict[int, list[HardwareInfo]]:
        """The robots or other configured hardware of each rank, without ranks that have none."""
        return {rank: [info_of(piece) for piece in pieces] for rank, pieces in self._detail.hardware.items()}

    @property
    def _detail(self) -> group_spec.GroupDetail:
        """The record of the group that the launching process made: placements, models and hardware."""
        text = self.group.detail
        if self._read[0] != text:
            self._read = (text, group_spec.decode(text, self.name))
        return self._read[1]

    def method(self, function: Callable[..., Any]) -> RemoteMethod[..., Any]:
        """Return a callable that calls *function*, a method of the worker class, on all ranks; type checkers know it.

        The same as `WorkerGroup.method`.
        """
        name = self.name_of(function)
        return RemoteMethod(self, name, self.methods[name], None, ONCE)

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call *function*, a method of the worker class, on all ranks and return the result of the call.

        The same as `WorkerGroup.call`.
        """
        return self.method(function)(*args, **kwargs)

    def on_node(self, node_rank: int) -> Any:
        """Return a view of the ranks whose workers are on one node. The same as `WorkerGroup.on_node`."""
        return self._handle_cls.on_node(self._handle_cls(self), node_rank)

    def with_timeout(self, seconds: float) -> Any:
        """Return a view of all ranks whose calls end after *seconds*, with CallTimeoutError if no answer came.

        The same as `WorkerGroup.with_timeout`.
        """
        # by the class: the attribute of the handle may be the worker's own method
        return self._handle_cls.with_timeout(self._handle_cls(self), seconds)

    def with_retries(self, n: int) -> Any:
        """Return a view of all ranks whose calls are sent again, at most *n* times per rank, when a worker dies.

        The same as `WorkerGroup.with_retries`.
        """
        return self._handle_cls.with_retries(self._handle_cls(self), n)

    @staticmethod
    def from_address(worker_cls: type, address: WorkerAddress, async_op: bool = False) -> Any:
        """Return a view of the worker at *address*, or of all workers for the address of a group.

        The same as `WorkerGroup.from_address`.
        """
        return GroupControl._handle_cls.from_address(worker_cls, address, async_op)

    def name_of(self, function: Callable[..., Any]) -> str:
        """Return the name by which workers know *function*, a public method of the worker class.

        Args:
            function: the method, as an attribute of the class or of a base. If this process got the handle from another
                process, it may not have the class; then only the function's ``__name__`` counts.

        Raises:
            UsageError: the class has no such public method.
        """
        key = function_of(function)
        name: str | None = ""
        if self.facts.cls is None:
            name = getattr(key, "__name__", "")
        elif isinstance(key, Hashable) and (name := self._names.get(key)) is None:
            self._names = names_of_functions(self.facts.cls)
            name = self._names.get(key, "")
        if name and name in self.methods:
            return name
        given = getattr(function, "__qualname__", None) or repr(function)
        if name and self.facts.cls is not None:
            raise UsageError(f"{given}() cannot be called on a group: {name}() is not public")
        raise UsageError(
            f"{given} is no method of {self.cls_name}, the class of group {self.name!r}: give a method as it is found "
            f"in the class, such as {self.cls_name}.{min(self.facts.own, default='step')}"
        )

    def worker_infos(self) -> list[WorkerInfo]:
        """Return the node, port, accelerators and robots of each worker, in rank order.

        Before the group is ready, some of it may be missing.
        """
        infos = []
        by_rank = {placement.rank: placement for placement in self.placements}
        models, hardware = self.models, self.hardware
        for rank in range(self.world_size):
            state = self.group.states.get(rank)
            placement = by_rank.get(rank)
            info = WorkerInfo(WorkerAddress(self.name, rank), rank, self.world_size)
            info.accelerator_model = models.get(rank, "")
            info.hardware_infos = list(hardware.get(rank, ()))
            if state is not None:
                info.cluster_node_rank, info.node_ip, info.node_port = state.node_rank, state.node_ip, state.port
                info.code_hash = state.code
            if placement is not None:
                info.cluster_node_rank = placement.cluster_node_rank
                info.accelerator_type = placement.accelerator_type
                info.accelerator_rank = placement.local_accelerator_rank
                info.available_accelerators = list(placement.visible_accelerators)
            infos.append(info)
        return infos

    def states(self) -> dict[int, WorkerState]:
        """Return the state of each worker by rank, as the head last reported it. Ranks without a report are missing."""
        return dict(self.group.states)

    def _as_html(self, title: str, ranks: Iterable[int]) -> str:
        """Return the workers of *ranks* as a table for a notebook, by what this process knows. Does not block."""
        headings, states = ("rank", "node", "address", "state", "process", "restarts"), self.states()
        return html_table(title, headings, [_row(rank, states[rank]) for rank in ranks if rank in states])

    def wait_ready(self, timeout: float | None = None) -> None:
        """Block until every worker is constructed, or raise the error of the launch.

        The same as `WorkerGroup.wait_ready`, except that it returns None.
        """
        self.group.request_ready().wait(timeout)

    def add_ranks(self, placement_strategy: PlacementStrategy, async_op: bool | None = None) -> Any:
        """Start more workers and make them ranks of the group. The same as `WorkerGroup.add_ranks`."""
        return resizing.add_ranks(self, placement_strategy, async_op)

    def remove_ranks(self, *ranks: int, grace: float = 5.0, async_op: bool | None = None) -> Any:
        """End the workers of the highest ranks. The same as `WorkerGroup.remove_ranks`."""
        return resizing.remove_ranks(self, ranks, grace, async_op)

    def shutdown(self, grace: float = 5.0, async_op: bool | None = None) -> Any:
        """End the workers: call their ``_close()`` if the class has it, send SIGTERM, after *grace* seconds SIGKILL.

        The same as `WorkerGroup.shutdown`.
        """
        if async_op is None:
            async_op = asyncio._get_running_loop() is not None
        if async_op:
            return AsyncWork.of_future(self._begin_shutdown(grace), f"shutdown() of group {self.name!r}")
        self.shutdown_blocking(grace)
        return None

    async def shutdown_async(self, grace: float = 5.0) -> None:
        """End the workers like `shutdown`, without blocking the event loop.

        If the task that awaits this is cancelled, the shutdown goes on.
        """
        await self.shutdown(grace, async_op=True)

    def shutdown_blocking(self, grace: float = 5.0) -> None:
        """End the workers like `shutdown`, and block until they have ended."""
        self._begin_shutdown(grace).result()

    def _begin_shutdown(self, grace: float) -> concurrent.futures.Future[None]:
        if self._shutdown is None or (self._shutdown.done() and not self._ended(self._shutdown)):
            grace = protocol.number(grace, "the grace")
            if self.runtime.closed:
                self._shutdown = concurrent.futures.Future()
                self._shutdown.set_result(None)
            else:
                self._shutdown = self.runtime.io.submit(
                    end_group(self.runtime, self.group, grace, "_close" in self.facts.private)
                )
        return self._shutdown

    def _ended(self, shutdown: concurrent.futures.Future[None]) -> bool:
        return self.group.gone.done() and not shutdown.cancelled() and shutdown.exception() is None


async def end_group(runtime: Runtime, group: RemoteGroup, grace: float, closes: bool) -> None:
    """Call ``_close()`` on the workers of *group* if their class has it (*closes*), and then stop them. Loop thread.

    *grace* is the maximum of seconds for ``_close()``, and also the time from SIGTERM to SIGKILL.
    """
    try:
        await runtime.groups.reach(group)
    except GroupNotFoundError:
        return  # the group has ended
    if group.gone.done():
        return
    # once, also if an earlier shutdown failed
    if closes and not group.closing and (not group.owned or (group.ready.done() and group.ready.error is None)):
        peers = [peer for peer in group.peers if peer.error is None]
        closing: WorkerGroupFuncResult[Any] = WorkerGroupFuncResult(runtime, "_close", peers, grace)
        closing._start(())
        try:
            await closing
        except CallTimeoutError:
            log.warning("group %r: _close() took longer than %g s; stopping it anyway", group.name, grace)
        except RlinfActorsError as error:
            log.warning("group %r: _close() failed; stopping it anyway: %s", group.name, error)
    await runtime.groups.stop_or_leave(group, grace)


async def end_launched(runtime: Runtime, grace: float) -> None:
    """End the groups that this process has launched, as `WorkerGroup.shutdown` does. Loop thread."""
    groups = [one for one in runtime.groups.all() if one.owned and one.closes is not None and not one.gone.done()]
    ends = [end_group(runtime, group, grace, bool(group.closes)) for group in groups]
    for group, error in zip(groups, await asyncio.gather(*ends, return_exceptions=True), strict=True):
        if error is not None:
            log.warning("group %r could not be ended before its launcher, and ends with it: %s", group.name, error)


def _row(rank: int, state: WorkerState) -> tuple[object, ...]:
    """Return rank, node, address, state, process and restarts of a worker, for people."""
    ended = "" if state.exit is None or state.state != "gone" else f": {ending(state.exit)}"
    return rank, state.node_rank, state.node_ip, f"{state.state}{ended}", state.pid or "", state.restarts


class HandleState(msgspec.Struct, frozen=True, omit_defaults=True):
    """The message by which a handle of a group is sent to another process, encoded as MessagePack.

    New fields need a default value, so that processes of different versions understand one another.

    Attributes:
        namespace, name, launch: namespace, name and launch id of the group.
        cls: name of the worker class.
        methods: names of the public methods.
        own: indices in `methods` of the methods that the user's classes define; the other ones are those of Worker.
        private: names of the private methods.
        size: number of ranks.
        detail: the record of the group that its launcher made (group_spec.GroupDetail), as JSON.
        flagged: properties of the methods that stream, are idempotent or are concurrent, by method name.
        wait_s: seconds for which the head waits for the group's launch; 0 if the head has already answered the launch.
    """

    namespace: str
    name: str
    launch: str
    cls: str
    methods: list[str]
    own: list[int]
    private: list[str]
    size: int
    detail: str
    flagged: dict[str, Method] = {}
    wait_s: float = 0.0


def state_of(control: GroupControl) -> bytes:
    """Encode the handle of a group, to send it to another process.

    Raises:
        SerializationError: the group was launched with get_if_exists, and the head has not answered yet; it is unknown
            whether the handle will be of this group or of a running one.
    """
    group, facts = control.group, control.facts
    group.unheld = None  # the other process has a handle then
    if group.takes_running and not group.found:
        raise SerializationError(
            f"the launch of group {group.name!r} has not been answered, and with get_if_exists it may be another group "
            "that is running: await the group first"
        )
    methods = list(facts.methods)
    state = HandleState(
        group.namespace,
        group.name,
        group.launch,
        facts.name,
        methods,
        [number for number, name in enumerate(methods) if name in facts.own],
        sorted(facts.private),
        control.world_size,
        group.detail,
        {name: method for name, method in facts.methods.items() if method != Method()},
        0.0 if group.found else group.patience_s,
    )
    return msgspec.msgpack.encode(state)


def control_of(carried: bytes) -> GroupControl:
    """Decode a handle that another process sent, and return its GroupControl. Does not ask the head.

    Args:
        carried: what `state_of` returned in the other process.

    Raises:
        UsageError: no Cluster is running in this process.
        ProtocolError: *carried* is not an encoded handle.
    """
    from rlinf_actors.cluster.cluster import Cluster

    try:
        state = msgspec.msgpack.decode(carried, type=HandleState)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ProtocolError(f"what arrived is no handle of a group: {error}") from error
    job = worker_job()
    runtime = job.runtime if job is not None else Cluster.current().runtime
    described = group_spec.decode(state.detail, state.name)
    nodes = described.nodes if len(described.nodes) == state.size else ["its node"] * state.size
    group = runtime.groups.of_handle(
        state.namespace,
        state.name,
        state.launch,
        nodes,
        state.wait_s,
        job.connected if job is not None else None,  # a driver with a Cluster has a session with the head
    )
    if not group.detail:
        group.detail = state.detail
    if runtime.namespace != state.namespace:
        group.fail(
            UsageError(
                f"group {state.name!r} belongs to job {state.namespace!r}, and this process to "
                f"{runtime.namespace!r}: a group is called by its own job only"
            )
        )
    facts = ClassFacts(
        state.cls,
        {name: state.flagged.get(name, Method()) for name in state.methods},
        frozenset(state.methods[number] for number in state.own),
        frozenset(state.private),
    )
    return GroupControl(runtime, group, facts)


def attach(cls: type, name: str) -> AsyncWork[GroupControl]:
    """Ask the head for the running group named *name*, and return an AsyncWork with the group's GroupControl.

    *cls* is the worker class of the group. The work fails with GroupNotFoundError if there is no such group.
    """
    from rlinf_actors.cluster.cluster import Cluster

    async def find(cluster: Cluster) -> tuple[Runtime, RemoteGroup]:
        return cluster.runtime, await cluster.runtime.groups.find(cluster.namespace, name)

    what = f"from_group_name({name!r})"
    return AsyncWork.made_of(Cluster._asking(find, what), lambda found: _attached(cls, name, *found), what)


def _attached(cls: type, name: str, runtime: Runtime, group: RemoteGroup) -> GroupControl:
    described = group_spec.decode(group.detail, name)
    if not group.owned:
        for peer, node in zip(group.peers, described.nodes, strict=False):
            peer.node = node  # the head knows addresses only; people know hosts by their names
    return GroupControl(runtime, group, facts_of(cls))
