"""LocalCluster: a head and several nodes as processes on this machine, with described hardware. For tests.

Each node is an agentd that reads its hardware from a file instead of probing; `per_node` makes the content of these
files. Blocking methods run on the caller's thread, and with ``async_op=True`` on another thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import selectors
import shutil
import subprocess
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Union, overload

from rlinf_actors.cluster.local_daemon import start_agentd
from rlinf_actors.conversion import check_keys
from rlinf_actors.errors import ClusterTimeoutError, ConfigError, RlinfActorsError
from rlinf_actors.model.accelerator_table import ACCELERATOR_TABLE
from rlinf_actors.model.hardware import AcceleratorType
from rlinf_actors.net.host import HeldPorts
from rlinf_actors.net.loop import Tasks
from rlinf_actors.plurals import counted
from rlinf_actors.procfs import WORKER_MARK
from rlinf_actors.runtime.future import AsyncWork
from rlinf_actors.settings import (
    CONFIG_FILE,
    FOR_THE_UNIT_ALONE,
    HEAD,
    HEAD_KEY,
    HEADS_DIR,
    KEY_DIR,
    LOG_DIR,
    NAMESPACE,
    NODE_RANK,
    RUN_DIR,
    Settings,
)
from rlinf_actors.testing.faults import keepers, kill_all, templates

if TYPE_CHECKING:
    from rlinf_actors.cluster.cluster import Cluster
    from rlinf_actors.cluster.connect import Connecting

NodeHardware = Union[Mapping[str, Any], int, None]
"""Description of one node's hardware; see LocalCluster. A number stands for that many accelerators."""

KEYS = (
    "accelerators", "type", "model", "memory_bytes", "numa_nodes", "robots", "cpus", "env", "labels", "interfaces",
)  # fmt: skip
EXAMPLE = '{"accelerators": 8, "type": "NV_GPU", "model": "A800"}'


def per_node(hardware: NodeHardware | Sequence[NodeHardware], num_nodes: int) -> list[dict[str, Any]]:
    """Return the description of the hardware of each node, by rank, as the node's agentd reads it from a file.

    Args:
        hardware: one description for all nodes, or a list with one for each node.
        num_nodes: number of nodes.

    Raises:
        ConfigError: a key or value is wrong, or the length of the list is not *num_nodes*.
    """
    if isinstance(hardware, (list, tuple)):
        if len(hardware) != num_nodes:
            many = counted(len(hardware), "node")
            raise ConfigError(f"describes {many}; the cluster has {num_nodes}", path="hardware")
        return [_node(one, rank, f"hardware[{rank}]") for rank, one in enumerate(hardware)]
    return [_node(hardware, rank, "hardware") for rank in range(num_nodes)]  # type: ignore[arg-type]


def _node(given: NodeHardware, rank: int, path: str) -> dict[str, Any]:
    if given is None or isinstance(given, int):
        given = {"accelerators": given or 0}
    if not isinstance(given, Mapping):
        raise ConfigError(f"is {given!r}; it must be a mapping such as {EXAMPLE}", path=path)
    check_keys(given, KEYS, path)
    described: dict[str, Any] = {"resources": [*_accelerators(given, rank, path), *_robots(given, path)]}
    if "cpus" in given:
        described["num_cpus"] = given["cpus"]
    for key, name in (("env", "env_vars"), ("labels", "labels")):
        described[name] = {str(k): str(v) for k, v in (given.get(key) or {}).items()}
    if "interfaces" in given:
        described["interfaces"] = dict(given["interfaces"])
    return described


def _accelerators(given: Mapping[str, Any], rank: int, path: str) -> list[dict[str, Any]]:
    number = given.get("accelerators", 0)
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise ConfigError(f"is {number!r}; it must be a number of accelerators", path=f"{path}.accelerators")
    kind, known = str(given.get("type", "NV_GPU")), [member.value for member in ACCELERATOR_TABLE]
    known.remove(AcceleratorType.NO_ACCEL.value)
    if kind not in known:
        raise ConfigError(f"is {kind!r}; it must be one of {', '.join(known)}", path=f"{path}.type")
    model = str(given.get("model", ""))
    numa_nodes = list(given.get("numa_nodes", [-1] * number))
    if len(numa_nodes) != number or not all(isinstance(node, int) for node in numa_nodes):
        raise ConfigError(f"is {numa_nodes!r}; it must list a number for each accelerator", path=f"{path}.numa_nodes")
    infos = [
        {
            "type": kind,
            "model": model,
            "detail": {
                "index": index,
                "uuid": f"described-{rank}-{index}",
                "memory_bytes": int(given.get("memory_bytes", 0)),
                "numa_node": numa_nodes[index],
            },
        }
        for index in range(number)
    ]
    return [{"type": kind, "infos": infos}] if infos else []


def _robots(given: Mapping[str, Any], path: str) -> list[dict[str, Any]]:
    by_type: dict[str, list[dict[str, Any]]] = {}
    for index, robot in enumerate(given.get("robots") or ()):
        if not isinstance(robot, Mapping) or "type" not in robot:
            raise ConfigError(f'is {robot!r}; it must be such as {{"type": "Franka"}}', path=f"{path}.robots[{index}]")
        kind = str(robot["type"])
        detail = {str(key): value for key, value in robot.items() if key not in ("type", "model")}
        by_type.setdefault(kind, []).append({"type": kind, "model": str(robot.get("model", kind)), "detail": detail})
    return [{"type": kind, "infos": infos} for kind, infos in by_type.items()]


_NOT_INHERITED = FOR_THE_UNIT_ALONE | {
    HEAD, HEAD_KEY, NODE_RANK, RUN_DIR, LOG_DIR, CONFIG_FILE, NAMESPACE, WORKER_MARK,
}  # fmt: skip
_MAX_BASE = 40
"""Longest parent of run directories, in bytes, since a unix socket's path has at most 107 bytes."""


@dataclass
class LocalNode:
    """One node of a LocalCluster.

    Attributes:
        rank: rank of the node in the cluster.
        ip: address of the node: 127.0.0.1 for node 0, 127.0.0.2 for node 1, …
        run_dir: directory of its agentd's sockets.
        log_dir: directory for the output of its workers, unless the driver sets another.
        process: process of its agentd.
    """

    rank: int
    ip: str
    run_dir: str
    log_dir: str
    process: subprocess.Popen[bytes] = field(init=False)
    _log: str | None = field(default=None, init=False)

    @property
    def pid(self) -> int:
        """Process id of the agentd of this node."""
        return self.process.pid

    @property
    def alive(self) -> bool:
        """True if the agentd of this node is running."""
        return self.process.poll() is None

    def log(self) -> str:
        """Return the log of the agentd of this node. It can be read after the end of the cluster too."""
        if self._log is not None:
            return self._log
        try:
            return Path(self.run_dir, "agentd.log").read_text(errors="replace")
        except FileNotFoundError:
            return ""  # the agentd has ended by itself and removed the directory

    def _remove(self) -> None:
        if self._log is None:
            try:
                self._log = self.log()
            except OSError as error:  # perhaps no descriptor is left: remove the directory in any case
                self._log = f"it could not be read: {error}"
            shutil.rmtree(self.run_dir, ignore_errors=True)


started: weakref.WeakSet[LocalCluster] = weakref.WeakSet()
"""Clusters whose logs the pytest plugin shows when a test fails."""


class LocalCluster:
    """A cluster of *num_nodes* nodes on this machine, for tests.

    Each node is an agentd, the first one with the head. The agentds listen only on loopback and unix sockets. They use
    keys and records of their own: the user's keys do not matter, and `estop` with `driver_env` reaches them alone. All
    processes end with ``stop``, with the ``with`` block, or with this process, even if it is killed. ``start`` and
    ``with`` block; ``async with`` does not.

    Example::

        with LocalCluster(num_nodes=2, hardware={"accelerators": 4, "model": "A800"}) as local:
            cluster = local.cluster()
            group = MyWorker.create_group().launch(cluster)

    Args:
        num_nodes: number of nodes.
        hardware: hardware of the nodes, which is not probed: one description for all nodes, or a list with one for
            each. Keys (all optional): accelerators (a number), type (NV_GPU), model, memory_bytes, numa_nodes (a list
            with one number for each accelerator), robots (a list of ``{"type": "Franka", ...}``), cpus, env, labels,
            interfaces. None for no accelerators.
        env: environment variables for the agentds, and so for the workers on every node.
        options: tables of agentd's configuration file, for all nodes: ``{"timers": {"lease_s": 2}}``.
        timeout: seconds that the start may take.

    Attributes:
        nodes: the nodes by rank; empty before the start.
        head: address of the head, HOST:PORT.
        keys: key directory of the cluster.
        stopped: True after the end of the cluster.

    Raises:
        ConfigError: *hardware* or *options* is wrong.
    """

    def __init__(
        self,
        num_nodes: int = 1,
        hardware: NodeHardware | Sequence[NodeHardware] = None,
        *,
        env: Mapping[str, str] | None = None,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        timeout: float = 30.0,
    ) -> None:
        if num_nodes < 1:
            raise ConfigError(f"is {num_nodes}; a cluster has at least one node", path="num_nodes")
        self.num_nodes = num_nodes
        self.nodes: list[LocalNode] = []
        self.head = self.keys = ""
        self._started = self.stopped = False
        self._described = per_node(hardware, num_nodes)
        self._env = dict(env or {})
        self._options = options or {}
        self._timeout = timeout
        self._clusters: list[Cluster] = []
        self._ports = HeldPorts()

    # --- life ---

    @overload
    def start(self, async_op: Literal[False] = False) -> LocalCluster: ...

    @overload
    def start(self, async_op: Literal[True]) -> AsyncWork[LocalCluster]: ...

    def start(self, async_op: bool = False) -> LocalCluster | AsyncWork[LocalCluster]:
        """Start the nodes and wait until all are registered. Return this LocalCluster.

        Args:
            async_op: True to return an AsyncWork at once instead of blocking; this holds for all methods with
                *async_op*.

        Raises:
            ClusterTimeoutError: the start takes longer than the *timeout* of the LocalCluster.
            RlinfActorsError: an agentd has ended; the message has its log.
        """
        if self._started:
            raise RlinfActorsError("this LocalCluster was started already: make another one")
        self._started = True
        return AsyncWork.on_thread(self._start, "the start of a LocalCluster") if async_op else self._start()

    def _start(self) -> LocalCluster:
        started.add(self)
        deadline = time.monotonic() + self._timeout
        try:
            self.head = f"127.0.0.1:{self._ports.hold()}"  # the port stays ours while the head is restarted
            _wait_ready({0: self._add(0)}, self.nodes, deadline)
            _wait_ready({rank: self._add(rank) for rank in range(1, self.num_nodes)}, self.nodes, deadline)
        except BaseException:
            self.stop(grace=0.0)
            raise
        return self

    def stop(self, grace: float = 10.0, async_op: bool = False) -> Any:
        """End every node and its workers by SIGTERM, and by SIGKILL after *grace* seconds. May be called twice."""
        return _done(lambda: self._stop(grace), "the end of a LocalCluster", async_op)

    def _stop(self, grace: float) -> None:
        clusters, self._clusters = self._clusters, []
        for cluster in clusters:
            cluster.shutdown()
        deadline = time.monotonic() + grace
        for node in reversed(self.nodes):  # the head last: the other nodes report the ends of their workers to it
            if node.alive:
                node.process.terminate()
        for node in reversed(self.nodes):
            with contextlib.suppress(subprocess.TimeoutExpired):
                node.process.wait(max(0.0, deadline - time.monotonic()))
            self._kill(node)  # also templates, which outlive a killed agentd
        for node in self.nodes:
            node._remove()
        self._ports.close()
        self.stopped = True

    def kill_node(self, rank: int, async_op: bool = False) -> Any:
        """SIGKILL a node: its agentd, keeper, templates, workers and their children. Return when all have ended."""
        return _done(lambda: self._kill(self.nodes[rank]), f"the end of node {rank}", async_op)

    def kill_agent(self, rank: int, async_op: bool = False) -> Any:
        """SIGKILL only the agentd of a node, and wait for its end. On node 0 the head runs in it and ends too."""

        def kill() -> None:
            self.nodes[rank].process.kill()
            self.nodes[rank].process.wait()

        return _done(kill, f"the end of the agentd of node {rank}", async_op)

    def restart_agent(self, rank: int, timeout: float = 30.0, async_op: bool = False) -> Any:
        """Start the ended agentd of a node again, at its old addresses. Return when the node is registered.

        Raises:
            RlinfActorsError: the agentd still runs, or the new agentd ended before the node was registered.
            ClusterTimeoutError: the restart takes longer than *timeout* seconds.
        """
        node = self.nodes[rank]
        if node.alive:
            raise RlinfActorsError(f"the agentd of node {rank} runs (process {node.pid}): end it first")

        def restart() -> None:
            with node.process:  # closes the pipe to it
                os.makedirs(node.run_dir, exist_ok=True)
            _wait_ready({rank: self._spawn(node)}, self.nodes, time.monotonic() + timeout)

        return _done(restart, f"the new start of the agentd of node {rank}", async_op)

    def stop_node(self, rank: int, timeout: float = 10.0, async_op: bool = False) -> Any:
        """SIGTERM the agentd of a node, which then ends its workers and itself. Return when it has ended.

        Raises:
            subprocess.TimeoutExpired: the agentd has not ended after *timeout* seconds.
        """

        def stop() -> None:
            self.nodes[rank].process.terminate()
            self.nodes[rank].process.wait(timeout)

        return _done(stop, f"the end of node {rank}", async_op)

    def __enter__(self) -> LocalCluster:
        return self.start()

    def __exit__(self, *_error: object) -> None:
        self.stop()

    async def __aenter__(self) -> LocalCluster:
        starting = Tasks().start(asyncio.to_thread(self.start), "starting a LocalCluster", expected=Exception)
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.wait([starting])  # a thread cannot be cancelled
            await asyncio.to_thread(self.stop)
            raise

    async def __aexit__(self, *_error: object) -> None:
        clusters, self._clusters = self._clusters, []
        for cluster in clusters:
            await cluster.shutdown_async()
        await asyncio.to_thread(self.stop)

    # --- what drivers need ---

    def cluster(self, num_nodes: int | None = None, cluster_cfg: Any = None, **arguments: Any) -> Cluster:
        """Connect this process to the nodes as a driver, and return a Cluster, which `stop` shuts down. Blocks.

        Args:
            num_nodes: nodes to wait for; without *num_nodes* and *cluster_cfg*, all nodes.
            cluster_cfg: the ``cluster:`` section; see Cluster.
            arguments: further arguments of Cluster.

        Raises:
            RlinfActorsError: it is to wait for all nodes, but an agentd has ended. Also the errors of Cluster.
        """
        from rlinf_actors.cluster.cluster import Cluster

        made = Cluster(self._wanted(num_nodes, cluster_cfg), cluster_cfg, head=self.head, keys=self.keys, **arguments)
        self._clusters.append(made)
        return made

    def connect(self, num_nodes: int | None = None, cluster_cfg: Any = None, **arguments: Any) -> Connecting[Cluster]:
        """Connect from asyncio: ``async with local.connect() as cluster``. Arguments and errors as for `cluster`."""
        from rlinf_actors.cluster.cluster import Cluster

        wanted = self._wanted(num_nodes, cluster_cfg)
        return Cluster.connect(wanted, cluster_cfg, head=self.head, keys=self.keys, **arguments)

    @property
    def driver_env(self) -> dict[str, str]:
        """Environment variables with which another process connects to these nodes, and finds no other heads."""
        return {HEAD: self.head, KEY_DIR: self.keys, HEADS_DIR: self.nodes[0].run_dir, RUN_DIR: ""}

    def _wanted(self, num_nodes: int | None, cluster_cfg: Any) -> int | None:
        if num_nodes is not None or cluster_cfg is not None:
            return num_nodes
        for node in self.nodes:
            if not node.alive:  # the head would wait for the node to come back
                raise RlinfActorsError(
                    f"a Cluster on all nodes would wait for node {node.rank} for ever, its agentd has ended: "
                    f"restart_agent({node.rank}) first, or ask for fewer nodes by num_nodes; its log:\n{node.log()}"
                )
        return self.num_nodes

    def _kill(self, node: LocalNode) -> None:
        with node.process:  # at the end waits for it, and closes the pipe to it
            kill_all([*([node.pid] if node.alive else []), *keepers(node.run_dir), *templates(node.run_dir)])

    # --- starting ---

    def _add(self, rank: int) -> int:
        """Add a node and start its agentd. Return the pipe on which the agentd reports its registration."""
        base = Settings.load().run_dir or tempfile.gettempdir()
        base = base if len(os.fsencode(base)) <= _MAX_BASE else "/tmp"
        run_dir = tempfile.mkdtemp(prefix=f"rlt-n{rank}-", dir=base)  # agentd removes it if we are killed
        node = LocalNode(rank, f"127.0.{rank // 250}.{rank % 250 + 1}", run_dir, f"{run_dir}/logs")
        self.keys = self.keys or self._env.get(KEY_DIR, f"{run_dir}/keys")
        heard = self._spawn(node)
        self.nodes.append(node)
        return heard

    def _spawn(self, node: LocalNode) -> int:
        """Write the configuration of *node*, and start its agentd. Return the pipe on which it reports registration."""
        rank, run_dir = node.rank, node.run_dir
        role = ["--connect", self.head] if rank else ["--head", "--listen", self.head, "--state-dir", run_dir]
        Path(run_dir, "hardware.json").write_text(json.dumps({**self._described[rank], "ip": node.ip}))
        Path(run_dir, "agentd.toml").write_text(_toml(self._options))
        arguments = [
            *role, "--config", f"{run_dir}/agentd.toml", "--node-rank", str(rank), "--name", f"node{rank}",
            "--node-id", f"node-{rank}", "--hardware", f"{run_dir}/hardware.json", "--log-dir", node.log_dir,
        ]  # fmt: skip
        env = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
        env[HEADS_DIR] = (self.nodes or [node])[0].run_dir
        heard, tell = os.pipe()
        try:
            node.process = start_agentd(arguments, run_dir, tell, {**env, KEY_DIR: self.keys, **self._env})
        except BaseException:
            os.close(heard)
            raise
        finally:
            os.close(tell)
        return heard


def _done(function: Callable[[], None], what: str, async_op: bool) -> Any:
    return AsyncWork.on_thread(function, what) if async_op else function()


def _wait_ready(pipes: Mapping[int, int], nodes: Sequence[LocalNode], deadline: float) -> None:
    """Wait until the agentd of each rank in *pipes* has reported its registration on its pipe. Close the pipes.

    Raise RlinfActorsError if an agentd fails, ClusterTimeoutError at *deadline*; both show the log of one of *nodes*.
    """
    missing = set(pipes)
    text = {rank: bytearray() for rank in pipes}
    with selectors.DefaultSelector() as waiting, contextlib.ExitStack() as stack:
        for rank, fd in pipes.items():
            stack.callback(os.close, fd)
            waiting.register(fd, selectors.EVENT_READ, rank)
        while missing:
            events = waiting.select(max(0.0, deadline - time.monotonic()))
            if not events:
                first = min(missing)
                raise ClusterTimeoutError(
                    f"node {first} of the local cluster did not come up in time; its log:\n{nodes[first].log()}",
                    missing_ranks=sorted(missing),
                )
            for key, _ in events:
                rank, chunk = key.data, os.read(key.fd, 65536)
                text[rank] += chunk
                if chunk and not chunk.endswith(b"\n"):
                    continue
                waiting.unregister(key.fd)
                said = json.loads(text[rank]) if text[rank] else {"error": "it ended"}
                if "error" in said:
                    raise RlinfActorsError(
                        f"node {rank} of the local cluster did not start: {said['error']}\n{nodes[rank].log()}"
                    )
                missing.discard(rank)


def _toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Return *tables* as TOML. JSON's numbers, strings and lists of strings are valid TOML, so values are in JSON."""

    def text(value: object) -> str:
        if not isinstance(value, Mapping):
            return json.dumps(value)
        return "{" + ", ".join(f"{json.dumps(key)} = {json.dumps(one)}" for key, one in value.items()) + "}"

    lines = ([f"[{table}]", *(f"{key} = {text(value)}" for key, value in of.items())] for table, of in tables.items())
    return "\n".join(line for section in lines for line in section) + "\n"
