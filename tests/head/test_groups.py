"""Groups: launch, life, end, lost nodes, and a head that was restarted."""

from __future__ import annotations

import pytest
from head_kit import HeadKit, running, specs

from rlinf_actors.head.commands import Refuse
from rlinf_actors.wire.agent_messages import Beat, Goodbye, StartWorkers, StopWorkers
from rlinf_actors.wire.client_messages import Done, FindGroup, Launch, Launched, StopGroup, WorkerChanged
from rlinf_actors.wire.values import Endpoint, ExitReport

UP = Endpoint("h", "ipc://x")


def lives(launched) -> list[str]:
    assert isinstance(launched, Launched), launched
    return [worker.state for worker in launched.group.workers]


def find(kit: HeadKit, name: str = "g", peer: str = "d1"):
    return kit.ask(peer, FindGroup("ns", name))


# --- launch ---


def test_launch_starts_workers_node_by_node_with_the_token():
    kit = HeadKit()
    kit.cluster(2)
    launched = kit.launch("g", [0, 0, 1])
    assert lives(launched) == ["starting"] * 3
    assert launched.group.owner == "d1"
    assert [worker.node_ip for worker in launched.group.workers] == ["10.0.0.1", "10.0.0.1", "10.0.0.2"]
    (first,), (second,) = kit.sent(StartWorkers, "a:n0"), kit.sent(StartWorkers, "a:n1")
    assert [spec.id for spec in first.workers] == ["g-0", "g-1"]
    assert [spec.id for spec in second.workers] == ["g-2"]
    assert {spec.token for spec in first.workers} == {launched.group.token}
    assert (first.owner, first.cls) == ("d1", "m:C")


def test_name_in_use_is_refused_except_in_another_namespace():
    kit = HeadKit()
    kit.cluster()
    kit.launch("g", [0])
    refused = kit.launch("g", [0], launch="again")
    assert refused.kind == "name_in_use"
    assert "'g' is starting in job 'ns'" in refused.text
    kit.driver("d2", namespace="else")
    assert isinstance(kit.launch("g", [0], peer="d2", namespace="else", launch="e"), Launched)


def test_name_is_free_after_the_end_of_all_workers():
    kit = HeadKit()
    kit.cluster()
    kit.launch("g", [0, 0])
    kit.ask("d1", StopGroup("ns", "g", 1.0))
    kit.exited("a:n0", "g-0")
    assert kit.launch("g", [0], launch="again").kind == "name_in_use"
    kit.exited("a:n0", "g-1")
    assert isinstance(kit.launch("g", [0], launch="again"), Launched)


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        (lambda w: [], "usage", "no workers"),
        (lambda w: [w[0], w[0]], "usage", "not unique"),
        (lambda w: [w[1]], "usage", "ranks of group 'g' are not 0 to 0"),
        (lambda w: specs("other", [0]), "usage", "says that it is 'other'"),
        (lambda w: specs("g", [5]), "node_lost", "node 5, where g:0 was placed, is not there"),
    ],
)
def test_malformed_launch_is_refused_and_leaves_no_group(change, kind, text):
    kit = HeadKit()
    kit.cluster()
    refused = kit.ask("d1", Launch("ns", "g", "m:C", change(specs("g", [0, 0]))))
    assert isinstance(refused, Refuse)
    assert refused.kind == kind
    assert text in refused.text
    assert kit.group_states() == {}
    assert kit.sent(StartWorkers) == []


def test_launch_on_a_lost_node_is_refused():
    kit = HeadKit()
    kit.cluster(2)
    kit.tell("a:n1", Goodbye())
    refused = kit.launch("g", [0, 1])
    assert refused.kind == "node_lost"
    assert "node 1, where g:1 was placed" in refused.text


# --- life ---


def test_starts_and_ends_of_workers_reach_owner_and_subscribers():
    kit = HeadKit()
    kit.cluster()
    kit.driver("d2")
    kit.launch("g", [0, 0])
    assert lives(find(kit, peer="d2")) == ["starting", "starting"]
    kit.ready("a:n0", "g-1")
    for peer in ("d1", "d2"):
        (changed,) = kit.sent(WorkerChanged, peer)
        (worker,) = changed.workers
        assert (worker.rank, worker.state, worker.pid, worker.endpoint, worker.master_port) == (
            1,
            "running",
            77,
            UP,
            4000,
        )
    kit.exited("a:n0", "g-1", exit_code=3, stderr_tail=["boom"])
    (changed,) = kit.sent(WorkerChanged, "d1")
    assert changed.workers[0].state == "gone"
    assert changed.workers[0].exit == ExitReport("exited", 3, stderr_tail=["boom"])
    assert kit.group_states() == {"g": "degraded"}


def test_changes_of_one_event_are_sent_as_one_message():
    kit = HeadKit()
    kit.cluster(2)
    kit.launch("g", [1, 1, 1])
    kit.tell("a:n1", Goodbye("off"))
    (changed,) = kit.sent(WorkerChanged, "d1")
    assert [worker.exit.kind for worker in changed.workers] == ["node_lost"] * 3
    assert "node n1 (10.0.0.2): off" in changed.workers[0].exit.reason
    assert kit.group_states() == {}


def test_ended_subscriber_gets_no_messages():
    kit = HeadKit()
    kit.cluster()
    kit.driver("d2")
    kit.launch("g", [0])
    find(kit, peer="d2")
    kit.tell("d2", Goodbye())
    kit.ready("a:n0", "g-0")
    assert kit.sent(WorkerChanged, "d2") == []


def test_agent_may_report_its_own_workers_only():
    kit = HeadKit()
    kit.cluster(2)
    kit.launch("g", [0])
    kit.exited("a:n1", "g-0")
    kit.exited("a:n0", "unknown")
    assert lives(find(kit)) == ["starting"]


def test_a_second_exit_is_ignored():
    kit = HeadKit()
    kit.cluster()
    kit.launch("g", [0, 0])
    kit.exited("a:n0", "g-0")
    kit.exited("a:n0", "g-0")
    kit.ready("a:n0", "g-0")
    assert kit.sent(WorkerChanged) == []
    assert kit.head.unexpected == 0


def test_error_for_a_missing_group_lists_existing_groups():
    kit = HeadKit()
    kit.cluster()
    assert "there is none at all" in find(kit).text
    kit.launch("other", [0])
    refused = find(kit)
    assert refused.kind == "not_found"
    assert "'other'" in refused.text


# --- the end ---


def test_stop_is_answered_after_the_end_of_all_workers():
    kit = HeadKit()
    kit.cluster(2)
    kit.launch("g", [0, 1])
    kit.ready("a:n0", "g-0")
    assert kit.ask("d1", StopGroup("ns", "g", 2.0)) is None
    assert kit.sent(StopWorkers, "a:n0") == [StopWorkers(["g-0"], 2.0)]
    assert kit.sent(StopWorkers, "a:n1") == [StopWorkers(["g-1"], 2.0)]
    assert kit.group_states() == {"g": "stopping"}
    kit.exited("a:n0", "g-0", kind="stopped")
    assert kit.answers() == []
    kit.exited("a:n1", "g-1", kind="stopped")
    assert kit.answers() == [("d1", Done())]
    assert kit.group_states() == {}


def test_stop_of_a_missing_group_is_answered():
    kit = HeadKit()
    kit.cluster()
    assert kit.ask("d1", StopGroup("ns", "g", 2.0)) == Done()


def test_second_stop_may_shorten_the_grace_and_both_are_answered():
    kit = HeadKit()
    kit.cluster()
    kit.driver("d2")
    kit.launch("g", [0])
    kit.ask("d1", StopGroup("ns", "g", 5.0))
    kit.ask("d2", StopGroup("ns", "g", 0.0))
    assert kit.sent(StopWorkers, "a:n0") == [StopWorkers(["g-0"], 0.0)]
    kit.exited("a:n0", "g-0")
    assert sorted(kit.answers()) == [("d1", Done()), ("d2", Done())]


def test_stop_is_answered_when_the_node_is_lost():
    kit = HeadKit()
    kit.cluster()
    kit.launch("g", [0])
    kit.ask("d1", StopGroup("ns", "g", 5.0))
    kit.wait(9)
    kit.tell("d1", Beat())
    kit.wait(2)
    assert ("d1", Done()) in kit.answers()


# --- reconciling ---


def test_lost_start_order_is_sent_again():
    kit = HeadKit()
    kit.cluster()
    kit.launch("g", [0, 0])
    kit.ready("a:n0", "g-0")
    token = find(kit).group.token
    there = running(specs("g", [0, 0])[0], "d1", endpoint=UP)
    kit.node("n0", ip="10.0.0.1", is_head=True, workers=[there])
    (start,) = kit.sent(StartWorkers, "a:n0")
    assert [(spec.id, spec.token) for spec in start.workers] == [("g-1", token)]


def test_running_worker_that_its_agent_does_not_list_has_ended():
    kit = HeadKit()
    kit.cluster()
    kit.launch("g", [0, 0])
    kit.ready("a:n0", "g-0")
    kit.node("n0", ip="10.0.0.1", is_head=True)
    (changed,) = kit.sent(WorkerChanged, "d1")
    assert (changed.workers[0].id, changed.workers[0].state) == ("g-0", "gone")


def test_lost_exit_report_is_repeated_with_the_hello():
    kit = HeadKit()
    kit.cluster()
    kit.launch("g", [0, 0])
    ended = running(specs("g", [0, 0])[0], "d1", exit=ExitReport("exited", 4))
    kit.node("n0", ip="10.0.0.1", is_head=True, workers=[ended])
    (changed,) = kit.sent(WorkerChanged, "d1")
    assert changed.workers[0].exit == ExitReport("exited", 4)


def test_worker_declared_lost_is_stopped_when_it_returns():
    kit = HeadKit()
    kit.cluster(2)
    kit.launch("g", [0, 1])
    spec = specs("g", [0, 1])[1]
    kit.tell("a:n1", Goodbye())
    kit.node("n1", "n1-2", ip="10.0.0.2", workers=[running(spec, "d1", endpoint=UP)])
    assert kit.sent(StopWorkers, "a:n1n1-2") == [StopWorkers(["g-1"], 0.0)]


# --- a head that was restarted ---


def restarted() -> HeadKit:
    """A new head; n0 has two workers of d1's group from before, one of them not ready yet."""
    kit = HeadKit()
    one, two = specs("g", [0, 0])
    kit.node("n0", ip="10.0.0.1", workers=[running(one, "d1", endpoint=UP, pid=7, master_port=9), running(two, "d1")])
    return kit


def test_restarted_head_learns_groups_from_agents():
    kit = restarted()
    assert kit.group_states() == {"g": "starting"}
    assert kit.driver().token == "old"
    (changed,) = kit.sent(WorkerChanged, "d1")
    assert [(w.id, w.state, w.pid, w.master_port) for w in changed.workers] == [
        ("g-0", "running", 7, 9),
        ("g-1", "starting", 0, 0),
    ]
    assert find(kit).group.cls == "m:C"
    kit.wait(9)
    assert kit.group_states() == {"g": "starting"}


def test_token_of_running_workers_is_kept():
    kit = HeadKit()
    assert kit.driver().token == "token1"
    (spec,) = specs("g", [0])
    kit.node("n0", workers=[running(spec, "d1", endpoint=UP)])
    assert find(kit).group.token == "old"


def test_absent_owner_expires_and_its_workers_are_stopped():
    kit = restarted()
    for _ in range(11):
        kit.wait(0.9)
        kit.tell("a:n0", Beat())
    kit.wait(0.2)
    assert kit.sent(StopWorkers, "a:n0") == [StopWorkers(["g-0", "g-1"], kit.timing.orphan_grace_s, "its owner ended")]
    assert kit.driver().kind == "node_lost"


def test_returning_owner_gets_ends_from_its_absence():
    kit = HeadKit()
    (spec,) = specs("g", [0])
    kit.node("n0", workers=[running(spec, "d1", exit=ExitReport("signalled", None, 9))])
    kit.driver()
    (changed,) = kit.sent(WorkerChanged, "d1")
    assert changed.workers[0].exit.signal == 9
    assert kit.group_states() == {}


def test_end_of_an_earlier_group_does_not_affect_its_namesake():
    kit = HeadKit()
    kit.cluster()
    kit.launch("g", [0])
    old = running(specs("g", [0], launch="before")[0], "d1", exit=ExitReport("exited", 1))
    new = running(specs("g", [0])[0], "d1")
    kit.node("n0", ip="10.0.0.1", is_head=True, workers=[new, old])
    assert kit.sent(WorkerChanged) == []
    assert [worker.id for worker in find(kit).group.workers] == ["g-0"]


def test_workers_of_a_client_that_has_ended_are_stopped():
    kit = HeadKit()
    kit.driver()
    kit.tell("d1", Goodbye())
    (spec,) = specs("g", [0])
    kit.node("n0", workers=[running(spec, "d1", endpoint=UP)])
    assert kit.sent(StopWorkers, "a:n0") == [StopWorkers(["g-0"], kit.timing.orphan_grace_s, "its owner ended")]


def test_name_stays_with_the_other_owner_that_has_it():
    kit = HeadKit()
    kit.cluster()
    kit.launch("g", [0])
    (spec,) = specs("g", [0], launch="before")
    kit.node("n1", ip="10.0.0.2", workers=[running(spec, "d0", endpoint=UP)])
    assert kit.sent(StopWorkers, "a:n1") == [StopWorkers(["before-0"], kit.timing.orphan_grace_s)]
