"""Values inside control messages about the facts from which `rlinf-actors doctor` finds problems of nodes. Pure.

The house rules of values.py hold. A node sends facts; the command judges them.

Paths between nodes are tested in steps, which the command asks for: the node at the far end listens ("listen"); the
near node connects to it and measures ("measure"); if no connection comes about, the far node says whether the request
for a connection has arrived ("heard"), which tells the direction that loses packets.
"""

from __future__ import annotations

from typing import Annotated, Literal, Union

from msgspec import Meta

from rlinf_actors.wire.bounds import Few, Handle, Ip, Name, Path, Some, Text, Variables
from rlinf_actors.wire.figure_values import DiskFigures, Total
from rlinf_actors.wire.protocol import Number, Pid, Port
from rlinf_actors.wire.values import Value

MAX_TEST_BYTES = 256 << 20
"""Most bytes of one direction of the test of a path."""
MAX_TEST_S = 2.0
"""Most seconds of one direction of the test of a path."""
LISTEN_S = 10.0
"""Seconds after which a listener for the test of a path is closed."""
RTT_S = 2.0
"""Seconds in which a connection of the test of a path must come about."""


class PathTest(Value, frozen=True):
    """One step of the test of the path from this node to another.

    Attributes:
        step: "listen", "measure" or "heard".
        ip: the address at which the far node listens; it must be an address of that node.
        source: the address of the near node from which it connects, "" for the one that the kernel chooses.
        far: id of the far node; for "measure".
        port, secret: those of the far node's answer to "listen".
        size: most bytes of each direction.
        limit_s: most seconds of each direction.
    """

    step: Literal["listen", "measure", "heard"]
    ip: Ip = ""
    source: Ip = ""
    far: Name = ""
    port: Port = 0
    secret: Handle = b""
    size: Annotated[int, Meta(ge=1, le=MAX_TEST_BYTES)] = 1
    limit_s: Annotated[float, Meta(ge=0, le=MAX_TEST_S)] = 0.0


class CheckQuestion(Value, frozen=True, tag="CheckNode"):
    """Request to a node: send facts, the time (which each answer has), or the outcome of a step of a test.

    Attributes:
        facts: True to collect the node's facts.
        path: the step of the test of a path.
        log: True for the last lines of agentd's log, for the administrator.
    """

    facts: bool = False
    log: bool = False
    path: Union[PathTest, None] = None


class Transfer(Value, frozen=True):
    """What has arrived in one direction of a test: `size` bytes in `seconds` seconds after the first of them."""

    size: Total = 0
    seconds: Number = 0.0


class PathAnswer(Value, frozen=True):
    """Outcome of a step of the test of a path.

    Attributes:
        port, secret: where the node listens, and what the near node must prove to know; of "listen".
        source: the near node's address of the connection.
        there, back: what has arrived at the far node, and at the near node.
        rtt_s: seconds of a round trip.
        heard: True if a request for a connection has arrived that was not completed; of "heard".
        fault: why there is no outcome, for people.
        kind: "timeout" if no answer came to the request for a connection, "refused", or "failed".
    """

    port: Port = 0
    secret: Handle = b""
    source: Ip = ""
    there: Transfer = Transfer()
    back: Transfer = Transfer()
    rtt_s: Number = 0.0
    heard: bool = False
    fault: Text = ""
    kind: Name = ""


class Interface(Value, frozen=True):
    """A network interface with an IPv4 address.

    Attributes:
        prefix: length of the network's prefix in bits, 0 if unknown.
        up: True if its link is up.
        mbit_s: its speed as its driver says it, 0 if unknown.
        received_errors, sent_errors: packets that were lost by faults since it exists.
    """

    name: Name
    ip: Ip
    prefix: int = 0
    up: bool = True
    mtu: int = 0
    mbit_s: int = 0
    received_errors: Total = 0
    sent_errors: Total = 0


class Interpreter(Value, frozen=True):
    """An interpreter of a node's workers: agentd's own, or that of a running template.

    Attributes:
        path: the interpreter.
        python: its version.
        packages: versions by the name of the package, "" for a package that is not installed. They are those of
            `check_values.PACKAGES`, and of the modules that the job preloads.
        own: True for agentd's own interpreter.
    """

    path: Path
    python: Name = ""
    packages: Variables = {}
    own: bool = False


PACKAGES = ("numpy", "torch", "msgspec", "pyzmq", "cloudpickle", "uvloop", "cryptography")
"""The packages whose versions are compared."""


class Holder(Value, frozen=True):
    """A process that holds memory of an accelerator.

    Attributes:
        device: index of the accelerator.
        size: bytes that it holds, 0 if unknown.
        state: "worker" (of a running worker of this agentd), "orphan" (of a worker that is gone), "ended" (there is no
            such process), "hidden" (it cannot be seen from agentd's container), or "other".
        command: the begin of its name, "" if unknown.
    """

    device: int
    pid: Pid
    size: Total = 0
    state: Name = "other"
    command: Name = ""


class LogUse(Value, frozen=True):
    """What the log files of workers use: all together, and the bytes written in the last hour."""

    disk: DiskFigures
    size: Total = 0
    last_hour: Total = 0
    files: Total = 0


class NodeFacts(Value, frozen=True):
    """Facts about a machine, collected by its agentd, or by `rlinf-actors doctor` about its own machine.

    Attributes:
        version: version of rlinf-actors.
        interpreters: agentd's own first.
        interfaces: network interfaces except the loopback.
        open_files: soft and hard limit of open files.
        locked_memory: limit of locked memory in bytes, -1 for none.
        real_time: limit of the real-time priority, 0 if there is none to get.
        shared_memory: size and free bytes of /dev/shm, empty if there is no /dev/shm.
        ptrace_scope: kernel.yama.ptrace_scope, 0 in a kernel without Yama.
        py_spy: path of py-spy, "" if it is not installed.
        traces_all: True if the process may trace all processes (CAP_SYS_PTRACE).
        cgroup: directory in which workers' cgroups are made, "" for none.
        cgroup_why: for each of "cgroup", "memory" and "pids" that is unavailable, the reason and what to do.
        clock_synchronized: None if unknown.
        logs: the disk of workers' log files, None if it is not known.
        holders: processes that hold memory of accelerators.
        faults: what could not be found out, for people.
        workers, accelerators, robots: how many run or are there.
    """

    version: Name
    interpreters: Few[Interpreter] = []
    interfaces: Few[Interface] = []
    open_files: tuple[int, int] = (0, 0)
    locked_memory: int = -1
    real_time: int = 0
    shared_memory: Few[int] = []
    ptrace_scope: int = 0
    py_spy: Path = ""
    traces_all: bool = False
    cgroup: Path = ""
    cgroup_why: Variables = {}
    clock_synchronized: Union[bool, None] = None
    logs: Union[LogUse, None] = None
    holders: Some[Holder] = []
    faults: Few[Text] = []
    workers: Total = 0
    accelerators: Total = 0
    robots: Total = 0


class CheckAnswer(Value, frozen=True, tag=True):
    """Answer of a node to a CheckQuestion.

    Attributes:
        at: the node's wall clock, in seconds since the epoch.
        log: the last lines of agentd's log.
    """

    at: Number
    facts: Union[NodeFacts, None] = None
    path: Union[PathAnswer, None] = None
    log: Some[Text] = []
