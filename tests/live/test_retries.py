"""Calls that are sent again to a restarted worker, with real deaths."""

from __future__ import annotations

import os
import signal

import live_workers as lw
import pytest
from restart_workers import Counted

from rlinf_actors import RestartPolicy, UsageError, WorkerDiedError, WorkerGroup

pytestmark = pytest.mark.live

AT_ONCE = RestartPolicy.on_failure(max_restarts=3, within_s=300, backoff_s=0)
SOON = RestartPolicy.on_failure(max_restarts=3, within_s=300, backoff_s=0.3)
LATER = RestartPolicy.on_failure(backoff_s=300, backoff_max_s=300)


def launched(cluster, tmp_path, policy=AT_ONCE, ranks=1, **options):
    return lw.many(cluster, Counted, ranks, str(tmp_path), restart=policy, **options)


def runs(tmp_path, method: str) -> int:
    """How often a method began, in all incarnations."""
    path = tmp_path / method
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.parametrize("policy", [AT_ONCE, SOON], ids=["at once", "after a while"])
def test_a_call_whose_worker_dies_runs_again(cluster, tmp_path, policy):
    group = launched(cluster, tmp_path, policy, ranks=2)
    result = group.with_retries(1).dies_in_rank(1, 1)
    assert result.wait() == [("survived", 0), ("survived", 1)]
    assert result.attempts == [1, 2]
    assert runs(tmp_path, "dies_in_rank-1") == 2
    assert runs(tmp_path, "dies_in_rank-0") == 1


def test_call_of_a_killed_worker_runs_again(cluster, tmp_path):
    group = launched(cluster, tmp_path, SOON)
    os.mkfifo(tmp_path / "begun")
    pid = group.pid().wait()[0]
    result = group.with_retries(1).waits_the_first_time("begun")
    (tmp_path / "begun").read_bytes()  # it runs
    os.kill(pid, signal.SIGKILL)
    assert result.wait() == [1]


def test_call_without_retries_runs_at_most_once(cluster, tmp_path):
    group = launched(cluster, tmp_path)
    with pytest.raises(UsageError, match=r"Counted.plain_dies\(\) is not marked idempotent"):
        group.with_retries(3).plain_dies()
    assert runs(tmp_path, "plain_dies") == 0
    with pytest.raises(WorkerDiedError):
        group.plain_dies().wait()
    with pytest.raises(WorkerDiedError):
        group.dies_in_rank(0, 1).wait()  # marked, but without with_retries
    assert group.pid().wait()
    assert (runs(tmp_path, "plain_dies"), runs(tmp_path, "dies_in_rank-0")) == (1, 1)


def test_number_of_retries_is_limited(cluster, tmp_path):
    group = launched(cluster, tmp_path)
    with pytest.raises(WorkerDiedError, match=r"dies_in_rank\(\) was sent 3 times; the last time: worker .*signal 9"):
        group.with_retries(2).dies_in_rank(0, 99).wait()
    assert runs(tmp_path, "dies_in_rank-0") == 3
    assert group.pid().wait()  # the third restart


def test_worker_that_is_not_restarted_ends_the_retries(cluster, tmp_path):
    policy = RestartPolicy.on_failure(max_restarts=2, within_s=300, backoff_s=0)
    group = launched(cluster, tmp_path, policy)
    with pytest.raises(WorkerDiedError, match=r"was sent 3 times.* restarted 2 times within 300 s, and is not again"):
        group.with_retries(50).dies_in_rank(0, 99).wait()
    assert runs(tmp_path, "dies_in_rank-0") == 3


def test_timeout_and_cancel_end_a_retried_call_that_waits_for_a_restart(cluster, tmp_path):
    group = launched(cluster, tmp_path, LATER).wait_ready()
    with pytest.raises(TimeoutError, match=r"dies_in_rank\(\) had 0.8 s and did not return from .* is not up yet"):
        group.with_retries(1).with_timeout(0.8).dies_in_rank(0, 99).wait()
    waiting = group.with_retries(1).dies_in_rank(0, 99)
    assert waiting.cancel()
    assert runs(tmp_path, "dies_in_rank-0") == 1


def test_call_that_raised_is_not_retried(cluster, tmp_path):
    group = launched(cluster, tmp_path)
    with pytest.raises(ValueError, match="raised ValueError: no"):
        group.with_retries(3).raises().wait()
    assert runs(tmp_path, "raises") == 1


def test_the_same_arguments_are_sent_again(cluster, tmp_path):
    numpy = pytest.importorskip("numpy")
    group = launched(cluster, tmp_path)
    result = group.with_retries(1).changes_its_argument_and_dies(numpy.zeros(1 << 20, numpy.uint8))
    assert result.wait() == [True]
    assert result.attempts == [2]


async def test_retries_work_in_asyncio(cluster, tmp_path):
    group = await launched(cluster, tmp_path)
    assert await group.with_retries(1).dies_in_rank(0, 1) == [("survived", 0)]


def test_handle_found_by_name_can_retry_calls(cluster, tmp_path):
    launched(cluster, tmp_path, name="counted").wait_ready()
    found = WorkerGroup.from_group_name(Counted, "counted")
    assert found.with_retries(1).dies_in_rank(0, 1).wait() == [("survived", 0)]
    asker = lw.many(cluster, Counted, 1, str(tmp_path), name="asker")
    assert asker.ask("counted", 2).wait() == [[("survived", 0)]]
    assert asker.why_not("asker").wait() == ["UsageError"]
    with pytest.raises(UsageError, match="whose workers are not started again"):
        asker.with_retries(1)
