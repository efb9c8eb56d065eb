"""Notifications of clients that return to a restarted head."""

from __future__ import annotations

from head_kit import running, specs
from msgspec.structs import replace
from restart_kit import UP, alone, back, cluster, handle, returns

from rlinf_actors.model.restart import next_id
from rlinf_actors.wire.agent_messages import Beat, StartWorkers, StopWorkers
from rlinf_actors.wire.client_messages import Launched, WorkerChanged
from rlinf_actors.wire.values import ExitReport

# --- notifications of returned clients ---


def test_owner_is_notified_of_workers_on_nodes_that_did_not_return():
    kit = cluster(2, lease_s=10)
    kit.restart()
    back(kit, 0)
    returns(kit)
    kit.tell("d1", handle(kit))
    gone = None
    for _ in range(12):
        kit.tell("a:n0", Beat())
        kit.tell("d1", Beat())
        kit.wait(0.9)
        gone = gone or next(iter(kit.sent(WorkerChanged, "d1")), None)
    states = {worker.id: worker for worker in gone.workers}
    assert (states["g-0"].state, states["g-1"].state) == ("running", "gone")
    assert "no node had it when the head was restarted" in states["g-1"].exit.reason
    assert kit.group_states() == {"g": "degraded"}
    assert kit.disk.given_up["worker", "g-1"]


def test_owner_is_notified_of_a_group_on_no_node():
    kit = cluster(1)
    kit.restart()
    alone(kit, 0)
    returns(kit)
    kit.tell("d1", handle(kit, 1))
    (changed,) = kit.sent(WorkerChanged, "d1")
    assert [(worker.id, worker.state, worker.exit.kind) for worker in changed.workers] == [("g-0", "gone", "node_lost")]


def test_worker_reported_as_ended_is_stopped_when_it_returns():
    kit = cluster(1)
    kit.restart()
    alone(kit, 0)
    returns(kit)
    kit.tell("d1", handle(kit, 1))
    for _ in range(2):
        back(kit, 0, 1)
        (stop,) = kit.sent(StopWorkers)
        assert stop.ids == ["g-0"]
        kit.restart()


def test_returning_subscriber_is_notified_of_its_group():
    kit = cluster(1)
    kit.restart()
    back(kit, 0, 1)
    returns(kit)
    returns(kit, "d2")
    kit.tell("d2", handle(kit, 1))
    (changed,) = kit.sent(WorkerChanged, "d2")
    assert [worker.state for worker in changed.workers] == ["running"]
    kit.exited("a:n0", "g-0", exit_code=3)
    (changed,) = kit.sent(WorkerChanged, "d2")
    assert changed.workers[0].exit.exit_code == 3


def test_rank_of_a_restarted_worker_is_not_reported_lost():
    """The client knows of an earlier incarnation only; the agent has the next one."""
    kit = cluster(1)
    kit.restart()
    (spec,) = specs("g", [0])
    later = running(replace(spec, id=next_id(spec.id, 1), incarnation=1), "d1", endpoint=UP, pid=8)
    kit.node("n0", ip="10.0.0.1", is_head=True, workers=[later])
    returns(kit)
    kit.tell("d1", handle(kit, 1))
    (changed,) = kit.sent(WorkerChanged, "d1")
    assert [(worker.id, worker.state) for worker in changed.workers] == [("g-0.1", "running")]
    assert isinstance(kit.launch("g", [0]), Launched)
    assert kit.sent(StartWorkers) == []


def test_end_that_the_agent_remembers_is_reported_unchanged():
    kit = cluster(1)
    kit.restart()
    returns(kit)
    back(kit, 0, 1, exit=ExitReport("signalled", None, 9))
    kit.tell("d1", handle(kit, 1))
    (changed,) = kit.sent(WorkerChanged, "d1")
    assert changed.workers[0].exit.signal == 9


def test_handles_of_another_namespace_are_ignored():
    kit = cluster(1)
    kit.restart()
    back(kit, 0, 1)
    kit.driver("d2", namespace="else", token="x")
    kit.tell("d2", handle(kit, 1))
    assert kit.sent(WorkerChanged) == []
