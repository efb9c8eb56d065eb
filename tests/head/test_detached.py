"""A group that a worker detaches belongs to the job's first driver."""

from __future__ import annotations

from head_kit import HeadKit, specs

from rlinf_actors.wire.agents import StartWorkers, StopWorkers
from rlinf_actors.wire.clients import Launch, WorkerChanged
from rlinf_actors.wire.session import Goodbye


def made_by_a_worker(detached):
    kit = HeadKit()
    kit.cluster()
    token = kit.launch("g", [0]).group.token
    kit.driver("w", role="worker", worker_id="g-0", token=token)
    launched = kit.ask("w", Launch("ns", "c", "m:C", specs("c", [0]), detached=detached))
    [started] = kit.sent(StartWorkers, "a:n0")
    assert started.owner == launched.group.owner
    return kit, launched.group.owner


def test_it_outlives_the_worker_and_ends_with_the_driver():
    kit, owner = made_by_a_worker(detached=True)
    assert owner == "d1"
    kit.ready("a:n0", "c-0")
    assert [change.group for change in kit.sent(WorkerChanged, "w")] == ["c"]
    kit.exited("a:n0", "g-0")
    assert kit.sent(StopWorkers) == []
    kit.tell("d1", Goodbye())
    assert ["c-0"] in [stop.ids for stop in kit.sent(StopWorkers)]


def test_without_that_it_ends_with_the_worker():
    kit, owner = made_by_a_worker(detached=False)
    assert owner == "w"
    kit.exited("a:n0", "g-0")
    assert [stop.ids for stop in kit.sent(StopWorkers)] == [["c-0"]]
