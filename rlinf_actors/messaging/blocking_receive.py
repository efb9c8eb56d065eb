"""Receives for which a thread waits at once: `recv()` of a worker, the usual case.

Such a receive needs less than a `PendingReceive`: no code can drop it, await it again or cancel one of several waiters.
So one object is the entry in the mailbox and the result, and its sender is looked up once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlinf_actors.errors import CallTimeoutError
from rlinf_actors.messaging import addressing
from rlinf_actors.messaging.mailbox import ArrivedMessage, Key
from rlinf_actors.messaging.receive import decoded, no_message
from rlinf_actors.runtime.future import Future
from rlinf_actors.runtime.peer import Peer
from rlinf_actors.runtime.remote_group import RemoteGroup
from rlinf_actors.tracing import recorder

if TYPE_CHECKING:
    from rlinf_actors.messaging.messenger import Messenger

SENDERS = 4096
"""Most senders that are remembered."""


class BlockingReceive(Future[ArrivedMessage]):
    """One receive, in the mailbox until it has its message. See `PostedReceive` and `PendingReceive` for the names."""

    incarnation = ""
    closed = False
    loading: ArrivedMessage | None = None
    waits_for_tensors = True

    def __init__(self, what: str, key: Key) -> None:
        super().__init__(what)
        self.key = key

    @property
    def abandoned(self) -> bool:
        return self.closed or self._finished

    def _waited_for(self) -> tuple[str, Sequence[str]]:
        return self._what, [self.key[0]]

    def work(self) -> BlockingReceive:
        return self

    def begins(self, message: ArrivedMessage) -> None:
        """Do nothing: the thread waits until all of the message has arrived."""

    take = Future._finish
    """Takes a message, or returns False: it must go back to the mailbox. Any thread."""

    def reject(self, error: BaseException) -> bool:
        return self._finish(None, error)

    def give_up(self) -> ArrivedMessage | None:
        """Take no message from now on. Return the one that was taken, None if none was."""
        with self._lock:
            message: ArrivedMessage | None = self._value
            self._value, self._finished = None, True
        return message


class BlockingReceives:
    """The blocking receives of one worker. Any thread."""

    def __init__(self, messenger: Messenger) -> None:
        self._messenger = messenger
        self._senders: dict[tuple[str, int], tuple[RemoteGroup, Peer, str, Key]] = {}

    def receive(self, group: str, rank: Any, timeout: float | None) -> Any:
        """Wait for the next object of the worker *group*:*rank*, and return it.

        Raises:
            CallTimeoutError: no message came within *timeout* seconds. The receive takes no later message.
        """
        messenger = self._messenger
        known = self._senders.get((group, rank)) if type(rank) is int and recorder.active is None else None
        if known is not None:
            remote, peer, what, key = known
            peers, ended = remote.peers, remote.closing or remote.gone._finished
            if not ended and group not in messenger.directory.waiting and rank < len(peers) and peers[rank] is peer:
                return self._wait(peer, BlockingReceive(what, key), timeout)
        sender = addressing.address(group, rank)
        value = messenger.wait(messenger.receive(sender), timeout)
        remote_now = messenger.directory.known(group)
        if remote_now is not None and len(sender.rank_path) == 1 and sender.rank < len(remote_now.peers):
            if len(self._senders) == SENDERS:
                self._senders.clear()
            peer, name = remote_now.peers[sender.rank], sender.get_name()
            messenger.watch(peer)  # it may be another one than that of this receive: the worker was started again
            self._senders[group, sender.rank] = remote_now, peer, f"recv() from {name}", (name, "")
        return value

    def forget(self, peer: Peer) -> None:
        """Look the worker *peer* up again before the next receive from it, because it is gone."""
        found_before = list(self._senders.items())  # a list: other threads add to the dict
        self._senders = {to: found for to, found in found_before if found[1] is not peer}

    def _wait(self, peer: Peer, posted: BlockingReceive, timeout: float | None) -> Any:
        messenger = self._messenger
        try:
            messenger._post_receive(posted, peer)
            try:
                message = posted.wait(timeout)
            except CallTimeoutError:
                if messenger.withdraw(posted):
                    raise no_message(posted._what, timeout or 0.0, peer) from None
                message = posted.wait()  # it came at the last moment
        except BaseException:  # a signal handler raised, or the receive failed
            taken = posted.give_up()
            messenger.withdraw(posted)
            if taken is not None:
                messenger.unread(posted.key, taken)
            raise
        return decoded(message)
