"""A lookup of a group is answered when the group is launched."""

from __future__ import annotations

import pytest
from head_kit import HeadKit

from rlinf_actors.head.commands import Refuse
from rlinf_actors.wire.agent_messages import Goodbye
from rlinf_actors.wire.client_messages import FindGroup, Launched, StopCluster, WorkerChanged

LOOK = FindGroup("ns", "h", True, "h", 2.0)
FIRST = 1000  # the number of that request


@pytest.fixture
def kit():
    """A worker looks up group h, which is being launched."""
    kit = HeadKit(embedded=True)
    kit.cluster()
    token = kit.launch("g", [0]).group.token
    kit.driver("w", role="worker", worker_id="g-0", token=token)
    assert kit.ask("w", LOOK, FIRST) is None
    return kit


def found(kit):
    return [body.group.name for peer, body in kit.answers() if peer == "w" and isinstance(body, Launched)]


def test_lookup_is_answered_when_the_group_is_launched(kit):
    kit.launch("h", [0])
    assert found(kit) == ["h"]
    kit.ready("a:n0", "h-0")
    assert [change.group for change in kit.sent(WorkerChanged, "w")] == ["h"]
    kit.wait(3)
    assert kit.refusals() == []


def test_lookup_is_refused_after_its_timeout(kit):
    kit.wait(2)
    assert [("no group named 'h'" in one.text, one.kind) for one in kit.refusals()] == [(True, "not_found")]


def test_lookup_ignores_a_namesake(kit):
    kit.launch("h", [0], launch="other")
    assert found(kit) == []
    kit.wait(2)
    assert ["another one has its name" in one.text for one in kit.refusals()] == [True]
    refused = kit.ask("w", FindGroup("ns", "h", True, "h"))
    assert isinstance(refused, Refuse)


def test_lookup_ignores_an_ended_namesake(kit):
    kit.launch("h", [0], launch="other")
    kit.exited("a:n0", "other-0")
    assert isinstance(kit.ask("d1", FindGroup("ns", "h", True, "other")), Launched)
    assert isinstance(kit.ask("d1", FindGroup("ns", "h", True, "h")), Refuse)


def test_repeated_lookup_is_answered_once(kit):
    """A client whose connection was lost repeats it with its old number."""
    assert kit.ask("w", LOOK, FIRST) is None
    kit.launch("h", [0])
    assert found(kit) == ["h"]


def test_lookup_of_a_client_that_has_ended_is_dropped(kit):
    kit.tell("w", Goodbye())
    kit.exited("a:n0", "g-0")
    kit.launch("h", [0])
    assert found(kit) == []


def test_end_of_the_cluster_refuses_waiting_lookups(kit):
    kit.ask("d1", StopCluster())
    assert [one.peer for one in kit.refusals()] == [b"w"]
