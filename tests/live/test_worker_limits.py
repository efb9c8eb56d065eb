"""Limits of workers as users meet them: a launch, a call, an error."""

from __future__ import annotations

import live_workers as lw
import pytest

from rlinf_actors import WorkerDiedError, WorkerStartError
from rlinf_actors.cgroups.roots import find

pytestmark = pytest.mark.live


def test_a_worker_beyond_its_memory_is_known_to_be_out_of_memory(rlinf_cluster):
    if why := find().missing(1, 1):
        pytest.skip(why)
    group = lw.many(rlinf_cluster, lw.Eater, 2, memory_limit="300MiB", pids_limit=100).wait_ready()
    with pytest.raises(WorkerDiedError, match="out of memory") as caught:
        group.execute_on(1).eat(600).wait()
    assert caught.value.oom == "yes"
    assert group.execute_on(0).eat(1).wait() == [1], "the other one has a limit of its own"


def test_a_limit_that_cannot_hold_is_refused(rlinf_leak_check, monkeypatch, tmp_path):
    (tmp_path / "agentd.toml").write_text('[workers]\ncgroup = "off"\n')
    monkeypatch.setenv("RLINF_ACTORS_CONFIG", str(tmp_path / "agentd.toml"))
    with lw.Cluster(num_nodes=1) as cluster:
        with pytest.raises(WorkerStartError, match=r"cannot hold there: cgroups are switched off.*best_effort"):
            lw.Greeter.create_group().launch(cluster, memory_limit="1GiB").wait_ready()
        group = lw.Greeter.create_group().launch(cluster, name="free", memory_limit="1GiB", limits="best_effort")
        assert group.greet().wait() == ["hello you from 0"]
