"""An agent reports ends of an earlier group to a restarted head together with a later group of that name."""

from __future__ import annotations

from head_kit import HeadKit, agent_hello, running, specs
from head_status import status_of

from rlinf_actors.wire.client_messages import Handles, WorkerChanged
from rlinf_actors.wire.values import ExitReport, GroupHandle, WorkerState


def back(kit: HeadKit, *there) -> None:
    kit.restart()
    kit.ask("a:n0", agent_hello("n0", ip="10.0.0.1", is_head=True, workers=list(there)))
    kit.driver("d2", token="token1")
    states = [WorkerState(f"later-{rank}", rank, 0, "10.0.0.1", "running") for rank in range(2)]
    kit.tell("d2", Handles([GroupHandle("ns", "g", states)]))


def test_only_ends_of_the_later_namesake_are_reported():
    kit = HeadKit()
    kit.cluster(1)
    early, later = specs("g", [0, 0], launch="early"), specs("g", [0, 0], launch="later")
    ends = [running(spec, "d1", exit=ExitReport("exited", 1)) for spec in early]
    ends += [running(spec, "d2", exit=ExitReport("signalled", signal=9)) for spec in later]
    back(kit, *ends)
    told = [worker for changed in kit.sent(WorkerChanged, "d2") for worker in changed.workers]
    assert {worker.id: worker.exit.kind for worker in told} == {"later-0": "signalled", "later-1": "signalled"}


def test_end_of_the_earlier_namesake_does_not_end_an_unknown_rank():
    kit = HeadKit()
    kit.cluster(2)
    early, later = specs("g", [0, 0], launch="early"), specs("g", [0, 0], launch="later")
    kit.restart()
    there = [running(early[1], "d2", exit=ExitReport("exited", 1)), running(later[0], "d2", pid=7)]
    kit.ask("a:n0", agent_hello("n0", ip="10.0.0.1", is_head=True, workers=there))
    (group,) = status_of(kit.head, kit.now).groups
    assert [worker.id for worker in group.workers] == ["later-0"]
