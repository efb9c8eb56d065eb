"""Control messages over a Listener or a Link: notices, and requests with exactly one answer each. Loop thread only.

The head uses `ControlServer`; agentds, drivers and workers use `ControlClient`. `wire.control_codec` checks control
messages; a malformed message is dropped, with a warning in the log.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import logging
from collections.abc import Callable, Generator, Sequence
from typing import Union

import msgspec

from rlinf_actors.errors import (
    AuthenticationError,
    ClusterTimeoutError,
    ConfigError,
    EmergencyStopError,
    GroupNotFoundError,
    HardwareInUseError,
    InternalError,
    NameInUseError,
    NodeLostError,
    PlacementError,
    ProtocolMismatchError,
    RemoteWireError,
    RlinfActorsError,
    UsageError,
)
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.net import fault_injection
from rlinf_actors.net.framing import FULL
from rlinf_actors.net.link import HeldBack, Link, LinkOptions, LogThrottle, Network, Verbs, peer_name
from rlinf_actors.net.reachability import HeadVerifier
from rlinf_actors.security.members import Gate
from rlinf_actors.wire import control_codec, stepwise
from rlinf_actors.wire.client_messages import Warn
from rlinf_actors.wire.control_codec import Body, Envelope, Failed, Notice, Reply, Request
from rlinf_actors.wire.protocol import MAX_ASKED_BYTES, MAX_CONTROL_BYTES

log = logging.getLogger(__name__)

MAX_FRAME = MAX_CONTROL_BYTES + FULL
"""Most bytes of a frame. The last message of a full chunk may have the greatest length."""
FAILED_CHARS = 1 << 16
"""Most characters in the text of a refusal. The text quotes the request, which may be long."""

STOPS = frozenset({b"EStop"})
"""Tags of the messages that the head handles before all others."""
BEATS = frozenset({b"Beat"})
"""Tags of the messages that also pass while their connection is held back."""
URGENT = frozenset({b"Beat", b"Goodbye", b"StopGroup", b"EndGroup", b"StopCluster"})
"""Tags of the messages that the head handles before those of other connections."""

_REFUSALS: dict[str, type[RlinfActorsError]] = {
    "name_in_use": NameInUseError,
    "hardware_in_use": HardwareInUseError,
    "not_found": GroupNotFoundError,
    "placement": PlacementError,
    "authentication": AuthenticationError,
    "protocol": ProtocolMismatchError,
    "usage": UsageError,
    "emergency_stop": EmergencyStopError,
    "node_lost": NodeLostError,
}


ANSWER_S = 30.0
"""Most seconds to wait for the answer to a hello although the connection stands. So a stopped head gets few hellos, and
a connection that libzmq no longer reads is replaced."""


class _LateError(Exception):
    pass


class PartsMissingError(RlinfActorsError):
    """The head does not have all parts of a launch, because it was restarted meanwhile."""


class KeyRefusedError(AuthenticationError):
    """The head's socket rejected this process's key, so the head never received the request."""


_REFUSALS["parts"] = PartsMissingError


def refusal(failed: Failed) -> RlinfActorsError:
    if failed.kind in ("timeout", "unreachable"):
        return ClusterTimeoutError(failed.text, missing_ranks=failed.missing_ranks)
    if failed.kind == "config":
        return ConfigError(failed.text, path=failed.path)
    return _REFUSALS.get(failed.kind, RlinfActorsError)(failed.text)


class ControlServer:
    """The head's end of all control connections: receives requests and notices, and sends answers and notices.

    Args:
        network: makes the listener.
        on_envelope: called with the sender's identity and each well-formed message.
        on_unreachable: called with a peer's identity after a message to it was dropped because it is not connected.
        gate: decides which keys are admitted.
        on_drained: called after the messages that arrived together, before the answers to them leave.
        on_bound: called with the sender's identity, the name of the message and the text, for a message that was not
            decoded because a value in it is longer than its bound. The sender has been told.
        on_long: called with the sender's identity and a generator that decodes a long message (`wire.stepwise`),
            instead of `on_envelope`. Its RemoteWireError goes to `malformed`, in a later turn. None to decode all at
            once.

    Attributes:
        member_of, address_of: return the member that a peer is and its address, as those of `Listener` do.
    """

    def __init__(
        self,
        network: Network,
        on_envelope: Callable[[bytes, Envelope], None],
        on_unreachable: Callable[[bytes], None] | None = None,
        gate: Gate | None = None,
        on_drained: Callable[[], None] | None = None,
        on_bound: Callable[[bytes, str, str], None] | None = None,
        on_long: Callable[[bytes, Generator[None, None, Envelope]], None] | None = None,
    ) -> None:
        self._held_back = HeldBack()
        verbs = Verbs(control_codec.verb_of, STOPS, URGENT, self._refuse, BEATS, self._held_back)
        self._listener = network.listener(self._received, max_bytes=MAX_FRAME, gate=gate, verbs=verbs)
        self._on_bound = on_bound
        self._on_long = on_long
        self._listener.on_unreachable = on_unreachable
        self._listener.on_drained = on_drained
        self._on_envelope = on_envelope
        self._last_notice: tuple[Body | None, bytes] = None, b""  # one notice often goes to a thousand peers
        self._malformed = LogThrottle()
        self.member_of = self._listener.member_of
        self.address_of = self._listener.address_of

    def bind(self, endpoint: str) -> str:
        return self._listener.bind(endpoint)

    def notify(self, peer: bytes, body: Body) -> None:
        """Send a notice to a peer. If the peer is not connected or the notice is too long, the notice is dropped."""
        if body is not self._last_notice[0]:
            try:
                self._last_notice = body, control_codec.encode(Notice(body))
            except control_codec.TooLongError as error:
                log.error("%s is not told: %s", peer_name(peer), error)
                return
        self._send("rpc.notice", peer, body, self._last_notice[1])

    def reply(self, peer: bytes, request_id: int, body: Body) -> None:
        """Answer a request of a peer. If the answer is too long to send, refuse the request instead."""
        try:
            self._send("rpc.reply", peer, body, control_codec.encode(Reply(request_id, body)))
        except control_codec.TooLongError as error:
            self.fail(peer, request_id, "usage", str(error))

    def fail(
        self,
        peer: bytes,
        request_id: int,
        kind: str,
        text: str,
        missing_ranks: Sequence[int] = (),
        path: str = "",
    ) -> None:
        """Refuse a request of a peer: the client raises an error.

        Args:
            peer: identity of the client.
            request_id: number of the request.
            kind: chooses the class of the error (`refusal`).
            text: text of the error.
            missing_ranks: ranks of the nodes that have not registered, if the request waited for them.
            path: place of the wrong value (an option, variable or key of a file), if the error is about configuration.
        """
        text, path = (part if len(part) <= FAILED_CHARS else f"{part[: FAILED_CHARS - 1]}…" for part in (text, path))
        failed = Failed(request_id, kind, text, list(missing_ranks), path)
        self._send("rpc.reply", peer, failed, control_codec.encode(failed))

    def hold_back(self, peer: bytes, held: bool) -> None:
        """Hand out no messages of *peer* from now on, except beats and emergency stops; go on if not *held*."""
        (self._held_back.hold if held else self._held_back.release)(peer)

    def worked(self, holder: str | bytes, seconds: float) -> None:
        """Charge a member, by its key, or a connection without one for work on a message that was handed out before."""
        self._held_back.on_work(holder, seconds)

    def close(self, linger_ms: int = 0) -> None:
        self._listener.close(linger_ms)

    def _refuse(self, peer: bytes, message: bytes, why: str) -> None:
        """Refuse a request that was not decoded."""
        number = control_codec.number_of(message)
        if number is not None:
            self.fail(peer, number, "usage", why)

    def _send(self, point: str, peer: bytes, body: object, frame: bytes) -> None:
        faults = fault_injection.active
        if faults is None:
            self._listener.send(peer, frame)
        else:
            send = functools.partial(self._listener.send, peer, frame)
            faults.carry(point, self, peer, type(body).__name__, send, asyncio.get_running_loop())

    def _received(self, peer: bytes, header: bytes, parts: list[Buffer]) -> None:
        if peer.startswith(b"\0"):
            return  # of a connection that its peer has replaced: libzmq renames it, so no answer can reach the peer
        if self._on_long is not None and len(header) > stepwise.WHOLE:
            self._on_long(peer, stepwise.decode_in_steps(header))
            return
        try:
            envelope = control_codec.decode(header)
        except RemoteWireError as error:
            self.malformed(peer, error)
            return
        self._on_envelope(peer, envelope)

    def malformed(self, peer: bytes, error: RemoteWireError) -> None:
        """Tell the sender of a message that a value in it is too long, or else the log that it was malformed."""
        if isinstance(error, control_codec.BoundError):
            self._beyond_bound(peer, error)
        elif self._malformed.note():
            log.warning("dropped a message from %r (%d such by now): %s", peer_name(peer), self._malformed.count, error)

    def _beyond_bound(self, peer: bytes, error: control_codec.BoundError) -> None:
        """Tell the sender of a message, and the owner of this server, that a value in the message is too long."""
        text = f"the head refuses this {error.message}: {error}"
        if error.request is not None:
            self.fail(peer, error.request, "usage", text)
        elif peer.startswith((b"driver:", b"worker:")):  # agentds know no Warn
            self.notify(peer, Warn(text))
        if self._on_bound is not None:
            self._on_bound(peer, error.message, str(error))


class _PendingRequest(msgspec.Struct):
    body: Body
    future: asyncio.Future[Body]
    on_reply: Callable[[Body], None] | None
    first: bool  # a hello, which opens the session
    until: float = 0.0  # when the wait ends, although the connection stands
    timer: Union[asyncio.TimerHandle, None] = None


class ControlClient:
    """The connection of an agentd, driver or worker to the head, for control messages.

    Args:
        network: makes the link.
        endpoint: the head's endpoint.
        identity: identity of the connection at the head (`secret_identity`).
        on_notice: called with each notice of the head.
        on_reset: called when a lost connection was made again, also with a head that was restarted at its address.
            Messages in flight may be lost.
        explains: True if an error may find out which program listens at the head's address. False for agentds that were
            registered before, which would all connect at one moment.
        on_failed: called with a notice and an error after *on_notice* raised an unexpected exception for that notice.
    """

    def __init__(
        self,
        network: Network,
        endpoint: str,
        identity: bytes,
        on_notice: Callable[[Body], None],
        on_reset: Callable[[], None] | None = None,
        explains: bool = True,
        on_failed: Callable[[Body, InternalError], object] | None = None,
    ) -> None:
        self.endpoint = endpoint
        self._on_failed = on_failed
        self._handling: Envelope | None = None
        self._on_notice = on_notice
        self._pending: dict[int, _PendingRequest] = {}
        self._next = 0
        self._closed = self._holding = False
        self._heard = False
        self._refused: AuthenticationError | None = None
        self._verifier = HeadVerifier(network, endpoint, self._abandon_hello, explains)
        self._open: Callable[[bytes], Link] = lambda identity: network.link(
            endpoint,
            identity,
            self._received,
            LinkOptions(on_rejected=self._rejected, on_reset=on_reset, on_failed=self._failed),
        )
        self._link = self._open(identity)

    async def request(
        self,
        body: Body,
        timeout: float | None = None,
        on_reply: Callable[[Body], None] | None = None,
        *,
        first: bool = False,
        on_waiting: Callable[[str], object] | None = None,
    ) -> Body:
        """Send a request to the head and return the answer. If the caller cancels, the head may still carry out the
        request.

        Args:
            body: the request.
            timeout: seconds to wait for the answer, None for no limit.
            on_reply: called with the answer as it arrives, before any notice that the head sent after the answer.
            first: True for a hello. A hello registers this process with the head, so it does not wait for `resume`.
            on_waiting: called after *timeout* seconds, and again after each further *timeout*, with the reason, while
                the connection to the head stands (`stands`), for ANSWER_S at most. The head is busy or stopped then,
                and a repeated request would only add to its work. None to wait for *timeout* seconds in any case.

        Raises:
            ClusterTimeoutError: there was no answer within *timeout* seconds.
            UsageError: the request is longer than the head accepts.
            RlinfActorsError: the head refused the request (the class of the error says why), or this client was closed.
        """
        if self._closed:
            raise RlinfActorsError(f"the connection to the head at {self.endpoint} is closed")
        if self._refused is not None and (first or not self._heard):
            raise self._refused.with_traceback(None)
        self._next += 1
        request_id = self._next
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Body] = loop.create_future()
        asked = self._pending[request_id] = _PendingRequest(body, future, on_reply, first)
        if timeout is not None:
            asked.until = loop.time() + ANSWER_S
            self._time_out(asked, timeout, on_waiting)
        try:
            if first or not self._holding:
                self._send("rpc.request", body, Request(request_id, body), now=True)
            else:
                control_codec.encode(Request(request_id, body), MAX_ASKED_BYTES)  # raises now, and not in `resume`
            return await future
        except _LateError:
            raise ClusterTimeoutError(
                f"the head at {self.endpoint} did not answer {type(body).__name__} within {timeout:g} s; "
                f"{await self._verifier.why()}"
            ) from None
        finally:
            del self._pending[request_id]
            if asked.timer is not None:
                asked.timer.cancel()

    def _time_out(self, asked: _PendingRequest, timeout: float, on_waiting: Callable[[str], object] | None) -> None:
        asked.timer = asyncio.get_running_loop().call_later(timeout, self._late, asked, timeout, on_waiting)

    def _late(self, asked: _PendingRequest, timeout: float, on_waiting: Callable[[str], object] | None) -> None:
        if asked.future.done():
            return
        if on_waiting is not None and self.stands() and asyncio.get_running_loop().time() < asked.until:
            self._time_out(asked, timeout, on_waiting)
            on_waiting(
                f"the connection to the head at {self.endpoint} stands, but {type(asked.body).__name__} is not "
                "answered yet: the head is busy or stopped"
            )
        else:
            asked.future.set_exception(_LateError)

    def stands(self) -> bool:
        """Return True if the connection to the head stands, and all that was sent has arrived (`Link.stands`)."""
        return not self._closed and self._link.stands()

    def notify(self, body: Body) -> None:
        """Send a notice to the head. If the notice is too long, drop it and log an error."""
        try:
            if not self._closed:
                self._send("rpc.notice", body, Notice(body))
        except control_codec.TooLongError as error:
            log.error("the head at %s is not told: %s", self.endpoint, error)

    def repeat_first(self) -> None:
        """Send this process's hello again if the head has not answered it.

        A hello registers a process with the head.
        """
        for request_id, asked in list(self._pending.items()):
            if asked.first:
                self._send("rpc.request", asked.body, Request(request_id, asked.body))

    def repeat(self, body: Body) -> None:
        """Send the request with this body again if the head has not answered it."""
        for request_id, asked in list(self._pending.items()):
            if asked.body is body and not asked.future.done():
                self._send("rpc.request", body, Request(request_id, body))

    def hold(self) -> None:
        """Keep back further requests until `resume`, because this process is not registered with the head now."""
        self._holding = True

    def resume(self) -> None:
        """Send all unanswered requests, because this process is registered with the head again.

        Some of them may have been answered before, and the answers lost. The head recognizes a repeated request.
        """
        self._holding = False
        for request_id, asked in list(self._pending.items()):
            if (
                not asked.first and not asked.future.done()
            ):  # done while `request` still awaits the diagnosis for its error
                self._send("rpc.request", asked.body, Request(request_id, asked.body))

    def reopen(self, identity: bytes) -> None:
        """Replace the connection to the head by a new one. Unsent messages are dropped.

        The old connection may hang for long if the head's machine has vanished. The caller then says hello by the new
        one, with its own *identity*, and calls `resume`: the head forgets the requests of the old connection.

        Raises:
            OSError: no socket can be opened. Messages are then lost until another `reopen` succeeds.
        """
        if not self._closed:
            self._verifier.reset()
            self._refused = None
            self._link.close()  # first, because the new one may need its descriptors
            self._link = self._open(identity)

    def close(self, linger_ms: int = 0, error: RlinfActorsError | None = None) -> None:
        """Close the connection to the head. Messages not sent within *linger_ms* milliseconds are dropped. Idempotent.

        Requests that wait for an answer raise *error*; if it is None, they raise an RlinfActorsError.
        """
        if self._closed:
            return
        self._closed = True
        self._verifier.reset()
        self._link.close(linger_ms)
        error = error or RlinfActorsError(f"the connection to the head at {self.endpoint} was closed")
        for asked in self._pending.values():
            if not asked.future.done():
                asked.future.set_exception(copy.copy(error))  # each waiter raises its own

    def _send(self, point: str, body: Body, envelope: Envelope, now: bool = False) -> None:
        faults = fault_injection.active
        if faults is None:
            self._link.send(control_codec.encode(envelope, MAX_ASKED_BYTES), now=now)
        else:
            send = functools.partial(self._link.send, control_codec.encode(envelope, MAX_ASKED_BYTES))
            faults.carry(point, self, b"", type(body).__name__, send, asyncio.get_running_loop())

    def _rejected(self, why: str, for_good: bool) -> None:
        self._verifier.failed(why, for_good)
        if for_good:
            self._refused = KeyRefusedError(f"the head at {self.endpoint} refused: {why}")
            self._abandon_hello(self._refused)

    def _abandon_hello(self, error: AuthenticationError) -> None:
        """Make this process's hello raise *error* if it is unanswered. A hello registers a process with the head.

        If the head has never sent a message, make all unanswered requests raise *error*.
        """
        for asked in self._pending.values():
            if (asked.first or not self._heard) and not asked.future.done():
                asked.future.set_exception(error)

    def _received(self, peer: bytes, header: bytes, parts: list[Buffer]) -> None:
        self._heard = True
        self._handling = None
        self._verifier.heard()
        try:
            envelope = self._handling = control_codec.decode(header)
        except RemoteWireError as error:
            log.warning("dropped a message from the head at %s: %s", self.endpoint, error)
            return
        if isinstance(envelope, Notice):
            self._on_notice(envelope.body)
            return
        asked = self._pending.get(envelope.id)
        if asked is None or asked.future.done():
            return  # cancelled or timed out meanwhile
        if isinstance(envelope, Reply):
            if asked.on_reply is not None:
                try:
                    asked.on_reply(envelope.body)
                except Exception as error:  # noqa: BLE001 - it belongs to the caller of `request`
                    asked.future.set_exception(error)
                    return
            asked.future.set_result(envelope.body)
        elif isinstance(envelope, Failed):
            if envelope.kind == "hello" and self._holding:
                return  # sent before the head knew us again: `resume` repeats the request
            asked.future.set_exception(refusal(envelope))

    def _failed(self, _peer: bytes, error: InternalError) -> None:
        envelope = self._handling
        if isinstance(envelope, Notice):
            if self._on_failed is not None:
                self._on_failed(envelope.body, error)
        elif isinstance(envelope, (Reply, Failed)):
            asked = self._pending.get(envelope.id)
            if asked is not None and not asked.future.done():
                asked.future.set_exception(error)
