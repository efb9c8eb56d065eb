"""The picture of docs/how-to/trace-a-job.md shows what `rlinf-actors trace` records of its program.

RLINF_ACTORS_TEST_PICTURES=1 draws it anew.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from rlinf_actors import Channel, Worker
from rlinf_actors.cli import app
from tests.tracing.chrome import check
from tests.tracing.trace_picture import drawn, outline

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "pictures" / "trace.svg"

pytestmark = pytest.mark.live


class Env(Worker):
    """Simulates a step, and sends what it sees to the policy."""

    def rollout(self, steps: int) -> None:
        for step in range(steps):
            with self.worker_timer("simulate"):
                time.sleep(0.02)
            self.send({"obs": step}, "policy", 0)
            self.recv("policy", 0)


class Policy(Worker):
    """Answers with an action, and puts a sample into the channel."""

    def act(self, steps: int, samples: Channel[int]) -> None:
        for step in range(steps):
            self.recv("env", 0)
            with self.worker_timer("infer"):
                time.sleep(0.01)
            self.send({"action": step}, "env", 0)
            samples.put(step)


def test_picture_of_the_docs_shows_what_a_trace_has(local_cluster, monkeypatch, tmp_path):
    local = local_cluster(num_nodes=1)
    for name, value in local.driver_env.items():
        monkeypatch.setenv(name, value)
    with local.cluster(namespace="cell") as cluster:
        samples: Channel[int] = Channel.create("samples")
        env = Env.create_group().launch(cluster, name="env")
        policy = Policy.create_group().launch(cluster, name="policy")
        for steps in (1, 3):  # first without the trace: connections are made then
            if steps == 3:
                assert app.run(["trace", "start"]) == 0
            rollout, act = env.rollout(steps), policy.act(steps, samples)
            rollout.wait()
            act.wait()
            samples.get()
        assert app.run(["trace", "stop"]) == 0
        assert app.run(["trace", "fetch", "-o", str(tmp_path / "trace.json")]) == 0
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    check(events)
    picture = drawn(events)
    if os.environ.get("RLINF_ACTORS_TEST_PICTURES"):
        PICTURE.write_text(picture)
    # of these the driver has no span if the result is there before it waits
    short = {f"driver: wait for {what}" for what in ("act", "get() from channel 'samples'")}
    assert outline(PICTURE.read_text()) - short == outline(picture) - short
    assert {"env:0: simulate", "policy:0: infer", "env:0 → policy:0", "policy:0 → env:0"} <= outline(picture)
    assert {"driver: wait for rollout", "driver → env:0", "driver → policy:0"} <= outline(picture)
