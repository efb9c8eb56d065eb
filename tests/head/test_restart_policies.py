"""Restarts of workers by the head: policies, back-off, and first causes."""

from __future__ import annotations

import msgspec
import pytest
from head_kit import HeadKit, agent_hello, client_hello, running, specs
from head_status import status_of
from hypothesis import given
from hypothesis import strategies as st

from rlinf_actors import RestartPolicy, UsageError
from rlinf_actors.head.commands import Refuse
from rlinf_actors.head.records import Group, WorkerLife, WorkerRecord
from rlinf_actors.head.restarts import Restarts
from rlinf_actors.wire.agent_messages import Beat, Goodbye, StartWorkers, StopWorkers
from rlinf_actors.wire.client_messages import Done, EStop, Launch, Launched, StopGroup, WorkerChanged
from rlinf_actors.wire.values import Claim, ExitReport

POLICY = RestartPolicy.on_failure(max_restarts=2, within_s=60, backoff_s=1, backoff_max_s=30)
UNATTENDED = RestartPolicy.on_failure(max_restarts=2, within_s=60, backoff_s=1, after_lease_lost=True)
ARM = Claim("arm:1", "arm 1")


def restarting(policy: RestartPolicy = POLICY, nodes=(0,), **fields) -> HeadKit:
    """A kit with the running group g."""
    kit = HeadKit()
    kit.cluster(max(nodes) + 1)
    workers = [msgspec.structs.replace(spec, restart=policy, **fields) for spec in specs("g", list(nodes))]
    assert isinstance(kit.ask("d1", Launch("ns", "g", "m:C", workers)), Launched)
    for rank, node in enumerate(nodes):
        kit.ready(f"a:n{node}", f"g-{rank}")
    return kit


def dies(kit: HeadKit, id: str = "g-0", node: str = "a:n0", **report):
    """The changes that the owner gets."""
    kit.exited(node, id, **{"kind": "signalled", "exit_code": None, "signal": 9, **report})
    (changed,) = kit.sent(WorkerChanged, "d1")
    return changed.workers[0]


def started(kit: HeadKit, node: str = "a:n0") -> list[str]:
    return [spec.id for one in kit.sent(StartWorkers, node) for spec in one.workers]


def test_failed_worker_is_reported_and_restarted_after_the_back_off():
    kit = restarting()
    state = dies(kit)
    assert (state.id, state.state, state.restarts, state.exit.signal) == ("g-0.1", "restarting", 1, 9)
    assert kit.group_states() == {"g": "restarting"}
    kit.wait(0.9)
    assert started(kit) == []
    kit.wait(0.1)
    assert started(kit) == ["g-0.1"]
    (spec,) = kit.sent(StartWorkers)[0].workers
    assert (spec.rank, spec.incarnation, spec.restart) == (0, 1, POLICY)
    kit.ready("a:n0", "g-0.1")
    assert kit.sent(WorkerChanged, "d1")[0].workers[0].state == "running"
    assert kit.group_states() == {"g": "running"}


def test_back_off_doubles_to_its_maximum_and_resets_after_a_window():
    policy = RestartPolicy.on_failure(max_restarts=9, within_s=100, backoff_s=1, backoff_max_s=3)
    restarts, group = Restarts(), Group("ns", "g", "m:C", "d1")
    worker = WorkerRecord(msgspec.structs.replace(specs("g", [0])[0], restart=policy), "n0", "", WorkerLife.RUNNING)

    def back_off(now: float) -> float:
        nonlocal worker
        worker.exit = ExitReport("signalled", signal=9)
        worker, due = restarts.after(group, worker, now)
        return due - now

    assert [back_off(now) for now in (0, 10, 20, 30)] == [1, 2, 3, 3]
    assert back_off(131) == 1
    assert worker.id == "g-0.5"


@pytest.mark.parametrize(
    ("report", "again"),
    [
        ({"kind": "exited", "signal": None, "exit_code": 0}, False),
        ({"kind": "exited", "signal": None, "exit_code": 3}, True),
        ({"kind": "exited", "signal": None, "exit_code": None}, True),
        ({"kind": "stopped", "signal": 15}, False),
        ({"kind": "start_failed", "signal": None}, False),
        ({"kind": "signalled", "oom": "yes"}, True),
    ],
)
def test_only_failures_are_restarted(report, again):
    state = dies(restarting(), **report)
    assert state.state == ("restarting" if again else "gone")


def test_failed_start_of_a_restart_counts_as_a_failure():
    kit = restarting()
    dies(kit)
    kit.wait(1)
    state = dies(kit, "g-0.1", kind="start_failed", signal=None)
    assert (state.id, state.state) == ("g-0.2", "restarting")


def test_failures_are_counted_within_the_window_only():
    kit = restarting()
    dies(kit)
    kit.wait(1)
    dies(kit, "g-0.1")
    kit.wait(2)
    state = dies(kit, "g-0.2")
    assert state.state == "gone"
    assert state.exit.reason == "it was restarted 2 times within 60 s, and is not again"
    assert kit.group_states() == {}

    kit = restarting()
    for id in ("g-0", "g-0.1", "g-0.2", "g-0.3"):
        assert dies(kit, id).state == "restarting"
        kit.wait(2)
        kit.now += 40
        for peer in ("a:n0", "d1"):
            kit.tell(peer, Beat())


def test_shutdown_during_the_back_off_needs_no_agent():
    kit = restarting(nodes=(0, 0))
    dies(kit, "g-1")
    assert kit.ask("d1", StopGroup("ns", "g", 5.0)) is None
    assert [stop.ids for stop in kit.sent(StopWorkers)] == [["g-0"]]
    kit.exited("a:n0", "g-0", kind="stopped", exit_code=None, signal=15)
    assert kit.answers() == [("d1", Done())]
    kit.wait(5)
    assert started(kit) == []


def test_end_of_the_owner_and_loss_of_the_node_end_the_back_off():
    kit = restarting()
    dies(kit)
    kit.tell("d1", Goodbye("bye"))
    assert kit.group_states() == {}

    kit = restarting()
    dies(kit)
    kit.tell("a:n0", Goodbye("stopped"))
    assert kit.sent(WorkerChanged, "d1")[0].workers[0].exit.kind == "node_lost"
    assert kit.group_states() == {}
    kit.wait(5)
    assert started(kit) == []


def test_stopping_worker_is_not_restarted():
    kit = restarting()
    kit.ask("d1", StopGroup("ns", "g", 5.0))
    kit.exited("a:n0", "g-0", kind="signalled", exit_code=None, signal=9)
    assert kit.answers() == [("d1", Done())]


@pytest.mark.parametrize(
    "report",
    [
        {},
        {"kind": "exited", "signal": None, "exit_code": 76, "reason": "no word from the head for 1.6 s"},
    ],
)
def test_worker_with_a_robot_is_not_started_again_and_says_why(report):
    kit = restarting(claims=(ARM,))
    state = dies(kit, **report)
    assert (state.id, state.state) == ("g-0", "gone")
    assert report.get("reason", "") in state.exit.reason
    assert "it lost its lease of arm 1, and is not started again by itself" in state.exit.reason
    assert "after_lease_lost=True" in state.exit.reason
    assert any("is not started again by itself" in line for line in kit.records()), "the event of its end"
    kit.wait(60)
    assert started(kit) == []
    assert kit.group_states() == {}


def test_policy_restarts_the_ranks_of_a_group_that_have_no_robot():
    kit = HeadKit()
    kit.cluster()
    with_arm, without = (msgspec.structs.replace(spec, restart=POLICY) for spec in specs("g", [0, 0]))
    kit.ask("d1", Launch("ns", "g", "m:C", [msgspec.structs.replace(with_arm, claims=(ARM,)), without]))
    for id in ("g-0", "g-1"):
        kit.ready("a:n0", id)
    assert dies(kit, "g-0").state == "gone"
    assert dies(kit, "g-1").state == "restarting"


def test_worker_with_a_robot_is_started_again_if_its_policy_says_so():
    kit = restarting(UNATTENDED, claims=(ARM,))
    assert dies(kit).state == "restarting"
    kit.wait(1)
    assert started(kit) == ["g-0.1"]


def test_robot_stays_with_the_group_during_the_back_off():
    kit = restarting(UNATTENDED, claims=(ARM,))
    dies(kit)
    other = [msgspec.structs.replace(specs("other", [0])[0], claims=(ARM,))]
    refused = kit.ask("d1", Launch("ns", "other", "m:C", other))
    assert isinstance(refused, Refuse)
    assert refused.kind == "hardware_in_use"
    kit.ask("d1", StopGroup("ns", "g", 0.0))
    assert isinstance(kit.ask("d1", Launch("ns", "other", "m:C", other)), Launched)


def test_an_emergency_stop_ends_the_back_off_of_a_robot_worker_for_good():
    kit = restarting(UNATTENDED, claims=(ARM,))
    dies(kit)
    kit.ask("d1", EStop("a test"))
    assert kit.group_states() == {}
    kit.ask("d1", EStop("a test", release=True))
    kit.wait(5)
    assert started(kit) == []


def test_emergency_stop_prevents_restarts_of_robot_workers():
    kit = restarting(UNATTENDED, claims=(ARM,))
    kit.ask("d1", EStop("a test"))
    kit.exited("a:n0", "g-0", kind="exited", exit_code=76)
    assert kit.group_states() == {}
    kit.wait(5)
    assert started(kit) == []


def test_repeated_hello_does_not_start_a_worker_in_its_back_off():
    kit = restarting()
    dies(kit)
    kit.node("n0", ip="10.0.0.1", is_head=True)
    assert started(kit) == []
    kit.wait(1)
    assert started(kit) == ["g-0.1"]


def test_restarted_head_continues_a_back_off():
    policy = RestartPolicy.on_failure(backoff_s=1)
    (spec,) = specs("g", [0])
    spec = msgspec.structs.replace(spec, restart=policy)
    kit = HeadKit()
    ended = running(spec, "d1", exit=ExitReport("signalled", signal=9))
    kit.ask("a:n0", agent_hello("n0", is_head=True, workers=[ended]))
    kit.ask("d1", client_hello("d1"))
    assert kit.group_states() == {"g": "restarting"}
    kit.wait(1)
    assert started(kit) == ["g-0.1"]


def test_restarted_head_keeps_the_later_of_two_incarnations():
    (spec,) = specs("g", [0])
    spec = msgspec.structs.replace(spec, restart=POLICY)
    later = msgspec.structs.replace(spec, id="g-0.1", incarnation=1)
    kit = HeadKit()
    ended = running(spec, "d1", exit=ExitReport("signalled", signal=9))
    kit.ask("a:n0", agent_hello("n0", is_head=True, workers=[running(later, "d1", pid=5), ended]))
    kit.ask("d1", client_hello("d1"))
    (group,) = status_of(kit.head, kit.now).groups
    assert [(worker.id, worker.restarts) for worker in group.workers] == [("g-0.1", 1)]


def test_restarted_head_handles_two_ends_of_one_rank_in_one_report():
    (spec,) = specs("g", [0])
    spec = msgspec.structs.replace(spec, restart=POLICY)
    later = msgspec.structs.replace(spec, id="g-0.1", incarnation=1)
    kit = HeadKit()
    exit = ExitReport("signalled", signal=9)
    ended = [running(spec, "d1", exit=exit), running(later, "d1", exit=exit)]
    assert not isinstance(kit.ask("a:n0", agent_hello("n0", is_head=True, workers=ended)), Refuse)
    kit.wait(5)
    assert started(kit) == ["g-0.2"]


def test_very_many_restarts_do_not_overflow():
    policy = RestartPolicy.on_failure(max_restarts=5000, within_s=1e6, backoff_s=1, backoff_max_s=3)
    restarts, group = Restarts(), Group("ns", "g", "m:C", "d1")
    worker = WorkerRecord(msgspec.structs.replace(specs("g", [0])[0], restart=policy), "n0", "", WorkerLife.RUNNING)
    dues = []
    for _ in range(2000):
        worker.exit = ExitReport("signalled", signal=9)
        worker, due = restarts.after(group, worker, 0.0)
        dues.append(due)
    assert dues == [1, 2, *[3] * 1998]


@given(st.lists(st.tuples(st.floats(0, 40), st.booleans()), max_size=30))
def test_restarts_in_any_window_stay_within_the_policy(ends):
    kit = restarting(RestartPolicy.on_failure(max_restarts=2, within_s=30, backoff_s=0))
    starts: list[float] = []
    id = "g-0"
    for n, (pause, failure) in enumerate(ends, 1):
        kit.now += pause
        kit.node("n0", ip="10.0.0.1", is_head=True, workers=[running(one, "d1") for one in _specs_of(kit)])
        if "g" not in kit.group_states():
            break
        state = dies(kit, id, **({} if failure else {"kind": "exited", "signal": None, "exit_code": 0}))
        if state.state == "gone":
            break
        id = f"g-0.{n}"
        starts.append(kit.now)
        kit.ready("a:n0", id)
    for at in starts:
        assert len([other for other in starts if at <= other < at + 30]) <= 2


def _specs_of(kit: HeadKit):
    groups = status_of(kit.head, kit.now).groups
    (spec,) = specs("g", [0])
    return [msgspec.structs.replace(spec, id=worker.id) for group in groups for worker in group.workers]


def test_repeated_launch_keeps_its_robots():
    arms = [Claim("arm:0", "arm 0"), Claim("arm:1", "arm 1")]
    workers = [msgspec.structs.replace(spec, claims=(arms[spec.rank],)) for spec in specs("g", [0, 1])]
    kit = HeadKit()
    kit.cluster(2)
    kit.node("n0", ip="10.0.0.1", is_head=True, workers=[running(workers[0], "d1", pid=5)])  # n1 never got the order
    answer = kit.ask("d1", Launch("ns", "g", "m:C", workers))
    assert isinstance(answer, Launched)
    assert started(kit, "a:n1") == ["g-1"]
    for n, arm in enumerate(arms):
        other = [msgspec.structs.replace(specs(f"other{n}", [1])[0], claims=(arm,))]
        refused = kit.ask("d1", Launch("ns", f"other{n}", "m:C", other))
        assert isinstance(refused, Refuse)
        assert refused.kind == "hardware_in_use"
    kit.ask("d1", StopGroup("ns", "g", 5.0))
    refused = kit.ask("d1", Launch("ns", "g", "m:C", workers))
    assert isinstance(refused, Refuse)
    assert "is being stopped" in refused.text


# --- first causes ---


def test_later_ends_name_the_first_as_their_cause():
    kit = HeadKit()
    kit.cluster(2)
    kit.launch("g", [0, 1, 1])
    first = dies(kit, "g-0", stderr_tail=["boom"])
    assert first.exit.reason == ""
    kit.now += 2
    second = dies(kit, "g-1", "a:n1", kind="exited", signal=None, exit_code=1)
    assert second.exit.reason == (
        "the first of its group to end, 2.0 s before, was g:0 on n0 (10.0.0.1), which was ended by signal 9 (SIGKILL)"
    )
    kit.now += 60
    assert dies(kit, "g-2", "a:n1").exit.reason == ""


def test_requested_end_is_not_named_as_a_cause():
    kit = HeadKit()
    kit.cluster()
    kit.launch("g", [0, 0])
    dies(kit, "g-0", kind="exited", signal=None, exit_code=0)
    assert dies(kit, "g-1").exit.reason == ""


# --- the policy ---


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_restarts": -1},
        {"within_s": 0},
        {"backoff_s": -1},
        {"backoff_max_s": "x"},
        {"backoff_max_s": float("inf")},
        {"after_lease_lost": "no"},
    ],
)
def test_invalid_policies_are_refused(wrong):
    (name,) = wrong
    with pytest.raises(UsageError, match=name):
        RestartPolicy.on_failure(**wrong)
    assert not RestartPolicy.never().restarts
