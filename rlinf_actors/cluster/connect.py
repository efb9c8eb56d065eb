"""The start of a Cluster: its arguments, its nodes, the lock for one start at a time, and the Cluster of a worker.

A blocking start runs on the caller's thread. A start for asyncio runs on a thread of its own, so that it ends even if
another caller blocks the event loop and waits for the same start. The holder of the StartLock always releases it, also
when the start fails.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec
from msgspec.structs import replace

from rlinf_actors import exhaustion
from rlinf_actors.cluster.cluster_nodes import (
    ANSWER_S,
    Pieces,
    ask_nodes,
    node_infos,
    pieces_of,
    read_config,
    with_pieces,
)
from rlinf_actors.codesync.source import CodeSource, find_source
from rlinf_actors.errors import ConfigError, UsageError
from rlinf_actors.hardware import extensions
from rlinf_actors.hardware.configured import without_types
from rlinf_actors.model.names import wrong_name
from rlinf_actors.model.node import NodeGroupInfo
from rlinf_actors.net.discovery import CLIENT_FILE, PRIVATE, check_name, client_settings
from rlinf_actors.net.host import endpoint_of
from rlinf_actors.net.loop import Tasks
from rlinf_actors.net.socket_security import is_tcp
from rlinf_actors.placement.node_groups import build_node_groups
from rlinf_actors.placement.node_order import missing_ranks
from rlinf_actors.plurals import counted
from rlinf_actors.runtime import driver_end
from rlinf_actors.runtime.future import Promise
from rlinf_actors.runtime.progress import Facts, nodes_facts, showing
from rlinf_actors.runtime.runtime import Runtime
from rlinf_actors.settings import NAMESPACE, Settings
from rlinf_actors.wire.client_messages import Enumerated
from rlinf_actors.wire.values import NodeState

if TYPE_CHECKING:
    from rlinf_actors.config.cluster_config import ClusterConfig

T = TypeVar("T")

Watch = Callable[["concurrent.futures.Future[Any]"], None]
"""Takes the future that a start waits for. Cancelling that future ends the start."""


class StartLock:
    """A lock of the process, so that only one thread at a time starts a Cluster. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended: Promise[None] | None = None
        self._thread = 0
        self._pid = 0

    def take(self, thread: int = 0) -> Promise[None] | None:
        """Take the lock if it is free. Never blocks.

        Args:
            thread: id of the thread that will start the Cluster; 0 if that thread does not exist yet.

        Returns:
            None if the caller now has the lock; else a promise that resolves when the holder releases the lock.

        Raises:
            UsageError: *thread* itself has the lock, so that it would wait for itself.
        """
        with self._lock:
            if self._ended is not None and self._pid == os.getpid():  # a fork's copy of a start never ends
                if thread and thread == self._thread:
                    raise UsageError("a Cluster is being started by this thread: it cannot start another meanwhile")
                return self._ended
            self._ended, self._thread, self._pid = Promise("the start of another Cluster"), thread, os.getpid()
            return None

    def belongs_to(self, thread: int) -> None:
        """Record the id of the thread that starts the Cluster, because `take` was called before the thread existed."""
        self._thread = thread

    def release(self) -> None:
        with self._lock:
            ended, self._ended, self._thread = self._ended, None, 0
        if ended is not None:
            ended.resolve(None)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Block until the lock is free, and hold it during the ``with`` block."""
        while (current := self.take(threading.get_ident())) is not None:
            current.wait()
        try:
            yield
        finally:
            self.release()


class _StartThread(Generic[T]):
    """A thread that starts a Cluster for asyncio code.

    The code that makes this object has taken the StartLock; the thread releases it. `ended` resolves when the thread
    has finished; then `result` has the Cluster, or `error` says why it was not started.
    """

    def __init__(self, lock: StartLock, start: Callable[[Watch], T]) -> None:
        self.ended: Promise[None] = Promise("the start of a Cluster")
        self.result: T | None = None
        self.error: BaseException | None = None
        self._start_lock = lock
        self._start = start
        self._lock = threading.Lock()
        self._cancelled = False
        self._future: concurrent.futures.Future[Any] | None = None
        try:
            # a daemon: a start that no task waits for any more must not delay the end of the interpreter
            exhaustion.start(threading.Thread(target=self._run, name="rlinf-actors-start", daemon=True))
        except BaseException:
            lock.release()
            raise

    def cancel(self) -> None:
        """Cancel the start. The thread undoes what it has done so far, and then ends. Any thread."""
        with self._lock:
            self._cancelled = True
        if self._future is not None:
            self._future.cancel()

    def _watch(self, future: concurrent.futures.Future[Any]) -> None:
        with self._lock:
            self._future = future
        if self._cancelled:
            future.cancel()

    def _run(self) -> None:
        try:
            self._start_lock.belongs_to(threading.get_ident())
            self.result = self._start(self._watch)
        except BaseException as error:  # noqa: BLE001  # it is raised where the start is awaited
            self.error = error
        finally:
            self._start_lock.release()
            self.ended.resolve(None)


class Connecting(Generic[T]):
    """Result of ``Cluster.connect()``: ``await`` or ``async with`` starts the Cluster and returns it.

    Args:
        lock: the StartLock of this process.
        start: starts the Cluster or returns the running one; it blocks, and is called on a thread of its own.
        undo: shuts down a Cluster that was started although the awaiting task was cancelled; it blocks.
        close: the ``__aexit__`` of the Cluster: shuts it down at the end of the ``async with`` block.
    """

    def __init__(
        self,
        lock: StartLock,
        start: Callable[[Watch], T],
        undo: Callable[[T], None],
        close: Callable[[T, type[BaseException] | None, BaseException | None, TracebackType | None], Awaitable[None]],
    ) -> None:
        self._lock = lock
        self._start = start
        self._undo = undo
        self._close = close
        self._made: T | None = None

    async def _connect(self) -> T:
        while (current := self._lock.take()) is not None:
            await current
        thread = _StartThread(self._lock, self._start)
        try:
            await thread.ended
        except BaseException as error:
            thread.cancel()
            if isinstance(error, asyncio.CancelledError):  # anything else: the loop itself ends, nothing can be awaited
                await _to_the_end(self._undone(thread))
            raise
        if thread.error is not None:
            raise thread.error
        self._made = thread.result
        return thread.result  # type: ignore[return-value]

    async def _undone(self, thread: _StartThread[T]) -> None:
        await thread.ended
        if thread.result is not None:  # the start had ended before it could be cancelled
            await asyncio.to_thread(self._undo, thread.result)

    def __await__(self) -> Generator[Any, None, T]:
        return self._connect().__await__()

    async def __aenter__(self) -> T:
        return await self._connect()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._made is not None:
            await self._close(self._made, kind, error, trace)


async def _to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Await *work* to its end even if this task is cancelled meanwhile. CancelledError is not raised here."""
    task = Tasks().start(work, "undoing a start", expected=Exception)
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([task])
    task.result()


def code_source(config: ClusterConfig | None, settings: Settings, in_worker: bool) -> CodeSource | None:
    """Return the directory whose code this process sends to the workers that it launches, None for none.

    A worker sends the code that it runs itself, unchanged. Raises ConfigError if the directory does not exist.
    """
    if in_worker:
        copy = settings.code_dir
        return CodeSource(copy, file_bytes=sys.maxsize) if copy and os.path.isdir(copy) else None
    wanted = config.runtime if config is not None else None
    if wanted is None:
        return find_source(None, settings.code_working_dir)
    return find_source(wanted.working_dir, settings.code_working_dir, wanted.excludes, wanted.max_file_mb << 20)


@dataclass(frozen=True)
class ClusterArguments:
    """The arguments of Cluster as the caller gave them; None for an argument that was not given."""

    num_nodes: int | None = None
    cluster_cfg: Any = None
    log_dir: str | os.PathLike[str] | None = None
    head: str | None = None
    namespace: str | None = None
    keys: str | None = None

    def __post_init__(self) -> None:
        driver_end.prepare()  # here, since a start for asyncio runs on another thread than the main thread

    def chosen_namespace(self) -> str:
        """Return the namespace that the argument or the environment names, "" if none. Raises ConfigError."""
        name = self.namespace or os.environ.get(NAMESPACE, "")
        if name and (wrong := wrong_name(name, "a job")):
            raise ConfigError(wrong, path="namespace" if self.namespace else NAMESPACE)
        return name

    def config(self) -> ClusterConfig | None:
        return None if self.cluster_cfg is None else read_config(self.cluster_cfg)

    def settings(self) -> Settings:
        """Return the settings of this process, with the argument *keys* as the key directory if it was given."""
        settings = client_settings()
        return settings if self.keys is None else replace(settings, key_dir=self.keys, key_file=None)

    def directory(self) -> str | None:
        return None if self.log_dir is None else os.path.abspath(os.fspath(self.log_dir))

    def wanted(self, config: ClusterConfig | None, otherwise: int) -> int:
        """Return the number of nodes to wait for.

        It is the argument *num_nodes* of Cluster; if that was not given, the number in *config*; without *config*, it
        is *otherwise*. 0 is for the nodes that have registered; with *config* it counts as not given. Raises
        ConfigError if argument and *config* differ, or if the argument is no number of nodes.
        """
        given = self.num_nodes
        if given is not None and (not isinstance(given, int) or isinstance(given, bool) or given < 0):
            raise ConfigError(
                f"is {given!r}; it must be a whole number above 0, or 0 for the nodes that are there", path="num_nodes"
            )
        if given == 0 and config is None:
            return 0
        if config is not None and given and config.num_nodes != given:
            raise ConfigError(
                f"is {config.num_nodes} in cluster_cfg and {given} as an argument: give one of them",
                path="cluster.num_nodes",
            )
        return given or (config.num_nodes if config is not None else otherwise)

    def usual(self, settings: Settings) -> int:
        """Return the number of nodes to wait for if neither an argument nor a configuration says one."""
        return settings.num_nodes if (self.head or settings.head) not in (None, PRIVATE) else 1

    def endpoint(self, settings: Settings, wanted: int) -> str:
        """Return the endpoint of the head to connect to, "" to start a private cluster. Blocks to resolve a host name.

        *wanted* is the number of nodes to wait for. Raises ConfigError if the host name has no address, or if no head
        is configured and more than one node is wanted.
        """
        head = self.head or settings.head
        if head and head != PRIVATE:
            source = "head" if self.head else settings.head_from
            endpoint = endpoint_of(head, source)
            check_name(endpoint, source)
            return endpoint
        if wanted > 1:
            raise ConfigError(
                f"is {wanted}, and no head is known. For nodes on this machine alone run "
                f"`rlinf-actors run --nodes {wanted} -- python SCRIPT`. Else start `agentd --head` on one node and "
                f"`agentd --connect HOST:PORT` on the others, then pass head='HOST:PORT', set RLINF_HEAD, or write "
                f'head = "HOST:PORT" into /etc/{CLIENT_FILE}',
                path="num_nodes",
            )
        return ""


class EffectiveArguments(msgspec.Struct, frozen=True):
    """The arguments of the running Cluster with defaults filled in, to be compared with a later ``Cluster()``."""

    num_nodes: tuple[int, ...]  # accepted numbers: the requested and the actual one
    config: ClusterConfig | None
    log_dir: str | None  # absolute path
    head: str  # endpoint
    namespace: str

    def check(self, asked: ClusterArguments) -> None:
        """Raise ConfigError if the arguments *asked* of a later ``Cluster()`` differ from those of the running one.

        Arguments that were not given do not differ. The error's `path` is the name of the argument.
        """
        if asked.num_nodes and asked.num_nodes not in self.num_nodes:
            raise _differs("num_nodes", self.num_nodes[0], asked.num_nodes)
        config = asked.config()
        if config is not None and (self.config is None or without_types(config) != without_types(self.config)):
            raise _differs("cluster_cfg", self.config, asked.cluster_cfg)
        if asked.log_dir is not None and asked.directory() != self.log_dir:
            raise _differs("distributed_log_dir", self.log_dir, os.fspath(asked.log_dir))
        if asked.head is not None and not self._is_at(asked.head):
            raise _differs("head", self.head, asked.head)
        if asked.namespace is not None and asked.namespace != self.namespace:
            raise _differs("namespace", self.namespace, asked.namespace)

    def _is_at(self, head: str) -> bool:
        return not is_tcp(self.head) if head == PRIVATE else endpoint_of(head, "head") == self.head


def _differs(name: str, old: object, new: object) -> ConfigError:
    return ConfigError(
        f"a Cluster with {name}={old!r} is running in this process, and {name}={new!r} was asked for: "
        f"call shutdown() on it first, or use the running one by Cluster()",
        path=name,
    )


TIMEOUT_S = 30.0


class WorkerJob(msgspec.Struct):
    """Facts about the cluster of a worker process, with which user code in the worker can call ``Cluster()``.

    worker.main makes it before user code runs.
    """

    runtime: Runtime
    head: str  # endpoint
    extras: Callable[[], dict[str, Any]]  # returns the values of Cluster.extras() in the launching process
    node_rank: int = 0
    name: str = ""  # group:rank
    _lock: threading.Lock = msgspec.field(default_factory=threading.Lock)
    _session: concurrent.futures.Future[Any] | None = None

    def connect(self) -> Runtime:
        """Connect this worker to the head, unless it is connected, and return its runtime. Blocks.

        It is called when the worker first needs the head, because most workers never do. Raises UsageError in a fork of
        the worker's process.
        """
        self.runtime.check_usable()  # before a lock that another thread may have held when it was forked
        self._begin().result()
        return self.runtime

    async def connected(self) -> Runtime:
        """Connect this worker to the head, unless it is connected, and return its runtime. Loop thread."""
        await asyncio.shield(asyncio.wrap_future(self._begin()))
        return self.runtime

    def _begin(self) -> concurrent.futures.Future[Any]:
        with self._lock:
            session = self._session
            if session is None or (session.done() and session.exception() is not None):
                session = self._session = self.runtime.io.submit(self.runtime.connect(self.head, TIMEOUT_S))
            return session


_job: WorkerJob | None = None


def set_worker_job(job: WorkerJob) -> None:
    global _job
    _job = job


def worker_job() -> WorkerJob | None:
    """Return the WorkerJob of this worker process, None in a driver."""
    return _job


log = logging.getLogger(__name__)


async def learn_nodes(
    runtime: Runtime, job: WorkerJob | None, config: ClusterConfig | None, wanted: int, timeout: float | None
) -> tuple[list[NodeState], Pieces, dict[str, NodeGroupInfo]]:
    """Wait until the cluster has enough nodes, and learn about the nodes; part of the start of a Cluster. Loop thread.

    Args:
        runtime: a runtime that is connected to the head.
        job: the WorkerJob of a worker, which was sent the configured hardware of the nodes with its class; None in a
            driver, which asks the nodes for it.
        config: the ``cluster:`` section, None without one.
        wanted: number of nodes to wait for; 0 for all that have registered, and at least one.
        timeout: seconds to wait for the nodes, None without limit.

    Returns:
        The nodes as the head describes them, their configured hardware by node rank, and the node groups by label.

    Raises:
        ClusterTimeoutError: nodes are missing; the message names them.
        ConfigError: a node cannot have the configured hardware.
    """
    for sentence in config.scheduling.done_anyway() if config is not None and job is None else ():
        log.info("%s", sentence)

    async def look(_missing: bool) -> Facts:
        status = await runtime.status("")  # the nodes only: no job has this name
        return nodes_facts(status.nodes, wanted or 1)

    async with showing(look) if job is None else contextlib.nullcontext():
        nodes = await runtime.nodes(wanted or 1, timeout)
        if not wanted:
            nodes = await runtime.nodes(0, timeout)  # all that have registered
    for warning in nodes.warnings:
        log.warning("%s", warning)
    if job is None and config is not None and config.net_emulation is not None:
        from rlinf_actors.config.net_emulation_config import DRIVER

        near = [state.rank for state in nodes.nodes if state.report.host == runtime.host]
        runtime.emulate(config.net_emulation, DRIVER, min(near, default=-1))
    wanted = (
        wanted or missing_ranks({state.report.node_id: state.rank for state in nodes.nodes}, len(nodes.nodes) + 1)[0]
    )
    states = [state for state in nodes.nodes if 0 <= state.rank < wanted or job is not None]
    kinds = [one.type for state in states for one in state.report.resources if one.registered_by]
    if kinds:
        await asyncio.to_thread(extensions.load_accelerators, kinds)  # foreign code: not on this thread
    pieces: Pieces = {}
    if job is not None:
        pieces = job.extras().get("hardware_pieces", {})
        infos = with_pieces(node_infos(states), pieces)
    elif config is None:
        infos = node_infos(states)
    else:
        asked = ask_nodes(config, states, lambda query: runtime.ask(query, Enumerated, ANSWER_S), runtime.host)
        whom = counted(len(states), "node")
        infos = await runtime.progress.during(asked, f"asking {whom} for hardware", always=True)
        pieces = pieces_of(config, infos)
    return states, pieces, build_node_groups(config, infos)
