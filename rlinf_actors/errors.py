"""Every error class that rlinf-actors raises on purpose.

Rules: a message says what happened, to which worker, node or file, and what to do. Every class pickles: the message is
the first argument, and each attribute is a keyword argument with a default.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from rlinf_actors.shown import lines


class RlinfActorsError(Exception):
    """Base of every error that rlinf-actors raises on purpose.

    Its text, which may have parts of other processes' texts, is harmless for a terminal; ``args`` has it unchanged.
    """

    def __str__(self) -> str:
        return lines(super().__str__())


class ConfigError(RlinfActorsError, AssertionError, ValueError):
    """A configuration is wrong: the ``cluster:`` section, a configuration file, an option or an environment variable.

    Correct the value at `path`. The class is an AssertionError too because scripts written for RLinf catch that.

    Attributes:
        path: place of the fault: a config path such as ``cluster.node_groups[2].env_configs[0].node_ranks``, a file
            with its key, an option or a variable.
    """

    def __init__(self, message: str = "", *, path: str = "") -> None:
        super().__init__(message)
        self.path = path

    def __str__(self) -> str:
        message = super().__str__()
        return f"{lines(self.path)}: {message}" if self.path else message


class PlacementError(RlinfActorsError, AssertionError, ValueError):
    """A placement string or strategy breaks a rule or does not fit the cluster. The message offers a correction."""


class NodeRankError(PlacementError, IndexError):
    """A NodePlacementStrategy names a node that the cluster, or the node group, does not have."""


class RoutingError(RlinfActorsError, AssertionError, ValueError):
    """A batch cannot be divided among the ranks of a group, or the shards of a batch cannot be merged.

    The message names the sizes. Choose a batch size that both world sizes divide, or pass functions that split and
    merge the data.
    """


class ClusterTimeoutError(RlinfActorsError, TimeoutError):
    """The head did not answer, or nodes were missing, when the timeout expired.

    Check that the head runs and that agentd runs on every node.

    Attributes:
        missing_ranks: ranks of the nodes that had not registered.
    """

    def __init__(self, message: str = "", *, missing_ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.missing_ranks = tuple(missing_ranks)


class CallTimeoutError(RlinfActorsError, TimeoutError):
    """The timeout that the caller set for a call expired. The worker raised nothing, and the call may still run."""


class EndedError(RlinfActorsError):
    """Base of the errors that report the permanent end of a worker, a node, a peer or a channel.

    `WorkerDiedError`, `NodeLostError`, `PeerDiedError` and `ChannelBrokenError` are its subclasses. An operation that
    was in progress may or may not have run. It is not repeated.
    """


class NodeLostError(EndedError):
    """A node stopped answering, and its lease expired.

    Attributes:
        node_rank: rank of the node in the cluster, -1 if the node had no rank yet.
    """

    def __init__(self, message: str = "", *, node_rank: int = -1) -> None:
        super().__init__(message)
        self.node_rank = node_rank


class ConnectionLostError(RlinfActorsError, ConnectionError):
    """A connection between two live processes broke and was restored. Calls in progress may or may not have run.

    Not an `EndedError`: both processes live, and later calls use the new connection. Workers that exchanged messages
    over the old connection cannot continue that exchange, because a message may be missing.
    """


class WorkerError(RlinfActorsError):
    """A method of a worker raised an exception.

    The error is also an instance of the original exception's type if that type can be imported and subclassed, so
    ``except ValueError`` works. ``__cause__`` is the original exception.

    Attributes:
        worker: name of the worker, ``group:rank``.
        rank: rank of the worker.
        node: name or address of the worker's node.
        remote_traceback: the traceback in the worker, as text.
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
        if self.remote_traceback:
            message += f"\n--- traceback in {self.worker} on {self.node} ---\n{self.remote_traceback.rstrip()}"
        return lines(message)


class WorkerDiedError(EndedError):
    """The process of a worker ended while a call, message or channel operation needed it.

    Attributes:
        worker: name of the worker, ``group:rank``.
        rank: rank of the worker.
        node: name or address of the worker's node.
        exit_code: exit code of the process, None if a signal ended the process or the code is unknown.
        signal: number of the signal that ended the process, None otherwise.
        oom: "yes" if the kernel's memory controller killed the process, "suspected" if only the circumstances point to
            lack of memory, "no" otherwise.
        stderr_tail: the last lines that the process wrote to stderr.
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
    """A worker did not start: its interpreter or a package is missing, or its class cannot be imported on the node.

    Attributes:
        worker: name of the worker, ``group:rank``.
        node: name or address of the worker's node.
    """

    def __init__(self, message: str = "", *, worker: str = "", node: str = "") -> None:
        super().__init__(message)
        self.worker = worker
        self.node = node


class PeerDiedError(EndedError):
    """The process at the other end of a message, broadcast or channel operation ended.

    Attributes:
        peer: name of the worker or driver that ended.
    """

    def __init__(self, message: str = "", *, peer: str = "") -> None:
        super().__init__(message)
        self.peer = peer


class ChannelClosedError(RlinfActorsError):
    """A process closed the channel by `Channel.close`. This is the orderly end: a loop over the channel ends too."""


class ChannelBrokenError(PeerDiedError):
    """The channel ended without `Channel.close`, and the items in it are lost.

    The message names the cause: the channel's host died, the process that created the channel ended, or this process
    left the cluster.
    """


class ItemNotProcessedError(RlinfActorsError):
    """A take reached a channel item whose delivery to consumers has failed `max_deliveries` times.

    `Channel.undeliverable` lists the item. The next take continues with the next item.

    Attributes:
        key: the channel key that the item was put under.
        deliveries: number of failed deliveries.
        consumer: name of the last consumer, "" if the last delivery was a get.
        reason: why the last delivery failed: the exception in the consumer's block, or the end of the consumer's
            process.
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
    """A peer has no valid key or job token, or its key does not permit the request."""


class WrongServerError(AuthenticationError):
    """The program at the head's address is not the expected head: its key differs, or it is another program.

    Correct the address, or join the cluster again (``rlinf-actors keys join``).
    """


NotTheHeadError = WrongServerError
"""The former name of `WrongServerError`."""


class ProtocolMismatchError(RlinfActorsError):
    """Two processes speak different protocol versions. The message names both: upgrade the older one."""


class SerializationError(RlinfActorsError, TypeError):
    """An object cannot be sent to another process.

    Attributes:
        path: attribute path of the part that cannot be pickled, e.g. ``args[0].model.lock``.
    """

    def __init__(self, message: str = "", *, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class NameInUseError(RlinfActorsError, ValueError):
    """A group or channel with this name runs in the namespace already. Choose another name."""


class HardwareInUseError(RlinfActorsError):
    """Another group uses the robot or other exclusive hardware.

    The message names the hardware, that group with its namespace and owner, and the worker that has the hardware, with
    its node and the time for which it has had the hardware.
    """


class GroupNotFoundError(RlinfActorsError, ValueError):
    """No group with this name runs in the namespace."""


class GroupClosedError(RlinfActorsError):
    """The group was shut down before the call or while it ran."""


class UsageError(RlinfActorsError, RuntimeError):
    """A call of the API cannot work in the way it was made. The message says what to do instead."""


class InternalError(RlinfActorsError):
    """A bug in rlinf-actors: the library failed while it handled a message. The operation that the message belongs to
    fails.

    ``__cause__`` is the original exception. The log has its traceback.
    """


class EmergencyStopError(UsageError):
    """A group that uses robots was launched while an emergency stop is in force.

    The message names the author of the stop and the command that releases it.
    """


class ProtocolError(RlinfActorsError):
    """A peer sent a message that it must not send in its state. This is a bug in rlinf-actors, not in user code."""


class RemoteWireError(ProtocolError):
    """A peer sent bytes that are not a valid message of rlinf-actors."""
