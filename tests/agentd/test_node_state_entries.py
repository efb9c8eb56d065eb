"""agentd's state keeps nothing of ended workers and drivers: after twice as many jobs no table has more entries."""

from __future__ import annotations

import pytest
from held_entries import growing
from state_kit import UP, Kit

from agentd import node_state
from agentd import state_events as e
from rlinf_actors.wire.agent_messages import (
    Beat,
    LogLines,
    OutputLost,
    StartWorkers,
    StopWorkers,
    Unwatch,
    Watch,
    Welcome,
    WorkerExited,
    WorkerReady,
    WorkersHealth,
)
from rlinf_actors.wire.values import Claim, ExitReport, WorkerHealth, WorkerSpec

JOBS = 40


def run_job(kit: Kit, n: int) -> None:
    """Run a job with two workers, one of which has a robot. `n` decides how it ends, and if the head is away then."""
    ids, driver = [f"L{n}-0", f"L{n}-1"], f"d{n}"
    claims = [(Claim(f"arm{n}", "an arm"),), ()]
    specs = [WorkerSpec(id, "g", f"job{n}", rank, 2, 0, {}, claims=claims[rank]) for rank, id in enumerate(ids)]
    kit.do(e.HeadNotice(Watch(driver, 100 + n, 5)))
    kit.do(e.HeadNotice(StartWorkers(specs, driver, "m:C", "{}")))
    for id in ids:
        kit.do(e.WorkersReported(WorkerReady(id, 77, UP, 0, 4000)))
        kit.do(e.WorkersReported(LogLines(f"job{n}", "node", [(f"g:{id}", "out", "a line")])))
        kit.do(e.WorkersReported(OutputLost(id, "the disk is full")))
    kit.do(
        e.WorkersReported(
            WorkersHealth([WorkerHealth(id, unresponsive="its I/O thread does not answer") for id in ids])
        )
    )
    if n % 4 == 0:
        kit.do(e.HeadNotice(StopWorkers(ids, 1.0)))
    elif n % 4 == 1:
        kit.do(e.ProcessEnded(driver))
    elif n % 4 == 2:
        kit.do(e.ConnectionLost())
    for id in ids:
        kit.do(e.WorkersReported(WorkerExited(id, ExitReport("exited", n % 2))))
    if n % 4 == 2:
        kit.do(e.ProcessEnded(driver))
        kit.do(e.Welcomed(Welcome("epoch", "1.0", 1.0, 10.0)))
    kit.do(e.HeadNotice(Unwatch(driver)))
    kit.do(e.Tick(), 1.0)
    kit.do(e.HeadNotice(Beat("epoch", kit.now)))


def test_twice_as_many_jobs_leave_no_more_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_state, "PROCESSES_KEPT", 8)
    kit = Kit().join()
    assert growing(kit.state, lambda n: run_job(kit, n), JOBS) == {}
    assert kit.state.listed_workers() == []
