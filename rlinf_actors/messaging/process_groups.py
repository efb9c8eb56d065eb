"""Process groups of torch.distributed, made directly on a store. torch's default group is the user's and is never used.

A store is a TCPStore that listens on one given address, where torch would listen on all. `GroupStore` keeps the server
of the store apart from the client that the group uses: when the server is dropped, clients that wait for a key fail.
TCPStore does not authenticate. The keys of a group begin with a name that only members of the job know, so a process
that reaches the port of another job's store finds no keys; see docs/explanation/security.md.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlinf_actors.environ_block import overridden
from rlinf_actors.hardware.interfaces import interface_of
from rlinf_actors.model.accelerator_table import GLOO_NIC_VARIABLE, group_facts

SENDER, RECEIVER = 0, 1
"""Ranks in a process group of two workers."""
DATA, POSTED, SENT, ARRIVED = range(4)
"""Message tags: DATA for tensors, the others for the bytes by which GlooWire waits for the other side."""
CONNECT_S = 10.0
"""Seconds for torch to reach a store. A store listens before its address is sent, so only an ended store takes long."""
LOOPBACK = "127.0.0.1"
GROUP = "rlinf-actors"


@dataclass
class CollectiveGroupOptions:
    """Options of the process groups that carry the tensors of a message or broadcast. The names are RLinf's.

    They apply to tensors that travel through a collective communication library (CCL; the path "lane", see
    ``rlinf-actors paths``). The sender's options are used. Messages with different options use different lanes. An
    option has no effect on other paths, nor if the accelerator's CCL does not have it
    (model/accelerator_table.py lists the options of each CCL).

    Attributes:
        accel_cluster_size: size of a cluster of thread blocks (NCCL's ``cgaClusterSize``); None for the default.
        accel_max_ctas: most thread blocks per kernel (``maxCTAs``); None for the default.
        accel_min_ctas: fewest thread blocks per kernel (``minCTAs``); None for the default.
        is_high_priority_stream: True to run kernels on a stream of high priority.
        use_ring_broadcast: accepted for compatibility and ignored.
    """

    accel_cluster_size: int | None = None
    accel_max_ctas: int | None = None
    accel_min_ctas: int | None = None
    is_high_priority_stream: bool = False
    use_ring_broadcast: bool = False

    def is_empty_options(self) -> bool:
        """Return True if no option is set."""
        return self == CollectiveGroupOptions()


class GroupStore:
    """A TCPStore whose server runs in this process. Its clients wait *timeout_s* seconds for a key.

    Attributes:
        endpoint: ``IP:PORT`` of the store, for `join`.

    Raises:
        OSError: *ip* is not an address of this machine.
    """

    def __init__(self, ip: str, timeout_s: float) -> None:
        with socket.socket() as listener:
            listener.bind((ip, 0))
            listener.listen()
            port = listener.getsockname()[1]
            self.endpoint = f"{ip}:{port}"
            self._server: Any = serve_on(
                listener,
                functools.partial(
                    _distributed().TCPStore,
                    ip,
                    port,
                    None,
                    True,
                    timeout=datetime.timedelta(seconds=timeout_s),
                    wait_for_workers=False,
                ),
            )

    def close(self) -> None:
        """Stop the server; clients that wait for a key get an error. Any thread; may be called again."""
        self._server = None


def serve_on(listener: socket.socket, make: Callable[..., Any]) -> Any:
    """Return the TCPStore that *make* makes with further options; it serves on a copy of *listener*.

    torch owns the copy, and closes it also if the store fails, such as when no other rank comes.

    Raises:
        TypeError: this torch's TCPStore takes no socket.
    """
    fd = os.dup(listener.fileno())
    try:
        try:
            return make(master_listen_fd=fd)
        except NotImplementedError:  # some versions take a socket only without libuv
            return make(master_listen_fd=fd, use_libuv=False)
    except (NotImplementedError, TypeError):  # torch has not taken it
        os.close(fd)
        raise


def join(endpoint: str, timeout_s: float) -> Any:
    """Return a client of the TCPStore at *endpoint* (``IP:PORT``). The client waits *timeout_s* seconds for a key.

    Raises:
        RuntimeError: no store answers there.
    """
    ip, _, port = endpoint.rpartition(":")
    patience = datetime.timedelta(seconds=min(CONNECT_S, timeout_s))
    client = _distributed().TCPStore(ip, int(port), None, False, timeout=patience, wait_for_workers=False)
    client.set_timeout(datetime.timedelta(seconds=timeout_s))
    return client


def _distributed() -> Any:
    import torch.distributed

    return torch.distributed


def backends(plugin: str = "") -> list[str]:
    """Return the names of torch.distributed's back-ends in this process, as in the accelerator table; [] without torch.

    *plugin* is a module that registers a back-end; it need not be installed.
    """
    try:
        dist = _distributed()
    except ImportError:
        return []
    if not dist.is_available():
        return []
    if plugin:
        with contextlib.suppress(ImportError):
            importlib.import_module(plugin)
    found = [name for name in ("gloo", "nccl") if getattr(dist, f"is_{name}_available")()]
    return [*found, *(name.lower() for name in dist.Backend._plugins)]


def make(
    backend: str,
    store: Any,
    rank: int,
    size: int,
    *,
    timeout_s: float,
    ip: str,
    options: CollectiveGroupOptions | None = None,
    name: str = GROUP,
) -> Any:
    """Make a process group of *size* members. Blocks until all members have called `make`.

    Args:
        backend: gloo, nccl or a back-end that a vendor's package has registered.
        store: a client of the group's store.
        rank: rank of this process in the group.
        size: number of members.
        timeout_s: most seconds of each of the group's operations.
        ip: this process's address, for gloo's sockets if GLOO_SOCKET_IFNAME names no interface.
        options: options of the CCL.
        name: common to all members; prefix of each key in the store.

    Raises:
        RuntimeError: torch cannot make the group.
        ValueError: this version of the CCL does not have an option that is set.
    """
    timeout = datetime.timedelta(seconds=timeout_s)
    prefixed = _distributed().PrefixStore(name, store)
    if backend == "gloo":
        return _gloo(prefixed, rank, size, timeout, ip)
    facts = group_facts(backend)
    # `overridden` takes a lock, and making a group may block: not without need
    with overridden(facts.variables) if facts.variables else contextlib.nullcontext():
        made = group_options(backend, options or CollectiveGroupOptions(), timeout)
        plugin = _distributed().Backend._plugins.get(backend.upper())
        if plugin is None:  # torch's own
            return _class(facts.process_group)(prefixed, rank, size, made)
        if not plugin.extended_api:
            return plugin.creator_fn(prefixed, rank, size, timeout)
        return plugin.creator_fn(_extended(prefixed, name, rank, size, timeout), made)


def _extended(store: Any, name: str, rank: int, size: int, timeout: datetime.timedelta) -> Any:
    """Return the options that torch passes to the creator of a back-end registered with ``extended_api=True``."""
    given = _distributed().distributed_c10d._DistributedBackendOptions()
    given.store, given.group_rank, given.group_size, given.timeout = store, rank, size, timeout
    given.group_id, given.global_ranks_in_group = name, list(range(size))
    return given


def _gloo(store: Any, rank: int, size: int, timeout: datetime.timedelta, ip: str) -> Any:
    kind = _distributed().ProcessGroupGloo
    options = kind._Options()
    options._timeout = timeout
    interfaces = [name for name in os.environ.get(GLOO_NIC_VARIABLE, "").split(",") if name]
    if ip == LOOPBACK or not interfaces or interfaces == [interface_of(ip)]:  # by its name gloo takes the first address
        options._devices = [kind.create_device(hostname=ip)]
    else:
        options._devices = [kind.create_device(interface=name) for name in interfaces]
    return kind(store, rank, size, options)


def group_options(backend: str, options: CollectiveGroupOptions, timeout: datetime.timedelta | None = None) -> Any:
    """Return *options* as the options object of *backend*'s process group; None if the group takes none.

    The accelerator table maps fields to options of each CCL. Fields that the table does not name change nothing.

    Raises:
        ValueError: this version of the CCL, or of torch, does not have an option that is set.
    """
    facts = group_facts(backend)
    if not facts.process_group:
        return None
    made = _class(facts.process_group).Options()
    if timeout is not None:
        made._timeout = timeout
    for name, attribute in facts.options.items():
        value = getattr(options, name)
        if value is None:
            continue
        *parents, last = attribute.split(".")
        target = made
        for parent in parents:
            target = getattr(target, parent, None)
        if not hasattr(target, last):
            raise ValueError(f"CollectiveGroupOptions asks for {name}={value}, which this torch's {backend} has not")
        setattr(target, last, value)
    return made


def _class(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


ABORTS = ("abort", "_abort", "_shutdown")
"""Methods that abort a process group of torch, the first that exists. ProcessGroupNCCL has:

| torch | methods | what they do |
|---|---|---|
| 2.2 to 2.5 | ``_shutdown`` | aborts all communicators; there is no other method |
| 2.6 | ``abort``, ``_shutdown`` | both abort |
| 2.7 and later | ``abort``, and ``_shutdown`` or ``shutdown`` | the second waits for the kernels: never used |

gloo has ``abort`` in the versions in which all back-ends have it, and no such method before. Back-ends of vendors that
are copies of ProcessGroupNCCL (XCCL, HCCL, MCCL) have the methods of the torch that they were copied from.
"""


def abort(group: Any) -> None:
    """Abort the operations of *group*, if its back-end has a method for that. Any thread."""
    method = _abort_method(group)
    if method is not None:
        with contextlib.suppress(RuntimeError):  # it has failed by itself
            method()


def _abort_method(group: Any) -> Any:
    return next((getattr(group, name) for name in ABORTS if hasattr(group, name)), None)


class Wire:
    """One end of a process group of two workers, which carries uint8 tensors from rank 0, the sender, to rank 1."""

    def __init__(self, group: Any) -> None:
        self.group = group

    @property
    def can_abort(self) -> bool:
        """True if `abort` ends the group's operations."""
        return _abort_method(self.group) is not None

    def send(self, tensors: Sequence[Any]) -> None:
        """Send the tensors in order, on the current stream."""
        for tensor in tensors:
            self.group.send([tensor], RECEIVER, DATA).wait()

    def recv(self, buffers: Sequence[Any]) -> None:
        """Receive on the current stream into *buffers*, whose sizes must be those of the tensors sent."""
        for buffer in buffers:
            self.group.recv([buffer], SENDER, DATA).wait()


class GlooWire(Wire):
    """A Wire over gloo, which blocks until the transfer is complete.

    gloo does not report the end of the other side in the middle of a transfer, but does report it to a receive that has
    not begun. So each side also waits for a byte that follows the tensors (SENT, ARRIVED). A first byte (POSTED) tells
    the sender that all receives are posted, so that the tensors arrive in the order of the calls.
    """

    def __init__(self, group: Any) -> None:
        import torch

        super().__init__(group)
        self._bytes = {tag: torch.zeros(1, dtype=torch.uint8) for tag in (POSTED, SENT, ARRIVED)}
        self._last: Any = None

    def send(self, tensors: Sequence[Any]) -> None:
        posted, arrived = (self.group.recv([self._bytes[tag]], RECEIVER, tag) for tag in (POSTED, ARRIVED))
        posted.wait()
        works = [self.group.send([tensor], RECEIVER, DATA) for tensor in tensors]
        works.append(self.group.send([self._bytes[SENT]], RECEIVER, SENT))
        arrived.wait()
        for work in works:
            work.wait()

    def recv(self, buffers: Sequence[Any]) -> None:
        sent = self.group.recv([self._bytes[SENT]], SENDER, SENT)
        works = [self.group.recv([buffer], SENDER, DATA) for buffer in buffers]
        # POSTED and ARRIVED are not waited for: gloo would not report the other side's end to these waits
        first = self.group.send([self._bytes[POSTED]], SENDER, POSTED)
        sent.wait()
        for work in works:
            work.wait()
        self._last = (first, self.group.send([self._bytes[ARRIVED]], SENDER, ARRIVED))


def wire(
    backend: str,
    store: Any,
    rank: int,
    *,
    timeout_s: float,
    ip: str,
    options: CollectiveGroupOptions,
    name: str = GROUP,
) -> Wire:
    """Make this worker's end of the process group of two workers. Blocks until both have called this.

    Args:
        backend: gloo, nccl or a back-end that a vendor's package has registered.
        store: a client of the group's store.
        rank: 0 for the sender, 1 for the receiver.
        timeout_s: most seconds of each transfer.
        ip: this process's address, for gloo's sockets.
        options: options of the CCL.
        name: common to both workers; prefix of each key in the store.
    """
    group = make(backend, store, rank, 2, timeout_s=timeout_s, ip=ip, options=options, name=name)
    return GlooWire(group) if backend == "gloo" else Wire(group)


def advertised_ip(
    same_node: bool, node_ip: str, devices: str | None, interfaces: Mapping[str, str], interface: str = ""
) -> str:
    """Return the address on which this worker's store listens, and to which the other worker connects.

    Args:
        same_node: True if both workers are on this node.
        node_ip: the node's address.
        devices: names of interfaces (RLINF_COMM_NET_DEVICES); the first one that has an address is used.
        interfaces: first address of each interface of this node, by name.
        interface: name of the interface that has *node_ip*, "" for none.
    """
    if same_node:
        return LOOPBACK
    named: Sequence[str] = (devices or "").split(",")
    chosen = next((name for name in map(str.strip, named) if name in interfaces), interface)
    return node_ip if chosen == interface else interfaces[chosen]
