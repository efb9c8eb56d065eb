"""Cluster: the nodes a driver or worker launches on. One a process."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import uuid
from collections.abc import Generator, Mapping
from typing import Any, ClassVar

from rlinf_actors.cluster.attach import worker_job
from rlinf_actors.cluster.bootstrap import EmbeddedDaemon
from rlinf_actors.cluster.nodes import node_infos
from rlinf_actors.cluster.progress import waiting_line
from rlinf_actors.config.cluster import ClusterConfig
from rlinf_actors.errors import ConfigError, PlacementError, UsageError
from rlinf_actors.hardware.configured import with_enumerated_hardware
from rlinf_actors.hardware.registry import hardware_types, load_extension
from rlinf_actors.model.node import CLUSTER_GROUP, NodeGroupInfo, NodeInfo
from rlinf_actors.net.ports import free_port
from rlinf_actors.net.security import Security
from rlinf_actors.placement.groups import build_node_groups
from rlinf_actors.runtime.process import Runtime
from rlinf_actors.settings import NAMESPACE, Settings
from rlinf_actors.wire.messages import NodeState

log = logging.getLogger(__name__)

STOP_GRACE_S = 2.0
"""Between SIGTERM and SIGKILL for groups that are still there when the cluster is shut down."""


class Cluster:
    """The cluster of this process.

    With no head configured and one node, a private single-node cluster starts inside one child
    process and ends with this process, however it ends. Otherwise it connects to the head and waits
    until the nodes are there. A second ``Cluster()`` is the same object; in a worker, ``Cluster()``
    is the worker's cluster.

    Args:
        num_nodes: nodes to wait for; default: the configuration's, or 1.
        cluster_cfg: the ``cluster:`` section: a mapping, a YAML file's path, or an OmegaConf DictConfig.
        distributed_log_dir: directory on every node for a log file per worker.
        head: the coordinator, ``HOST:PORT`` (env RLINF_HEAD).
        namespace: name of the job; unique by default. Groups are found by others in the same namespace.
        timeout: seconds to wait for the head and the nodes, None for ever.

    Raises:
        ConfigError: the configuration is wrong, or differs from the running Cluster's.
        ClusterTimeoutError: the head does not answer, or nodes are missing (says which).
    """

    _current: ClassVar[Cluster | None] = None
    _arguments: tuple[Any, ...]

    def __new__(cls, *args: Any, **kwargs: Any) -> Cluster:
        """The running Cluster if there is one."""
        current = cls._live()
        return current if current is not None else super().__new__(cls)

    def __init__(
        self,
        num_nodes: int | None = None,
        cluster_cfg: Any = None,
        distributed_log_dir: str | os.PathLike[str] | None = None,
        *,
        head: str | None = None,
        namespace: str | None = None,
        timeout: float | None = None,
    ) -> None:
        if self._is_running(num_nodes, cluster_cfg, distributed_log_dir, head, namespace):
            return
        self._prepare(num_nodes, cluster_cfg, distributed_log_dir, head, namespace)
        if self._job is not None:
            self._job.connect()
        try:
            self.runtime.io.submit(self._start(timeout)).result()
        except BaseException:
            self.shutdown()
            raise
        Cluster._current = self

    @classmethod
    def connect(
        cls,
        num_nodes: int | None = None,
        cluster_cfg: Any = None,
        distributed_log_dir: str | os.PathLike[str] | None = None,
        *,
        head: str | None = None,
        namespace: str | None = None,
        timeout: float | None = None,
    ) -> _Connecting:
        """The same for asyncio: ``async with Cluster.connect(...) as cluster`` or ``await`` it. Nothing blocks."""
        return _Connecting(cls, (num_nodes, cluster_cfg, distributed_log_dir, head, namespace), timeout)

    # --- life ---

    def _is_running(self, *arguments: Any) -> bool:
        """Whether this object is the running Cluster; then the arguments must not ask for another."""
        if not hasattr(self, "_arguments"):
            return False
        for name, new, old in zip(
            ("num_nodes", "cluster_cfg", "distributed_log_dir", "head", "namespace"),
            arguments,
            self._arguments,
            strict=True,
        ):
            if new is not None and new != old:
                raise ConfigError(
                    f"a Cluster with {name}={old!r} is running in this process, and {name}={new!r} was asked for: "
                    f"call shutdown() on it first, or use the running one by Cluster()",
                    path=name,
                )
        return True

    def _prepare(
        self, num_nodes: int | None, cluster_cfg: Any, log_dir: Any, head: str | None, namespace: str | None
    ) -> None:
        if num_nodes is not None and (not isinstance(num_nodes, int) or isinstance(num_nodes, bool) or num_nodes < 1):
            raise ConfigError(f"is {num_nodes!r}; it must be a whole number above 0", path="num_nodes")
        self.log_dir = None if log_dir is None else os.path.abspath(os.fspath(log_dir))
        self._states: list[NodeState] = []
        self._nodes: list[NodeInfo] = []
        self._groups: dict[str, NodeGroupInfo] = {}
        self._daemon: EmbeddedDaemon | None = None
        self._owner_pid = os.getpid()
        self._closed = False
        settings, job = Settings.load(), worker_job()
        if settings.ext_module and job is None:
            load_extension(settings.ext_module)
        self.config = None if cluster_cfg is None else _parse(cluster_cfg)
        if self.config is None and job is not None:
            self.config = job.extras().get("cluster_config")
        if self.config is not None and num_nodes is not None and self.config.num_nodes != num_nodes:
            raise ConfigError(
                f"is {self.config.num_nodes} in cluster_cfg and {num_nodes} as an argument: give one of them",
                path="cluster.num_nodes",
            )
        self._wanted = num_nodes or (self.config.num_nodes if self.config else 1)
        self._head = head or (None if job else settings.head)
        self._job = job
        if job is None and self._head is None and self._wanted > 1:
            raise ConfigError(
                f"is {self._wanted}, and no head is known: start `agentd --head` on one node and "
                f"`agentd --connect HOST:PORT` on the others, then pass head='HOST:PORT' or set RLINF_HEAD",
                path="num_nodes",
            )
        if job is not None:
            self.namespace = job.runtime.namespace
            self.runtime = job.runtime
        else:
            self.namespace = namespace or os.environ.get(NAMESPACE) or f"job-{uuid.uuid4().hex[:12]}"
            security = Security(insecure_test_network=settings.insecure_test_network)
            self.runtime = Runtime("driver", self.namespace, security=security, on_lost=self._head_said_goodbye)
        self._arguments = (num_nodes, cluster_cfg, log_dir, head, namespace)

    async def _start(self, timeout: float | None) -> None:
        """Connect and learn the nodes. Runs on the runtime's loop."""
        if self._job is None:
            endpoint = self._head and _endpoint(self._head)
            if endpoint is None:
                self._daemon = EmbeddedDaemon(self.runtime.daemon_died)
                arguments = [] if self.log_dir is None else ["--log-dir", self.log_dir]
                endpoint = await self._daemon.start(arguments, timeout)
            await self.runtime.connect(endpoint, timeout if timeout is not None else 30.0)
            atexit.register(self.shutdown)
        async with waiting_line(self.runtime, self._wanted):
            nodes = await self.runtime.nodes(self._wanted, timeout)
        for warning in nodes.warnings:
            log.warning("%s", warning)
        self._states = [state for state in nodes.nodes if 0 <= state.rank < self._wanted or self._job is not None]
        infos = node_infos(self._states)
        if self.config is not None:
            infos = with_enumerated_hardware(self.config, infos)
        self._groups = build_node_groups(self.config, infos)
        self._nodes = list(self._groups[CLUSTER_GROUP].nodes)

    def shutdown(self) -> None:
        """End what this process started: its groups, and the embedded cluster. Blocks; twice is fine."""
        if not self._begin_end():
            return
        try:
            self.runtime.io.submit(self._end()).result()
        finally:
            self.runtime.close()

    async def shutdown_async(self) -> None:
        """As `shutdown`, for a running event loop."""
        if not self._begin_end():
            return
        try:
            await asyncio.wrap_future(self.runtime.io.submit(self._end()))
        finally:
            await asyncio.to_thread(self.runtime.close)

    def _begin_end(self) -> bool:
        if Cluster._current is self:
            Cluster._current = None
        if self._closed or self._owner_pid != os.getpid() or not hasattr(self, "runtime"):
            return False
        self._closed = True
        atexit.unregister(self.shutdown)
        return self._job is None

    async def _end(self) -> None:
        self.runtime.lost.close()
        if self._daemon is not None:
            await self._daemon.stop(self.runtime.stop_cluster)
            return
        groups = [group for group in self.runtime.groups.values() if group.owned and not group.gone.done()]
        ends = [self.runtime.stop_group(group, STOP_GRACE_S) for group in groups]
        for outcome in await asyncio.gather(*ends, return_exceptions=True):
            if isinstance(outcome, Exception):
                log.warning("a group was not stopped by this process; the head does it: %s", outcome)

    def _head_said_goodbye(self, reason: str) -> None:
        if not self._closed:
            log.warning("the head ended this session: %s", reason)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_error: object) -> None:
        self.shutdown()

    async def __aenter__(self) -> Cluster:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.shutdown_async()

    @classmethod
    def _live(cls) -> Cluster | None:
        current = Cluster._current
        if current is None or current._closed or current._owner_pid != os.getpid():
            return None
        return current

    @classmethod
    def current(cls) -> Cluster:
        """The Cluster of this process; in a worker it is made on first use.

        Raises:
            UsageError: there is none.
        """
        current = cls._live()
        if current is not None:
            return current
        if worker_job() is not None:
            return Cluster()
        raise UsageError("no Cluster is running in this process: make one by Cluster(...) or Cluster.connect(...)")

    @classmethod
    def has_initialized(cls) -> bool:
        """Whether a Cluster is running in this process."""
        return cls._live() is not None

    # --- what it is ---

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self._nodes)

    @property
    def num_accelerators(self) -> int:
        """Number of accelerators on all nodes."""
        return sum(node.num_accelerators for node in self._nodes)

    @property
    def accelerator_ranks(self) -> list[list[int]]:
        """For each node the ranks of its accelerators, counted through the cluster."""
        ranks, first = [], 0
        for node in self._nodes:
            ranks.append(list(range(first, first + node.num_accelerators)))
            first += node.num_accelerators
        return ranks

    def get_node_info(self, node_rank: int) -> NodeInfo:
        """The node of that rank. Raises PlacementError if there is none."""
        if not 0 <= node_rank < len(self._nodes):
            raise PlacementError(f"node {node_rank} is not in this cluster, which has nodes 0-{len(self._nodes) - 1}")
        return self._nodes[node_rank]

    def get_node_ip(self, node_rank: int) -> str:
        """Address of the node of that rank."""
        return self.get_node_info(node_rank).node_ip

    def node_name(self, node_rank: int) -> str:
        """How messages to people call the node of that rank."""
        for state in self._states:
            if state.rank == node_rank:
                return state.report.hostname
        return str(node_rank)

    def here(self) -> int:
        """Rank of the node whose machine this process runs on (the first, of several), 0 if it is none of them."""
        return min((state.rank for state in self._states if state.report.host == self.runtime.host), default=0)

    def get_node_group(self, label: str = CLUSTER_GROUP) -> NodeGroupInfo | None:
        """The node group of that label, None if there is none."""
        return self._groups.get(str(label))

    def get_alive_nodes(self) -> list[NodeInfo]:
        """Nodes that the head hears from now. One round trip."""
        status = self.runtime.io.submit(self.runtime.status(self.namespace)).result()
        alive = {node.rank for node in status.nodes if node.state in ("ready", "suspect", "draining")}
        return [node for node in self._nodes if node.node_rank in alive]

    def find_free_port(self, max_port_num: int | None = None) -> int:
        """A TCP port that is free on this machine now, below *max_port_num* if given. Nothing holds it."""
        return free_port(max_port_num)

    def allocate(
        self,
        worker_cls: type,
        worker_name: str,
        node_rank: int = 0,
        env_vars: Mapping[str, str] | None = None,
        cls_args: tuple[Any, ...] = (),
        cls_kwargs: Mapping[str, Any] | None = None,
        max_concurrency: int | None = None,
        node_group_label: str | None = None,
    ) -> Any:
        """Launch one worker of *worker_cls* on a node, as a group of its own called *worker_name*."""
        from rlinf_actors.placement.strategies import NodePlacementStrategy

        return worker_cls.create_group(*cls_args, **dict(cls_kwargs or {})).launch(  # type: ignore[attr-defined]
            self,
            NodePlacementStrategy([node_rank], node_group_label),
            name=worker_name,
            max_concurrency=max_concurrency,
            env_vars=dict(env_vars or {}),
        )

    def extras(self) -> dict[str, Any]:
        """What goes along with every worker class, so that ``Cluster()`` there knows the configuration."""
        return {} if self.config is None else {"cluster_config": self.config}

    def __repr__(self) -> str:
        return f"<Cluster of {self.num_nodes} nodes, namespace {self.namespace!r}>"


class _Connecting:
    """A Cluster that is being connected to; ``async with`` or ``await`` it."""

    def __init__(self, cls: type[Cluster], arguments: tuple[Any, ...], timeout: float | None) -> None:
        self._cls = cls
        self._arguments = arguments
        self._timeout = timeout
        self._cluster: Cluster | None = None

    async def _connect(self) -> Cluster:
        cluster = self._cls.__new__(self._cls)
        if not cluster._is_running(*self._arguments):
            await asyncio.to_thread(cluster._prepare, *self._arguments)
            if cluster._job is not None:
                await asyncio.to_thread(cluster._job.connect)
            try:
                await asyncio.wrap_future(cluster.runtime.io.submit(cluster._start(self._timeout)))
            except BaseException:
                await cluster.shutdown_async()
                raise
            Cluster._current = cluster
        self._cluster = cluster
        return cluster

    def __await__(self) -> Generator[Any, None, Cluster]:
        return self._connect().__await__()

    async def __aenter__(self) -> Cluster:
        return await self._connect()

    async def __aexit__(self, *_error: object) -> None:
        if self._cluster is not None:
            await self._cluster.shutdown_async()


def _parse(source: Any) -> ClusterConfig:
    return ClusterConfig.from_any(source, hardware_types=hardware_types())


def _endpoint(head: str) -> str:
    if "://" in head:
        return head
    host, _, port = head.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"{head!r} is no address: write HOST:PORT, e.g. 127.0.0.1:6380", path="head")
    return f"tcp://{head}"
