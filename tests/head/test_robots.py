"""Robot workers at the head: unwatched owners, silent nodes, and the emergency stop."""

from __future__ import annotations

import msgspec
import pytest
import restart_kit
from head_kit import HeadKit, Refuse, agent_hello, running
from head_status import status_of

from rlinf_actors.errors import EmergencyStopError
from rlinf_actors.net.rpc import refusal
from rlinf_actors.wire.agent_messages import Beat, Goodbye, StartWorkers, StopWorkers, Welcome
from rlinf_actors.wire.client_messages import EStop, EStopped, GetStatus, Launch, WorkerChanged
from rlinf_actors.wire.control_codec import Failed
from rlinf_actors.wire.values import Claim, ExitReport, WorkerSpec

ARM = Claim("Franka:10.10.10.1", "Franka 10.10.10.1")
OTHER = Claim("Franka:10.10.10.2", "Franka 10.10.10.2")
VOUCHED_NO_MORE = "its owner was silent for 2.0 s"
SILENT = "its owner was silent for 1.6 s"


def specs(group: str, nodes: list[int], claims: list[Claim], namespace: str = "ns") -> list[WorkerSpec]:
    return [
        WorkerSpec(f"{group}-{rank}", group, namespace, rank, len(nodes), node, {}, claims=claims)
        for rank, node in enumerate(nodes)
    ]


@pytest.fixture
def kit() -> HeadKit:
    """Two nodes; on n1 group env with an arm and group plain without; no agent watches their owner d1."""
    kit = HeadKit()
    kit.cluster(2)
    kit.ask("d1", Launch("ns", "env", "m:C", specs("env", [1], [ARM])))
    kit.ask("d1", Launch("ns", "plain", "m:C", specs("plain", [1], [])))
    kit.ready("a:n1", "env-0")
    kit.ready("a:n1", "plain-0")
    return kit


def beats(kit: HeadKit, *peers: str, seconds: float) -> list[StopWorkers]:
    """Let these peers beat four times a second; return the agents' stop orders, without reminders."""
    stops = []
    for _ in range(int(seconds * 4)):
        for peer in peers:
            kit.beat(peer)
            stops += kit.sent(StopWorkers)
        kit.wait(0.25)
        stops += kit.sent(StopWorkers)
    return [stop for index, stop in enumerate(stops) if stop not in stops[:index]]


def test_a_beat_is_answered_with_its_time(kit):
    kit.tell("a:n1", Beat("n1-1", 77.5))
    (answer,) = kit.sent(Beat, "a:n1")
    assert answer.at == 77.5
    welcome = kit.node("n1")
    assert isinstance(welcome, Welcome)
    assert welcome.robot_lease_s == 2.0


def test_silent_owner_loses_robots_before_its_other_workers(kit):
    stops = beats(kit, "a:n0", "a:n1", seconds=5)
    assert stops == [StopWorkers(["env-0"], kit.timing.orphan_grace_s, SILENT)]


def test_beating_owner_keeps_its_robots(kit):
    assert beats(kit, "d1", "a:n0", "a:n1", seconds=5) == []


def test_owner_that_gets_no_answers_loses_its_robots_although_it_beats(kit):
    """The network is cut in one direction: the owner's beats repeat the last answer that it got."""
    beats(kit, "d1", "a:n0", "a:n1", seconds=1)
    cut, word = kit.now, kit.words["d1"]
    stops: list[StopWorkers] = []
    while not stops:
        for peer in ("a:n0", "a:n1"):
            kit.beat(peer)
        kit.tell("d1", Beat("d1", word=word))
        kit.wait(0.25)
        stops = kit.sent(StopWorkers)
    assert kit.now - cut <= 1.75
    assert "its owner did not hear the head for 1.6 s: the network from here is cut" in stops[0].reason


def must_answer(how: str, node: int) -> HeadKit:
    """The agent of n0 watches driver d2; the arm is on n0, its driver's host, or on n1."""
    kit = HeadKit()
    kit.cluster(2)
    kit.driver("d2", host="host-n0", pid=7, pid_start=70)
    workers = [msgspec.structs.replace(spec, owner_must_answer=how) for spec in specs("env", [node], [ARM])]
    kit.ask("d2", Launch("ns", "env", "m:C", workers))
    return kit


@pytest.mark.parametrize(("how", "node"), [("", 1), ("", 0), ("elsewhere", 0)])
def test_stopped_owner_keeps_its_robots_while_an_agent_watches_it(how, node):
    kit = must_answer(how, node)
    assert beats(kit, "d1", "a:n0", "a:n1", seconds=5) == []
    stops = beats(kit, "d1", "a:n1", seconds=3)  # the watching node is silent
    assert stops == [StopWorkers(["env-0"], kit.timing.orphan_grace_s, VOUCHED_NO_MORE)] or node == 0


def closed(kit: HeadKit, client: str) -> float:
    """Let this client be silent until the head checks its connection, which is closed. Return when the head checked."""
    while not kit.sent(Beat, client):
        kit.beat("a:n0")
        kit.beat("a:n1")
        kit.wait(0.05)
    kit.unreachable(client)
    return kit.now


@pytest.mark.parametrize(("how", "node"), [("", 1), ("elsewhere", 0)])
def test_driver_that_has_closed_its_connection_loses_its_robots_in_their_lease(how, node):
    """Its process runs another program (os.exec), and an agent watches the process."""
    kit = must_answer(how, node)
    assert beats(kit, "d1", "d2", "a:n0", "a:n1", seconds=5) == []
    silent = kit.now
    closed(kit, "d2")
    stops: list[StopWorkers] = []
    while not (stops := stops + kit.sent(StopWorkers)):
        kit.beat("a:n0")
        kit.beat("a:n1")
        kit.wait(0.05)
    assert [stop.ids for stop in stops] == [["env-0"]]
    assert kit.now - silent < 1.75


def test_driver_whose_connection_is_there_again_keeps_its_robots():
    kit = must_answer("", 1)
    closed(kit, "d2")
    kit.driver("d2", host="host-n0", pid=7, pid_start=70)
    assert beats(kit, "d1", "a:n0", "a:n1", seconds=5) == []


def test_silent_driver_has_time_for_a_hello_after_its_connection_was_lost():
    kit = must_answer("", 1)
    assert beats(kit, "d1", "a:n0", "a:n1", seconds=5) == [], "it holds the interpreter's lock"
    closed(kit, "d2")
    kit.wait(0.3)
    assert kit.sent(StopWorkers) == []
    kit.driver("d2", host="host-n0", pid=7, pid_start=70)
    assert beats(kit, "d1", "a:n0", "a:n1", seconds=5) == []


@pytest.mark.parametrize(("how", "node"), [("always", 0), ("always", 1), ("elsewhere", 1)])
def test_stalled_owner_that_must_answer_loses_its_robots(how, node):
    kit = must_answer(how, node)
    assert beats(kit, "d1", "d2", "a:n0", "a:n1", seconds=5) == []
    stops = beats(kit, "d1", "a:n0", "a:n1", seconds=2)
    assert [stop.ids for stop in stops] == [["env-0"]]
    assert "its owner was silent for" in stops[0].reason


def test_robot_workers_of_a_silent_node_are_lost_before_the_node(kit):
    assert beats(kit, "d1", "a:n0", seconds=1.5) == []
    kit.beat("d1")
    kit.wait(0.5)
    (changed,) = kit.sent(WorkerChanged, "d1")
    (state,) = changed.workers
    assert (changed.group, state.state, state.exit.kind) == ("env", "gone", "node_lost")
    assert "its agentd was silent for 2.0 s, and so the lease of Franka 10.10.10.1 is over" in state.exit.reason
    assert kit.sent(StopWorkers, "a:n1")[0].ids == ["env-0"]  # held for the absent agent
    beats(kit, "d1", "a:n0", seconds=2)
    assert kit.node_states()["n1"] == "suspect"
    assert kit.group_states() == {"plain": "running"}


def test_returning_agent_is_ordered_to_stop_robot_workers(kit):
    beats(kit, "d1", "a:n0", seconds=3)
    there = [running(specs("env", [1], [ARM])[0], "d1"), running(specs("plain", [1], [])[0], "d1")]
    kit.ask("a:n1again", agent_hello("n1", workers=there))
    assert ["env-0"] in [stop.ids for stop in kit.sent(StopWorkers)]


def test_robot_is_free_when_its_agent_reports_the_end(kit):
    beats(kit, "d1", "a:n0", seconds=3)
    again = Launch("ns", "again", "m:C", specs("again", [0], [ARM]))
    refused = kit.ask("d1", again)
    assert isinstance(refused, Refuse)
    assert "may still be moving it" in refused.text
    kit.exited("a:n1", "env-0", exit_code=76)
    assert not isinstance(kit.ask("d1", again), Refuse)


def test_robot_is_free_when_its_agents_hello_reports_the_end(kit):
    beats(kit, "d1", "a:n0", seconds=3)
    ended = running(specs("env", [1], [ARM])[0], "d1", exit=ExitReport("exited", 76))
    kit.ask("a:n1again", agent_hello("n1", workers=[ended]))
    assert not isinstance(kit.ask("d1", Launch("ns", "again", "m:C", specs("again", [0], [ARM]))), Refuse)


def test_stall_of_the_head_does_not_count_as_silence_of_owners(kit):
    kit.stall(5.0)
    assert kit.sent(StopWorkers) == []
    assert beats(kit, "d1", "a:n0", "a:n1", seconds=3) == []


def test_restarted_head_awaits_robot_owners_for_one_lease():
    kit = HeadKit()
    kit.ask("a:n1", agent_hello("n1", workers=[running(specs("env", [0], [ARM])[0], "d1")]))
    assert beats(kit, "a:n1", seconds=2.5) == [StopWorkers(["env-0"], kit.timing.orphan_grace_s, VOUCHED_NO_MORE)]


def test_beating_agent_gets_stop_orders_for_robots_again(kit):
    """The first message may have been lost with a connection that came back at once."""
    kit.ask("observer", EStop("kim@lab"))
    kit.tell("a:n1", Beat("n1-1", 1.0))
    assert kit.sent(StopWorkers, "a:n1") == [StopWorkers(["env-0"], 0.0, "emergency stop by kim@lab")]
    kit.exited("a:n1", "env-0", exit_code=76)
    kit.tell("a:n1", Beat("n1-1", 2.0))
    assert kit.sent(StopWorkers) == []


def test_hello_does_not_start_a_robot_worker_that_was_to_stop(kit):
    kit.ask("d1", Launch("ns", "late", "m:C", specs("late", [0], [OTHER])))
    kit.tell("d1", Goodbye("done"))
    kit.node("n0", ip="10.0.0.1", is_head=True)
    assert kit.sent(StartWorkers) == []
    assert "late" not in kit.group_states()


class TestNewHead:
    @pytest.fixture
    def young(self):
        kit = HeadKit(robot_settle_s=3.5)
        kit.cluster(2)
        return kit

    def test_new_head_starts_no_robot_worker_before_earlier_leases_end(self, young):
        assert young.ask("d1", Launch("ns", "env", "m:C", specs("env", [0], [ARM]))) is None
        assert young.sent(StartWorkers) == []
        beats(young, "d1", "a:n0", "a:n1", seconds=3.0)
        assert young.group_states() == {}
        young.wait(0.5)
        assert [start.workers[0].id for start in young.sent(StartWorkers)] == ["env-0"]

    def test_new_head_refuses_a_robot_that_is_in_use(self, young):
        young.ask("d1", Launch("ns", "env", "m:C", specs("env", [0], [ARM])))
        young.driver("d2")
        young.node("n2", workers=[running(specs("old", [2], [ARM])[0], "d2")])
        beats(young, "d1", "d2", "a:n0", "a:n1", "a:n2", seconds=3.0)
        young.wait(0.5)
        assert ["Franka 10.10.10.1 is held by group 'old'" in refusal.text for refusal in young.refusals()] == [True]

    def test_new_head_starts_groups_without_robots_at_once(self, young):
        assert not isinstance(young.ask("d1", Launch("ns", "plain", "m:C", specs("plain", [0], []))), Refuse)
        assert len(young.sent(StartWorkers)) == 1


class TestEmergencyStop:
    def test_emergency_stop_refuses_waiting_launches(self, kit):
        assert kit.ask("d1", Launch("ns", "next", "m:C", specs("next", [1], [ARM]), wait_s=60.0)) is None
        kit.ask("observer", EStop("kim@lab"))
        assert ["robots are stopped: emergency stop by kim@lab" in one.text for one in kit.refusals()] == [True]
        kit.exited("a:n1", "env-0", exit_code=76)
        assert kit.sent(StartWorkers) == []

    def test_emergency_stop_stops_robot_workers_and_names_them(self, kit):
        answer = kit.ask("observer", EStop("kim@lab", "a hand in the cell"))
        assert isinstance(answer, EStopped)
        (hit,) = answer.hits
        assert (hit.worker, hit.namespace, hit.robots, hit.reached) == ("env:0", "ns", ["Franka 10.10.10.1"], True)
        assert kit.sent(StopWorkers) == [StopWorkers(["env-0"], 0.0, "emergency stop by kim@lab: a hand in the cell")]
        assert status_of(kit.head, kit.now).stopped == answer.stopped
        lift = "; lift it with `rlinf-actors estop --release`"
        assert answer.stopped == [f"emergency stop by kim@lab: a hand in the cell (all jobs){lift}"]

    def test_emergency_stop_names_silent_nodes_as_not_reached(self):
        kit = HeadKit(beat_s=0.5)
        kit.cluster(2)
        kit.ask("d1", Launch("ns", "env", "m:C", specs("env", [1], [ARM])))
        beats(kit, "d1", "a:n0", seconds=1.5)
        answer = kit.ask("observer", EStop("kim@lab"))
        assert [hit.reached for hit in answer.hits] == [False]

    def test_robot_groups_are_refused_until_the_stop_is_released(self, kit):
        kit.ask("observer", EStop("kim@lab"))
        refused = kit.ask("d1", Launch("ns", "again", "m:C", specs("again", [0], [OTHER])))
        assert isinstance(refused, Refuse)
        assert "group 'again' uses Franka 10.10.10.2, and robots are stopped: emergency stop by kim@lab" in refused.text
        assert "`rlinf-actors estop --release`" in refused.text
        assert refused.kind == "emergency_stop"
        assert isinstance(refusal(Failed(1, refused.kind, refused.text)), EmergencyStopError)
        assert not isinstance(kit.ask("d1", Launch("ns", "cpu", "m:C", specs("cpu", [0], []))), Refuse)
        lifted = kit.ask("observer", EStop("kim@lab", release=True))
        assert lifted == EStopped([], [], lifted="emergency stop by kim@lab (all jobs)")
        assert not isinstance(kit.ask("d1", Launch("ns", "again", "m:C", specs("again", [0], [OTHER]))), Refuse)

    def test_stop_of_a_namespace_affects_that_namespace_only(self, kit):
        kit.driver("d2", namespace="other")
        pressed = kit.ask("observer", EStop("kim@lab", namespace="other"))
        assert (pressed.hits, "`rlinf-actors estop --release --job other`" in pressed.stopped[0]) == ([], True)
        assert not isinstance(kit.ask("d1", Launch("ns", "more", "m:C", specs("more", [0], [OTHER]))), Refuse)
        refused = kit.ask("d2", Launch("other", "env", "m:C", specs("env", [0], [ARM], "other")))
        assert "`rlinf-actors estop --release --job other`" in refused.text

    def test_stop_of_an_unknown_job_is_refused_and_names_the_jobs_with_robots(self, kit):
        refused = kit.ask("observer", EStop("kim@lab", namespace="typo"))
        assert (refused.kind, refused.text) == ("not_found", "it has no job 'typo'; jobs with robots: ns")
        assert status_of(kit.head, kit.now).stopped == []

    def test_restarted_head_takes_the_stop_of_a_job_that_it_does_not_know_yet(self):
        kit = restart_kit.cluster(2)
        kit.restart()
        assert isinstance(kit.ask("observer", EStop("kim@lab", namespace="ns")), EStopped)

    def test_restarted_head_keeps_an_emergency_stop_until_its_release(self):
        kit = restart_kit.cluster(2)
        kit.ask("observer", EStop("kim@lab", "smoke"))
        kit.restart()
        for node in (0, 1):
            restart_kit.back(kit, node)
        restart_kit.returns(kit)
        (stop,) = kit.ask("observer", GetStatus()).stopped
        assert stop.startswith("emergency stop by kim@lab: smoke (all jobs); lift it with ")
        kit.wait(kit.timing.robot_settle_s + 1)
        refused = kit.ask("d1", Launch("ns", "again", "m:C", specs("again", [0], [OTHER])))
        assert isinstance(refused, Refuse)
        assert "robots are stopped: emergency stop by kim@lab: smoke" in refused.text
        kit.ask("observer", EStop("kim@lab", release=True))
        assert not isinstance(kit.ask("d1", Launch("ns", "again", "m:C", specs("again", [0], [OTHER]))), Refuse)

    def test_returning_agent_gets_the_emergency_stop(self, kit):
        kit.ask("observer", EStop("kim@lab"))
        kit.ask("a:n1again", agent_hello("n1", workers=[running(specs("env", [1], [ARM])[0], "d1", endpoint=None)]))
        assert ["env-0"] in [stop.ids for stop in kit.sent(StopWorkers, "a:n1again")]


def test_end_of_the_owner_stops_robot_workers_with_a_reason(kit):
    kit.tell("d1", Goodbye("done"))
    reasons = {stop.ids[0]: stop.reason for stop in kit.sent(StopWorkers)}
    assert reasons["env-0"] == "its owner ended: driver d1, process 100, job 'ns', done"
