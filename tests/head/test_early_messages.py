"""Requests to a restarted head wait for its nodes; and launches whose answers were lost."""

from __future__ import annotations

from head_kit import HeadKit, client_hello
from restart_kit import alone, back, cluster, returns

from rlinf_actors.head.commands import Refuse
from rlinf_actors.wire.agent_messages import Beat, Goodbye, StartWorkers, StopWorkers, Welcome
from rlinf_actors.wire.client_messages import FindGroup, Launched, StopGroup

# --- early requests wait ---


def test_launch_waits_for_the_nodes_before_a_name_is_granted():
    kit = cluster(2)
    kit.restart()
    returns(kit)
    returns(kit, "d2")
    assert kit.launch("g", [0], peer="d2", launch="other") is None
    alone(kit, 0)
    assert kit.refusals() == []
    back(kit, 1)
    (refused,) = kit.refusals()
    assert (refused.kind, refused.peer) == ("name_in_use", b"d2")


def test_free_name_is_granted_after_the_nodes_return():
    kit = cluster(2)
    kit.restart()
    returns(kit)
    assert kit.launch("new", [0, 1]) is None
    back(kit, 0)
    back(kit, 1)
    assert [answer.group.name for _, answer in kit.answers() if isinstance(answer, Launched)] == ["new"]


def test_waiting_launch_gets_the_name_of_a_group_that_ended_meanwhile():
    kit = cluster(2)
    kit.restart()
    returns(kit)
    back(kit, 0)
    kit.exited("a:n0", "g-0", kind="stopped")
    assert kit.launch("g", [0], launch="again") is None
    alone(kit, 1)
    assert kit.refusals() == []
    assert [answer.group.name for _, answer in kit.answers() if isinstance(answer, Launched)] == ["g"]


def test_a_group_is_found_when_all_its_workers_are_known():
    kit = cluster(2)
    kit.restart()
    returns(kit)
    returns(kit, "d2")
    assert kit.ask("d2", FindGroup("ns", "g")) is None
    back(kit, 1)
    assert not any(isinstance(answer, Launched) for _, answer in kit.answers())
    back(kit, 0)
    (found,) = [answer for peer, answer in kit.answers() if peer == "d2"]
    assert [worker.id for worker in found.group.workers] == ["g-0", "g-1"]
    assert kit.ask("d2", FindGroup("ns", "g")).group.workers == found.group.workers


def test_missing_group_is_reported_after_the_nodes_return():
    kit = cluster(2)
    kit.restart()
    kit.driver("d1", token="token1", pid_start=0)
    assert kit.ask("d1", FindGroup("ns", "nothing")) is None
    kit.wait(kit.timing.lease_s - 1)
    returns(kit)
    assert kit.refusals() == []
    kit.wait(1)
    assert [refused.kind for refused in kit.refusals()] == ["not_found"]


def test_group_shut_down_before_its_nodes_return_ends():
    kit = cluster(2)
    kit.restart()
    returns(kit)
    assert kit.ask("d1", StopGroup("ns", "g", 1.0)) is None
    back(kit, 0)
    assert kit.answers()[-1][0] == "a:n0"
    back(kit, 1)
    assert kit.sent(StopWorkers) == [StopWorkers(["g-0"], 1.0), StopWorkers(["g-1"], 1.0)]
    kit.exited("a:n0", "g-0")
    kit.exited("a:n1", "g-1")
    assert [peer for peer, _ in kit.answers()] == ["d1"]


def test_a_new_driver_gets_the_token_of_its_job():
    kit = cluster(1)
    kit.restart()
    assert kit.driver("d2") is None
    back(kit, 0, 1)
    assert dict(kit.answers())["d2"].token == "old"


def test_returning_driver_restores_the_token_of_its_job():
    kit = cluster(1)
    kit.restart()
    assert returns(kit).token == "token1"


def test_worker_that_returns_before_its_agent_waits():
    kit = cluster(1)
    kit.restart()
    hello = client_hello("w", role="worker", worker_id="g-0", token="old")
    assert kit.ask("w", hello) is None
    assert kit.ask("w", hello) is None
    back(kit, 0, 1)
    assert [peer for peer, _ in kit.answers()] == ["a:n0", "w"]


def test_goodbye_of_a_client_drops_its_waiting_messages():
    kit = cluster(2)
    kit.restart()
    returns(kit)
    kit.launch("new", [0])
    kit.tell("d1", Goodbye())
    back(kit, 0)
    back(kit, 1)
    assert "new" not in kit.group_states()


def test_head_without_a_predecessor_answers_at_once():
    kit = HeadKit()
    assert isinstance(kit.driver(), Welcome)
    assert kit.ask("d1", FindGroup("ns", "g")).kind == "not_found"


def test_stall_of_the_head_does_not_count_as_absence_of_its_nodes():
    kit = cluster(2, lease_s=10)
    kit.restart()
    kit.wait(1)
    kit.stall(20)
    assert kit.node_states() == {"n0": "registering", "n1": "registering"}


# --- a launch whose answer was lost ---


def test_repeated_launch_that_an_earlier_head_completed_is_answered():
    kit = cluster(2)
    kit.restart()
    returns(kit)
    assert kit.launch("g", [0, 1]) is None
    back(kit, 0)
    back(kit, 1)
    (launched,) = [answer for peer, answer in kit.answers() if peer == "d1"]
    assert [worker.state for worker in launched.group.workers] == ["running", "running"]


def test_launch_that_the_earlier_head_had_begun_is_completed():
    kit = cluster(2)
    kit.restart()
    returns(kit)
    kit.launch("g", [0, 1])
    alone(kit, 0)
    back(kit, 1)
    (started,) = kit.sent(StartWorkers)
    assert [spec.id for spec in started.workers] == ["g-0"]
    assert kit.group_states() == {"g": "starting"}


def test_launch_of_the_earlier_head_whose_node_is_lost_ends():
    kit = cluster(2, lease_s=10)
    kit.restart()
    returns(kit, pid_start=0)
    kit.launch("g", [0, 1])
    back(kit, 1)
    for _ in range(11):
        returns(kit)
        kit.tell("a:n1", Beat())
        out = kit.wait(0.99)
    assert kit.refusals() != [] or any(isinstance(c, Refuse) for c in out)
    assert kit.group_states() == {"g": "stopping"}
