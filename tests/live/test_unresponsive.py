"""Workers that stand still are shown as unresponsive and stay alive; busy workers are shown as busy."""

from __future__ import annotations

import ctypes
import json
import os
import queue
import signal
import time

import pace
import pytest

from rlinf_actors import Worker, procfs
from rlinf_actors.cli import app
from rlinf_actors.wire.event_values import ClusterEvent
from rlinf_actors.wire.stack_values import stopped
from rlinf_actors.wire.values import WorkerPulse

pytestmark = pytest.mark.live

SOON = pace.timers(probe_s=0.1, unresponsive_s=2.0)
BUSY = pace.timers(probe_s=0.1, long_call_s=0.3)


class Sleeper(Worker):
    def pid(self) -> int:
        return os.getpid()

    def template(self) -> int:
        return os.getppid()

    def hold(self, seconds: int) -> str:
        ctypes.PyDLL(None).sleep(seconds)
        return "held"

    def wait_for_fifo(self, path: str) -> None:
        with open(path) as fifo:
            fifo.read()

    def busy(self, path: str) -> str:
        while not os.path.exists(path):
            time.sleep(0.01)
        return "done"


@pytest.fixture
def local(local_cluster, monkeypatch):
    """A cluster in which who is silent for two seconds is unresponsive."""
    made = local_cluster(num_nodes=1, options=SOON)
    for name, value in made.driver_env.items():
        monkeypatch.setenv(name, value)
    return made


class Pulses:
    """What the head says of a group's first worker, as its driver hears it."""

    def __init__(self, group) -> None:
        self.seen: queue.SimpleQueue[WorkerPulse | None] = queue.SimpleQueue()
        self._remote = group.control.group
        self._update = self._remote.update
        self._remote.update = self._heard

    def _heard(self, workers) -> None:
        self._update(workers)
        for worker in workers:
            self.seen.put(worker.pulse)

    def until(self, fact) -> WorkerPulse | None:
        while not fact(pulse := self.seen.get(timeout=pace.PATIENCE_S)):
            pass
        return pulse


def next_of(cluster, *kinds: str, after: int = 0) -> ClusterEvent:
    return next(iter(cluster.events(since=after, follow=True, kinds=kinds)))


def last_of(cluster) -> int:
    """Number of the last event that says how a worker answers, which it does now: the machine may have paused."""
    seq = 0
    for event in cluster.events(kinds=("worker_unresponsive", "worker_responsive")):
        seq = event.seq
        if event.kind == "worker_unresponsive":
            seq = next_of(cluster, "worker_responsive", after=seq).seq
    return seq


def shown(capsys: pytest.CaptureFixture[str]) -> dict:
    capsys.readouterr()
    assert app.run(["workers", "--json"]) == 0
    return json.loads(capsys.readouterr().out)[0]


def test_a_stopped_worker_is_unresponsive_until_it_goes_on(local, capsys):
    cluster = local.cluster()
    group = Sleeper.create_group().launch(cluster, name="g")
    (pid,) = group.pid().wait()
    pulses = Pulses(group)
    before = last_of(cluster)
    os.kill(pid, signal.SIGSTOP)
    event = next_of(cluster, "worker_unresponsive", "worker_died", after=before)
    assert (event.kind, event.pid, event.rank) == ("worker_unresponsive", pid, 0)
    assert stopped(pid) in event.text
    row = shown(capsys)
    assert (row["state"], row["unresponsive"]) == ("running", stopped(pid))
    assert app.run(["workers"]) == 0
    assert "unresponsive for " in capsys.readouterr().out
    os.kill(pid, signal.SIGCONT)
    next_of(cluster, "worker_responsive", after=event.seq)
    assert group.pid().wait() == [pid]
    assert pulses.until(lambda pulse: pulse is not None).unresponsive
    assert pulses.until(lambda pulse: pulse is None) is None


def test_worker_that_holds_the_gil_is_unresponsive_and_its_call_returns(local):
    cluster = local.cluster()
    group = Sleeper.create_group().launch(cluster, name="g")
    before = last_of(cluster)
    call = group.hold(round(3 * SOON["timers"]["unresponsive_s"]))
    event = next_of(cluster, "worker_unresponsive", "worker_died", after=before)
    assert event.kind == "worker_unresponsive"
    assert call.wait() == ["held"]
    next_of(cluster, "worker_responsive", after=event.seq)


def test_stopped_template_is_reported(local):
    cluster = local.cluster()
    group = Sleeper.create_group().launch(cluster, name="g")
    (template,) = group.template().wait()
    assert procfs.stat(template) is not None
    before = last_of(cluster)
    os.kill(template, signal.SIGSTOP)
    try:
        event = next_of(cluster, "worker_unresponsive", "worker_died", after=before)
        assert (event.kind, "its template does not answer" in event.text) == ("worker_unresponsive", True)
        assert group.pid().wait() != []
    finally:
        os.kill(template, signal.SIGCONT)
    next_of(cluster, "worker_responsive", after=event.seq)


def test_a_busy_worker_is_busy_and_not_unresponsive(local_cluster, monkeypatch, capsys, tmp_path):
    local = local_cluster(num_nodes=1, options=BUSY)
    for name, value in local.driver_env.items():
        monkeypatch.setenv(name, value)
    cluster = local.cluster()
    group = Sleeper.create_group().launch(cluster, name="g")
    group.pid().wait()
    pulses = Pulses(group)
    os.mkfifo(tmp_path / "gate")
    gate = group.wait_for_fifo(str(tmp_path / "gate"))  # both of these are there before the first of them begins
    calls = [group.busy(str(tmp_path / "go")), group.pid()]
    (tmp_path / "gate").write_bytes(b"")
    gate.wait()
    pulse = pulses.until(lambda pulse: pulse is not None and pulse.method == "busy")  # its start may have been long too
    assert pulse.unresponsive == ""
    assert group.control.states()[0].pulse == pulse
    row = shown(capsys)
    assert (row["state"], row["method"], row["waiting"]) == ("running", "busy", 1)
    assert row["for_s"] >= BUSY["timers"]["long_call_s"]
    assert app.run(["workers"]) == 0
    assert "running, in busy() for " in capsys.readouterr().out
    (tmp_path / "go").touch()
    assert calls[0].wait() == ["done"]
    assert [event.kind for event in cluster.events(kinds=["worker_unresponsive"])] == []
