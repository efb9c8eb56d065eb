"""Every error class that rlinf-actors raises on purpose.

Rules: a message says what happened, to which worker, node or file, and what to do. Every class pickles: the message is
the first argument, and each attribute is a keyword argument with a default.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from rlinf_actors.shown import lines


class RlinfActorsError(Exception):
    """Base of every error that rlinf-actors raises on purpose.

    It is raised itself if no other class fits, for example if the private agentd did not start. Its text, which may
    have parts of other processes' texts, is harmless for a terminal; ``args`` has it unchanged.
    """

    def __str__(self) -> str:
        return lines(super().__str__())


class ConfigError(RlinfActorsError, AssertionError, ValueError):
    """A configuration is wrong: the ``cluster:`` section, a configuration file, an option, a variable or an argument.

    The class is an AssertionError too because scripts written for RLinf catch that.

    Cause: the value at `path` is not valid, is unknown, or differs from that of the running Cluster.

    Fix: correct the value at `path`, such as ``cluster.node_groups[2].hardware``. ``rlinf-actors plan`` checks a
    configuration, ``agentd --check-config`` the files of a node.

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
    """A placement string or strategy breaks a rule or does not fit the cluster, or a rank is not in the group.

    Cause: the placement asks for ranks, nodes or devices that the cluster or the node group does not have.

    Fix: take the correction that the message offers. ``rlinf-actors plan`` shows a placement and launches nothing.
    """


class NodeRankError(PlacementError, IndexError):
    """A NodePlacementStrategy names a node that the cluster, or the node group, does not have.

    Cause: the node rank is too high, or counts other nodes than those of the group.

    Fix: use a rank that ``rlinf-actors nodes`` lists, or wait for more nodes (``Cluster(num_nodes=...)``).
    """


class RoutingError(RlinfActorsError, AssertionError, ValueError):
    """A batch cannot be divided among the ranks of a group, or the shards of a batch cannot be merged.

    Cause: the batch size is no multiple of both world sizes, or a shard has another size than expected. The message
    names the sizes.

    Fix: choose a batch size that both world sizes divide, or pass functions that split and merge the data.
    """


class ClusterTimeoutError(RlinfActorsError, TimeoutError):
    """The head did not answer, or nodes were missing, when the timeout expired.

    Cause: the head does not run, its address is wrong, a firewall is between, or agentd does not run on some nodes.

    Fix: run ``rlinf-actors doctor`` here, and start agentd on the nodes of `missing_ranks`.

    Attributes:
        missing_ranks: ranks of the nodes that had not registered.
    """

    def __init__(self, message: str = "", *, missing_ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.missing_ranks = tuple(missing_ranks)


class CallTimeoutError(RlinfActorsError, TimeoutError):
    """The timeout that the caller set for a call expired. The worker raised nothing, and the call may still run.

    Cause: the timeout of ``wait(timeout)``, or the deadline of ``with_timeout``, was shorter than the call. The message
    says what each late rank does.

    Fix: wait for the call again, which is possible after ``wait(timeout)``; give more time; or find out what the late
    ranks wait for by ``rlinf-actors stack``.
    """


class EndedError(RlinfActorsError):
    """Base of the errors that report the permanent end of a worker, a node, a peer or a channel.

    `WorkerDiedError`, `NodeLostError`, `PeerDiedError` and `ChannelBrokenError` are its subclasses, and it is never
    raised itself. An operation that was in progress may or may not have run. It is not repeated.
    """


class NodeLostError(EndedError):
    """A node stopped answering, and its lease expired; or the session of this process with the head has ended.

    Cause: the node's machine or agentd ended, or the network between it and the head was cut for longer than the lease.

    Fix: look at ``rlinf-actors nodes`` and ``events``, start agentd on the node again, and launch again. If the session
    has ended, construct a new Cluster.

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

    Cause: the network dropped the connection, for example a firewall that forgets idle ones, or a restarted switch.

    Fix: repeat the call if a second run does no harm. Launch workers again that were in an exchange of messages.
    """


class WorkerError(RlinfActorsError):
    """A method or constructor of a worker raised an exception.

    The error is also an instance of the original exception's type if that type can be imported and subclassed, so
    ``except ValueError`` works. ``__cause__`` is the original exception.

    Cause: the exception of your code, with its traceback in `remote_traceback`.

    Fix: correct the worker's code, or catch the exception's own type where you wait for the call.

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

    Cause: the worker exited, a signal or the kernel killed it, or memory ran out: see `exit_code`, `signal`, `oom`.

    Fix: read `stderr_tail`, and ``rlinf-actors logs GROUP`` for more. To restart such workers automatically, use
    ``launch(restart=RestartPolicy.on_failure())``.

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

    Cause: the node's environment or code differs from the driver's, or the node cannot apply a limit.

    Fix: install or change what the message names on `node`; or send the code and build the environment from the
    driver (``runtime:`` in the configuration).

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

    Every message that had arrived from it was received before.

    Cause: `peer` died or ended on purpose; ``rlinf-actors events`` says which.

    Fix: continue without that peer, or end this worker and launch the group again.

    Attributes:
        peer: name of the worker or driver that ended.
    """

    def __init__(self, message: str = "", *, peer: str = "") -> None:
        super().__init__(message)
        self.peer = peer


class ChannelClosedError(RlinfActorsError):
    """A process closed the channel by `Channel.close`. This is the orderly end: a loop over the channel ends too.

    Cause: an operation came after the close.

    Fix: end the loop that uses the channel, or close the channel later.
    """


class ChannelBrokenError(PeerDiedError):
    """The channel ended without `Channel.close`, and the items in it are lost.

    Cause: the process that held the channel died, the process that created the channel ended, or this process left the
    cluster. The message says which.

    Fix: create the channel again. A channel lives as long as the process that creates it: create it in the driver.
    """


class ItemNotProcessedError(RlinfActorsError):
    """A take reached a channel item whose delivery to consumers has failed `max_deliveries` times.

    `Channel.undeliverable` lists the item. The next take continues with the next item.

    Cause: the consumers of the item raised an exception or died each time: see `reason`.

    Fix: correct the consumer, and put the item again if it is still of use.

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
    """A peer has no valid key or job token, or its key does not permit the request.

    Cause: this machine has no key, the key was revoked or has expired, its role lacks the right, or the node's rules do
    not admit the driver. The message says which.

    Fix: have the head's administrator register a key (``rlinf-actors keys enroll``), or use a key with that right.
    """


class WrongServerError(AuthenticationError):
    """The program at the head's address is not the expected head: its key differs, or it is another program.

    `NotTheHeadError` is its former name.

    Cause: the address is wrong, the head has a new key, or somebody poses as the head.

    Fix: correct the address, or join the cluster again (``rlinf-actors keys join``).
    """


NotTheHeadError = WrongServerError
"""The former name of `WrongServerError`."""


class ProtocolMismatchError(RlinfActorsError):
    """Two processes have incompatible versions of rlinf-actors, or of Python for code that is pickled by value.

    Cause: their environments have other protocols, or other minor versions of Python. The message names both.

    Fix: upgrade the older one; or move the code to a module that both can import.
    """


class SerializationError(RlinfActorsError, TypeError):
    """An argument, result, message or item cannot be pickled by its sender, or unpickled by its receiver.

    Cause: the part at `path` is bound to its process, such as a lock or a file, or its class is missing on the other
    side.

    Fix: leave the part out, or move its class to a module that both processes can import.

    Attributes:
        path: attribute path of the part that cannot be pickled, e.g. ``args[0].model.lock``.
    """

    def __init__(self, message: str = "", *, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class NameInUseError(RlinfActorsError, ValueError):
    """A group or channel with this name runs in the job already.

    Cause: an earlier launch with this name still runs, or two programs belong to one job (they share a namespace).

    Fix: choose another name or namespace, use the running group (``launch(get_if_exists=True)``,
    `WorkerGroup.from_group_name`), or end it.
    """


class HardwareInUseError(RlinfActorsError):
    """Another group uses the robot or other exclusive hardware.

    Cause: that group still runs. The message names the hardware, the group with its job and owner, and the worker
    that has the hardware, with its node and the time for which it has had the hardware.

    Fix: wait for it by ``launch(wait_for_hardware=seconds)``, or end the other group.
    """


class GroupNotFoundError(RlinfActorsError, ValueError):
    """No group, worker or channel with this name runs in the job.

    Cause: it was not launched yet, has ended, or runs in another job.

    Fix: compare the name with ``rlinf-actors groups``. Both processes must use the same namespace.
    """


class GroupClosedError(RlinfActorsError):
    """The group was shut down before the call or while it ran.

    Cause: this process, another process or an operator ended the group. ``rlinf-actors events`` shows who.

    Fix: launch the group again, or end it later.
    """


class UsageError(RlinfActorsError, RuntimeError):
    """A call of the API cannot work in the way it was made.

    Cause: for example, a Worker was constructed directly, a handle was used in a forked process, or there is no
    Cluster.

    Fix: write what the message says.
    """


class InternalError(RlinfActorsError):
    """A bug in rlinf-actors: the library failed while it handled a message. The operation that the message belongs to
    fails.

    Cause: ``__cause__`` is the original exception. The log has its traceback.

    Fix: report it with that traceback.
    """


class EmergencyStopError(UsageError):
    """A group that uses robots was launched while an emergency stop is in force.

    Cause: somebody pressed the emergency stop. The message names the author.

    Fix: when the robots are safe, release the stop by the command in the message (``rlinf-actors estop --release``).
    """


class ProtocolError(RlinfActorsError):
    """A peer sent a message that it must not send in its state.

    Cause: a bug in rlinf-actors, or a peer of another implementation; not an error of user code.

    Fix: report it with the log of both processes.
    """


class RemoteWireError(ProtocolError):
    """A peer sent bytes that are not a valid message of rlinf-actors.

    Cause: another program talks to this port, or a bug. Such bytes from an unauthenticated connection are dropped and
    counted instead.

    Fix: find the program at the address in the message; else report it.
    """
