"""A template's socket to its agentd, and the unix socket at which a later agentd adopts the template.

A connection to the unix socket becomes the socket to agentd if its first packet is Adopt; any other connection is
closed. The lock of agentd's run directory guarantees that no two agentds adopt one template.

House rules: nothing blocks; packets that cannot be sent wait in a queue. Without an agentd the template drops its
packets, since an adopting agentd asks for the state of all workers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import time
from collections.abc import Callable
from functools import partial

from rlinf_actors import procfs
from rlinf_actors.errors import RemoteWireError
from rlinf_actors.net.link import LogThrottle
from rlinf_actors.net.unix_sockets import PacketQueue, peer_of
from rlinf_actors.wire import template_protocol as packets

log = logging.getLogger(__name__)


class AgentLink:
    """The template's connection to its agentd, and the socket at which a later agentd can adopt the template.

    All of it runs in the select loop of the template.

    Args:
        selector: selector of the loop. The data of each key is a callback that takes the event mask.
        sock: the socket to the agentd that started the template.
        keep: path of the unix socket for a later agentd; "" if the template ends with its agentd.
        keep_s: seconds from the end of an agentd in which another agentd can adopt the template.
        take: called with each packet of agentd; returns False to stop reading.
        lost: called when agentd has ended.
        keeper: pid of the process that started the template; 0 if unknown. Processes below it are workers, and are not
            taken for an agentd.

    Attributes:
        keep_s: as given, or as a later packet of agentd (KeepFor) has set it.
        since: end of the last agentd that the head had registered, in seconds of CLOCK_MONOTONIC; 0 while such an
            agentd runs.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        sock: socket.socket,
        keep: str,
        keep_s: float,
        take: Callable[[packets.ToTemplate], bool],
        lost: Callable[[], None],
        keeper: int = 0,
    ) -> None:
        self._selector = selector
        self._agent = sock
        self._agent_uid = peer_of(sock)[1]  # may be another user's than this process's
        self._keeper = keeper
        self._keep = keep
        self.keep_s = keep_s
        self._take = take
        self._lost = lost
        self.since = 0.0
        self._deadline: float | None = None
        self._listener: socket.socket | None = None
        self._callers: set[socket.socket] = set()
        self._rejected = LogThrottle()
        self._outgoing = PacketQueue(sock)
        self._buffer = memoryview(bytearray(packets.MAX_PACKET))
        sock.setblocking(False)

    def start(self) -> None:
        """Start to receive agentd's packets. If the template may be adopted, also listen for later agentds.

        Raises:
            OSError: the template cannot listen for later agentds.
        """
        self._selector.register(self._agent, selectors.EVENT_READ, self._on_agent)
        if self._keep:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._listener.setblocking(False)
            self._listener.bind(self._keep)
            self._listener.listen(1)
            self._hear()

    @property
    def orphaned(self) -> bool:
        return self._deadline is not None

    def patience(self) -> float | None:
        """Return for how many more seconds the template waits to be adopted; None while it has an agentd."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def adopted(self) -> None:
        self._deadline = None

    def registered(self, keep_s: float) -> None:
        """Handle agentd's packet KeepFor: the head has registered this agentd.

        If this agentd ends, the template waits *keep_s* seconds for another agentd.
        """
        self.keep_s, self.since = keep_s, 0.0

    def send(self, packet: packets.ToAgent) -> None:
        """Send a packet to agentd, or queue it if the socket is full. Drop it if the template has no agentd."""
        if isinstance(packet, packets.Exited):
            self._hear()  # that freed descriptors
        if self.orphaned:
            return
        if not self._outgoing.send(packets.encode(packet)):
            self._watch_agent()

    def close(self) -> None:
        self._agent.close()
        for caller in self._callers:
            caller.close()
        if self._listener is not None:
            self._listener.close()

    def refuse(self) -> None:
        """Stop listening for later agentds, because the template is about to end."""
        if self._listener is not None:
            self._remove(".sock")
            if self._listener in self._selector.get_map():
                self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None

    def remove(self) -> None:
        """Remove the template's files (.json and .err) at the template's end. If it has an agentd, do nothing, because
        that agentd reads the files and then removes them.
        """
        if self._keep and self.orphaned:
            with contextlib.suppress(PermissionError):  # they are agentd's, if it is another user
                self._remove(".json")
                self._remove(".err")

    def _remove(self, suffix: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._keep.removesuffix(".sock") + suffix)

    # --- events ---

    def _on_agent(self, mask: int) -> None:
        if mask & selectors.EVENT_WRITE and self._outgoing.flush():
            self._watch_agent()
        while True:
            try:
                size = self._agent.recv_into(self._buffer)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # agentd died with unread packets; its own last packets, and the end, can still be read
            if size == 0:
                self._lose()
                return
            try:
                packet = packets.decode_to_template(self._buffer[:size])
            except RemoteWireError as error:  # from an agentd of another version: the workers go on
                log.warning("dropped a packet of agentd: %s", error)
                continue
            if not self._take(packet):
                return

    def _lose(self) -> None:
        self._selector.unregister(self._agent)
        self._agent.close()
        self.since = self.since or time.monotonic()  # agentds that come and go without the head do not extend the time
        self._deadline = self.since + self.keep_s
        self._lost()

    def _hear(self) -> None:
        if self._listener is not None and self._listener not in self._selector.get_map():
            self._selector.register(self._listener, selectors.EVENT_READ, self._on_connection)

    def _on_connection(self, _: int) -> None:
        assert self._listener is not None
        try:
            caller, _address = self._listener.accept()
        except (BlockingIOError, ConnectionError):  # the peer has closed already
            return
        except OSError:  # no descriptor: the agentd waits until there is one, or kills the template
            self._selector.unregister(self._listener)
            return
        caller.setblocking(False)
        pid, uid = peer_of(caller)
        below = self._keeper > 1 and procfs.is_below(pid, self._keeper)
        if uid != self._agent_uid or below:
            self._log_rejected("its process is a worker's" if below else f"its process belongs to user {uid}")
            caller.close()
            return
        self._callers.add(caller)
        self._selector.register(caller, selectors.EVENT_READ, partial(self._on_caller, caller))

    def _on_caller(self, caller: socket.socket, _: int) -> None:
        """Read the first packet of a new connection. If it is Adopt, the caller is an agentd and adopts the template.

        Any other caller is rejected. When an agentd sends Adopt, the previous agentd has ended.
        """
        try:
            packet = packets.decode_to_template(caller.recv(packets.MAX_PACKET))
        except BlockingIOError:
            return
        except (ConnectionError, RemoteWireError):  # closed already, or no agentd
            packet = None
        self._selector.unregister(caller)
        self._callers.discard(caller)
        if not isinstance(packet, packets.Adopt):
            self._log_rejected("its process is no agentd")
            caller.close()
            self._hear()
            return
        if self._agent.fileno() >= 0:
            self._lose()
        self._agent, self._outgoing = caller, PacketQueue(caller)
        self._selector.register(caller, selectors.EVENT_READ, self._on_agent)
        self._take(packet)

    def _log_rejected(self, why: str) -> None:
        if self._rejected.note():
            log.warning("refused a connection to this template's socket (%d so far): %s", self._rejected.count, why)

    def _watch_agent(self) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing else 0)
        if self._agent in self._selector.get_map() and self._selector.get_key(self._agent).events != events:
            self._selector.modify(self._agent, events, self._on_agent)
