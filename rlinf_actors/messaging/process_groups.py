"""Process groups made directly on a store. torch's default group, the user's, is never touched.

A store is a TCPStore that listens on one given address: torch binds it on all of them otherwise.
Its owner keeps it apart from the client that the group uses, so that dropping it ends whoever waits
for a key of it. TCPStore asks nobody who he is: a group has a name that only members of its job can know, so that who
reaches the port of another's store, or of one that was there before, finds nothing; see docs/explanation/security.md.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from rlinf_actors.environ_block import overridden
from rlinf_actors.hardware.interfaces import interface_of
from rlinf_actors.messaging.options import CollectiveGroupOptions
from rlinf_actors.model.accelerator_table import GLOO_NIC_VARIABLE, group_facts

SENDER, RECEIVER = 0, 1
"""Ranks in a group of two."""
DATA, POSTED, SENT, ARRIVED = range(4)
"""Tags."""
CONNECT_S = 10.0
"""How long torch may try to reach a store, which listens before anybody hears of it: one that is gone is tried too."""
LOOPBACK = "127.0.0.1"
GROUP = "rlinf-actors"


class GroupStore:
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


def backends(plugin: str = "") -> list[str]:
    """The back-ends that torch.distributed has here, as names of the accelerator table; [] without torch.

    Args:
        plugin: module that registers one, where the accelerator's row names such a module; it need not be installed.
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
    """A process group of *size* members; blocks until what its back-end needs of the others is there.

    Args:
        backend: gloo, nccl or one that a vendor's package has registered.
        store: a client of the group's store.
        rank: of this process in it.
        size: number of members.
        timeout_s: of its operations.
        ip: this process's address, for gloo's sockets where GLOO_SOCKET_IFNAME names no interface.
        options: how the CCL is to run.
        name: that all members have in common; begins each key in the store.

    Raises:
        RuntimeError: torch cannot make it.
        ValueError: an option is asked for that this version of the CCL does not have.
    """
    timeout = datetime.timedelta(seconds=timeout_s)
    prefixed = _distributed().PrefixStore(name, store)
    if backend == "gloo":
        return _gloo(prefixed, rank, size, timeout, ip)
    facts = group_facts(backend)
    # nothing to guard without variables: making a group may block, and others must not wait for that
    with overridden(facts.variables) if facts.variables else contextlib.nullcontext():
        made = group_options(backend, options or CollectiveGroupOptions(), timeout)
        plugin = _distributed().Backend._plugins.get(backend.upper())
        if plugin is None:  # torch's own
            return _class(facts.process_group)(prefixed, rank, size, made)
        if not plugin.extended_api:
            return plugin.creator_fn(prefixed, rank, size, timeout)
        return plugin.creator_fn(_extended(prefixed, name, rank, size, timeout), made)


def _extended(store: Any, name: str, rank: int, size: int, timeout: datetime.timedelta) -> Any:
    """What torch hands to a back-end that was registered with ``extended_api=True``."""
    told = _distributed().distributed_c10d._DistributedBackendOptions()
    told.store, told.group_rank, told.group_size, told.timeout = store, rank, size, timeout
    told.group_id, told.global_ranks_in_group = name, list(range(size))
    return told


def _gloo(store: Any, rank: int, size: int, timeout: datetime.timedelta, ip: str) -> Any:
    kind = _distributed().ProcessGroupGloo
    options = kind._Options()
    options._timeout = timeout
    interfaces = [name for name in os.environ.get(GLOO_NIC_VARIABLE, "").split(",") if name]
    if ip == LOOPBACK or not interfaces or interfaces == [interface_of(ip)]:  # gloo takes an interface's first address
        options._devices = [kind.create_device(hostname=ip)]
    else:
        options._devices = [kind.create_device(interface=name) for name in interfaces]
    return kind(store, rank, size, options)


def group_options(backend: str, options: CollectiveGroupOptions, timeout: datetime.timedelta | None = None) -> Any:
    """*options* as the options object of *backend*'s process group; None where it takes none.

    Args:
        backend: the CCL's name in the accelerator table, whose row says what becomes what.
        options: what is wanted; fields that the row does not name change nothing.
        timeout: of the group's operations.

    Raises:
        ValueError: this version of the CCL, or of its torch, has no such option.
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
    name: str = GROUP,
) -> Wire:
    """One end of a wire; as `make`."""
    group = make(backend, store, rank, 2, timeout_s=timeout_s, ip=ip, options=options, name=name)
    return GlooWire(group) if backend == "gloo" else Wire(group)


def advertised_ip(
    same_node: bool, node_ip: str, devices: str | None, interfaces: Mapping[str, str], interface: str = ""
) -> str:
    """The address on which a store listens and of which others are told.

    Args:
        same_node: whether all who need it are on this node.
        node_ip: the node's address.
        devices: RLINF_COMM_NET_DEVICES, names of interfaces; the first one that has an address is taken.
        interfaces: name to first address of those of this node.
        interface: the one that holds *node_ip*, "" for none.
    """
    if same_node:
        return LOOPBACK
    named: Sequence[str] = (devices or "").split(",")
    chosen = next((name for name in map(str.strip, named) if name in interfaces), interface)
    return node_ip if chosen == interface else interfaces[chosen]
