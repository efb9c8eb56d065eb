"""The workers that a hello lists: in a message that the head accepts, whatever their jobs gave them."""

import msgspec

from agentd.worker_table import MAX_LISTED, fitted
from rlinf_actors.model.restart import RestartPolicy
from rlinf_actors.wire.protocol import MAX_ASKED_BYTES
from rlinf_actors.wire.values import ExitReport, RunningWorker, WorkerSpec


def worker(id, job, env_bytes=10, **fields):
    spec = WorkerSpec(id, "g", job, 0, 1, 0, {"X": "x" * env_bytes}, restart=RestartPolicy.on_failure(1))
    return RunningWorker(spec, "driver", **fields)


def size(workers):
    return len(msgspec.msgpack.encode(workers))


def test_usual_workers_are_listed_whole():
    workers = [worker(str(number), "job") for number in range(100)]
    assert fitted(workers) == (workers, [])


def test_job_with_the_longest_environments_alone_is_shortened():
    """It could otherwise keep the node from the head, and so end the workers and robots of all others."""
    small = [worker("s", "small", 1000, detail="d" * 1000)]
    big = [worker(str(number), "big", 100_000, detail="d" * 100_000) for number in range(60)]
    middle = [worker("m", "middle", 500_000)]
    listed, shortened = fitted(small + big + middle)
    assert shortened == ["big"]
    assert [listed[0], listed[-1]] == [*small, *middle]
    assert {(one.spec.restart, len(one.spec.env), one.detail) for one in listed[1:-1]} == {(None, 0, "")}
    assert size(listed) <= MAX_LISTED < MAX_ASKED_BYTES


def test_exit_reports_are_shortened_too():
    report = ExitReport("exited", 1, reason="r" * 60_000, stderr_tail=["e" * 60_000] * 10)
    listed, shortened = fitted([worker(str(number), "big", exit=report) for number in range(40)])
    assert shortened == ["big"]
    assert {(one.exit.exit_code, one.exit.reason, len(one.exit.stderr_tail)) for one in listed} == {(1, "r" * 200, 0)}
