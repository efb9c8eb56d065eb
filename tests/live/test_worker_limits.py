"""Limits of workers as users meet them: a launch, a call, an error."""

from __future__ import annotations

import live_workers as lw
import pytest

from rlinf_actors import WorkerDiedError, WorkerStartError
from rlinf_actors.cgroups.roots import find

pytestmark = pytest.mark.live


def test_worker_beyond_its_memory_limit_is_reported_as_out_of_memory(rlinf_cluster):
    if why := find().missing(1, 1):
        pytest.skip(why)
    group = lw.many(rlinf_cluster, lw.Eater, 2, memory_limit="300MiB", pids_limit=100).wait_ready()
    with pytest.raises(WorkerDiedError, match="out of memory") as caught:
        group.execute_on(1).eat(600).wait()
    assert caught.value.oom == "yes"
    assert group.execute_on(0).eat(1).wait() == [1], "the other one has a limit of its own"


def test_limit_that_cannot_be_enforced_is_refused(rlinf_leak_check, monkeypatch, tmp_path):
    (tmp_path / "agentd.toml").write_text('[workers]\ncgroup = "off"\n')
    monkeypatch.setenv("RLINF_ACTORS_CONFIG", str(tmp_path / "agentd.toml"))
    with lw.Cluster(num_nodes=1) as cluster:
        with pytest.raises(WorkerStartError, match=r"cannot hold there: cgroups are switched off.*best_effort"):
            lw.Greeter.create_group().launch(cluster, memory_limit="1GiB").wait_ready()
        group = lw.Greeter.create_group().launch(cluster, name="free", memory_limit="1GiB", limits="best_effort")
        assert group.greet().wait() == ["hello you from 0"]


@pytest.mark.parametrize("what", ["threads", "processes"])
def test_an_exhausted_pids_limit_is_named(cluster, what):
    if why := find().missing(None, 1):
        pytest.skip(why)
    group = lw.many(cluster, lw.Forker, 1, name=what, pids_limit=24)
    with pytest.raises((RuntimeError, BlockingIOError), match="pids_limit=24 of this worker is exhausted") as caught:
        group.start(what, 100).wait()
    assert "raise pids_limit of launch()" in str(caught.value)
    assert group.start(what, 2).wait() == [None], "the worker goes on"


def test_worker_that_cannot_start_threads_names_the_limit(cluster):
    if why := find().missing(None, 1):
        pytest.skip(why)
    group = lw.many(cluster, lw.Forker, 1, pids_limit=24, max_concurrency=30)
    with pytest.raises(WorkerDiedError, match="pids_limit=24 of this worker is exhausted"):
        group.start("threads", 1).wait()
