"""The life cycles of nodes and workers, as tables. What is not in a table is an error that names the state."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import TypeVar

from rlinf_actors.errors import ProtocolError


class NodeLife(str, enum.Enum):
    """How a node is; the value is what people see."""

    REGISTERING = "registering"
    READY = "ready"
    SUSPECT = "suspect"
    DRAINING = "draining"
    LOST = "lost"


class WorkerLife(str, enum.Enum):
    """How a worker is; the value is what travels."""

    RESTARTING = "restarting"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    GONE = "gone"


NODE: Mapping[NodeLife, Mapping[str, NodeLife]] = {
    NodeLife.REGISTERING: {"hello": NodeLife.READY, "expired": NodeLife.LOST},
    NodeLife.READY: {
        "hello": NodeLife.READY,
        "heard": NodeLife.READY,
        "silent": NodeLife.SUSPECT,
        "drain": NodeLife.DRAINING,
        "expired": NodeLife.LOST,
        "left": NodeLife.LOST,
        "replaced": NodeLife.LOST,
    },
    NodeLife.SUSPECT: {
        "hello": NodeLife.READY,
        "heard": NodeLife.READY,
        "drain": NodeLife.DRAINING,
        "expired": NodeLife.LOST,
        "left": NodeLife.LOST,
        "replaced": NodeLife.LOST,
    },
    NodeLife.DRAINING: {
        "hello": NodeLife.DRAINING,
        "heard": NodeLife.DRAINING,
        "drain": NodeLife.DRAINING,
        "undrain": NodeLife.READY,
        "expired": NodeLife.LOST,
        "left": NodeLife.LOST,
        "replaced": NodeLife.LOST,
    },
    NodeLife.LOST: {},
}
"""A lost node does not come back: its agent comes as a new incarnation, which is a new record."""

WORKER: Mapping[WorkerLife, Mapping[str, WorkerLife]] = {
    WorkerLife.RESTARTING: {  # the next incarnation of one that failed, before its process is there
        "restart": WorkerLife.STARTING,
        "stop": WorkerLife.GONE,
        "node_lost": WorkerLife.GONE,
    },
    WorkerLife.STARTING: {
        "ready": WorkerLife.RUNNING,
        "stop": WorkerLife.STOPPING,
        "exited": WorkerLife.GONE,
        "node_lost": WorkerLife.GONE,
    },
    WorkerLife.RUNNING: {
        "ready": WorkerLife.RUNNING,  # said again after a reconnect
        "stop": WorkerLife.STOPPING,
        "exited": WorkerLife.GONE,
        "node_lost": WorkerLife.GONE,
    },
    WorkerLife.STOPPING: {
        "ready": WorkerLife.STOPPING,  # the stop and the report crossed
        "stop": WorkerLife.STOPPING,
        "exited": WorkerLife.GONE,
        "node_lost": WorkerLife.GONE,
    },
    WorkerLife.GONE: {},
}

S = TypeVar("S", NodeLife, WorkerLife)


def step(table: Mapping[S, Mapping[str, S]], state: S, event: str) -> S:
    """The state after *event*.

    Raises:
        ProtocolError: the event is not expected in this state.
    """
    try:
        return table[state][event]
    except KeyError:
        raise ProtocolError(f"{event!r} is not expected of a {type(state).__name__} while {state.value}") from None
