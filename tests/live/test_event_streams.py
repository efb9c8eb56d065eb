"""The event log over a head's restart, and as the command line follows it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading

import pace
import pytest

from rlinf_actors import Worker
from rlinf_actors.errors import WorkerDiedError
from rlinf_actors.wire.event_values import ClusterEvent

pytestmark = pytest.mark.live


class Pid(Worker):
    def pid(self) -> int:
        return os.getpid()


def test_event_stream_survives_a_head_restart_and_ends_with_its_cluster(local_cluster):
    local = local_cluster(num_nodes=1)
    cluster = local.cluster()
    seen: list[ClusterEvent] = []
    joined, restarted, ended = threading.Event(), threading.Event(), threading.Event()

    def read() -> None:
        for event in cluster.events(follow=True):
            seen.append(event)
            if event.kind == "driver_joined":
                (restarted if joined.is_set() else joined).set()
        ended.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    assert joined.wait(pace.PATIENCE_S)
    local.kill_agent(0)
    local.restart_agent(0)
    assert restarted.wait(pace.PATIENCE_S)
    first, again = (event.seq for event in seen if event.kind == "head_started")
    assert (first, again > 1) == (1, True)
    assert len({(event.at, event.text) for event in seen}) == len(seen), "no event is read twice"
    assert sum(event.kind == "driver_joined" for event in seen) == 2
    cluster.shutdown()
    assert ended.wait(pace.PATIENCE_S)
    reader.join(pace.PATIENCE_S)


def test_command_line_follows_events(local_cluster):
    local = local_cluster(num_nodes=1)
    cluster = local.cluster()
    command = [sys.executable, "-m", "rlinf_actors.cli.main", "events", "-fn99", "--json", "--head", local.head]
    env = {**os.environ, **local.driver_env}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as reading:
        assert reading.stdout is not None
        assert json.loads(reading.stdout.readline())["kind"] == "head_started"
        group = Pid.create_group().launch(cluster, name="g")
        (pid,) = group.pid().wait()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerDiedError):
            group.pid().wait()
        for line in reading.stdout:
            event = json.loads(line)
            if event["kind"] == "worker_died":
                break
        assert (event["pid"], event["exit"]["signal"], event["namespace"]) == (pid, 9, cluster.namespace)
        reading.send_signal(signal.SIGINT)
        assert reading.wait(pace.PATIENCE_S) == 130
