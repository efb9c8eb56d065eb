"""The end of a driver whose head says nothing."""

from __future__ import annotations

import asyncio
import gc
import os
import types

import pytest

from rlinf_actors.cluster.cluster import Cluster
from rlinf_actors.errors import ClusterTimeoutError
from rlinf_actors.net.loop import IoThread
from rlinf_actors.runtime.group_progress import GroupProgress
from rlinf_actors.runtime.group_registry import GroupRegistry

pytestmark = pytest.mark.virtual_time


class SilentHead:
    """A session with a head that never answers, as far as the handles of groups need one."""

    welcome = None
    endpoint = "tcp://10.0.0.1:6380"

    async def silent(self, seconds):
        await asyncio.sleep(seconds)


class Ends:
    """A Cluster whose end fails as often as it is told."""

    def __init__(self, io, failures):
        self.tries, self.closed, self._failures = 0, False, failures
        self.runtime = types.SimpleNamespace(io=io, closed=False, close=self._close)
        self.cluster = object.__new__(Cluster)
        vars(self.cluster).update(
            runtime=self.runtime, _owner_pid=os.getpid(), _job=None, _ending=None, _closed=False, _end=self._end
        )

    async def _end(self):
        self.tries += 1
        if self.tries <= self._failures:
            raise OSError("no descriptor is left")

    def _close(self):
        self.runtime.closed = True


class Group(types.SimpleNamespace):
    __hash__ = object.__hash__


def group(name):
    gone = asyncio.get_running_loop().create_future()
    return Group(
        name=name, namespace="ns", gone=gone, closing=False, launched=[], owned=True,
        close=lambda: None, end_calls=lambda: None,
    )  # fmt: skip


def handles(ask):
    return GroupRegistry(types.SimpleNamespace(ask=ask, head=SilentHead(), progress=GroupProgress(None, enabled=False)))


async def test_a_driver_that_leaves_its_groups_says_so_in_one_line(caplog):
    asked = asyncio.get_running_loop().create_future()  # an answer that never comes
    groups = handles(lambda *args: asked)
    reported: list = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
    groups._groups = {("ns", name): group(name) for name in ("a", "b")}
    assert not await groups.stop_owned(2.0)
    gc.collect()
    assert reported == []
    (record,) = caplog.records
    assert "was not told to end group 'a', group 'b'" in record.getMessage()
    assert "Their workers may run as long as this process does" in record.getMessage()


async def test_the_end_of_a_driver_stops_channels_after_the_workers_that_use_them():
    asked: list[str] = []

    async def ask(stop, *args):
        asked.append(f"stop {stop.group}")
        await asyncio.sleep(0)
        asked.append(f"{stop.group} stopped")

    groups = handles(ask)
    groups._groups = {("ns", name): group(name) for name in ("channel@c", "a", "b")}
    assert await groups.stop_owned(2.0)
    assert asked == ["stop a", "stop b", "a stopped", "b stopped", "stop channel@c", "channel@c stopped"]


@pytest.mark.parametrize("closed", [True, False])
async def test_a_group_whose_end_nobody_waits_for_is_told_of_unless_this_process_ends(caplog, closed):
    asked = asyncio.get_running_loop().create_future()
    groups = handles(lambda *args: asked)
    await groups.stop_or_leave(group("a"), 2.0)
    (telling,) = groups._stopping.values()
    caplog.clear()
    groups.closed = closed
    asked.set_exception(ClusterTimeoutError("the connection was closed"))
    await asyncio.wait([telling])
    await asyncio.sleep(0)
    assert [record.getMessage() for record in caplog.records] == [
        "a group was not stopped by this process: the connection was closed"
    ] * (not closed)


async def test_an_end_that_is_under_way_is_waited_for_again_and_asked_for_once(caplog):
    asked = []

    async def ask(*args):
        asked.append(args)
        await asyncio.sleep(60)
        raise ClusterTimeoutError("too late")

    groups, ending = handles(ask), group("a")
    for _ in range(2):
        await groups.stop_or_leave(ending, 2.0)
    assert len(asked) == 1
    await asyncio.wait(list(groups._stopping.values()))
    await asyncio.sleep(0)
    assert sum("was not stopped by this process" in record.getMessage() for record in caplog.records) == 1
    with pytest.raises(ClusterTimeoutError):
        await groups.stop(ending, 2.0)
    assert len(asked) == 2


@pytest.fixture
def io():
    thread = IoThread("of a Cluster")
    yield thread
    thread.stop()


def test_a_shutdown_that_failed_is_tried_again(io):
    ends = Ends(io, 1)
    with pytest.raises(OSError, match="no descriptor"):
        ends.cluster.shutdown()
    assert not ends.runtime.closed, "the next one needs it"
    ends.cluster.shutdown()
    ends.cluster.shutdown()
    assert (ends.tries, ends.runtime.closed) == (2, True)
