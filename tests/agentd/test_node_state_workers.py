"""agentd's decisions about its workers, with a clock that the test moves."""

from __future__ import annotations

import pytest
from state_kit import GONE, LOOK, UP, Kit, order, spec

from agentd import state_events as e
from rlinf_actors.wire.agent_messages import (
    HELLO_AGAIN,
    Beat,
    LogCredit,
    LogLines,
    ProcessGone,
    StopWorkers,
    Unwatch,
    Watch,
    Welcome,
    WorkerExited,
    WorkerReady,
    WorkersHealth,
)
from rlinf_actors.wire.client_messages import Done
from rlinf_actors.wire.values import RunningWorker, WorkerHealth

# --- workers ---


def test_workers_are_started_once():
    kit = Kit().join()
    assert kit.start("w1", "w2") == [order(spec("w1"), spec("w2"))]
    assert kit.start("w2", "w3") == [order(spec("w3"))]
    kit.do(e.WorkersReported(WorkerExited("w3", GONE)))
    told_again = e.SendNotice(WorkerExited("w3", GONE))  # a repeated order shows that the head missed the report
    assert kit.start("w3") == [told_again, order()]


def test_reports_are_sent_and_kept_for_the_next_hello():
    kit = Kit().join()
    kit.start("w1", "w2")
    ready = WorkerReady("w1", 5, UP, 0, 7)
    gone = WorkerExited("w2", GONE)
    assert kit.do(e.WorkersReported(ready)) == [e.SendNotice(ready)]
    assert kit.do(e.WorkersReported(gone)) == [e.SendNotice(gone)]
    assert kit.state.listed_workers() == [
        RunningWorker(spec("w1"), "d1", "m:C", "{}", 5, UP, 0, 7),
        RunningWorker(spec("w2"), "d1", "m:C", exit=GONE),
    ]


def test_end_of_a_worker_is_sent_until_a_later_beat_is_answered():
    kit = Kit().join()
    kit.start("w1")
    kit.do(e.Tick(), 0.5)
    first = kit.now
    kit.do(e.WorkersReported(WorkerExited("w1", GONE)))
    kit.do(e.Tick(), 1.0)
    kit.do(e.HeadNotice(Beat("epoch", first)))  # answers a beat sent before the end
    assert len(kit.state.listed_workers()) == 1
    assert kit.do(e.HeadNotice(Beat("epoch", kit.now))) == [e.EndsAcknowledged(["w1"])]
    assert kit.state.listed_workers() == []


def test_reports_wait_for_a_head_that_is_away():
    kit = Kit().join()
    kit.start("w1")
    kit.do(e.HeadNotice(Beat(HELLO_AGAIN)))
    gone = WorkerExited("w1", GONE)
    assert kit.do(e.WorkersReported(gone)) == []
    assert kit.do(e.ProcessEnded("d1")) == []
    registered, *sent = kit.do(e.Welcomed(Welcome("epoch2", "1.0", 1.0, 10.0)))
    assert registered == e.Registration("epoch2", 10.0)
    assert sent == [e.SendNotice(ProcessGone("d1")), e.SendNotice(gone)]


def test_output_is_dropped_with_credit_while_the_head_is_away():
    kit = Kit().join()
    lines = LogLines("ns", "node", [("g:0", "out", "hello")])
    assert kit.do(e.WorkersReported(lines)) == [e.SendNotice(lines)]
    kit.do(e.HeadNotice(Beat(HELLO_AGAIN)))
    assert kit.do(e.WorkersReported(lines)) == [e.CreditLogs(lines.cost, "ns")]


@pytest.mark.parametrize(
    ("body", "action"),
    [
        (StopWorkers(["w1"], 2.0), e.StopWorkers(["w1"], 2.0)),
        (LogCredit("ns", "node", 9), e.CreditLogs(9, "ns")),
        (Watch("d1", 3, 4), e.Watch("d1", 3, 4)),
        (Unwatch("d1"), e.Unwatch("d1")),
    ],
)
def test_orders_of_the_head_become_commands(body, action):
    assert Kit().join().do(e.HeadNotice(body)) == [action]


def test_unexpected_notice_is_logged():
    (says,) = Kit().join().do(e.HeadNotice(Done()))
    assert "Done" in says.text


def test_end_of_a_watched_process_is_sent():
    assert Kit().join().do(e.ProcessEnded("d1")) == [e.SendNotice(ProcessGone("d1"))]


# --- workers that do not answer ---


def test_silent_workers_are_reported_after_registration():
    kit = Kit().join()
    kit.start("w1", "w2")
    silent = WorkerHealth("w1", "it does not answer", for_s=5.0)
    assert kit.do(e.WorkersReported(WorkersHealth([silent]))) == [e.SendNotice(WorkersHealth([silent]))]
    kit.do(e.HeadNotice(Beat(HELLO_AGAIN)))
    assert (
        kit.do(e.WorkersReported(WorkersHealth([WorkerHealth("w2", "it does not answer", for_s=5.0)])), after=1.0) == []
    )
    actions = kit.do(e.Welcomed(Welcome("epoch2", "1.0", 1.0, 10.0)), after=2.0)
    (told,) = [a.body for a in actions if isinstance(a, e.SendNotice) and isinstance(a.body, WorkersHealth)]
    assert [(one.id, one.for_s) for one in told.workers] == [("w1", 8.0), ("w2", 7.0)]


def test_recovery_of_a_worker_during_the_heads_absence_is_reported_once():
    kit = Kit().join()
    kit.start("w1")
    kit.do(e.WorkersReported(WorkersHealth([WorkerHealth("w1", "it does not answer", for_s=5.0)])))
    kit.do(e.HeadNotice(Beat(HELLO_AGAIN)))
    kit.do(e.WorkersReported(WorkersHealth([WorkerHealth("w1")])))
    told = []
    for _ in range(2):
        actions = kit.do(e.Welcomed(Welcome("epoch", "1.0", 1.0, 10.0)))
        told += [a.body for a in actions if isinstance(a, e.SendNotice)]
    assert told == [WorkersHealth([WorkerHealth("w1")])]


def test_recovered_and_ended_workers_are_not_reported_as_silent():
    kit = Kit().join()
    kit.start("w1", "w2")
    for id in ("w1", "w2"):
        kit.do(e.WorkersReported(WorkersHealth([WorkerHealth(id, "it does not answer", for_s=5.0)])))
    kit.do(e.WorkersReported(WorkersHealth([WorkerHealth("w1")])))
    kit.do(e.WorkersReported(WorkerExited("w2", GONE)))
    actions = kit.do(e.Welcomed(Welcome("epoch", "1.0", 1.0, 10.0)))
    assert not [a for a in actions if isinstance(a, e.SendNotice) and isinstance(a.body, WorkersHealth)]


# --- another agentd before or after this one ---


def adopt(kit: Kit, *workers: RunningWorker) -> None:
    kit.do(e.WorkersAdopted(list(workers)))
    kit.do(e.StartSession())


def test_adopted_workers_are_listed_and_behave_like_started_ones():
    kit = Kit()
    kit.now = 500.0
    adopt(kit, RunningWorker(spec("w1"), "d1", pid=5, endpoint=UP), RunningWorker(spec("w2"), "d1", exit=GONE))
    assert [(one.spec.id, one.exit) for one in kit.state.listed_workers()] == [("w1", None), ("w2", GONE)]
    assert kit.do(e.Tick()) == [], "the head's grace begins now"
    kit.do(e.Welcomed(Welcome("epoch", "1.0", 1.0, 10.0)))
    assert kit.start("w1") == [order()], "the worker was started once"
    gone = WorkerExited("w1", GONE)
    assert kit.do(e.WorkersReported(gone)) == [e.SendNotice(gone)]


def test_adopted_ends_are_acknowledged_after_the_heads_answer():
    kit = Kit()
    adopt(kit, RunningWorker(spec("w2"), "d1", exit=GONE))
    kit.do(e.Welcomed(Welcome("epoch", "1.0", 1.0, 10.0)))
    kit.do(e.Tick(), 1.0)
    assert kit.do(e.HeadNotice(Beat("epoch", kit.now))) == [e.EndsAcknowledged(["w2"])]
    assert kit.state.listed_workers() == []


def test_restarts_of_agentd_without_a_head_do_not_extend_workers_time():
    kit = Kit()
    kit.now = 500.0
    kit.do(e.WorkersAdopted([RunningWorker(spec("w1"), "d1", pid=5, endpoint=UP)], since=391.0))
    kit.do(e.StartSession())
    assert kit.state.next_deadline() <= 511.0
    out = []
    while not any(isinstance(action, e.StopWorkers) for action in out):
        kit.now = max(kit.state.next_deadline(), kit.now)
        assert kit.now < 391.0 + 120.0 + 10.0
        out = kit.do(e.Tick())
        if LOOK in out:
            out = kit.do(e.HeadChecked(there=True))


def test_hand_over_stops_no_worker_and_sends_no_goodbye():
    kit = Kit().join()
    kit.start("w1")
    assert kit.do(e.HandOver("SIGUSR1")) == [e.EndAgent(0, "workers go on: SIGUSR1")]
