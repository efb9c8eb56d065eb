"""Methods that answer while the main thread is busy."""

from __future__ import annotations

import os

import live_workers as lw
import pytest
from beside_workers import AsyncBeside, Beside, Slow

from rlinf_actors import UsageError

pytestmark = pytest.mark.live


@pytest.fixture(params=[Beside, AsyncBeside])
def busy(request, cluster):
    """A group of one worker whose main thread is busy until `stop`, and the result of that call."""
    group = lw.many(cluster, request.param, 1)
    running = group.run()
    assert group.wait_until_busy().wait() == ["worker-wait_until_busy-1"]
    yield group, running
    if not running.done():
        group.stop().wait()
        running.wait()


def test_concurrent_methods_answer_while_the_main_thread_is_busy(busy):
    group, running = busy
    assert group.health().wait() == ["worker-health-1"]
    seen = []
    for _, (steps, thread) in group.progress():
        assert thread == "worker-progress-1"
        seen.append(steps)
        if steps > seen[0]:
            break
    assert not running.done()
    group.stop().wait()
    assert running.wait()[0] >= seen[-1]


def test_other_methods_wait_for_the_main_thread(busy, late_answers):
    group, running = busy
    plain = group.plain()
    with pytest.raises(TimeoutError, match=r"has been running run\(\) for .* 1 call waits there"):
        plain.wait(0.2)
    group.stop().wait()
    assert plain.wait() == ["main"]
    assert running.done()


def test_calls_beyond_the_threads_of_a_method_wait_and_may_expire(busy):
    group, _ = busy
    waiting = [group.wait_for_stop() for _ in range(2)]
    with pytest.raises(TimeoutError):
        group.with_timeout(0.3).wait_for_stop().wait()
    cancelled = group.wait_for_stop()
    assert cancelled.cancel()
    group.stop().wait()
    assert {result.wait()[0] for result in waiting} <= {"worker-wait_for_stop-1", "worker-wait_for_stop-2"}


def test_forked_child_that_returns_from_a_concurrent_method_ends(busy):
    group, running = busy
    pid, worker = group.forks().wait()[0]
    assert pid
    assert worker != pid
    pidfd = _pidfd(pid)
    if pidfd is not None:
        lw.wait_for_end(pidfd)
    assert group.health().wait() == ["worker-health-1"]
    assert not running.done()


def test_concurrent_methods_run_beside_max_concurrency_threads(cluster):
    group = lw.many(cluster, Beside, 1, max_concurrency=2)
    running = [group.run(), group.run()]
    assert group.health().wait() == ["worker-health-1"]
    group.stop().wait()
    for result in running:
        result.wait()


def test_concurrent_call_waits_for_the_constructor(cluster, tmp_path):
    fifo = tmp_path / "constructing"
    os.mkfifo(fifo)
    group = lw.many(cluster, Beside, 1, str(fifo))
    early = group.health()
    fifo.write_bytes(b"")  # the constructor opens it
    assert early.wait() == ["worker-health-1"]


def test_concurrent_and_main_thread_methods_may_call_each_other(cluster):
    group = lw.many(cluster, Beside, 1)
    assert group.asks_the_main_thread().wait() == [["main"]]
    health, progress = group.asks_beside().wait()[0]
    assert health == ["worker-health-1"]
    assert progress == [(0, (0, "worker-progress-1"))] * 2
    with pytest.raises(UsageError, match=r"waits for its own plain\(\), which would never end"):
        group.asks_itself().wait()


def test_timeout_names_a_late_concurrent_method_if_the_main_thread_is_idle(cluster, late_answers):
    group = lw.many(cluster, Slow, 1).wait_ready()
    late = group.sleep(1000)
    assert group.began().wait() == [True]
    with pytest.raises(TimeoutError, match=r"has been running sleep\(\) for"):
        late.wait(0.3)
    group.shutdown(0)


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None
