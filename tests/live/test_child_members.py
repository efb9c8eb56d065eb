"""Children of workers are members: messages, broadcasts and channels, and how their ends are reported."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pace
import pytest
from child_workers import WAYS, AsyncParent, Parent

from rlinf_actors import Channel, Cluster, NodePlacementStrategy, procfs

HERE = Path(__file__).parent
pytestmark = [pytest.mark.live, pytest.mark.timeout(pace.LIVE_TIMEOUT_S)]

FAMILY = ["spawn", "fork", "fork", "fork"]


@pytest.fixture
def parents(cluster: Cluster):
    return Parent.create_group().launch(cluster, placement_strategy=two_on_one_node(), name="p")


def two_on_one_node():
    return NodePlacementStrategy([0, 0])


def on(group, rank):
    return group.execute_on(rank)


@pytest.mark.parametrize("way", WAYS)
def test_child_is_a_member_by_every_way_of_starting_it(parents, way):
    assert on(parents, 0).start([way]).wait(pace.PATIENCE_S) == [[None]]
    swap = on(parents, 1).swap("to the child", "p", [0, 0])
    assert on(parents, 0).let(0, "swap", "to a worker", "p", 1).wait(pace.PATIENCE_S) == [["p:1", "to the child"]]
    assert swap.wait(pace.PATIENCE_S) == [("p:0:0", "to a worker")]
    facts = on(parents, 0).let(0, "facts").wait(pace.PATIENCE_S)[0]
    assert facts == {
        "name": "p:0:0", "current": True, "info": "p:0:0", "parent alive": True, "parent's node": 0, "nodes": 1,
        "hardware": [],
    }  # fmt: skip


@pytest.fixture
def family(cluster: Cluster):
    """2 workers with a spawned child, 0, and 3 forked ones each, and another group."""
    return made_family(cluster, FAMILY)


@pytest.fixture
def large_family(cluster: Cluster):
    """The same with 2 spawned and 2 forked children each."""
    return made_family(cluster, ["spawn", "spawn", "fork", "fork"])


def made_family(cluster: Cluster, ways: list[str]):
    group = Parent.create_group().launch(cluster, placement_strategy=two_on_one_node(), name="p")
    others = Parent.create_group().launch(cluster, placement_strategy=two_on_one_node(), name="q")
    assert group.start(ways).wait(pace.PATIENCE_S) == [[None] * 4] * 2
    return group, others


def test_children_send_receive_broadcast_and_use_channels_with_one_another_and_other_groups(large_family):
    group, others = large_family
    swap_messages(group, others)
    broadcast(group, others)
    use_channels(group)


def swap_messages(group, others) -> None:
    for rank in range(2):
        for child in range(4):  # each child with one of the other worker
            on(group, rank).begin(child, "swap", f"{rank}:{child}", "p", [1 - rank, child]).wait(pace.PATIENCE_S)
    for rank in range(2):
        for child in range(4):
            got = on(group, rank).finish(child).wait(pace.PATIENCE_S)
            assert got == [[f"p:{1 - rank}:{child}", f"{1 - rank}:{child}"]]
    for one, other in ((0, 2), (1, 3)):  # a spawned one with a forked one of the same worker
        on(group, 0).begin(one, "swap", "a", "p", [0, other]).wait(pace.PATIENCE_S)
        assert on(group, 0).let(other, "swap", "b", "p", [0, one]).wait(pace.PATIENCE_S) == [[f"p:0:{one}", "a"]]
        assert on(group, 0).finish(one).wait(pace.PATIENCE_S) == [[f"p:0:{other}", "b"]]
    for child in range(4):  # with a worker of another group, and with its own worker
        swap = on(others, 0).swap("c", "p", (1, child))
        assert on(group, 1).let(child, "swap", "d", "q", 0).wait(pace.PATIENCE_S) == [["q:0", "c"]]
        assert swap.wait(pace.PATIENCE_S) == [(f"p:1:{child}", "d")]
        on(group, 1).begin(child, "swap", "e", "p", 1).wait(pace.PATIENCE_S)
        assert on(group, 1).swap("f", "p", [1, child]).wait(pace.PATIENCE_S) == [(f"p:1:{child}", "e")]
        assert on(group, 1).finish(child).wait(pace.PATIENCE_S) == [["p:1", "f"]]


def broadcast(group, others) -> None:
    siblings = None
    for rank in range(2):
        for child in range(4):
            on(group, rank).begin(child, "give", "s" if child == 0 else None, siblings).wait(pace.PATIENCE_S)
        for child in range(4):
            assert on(group, rank).finish(child).wait(pace.PATIENCE_S) == ["s"]
    everybody = [("p", [[0, 3], [0, 0], [1, 1], [1, 2], 0]), ("q", [0, 1])]
    members = [(0, 3), (0, 0), (1, 1), (1, 2)]
    for rank, child in members:
        value = "from a forked child" if (rank, child) == (0, 3) else None
        on(group, rank).begin(child, "give", value, everybody).wait(pace.PATIENCE_S)
    own = on(group, 0).give(None, everybody)
    assert others.give(None, everybody).wait(pace.PATIENCE_S) == ["from a forked child"] * 2
    assert own.wait(pace.PATIENCE_S) == ["from a forked child"]
    for rank, child in members:
        assert on(group, rank).finish(child).wait(pace.PATIENCE_S) == ["from a forked child"]


def use_channels(group) -> None:
    channel = Channel.create("items")
    for rank in range(2):
        for child in range(4):
            assert on(group, rank).let(child, "put", "items", [rank, child]).wait(pace.PATIENCE_S) == [None]
    assert channel.qsize() == 8
    got = []
    for rank in range(2):
        for child in range(4):
            got += on(group, rank).let(child, "get", "items").wait(pace.PATIENCE_S)
    assert sorted(got) == [[rank, child] for rank in range(2) for child in range(4)]
    channel.close()


@pytest.mark.parametrize("child", [0, 2])
def test_killed_child_returns_its_unacknowledged_item(family, child):
    group, _others = family
    channel = Channel.create("items")
    channel.put("again")
    assert on(group, 0).let(child, "get_and_die", "items").wait(pace.PATIENCE_S) == ["it ended"]
    assert channel.get(timeout=pace.PATIENCE_S) == "again"
    channel.close()


@pytest.mark.parametrize("child", [0, 2])
def test_death_of_a_child_fails_all_operations_that_wait_for_it(family, child):
    group, others = family
    waits = [
        on(others, 0).hear_end("p", [0, child]),
        on(group, 1).hear_end("p", [0, child]),
        on(others, 1).give_end([("p", [[0, child], 1]), ("q", [1])]),
    ]
    sibling = (child + 1) % 4
    on(group, 0).begin(sibling, "hear", "p", [0, child]).wait(pace.PATIENCE_S)
    assert on(group, 0).let(child, "say", "it is there", "p", [0, sibling]).wait(pace.PATIENCE_S) == [None]
    assert on(group, 0).finish(sibling).wait(pace.PATIENCE_S) == ["it is there"]
    on(group, 0).kill(child).wait(pace.PATIENCE_S)
    for wait in waits:
        (text,) = wait.wait(pace.PATIENCE_S)
        assert text.startswith("PeerDiedError: ")
        assert f"worker p:0:{child} on " in text
        assert "was ended by signal 9 (SIGKILL)" in text
    for late in (others.hear_end("p", [0, child]), others.say_end("p", [0, child])):
        for text in late.wait(pace.PATIENCE_S):
            assert "was ended by signal 9 (SIGKILL)" in text
    # the rank can be had again
    assert on(group, 0).again(child, FAMILY[child], 4).wait(pace.PATIENCE_S) == [None]
    say = on(others, 0).say("to the new one", "p", [0, child])
    assert on(group, 0).let(child, "hear", "q", 0).wait(pace.PATIENCE_S) == ["to the new one"]
    say.wait(pace.PATIENCE_S)


def test_exit_code_of_a_child_is_reported(family):
    group, others = family
    wait = on(others, 0).hear_end("p", [1, 0])
    assert on(group, 1).let(0, "end", 7).wait(pace.PATIENCE_S) == ["it ended"]
    assert "worker p:1:0 on " in wait.wait(pace.PATIENCE_S)[0]
    assert "exited with code 7" in wait.wait(pace.PATIENCE_S)[0]


def test_death_of_the_worker_ends_its_children(family):
    group, others = family
    pids = on(group, 0).pids().wait(pace.PATIENCE_S)[0]
    wait = on(others, 0).hear_end("p", [0, 1])
    on(group, 1).begin(0, "swap", "x", "p", [0, 2]).wait(pace.PATIENCE_S)
    fds = [os.pidfd_open(pid) for pid in pids]
    os.kill(on(group, 0).pid().wait(pace.PATIENCE_S)[0], signal.SIGKILL)
    assert "p:0:1 has ended with its worker" in wait.wait(pace.PATIENCE_S)[0]
    assert "p:0:2 has ended with its worker" in on(group, 1).finish(0).wait(pace.PATIENCE_S)[0]
    for fd in fds:
        assert procfs.has_ended(fd, pace.PATIENCE_S)
        os.close(fd)


def test_child_rank_is_held_by_one_process(family):
    group, _others = family
    (text,) = on(group, 0).again(2, "fork", 4).wait(pace.PATIENCE_S)
    assert text.startswith("UsageError: p:0:2 is process ")
    assert "which runs: end that one first, or take another rank" in text


def test_operations_of_the_worker_are_refused_in_its_child(parents):
    assert on(parents, 0).start(["fork"]).wait(pace.PATIENCE_S) == [[None]]
    lock, keep, alive, second = on(parents, 0).let(0, "refusals").wait(pace.PATIENCE_S)[0]
    assert "p:0:0 is a child process of a worker, and device_lock is the worker's" in lock
    assert "p:0:0 is a child process of a worker: call keep_for_stop() in the worker" in keep
    assert "p:0:0 is a child of a worker, and the head knows workers only" in alive
    assert "this process is p:0:0 already: p:0:1 needs a process of its own" in second


def test_call_of_a_child_is_refused(parents):
    """A handle of a group has its workers only, so this is a link made by hand."""
    assert on(parents, 0).start(["fork"]).wait(pace.PATIENCE_S) == [[None]]
    assert on(parents, 1).call_child("p", (0, 0)).wait(pace.PATIENCE_S) == [
        "rlinf_actors.errors.UsageError: p:0:0 is a child of a worker, and takes no calls: call its worker"
    ]


def test_child_of_a_child_is_a_member(parents):
    assert on(parents, 0).start(["fork"]).wait(pace.PATIENCE_S) == [[None]]
    hears = on(parents, 1).hear("p", (0, 0, 5))
    on(parents, 0).begin(0, "have_child", 5, "p", 1).wait(pace.PATIENCE_S)
    assert hears.wait(pace.PATIENCE_S) == ["from p:0:0:5"]
    on(parents, 1).say("heard", "p", (0, 0, 5)).wait(pace.PATIENCE_S)  # it ends by os._exit, and waits for this answer
    assert on(parents, 0).finish(0).wait(pace.PATIENCE_S) == [None]


def test_child_that_was_forked_in_an_event_loop_is_a_member(cluster):
    group = AsyncParent.create_group().launch(cluster, placement_strategy=two_on_one_node(), name="a")
    for rank, (made, got, child_got) in enumerate(group.swap_by_a_child("x").wait(pace.PATIENCE_S)):
        assert made is None
        assert got == (f"a:{rank}:0", "x")
        assert child_got == "from its worker"


@pytest.mark.parametrize("way", ["fork", "spawn", "subprocess"])
def test_last_messages_of_an_ending_child_arrive(parents, way):
    channel = Channel.create("items")
    channel.put("taken")
    assert on(parents, 0).last_words(way, 50, "p", 1, "items").wait(pace.PATIENCE_S) == [0]
    assert on(parents, 1).hear_many(50, "p", (0, 0)).wait(pace.PATIENCE_S) == [list(range(50))]
    assert channel.empty()  # the acknowledgement came, too
    channel.close()


@pytest.mark.parametrize("way", ["fork", "subprocess"])
def test_operations_that_an_ending_child_did_not_wait_for_complete(parents, way):
    channel = Channel.create("items")
    assert on(parents, 0).start(["fork"]).wait(pace.PATIENCE_S) == [[None]]
    to = [("p", 1), ("p", (0, 0))]
    assert on(parents, 0).last_begun(way, "begun", to, "items").wait(pace.PATIENCE_S) == [None]
    assert on(parents, 1).hear("p", (0, 1)).wait(pace.PATIENCE_S) == ["begun"]
    assert on(parents, 0).let(0, "hear", "p", (0, 1)).wait(pace.PATIENCE_S) == ["begun"]
    assert channel.get(timeout=pace.PATIENCE_S) == "begun"
    channel.close()


def test_new_child_gets_no_messages_of_its_predecessor(family):
    """Messages that a child did not receive are dropped when it ends. The next child of its rank starts with none."""
    group, others = family
    on(others, 0).say("to the first", "p", (0, 0)).wait(pace.PATIENCE_S)
    on(group, 0).kill(0).wait(pace.PATIENCE_S)
    assert "SIGKILL" in on(others, 0).hear_end("p", (0, 0)).wait(pace.PATIENCE_S)[0]
    assert on(group, 0).again(0, "fork", 4).wait(pace.PATIENCE_S) == [None]
    on(others, 0).say("to the second", "p", (0, 0)).wait(pace.PATIENCE_S)
    assert on(group, 0).let(0, "hear", "q", 0).wait(pace.PATIENCE_S) == ["to the second"]


def test_forked_child_uses_the_channel_of_its_worker(parents):
    channel = Channel.create("items")
    member, other = on(parents, 0).inherited(channel).wait(pace.PATIENCE_S)[0]
    assert member == "went through"
    assert other.startswith("UsageError: process ")
    items = [channel.get(timeout=pace.PATIENCE_S) for _ in range(3)]
    assert items == ["before the fork", "in a child", "after the fork"]
    channel.close()


# --- strangers ---

STRANGER = """
import json, os, sys
from rlinf_actors.model.address import WorkerAddress
from rlinf_actors.worker.worker import Worker

os.environ["RLINF_ACTORS_CHILDREN"] = sys.argv[1]
try:
    Worker(parent_address=WorkerAddress("p", 0), world_size=1, rank=9)
except Exception as error:
    print(json.dumps(f"{type(error).__name__}: {error}"))
else:
    print(json.dumps("it is a member"))
"""


def stranger(command, socket):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), *filter(None, sys.path)])}
    done = subprocess.run(
        [*command, socket], env=env, capture_output=True, text=True, timeout=pace.PATIENCE_S, check=True
    )
    return json.loads(done.stdout)


def test_process_that_the_worker_did_not_start_is_refused(parents):
    """The driver's child knows the socket, and is of the same user."""
    socket = on(parents, 0).children_socket().wait(pace.PATIENCE_S)[0]
    said = stranger([sys.executable, "-c", STRANGER], socket)
    assert said.startswith("UsageError: process ")
    assert said.endswith("does not come from p:0, which alone admits its own children")
    other = on(parents, 1).children_socket().wait(pace.PATIENCE_S)[0]
    (said,) = on(parents, 0).let_stranger(STRANGER, other).wait(pace.PATIENCE_S)  # a child of the other worker
    assert "does not come from p:1" in said


def test_child_that_names_a_foreign_worker_as_parent_is_refused(parents):
    (said,) = on(parents, 1).child_of("p:0").wait(pace.PATIENCE_S)
    assert said.startswith("UsageError: process ")
    assert "comes from p:1, not from p:0: give that as parent" in said


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be another user")
def test_process_of_another_user_is_refused(parents):
    socket = on(parents, 0).children_socket().wait(pace.PATIENCE_S)[0]
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        script = Path(place, "stranger.py")
        script.write_text(STRANGER)
        os.chmod(place, 0o755)
        said = stranger([sys.executable, str(HERE / "other_user.py"), "61234", place, str(script)], socket)
    assert said.startswith("UsageError: this process cannot become p:0:9: its worker does not listen for it")
    assert "Permission denied" in said
