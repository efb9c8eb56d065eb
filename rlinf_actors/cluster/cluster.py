"""Cluster: the nodes a driver or worker launches on. One a process."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import logging
import os
import uuid
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, overload

from rlinf_actors import forks
from rlinf_actors.cluster.cluster_nodes import ClusterView, Pieces
from rlinf_actors.cluster.connect import Asked, Connecting, InUse, Turns, Watch, learn_nodes, worker_job
from rlinf_actors.cluster.event_stream import EventCursor, EventStream
from rlinf_actors.cluster.local_daemon import EmbeddedDaemon
from rlinf_actors.cluster.service import import_paths
from rlinf_actors.errors import ConfigError, RlinfActorsError, UsageError
from rlinf_actors.hardware import extensions
from rlinf_actors.hardware.configured import without_types
from rlinf_actors.model.node import CLUSTER_GROUP, NodeInfo
from rlinf_actors.net.host import endpoint_of, free_port
from rlinf_actors.net.loop import Tasks
from rlinf_actors.net.socket_security import Security
from rlinf_actors.runtime.future import AsyncWork
from rlinf_actors.runtime.head_session import SILENT_HEAD_S
from rlinf_actors.runtime.log_printer import say
from rlinf_actors.runtime.remote_group import RemoteGroup
from rlinf_actors.runtime.runtime import Runtime
from rlinf_actors.settings import NAMESPACE
from rlinf_actors.wire.protocol import waiting

if TYPE_CHECKING:
    from rlinf_actors.group.group import WorkerGroup
    from rlinf_actors.worker.worker import Worker

T = TypeVar("T")
W = TypeVar("W", bound="Worker")

log = logging.getLogger(__name__)

STOP_GRACE_S = 2.0
"""Between SIGTERM and SIGKILL for groups that are still there when the cluster is shut down."""

_turns = Turns()


class Cluster(ClusterView):
    """The cluster of this process.

    With no head configured and one node, a private single-node cluster starts inside one child
    process and ends with this process, however it ends. Otherwise it connects to the head and waits
    until the nodes are there. A second ``Cluster()`` is the same object, also while the first one is
    still starting in another thread or task: it waits for that. In a worker, ``Cluster()`` is the
    worker's cluster.

    Args:
        num_nodes: nodes to wait for; default: the configuration's, or 1.
        cluster_cfg: the ``cluster:`` section: a mapping, a YAML file's path, or an OmegaConf DictConfig.
        distributed_log_dir: directory on every node for a log file per worker.
        head: the coordinator, ``HOST:PORT`` (env RLINF_HEAD).
        namespace: name of the job; unique by default. Groups are found by others in the same namespace.
        keys: directory of the key files to come in with (env RLINF_ACTORS_KEYS).
        timeout: seconds to wait for the head and the nodes, None for ever.

    Raises:
        ConfigError: the configuration is wrong, or what is given has another effect than the running
            Cluster's arguments and defaults.
        ClusterTimeoutError: the head does not answer, or nodes are missing (says which).
        UsageError: the running Cluster's private daemon has died: call shutdown() on it first.
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
        """The running Cluster if there is one, else a new one; waits for a start that is under way."""
        asked = Asked(num_nodes, cluster_cfg, distributed_log_dir, head, namespace, keys)
        with _turns.turn():
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
        """The same for asyncio: ``async with Cluster.connect(...) as cluster`` or ``await`` it. Nothing blocks.

        Cancelling it undoes what was started, before it is raised.
        """
        asked = Asked(num_nodes, cluster_cfg, distributed_log_dir, head, namespace, keys)
        return Connecting(_turns, partial(cls._open, asked, timeout), cls._undo, cls.shutdown_async)

    # --- life ---

    @classmethod
    def _open(cls, asked: Asked, timeout: float | None, watch: Watch) -> Cluster:
        """The running Cluster, or a new one. The caller has the turn; *watch* gets what this waits for."""
        try:
            timeout = waiting(timeout)
        except ValueError as error:
            raise ConfigError(str(error), path="timeout") from None
        current = cls._live()
        if current is not None:
            if current._gone:
                raise UsageError(f"the Cluster of this process is gone: {current._gone}")
            current._in_use().check(asked)
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
        """Whoever had this cluster started is gone: end it, unless others got it too. Blocks."""
        with _turns.turn():
            if not cluster._shared:
                cluster.shutdown()

    def _in_use(self) -> InUse:
        return InUse((self._wanted, self.num_nodes), self.config, self.log_dir, self._endpoint, self.namespace)

    def _prepare(self, asked: Asked) -> None:
        self.log_dir = asked.directory()
        self._states, self._nodes, self._groups = [], [], {}
        self._pieces: Pieces = {}
        self._daemon: EmbeddedDaemon | None = None
        self._starting: asyncio.Task[None] | None = None
        self._connected = self._shared = self._closed = False
        self._ending: concurrent.futures.Future[None] | None = None
        self._gone = ""
        self._failed = False  # the script, as far as this object knows
        self._owner_pid = os.getpid()
        self._made_in = forks.generation()
        settings, job = asked.settings(), worker_job()
        import_paths()  # resolves them, which a launch in an event loop does not
        if settings.ext_module and job is None:
            extensions.load_module(settings.ext_module)
        self.config = asked.config()
        if self.config is None and job is not None:
            self.config = job.extras().get("cluster_config")
        self._wanted = asked.wanted(self.config, job.extras().get("num_nodes", 1) if job else 1)
        self._endpoint = endpoint_of(job.head, "head") if job else asked.endpoint(settings, self._wanted)
        self._job = job
        if job is not None:
            self.namespace = job.runtime.namespace
            self.runtime = job.runtime
        else:
            self._named = bool(asked.namespace or os.environ.get(NAMESPACE))
            self.namespace = asked.namespace or os.environ.get(NAMESPACE) or f"job-{uuid.uuid4().hex[:12]}"
            security = Security.toward(self._endpoint, settings, "driver")
            self.runtime = Runtime("driver", self.namespace, security=security, on_lost=self._head_said_goodbye)

    async def _start(self, timeout: float | None) -> None:
        """Connect and learn the nodes. Runs on the runtime's loop."""
        self._starting = asyncio.current_task()
        try:
            if self._job is None:
                await self._reach_head(timeout)
            learned = await learn_nodes(self.runtime, self._job, self.config, self._wanted, timeout)
        except asyncio.CancelledError:
            if self._gone and not self._closed:
                raise RlinfActorsError(f"the private agentd ended while the Cluster started: {self._gone}") from None
            raise
        self._states, self._pieces, self._groups = learned.states, learned.pieces, learned.groups
        self._nodes = list(self._groups[CLUSTER_GROUP].nodes)

    async def _reach_head(self, timeout: float | None) -> None:
        if not self._endpoint:
            self._daemon = EmbeddedDaemon(self._daemon_died)
            self._endpoint = await self._daemon.start([], timeout)
        if self._closed or self._gone:
            raise asyncio.CancelledError  # it came as the daemon said that it is ready
        await self.runtime.connect(self._endpoint, timeout if timeout is not None else 30.0)
        self._connected = True
        atexit.register(self.shutdown)

    def _daemon_died(self, reason: str) -> None:
        """The embedded daemon is gone, and every worker with it. Loop thread."""
        self._gone = reason
        self.runtime.daemon_died(reason)
        if self._endpoint and self._starting is not None:
            self._starting.cancel()  # nobody is left to answer it; one that is over is not changed

    @overload
    def shutdown(self, async_op: Literal[False] = False) -> None: ...

    @overload
    def shutdown(self, async_op: Literal[True]) -> AsyncWork[None]: ...

    def shutdown(self, async_op: bool = False) -> AsyncWork[None] | None:
        """End what this process started: its groups, and the embedded cluster. Twice is fine.

        A head that says nothing is waited for 5 s. After Ctrl-C it goes on; the next call, or the end of the
        interpreter, waits for it. After a failure that call tries again.

        Args:
            async_op: return an AsyncWork at once; else block. Cancelling who awaits it is as Ctrl-C.
        """
        ending = self._begin_end()
        if async_op:
            return AsyncWork.on_thread(lambda: self._wait_for(ending), "shutdown() of the Cluster")
        self._wait_for(ending)
        return None

    async def shutdown_async(self) -> None:
        """Await ``shutdown(async_op=True)``."""
        await self.shutdown(async_op=True)

    def _begin_end(self) -> concurrent.futures.Future[None] | None:
        """Begin the end, or find the one that is under way; None if there is nothing to end."""
        if Cluster._current is self:
            Cluster._current = None
        if self._owner_pid != os.getpid() or not hasattr(self, "runtime") or self.runtime.closed:
            return None
        self._closed = True
        if self._job is not None:
            return None
        if self._ending is None or _failed(self._ending):
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
            await asyncio.wait([self._starting])  # it ends its daemon; what it raises goes to who waits for it
        self._failed = self._failed or self.runtime.lost.script_failed
        self.runtime.lost.close()
        if self._daemon is not None:
            kept = await self._daemon.stop(self._ask_daemon_to_end, failed=self._something_failed)
            self.runtime.logs_moved = (self._daemon.run_dir, kept)
            if kept:
                say(f"the logs of this private cluster are kept in {kept}")
            return
        groups = [group for group in self.runtime.groups.all() if group.owned and not group.gone.done()]
        if await self._end_groups(groups):
            await self.runtime.flush_output()

    async def _end_groups(self, groups: Sequence[RemoteGroup]) -> bool:
        """End them by the head; False if that is gone, which must not hold this process."""
        ends = [self.runtime.groups.stop(group, STOP_GRACE_S) for group in groups]
        told: asyncio.Future[list[BaseException | None]] = asyncio.gather(*ends, return_exceptions=True)
        silent = Tasks().start(self.runtime.head_silent(SILENT_HEAD_S), "waiting for the head's silence")
        either: list[asyncio.Future[Any]] = [told, silent]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        silent.cancel()
        if told.done():
            for outcome in told.result():
                if isinstance(outcome, Exception):
                    log.warning("a group was not stopped by this process; the head does it: %s", outcome)
            return True
        left = [group.name for group in groups if not group.gone.done()]
        told.cancel()
        await asyncio.wait([told])
        if not told.cancelled():
            told.exception()  # a cancelled gather() has one, and asyncio would report that nobody took it
        log.warning(
            "the head at %s has not answered for %g s and was not told to end %s. Their workers may run as long as "
            "this process does. When it ends, its agentd ends those on this machine; those on others end when a "
            "head is there again. Without a head they end after its grace (120 s by default)",
            self._endpoint, SILENT_HEAD_S, ", ".join(f"group {name!r}" for name in left),
        )  # fmt: skip
        return False

    def _something_failed(self) -> bool:
        """Whether the logs of a private cluster may be needed."""
        runtime = self.runtime
        return bool(self._failed or self._gone or runtime.groups.failures or runtime.lost.count or runtime.output_left)

    async def _ask_daemon_to_end(self) -> bool:
        if not self._connected:
            return False
        await self.runtime.stop_cluster()
        return True

    def _head_said_goodbye(self, reason: str) -> None:
        if not self._closed:
            log.warning("the head ended this session: %s", reason)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        self._failed = self._failed or kind is not None
        self.shutdown()

    async def __aenter__(self) -> Cluster:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        self._failed = self._failed or kind is not None
        await self.shutdown_async()

    @classmethod
    def _live(cls) -> Cluster | None:
        current = Cluster._current
        if current is None or current._closed or current._owner_pid != os.getpid():
            return None
        return current

    @classmethod
    def current(cls) -> Cluster:
        """Return the Cluster of this process; in a worker it is made on first use.

        That first use blocks in a worker: ``await Cluster.connect()`` makes it without.

        Raises:
            UsageError: there is none.
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
        """Run a coroutine function on the I/O thread of this process's Cluster, which a worker makes on first use.

        Raises:
            UsageError: there is none.
        """
        known, job = cls._live(), worker_job()
        if known is None and job is None:
            known = cls.current()  # raises

        async def run() -> T:
            return await ask(known if known is not None else await cls.connect())

        runtime = known.runtime if known is not None else job.runtime  # type: ignore[union-attr]  # one of them is there
        return AsyncWork.of(runtime.io, run(), what)

    @classmethod
    def has_initialized(cls) -> bool:
        """Return True if a Cluster is running in this process."""
        return cls._live() is not None

    # --- what it is ---

    @property
    def ends_with(self) -> str:
        """What of this driver ends every group at the latest, "" for a worker, or a named job on a standing head."""
        if self._job is not None:
            return ""
        if self._daemon is not None:
            return "this cluster is private to the driver, and ends with it: start a head by `agentd --head`"
        if not self._named:
            return (
                "no other driver could find it in a namespace that nobody else knows: name it, by "
                f"Cluster(namespace='...') or {NAMESPACE}"
            )
        return ""

    @overload
    def get_alive_nodes(self, async_op: Literal[False] = False) -> list[NodeInfo]: ...

    @overload
    def get_alive_nodes(self, async_op: Literal[True]) -> AsyncWork[list[NodeInfo]]: ...

    def get_alive_nodes(self, async_op: bool = False) -> list[NodeInfo] | AsyncWork[list[NodeInfo]]:
        """Return the nodes that the head hears from now. One round trip.

        Args:
            async_op: return an AsyncWork of them at once; else block.

        Raises:
            ClusterTimeoutError: the head has not answered for 10 s.
            NodeLostError: the session with the head has ended.
        """
        work = AsyncWork.of(self.runtime.io, self._alive_nodes(), "get_alive_nodes()")
        return work if async_op else work.wait()

    async def _alive_nodes(self) -> list[NodeInfo]:
        status = await self.runtime.status(self.namespace)
        alive = {node.rank for node in status.nodes if node.state in ("ready", "suspect", "draining")}
        return [node for node in self._nodes if node.node_rank in alive]

    def events(
        self, since: int | None = 0, *, follow: bool = False, kinds: Collection[str] = (), group: str | None = None
    ) -> EventStream:
        """What happened in this job and to the cluster's nodes; ``async for`` or ``for`` over it.

        Args:
            since: number (`seq`) of the last event that is known already, 0 for all that the head keeps, None for
                none of the past.
            follow: go on with what happens from now, until the Cluster is shut down.
            kinds: only events of these kinds (wire.values.EventKind), () for all.
            group: only those of the group of that name.

        Raises:
            UsageError: there is no such kind.
        """
        return EventStream(self.runtime, lambda: self._closed, EventCursor(self.namespace, since, kinds, group), follow)

    def find_free_port(self, max_port_num: int | None = None) -> int:
        """A TCP port that is free on this machine now, below *max_port_num* if given.

        Nothing holds it: whoever binds it first has it, so bind it soon. In a worker `Worker.acquire_free_port` holds
        one, and does so on the worker's own node.
        """
        return free_port(max_port_num)

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
        """Launch one worker of *worker_cls* on a node, as a group of its own called *worker_name*."""
        from rlinf_actors.placement.strategies import NodePlacementStrategy

        group: WorkerGroup[W] = worker_cls.create_group(*cls_args, **dict(cls_kwargs or {})).launch(
            self,
            NodePlacementStrategy([node_rank], node_group_label),
            name=worker_name,
            max_concurrency=max_concurrency,
            env_vars=dict(env_vars or {}),
        )
        return group

    def extras(self) -> dict[str, Any]:
        """What goes along with every worker class, so that ``Cluster()`` there is like this one."""
        config = self.config and without_types(self.config)
        return {"cluster_config": config, "num_nodes": self.num_nodes, "hardware_pieces": self._pieces}

    def __repr__(self) -> str:
        return f"<Cluster of {self.num_nodes} nodes, namespace {self.namespace!r}>"


def _failed(ending: concurrent.futures.Future[None]) -> bool:
    return ending.done() and (ending.cancelled() or ending.exception() is not None)
