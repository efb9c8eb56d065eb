"""The in-process twin of net.zmq_network for tests: one loop, no sockets, and faults on command.

Everything above the transport interface (`net.link`) runs unchanged on it. `cut` drops all messages from and to a peer,
as on a cut cable; `heal` lets later ones through. `delay` holds messages back for that many seconds of the loop's time.
`drop` decides which single messages are lost. A reachability check of an endpoint in `dark` finds it silent. `members`
maps the identity of a peer to the member behind it.
"""

from __future__ import annotations

import asyncio
import functools
import weakref
from collections.abc import Callable, Sequence

from rlinf_actors.errors import ConfigError
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.net import fault_injection
from rlinf_actors.net.failure_detection import REACHABILITY_TIMEOUT_S
from rlinf_actors.net.link import (
    PLAIN,
    Diagnosis,
    LinkOptions,
    OnAnyThread,
    OnFailed,
    OnMessage,
    OnReset,
    Reachability,
    Verbs,
    peer_name,
)
from rlinf_actors.net.loop import call_threadsafe, handling_failed
from rlinf_actors.net.reachability import CONNECT_S
from rlinf_actors.net.shared_memory import Arena
from rlinf_actors.security.members import LOCAL, Gate, Member


class MemoryNetwork:
    """Listeners and links that live on one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._listeners: dict[str, MemoryListener] = {}
        self._links: weakref.WeakValueDictionary[bytes, MemoryLink] = weakref.WeakValueDictionary()
        self._cut: set[bytes] = set()
        self._ports = 0
        self.forked = False
        self.memory: Arena | None = None
        self.bulk = None
        self.delay = 0.0
        self.dark: set[str] = set()
        self.members: dict[bytes, Member | None] = {}
        self.drop: Callable[[bytes, bytes], bool] = lambda _identity, _header: False

    def listener(
        self,
        on_message: OnMessage,
        *,
        max_bytes: int = -1,
        gate: Gate | None = None,
        on_failed: OnFailed | None = None,
        on_any_thread: OnAnyThread | None = None,
        verbs: Verbs | None = None,
    ) -> MemoryListener:
        return MemoryListener(self, on_message, on_failed)

    def link(
        self,
        endpoint: str,
        identity: bytes,
        on_message: OnMessage,
        options: LinkOptions = PLAIN,
    ) -> MemoryLink:
        link = self._links[identity] = MemoryLink(
            self, endpoint, identity, on_message, options.on_reset, options.on_failed
        )
        return link

    def reset(self, identity: bytes) -> None:
        """Behave as if the connection of this identity's link was lost and made again."""
        link = self._links.get(identity)
        if link is not None and link.open and link.on_reset is not None:
            self._loop.call_soon(link.on_reset)

    def cut(self, identity: bytes) -> None:
        """Drop all messages from and to this identity's link from now on, and those of links with its name."""
        self._cut.add(_name(identity))

    def heal(self, identity: bytes) -> None:
        """Deliver messages from and to this identity's link again, from now on, and those of links with its name."""
        self._cut.discard(_name(identity))

    async def check_reachability(self, endpoint: str, timeout_s: float = REACHABILITY_TIMEOUT_S) -> Reachability:
        if endpoint in self.dark:
            await asyncio.sleep(timeout_s)
            return Reachability.SILENT
        return Reachability.LISTENS if endpoint in self._listeners else Reachability.REFUSED

    async def diagnose(self, endpoint: str) -> Diagnosis:
        found = {
            Reachability.SILENT: Diagnosis.SILENT,
            Reachability.LISTENS: Diagnosis.MUTE,
            Reachability.REFUSED: Diagnosis.NOBODY,
        }
        return found[await self.check_reachability(endpoint, CONNECT_S)]

    def soon(self, function: Callable[[], object]) -> None:
        call_threadsafe(self._loop, function)

    def close(self) -> None:
        for listener in list(self._listeners.values()):
            listener.close()

    def _leave(
        self, end: object, peer: bytes, name: str, header: bytes, identity: bytes, arrive: Callable[[], None]
    ) -> None:
        """Send a message from *end*, subject to the fault rules; *identity* is that of the link."""
        if fault_injection.active is None:
            self._deliver(identity, header, arrive)
        else:
            deliver = functools.partial(self._deliver, identity, header, arrive)
            fault_injection.active.carry("transport.send", end, peer, name, deliver, self._loop)

    def _arrive(
        self, end: MemoryListener | MemoryLink, peer: bytes, name: str, header: bytes, parts: list[Buffer]
    ) -> None:
        def hand_over() -> None:
            try:
                end.on_message(peer, header, parts)
            except Exception as error:  # noqa: BLE001 - it goes to the loop's policy
                fail = None if end.on_failed is None else functools.partial(end.on_failed, peer)
                handling_failed(self._loop, f"handling a message from {peer_name(peer) or name}", error, fail)

        if fault_injection.active is None:
            hand_over()
        else:
            fault_injection.active.carry("transport.receive", end, peer, name, hand_over, self._loop)

    def _deliver(self, identity: bytes, header: bytes, call: Callable[[], None]) -> None:
        if _name(identity) in self._cut or self.drop(identity, header):
            return
        if self.delay:
            self._loop.call_later(self.delay, call)
        else:
            self._loop.call_soon_threadsafe(call)  # links are sent to by any thread


class MemoryListener:
    """The twin of ZmqListener."""

    def __init__(self, network: MemoryNetwork, on_message: OnMessage, on_failed: OnFailed | None = None) -> None:
        self._network = network
        self._endpoint = ""
        self.on_message = on_message
        self.on_failed = on_failed
        self.on_unreachable: Callable[[bytes], None] | None = None
        self.on_drained: Callable[[], None] | None = None
        self.on_ended: Callable[[bytes], None] | None = None
        self.streams: set[bytes] = set()  # links whose end is reported, by `end`
        self.links: dict[bytes, MemoryLink] = {}
        self.open = True

    def bind(self, endpoint: str) -> str:
        if endpoint.endswith((":0", ":*")):
            self._network._ports += 1
            endpoint = f"{endpoint.rpartition(':')[0]}:{40000 + self._network._ports}"
        if endpoint in self._network._listeners:
            raise ConfigError(f"cannot listen on {endpoint}: it is in use")
        self._network._listeners[endpoint] = self
        self._endpoint = endpoint
        return endpoint

    def send(self, peer: bytes, header: bytes, parts: Sequence[Buffer] = (), *, now: bool = False) -> None:
        copies = [bytes(part) for part in parts]

        def arrive() -> None:
            link = self.links.get(peer)
            if link is not None and link.open:
                self._network._arrive(link, b"", link._endpoint, header, list(copies))
            elif self.on_unreachable is not None:
                self.on_unreachable(peer)

        self._network._leave(self, peer, peer.decode(errors="replace"), header, peer, arrive)

    def __contains__(self, peer: bytes) -> bool:
        return peer in self.streams

    def end(self, peer: bytes) -> None:
        """Behave as if the stream of *peer*, one of `streams`, has ended."""
        self.streams.discard(peer)
        if self.on_ended is not None:
            self.on_ended(peer)

    def admit(self, peer: bytes) -> None:
        pass

    def member_of(self, peer: bytes) -> Member | None:
        return self._network.members.get(peer, LOCAL)

    def address_of(self, peer: bytes) -> str:
        return "memory"

    def close(self, linger_ms: int = 0) -> None:
        self.open = False
        self._network._listeners.pop(self._endpoint, None)


class MemoryLink:
    """The twin of ZmqLink. Messages to a listener that does not exist are lost, as during a restart of its process."""

    def __init__(
        self,
        network: MemoryNetwork,
        endpoint: str,
        identity: bytes,
        on_message: OnMessage,
        on_reset: OnReset | None,
        on_failed: OnFailed | None = None,
    ) -> None:
        self._network = network
        self._endpoint = endpoint
        self._identity = identity
        self.on_message = on_message
        self.on_failed = on_failed
        self.on_reset = on_reset
        self.open = True
        if fault_injection.active is not None:
            fault_injection.active.connecting(self, endpoint, network._loop)

    def send(self, header: bytes, parts: Sequence[Buffer] = (), *, now: bool = False) -> None:
        if not self.open:
            return
        copies = [bytes(part) for part in parts]

        def arrive() -> None:  # also after close: that lingers
            listener = self._network._listeners.get(self._endpoint)
            if listener is None:
                return
            listener.links[self._identity] = self
            name = self._identity.decode(errors="replace")
            self._network._arrive(listener, self._identity, name, header, list(copies))

        self._network._leave(self, b"", self._endpoint, header, self._identity, arrive)

    def stands(self) -> bool:
        return False

    def close(self, linger_ms: int = 0) -> None:
        self.open = False


def _name(identity: bytes) -> bytes:
    """Return an identity without its secret part: a process that connects again has a new one."""
    return identity[: identity.rfind(b"#")] if b"#" in identity else identity
