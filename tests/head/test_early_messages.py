"""What a restarted head is asked before its nodes are back waits; launches whose answers were lost."""

from __future__ import annotations

from head_kit import HeadKit, client_hello
from restart_kit import alone, back, cluster, returns

from rlinf_actors.head.commands import Refuse
from rlinf_actors.wire.agent_messages import Beat, Goodbye, StartWorkers, StopWorkers, Welcome
from rlinf_actors.wire.client_messages import FindGroup, Launched, StopGroup

# --- what comes too early waits ---


def test_a_name_is_not_given_twice_before_the_nodes_are_back():
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


def test_a_name_that_was_free_is_given_once_the_nodes_are_back():
    kit = cluster(2)
    kit.restart()
    returns(kit)
    assert kit.launch("new", [0, 1]) is None
    back(kit, 0)
    back(kit, 1)
    assert [answer.group.name for _, answer in kit.answers() if isinstance(answer, Launched)] == ["new"]


def test_a_name_whose_group_has_ended_meanwhile_is_free_for_a_launch_that_waited():
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


def test_missing_group_is_reported_when_the_waiting_is_over():
    kit = cluster(2)
    kit.restart()
    kit.driver("d1", token="token1", pid_start=0)
    assert kit.ask("d1", FindGroup("ns", "nothing")) is None
    kit.wait(kit.timing.lease_s - 1)
    returns(kit)
    assert kit.refusals() == []
    kit.wait(1)
    assert [refused.kind for refused in kit.refusals()] == ["not_found"]


def test_a_group_that_is_shut_down_before_its_nodes_are_back_ends():
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


def test_a_driver_that_comes_back_brings_the_token_along():
    kit = cluster(1)
    kit.restart()
    assert returns(kit).token == "token1"


def test_a_worker_that_is_back_before_its_agent_waits_for_it():
    kit = cluster(1)
    kit.restart()
    hello = client_hello("w", role="worker", worker_id="g-0", token="old")
    assert kit.ask("w", hello) is None
    assert kit.ask("w", hello) is None
    back(kit, 0, 1)
    assert [peer for peer, _ in kit.answers()] == ["a:n0", "w"]


def test_a_client_that_goes_waits_no_longer():
    kit = cluster(2)
    kit.restart()
    returns(kit)
    kit.launch("new", [0])
    kit.tell("d1", Goodbye())
    back(kit, 0)
    back(kit, 1)
    assert "new" not in kit.group_states()


def test_first_head_answers_at_once():
    kit = HeadKit()
    assert isinstance(kit.driver(), Welcome)
    assert kit.ask("d1", FindGroup("ns", "g")).kind == "not_found"


def test_stall_of_the_head_is_no_silence_of_its_nodes():
    kit = cluster(2, lease_s=10)
    kit.restart()
    kit.wait(1)
    kit.stall(20)
    assert kit.node_states() == {"n0": "registering", "n1": "registering"}


# --- a launch whose answer was lost ---


def test_a_launch_that_the_earlier_head_carried_out_is_answered_not_refused():
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
