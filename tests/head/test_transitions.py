"""Every row of the transition tables; the error for a missing row names the state."""

from __future__ import annotations

import itertools

import pytest

from rlinf_actors.errors import ProtocolError
from rlinf_actors.head.records import NODE, WORKER, NodeLife, WorkerLife, step

N, W = NodeLife, WorkerLife

NODE_ROWS = {
    (N.REGISTERING, "hello"): N.READY,
    (N.REGISTERING, "expired"): N.LOST,
    (N.READY, "hello"): N.READY,
    (N.READY, "heard"): N.READY,
    (N.READY, "silent"): N.SUSPECT,
    (N.READY, "drain"): N.DRAINING,
    (N.READY, "expired"): N.LOST,
    (N.READY, "left"): N.LOST,
    (N.READY, "replaced"): N.LOST,
    (N.SUSPECT, "hello"): N.READY,
    (N.SUSPECT, "heard"): N.READY,
    (N.SUSPECT, "drain"): N.DRAINING,
    (N.SUSPECT, "expired"): N.LOST,
    (N.SUSPECT, "left"): N.LOST,
    (N.SUSPECT, "replaced"): N.LOST,
    (N.DRAINING, "hello"): N.DRAINING,
    (N.DRAINING, "heard"): N.DRAINING,
    (N.DRAINING, "drain"): N.DRAINING,
    (N.DRAINING, "undrain"): N.READY,
    (N.DRAINING, "expired"): N.LOST,
    (N.DRAINING, "left"): N.LOST,
    (N.DRAINING, "replaced"): N.LOST,
}
WORKER_ROWS = {
    (W.RESTARTING, "restart"): W.STARTING,
    (W.RESTARTING, "stop"): W.GONE,
    (W.RESTARTING, "node_lost"): W.GONE,
    (W.STARTING, "ready"): W.RUNNING,
    (W.STARTING, "stop"): W.STOPPING,
    (W.STARTING, "exited"): W.GONE,
    (W.STARTING, "node_lost"): W.GONE,
    (W.RUNNING, "ready"): W.RUNNING,
    (W.RUNNING, "stop"): W.STOPPING,
    (W.RUNNING, "exited"): W.GONE,
    (W.RUNNING, "node_lost"): W.GONE,
    (W.STOPPING, "ready"): W.STOPPING,
    (W.STOPPING, "stop"): W.STOPPING,
    (W.STOPPING, "exited"): W.GONE,
    (W.STOPPING, "node_lost"): W.GONE,
}
NODE_EVENTS = ["hello", "heard", "silent", "drain", "undrain", "expired", "left", "replaced"]
WORKER_EVENTS = ["restart", "ready", "stop", "exited", "node_lost"]


@pytest.mark.parametrize(
    ("table", "rows", "states", "events"),
    [(NODE, NODE_ROWS, N, NODE_EVENTS), (WORKER, WORKER_ROWS, W, WORKER_EVENTS)],
    ids=["node", "worker"],
)
def test_transitions_match_the_table_for_every_state_and_event(table, rows, states, events):
    for state, event in itertools.product(states, events):
        if (state, event) in rows:
            assert step(table, state, event) is rows[state, event]
        else:
            with pytest.raises(
                ProtocolError, match=f"'{event}' is not expected of a {states.__name__} while {state.value}"
            ):
                step(table, state, event)


def test_lost_node_and_gone_worker_are_final():
    assert NODE[N.LOST] == {}
    assert WORKER[W.GONE] == {}
