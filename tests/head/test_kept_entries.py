"""The head keeps nothing of ended jobs but what is bounded: after twice as many jobs no table has more entries."""

from __future__ import annotations

import functools

import pytest
from head_kit import HeadKit, agent_hello, client_hello, job_key, specs
from held_entries import growing
from keys_kit import KeysKit, key

from rlinf_actors.head import coordinator, event_log, heaviest, jobs, node_requests, quotas
from rlinf_actors.head.event_log import EventLog
from rlinf_actors.wire.agent_messages import (
    FlushLogs,
    Goodbye,
    LogLines,
    OutputLost,
    ProcessGone,
    WorkerExited,
    WorkerReady,
)
from rlinf_actors.wire.client_messages import FindGroup, GetEvents, GetNodes, Launch, Launched, StopGroup, WatchClients
from rlinf_actors.wire.values import Endpoint, ExitReport

JOBS, KEPT_EVENTS = 60, 50
KINDS = 5
"""Ways in which a job ends."""


@pytest.fixture(params=["without keys", "with keys"])
def kit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> HeadKit:
    """A head with one node and with bounds that few jobs reach."""
    monkeypatch.setattr(coordinator, "EventLog", functools.partial(EventLog, kept=KEPT_EVENTS))
    monkeypatch.setattr(event_log, "JOBS", 4)
    monkeypatch.setattr(jobs, "KEPT_OWNERS", 8)
    monkeypatch.setattr(quotas, "KEPT", 12)
    monkeypatch.setattr(quotas, "KEPT_OF_ONE", 6)
    monkeypatch.setattr(heaviest, "STALE", 4)
    monkeypatch.setattr(node_requests, "STALE", 4)
    if request.param == "without keys":
        kit = HeadKit()
    else:
        kit = KeysKit()
        kit.give("a:n0", "a")
        kit.give("driver", "x", role="driver")
    kit.node("n0", rank=0)
    return kit


def run_job(kit: HeadKit, n: int) -> None:
    """Run a job with a group of two workers. All its names are its own. `n % KINDS` decides how it ends."""
    job, driver, ids, workers = f"job{n}", f"d{n}", [f"L{n}-0", f"L{n}-1"], [f"w{n}-0", f"w{n}-1"]
    if "driver" in kit.keyed:
        kit.keyed[driver] = key("x")
    kit.driver(driver, namespace=job, host="host-n0", pid=100 + n)
    launched = kit.ask(driver, Launch(job, f"g{n}", "m:C", specs(f"g{n}", [0, 0], job, f"L{n}")))
    assert isinstance(launched, Launched), launched
    token = kit.head.jobs.token(job)
    for id, worker in zip(ids, workers, strict=True):
        if "driver" in kit.keyed:
            kit.keyed[worker] = job_key(token)
        kit.tell("a:n0", WorkerReady(id, 77, Endpoint("h", f"ipc://{id}"), 0, 4000))
        kit.ask(worker, client_hello(worker, namespace=job, role="worker", worker_id=id, host="host-n0", token=token))
        kit.tell("a:n0", LogLines(job, "n0", [], 10))
        kit.tell("a:n0", OutputLost(id, "the disk is full"))
        kit.ask(worker, FindGroup(job, f"later{n}", wait_s=1.0))
    kit.tell(driver, WatchClients(workers))
    kit.ask(driver, FindGroup("", "none"))  # refused
    kit.ask(driver, GetEvents(-1, namespace=job, wait_s=1.0))
    kit.ask(driver, GetNodes(50 + n, 0.5))
    end_job(kit, n, job, driver, list(zip(ids, workers, strict=True)))
    for peer in (driver, *workers):
        kit.keyed.pop(peer, None)
        kit.words.pop(peer, None)
    kit.beats("a:n0", seconds=2)
    kit.out = []


def end_job(kit: HeadKit, n: int, job: str, driver: str, workers: list[tuple[str, str]]) -> None:
    kind = n % KINDS

    def exited(exit: ExitReport) -> None:
        for id, _ in workers:
            kit.tell("a:n0", WorkerExited(id, exit))

    if kind == 0:  # in order
        kit.ask(driver, StopGroup(job, f"g{n}", 1.0))
        exited(ExitReport("stopped", 0))
        for _, worker in workers:
            kit.tell(worker, Goodbye("done"))
        kit.ask(driver, FlushLogs(job, 1.0))
        kit.tell(driver, Goodbye("done"))
    elif kind == 1:  # its workers die
        exited(ExitReport("exited", 1, stderr_tail=["an error"]))
        kit.tell(driver, Goodbye("done"))
    elif kind == 2:  # its driver dies
        kit.tell("a:n0", ProcessGone(driver))
        kit.unreachable(driver)
        exited(ExitReport("signalled", None, 9))
        for _, worker in workers:
            kit.unreachable(worker)
    elif kind == 3:  # its driver leaves first
        kit.tell(driver, Goodbye("done"))
        exited(ExitReport("stopped", 0))
    else:  # its node leaves, and comes back
        kit.tell("a:n0", Goodbye("stopped"))
        kit.tell(driver, Goodbye("done"))
        kit.ask("a:n0", agent_hello("n0", f"n0-{n}", rank=0))


def test_twice_as_many_jobs_leave_no_more_entries(kit: HeadKit) -> None:
    assert growing([kit.head, kit.disk], lambda n: run_job(kit, n), JOBS) == {}
    assert len(kit.head.log._events) == KEPT_EVENTS
