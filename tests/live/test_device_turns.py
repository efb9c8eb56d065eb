"""device_lock among real workers on described accelerators."""

from __future__ import annotations

import os
import signal

import device_workers as dw
import pace
import pytest

from rlinf_actors import FlexiblePlacementStrategy, NodePlacementStrategy, UsageError, WorkerDiedError
from rlinf_actors.testing import LocalCluster

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def cluster():
    with LocalCluster(2, hardware=[{"accelerators": 3}, None]) as local, local.cluster() as made:
        yield made


def on(cluster, name, *ranks, cls=dw.Locker, **options):
    """One worker with these accelerators."""
    return cls.create_group().launch(cluster, FlexiblePlacementStrategy([list(ranks)]), name=name, **options)


def test_workers_of_two_groups_take_turns_on_shared_devices(cluster):
    with on(cluster, "a", 0) as a, on(cluster, "b", 0, isolate_gpu=False) as b, on(cluster, "c", 0, 1) as c:
        assert a.take().wait() == [True]
        taking = b.take()
        assert c.take(0.05).wait() == [False]
        assert not taking.done()
        a.give().wait()
        assert taking.wait() == [True]
        b.give().wait()
        assert c.nested().wait() == [True]
        assert a.take().wait(pace.PATIENCE_S) == [True]


def test_device_lock_of_a_killed_worker_goes_to_the_next_waiter(cluster):
    with on(cluster, "holder", 0, 1) as holder, on(cluster, "next", 0) as waiter:
        assert holder.take().wait() == [True]
        taking = waiter.take()
        (state,) = holder.control.group.states.values()
        os.kill(state.pid, signal.SIGKILL)
        assert taking.wait(pace.PATIENCE_S) == [True]


def test_device_lock_of_an_ended_worker_is_free(cluster):
    with on(cluster, "holder", 0) as holder, on(cluster, "next", 0) as waiter:
        with pytest.raises(WorkerDiedError):
            holder.dies_with_it().wait()
        assert waiter.take().wait(pace.PATIENCE_S) == [True]


def test_a_waiter_that_is_killed_leaves_the_queue(cluster):
    with on(cluster, "a", 0) as a, on(cluster, "b", 0) as b, on(cluster, "c", 0) as c:
        a.take().wait()
        taking = b.take()
        (state,) = b.control.group.states.values()
        os.kill(state.pid, signal.SIGKILL)
        with pytest.raises(WorkerDiedError):
            taking.wait()
        a.give().wait()
        assert c.take().wait(pace.PATIENCE_S) == [True]


def test_device_lock_works_on_an_event_loop(cluster):
    with on(cluster, "plain", 2) as plain, on(cluster, "looped", 2, cls=dw.AsyncLocker) as looped:
        plain.take().wait()
        assert looped.take(0.05).wait() == [False]
        assert looped.cancelled().wait() == [[True]]
        using = looped.use()
        plain.give().wait()
        assert using.wait(pace.PATIENCE_S) == [True]
        assert plain.take().wait(pace.PATIENCE_S) == [True]


def test_release_of_a_lock_that_is_not_held_is_an_error(cluster):
    with on(cluster, "a", 0) as a, pytest.raises(UsageError, match="a:0 released its device_lock without holding it"):
        a.give().wait()


def test_worker_on_the_node_locks_all_accelerators_and_one_without_any_locks_none(cluster):
    group = dw.Locker.create_group()
    with (
        on(cluster, "a", 2) as a,
        group.launch(cluster, NodePlacementStrategy([0]), name="whole") as whole,
        group.launch(cluster, NodePlacementStrategy([1, 1]), name="cpu") as cpu,
    ):
        a.take().wait()
        assert whole.take(0.05).wait() == [False]
        assert cpu.take().wait() == [True, True]
        a.give().wait()
        assert whole.take().wait() == [True]
        assert a.take(0.05).wait() == [False]


def test_child_process_cannot_take_its_workers_device_lock(cluster):
    with on(cluster, "a", 0) as a:
        ((first, second),) = a.in_a_fork().wait()
        assert first.startswith("a:0 is a child process of a worker, and device_lock is the worker's")
        assert second.startswith("a:0:0 is a child process of a worker")
        assert a.nested().wait() == [True]
