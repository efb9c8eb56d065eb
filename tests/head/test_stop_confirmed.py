"""What the head says of the robot workers that an emergency stop ends, until their nodes have confirmed their ends."""

from __future__ import annotations

import msgspec
import pytest
import restart_kit
from head_kit import HeadKit, agent_hello, running
from test_robots import ARM, OTHER, beats, specs

from rlinf_actors import RestartPolicy
from rlinf_actors.wire.agent_messages import Goodbye, StartWorkers, StopWorkers
from rlinf_actors.wire.client_messages import EStop, EStopped, Launch
from rlinf_actors.wire.endings import LEFT
from rlinf_actors.wire.template_protocol import ROBOT_END_S
from rlinf_actors.wire.values import ExitReport

PRESS, WAIT = EStop("kim@lab"), EStop("kim@lab", wait=True)


@pytest.fixture
def kit() -> HeadKit:
    """Two nodes; on n1 group env with an arm and group plain without."""
    kit = HeadKit()
    kit.cluster(2)
    kit.ask("d1", Launch("ns", "env", "m:C", specs("env", [1], [ARM])))
    kit.ask("d1", Launch("ns", "plain", "m:C", specs("plain", [1], [])))
    kit.ready("a:n1", "env-0")
    kit.ready("a:n1", "plain-0")
    return kit


def awaited(kit: HeadKit) -> EStopped | None:
    """The answer to a request that waits, in the last commands."""
    answers = [body for _, body in kit.answers() if isinstance(body, EStopped)]
    return answers[-1] if answers else None


def hits(answer: EStopped | None) -> list[str]:
    assert answer is not None
    return [hit.worker for hit in answer.hits]


def test_request_that_waits_is_answered_when_the_node_has_reported_the_end(kit):
    assert hits(kit.ask("observer", PRESS)) == ["env:0"]
    assert kit.ask("observer", WAIT) is None
    assert kit.sent(StopWorkers) == [], "it stops nothing"
    assert kit.records() == []
    kit.exited("a:n1", "plain-0")
    assert awaited(kit) is None
    kit.exited("a:n1", "env-0", exit_code=76)
    assert hits(awaited(kit)) == []


def test_request_that_waits_without_robot_workers_is_answered_at_once(kit):
    kit.driver("d2", namespace="other")
    assert hits(kit.ask("observer", EStop("kim@lab", namespace="other"))) == []
    assert hits(kit.ask("observer", EStop("kim@lab", namespace="other", wait=True))) == []


def test_silent_node_is_named_with_the_end_of_its_lease_and_awaited_until_its_workers_were_killed(kit):
    beats(kit, "d1", "a:n0", seconds=1.5)
    pressed = kit.ask("observer", PRESS)
    (hit,) = pressed.hits
    assert (hit.reached, hit.lease_s, pressed.wait_s) == (False, 0.5, 0.5 + ROBOT_END_S)
    kit.ask("observer", WAIT)
    kit.wait(pressed.wait_s - 0.1)
    assert awaited(kit) is None
    kit.wait(0.1)
    (hit,) = awaited(kit).hits
    assert (hit.worker, hit.lease_s) == ("env:0", 0.0)
    assert "its agentd was silent for 2.0 s" in hit.why
    assert hits(kit.ask("observer", PRESS)) == ["env:0"], "it was declared lost"
    kit.ask("observer", WAIT)
    kit.exited("a:n1", "env-0", exit_code=76)
    assert hits(awaited(kit)) == []


def test_lost_robot_worker_counts_under_a_stop_until_its_node_is_back_or_the_stop_is_released(kit):
    beats(kit, "d1", "a:n0", seconds=3)
    kit.ask("observer", PRESS)
    beats(kit, "d1", "a:n0", seconds=int(kit.timing.rank_hold_s) + 2)
    assert hits(kit.ask("observer", PRESS)) == ["env:0"]
    kit.ask("observer", EStop("kim@lab", release=True))
    beats(kit, "d1", "a:n0", seconds=2)
    assert hits(kit.ask("observer", PRESS)) == []


def test_node_whose_agentd_said_goodbye_has_no_robot_worker_left(kit):
    kit.ask("observer", PRESS)
    kit.ask("observer", WAIT)
    kit.tell("a:n1", Goodbye("stopped"))
    assert hits(awaited(kit)) == []


@pytest.mark.parametrize("lost", [False, True])
def test_end_that_leaves_a_process_behind_is_no_confirmation(kit, lost):
    if lost:
        beats(kit, "d1", "a:n0", seconds=3)
    kit.ask("observer", PRESS)
    kit.ask("observer", WAIT)
    kit.exited("a:n1", "env-0", exit_code=76, reason=f"its lease was lost; {LEFT}")
    assert awaited(kit) is None
    kit.node("n1", ip="10.0.0.2")
    assert awaited(kit) is None
    kit.wait(5)
    (hit,) = awaited(kit).hits
    assert (hit.worker, hit.why) == ("env:0", LEFT)
    assert hits(kit.ask("observer", PRESS)) == ["env:0"]
    kit.ask("observer", EStop("kim@lab", release=True))
    assert hits(kit.ask("observer", PRESS)) == [], "a person has looked"


def test_workers_that_are_starting_or_wait_for_their_restart_count(kit):
    kit.ask("d1", Launch("ns", "late", "m:C", specs("late", [0], [OTHER])))
    assert [start.workers[0].id for start in kit.sent(StartWorkers)] == ["late-0"]
    assert sorted(hits(kit.ask("observer", PRESS))) == ["env:0", "late:0"]
    kit.ask("observer", WAIT)
    kit.exited("a:n1", "env-0", exit_code=76)
    assert awaited(kit) is None
    kit.exited("a:n0", "late-0", kind="stopped", exit_code=None)
    assert hits(awaited(kit)) == []


def failing() -> HeadKit:
    """A robot worker with a restart policy, which has failed; its back-off has begun."""
    kit = HeadKit()
    kit.cluster(1)
    policy = RestartPolicy.on_failure(backoff_s=10, after_lease_lost=True)
    workers = [msgspec.structs.replace(spec, restart=policy) for spec in specs("env", [0], [ARM])]
    kit.ask("d1", Launch("ns", "env", "m:C", workers))
    kit.ready("a:n0", "env-0")
    kit.exited("a:n0", "env-0", kind="signalled", exit_code=None, signal=9)
    return kit


def test_worker_that_waits_for_its_restart_counts_and_is_certain_not_to_run():
    kit = failing()
    assert hits(kit.ask("observer", PRESS)) == ["env:0"]
    assert hits(kit.ask("observer", WAIT)) == []
    kit.wait(20)
    assert kit.sent(StartWorkers) == []


def restarted() -> HeadKit:
    """A restarted head with an emergency stop in force, whose node n1 is not back; n0 is."""
    kit = restart_kit.cluster(2)
    kit.ask("observer", PRESS)
    kit.restart()
    restart_kit.back(kit, 0)
    return kit


def test_restarted_head_awaits_the_robot_workers_of_nodes_that_are_not_back():
    kit = restarted()
    (hit,) = kit.ask("observer", PRESS).hits
    assert (hit.worker, hit.node, hit.reached) == ("", "n1 (10.0.0.2)", False)
    assert kit.ask("observer", WAIT) is None
    arm = running(specs("env", [1], [ARM])[0], "d1", endpoint=restart_kit.UP)
    restart_kit.back(kit, 1, 2, arm)
    assert awaited(kit) is None
    assert ["env-0"] in [stop.ids for stop in kit.sent(StopWorkers, "a:n1")]
    kit.exited("a:n1", "env-0", exit_code=76)
    assert hits(awaited(kit)) == []


def test_node_that_does_not_come_back_to_a_restarted_head_is_not_confirmed():
    kit = restarted()
    pressed = kit.ask("observer", PRESS)
    assert pressed.wait_s == kit.timing.patience_s
    kit.ask("observer", WAIT)
    kit.beats("a:n0", seconds=int(pressed.wait_s))
    assert [hit.node for hit in awaited(kit).hits] == ["n1 (10.0.0.2)"]


def test_returning_node_starts_no_robot_worker_under_an_emergency_stop():
    kit, exit = failing(), ExitReport("signalled", signal=9)
    kit.ask("observer", PRESS)
    kit.restart()
    policy = RestartPolicy.on_failure(backoff_s=0)
    spec = msgspec.structs.replace(specs("env", [0], [ARM])[0], restart=policy)
    kit.ask("a:n0", agent_hello("n0", is_head=True, workers=[running(spec, "d1", exit=exit)]))
    assert kit.sent(StartWorkers) == []
