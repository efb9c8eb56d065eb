"""The event log as drivers and the command line read it, with workers that really end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import pytest

from rlinf_actors import UsageError, Worker
from rlinf_actors.errors import WorkerDiedError

pytestmark = pytest.mark.live


class Teller(Worker):
    def pid(self) -> int:
        return os.getpid()

    def shout(self) -> None:
        print("help", file=sys.stderr, flush=True)


def test_script_reads_events_with_their_causes(cluster):
    group = Teller.create_group().launch(cluster, name="shouters")
    (pid,) = group.pid().wait()
    group.shout().wait()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError):
        group.pid().wait()
    for event in cluster.events(follow=True, group="shouters"):
        if event.kind == "group_ended":
            break
    kinds = [event.kind for event in cluster.events(group="shouters")]
    assert kinds == ["group_launched", "worker_started", "worker_died", "group_ended"]
    (died,) = cluster.events(group="shouters", kinds=["worker_died"])
    assert (died.pid, died.exit.signal, died.exit.stderr_tail[-1]) == (pid, signal.SIGKILL, "help")
    (node,) = cluster.events(kinds=["node_joined"])
    assert node.namespace == ""


async def test_event_stream_follows_new_events_and_ends_with_its_task(cluster):
    stream = cluster.events(since=None, follow=True)
    first = asyncio.create_task(anext_of(stream))
    await asyncio.sleep(0)  # it asks where "now" is, before the launch on the same connection
    group = Teller.create_group().launch(cluster, name="later")
    await group
    event = await first
    while event.kind != "worker_started":
        event = await anext_of(stream)
    assert event.group == "later"
    waiting = asyncio.create_task(anext_of(stream))
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await group.shutdown()
    assert (await anext_of(stream)).kind == "worker_stopped"


async def anext_of(stream):
    return await stream.__anext__()


def test_unknown_kind_of_event_is_an_error_that_names_it(cluster):
    with pytest.raises(UsageError, match="worker_exploded"):
        cluster.events(kinds=["worker_exploded"])
