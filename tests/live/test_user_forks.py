"""os.fork() in user code: the child ends, the rank goes on, and operations of the child fail at once."""

from __future__ import annotations

from pathlib import Path

import fork_workers as fw
import live_workers as lw
import pace
import pytest

from rlinf_actors import Channel

pytestmark = pytest.mark.live

ENDS = {"return": 1, "raise": 1, "exit": 7, "exit well": 0, "exit with a text": 1}
"""What ends a forked child, and its exit code."""


@pytest.fixture(scope="module")
def groups(shared_cluster):
    """One worker with each kind of executor."""
    return {
        "main thread": lw.many(shared_cluster, fw.Forks, 1, name="plain"),
        "threads": lw.many(shared_cluster, fw.Forks, 1, name="threads", max_concurrency=3),
        "event loop": lw.many(shared_cluster, fw.ForksAsync, 1, name="loop"),
    }


def ended(group, forked):
    """How the child of a call ended; the call itself returned in the parent."""
    (child,) = forked.wait(pace.PATIENCE_S)
    (code,) = group.ended(child).wait(pace.PATIENCE_S)
    return code


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("executor", ["main thread", "threads", "event loop"])
def test_a_forked_child_ends_and_the_rank_goes_on(groups, executor, how):
    group = groups[executor]
    (before,) = group.counted().wait(pace.PATIENCE_S)
    assert ended(group, group.fork(how)) == ENDS[how]
    assert group.counted().wait(pace.PATIENCE_S) == [before + 1]


@pytest.mark.parametrize(
    ("method", "how"), [("fork_awaited", "return"), ("fork_awaited", "exit"), ("fork_in_task", "return")]
)
def test_a_child_forked_in_a_coroutine_ends(groups, method, how):
    group = groups["event loop"]
    assert ended(group, getattr(group, method)(how)) == ENDS[how]
    group.counted().wait(pace.PATIENCE_S)


def test_forked_child_that_awaits_ends(groups):
    group = groups["event loop"]
    assert ended(group, group.fork_and_await()) == 1
    group.counted().wait(pace.PATIENCE_S)


def test_a_child_forked_in_a_stream_ends(groups):
    group = groups["event loop"]
    stream = group.fork_in_stream("return")
    ((_, child),) = [*stream]
    assert group.ended(child).wait(pace.PATIENCE_S) == [1]


def test_a_child_forked_in_a_constructor_ends(shared_cluster):
    group = lw.many(shared_cluster, fw.Forks, 1, "exit", name="constructed")
    ((child, code),) = group.constructed().wait(pace.PATIENCE_S)
    assert child > 0
    assert code == 7


@pytest.mark.parametrize("executor", ["main thread", "threads", "event loop"])
def test_multiprocessing_goes_on_working(groups, executor):
    assert groups[executor].multiprocess().wait(pace.PATIENCE_S) == [[1, 2, 3]]


def test_operations_of_a_workers_forked_child_fail_at_once(shared_cluster):
    channel = Channel.create("forked")
    group = lw.many(shared_cluster, fw.Forks, 1, name="users")
    lw.many(shared_cluster, fw.Other, 1, name="other")
    (heard,) = group.uses(channel).wait(pace.PATIENCE_S)
    assert len(heard) == 18
    assert [line for line in heard if ": UsageError: " not in line] == []
    named = [line for line in heard if "spawn method" in line]
    assert len(named) >= 14
    assert group.local_in_child().wait(pace.PATIENCE_S) == [["mine"]]
    channel.put("the parent's")
    assert channel.get() == "the parent's"


DRIVER = """
import os, sys
from rlinf_actors import Channel, Cluster, NodePlacementStrategy
sys.path.insert(0, {here!r})
import fork_workers as fw

if __name__ == "__main__":
    cluster = Cluster(num_nodes=1)
    group = fw.Other.create_group().launch(cluster, NodePlacementStrategy([0]), name="other")
    channel = Channel.create("c")
    call, waiting = group.pid(), channel.get(async_op=True)
    calls = {{
        "call": lambda: group.pid(), "result": lambda: call.wait(), "put": lambda: channel.put(1),
        "put async": lambda: channel.put(1, async_op=True), "get": lambda: channel.get(),
        "work": lambda: waiting.wait(), "create": lambda: Channel.create("d"), "connect": lambda: Channel.connect("c"),
        "nodes": lambda: cluster.get_alive_nodes(), "current": lambda: Cluster.current(),
        "shutdown group": lambda: group.shutdown(),
        "launch": lambda: fw.Other.create_group().launch(cluster, NodePlacementStrategy([0])),
    }}
    child = os.fork()
    if not child:
        print("\\n".join(fw.use(calls)))
        cluster.shutdown()
        sys.exit(5)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    (pid,) = group.pid().wait()
    channel.put("goes on")
    assert waiting.wait() == "goes on"
    print("done", flush=True)
"""


def test_operations_of_a_drivers_forked_child_fail_at_once(tmp_path):
    done = lw.run_script(tmp_path, DRIVER.format(here=str(Path(__file__).parent)))
    assert done.returncode == 0, done.stderr
    *heard, last = done.stdout.splitlines()
    assert last == "done"
    assert len(heard) == 12
    assert [line for line in heard if ": UsageError: " not in line] == []
