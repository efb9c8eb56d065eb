"""Groups that grow and shrink, at the head: who is a member, who is told, and what a restarted head knows."""

from __future__ import annotations

import pytest
from head_kit import agent_hello, running, specs
from msgspec.structs import replace
from restart_kit import UP, cluster, returns

from rlinf_actors.head.commands import Refuse
from rlinf_actors.head.group_notices import MOST_STATES
from rlinf_actors.wire.agent_messages import StartWorkers, StopWorkers
from rlinf_actors.wire.client_messages import Done, FindGroup, Handles, Launch, Launched, WorkerChanged
from rlinf_actors.wire.launch_messages import LaunchPart, batches_of
from rlinf_actors.wire.resize_messages import AddRanks, ResizeGroup
from rlinf_actors.wire.values import GroupHandle


def added(count: int, node: int = 0, before: int = 2, attempt: int = 1):
    """The workers of *count* more ranks of group g."""
    total = before + count
    return [
        replace(spec, id=f"g-{spec.rank}a{attempt}", node_rank=node, world_size=total, resizes=-1)
        for spec in specs("g", [node] * total)[before:]
    ]


def add(kit, count: int = 1, **more):
    return kit.ask("d1", AddRanks("ns", "g", added(count, **more)))


def resize(kit, size: int, peer: str = "d1", **more):
    return kit.ask(peer, ResizeGroup("ns", "g", "g", size, **more))


def found(kit, peer: str = "d1"):
    return kit.ask(peer, FindGroup("ns", "g")).group


@pytest.mark.parametrize("said", [-1, 7, 2**40])
def test_a_new_group_was_not_resized_whatever_its_driver_says(said):
    """Else the head would count on from there, up to a number that no message can have."""
    kit = cluster()
    made = [replace(spec, resizes=said) for spec in specs("h", [0, 0])]
    assert isinstance(kit.ask("d1", Launch("ns", "h", "m:C", made)), Launched)
    (order,) = kit.sent(StartWorkers, "a:n0")
    assert [(spec.resizes, spec.world_size) for spec in order.workers] == [(0, 2), (0, 2)]
    assert kit.ask("d1", ResizeGroup("ns", "h", "h", 1, stop=False)) == Done()
    assert {spec.resizes for one in kit.sent(StartWorkers, "a:n0") for spec in one.workers} == {1}


def test_an_added_rank_is_a_member_only_after_the_owner_says_so():
    kit = cluster()
    kit.driver("d2")
    assert found(kit, "d2").world_size == 2
    reply = add(kit)
    assert [worker.id for worker in reply.group.workers] == ["g-2a1"]
    assert [spec.id for one in kit.sent(StartWorkers, "a:n0") for spec in one.workers] == ["g-2a1"]
    kit.ready("a:n0", "g-2a1")
    assert [worker.id for worker in kit.sent(WorkerChanged, "d1")[0].workers] == ["g-2a1"]
    assert (len(found(kit).workers), kit.group_states()) == (2, {"g": "running"})
    assert resize(kit, 3, detail="three") == Done()
    (told,) = kit.sent(WorkerChanged, "d2")
    assert (told.world_size, told.detail, len(told.workers)) == (3, "three", 3)
    now = found(kit)
    assert (now.world_size, len(now.workers), now.detail) == (3, 3, "three")


def test_agentds_get_the_new_number_of_their_workers():
    kit = cluster()
    add(kit)
    kit.ready("a:n0", "g-2a1")
    resize(kit, 3)
    known = {spec.id: spec for node in "01" for one in kit.sent(StartWorkers, f"a:n{node}") for spec in one.workers}
    assert {id: (spec.world_size, spec.resizes) for id, spec in known.items()} == dict.fromkeys(
        ["g-0", "g-1", "g-2a1"], (3, 1)
    )


def test_removed_ranks_are_out_before_they_are_stopped():
    kit = cluster()
    kit.driver("d2")
    found(kit, "d2")
    assert resize(kit, 1, stop=False) == Done()
    assert kit.sent(WorkerChanged, "d2")[0].world_size == 1
    assert kit.sent(StopWorkers) == []
    assert [worker.id for worker in found(kit).workers] == ["g-0"]
    assert resize(kit, 1, grace_s=2.0) is None
    (order,) = kit.sent(StopWorkers, "a:n1")
    assert (order.ids, order.grace_s, order.reason) == (["g-1"], 2.0, "it was removed from its group")
    kit.exited("a:n1", "g-1", kind="stopped")
    assert kit.answers() == [("d1", Done())]
    (told,) = kit.sent(WorkerChanged, "d2")
    assert [(worker.id, worker.state) for worker in told.workers] == [("g-1", "gone")]
    assert kit.group_states() == {"g": "running"}
    assert isinstance(add(kit, before=1), Launched), "the rank is free for another worker"


def test_a_failed_addition_leaves_the_group_as_it_was():
    kit = cluster()
    add(kit, 2)
    kit.exited("a:n0", "g-2a1", kind="start_failed")
    assert [worker.state for worker in kit.sent(WorkerChanged, "d1")[0].workers] == ["gone"]
    assert resize(kit, 2) is None
    kit.exited("a:n0", "g-3a1", kind="stopped")
    assert kit.answers() == [("d1", Done())]
    assert ([worker.id for worker in found(kit).workers], kit.group_states()) == (["g-0", "g-1"], {"g": "running"})
    assert isinstance(add(kit, 2, attempt=2), Launched)


@pytest.mark.parametrize(
    ("ask", "text"),
    [
        (lambda kit: add(kit, before=3), "ranks to add to group 'g' must be 2, 3"),
        (lambda kit: add(kit, node=7), "node 7, where g:2 was placed, is not there"),
        (lambda kit: resize(kit, 0), "cannot have 0 ranks"),
        (lambda kit: resize(kit, 3), "cannot have 3 ranks"),
        (lambda kit: resize(kit, 1, peer="d2"), "only by the process that launched it"),
        (lambda kit: kit.ask("d1", ResizeGroup("ns", "g", "other", 1)), "has ended and cannot be resized"),
        (lambda kit: kit.ask("d1", ResizeGroup("other", "g", "g", 1)), "belongs to job"),
    ],
)
def test_requests_that_contradict_the_group_are_refused(ask, text):
    kit = cluster()
    kit.driver("d2")
    answer = ask(kit)
    assert isinstance(answer, Refuse)
    assert text in answer.text
    assert kit.sent(StartWorkers) == []
    assert len(found(kit).workers) == 2


def test_a_repeated_request_starts_nothing_twice():
    kit = cluster()
    add(kit)
    assert len(kit.sent(StartWorkers)) == 1
    assert isinstance(add(kit), Launched)
    assert kit.sent(StartWorkers) == []
    resize(kit, 3)
    assert resize(kit, 3) == Done()


def resized(world_size: int, resizes: int, count: int = 2):
    """The workers of g on their nodes, with the number of ranks that the head has sent them last."""
    there = [replace(spec, world_size=world_size, resizes=resizes) for spec in specs("g", [0, 1])[:count]]
    return [running(spec, "d1", endpoint=UP, pid=7) for spec in there]


def test_a_restarted_head_learns_the_number_from_the_newest_resize():
    kit = cluster()
    kit.restart()
    first, second = resized(2, 0)[0], resized(1, 1)[1]  # the group was shrunk, which the first node missed
    kit.ask("a:n0", agent_hello("n0", ip="10.0.0.1", is_head=True, workers=[first]))
    kit.ask("a:n1", agent_hello("n1", ip="10.0.0.2", workers=[second]))
    returns(kit)
    state = found(kit)
    assert ([worker.id for worker in state.workers], state.world_size) == (["g-0"], 1)
    assert resize(kit, 1) is None
    assert kit.sent(StopWorkers, "a:n1")[0].ids == ["g-1"]


def test_a_restarted_head_answers_when_it_knows_the_workers():
    kit = cluster()
    kit.restart()
    kit.ask("a:n0", agent_hello("n0", ip="10.0.0.1", is_head=True, workers=resized(2, 0)[:1]))
    returns(kit)
    assert resize(kit, 1, stop=False) is None
    kit.ask("a:n1", agent_hello("n1", ip="10.0.0.2", workers=resized(2, 0)[1:]))
    assert ("d1", Done()) in kit.answers()


def test_a_restarted_head_goes_on_with_an_addition():
    kit = cluster()
    kit.restart()
    (joining,) = added(1)
    workers = [resized(2, 0)[0], running(joining, "d1", endpoint=UP, pid=8)]
    kit.ask("a:n0", agent_hello("n0", ip="10.0.0.1", is_head=True, workers=workers))
    kit.ask("a:n1", agent_hello("n1", ip="10.0.0.2", workers=resized(2, 0)[1:]))
    returns(kit)
    assert len(found(kit).workers) == 2
    assert [worker.id for worker in add(kit).group.workers] == ["g-2a1"]
    assert resize(kit, 3) == Done()
    assert len(found(kit).workers) == 3


def test_the_owner_learns_from_a_restarted_head_that_an_added_worker_is_gone():
    kit = cluster()
    states = [*found(kit).workers, *add(kit).group.workers]
    kit.restart()
    kit.ask("a:n0", agent_hello("n0", ip="10.0.0.1", is_head=True, workers=resized(2, 0)[:1]))
    kit.ask("a:n1", agent_hello("n1", ip="10.0.0.2", workers=resized(2, 0)[1:]))
    returns(kit)
    kit.tell("d1", Handles([GroupHandle("ns", "g", states)]))
    told = {worker.id: worker.state for one in kit.sent(WorkerChanged, "d1") for worker in one.workers}
    assert told["g-2a1"] == "gone"
    assert kit.group_states() == {"g": "running"}


def test_a_group_ends_after_its_removed_ranks():
    kit = cluster()
    resize(kit, 1, stop=False)
    resize(kit, 1)
    kit.exited("a:n0", "g-0")
    kit.exited("a:n1", "g-1", kind="stopped")
    assert kit.answers() == [("d1", Done())]
    assert kit.group_states() == {}


# --- many ranks are added in parts ---


def add_in_parts(kit, workers, size=2):
    """Send *workers* in parts of *size*; return the answer."""
    first, last = workers[:-1], workers[-1]
    slices = [first[start : start + size] for start in range(0, len(first), size)]
    for index, part in enumerate(slices):
        assert kit.ask("d1", LaunchPart("ns", "g", last.id, index, batches_of(part))) == Done()
    return kit.ask("d1", AddRanks("ns", "g", [last], len(slices)))


def test_ranks_that_come_in_parts_start_together():
    kit = cluster()
    reply = add_in_parts(kit, added(5))
    assert [worker.id for worker in reply.group.workers] == [f"g-{rank}a1" for rank in range(2, 7)]
    assert [spec.id for one in kit.sent(StartWorkers, "a:n0") for spec in one.workers] == [
        f"g-{rank}a1" for rank in range(2, 7)
    ]
    assert len(kit.head.launches.parts) == 0
    assert resize(kit, 7) == Done()
    assert len(found(kit).workers) == 7


def test_repeated_addition_whose_parts_are_used_up_gets_the_same_workers():
    kit = cluster()
    workers = added(5)
    reply = add_in_parts(kit, workers)
    assert kit.ask("d1", AddRanks("ns", "g", workers[-1:], 2)) == reply
    assert kit.sent(StartWorkers) == []


def test_addition_needs_its_parts_again_at_a_head_that_knows_only_some_of_its_workers():
    kit = cluster()
    kit.restart()
    *_, last = workers = added(3)
    there = [resized(2, 0)[0], running(last, "d1", endpoint=UP, pid=8)]
    kit.ask("a:n0", agent_hello("n0", ip="10.0.0.1", is_head=True, workers=there))
    kit.ask("a:n1", agent_hello("n1", ip="10.0.0.2", workers=resized(2, 0)[1:]))
    returns(kit)
    refused = kit.ask("d1", AddRanks("ns", "g", [last], 1))
    assert isinstance(refused, Refuse)
    assert refused.kind == "parts"
    assert len(add_in_parts(kit, workers).group.workers) == 3


def test_addition_that_was_given_up_leaves_no_parts():
    kit = cluster()
    workers = added(5)
    kit.ask("d1", LaunchPart("ns", "g", workers[-1].id, 0, batches_of(workers[:2])))
    assert resize(kit, 2) == Done()
    assert len(kit.head.launches.parts) == 0
    assert len(add_in_parts(kit, added(3, attempt=2)).group.workers) == 3


def test_states_of_many_added_ranks_follow_the_answer():
    kit = cluster()
    size = MOST_STATES + 3
    assert len(add_in_parts(kit, added(size), 2000).group.workers) == MOST_STATES
    assert sum(len(notice.workers) for notice in kit.sent(WorkerChanged, "d1")) >= 3
