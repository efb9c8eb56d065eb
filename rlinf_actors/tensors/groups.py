"""Process groups made directly on a store. torch's default group, the user's, is never touched.

A store is a TCPStore that listens on one given address: torch binds it on all of them otherwise.
Its owner keeps it apart from the client that the group uses, so that dropping it ends whoever waits
for a key of it. TCPStore asks nobody who he is; see docs/messages.md.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlinf_actors.model.accelerator_table import ALWAYS_NIC_VARIABLE
from rlinf_actors.tensors.options import CollectiveGroupOptions

SENDER, RECEIVER = 0, 1
"""Ranks in a group of two."""
DATA, POSTED, SENT, ARRIVED = range(4)
"""Tags."""
CONNECT_S = 10.0
"""How long torch may try to reach a store, which listens before anybody hears of it: one that is gone is tried too."""
LOOPBACK = "127.0.0.1"
_QUIET = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""ProcessGroupNCCL's watchdogs end the process when a peer dies or a transfer stalls. Here the head says who
died, and the lane has its own clock; torch reads these while a group is made."""
_environ = threading.Lock()


class Store:
    """A TCPStore served by this process.

    Args:
        ip: address to listen on, which is also the one others are told.
        timeout_s: how long a client waits for a key.

    Attributes:
        endpoint: ``IP:PORT``, for `Client`.

    Raises:
        OSError: *ip* is not an address of this machine.
    """

    def __init__(self, ip: str, timeout_s: float) -> None:
        with socket.socket() as listener:
            listener.bind((ip, 0))
            listener.listen()
            port = listener.getsockname()[1]
            self.endpoint = f"{ip}:{port}"
            self._server: Any = _distributed().TCPStore(
                ip,
                port,
                None,
                True,
                timeout=datetime.timedelta(seconds=timeout_s),
                wait_for_workers=False,
                master_listen_fd=listener.detach(),  # its own now
            )

    def close(self) -> None:
        """Stop serving: who waits for a key gets an error. Any thread; twice is fine."""
        self._server = None


def join(endpoint: str, timeout_s: float) -> Any:
    """A client of the store at *endpoint* (``IP:PORT``).

    Raises:
        RuntimeError: nobody serves there.
    """
    ip, _, port = endpoint.rpartition(":")
    patience = datetime.timedelta(seconds=min(CONNECT_S, timeout_s))
    client = _distributed().TCPStore(ip, int(port), None, False, timeout=patience, wait_for_workers=False)
    client.set_timeout(datetime.timedelta(seconds=timeout_s))
    return client


def _distributed() -> Any:
    import torch.distributed

    return torch.distributed


def backends() -> list[str]:
    """The back-ends that torch.distributed has here, as names of the accelerator table; [] without torch."""
    try:
        dist = _distributed()
    except ImportError:
        return []
    if not dist.is_available():
        return []
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
) -> Any:
    """A process group of *size* members; blocks until what its back-end needs of the others is there.

    Args:
        backend: gloo, nccl or one that a vendor's package has registered.
        store: a client of the group's store.
        rank: of this process in it.
        size: number of members.
        timeout_s: of its operations.
        ip: this process's address, for gloo's sockets where GLOO_SOCKET_IFNAME names no interface.
        options: how NCCL is to run.

    Raises:
        RuntimeError: torch cannot make it.
    """
    timeout = datetime.timedelta(seconds=timeout_s)
    prefixed = _distributed().PrefixStore("rlinf-actors", store)
    if backend == "gloo":
        return _gloo(prefixed, rank, size, timeout, ip)
    if backend == "nccl":
        return _nccl(prefixed, rank, size, timeout, options or CollectiveGroupOptions())
    plugin = _distributed().Backend._plugins[backend.upper()]
    if plugin.extended_api:
        raise RuntimeError(f"torch.distributed's back-end {backend!r} cannot be made without a default group")
    return plugin.creator_fn(prefixed, rank, size, timeout)


def _gloo(store: Any, rank: int, size: int, timeout: datetime.timedelta, ip: str) -> Any:
    kind = _distributed().ProcessGroupGloo
    options = kind._Options()
    options._timeout = timeout
    interfaces = [name for name in os.environ.get(ALWAYS_NIC_VARIABLE, "").split(",") if name]
    if ip == LOOPBACK or not interfaces:
        options._devices = [kind.create_device(hostname=ip)]
    else:
        options._devices = [kind.create_device(interface=name) for name in interfaces]
    return kind(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int, timeout: datetime.timedelta, options: CollectiveGroupOptions) -> Any:
    with _variables(_QUIET):
        return _distributed().ProcessGroupNCCL(store, rank, size, nccl_options(options, timeout))


def nccl_options(options: CollectiveGroupOptions, timeout: datetime.timedelta | None = None) -> Any:
    """*options* as ProcessGroupNCCL.Options.

    Raises:
        ValueError: this version of torch, or of its NCCL, has no such option.
    """
    made = _distributed().ProcessGroupNCCL.Options()
    made.is_high_priority_stream = options.is_high_priority_stream
    if timeout is not None:
        made._timeout = timeout
    wanted = {
        "cga_cluster_size": options.accel_cluster_size,
        "max_ctas": options.accel_max_ctas,
        "min_ctas": options.accel_min_ctas,
    }
    for name, value in wanted.items():
        if value is None:
            continue
        config = getattr(made, "config", None)
        if config is None or not hasattr(config, name):
            raise ValueError(f"CollectiveGroupOptions asks for {name}={value}, which this torch's NCCL does not have")
        setattr(config, name, value)
    return made


def abort(group: Any) -> None:
    """End what the group is doing, as far as its back-end can. Any thread."""
    for name in ("abort", "_abort"):
        method = getattr(group, name, None)
        if method is not None:
            with contextlib.suppress(RuntimeError):  # it has ended by itself
                method()
            return


class Wire:
    """A group of two, in one direction: rank 0 sends, rank 1 receives. What goes are bytes (uint8 tensors).

    Args:
        group: of a CCL.
    """

    def __init__(self, group: Any) -> None:
        self.group = group

    def send(self, tensors: Sequence[Any]) -> None:
        """Let the current stream send."""
        for tensor in tensors:
            self.group.send([tensor], RECEIVER, DATA).wait()

    def recv(self, buffers: Sequence[Any]) -> None:
        """Let the current stream receive into *buffers*, of the sizes that are sent."""
        for buffer in buffers:
            self.group.recv([buffer], SENDER, DATA).wait()


class GlooWire(Wire):
    """The same with gloo: it blocks, until all is there.

    gloo does not tell of a transfer that the other side's end has cut in two; it does of a receive that has
    not begun. So each side waits for a byte that follows the transfer. The first byte says that all
    receives are posted: then what is sent arrives in the order of the calls.
    """

    def __init__(self, group: Any) -> None:
        import torch

        super().__init__(group)
        self._bytes = {tag: torch.zeros(1, dtype=torch.uint8) for tag in (POSTED, SENT, ARRIVED)}
        self._last: Any = None

    def send(self, tensors: Sequence[Any]) -> None:
        """Send, and wait until all has arrived."""
        posted, arrived = (self.group.recv([self._bytes[tag]], RECEIVER, tag) for tag in (POSTED, ARRIVED))
        posted.wait()
        works = [self.group.send([tensor], RECEIVER, DATA) for tensor in tensors]
        works.append(self.group.send([self._bytes[SENT]], RECEIVER, SENT))
        arrived.wait()
        for work in works:
            work.wait()

    def recv(self, buffers: Sequence[Any]) -> None:
        """Receive, and wait until all is there."""
        sent = self.group.recv([self._bytes[SENT]], SENDER, SENT)
        works = [self.group.recv([buffer], SENDER, DATA) for buffer in buffers]
        # these two are not waited for: the other side's end would not be told
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
) -> Wire:
    """One end of a wire; as `make`."""
    group = make(backend, store, rank, 2, timeout_s=timeout_s, ip=ip, options=options)
    return GlooWire(group) if backend == "gloo" else Wire(group)


@contextlib.contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    with _environ:
        before = {name: os.environ.get(name) for name in values}
        os.environ.update(values)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def advertised_ip(same_node: bool, node_ip: str, devices: str | None, interfaces: Mapping[str, str]) -> str:
    """The address on which a store listens and of which others are told.

    Args:
        same_node: whether all who need it are on this node.
        node_ip: the node's address.
        devices: RLINF_COMM_NET_DEVICES, names of interfaces; the first one that has an address is taken.
        interfaces: name to address of those of this node.
    """
    if same_node:
        return LOOPBACK
    named: Sequence[str] = (devices or "").split(",")
    return next((interfaces[name] for name in map(str.strip, named) if name in interfaces), node_ip)
