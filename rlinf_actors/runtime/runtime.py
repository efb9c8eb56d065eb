"""Runtime: the connections of a driver or worker process.

The Runtime owns the I/O thread, the sockets, the shared memory of the process, the session with the head and the
GroupRegistry. User threads call its methods; the loop thread does the work. No user code runs on the loop thread.
"""

from __future__ import annotations

import logging
import os
import sys
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec.structs import replace

from rlinf_actors import forks, version
from rlinf_actors.errors import (
    GroupClosedError,
    InternalError,
    NodeLostError,
    RlinfActorsError,
    UsageError,
)
from rlinf_actors.exhaustion import raise_file_limit
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.net import fault_injection, reading
from rlinf_actors.net.bulk_handshake import BulkTransport
from rlinf_actors.net.host import host_key, pid_start
from rlinf_actors.net.link import Network
from rlinf_actors.net.loop import SHUT_DOWN, IoThread
from rlinf_actors.net.shared_memory import Arena
from rlinf_actors.net.socket_security import Security
from rlinf_actors.runtime import driver_log, switch_interval
from rlinf_actors.runtime.driver_end import DriverEnd
from rlinf_actors.runtime.driver_trace import DriverTrace
from rlinf_actors.runtime.group_progress import GroupProgress
from rlinf_actors.runtime.group_registry import GroupRegistry
from rlinf_actors.runtime.head_session import HeadSession, WatchedClients
from rlinf_actors.runtime.log_printer import END_S
from rlinf_actors.runtime.lost_errors import LostErrors
from rlinf_actors.runtime.node_reachability import NodeReachability
from rlinf_actors.runtime.this_program import this_program
from rlinf_actors.runtime.wait_watch import WaitWatch
from rlinf_actors.runtime.worker_output import WorkerOutput
from rlinf_actors.settings import Settings
from rlinf_actors.wire.agent_messages import ClientHello, Flushing, FlushLogs, Goodbye, LogLines, Welcome
from rlinf_actors.wire.client_messages import (
    ClientGone,
    GetNodes,
    GetStatus,
    Nodes,
    Status,
    StopCluster,
    Warn,
    WorkerChanged,
)
from rlinf_actors.wire.control_codec import Body
from rlinf_actors.wire.launch_messages import FindWorker, FoundWorker
from rlinf_actors.wire.program import Program
from rlinf_actors.wire.protocol import PROTOCOL, expected
from rlinf_actors.wire.values import Claim

log = logging.getLogger(__name__)

IDLE_S = 10.0
"""Seconds without a new block after which free shared memory is returned to the operating system."""


def shared_memory(limit: int, io: IoThread) -> Arena | None:
    """Make the shared-memory arena of this process. Its blocks are given back to the operating system when it is idle.

    Return None if *limit* is 0 or shared memory is not available.

    Args:
        limit: maximum size in bytes; a quarter of the machine's memory is another maximum.
        io: the I/O thread, which runs the timer that finds the arena idle.
    """
    limit = min(limit, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4)
    if limit <= 0:
        return None
    try:
        return _trimmed(limit, io)
    except OSError as error:
        log.warning("no shared memory, so large arrays are copied through sockets: %s", error)
        return None


def _trimmed(limit: int, io: IoThread) -> Arena:
    arena = Arena(limit)

    def stored() -> None:  # any thread
        arena.watched = True  # no timer runs while the process is idle
        io.call(start_timer, arena.stores)

    def start_timer(seen: int) -> None:
        io.loop.call_later(IDLE_S, check, seen)

    def check(seen: int) -> None:
        if arena.stores != seen:
            start_timer(arena.stores)
        else:
            arena.watched = False
            arena.trim()

    arena.on_store = stored
    arena.another = lambda limit: _trimmed(limit, io)
    return arena


if TYPE_CHECKING:
    from rlinf_actors.config.net_emulation_config import NetEmulationConfig
    from rlinf_actors.net.emulated_path import Budgets
    from rlinf_actors.net.network_emulation import EmulatedNetwork
    from rlinf_actors.runtime.peer import Peer

T = TypeVar("T")

_START_AGAIN = "Call shutdown() on the Cluster and make a new one to go on"


class Runtime:
    """The I/O thread, the sockets and the session with the head of one driver or worker process.

    Groups, messages and channels work through it. Methods may be called on any thread but the I/O thread, unless said
    otherwise.

    Attributes:
        emulated: the network, if the job emulates one; else None.

    Args:
        role: "driver" or "worker".
        namespace: namespace of the job.
        log_dir: directory in which this driver writes the output of the job's workers (LogFiles), None for none.
        worker_id: id of this worker, given by its agentd or parent worker; "" in a driver.
        parent: worker id of the worker that this process is a child of; "" if it is not a child.
        token: token of the job, in a worker; "" in a driver, which gets the token from the head.
        security: security settings of the sockets.
        on_lost: called on the loop thread, with the reason, when the head ends this session.
        on_given_up: called on the loop thread, with the reason, when the head has declared this process dead.
        claims: the robots of a robot worker. Groups that it launches inherit them. Its guard stops threads wherever
            they are, so they must not read the sockets.
    """

    def __init__(
        self,
        role: str,
        namespace: str,
        log_dir: str | None = None,
        *,
        worker_id: str = "",
        parent: str = "",
        token: str = "",
        security: Security | None = None,
        on_lost: Callable[[str], None] = lambda reason: None,
        on_given_up: Callable[[str], None] = lambda reason: None,
        claims: Sequence[Claim] = (),
    ) -> None:
        from rlinf_actors.net.local_network import LocalNetwork  # loads zmq: not before something is started
        from rlinf_actors.net.zmq_network import ZmqNetwork

        settings = Settings.load()
        fault_injection.load(settings.faults)
        reading.threads_read = reading.available() and not claims
        if role == "driver":
            driver_log.set_up(os.environ)
        self._switches_sooner = role == "driver" and switch_interval.shorten()
        self._output = WorkerOutput(log_dir, lambda credit: self.io.call(self._tell, credit))
        self.role = role
        self.namespace = namespace
        self.incarnation = uuid.uuid4().hex
        self.worker_id = worker_id
        self._parent = parent
        root = parent or worker_id
        self.inherited = [replace(claim, by=claim.by or root) for claim in claims]
        self.hardware_infos: list[Any] = []  # of these robots, for stop_hardware
        self.token = token
        self.host = host_key()
        self.serving_thread = 0  # of a worker: runs its calls, one at a time; a wait there for its own call cannot end
        self.closed = False
        self._on_lost = on_lost
        self._on_given_up = on_given_up
        raise_file_limit()
        self.io = IoThread(f"rlinf-actors-{role}-io")
        script = role == "driver" and not _runs_tests()
        end = DriverEnd(self._fail_calls, self.io.later).begin if script and settings.end_on_lost_errors else None
        self.lost = LostErrors(script and settings.fail_on_lost_errors, self.io.later, end)
        network = LocalNetwork if settings.local_link == "unix" else ZmqNetwork
        self.network: Network = network(self.io.loop, security)  # on this thread: its check of limits may block
        self.emulated: EmulatedNetwork | None = None
        keyed = security is None or security.pair is not None or not security.insecure_test_network
        self.network.bulk = self._bulk = BulkTransport(self.io.loop, keyed)
        self.network.memory = self._memory = shared_memory(settings.shared_memory_bytes, self.io)
        self.groups = GroupRegistry(self)
        self._waits = WaitWatch(self.io.loop, settings.wait_lines_s, self.peer, self.groups.all, namespace)
        self.progress = GroupProgress(self, settings.progress and role == "driver")
        self._paths = NodeReachability(self.network, self.host, self.groups.all)
        self.head: HeadSession | None = None
        self._gone: RlinfActorsError | None = None
        self._stopped = self._ending = False
        self.logs_moved = ("", "")  # a directory of logs, and where it is since the cluster has ended
        self._warned: set[str] = set()
        self.watched = WatchedClients(self._tell)
        self._trace = DriverTrace(self)

    def emulate(self, config: NetEmulationConfig, name: str, node_rank: int, budgets: Budgets | None = None) -> None:
        """From now on, delay messages to and from workers as *config* says. Call it before the first group is known.

        Args:
            config: the emulated network; not enabled, it changes nothing.
            name: name of this process, ``group:rank`` or ``driver``.
            node_rank: rank of this process's node, -1 if unknown.
            budgets: makes the stages of bandwidth groups; None if this process has them for itself.
        """
        if config.enabled:
            from rlinf_actors.net.network_emulation import EmulatedNetwork

            emulated = EmulatedNetwork(self.network, config, name, node_rank, self._node_of, budgets)
            self.network = self.emulated = emulated

    def _node_of(self, name: str) -> int:
        """Return the rank of the node of the worker *name*, -1 if it is unknown."""
        group, _, ranks = name.partition(":")
        found = self.groups.get(self.namespace, group)
        state = None if found is None else found.states.get(int(ranks.partition(":")[0] or -1))
        return -1 if state is None else state.node_rank

    def peer(self, name: str) -> Peer | None:
        """Return the connection to the worker *name* of this job, None if this process has none. Any thread."""
        group, _, rank = name.partition(":")
        found = self.groups.get(self.namespace, group)
        peers = () if found is None else found.peers
        return peers[int(rank)] if rank.isdigit() and int(rank) < len(peers) else None

    def copy(self, data: Buffer) -> Buffer:
        return bytes(data) if self._memory is None else self._memory.copy(data)

    @property
    def identity(self) -> str:
        return f"{self.role}:{self.incarnation}"

    # --- the head ---

    async def connect(self, endpoint: str, timeout: float | None) -> Welcome:
        """Register this process with the head at *endpoint*, and return the head's answer. Loop thread.

        Raises:
            ClusterTimeoutError: no answer in *timeout* seconds.
            ProtocolMismatchError, AuthenticationError: the head rejected this process.
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
            parent=self._parent,
            program=this_program() if self.role == "driver" else Program(),
        )
        head = HeadSession(
            self.network,
            endpoint,
            hello,
            self._noticed,
            self.head_lost,
            self._head_returned,
            self._declared_dead,
            self._notice_failed,
        )
        try:
            welcome = await self.progress.during(
                head.start(timeout), f"waiting for the head at {endpoint}", always=True
            )
        except BaseException:
            head.close("never welcomed")
            raise
        self.head = head
        self.watched.renew()  # watches that began before
        self._paths.start(welcome.beat_s, welcome.lease_s)
        if self.role == "driver":
            self._waits.start()
        self.token = welcome.token or self.token
        return welcome

    async def ask(
        self, body: Body, kind: type[T], timeout: float | None = None, on_reply: Callable[[Any], None] | None = None
    ) -> T:
        """Send a request to the head and return its answer. Loop thread.

        Args:
            body: the request.
            kind: class of the expected answer.
            timeout: seconds to wait for the answer, None for no limit.
            on_reply: called with the answer as it arrives, before any notice that the head sent after the answer.

        Raises:
            ProtocolError: the answer is of another class.
            RlinfActorsError: there is no session, the head did not answer in time, or it rejected the request.
        """
        if self._gone is not None:
            raise self._gone
        if self.head is None:
            raise RlinfActorsError("this process has no connection to a head: start a Cluster first")
        return expected(await self.head.request(body, timeout, on_reply), kind)

    async def nodes(self, num_nodes: int, timeout: float | None) -> Nodes:
        """Wait until *num_nodes* nodes have registered with the head; return the nodes with their ranks. Loop thread.

        If nodes are missing after *timeout* seconds, ClusterTimeoutError names them. None waits without limit.
        """
        # the head keeps the time and names missing nodes; the limit here is for a head that went away
        return await self.ask(GetNodes(num_nodes, timeout), Nodes, None if timeout is None else timeout + 5.0)

    async def status(self, namespace: str | None) -> Status:
        """Ask the head for the states of all nodes and of the groups of *namespace*, None for all jobs. Loop thread."""
        return await self.ask(GetStatus(namespace), Status, 10.0)

    async def find_worker(self, group: str, rank: int) -> FoundWorker:
        """Ask the head for the state of one worker of this process's job. Loop thread."""
        return await self.ask(FindWorker(self.namespace, group, rank), FoundWorker, 10.0)

    async def stop_cluster(self) -> None:
        """Stop the private cluster of this driver, and print the remaining output of its workers. Loop thread."""
        self._ending = True
        if self.head is not None:
            await self.head.request(StopCluster(stay=True), 10.0)
            await self.flush_output()
            await self.head.request(StopCluster(), 10.0)
            self._stopped = True  # no head is left for a Goodbye

    async def flush_output(self) -> None:
        """Get and print the output of this job's workers that has not arrived, because the driver ends. Loop thread.

        The head asks the agentds to send it. `output_left` then says if some output may be missing in the terminal.
        """

        async def ask(wait_s: float) -> int:
            return (await self.ask(FlushLogs(self.namespace, wait_s), Flushing, END_S)).agents

        if self.head is not None and self.head.welcome is not None and self._gone is None:
            await self._output.flush(ask)

    @property
    def output_left(self) -> bool:
        """True if some output of workers was not printed in the driver, or if that is unknown."""
        return self._output.left

    @property
    def failure(self) -> str:
        """The first of these that happened: a group or worker failed, a failed call was not awaited, or output of
        workers may not have been printed. "" if none did.
        """
        if self.groups.first_failure:
            return self.groups.first_failure
        if self.lost.count:
            return "a call failed whose result nobody took"
        return "output of workers may be missing here" if self.output_left else ""

    # --- the end ---

    def daemon_died(self, reason: str) -> None:
        """Fail all calls on all groups, because the private agentd has died, and every worker with it. Loop thread."""
        self._end_all(RlinfActorsError(f"the cluster is gone: {reason}\n{_START_AGAIN}"))

    def head_lost(self, reason: str) -> None:
        """Close the session and fail all calls on all groups, because the session with the head has ended. Loop thread.

        *reason* says why, for the error messages: the head is lost, or has declared this process dead.
        """
        self._end_all(NodeLostError(f"{reason}; its workers end without it. {_START_AGAIN}"))

    def _declared_dead(self, reason: str) -> None:
        self._on_given_up(reason)
        self.head_lost(reason)

    def _fail_calls(self) -> None:
        """Fail all calls on all groups, because the driver ends. The session goes on. Any thread."""
        error = RlinfActorsError("this driver ends, because a call failed and nobody awaits it: its error was logged")
        self.lost.expected(error)
        for group in self.groups.all():
            group.fail(error)

    def _end_all(self, error: RlinfActorsError) -> None:
        if self._gone is None and not self._ending and self.role == "driver":
            log.error("%s", error)  # a driver without a pending call would not get the error
        self._gone = error
        self._paths.close()
        if self.head is not None:
            self.head.close(str(error), 0, error)
        self.groups.close_all(lambda group: error)

    def check_usable(self) -> None:
        """Raise UsageError if this process is a fork of the process that owns the connections."""
        forks.check(self.io.made_in)

    def close(self) -> None:
        """Send a Goodbye, close every socket and stop the I/O thread. Blocks; calling twice is harmless."""
        if self.closed:
            return
        self.closed = self.groups.closed = True
        self.lost.close()
        if self.emulated is not None and not self.io.inside():
            self.emulated.drain()
        if not self.io.inside():
            self.io.submit(self._close()).result()
            self.io.stop()
        if self._switches_sooner:
            switch_interval.restore()
        self.lost.close()  # again: for calls that the end itself failed, and errors that no loop's handler has taken
        self._output.close(self.logs_moved)

    async def _close(self) -> None:
        self._waits.close()
        self.progress.close()
        self._trace.close()
        self._paths.close()
        text = "this process closed its connection to the cluster"
        self.groups.close_all(lambda group: GroupClosedError(f"group {group.name!r}: {text}"))
        self.groups.clear()
        if self.head is not None:
            self.head.close(self.lost.farewell, 0 if self._stopped else 200, UsageError(SHUT_DOWN))
        await self._bulk.close()
        self.network.close()
        if self._memory is not None:
            self._memory.close()

    # --- what the head says ---

    def _noticed(self, body: Body) -> None:
        if isinstance(body, WorkerChanged):
            self.groups.workers_changed(body)
        elif isinstance(body, ClientGone):
            self.watched.gone(body.incarnation)
        elif isinstance(body, LogLines):
            self._output.show(body)
        elif isinstance(body, Warn):
            if body.text not in self._warned:
                self._warned.add(body.text)
                log.warning("%s", body.text)
        elif isinstance(body, Goodbye):
            self._on_lost(body.reason)
            (self._declared_dead if body.lost else self.head_lost)(body.reason)
        elif (answer := self._trace.answer(body)) is not None:
            self._tell(answer)

    def _notice_failed(self, body: Body, error: InternalError) -> None:
        """Handle an internal error: this process failed to handle a notice of the head.

        If the notice is about workers of a group, fail all calls on the group with *error*. If the notice
        has ended the session, fail all calls on all groups.
        """
        if isinstance(body, WorkerChanged):
            group = self.groups.get(body.namespace, body.group)
            if group is not None:
                group.fail(error)
        elif isinstance(body, Goodbye):
            self._end_all(error)

    def _head_returned(self) -> None:
        """Tell a restarted head what it does not know: which groups this process uses, and whose ends it waits for."""
        self.watched.renew()
        self._tell(self.groups.handles())

    def node_registered(self, epoch: str, again: bool) -> None:
        """Renew the session with the head, if there is one, because this node's agentd has registered with the head.

        Loop thread. *epoch* and *again* are those of `HeadSession.node_registered`.
        """
        if self.head is not None:
            self.head.node_registered(epoch, again)

    def _tell(self, body: Body) -> None:
        if self.head is not None and not self.closed:
            self.head.notify(body)


def _runs_tests() -> bool:
    """Return True if pytest runs in this process: lost errors must not change pytest's exit code.

    Return False in a script that only imports pytest.
    """
    plugin = sys.modules.get("rlinf_actors.testing.pytest_plugin")  # pytest has loaded it if it runs
    return plugin is not None and bool(plugin.runs)
