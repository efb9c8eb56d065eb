"""A driver in RLinf's manner ends soon after a failure that it does not await (RLINF_ACTORS_LOST_ERRORS=end)."""

from __future__ import annotations

import re
import time

import live_workers as lw
import pace
import pytest

pytestmark = pytest.mark.live

RUNNER = """
import asyncio, os, sys, time
from rlinf_actors import Channel, Cluster, Worker

class Env(Worker):
    def interact(self, how):
        print("failing at", time.time(), "in", os.getpid(), flush=True)
        if how == "dies":
            os.kill(os.getpid(), 9)
        raise ValueError("the simulator broke")

class Rollout(Worker):
    def generate(self, channel):
        return channel.get()

class Actor(Worker):
    def train(self):
        return self.recv("env", 0)

def runner():
    cluster = Cluster(num_nodes=1)
    env = Env.create_group().launch(cluster, name="env")
    rollout = Rollout.create_group().launch(cluster, name="rollout")
    actor = Actor.create_group().launch(cluster, name="actor")
    channel = Channel.create("rollouts")
    rollout.wait_ready()
    actor.wait_ready()
    env_result = env.interact({how!r})
    rollout_result = rollout.generate(channel)
    {wait}

async def main():
    async with Cluster.connect(num_nodes=1) as cluster:
        env = await Env.create_group().launch(cluster, name="env")
        actor = await Actor.create_group().launch(cluster, name="actor")
        result = env.interact({how!r})
        await actor.train()

{main}
"""


@pytest.mark.parametrize(
    ("how", "wait", "main"),
    [
        ("raises", "channel.get()", "runner()"),
        ("dies", "rollout_result.wait()", "runner()"),
        ("raises", "try:\n        channel.get()\n    finally:\n        actor.train().wait()", "runner()"),
        ("raises", "pass", "asyncio.run(main())"),
    ],
    ids=["channel", "another group, worker killed", "waits again in a finally block", "asyncio"],
)
def test_runner_ends_within_a_second_of_a_failure_that_it_does_not_await(tmp_path, how, wait, main):
    source = RUNNER.format(how=how, wait=wait, main=main)
    done = lw.run_script(tmp_path, source, RLINF_ACTORS_LOST_ERRORS="end")
    after = time.time()
    assert done.returncode == 1, done.stderr
    assert ("ValueError: the simulator broke" if how == "raises" else "SIGKILL") in done.stderr
    assert "RLINF_ACTORS_LOST_ERRORS=exit-code" in done.stderr
    failed = re.search(r"failing at ([\d.]+)", done.stdout)
    assert failed is not None, done.stderr
    assert after - float(failed[1]) < 1.0 * pace.slowness * pace.slowness_now()


def test_script_that_handles_errors_itself_goes_on(tmp_path):
    body = (  # an error that nobody awaits would have been reported within that second
        "import threading; failed = threading.Event(); env_result._on_done(failed.set); assert failed.wait(60); "
        "time.sleep(1.0); print('went on'); channel.close()"
    )
    done = lw.run_script(tmp_path, RUNNER.format(how="raises", wait=body, main="runner()"))
    assert "went on" in done.stdout, done.stderr
