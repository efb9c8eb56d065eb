"""Cluster: the nodes that a driver or worker launches groups on. A process has at most one.

A driver's Cluster owns the Runtime of the process and, if no head was given, the EmbeddedDaemon of a private cluster. A
worker's Cluster uses the Runtime of the worker. Methods run on the caller's thread and submit coroutines to the I/O
thread.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import logging
import os
import uuid
from collections.abc import Callable, Collection, Coroutine, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, overload

from rlinf_actors import forks
from rlinf_actors.cluster.cluster_names import ClusterNames
from rlinf_actors.cluster.cluster_nodes import NodesTable, Pieces
from rlinf_actors.cluster.connect import (
    ClusterArguments,
    Connecting,
    EffectiveArguments,
    StartLock,
    Watch,
    code_source,
    learn_nodes,
    worker_job,
)
from rlinf_actors.cluster.event_stream import EventCursor, EventStream
from rlinf_actors.cluster.job_trace import JobTrace, TracedCluster
from rlinf_actors.cluster.local_daemon import EmbeddedDaemon
from rlinf_actors.cluster.service import import_paths
from rlinf_actors.errors import ConfigError, PlacementError, RlinfActorsError, UsageError
from rlinf_actors.hardware import extensions
from rlinf_actors.hardware.configured import without_types
from rlinf_actors.model.node import CLUSTER_GROUP, NodeGroupInfo, NodeInfo
from rlinf_actors.net.host import endpoint_of
from rlinf_actors.net.socket_security import Security
from rlinf_actors.runtime.future import AsyncWork
from rlinf_actors.runtime.log_printer import say
from rlinf_actors.runtime.runtime import Runtime
from rlinf_actors.settings import NAMESPACE
from rlinf_actors.wire.protocol import waiting

if TYPE_CHECKING:
    from rlinf_actors.group.group import WorkerGroup
    from rlinf_actors.wire.values import NodeState
    from rlinf_actors.worker.worker import Worker

T = TypeVar("T")
W = TypeVar("W", bound="Worker")

log = logging.getLogger(__name__)

STOP_GRACE_S = 2.0
"""Seconds between SIGTERM and SIGKILL for groups that still run when the Cluster is shut down."""

_start_lock = StartLock()


class Cluster(ClusterNames, TracedCluster, NodesTable):
    """The cluster on which this process launches groups.

    If a head is configured, ``Cluster()`` connects to the head and waits for the nodes. If no head is configured and
    one node is enough, it starts a private cluster: one node in a child process, which ends with this process.

    A process has one Cluster: a second ``Cluster()`` returns the same object, and waits if another thread or task is
    still starting it. In a worker, ``Cluster()`` is the cluster that the worker belongs to. The constructor blocks; in
    an event loop use `connect`.

    Args:
        num_nodes: number of nodes to wait for; default: that of the configuration, else 1. 0 for all that have
            registered, and at least one.
        cluster_cfg: the ``cluster:`` section: a mapping, the path of a YAML file, or an OmegaConf DictConfig.
        distributed_log_dir: directory on this machine for the workers' output: ``<group>/rank_<rank>.log``.
        head: address of the head, ``HOST:PORT`` (env RLINF_HEAD).
        namespace: name of the job; unique by default. Processes of one namespace find each other's groups.
        keys: directory of the key files (env RLINF_ACTORS_KEYS).
        timeout: seconds to wait for the head and the nodes, None without limit.

    Raises:
        ConfigError: the configuration is wrong, or the arguments differ from those of the running Cluster.
        ClusterTimeoutError: the head does not answer, or nodes are missing; the message names them.
        UsageError: the agentd of the running private Cluster has died: call shutdown() on the Cluster first.
    """

    _current: ClassVar[Cluster | None] = None

    def __new__(
        cls,
        num_nodes: int | None = None,
        cluster_cfg: Any = None,
        distributed_log_dir: str | os.PathLike[str] | None = None,
        *,
        head: str | None = None,
        namespace: str | None = None,
        keys: str | None = None,
        timeout: float | None = None,
    ) -> Cluster:
        """Return the running Cluster of this process, or start one. Blocks until the nodes are ready."""
        asked = ClusterArguments(num_nodes, cluster_cfg, distributed_log_dir, head, namespace, keys)
        with _start_lock.held():
            return cls._open(asked, timeout, lambda future: None)

    @classmethod
    def connect(
        cls,
        num_nodes: int | None = None,
        cluster_cfg: Any = None,
        distributed_log_dir: str | os.PathLike[str] | None = None,
        *,
        head: str | None = None,
        namespace: str | None = None,
        keys: str | None = None,
        timeout: float | None = None,
    ) -> Connecting[Cluster]:
        """Return the running Cluster, or start one, without blocking the event loop.

        Write ``cluster = await Cluster.connect(...)`` or ``async with Cluster.connect(...) as cluster``. If the task is
        cancelled, the start is undone first. The arguments and errors are those of ``Cluster()``.
        """
        asked = ClusterArguments(num_nodes, cluster_cfg, distributed_log_dir, head, namespace, keys)
        return Connecting(_start_lock, partial(cls._open, asked, timeout), cls._undo, cls.__aexit__)

    @classmethod
    def _open(cls, asked: ClusterArguments, timeout: float | None, watch: Watch) -> Cluster:
        """Return the running Cluster, or start one and block until the nodes are ready. Requires the start lock."""
        # watch: called with the future of the start, so that the caller can cancel the start
        try:
            timeout = waiting(timeout)
        except ValueError as error:
            raise ConfigError(str(error), path="timeout") from None
        current = cls._live()
        if current is not None:
            if current._gone:
                raise UsageError(f"the Cluster of this process is gone: {current._gone}")
            nodes = (current._wanted, current.num_nodes)
            running = EffectiveArguments(nodes, current.config, current.log_dir, current._endpoint, current.namespace)
            running.check(asked)
            current._shared = True
            return current
        cluster = super().__new__(cls)
        cluster._prepare(asked)
        starting: concurrent.futures.Future[None] | None = None
        try:
            if cluster._job is not None:
                cluster._job.connect()
            starting = cluster.runtime.io.submit(cluster._start(timeout))
            watch(starting)
            starting.result()
        except BaseException:
            if starting is not None:
                starting.cancel()
            cluster.shutdown()
            raise
        Cluster._current = cluster
        return cluster

    @staticmethod
    def _undo(cluster: Cluster) -> None:
        """Shut down *cluster*, whose start was cancelled, unless another caller uses it already. Blocks."""
        with _start_lock.held():
            if not cluster._shared:
                cluster.shutdown()

    def _prepare(self, asked: ClusterArguments) -> None:
        self._states: list[NodeState] = []
        self._nodes: list[NodeInfo] = []
        self._groups: dict[str, NodeGroupInfo] = {}
        self._pieces: Pieces = {}
        self._daemon: EmbeddedDaemon | None = None
        self._starting: asyncio.Task[None] | None = None
        self._connected = self._shared = self._closed = False
        self._ending: concurrent.futures.Future[None] | None = None
        self._gone = ""
        self._owner_pid = os.getpid()
        self._made_in = forks.generation
        settings, job = asked.settings(), worker_job()
        import_paths()  # resolves links, which a launch in an event loop does not
        if settings.ext_module and job is None:
            extensions.load_module(settings.ext_module)
        self.config = asked.config() or (job.extras().get("cluster_config") if job else None)
        self.log_dir = asked.directory() or (job.extras().get("log_dir") if job else None)
        self.code_source = code_source(self.config, settings, job is not None)
        self._wanted = asked.wanted(self.config, job.extras().get("num_nodes", 1) if job else asked.usual(settings))
        self._endpoint = endpoint_of(job.head, "head") if job else asked.endpoint(settings, self._wanted)
        self._job = job
        if job is not None:
            self.namespace = job.runtime.namespace
            self.runtime = job.runtime
        else:
            self._named = bool(asked.chosen_namespace())
            self.namespace = asked.chosen_namespace() or f"job-{uuid.uuid4().hex[:12]}"
            security, lost = Security.toward(self._endpoint, settings, "driver"), self._session_ended
            self.runtime = Runtime("driver", self.namespace, self.log_dir, security=security, on_lost=lost)
            self._trace = JobTrace.start(self.runtime, self.config.tracer if self.config else None, self.log_dir)

    async def _start(self, timeout: float | None) -> None:
        self._starting = asyncio.current_task()
        try:
            if self._job is None:
                await self._reach_head(timeout)
            self._states, self._pieces, self._groups = await learn_nodes(
                self.runtime, self._job, self.config, self._wanted, timeout
            )
        except asyncio.CancelledError:
            if self._gone and not self._closed:
                raise RlinfActorsError(f"the private agentd ended while the Cluster started: {self._gone}") from None
            raise
        self._nodes = list(self._groups[CLUSTER_GROUP].nodes)

    async def _reach_head(self, timeout: float | None) -> None:
        if not self._endpoint:
            self._daemon = EmbeddedDaemon(self._daemon_died)
            self._endpoint = await self._daemon.start(timeout)
        if self._closed or self._gone:
            raise asyncio.CancelledError  # shut down while the daemon became ready
        await self.runtime.connect(self._endpoint, timeout if timeout is not None else 30.0)
        self._connected = True
        atexit.register(self.shutdown)

    def _session_ended(self, reason: str) -> None:
        if not self._closed:
            log.warning("the head ended this session: %s", reason)

    def _daemon_died(self, reason: str) -> None:
        """Fail all calls, or the start if it is under way, because the private agentd has died. Loop thread."""
        self._gone = reason
        self.runtime.daemon_died(reason)
        if self._endpoint and self._starting is not None:
            self._starting.cancel()  # no head will answer the start; if it has ended, nothing happens

    @overload
    def shutdown(self, async_op: Literal[False] = False) -> None: ...

    @overload
    def shutdown(self, async_op: Literal[True]) -> AsyncWork[None]: ...

    def shutdown(self, async_op: bool = False) -> AsyncWork[None] | None:
        """End the groups that this driver owns, disconnect from the head, and end a private cluster.

        If the head is silent for 5 s, the shutdown goes on without its answer. If Ctrl-C interrupts this call, the
        shutdown goes on, and the next call or the end of the interpreter waits for it. If the shutdown fails, the next
        call tries again. In a worker, only the Cluster object is closed.

        Args:
            async_op: True to return an AsyncWork at once. Cancelling a task that awaits it does not stop the shutdown.
        """
        ending = self._begin_end()
        if async_op:
            return AsyncWork.on_thread(lambda: self._wait_for(ending), "shutdown() of the Cluster")
        self._wait_for(ending)
        return None

    async def shutdown_async(self) -> None:
        """Shut down the Cluster without blocking the event loop; like ``await cluster.shutdown(async_op=True)``."""
        await self.shutdown(async_op=True)

    def _begin_end(self) -> concurrent.futures.Future[None] | None:
        if Cluster._current is self:
            Cluster._current = None
        if self._owner_pid != os.getpid() or not hasattr(self, "runtime") or self.runtime.closed:
            return None
        self._closed = True
        if self._job is not None:
            return None
        ending = self._ending
        if ending is None or (ending.done() and (ending.cancelled() or ending.exception() is not None)):
            self._ending = self.runtime.io.submit(self._end())
        return self._ending

    def _wait_for(self, ending: concurrent.futures.Future[None] | None) -> None:
        if ending is not None:
            ending.result()
            atexit.unregister(self.shutdown)
            self.runtime.close()

    async def _end(self) -> None:
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
            await asyncio.wait([self._starting])  # the start stops the daemon itself; its caller gets the error
        self.runtime.lost.close()
        # for traces and profiles too; else the end of a private cluster stops the groups
        waits = self._daemon is None or self._trace is not None or (self.config and self.config.profiling)
        stopped = await self.runtime.groups.stop_owned(STOP_GRACE_S) if waits else True
        await self._finish_trace(whole=self._connected)
        if self._daemon is None:
            if stopped:
                await self.runtime.flush_output()
            return
        kept = await self._daemon.stop(self.runtime.stop_cluster if self._connected else None, failed=self._failure)
        self.runtime.logs_moved = (self._daemon.run_dir, kept)
        if kept:
            say(f"the logs of this private cluster are kept in {kept} because {self._failure()}")

    def _failure(self) -> str:  # "" if nothing failed
        return "its daemon ended" if self._gone else self.runtime.lost.failure or self.runtime.failure

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self.runtime.lost.script_raised(error if self._job is None else None)  # in a worker no script ends
        self.shutdown()

    async def __aenter__(self) -> Cluster:
        return self

    async def __aexit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self.runtime.lost.script_raised(error if self._job is None else None)  # in a worker no script ends
        await self.shutdown_async()

    @classmethod
    def _live(cls) -> Cluster | None:
        current = Cluster._current
        usable = current is not None and not current._closed and current._owner_pid == os.getpid()
        return current if usable else None

    @classmethod
    def current(cls) -> Cluster:
        """Return the Cluster of this process. If a worker has none, start it and block until the nodes are ready.

        In an event loop, ``await Cluster.connect()`` starts it without blocking.

        Raises:
            UsageError: this driver has no Cluster.
        """
        current = cls._live()
        if current is not None:
            return current
        if worker_job() is not None:
            return Cluster()
        if cls._current is not None:
            forks.check(cls._current._made_in)
        raise UsageError("no Cluster is running in this process: make one by Cluster(...) or Cluster.connect(...)")

    @classmethod
    def _asking(cls, ask: Callable[[Cluster], Coroutine[Any, Any, T]], what: str) -> AsyncWork[T]:
        """Run ``ask(cluster)`` on the I/O thread. A worker without a Cluster starts it; a driver raises UsageError."""
        known, job = cls._live(), worker_job()
        if known is None and job is None:
            known = cls.current()  # raises

        async def run() -> T:
            return await ask(known if known is not None else await cls.connect())

        runtime = known.runtime if known is not None else job.runtime  # type: ignore[union-attr]
        return AsyncWork.of(runtime.io, run(), what)

    @classmethod
    def has_initialized(cls) -> bool:
        """Return True if this process has a running Cluster."""
        return cls._live() is not None

    # --- nodes, as they were when the Cluster started; any thread ---

    @property
    def num_nodes(self) -> int:
        """Number of nodes of the cluster, as it was when the Cluster started."""
        return len(self._nodes)

    @property
    def num_accelerators(self) -> int:
        """Number of accelerators on all nodes together."""
        return sum(node.num_accelerators for node in self._nodes)

    @property
    def accelerator_ranks(self) -> list[list[int]]:
        """The cluster-wide ranks of the accelerators of each node; the index is the node's rank."""
        ranks, first = [], 0
        for node in self._nodes:
            ranks.append(list(range(first, first + node.num_accelerators)))
            first += node.num_accelerators
        return ranks

    def get_node_info(self, node_rank: int) -> NodeInfo:
        """Return the node with this rank, as it was when the Cluster started.

        Raises:
            PlacementError: the cluster has no such node.
        """
        if not 0 <= node_rank < len(self._nodes):
            raise PlacementError(f"node {node_rank} is not in this cluster, which has nodes 0-{len(self._nodes) - 1}")
        return self._nodes[node_rank]

    def get_node_ip(self, node_rank: int) -> str:
        """Return the IP address of the node with this rank. Raises PlacementError if the cluster has no such node."""
        return self.get_node_info(node_rank).node_ip

    def node_name(self, node_rank: int) -> str:
        """Return the host name of the node with this rank, for messages; the rank as text if there is no such node."""
        for state in self._states:
            if state.rank == node_rank:
                return state.report.hostname
        return str(node_rank)

    def here(self) -> int:
        """Return the rank of the node on this machine: the lowest if there are several, 0 if there is none."""
        return min((state.rank for state in self._states if state.report.host == self.runtime.host), default=0)

    def get_node_group(self, label: str = CLUSTER_GROUP) -> NodeGroupInfo | None:
        """Return the node group with this label, None if the configuration has no such group."""
        return self._groups.get(str(label))

    @property
    def ends_with(self) -> str:
        """The reason why this driver cannot launch a detached group, for an error; "" if it can, or in a worker."""
        if self._job is not None:
            return ""
        if self._daemon is not None:
            return "this cluster is private to the driver, and ends with it: start a head by `agentd --head`"
        if not self._named:
            return (
                "no other driver could find it, because nobody else knows the name of this job: name it, by "
                f"Cluster(namespace='...') or {NAMESPACE}"
            )
        return ""

    @overload
    @classmethod
    def get_alive_nodes(cls, async_op: Literal[False] = False) -> list[NodeInfo]: ...

    @overload
    @classmethod
    def get_alive_nodes(cls, async_op: Literal[True]) -> AsyncWork[list[NodeInfo]]: ...

    @classmethod
    def get_alive_nodes(cls, async_op: bool = False) -> list[NodeInfo] | AsyncWork[list[NodeInfo]]:
        """Ask the head which nodes are alive now, and return them with the hardware that they had at the start.

        It can be called on the class too, for the Cluster of this process.

        Args:
            async_op: True to return an AsyncWork at once instead of blocking.

        Raises:
            ClusterTimeoutError: the head has not answered for 10 s.
            NodeLostError: the session with the head has ended.
        """
        work = cls._asking(cls._alive_nodes, "get_alive_nodes()")
        return work if async_op else work.wait()

    async def _alive_nodes(self) -> list[NodeInfo]:
        status = await self.runtime.status("")  # the nodes only: no job has this name
        alive = {node.rank for node in status.nodes if node.state in ("ready", "suspect", "draining")}
        return [node for node in self._nodes if node.node_rank in alive]

    def events(
        self, since: int | None = 0, *, follow: bool = False, kinds: Collection[str] = (), group: str | None = None
    ) -> EventStream:
        """Return the head's events about this job and the nodes, to be iterated by ``for`` or ``async for``.

        Args:
            since: number (`seq`) of the event after which to begin; 0 for all past events, None for none of them.
            follow: True to go on with new events until the Cluster is shut down.
            kinds: return only events of these kinds (wire.values.EventKind); () for all kinds.
            group: return only events of the group with this name; None for all.

        Raises:
            UsageError: a kind is unknown.
        """
        return EventStream(self.runtime, lambda: self._closed, EventCursor(self.namespace, since, kinds, group), follow)

    def allocate(
        self,
        worker_cls: type[W],
        worker_name: str,
        node_rank: int = 0,
        env_vars: Mapping[str, str] | None = None,
        cls_args: tuple[Any, ...] = (),
        cls_kwargs: Mapping[str, Any] | None = None,
        max_concurrency: int | None = None,
        node_group_label: str | None = None,
    ) -> WorkerGroup[W]:
        """Launch a group of one worker of *worker_cls*, named *worker_name*, and return the group.

        *node_rank* is a node's rank in the cluster; with *node_group_label*, its index in that node group. *cls_args*
        and *cls_kwargs* go to the constructor. The other arguments and the errors are those of `GroupLauncher.launch`.
        """
        from rlinf_actors.placement.strategies import NodePlacementStrategy

        launcher = worker_cls.create_group(*cls_args, **dict(cls_kwargs or {}))
        placement = NodePlacementStrategy([node_rank], node_group_label)
        group: WorkerGroup[W] = launcher.launch(
            self, placement, name=worker_name, max_concurrency=max_concurrency, env_vars=dict(env_vars or {})
        )
        return group

    def extras(self) -> dict[str, Any]:
        """Return what ``Cluster()`` needs to know in a worker, to send it to each worker together with its class."""
        facts = {"num_nodes": self.num_nodes, "hardware_pieces": self._pieces, "log_dir": self.log_dir}
        return {"cluster_config": self.config and without_types(self.config), **facts}

    def __repr__(self) -> str:
        return f"<Cluster num_nodes={self.num_nodes}, namespace={self.namespace!r}>"
