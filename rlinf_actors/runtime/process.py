"""Runtime: what a driver or a worker process holds; everything that talks goes through it.

It owns the I/O thread, the sockets, the session with the head and the groups this process has
handles of. User threads call in; the loop thread does the work; nothing of the user's runs on it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import uuid
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from rlinf_actors import version
from rlinf_actors.errors import (
    ClusterTimeoutError,
    GroupClosedError,
    NodeLostError,
    ProtocolError,
    RlinfActorsError,
    UsageError,
)
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.net import faultpoints
from rlinf_actors.net.host import host_key, pid_start
from rlinf_actors.net.link import Network
from rlinf_actors.net.loop import IoThread
from rlinf_actors.net.security import Security
from rlinf_actors.runtime.headlink import HEAD_GRACE_S, HeadLink
from rlinf_actors.runtime.logprinter import LogPrinter
from rlinf_actors.runtime.lost import LostErrors
from rlinf_actors.runtime.memory import shared_memory
from rlinf_actors.runtime.paths import PathWatch
from rlinf_actors.runtime.remote import Construction, RemoteGroup
from rlinf_actors.runtime.watched import WatchedClients
from rlinf_actors.settings import Settings
from rlinf_actors.wire.agents import LogLines
from rlinf_actors.wire.clients import (
    ClientGone,
    Done,
    FindGroup,
    GetNodes,
    Handles,
    Launch,
    Launched,
    Nodes,
    StopCluster,
    StopGroup,
    Warn,
    WorkerChanged,
)
from rlinf_actors.wire.messages import Body
from rlinf_actors.wire.operators import GetStatus, Status
from rlinf_actors.wire.protocol import PROTOCOL
from rlinf_actors.wire.session import ClientHello, Goodbye, Welcome

log = logging.getLogger(__name__)

T = TypeVar("T")

FIND_TIMEOUT_S = 30.0
"""How long a look at a group waits for a head that is being restarted: for its start, and for the lease that it gives
its nodes to come back.
"""
STOP_TIMEOUT_S = 30.0
"""How long the end of a group may take beyond its grace, at least: a head that is away is waited for."""
_START_AGAIN = "Call shutdown() on the Cluster and make a new one to go on"


class Runtime:
    """One process's runtime. Methods may be called from any thread but the I/O thread, unless said otherwise.

    Args:
        role: "driver" or "worker".
        namespace: of the job.
        worker_id: the id the agent gave, for a worker.
        token: of the job, for a worker.
        security: settings of the sockets.
        on_lost: called (loop thread) when the head ends this session.
        on_given_up: called (loop thread) when the head has given up on this process: whoever owns it was told so.
    """

    def __init__(
        self,
        role: str,
        namespace: str,
        *,
        worker_id: str = "",
        token: str = "",
        security: Security | None = None,
        on_lost: Callable[[str], None] = lambda reason: None,
        on_given_up: Callable[[str], None] = lambda reason: None,
    ) -> None:
        from rlinf_actors.net.transport import ZmqNetwork  # loads zmq: not before something is started

        settings = Settings.load()
        faultpoints.load(settings.faults)
        self.role = role
        self.namespace = namespace
        self.incarnation = uuid.uuid4().hex
        self.worker_id = worker_id
        self.token = token
        self.host = host_key()
        self.groups: dict[tuple[str, str], RemoteGroup] = {}
        self.serving_thread = 0  # of a worker: where its calls run, one at a time; a wait there for itself cannot end
        self.lost = LostErrors(change_exit_code=role == "driver" and settings.fail_on_lost_errors)
        self.closed = False
        self._on_lost = on_lost
        self._on_given_up = on_given_up
        _raise_file_limit()
        self.io = IoThread(f"rlinf-actors-{role}-io")
        self.network: Network = self.io.submit(_made(lambda: ZmqNetwork(self.io.loop, security))).result()
        self.network.memory = self._memory = shared_memory(settings.shared_memory_bytes, self.io)
        self._paths = PathWatch(self.network, self.host, self.groups.values)
        self._head: HeadLink | None = None
        self._gone: RlinfActorsError | None = None
        self._stopped = False
        self._printer: LogPrinter | None = None
        self._warned: set[str] = set()
        self._launching: list[RemoteGroup] = []
        self._stopping: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._finding: dict[FindGroup, asyncio.Task[RemoteGroup]] = {}
        self.watched = WatchedClients(self._tell)

    def copy(self, data: Buffer) -> Buffer:
        """A snapshot of *data* that is going to be sent. Any thread."""
        return bytes(data) if self._memory is None else self._memory.copy(data)

    @property
    def identity(self) -> str:
        """How peers know this process."""
        return f"{self.role}:{self.incarnation}"

    # --- the head ---

    async def connect(self, endpoint: str, timeout: float | None) -> Welcome:
        """Start the session with the head. Loop thread.

        Raises:
            ClusterTimeoutError: no answer in *timeout* seconds.
            ProtocolMismatchError, AuthenticationError: refused.
        """
        hello = ClientHello(
            protocol=PROTOCOL,
            version=version.VERSION,
            incarnation=self.incarnation,
            role=self.role,
            namespace=self.namespace,
            host=self.host,
            pid=os.getpid(),
            pid_start=pid_start(os.getpid()),
            worker_id=self.worker_id,
            token=self.token,
        )
        head = HeadLink(self.network, endpoint, hello, self._noticed, self.head_lost, self._returned, self._given_up)
        try:
            welcome = await head.start(timeout)
        except BaseException:
            head.close("never welcomed")
            raise
        self._head = head
        self.watched.again()  # whoever is watched already
        self._paths.start(welcome.beat_s, welcome.lease_s)
        self.token = welcome.token or self.token
        return welcome

    async def ask(
        self, body: Body, kind: type[T], timeout: float | None = None, on_reply: Callable[[Any], None] | None = None
    ) -> T:
        """Ask the head and expect an answer of this kind; see ControlClient.request. Loop thread.

        Raises what the head refuses with.
        """
        if self._gone is not None:
            raise self._gone
        if self._head is None:
            raise RlinfActorsError("this process has no connection to a head: start a Cluster first")
        answer = await self._head.request(body, timeout, on_reply)
        if not isinstance(answer, kind):
            raise ProtocolError(f"the head answered {type(body).__name__} with {type(answer).__name__}")
        return answer

    async def nodes(self, num_nodes: int, timeout: float | None) -> Nodes:
        """Wait for nodes; see messages.GetNodes. Loop thread."""
        # the head keeps the time and knows who is missing; ours is only for a head that went away
        return await self.ask(GetNodes(num_nodes, timeout), Nodes, None if timeout is None else timeout + 5.0)

    async def status(self, namespace: str | None) -> Status:
        """What the head knows. Loop thread."""
        return await self.ask(GetStatus(namespace), Status, 10.0)

    async def stop_cluster(self) -> None:
        """End an embedded cluster. Loop thread."""
        if self._head is not None:
            await self._head.request(StopCluster(), 10.0)
            self._stopped = True  # nobody is left to say goodbye to

    # --- groups ---

    async def launch(self, message: Launch, group: RemoteGroup) -> None:
        """Reserve the name and start the workers of *group* (made by `new_group`). Loop thread.

        Raises:
            NameInUseError: the name is taken in this namespace.
            HardwareInUseError: another group holds a robot, and `wait_s` is over.
        """
        key = (message.namespace, message.group)

        def adopt(launched: Launched) -> None:
            self.groups[key] = group
            group.adopt(launched.group)

        try:
            claims = any(spec.claims for spec in message.workers)
            ending = [task for failed, task in self._stopping.items() if claims or failed == key]
            if ending:  # groups that could not come up: one of them has this name, or may have the hardware
                await asyncio.wait(ending)
            if self._head is not None and claims:
                self._head.own_robots()
            group.launched = [spec.id for spec in message.workers]
            self._launching.append(group)
            await self.ask(message, Launched, self._head_grace_s() + message.wait_s, adopt)
        except BaseException as error:
            unanswered = isinstance(error, (asyncio.CancelledError, ClusterTimeoutError))
            if unanswered and group in self._launching and not self.closed:
                self._stop_failed(group)  # withdrawn: the head may hold it, or have carried it out
            group.close(error if isinstance(error, Exception) else None)
            raise
        finally:
            if group in self._launching:
                self._launching.remove(group)

    def new_group(
        self, namespace: str, name: str, node_names: Sequence[str], construction: Construction
    ) -> RemoteGroup:
        """The owner's handle of a group that is about to be launched. Any thread."""
        return RemoteGroup(
            self.network, self.identity, self.host, namespace, name, node_names, construction, self._construction_failed
        )

    async def find(self, namespace: str, name: str, *, ended: bool = False) -> RemoteGroup:
        """A handle of a group. Loop thread.

        Args:
            namespace, name: of the group.
            ended: whether one that has ended will do; every call on it fails and says how its worker ended.

        Raises:
            GroupNotFoundError: there is none of that name in the namespace.
        """
        known = self.groups.get((namespace, name))
        if known is not None and not known.closing and not known.gone.done():
            return known
        asked = FindGroup(namespace, name, ended)
        if asked not in self._finding:
            self._finding[asked] = asyncio.get_running_loop().create_task(self._find(asked), name=f"find {name}")
            self._finding[asked].add_done_callback(lambda _: self._finding.pop(asked, None))
        return await asyncio.shield(self._finding[asked])

    async def _find(self, asked: FindGroup) -> RemoteGroup:
        """Ask for a group and subscribe to it; the handle is in place before the head's next notice."""
        key = (asked.namespace, asked.group)
        found: list[RemoteGroup] = []

        def adopt(launched: Launched) -> None:
            group = self.groups.get(key)
            if group is None or group.closing or not group.holds(launched.group):
                workers = sorted(launched.group.workers, key=lambda worker: worker.rank)
                names = [worker.node_ip for worker in workers]
                group = RemoteGroup(self.network, self.identity, self.host, *key, names, soon=self.io.call)
                self.groups[key] = group
            group.adopt(launched.group)
            if group.gone.done() and not group.owned:
                self.groups.pop(key, None)  # it had ended: nothing more will be said of it
            found.append(group)

        await self.ask(asked, Launched, FIND_TIMEOUT_S, adopt)
        return found[0]

    async def stop_group(self, group: RemoteGroup, grace_s: float) -> None:
        """End the workers of a group and wait until they are gone. Loop thread."""
        group.closing = True
        try:
            stop = StopGroup(group.namespace, group.name, grace_s, group.launched)
            await self.ask(stop, Done, grace_s + max(STOP_TIMEOUT_S, self._head_grace_s()))
        finally:
            group.close()
            if self.groups.get((group.namespace, group.name)) is group:
                del self.groups[(group.namespace, group.name)]

    def _construction_failed(self, group: RemoteGroup) -> None:
        """A group that cannot come up does not stay half up. Loop thread or a user's."""
        if self.io.inside():
            self._stop_failed(group)  # at once: whoever launches again under its name waits for that
        else:
            self.io.call(self._stop_failed, group)

    def _stop_failed(self, group: RemoteGroup) -> None:
        async def stop() -> None:
            try:
                await self.stop_group(group, 1.0)
            except RlinfActorsError as error:
                log.debug("stopping the failed group %r: %s", group.name, error)

        key = (group.namespace, group.name)
        task = self._stopping[key] = asyncio.get_running_loop().create_task(stop(), name=f"stop {group.name}")
        task.add_done_callback(lambda _: self._stopping.pop(key, None))

    # --- the end ---

    def daemon_died(self, reason: str) -> None:
        """The embedded daemon is gone, and every worker with it. Loop thread."""
        self._end_all(RlinfActorsError(f"the cluster is gone: {reason}\n{_START_AGAIN}"))

    def head_lost(self, reason: str) -> None:
        """The head is silent for too long, or has given up on this process. Loop thread."""
        self._end_all(NodeLostError(f"{reason}; its workers end without it. {_START_AGAIN}"))

    def _given_up(self, reason: str) -> None:
        """The head has told everybody that this process is gone. Loop thread."""
        self._on_given_up(reason)
        self.head_lost(reason)

    def _head_grace_s(self) -> float:
        """How long a launch waits for a head that is being restarted."""
        welcome = self._head.welcome if self._head is not None else None
        return welcome.head_grace_s if welcome is not None else HEAD_GRACE_S

    def _end_all(self, error: RlinfActorsError) -> None:
        self._gone = error
        self._paths.close()
        if self._head is not None:
            self._head.close(str(error), 0)
        for group in list(self.groups.values()):
            group.close(error)

    def check_usable(self) -> None:
        """Raise where nothing sent from here could arrive.

        Raises:
            UsageError: this process is a fork of the one that has the connections.
        """
        if self.network.forked:
            raise UsageError(
                "this process is a fork of the driver or worker that has the connections, and cannot use them: "
                "call the group in the parent, or start this process with the spawn method"
            )

    def close(self) -> None:
        """Say goodbye, close every socket and end the I/O thread. Twice is fine."""
        if self.closed:
            return
        self.closed = True
        self.lost.close()
        if not self.io.inside():
            self.io.submit(self._close()).result()
            self.io.stop()
        if self._printer is not None:
            self._printer.close()

    async def _close(self) -> None:
        self._paths.close()
        for group in list(self.groups.values()):
            group.close(GroupClosedError(f"group {group.name!r}: this process closed its connection to the cluster"))
        self.groups.clear()
        if self._head is not None:
            self._head.close("the process ends", 0 if self._stopped else 200)
        self.network.close()
        if self._memory is not None:
            self._memory.close()

    # --- what the head says ---

    def _noticed(self, body: Body) -> None:
        if isinstance(body, WorkerChanged):
            group = self.groups.get((body.namespace, body.group))
            if group is not None:
                group.update(body.workers)
                if group.gone.done() and not group.owned:
                    del self.groups[(body.namespace, body.group)]  # nothing more will be said of it
        elif isinstance(body, ClientGone):
            self.watched.gone(body.incarnation)
        elif isinstance(body, LogLines):
            if self._printer is None:
                self._printer = LogPrinter(self._shown)
            self._printer.show(body)
        elif isinstance(body, Warn):
            if body.text not in self._warned:
                self._warned.add(body.text)
                log.warning("%s", body.text)
        elif isinstance(body, Goodbye):
            self._on_lost(body.reason)
            (self._given_up if body.lost else self.head_lost)(body.reason)
        else:
            log.warning("the head sent a %s, which this process does not expect", type(body).__name__)

    def _returned(self) -> None:
        """A head that was restarted has taken us back: it does not know what we want to hear of."""
        self.watched.again()
        handles = [group.handle() for group in self.groups.values() if not group.gone.done()]
        self._tell(Handles(handles, [id for group in self._launching for id in group.launched]))

    def _tell(self, body: Body) -> None:
        if self._head is not None and not self.closed:
            self._head.notify(body)

    def _shown(self, credit: Body) -> None:
        self.io.call(self._tell, credit)


async def _made(make: Callable[[], T]) -> T:
    """Run *make* on the loop: sockets are registered with the loop they live on."""
    return make()


def _raise_file_limit() -> None:
    """Two descriptors go with every worker one talks to; the soft limit of 1024 is for programs that use select()."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
