"""Every error a user of rlinf-actors can meet.

House rule: a message says what happened, to whom, and what to try. All classes pickle: their
first argument is the message, everything else is a keyword with a default.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence


class RlinfActorsError(Exception):
    """Base of every error this project raises on purpose."""


class ConfigError(RlinfActorsError, AssertionError, ValueError):
    """The ``cluster:`` section is wrong.

    It is an AssertionError too because scripts written for RLinf catch that.

    Attributes:
        path: where the fault is, e.g. ``cluster.node_groups[2].env_configs[0].node_ranks``.
    """

    def __init__(self, message: str = "", *, path: str = "") -> None:
        super().__init__(message)
        self.path = path

    def __str__(self) -> str:
        message = super().__str__()
        return f"{self.path}: {message}" if self.path else message


class PlacementError(RlinfActorsError, AssertionError, ValueError):
    """A placement string or strategy does not fit its rules or the cluster."""


class ClusterTimeoutError(RlinfActorsError, TimeoutError):
    """The head could not be reached, or nodes were missing, when the time was up.

    Attributes:
        missing_ranks: node ranks that had not registered.
    """

    def __init__(self, message: str = "", *, missing_ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.missing_ranks = tuple(missing_ranks)


class CallTimeoutError(RlinfActorsError, TimeoutError):
    """A wait or a deadline on the caller's side ended; the worker itself raised nothing."""


class EndedError(RlinfActorsError):
    """Base of the errors of an end: a worker, a node, or the other end of a message or channel is gone for good.

    `WorkerDiedError`, `NodeLostError`, `PeerDiedError` and `ChannelBrokenError` are its subclasses. What was under way
    may have run or not. It is not sent again.
    """


class NodeLostError(EndedError):
    """A node stopped answering and its lease is over.

    Attributes:
        node_rank: rank of the node in the cluster, -1 if it had none yet.
    """

    def __init__(self, message: str = "", *, node_rank: int = -1) -> None:
        super().__init__(message)
        self.node_rank = node_rank


class ConnectionLostError(RlinfActorsError, ConnectionError):
    """A connection between two processes was lost and made anew: what was under way on it may have run or not.

    It is no `EndedError`: both ends are there. Later calls go over the new connection; workers that exchange messages
    over the old one cannot go on with them, for one may be missing.
    """


class WorkerError(RlinfActorsError):
    """A method of a worker raised.

    What a caller catches is also an instance of the original's type where that type can be
    imported and mixed (``except ValueError`` works); ``__cause__`` is the original.

    Attributes:
        worker: name of the worker, ``group:rank``.
        rank: its rank.
        node: name or address of its node.
        remote_traceback: the traceback as text, as the worker saw it.
    """

    def __init__(
        self,
        message: str = "",
        *,
        worker: str = "",
        rank: int = -1,
        node: str = "",
        remote_traceback: str = "",
    ) -> None:
        super().__init__(message)
        self.worker = worker
        self.rank = rank
        self.node = node
        self.remote_traceback = remote_traceback

    def __str__(self) -> str:
        message = Exception.__str__(self)
        if not self.remote_traceback:
            return message
        return f"{message}\n--- traceback in {self.worker} on {self.node} ---\n{self.remote_traceback.rstrip()}"


class WorkerDiedError(EndedError):
    """A worker's process ended while it was needed.

    Attributes:
        worker: name of the worker, ``group:rank``.
        rank: its rank.
        node: name or address of its node.
        exit_code: its exit code, None if a signal ended it or it is unknown.
        signal: number of the signal that ended it, None otherwise.
        oom: "yes" if the kernel's memory controller says so, "suspected" if only the
            circumstances do, "no" otherwise.
        stderr_tail: the last lines it wrote to stderr.
    """

    def __init__(
        self,
        message: str = "",
        *,
        worker: str = "",
        rank: int = -1,
        node: str = "",
        exit_code: int | None = None,
        signal: int | None = None,
        oom: str = "no",
        stderr_tail: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.worker = worker
        self.rank = rank
        self.node = node
        self.exit_code = exit_code
        self.signal = signal
        self.oom = oom
        self.stderr_tail = tuple(stderr_tail)


class WorkerStartError(RlinfActorsError):
    """A worker could not be started: interpreter or package missing, class not importable there.

    Attributes:
        worker: name of the worker, ``group:rank``.
        node: name or address of its node.
    """

    def __init__(self, message: str = "", *, worker: str = "", node: str = "") -> None:
        super().__init__(message)
        self.worker = worker
        self.node = node


class PeerDiedError(EndedError):
    """The other end of a message, broadcast or channel operation is gone.

    Attributes:
        peer: name of the one that is gone.
    """

    def __init__(self, message: str = "", *, peer: str = "") -> None:
        super().__init__(message)
        self.peer = peer


class ChannelClosedError(RlinfActorsError):
    """The channel was closed, by `Channel.close` in some process: its orderly end, which ends a loop over it."""


class ChannelBrokenError(PeerDiedError):
    """The channel ended otherwise than by `Channel.close`, and the items that waited in it are gone.

    The message says why: its host died, the process that created it ended, or this process left the cluster.
    """


class ItemNotProcessedError(RlinfActorsError):
    """A take met an item whose deliveries had failed `max_deliveries` times.

    The item is on the list that `Channel.undeliverable` gives, and the next take goes on with the next item.

    Attributes:
        key: of the item's queue.
        deliveries: how many there were.
        consumer: who had the last one, "" if that was a get.
        reason: how that ended: the exception in the consumer's block, or the end of its process.
    """

    def __init__(
        self, message: str = "", *, key: Hashable = None, deliveries: int = 0, consumer: str = "", reason: str = ""
    ) -> None:
        super().__init__(message)
        self.key = key
        self.deliveries = deliveries
        self.consumer = consumer
        self.reason = reason


class AuthenticationError(RlinfActorsError):
    """A peer is not who it must be for what it asked."""


class NotTheHeadError(AuthenticationError):
    """What listens at the head's address is not that head: it has another key, or is another program."""


class ProtocolMismatchError(RlinfActorsError):
    """Two sides speak different versions; the message names both."""


class SerializationError(RlinfActorsError, TypeError):
    """An object cannot travel.

    Attributes:
        path: the attribute path to the part that cannot be pickled, e.g. ``args[0].model.lock``.
    """

    def __init__(self, message: str = "", *, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class NameInUseError(RlinfActorsError, ValueError):
    """A group or channel of that name is running in this namespace."""


class HardwareInUseError(RlinfActorsError):
    """A robot or other exclusive hardware is held by another group.

    The message names the piece, the group, its namespace, owner and node, and how long it has had it.
    """


class GroupNotFoundError(RlinfActorsError, ValueError):
    """No group of that name is running in this namespace."""


class GroupClosedError(RlinfActorsError):
    """The group was shut down before, or while, it was asked."""


class UsageError(RlinfActorsError, RuntimeError):
    """The API was used in a way that cannot work; the message says how to do it instead."""


class InternalError(RlinfActorsError):
    """rlinf-actors itself failed while it handled a message: a bug of ours. What the message belonged to ends with it.

    ``__cause__`` is what was raised; the log has its traceback.
    """


class EmergencyStopError(UsageError):
    """A group that uses robots was launched while an emergency stop is in force; the message says whose, and how it is
    released.
    """


class ProtocolError(RlinfActorsError):
    """A message was not expected in this state: a bug in a peer of ours, never in user code."""


class RemoteWireError(ProtocolError):
    """A peer sent bytes that are not a message."""
