"""Unresponsive workers: shown in the status, reported to owners, in the event log, and kept alive."""

from __future__ import annotations

from head_kit import HeadKit
from head_status import status_of

from rlinf_actors.wire.agent_messages import OutputLost, WorkersHealth
from rlinf_actors.wire.client_messages import GetEvents, WorkerChanged
from rlinf_actors.wire.values import WorkerHealth, WorkerPulse


def running_group() -> HeadKit:
    kit = HeadKit()
    kit.cluster()
    kit.launch("g", [0, 0])
    for rank in range(2):
        kit.ready("a:n0", f"g-{rank}")
    return kit


def pulses(kit: HeadKit) -> list[WorkerPulse | None]:
    (group,) = status_of(kit.head, kit.now).groups
    return [worker.pulse for worker in group.workers]


def news(kit: HeadKit) -> list[str]:
    return [event.text for event in kit.ask("cli", GetEvents()).events if "responsive" in event.kind]


def test_unresponsive_worker_keeps_running_and_its_owner_is_notified():
    kit = running_group()
    kit.tell("a:n0", WorkersHealth([WorkerHealth("g-1", "it does not answer", for_s=5.0)]))
    ((change,),) = [notice.workers for notice in kit.sent(WorkerChanged, "d1")]
    assert (change.id, change.state, change.pulse.unresponsive) == ("g-1", "running", "it does not answer")
    assert pulses(kit) == [None, WorkerPulse("it does not answer", since=-5.0)]
    assert kit.group_states() == {"g": "running"}
    kit.tell("a:n0", WorkersHealth([WorkerHealth("g-1")]))
    assert pulses(kit) == [None, None]
    who = "worker g:1 (process 77) of job ns on node n0"
    assert news(kit) == [
        f"{who} is unresponsive: it does not answer, for 5 s now; it is not killed for that",
        f"{who} answers again after 5 s",
    ]


def test_long_call_is_shown_and_not_logged():
    kit = running_group()
    kit.tell("a:n0", WorkersHealth([WorkerHealth("g-0", method="step", for_s=31.0, waiting=2)]))
    assert pulses(kit) == [WorkerPulse(method="step", since=-31.0, waiting=2), None]
    kit.tell("a:n0", WorkersHealth([WorkerHealth("g-0")]))
    assert news(kit) == []


def test_second_reason_is_not_logged():
    kit = running_group()
    for why in ("its I/O thread", "its template"):
        kit.tell("a:n0", WorkersHealth([WorkerHealth("g-0", why, for_s=5.0)]))
    assert len(news(kit)) == 1
    assert pulses(kit)[0].unresponsive == "its template"


def test_health_reports_on_ended_and_foreign_workers_are_ignored():
    kit = HeadKit()
    kit.cluster(2)
    kit.launch("g", [0, 0])
    kit.ready("a:n0", "g-0")
    kit.tell("a:n0", WorkersHealth([WorkerHealth("g-0", "it does not answer", for_s=5.0)]))
    kit.tell("a:n1", WorkersHealth([WorkerHealth("g-0"), WorkerHealth("nobody", "x")]))
    assert pulses(kit)[0] is not None
    kit.exited("a:n0", "g-0")
    assert pulses(kit) == [None, None]


def test_lost_output_is_an_event_until_it_is_written_again():
    kit = running_group()
    kit.tell("a:n0", OutputLost("g-1", "No space left\non device"))
    kit.tell("a:n0", OutputLost("g-1"))
    kit.tell("a:n0", OutputLost("nobody", "x"))
    every = kit.ask("cli", GetEvents()).events
    found = [(event.kind, event.rank, event.text) for event in every if "output" in event.kind]
    assert [(kind, rank) for kind, rank, _ in found] == [("output_lost", 1), ("output_written", 1)]
    assert "loses output: No space left\\non device; `rlinf-actors doctor` shows the disks" in found[0][2]
