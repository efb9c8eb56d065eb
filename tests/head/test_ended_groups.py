"""Lookups of groups that have ended."""

from __future__ import annotations

from head_kit import HeadKit

from rlinf_actors.head.commands import Refuse
from rlinf_actors.head.restarts import EndedGroups
from rlinf_actors.wire.agent_messages import Goodbye
from rlinf_actors.wire.client_messages import FindGroup, Launched, StopGroup
from rlinf_actors.wire.values import Endpoint, ExitReport, GroupState, WorkerState


def find(kit: HeadKit, ended: bool = True, peer: str = "d1"):
    return kit.ask(peer, FindGroup("ns", "g", ended))


def killed_group() -> HeadKit:
    kit = HeadKit()
    kit.cluster()
    kit.launch("g", [0])
    kit.exited("a:n0", "g-0", kind="signalled", exit_code=None, signal=9)
    return kit


def test_lookup_of_ended_groups_returns_how_it_ended():
    kit = killed_group()
    found = find(kit)
    assert isinstance(found, Launched)
    assert found.group.token
    assert [(w.id, w.state, w.exit) for w in found.group.workers] == [
        ("g-0", "gone", ExitReport("signalled", signal=9))
    ]
    assert kit.group_states() == {}


def test_plain_lookup_does_not_return_an_ended_group():
    refused = find(killed_group(), ended=False)
    assert isinstance(refused, Refuse)
    assert refused.kind == "not_found"


def test_unknown_group_is_not_found():
    kit = HeadKit()
    kit.cluster()
    assert find(kit).kind == "not_found"


def test_new_group_of_the_name_replaces_the_ended_one():
    kit = killed_group()
    kit.launch("g", [0], launch="again")
    assert [worker.id for worker in find(kit).group.workers] == ["again-0"]
    kit.ask("d1", StopGroup("ns", "g", 1.0))
    kit.exited("a:n0", "again-0", kind="stopped")
    assert [worker.id for worker in find(kit).group.workers] == ["again-0"]


def test_ended_group_is_forgotten_with_its_job():
    kit = killed_group()
    kit.driver("d2")
    kit.tell("d1", Goodbye("done"))
    assert isinstance(find(kit, peer="d2"), Launched)
    kit.tell("d2", Goodbye("done"))
    kit.driver("d3")
    assert find(kit, peer="d3").kind == "not_found"


def state(name: str, count: int, namespace: str = "ns") -> GroupState:
    workers = [WorkerState(f"{name}-{n}", n, 0, "", "gone", 1, Endpoint("h")) for n in range(count)]
    return GroupState(namespace, name, "m:C", "o", "gone", workers, detail="long")


def test_oldest_ended_groups_are_forgotten_first():
    ended = EndedGroups(limit=5)
    for name, count in (("a", 2), ("b", 2), ("a", 1), ("c", 2)):
        ended.add(state(name, count))
    assert [ended.get(("ns", name), "t") is not None for name in "abc"] == [True, True, True]
    ended.add(state("d", 2))
    assert [ended.get(("ns", name), "t") is not None for name in "abcd"] == [True, False, True, True]
    ended.add(state("e", 9))
    assert [ended.get(("ns", name), "t") is not None for name in "acde"] == [False, False, False, True]
    found = ended.get(("ns", "e"), "t")
    assert (found.token, found.detail) == ("t", "")


def test_job_with_many_ended_groups_evicts_its_own_only():
    ended = EndedGroups(limit=5)
    ended.add(state("quiet", 2, "theirs"))
    for n in range(10):
        ended.add(state(f"g{n}", 1))
    assert ended.get(("theirs", "quiet"), "t") is not None
    assert [n for n in range(10) if ended.get(("ns", f"g{n}"), "t") is not None] == [7, 8, 9]


def test_two_equal_look_ups_of_one_client_that_wait_both_get_their_answer():
    """Two threads look for a group that a third launches soon."""
    kit = HeadKit()
    kit.cluster()
    for _ in range(2):
        assert kit.ask("d1", FindGroup("ns", "soon", wait_s=60.0)) is None
    kit.launch("soon", [0])
    found = [body.group.name for _, body in kit.answers() if isinstance(body, Launched)]
    assert found == ["soon"] * 3
