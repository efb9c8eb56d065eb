"""Fault points in this process, and in processes that inherit a plan."""

from __future__ import annotations

from pathlib import Path

import fault_workers
import pytest

from rlinf_actors import CallTimeoutError, WorkerStartError
from rlinf_actors.testing import faults

pytestmark = pytest.mark.live


def test_fault_points_act_in_this_process_and_in_a_clusters_processes(local_cluster, tmp_path: Path) -> None:
    plan = faults.environment(
        faults.fault("spawn.fork", faults.refuse(), where="refused:*"),
        faults.fault("spawn.exec", faults.refuse(), where="refused:*"),
        faults.fault("transport.receive", faults.drop(), times=1, exists=str(tmp_path / "deaf-{pid}")),
    )
    with local_cluster(1, env=plan).cluster() as cluster:
        with pytest.raises(WorkerStartError, match=r"refused:0 .* cannot start another process"):
            fault_workers.Counter.create_group().launch(cluster, name="refused").add().wait()
        with pytest.raises(WorkerStartError, match=r"refused:0 .* cannot start another process"):
            fault_workers.Counter.create_group().launch(cluster, name="refused", start_method="spawn").add().wait()
        group = fault_workers.Counter.create_group().launch(cluster, name="counter")
        assert group.add().wait() == [1]
        (state,) = group.control.group.states.values()
        (tmp_path / f"deaf-{state.pid}").touch()  # the next that the worker hears is lost, whenever it looks
        with pytest.raises(CallTimeoutError):
            group.add().wait(0.3)
        assert group.add().wait() == [2]
        with faults.inject("transport.send", faults.duplicate(), where=lambda peer: "/w/" in peer) as twice:
            assert group.add().wait() == [3]
        assert twice.hits
        with faults.inject("transport.receive", faults.delay(0.2), where=lambda peer: "/w/" in peer, times=1) as late:
            assert group.add().wait() == [4]
        assert late.hits
