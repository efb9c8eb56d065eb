"""`rlinf-actors serve` beside a cluster with work: real figures, and an orderly end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.request

import pytest
from live_workers import SCRIPT_ENV

from rlinf_actors import Channel, Cluster, NodePlacementStrategy, Worker

pytest.importorskip("aiohttp", reason="without the extra `web`")
COMMAND = [sys.executable, "-m", "rlinf_actors.cli.main", "serve", "--listen", "127.0.0.1:0", "--every", "1"]


class Counted(Worker):
    def work(self, channel: Channel, count: int) -> int:
        for number in range(count):
            channel.put(number)
        return os.getpid()

    def say(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            print("said <b> to both", file=stream, flush=True)

    def fail(self) -> None:
        raise ValueError("on purpose")

    def talk(self) -> None:
        if self._rank == 0:
            self.send(b"x" * 100, self._group_name, 1)
        else:
            self.recv(self._group_name, 0)


def read(url: str, token: str) -> str:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    return urllib.request.urlopen(request, timeout=30).read().decode()


@pytest.mark.live
def test_figures_of_real_workers_and_an_orderly_end():
    with Cluster(num_nodes=1) as cluster:
        channel = Channel.create("depths", maxsize=100)
        group = Counted.create_group().launch(cluster, NodePlacementStrategy([0, 0]), name="counted")
        group.work(channel, 3).wait()
        group.talk().wait()
        group.say().wait()
        with pytest.raises(ValueError, match="on purpose"):
            group.execute_on(0).fail().wait()
        command, pipe = [*COMMAND, "--head", cluster._endpoint], subprocess.PIPE
        served = subprocess.Popen(command, env=SCRIPT_ENV, stdout=pipe, stderr=pipe, text=True)
        try:
            address, _, token = served.stdout.readline().strip().partition("?token=")
            expected = [
                r'rlinf_actors_calls_total\{group="counted",.*method="work",outcome="returned"\} 2.0',
                r'rlinf_actors_calls_total\{group="counted",.*method="fail",outcome="raised"\} 1.0',
                r'rlinf_actors_channel_items\{channel="depths",.*\} 6.0',
                r'rlinf_actors_worker_sent_messages_total\{.*path="inline",rank="0"\}',
                r'rlinf_actors_worker_resident_bytes\{group="counted",.*rank="1"\} \d',
            ]
            text = ""
            watching = urllib.request.Request(f"{address}live", headers={"Authorization": f"Bearer {token}"})
            with urllib.request.urlopen(watching, timeout=60) as live:
                while not all(re.search(pattern, text) for pattern in expected):  # each line is a sample
                    assert live.readline(), text
                    text = read(f"{address}metrics", token)
            workers = read(f"{address}workers", token)
            assert "counted:1" in workers
            ids = dict(re.findall(r'href="/workers/([^"]+)">(counted:\d)<', workers))
            logs = [read(f"{address}workers/{id}/log", token) for id in ids]
            assert len(logs) == 2
            assert all(log.count("said &lt;b&gt; to both") == 2 for log in logs)
        finally:
            served.send_signal(signal.SIGTERM)
            _, errors = served.communicate(timeout=60)
        assert served.returncode == 0, errors
        assert "Traceback" not in errors
