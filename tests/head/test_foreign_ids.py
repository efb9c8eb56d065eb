"""Messages that name workers of other members change nothing, and the head goes on."""

from __future__ import annotations

import pytest
from head_kit import HeadKit, agent_hello, specs

from rlinf_actors.wire.client_messages import FindGroup, GetNodes, Handles, Launch
from rlinf_actors.wire.values import GroupHandle, WorkerState


@pytest.fixture
def kit() -> HeadKit:
    """Groups a and b of one worker each on two nodes."""
    kit = HeadKit(lease_s=10, rank_hold_s=60)
    kit.cluster(2)
    kit.launch("a", [0])
    kit.launch("b", [1])
    return kit


def test_repeated_launch_with_a_worker_of_another_group_is_refused(kit):
    (own,), (foreign,) = specs("b", [1]), specs("a", [0])
    for wrong in (foreign, specs("b", [0], namespace="other", launch="x")[0]):
        refused = kit.ask("d1", Launch("ns", "b", "m:C", [own, wrong]))
        assert refused.kind == "usage"
    kit.exited("a:n1", "b-0", exit_code=1)
    kit.beats("a:n0", "a:n1", seconds=15)  # the driver is silent, and its groups end
    kit.driver("d2", namespace="other")
    assert kit.ask("d2", FindGroup("other", "a")).kind == "not_found"


def test_handles_that_name_a_worker_of_another_group_change_nothing(kit):
    made_up = [WorkerState("a-0", 1, 0, "10.0.0.1", "running"), WorkerState("b-9", 10**6, 0, "10.0.0.1", "running")]
    own = WorkerState("b-0", 0, 1, "10.0.0.2", "running")
    kit.tell("d1", Handles([GroupHandle("ns", "b", [own, *made_up])]))
    found = kit.ask("d1", FindGroup("ns", "b")).group
    assert [worker.id for worker in found.workers] == ["b-0"]
    kit.exited("a:n1", "b-0", exit_code=1)
    kit.beats("a:n0", "a:n1", seconds=15)
    assert kit.ask("d1", FindGroup("ns", "a")).kind == "hello", "the driver was silent, but the head goes on"


def test_only_the_nodes_own_agent_may_report_a_lost_workers_end(kit):
    kit.beats("a:n0", "d1", seconds=11)  # n1 is lost
    kit.exited("a:n0", "b-0", kind="stopped")
    assert kit.launch("b", [0], launch="again").kind == "name_in_use"
    kit.ask("a:n1again", agent_hello("n1", "again", ip="10.0.0.2"))
    assert kit.launch("b", [0], launch="again").group.name == "b"


@pytest.mark.parametrize("number", [-1, 10**9])
def test_impossible_number_of_nodes_is_refused(kit, number):
    refused = kit.ask("d1", GetNodes(number))
    assert (refused.kind, str(number) in refused.text) == ("usage", True)
