"""The leases of a node's robot workers, with a clock that the test moves."""

from __future__ import annotations

import math

from agentd import state_events as e
from agentd.node_state import AgentState, Policy
from agentd.worker_table import RobotLeases
from rlinf_actors.wire.agent_messages import Beat, StartWorkers, StopWorkers, Welcome, WorkerExited
from rlinf_actors.wire.values import Claim, ExitReport, WorkerSpec


def held(*ids: str, now: float = 100.0) -> RobotLeases:
    leases = RobotLeases()
    for id in ids:
        leases.started(id, now)
    return leases


def test_table_without_robots_has_no_deadline():
    leases = RobotLeases()
    assert (leases.beat_s, leases.deadline, leases.expired(1e9)) == (math.inf, math.inf, [])
    assert not leases.answered(1e9, 1e9)


def test_lease_counts_from_the_sending_of_the_beat():
    leases = held("w1")
    assert (leases.until, leases.beat_s) == (102.0, 0.5)
    assert leases.answered(at=100.5, now=101.9)
    assert leases.until == 102.5
    assert not leases.answered(at=100.25, now=102.0)  # an older answer changes nothing
    assert leases.until == 102.5


def test_late_answer_does_not_renew_the_lease():
    leases = held("w1")
    assert not leases.answered(at=101.9, now=102.0)
    assert leases.expired(102.0) == ["w1"]


def test_expired_workers_are_returned_once():
    leases = held("w2", "w1")
    assert leases.expired(101.9) == []
    assert leases.expired(102.0) == ["w1", "w2"]
    assert leases.expired(103.0) == []
    assert leases.deadline == math.inf


def test_ended_worker_has_no_lease():
    leases = held("w1", "w2")
    leases.ended("w1")
    assert leases.expired(102.0) == ["w2"]


def test_new_worker_gets_a_whole_lease_only_without_a_fresh_answer():
    leases = held("w1")
    leases.answered(at=101.0, now=101.1)
    leases.started("w2", 101.5)
    assert leases.until == 103.0
    leases.started("w3", 102.5)
    assert leases.until == 104.5


class Kit:
    """A joined agent with two workers, one of which has a robot."""

    def __init__(self) -> None:
        self.state = AgentState(lambda: "life", lambda: 0.5, Policy())
        self.now = 100.0
        self.do(e.StartSession())
        self.do(e.Welcomed(Welcome("epoch", "1.0", 1.0, 10.0, "", 2.0)))
        specs = [
            WorkerSpec("arm", "g", "ns", 0, 2, 0, {}, claims=(Claim("k", "Franka 10.10.10.1"),)),
            WorkerSpec("gpu", "g", "ns", 1, 2, 0, {}),
        ]
        self.started = self.do(e.HeadNotice(StartWorkers(specs, "d1")))

    def do(self, event: e.Event, after: float = 0.0) -> list[e.Command]:
        self.now += after
        return self.state.handle(event, self.now)

    def until(self, end: float) -> list[e.Command]:
        """Tick at every deadline up to *end*."""
        out = []
        while self.state.next_deadline() <= end:
            self.now = self.state.next_deadline()
            out += self.state.handle(e.Tick(), self.now)
        self.now = end
        return out


def test_robot_worker_starts_with_a_lease_and_an_immediate_beat():
    kit = Kit()
    assert kit.started[0] == e.RenewLeases(102.0, 2.0)
    assert isinstance(kit.started[1], e.StartWorkers)
    assert kit.do(e.Tick()) == [e.SendNotice(Beat("life", 100.0))]
    assert kit.state.next_deadline() == 100.5


def test_every_answer_renews_the_lease():
    kit = Kit()
    kit.do(e.Tick())
    assert kit.do(e.HeadNotice(Beat("epoch", 100.0)), 0.1) == []  # the start has set the same lease
    kit.until(100.5)
    assert kit.do(e.HeadNotice(Beat("epoch", 100.5)), 0.3) == [e.RenewLeases(102.5, 2.0)]


def test_silent_head_ends_robot_workers_only():
    kit = Kit()
    stops = [action for action in kit.until(109.0) if isinstance(action, e.StopWorkers)]
    assert stops == [e.StopWorkers(["arm"], 0.0, "no word from the head for 2.0 s")]


def test_own_stall_does_not_extend_the_lease():
    kit = Kit()
    assert e.StopWorkers(["arm"], 0.0, "no word from the head for 3.0 s") in kit.do(e.Stalled(3.0), 3.0)


def test_beats_continue_after_an_own_stall():
    kit = Kit()
    kit.do(e.Stalled(3.0), 3.0)
    assert e.SendNotice(Beat("life", 103.0)) in kit.do(e.Tick())
    assert kit.state.next_deadline() > 103.0


def test_start_order_read_after_a_stall_does_not_renew_expired_leases():
    kit = Kit()
    late = WorkerSpec("late", "g", "ns", 0, 1, 0, {}, claims=(Claim("Arm:2", "Arm 2"),))
    actions = kit.do(e.HeadNotice(StartWorkers([late], "d1")), 3.0)
    assert actions[0] == e.StopWorkers(["arm"], 0.0, "no word from the head for 3.0 s")
    assert e.RenewLeases(105.0, 2.0) in actions  # for the worker that starts; all other leases have ended


def test_robot_worker_that_stops_or_has_ended_is_not_stopped_again():
    kit = Kit()
    assert kit.do(e.HeadNotice(StopWorkers(["arm"], 0.0, "emergency stop"))) == [
        e.StopWorkers(["arm"], 0.0, "emergency stop")
    ]
    assert not [action for action in kit.until(109.0) if isinstance(action, e.StopWorkers)]
    kit = Kit()
    kit.do(e.WorkersReported(WorkerExited("arm", ExitReport("exited", 0))))
    assert not [action for action in kit.until(109.0) if isinstance(action, e.StopWorkers)]
