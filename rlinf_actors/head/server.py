"""The head as other processes reach it: sockets, timer and store around the coordinator.

agentd and `rlinf-actors head` create a `HeadServer` in their event loop; all of it runs on that thread. It decides
nothing: each message, timer or failed send becomes an event for the coordinator, and each command that the coordinator
returns is carried out in order.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import uuid
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING

from rlinf_actors import version
from rlinf_actors.errors import RemoteWireError
from rlinf_actors.head import commands
from rlinf_actors.head.coordinator import Coordinator
from rlinf_actors.head.key_registry import OwnKeys
from rlinf_actors.head.log_lines import LogLines
from rlinf_actors.net.daemon import CoreShell
from rlinf_actors.net.link import Network, peer_name
from rlinf_actors.net.rpc import ControlServer
from rlinf_actors.security.members import Member
from rlinf_actors.wire.control_codec import Envelope, Notice, Request

if TYPE_CHECKING:  # a private head remembers nothing, and need not load a database
    from rlinf_actors.head.audit import AuditLog
    from rlinf_actors.head.event_store import EventStore
    from rlinf_actors.head.hooks import Hooks
    from rlinf_actors.head.store import HeadStore

log = logging.getLogger(__name__)


class HeadServer:
    """The head as a server: sockets, timer and store around the coordinator. Loop thread only, except `admit`.

    Its sockets call `admit` to check keys, and `refused` for connections that they reject (security.members.Gate).

    Args:
        network: the sockets of this process.
        timing: the head's timers.
        embedded: True if the head belongs to one driver, which may end it.
        store: the persistent state, None for a head that ends with its driver; closed with the head.
        events: the file of the event log, None for an event log that ends with the head; closed with the head.
        hooks: the programs and pages that are told of events, None for none; closed with the head.
        audit: the audit log, None for a head that ends with its driver; closed with the head.
        own: the head's own keys, None without keys.
        on_end: called once, with the reason, when a driver or the administrator has ended the cluster.

    Attributes:
        endpoints: the endpoints that the head listens on; empty before `start`.
    """

    def __init__(
        self,
        network: Network,
        *,
        timing: commands.Timing | None = None,
        embedded: bool = False,
        store: HeadStore | None = None,
        events: EventStore | None = None,
        hooks: Hooks | None = None,
        audit: AuditLog | None = None,
        own: OwnKeys | None = None,
        on_end: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        before = store.remembered if store is not None else commands.Snapshot()
        before.events = events.remembered if events is not None else None
        epoch = f"{before.epoch}-{uuid.uuid4().hex[:12]}" if store is not None else uuid.uuid4().hex
        identity = commands.Identity(epoch, version.VERSION, embedded)
        new_token, now = lambda: secrets.token_hex(16), self._loop.time()
        self._coordinator = Coordinator(
            identity, timing or commands.Timing(), new_token, now, before, own or OwnKeys(), job_key
        )
        if before.events is not None:
            before.events.events.clear()  # the event log has them, and will drop them; this list would not
        self._shell = CoreShell[commands.Event, commands.Command](
            self._loop, "the head", self._decide, self._coordinator.next_deadline, self._carry_out,
            tick=commands.TimerDue(), stalled=commands.HeadStalled, finish=self._finish_turn,
            unfinished=self._coordinator.unfinished, more=commands.SliceDue(), spent=self._spent,
        )  # fmt: skip
        self._store = store
        self._events = events
        self._hooks = hooks
        self._coordinator.log.is_watched = events is not None or hooks is not None
        if hooks is not None:
            self._coordinator.hooks = hooks.states
        self._audit = audit
        self._lines = LogLines()
        unreachable = lambda peer: self._shell.handle(commands.PeerUnreachable(peer))  # noqa: E731
        self._server = ControlServer(
            network, self._received, unreachable, self, self._shell.finish_turn, self._beyond_bound, self._long
        )
        self._on_end = on_end
        self.endpoints: list[str] = []

    def _persist(self, command: commands.Persist) -> None:
        store = self._store
        if store is None:
            if command.then is not None:
                self._shell.carry_out([command.then])
            return

        def written(durable: bool) -> None:
            if self._store is None:
                return  # closed meanwhile
            answer = command.then if durable else command.instead
            if answer is not None:
                self._shell.carry_out([answer])
            self._shell.handle(commands.StoreStatus(store.trouble))

        store.write([command.change], written)

    def start(self, endpoints: Sequence[str]) -> list[str]:
        """Listen, and return the endpoints with their actual ports.

        Raises:
            ConfigError: an endpoint is not allowed.
            OSError: an endpoint is in use, or not of this machine.
        """
        for endpoint in endpoints:
            self.endpoints.append(self._server.bind(endpoint))
        self._shell.carry_out(self._coordinator.started(self.endpoints, time.time()))
        self._report_events()
        return self.endpoints

    def admit(self, public_key: str) -> Member | None:
        """Return the member that holds this key, None if the key is not valid.

        The sockets call it for every frame, on any thread.
        """
        return self._coordinator.admit(public_key, time.time())

    def refused(self, public_key: str, address: str, why: str = "", times: int = 1) -> None:
        self._shell.handle(commands.ConnectionRejected(public_key, address, why, times))

    def close(self, reason: str = "", restarting: bool = False) -> None:
        """Stop listening. It is safe to call this twice.

        Args:
            reason: sent to clients and, for a restart, to agentds; "" sends nothing, as in a crash.
            restarting: True if another head will soon listen at this address, so that workers and groups go on; False
                if the cluster ends.
        """
        if reason:
            self._coordinator.stopping(reason, restarting, time.time())
        self._shell.carry_out(self._finish_turn())
        if reason:
            self._shell.carry_out((self._coordinator.restarting if restarting else self._coordinator.farewell)(reason))
        self._lines.flush()
        self._shell.close()
        self._server.close(linger_ms=200 if reason else 0)
        store, self._store = self._store, None
        if store is not None:
            store.close()
        events, self._events = self._events, None
        if events is not None:
            events.close()
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.close()
        audit, self._audit = self._audit, None
        if audit is not None:
            audit.close()

    def _received(self, peer: bytes, envelope: Envelope) -> None:
        message = self._message(peer, envelope)
        if message is not None:
            self._shell.handle(message)

    def _message(self, peer: bytes, envelope: Envelope) -> commands.Message | None:
        member = self._server.member_of(peer)
        if member is None:
            return None  # its key has ended since the message arrived
        if isinstance(envelope, Request):
            if self._audit is not None:
                whose = self._coordinator.jobs.whose(member.job) if member.job else ""
                self._audit.begun(peer, envelope.id, envelope.body, member, self._server.address_of(peer), whose)
            return commands.RequestReceived(peer, envelope.id, envelope.body, member)
        if isinstance(envelope, Notice):
            return commands.NoticeReceived(peer, envelope.body, member)
        log.warning("%r sent a %s; the head sends no requests", peer_name(peer), type(envelope).__name__)
        return None

    def _long(self, peer: bytes, decoding: Generator[None, None, Envelope]) -> None:
        member = self._server.member_of(peer)
        if member is not None:
            self._shell.handle(commands.LongMessage(peer, self._decoded(peer, decoding), member))

    def _decoded(
        self, peer: bytes, decoding: Generator[None, None, Envelope]
    ) -> Generator[None, None, commands.Message | None]:
        try:
            envelope = yield from decoding
        except RemoteWireError as error:
            self._loop.call_soon(self._server.malformed, peer, error)  # this is in the middle of an event
            return None
        return self._message(peer, envelope)

    def _beyond_bound(self, peer: bytes, message: str, text: str) -> None:
        member = self._server.member_of(peer)
        if member is not None:
            self._shell.handle(commands.MessageRefused(member, message, text))

    def _decide(self, event: commands.Event, now: float) -> list[commands.Command]:
        return self._coordinator.apply(event, now, time.time())

    def _spent(self, seconds: float) -> None:
        """Charge the time of a slice to the member for which it was done."""
        holder = self._coordinator.slices.worked_for
        if holder:
            self._server.worked(holder, seconds)

    def _finish_turn(self) -> list[commands.Command]:
        self._lines.flush()
        out = self._coordinator.finish_turn()
        if self._coordinator.log.is_watched:
            added, dropped = self._coordinator.log.take_changes()
            if self._hooks is not None:
                for one in added:
                    self._hooks.tell(one.event)
            if self._events is not None and (added or dropped):
                self._events.write(added, dropped, self._report_events)
        return out

    def _report_events(self) -> None:
        if self._events is not None:
            self._shell.handle(commands.StoreStatus(self._events.trouble, self._events.path))

    def _carry_out(self, command: commands.Command) -> None:
        if isinstance(command, commands.Notify):
            self._server.notify(command.peer, command.body)
        elif isinstance(command, commands.Answer):
            self._server.reply(command.peer, command.id, command.body)
            if self._audit is not None:
                self._audit.answered(command.peer, command.id)
        elif isinstance(command, commands.Refuse):
            self._server.fail(command.peer, command.id, command.kind, command.text, command.missing_ranks, command.path)
            if self._audit is not None:
                self._audit.refused(command.peer, command.id, command.kind, command.text)
        elif isinstance(command, commands.LogEvent):
            self._lines.add(command)
            if command.kind == "refused" and self._audit is not None:
                self._audit.noted(command.text)
        elif isinstance(command, commands.HoldBack):
            self._server.hold_back(command.peer, command.held)
        elif isinstance(command, commands.Persist):
            self._persist(command)
        elif isinstance(command, commands.EndCluster):
            self._on_end(command.reason)


def job_key(token: str) -> str:
    """Return the public key of the job whose token is *token*."""
    from rlinf_actors.security.job import job_pair

    return job_pair(token).public
