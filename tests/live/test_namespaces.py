"""Several drivers on one head, and the cluster as workers see it."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager

import live_workers as lw
import pace
import pytest

from rlinf_actors import GroupNotFoundError, UsageError, WorkerGroup
from rlinf_actors.testing import LocalCluster

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def local():
    with LocalCluster(2) as made:
        yield made


@pytest.fixture
def shared(local):
    """This process's driver, in a namespace that others know."""
    with local.cluster(namespace="shared") as cluster:
        yield cluster


@contextmanager
def driver(tmp_path, local, source):
    """Another driver; a line to its stdin lets it go on, its stdout is what it says."""
    header = f"import sys; sys.path.insert(0, {str(lw.ROOT / 'tests/live')!r}); import live_workers as lw\n"
    header += f"from rlinf_actors import *\nHEAD = {local.head!r}\n"
    path = tmp_path / "other.py"
    path.write_text(header + lw.dedent(source))
    process = subprocess.Popen(
        [sys.executable, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**lw.SCRIPT_ENV, **local.driver_env},
    )
    with process:
        yield process
        process.stdin.close()
        process.wait(pace.PATIENCE_S)


def test_two_drivers_work_independently(local, shared, tmp_path):
    mine = lw.on_every_node(shared, lw.Greeter, "mine", name="same")
    source = """
        cluster = Cluster(num_nodes=2, head=HEAD)
        group = lw.on_every_node(cluster, lw.Greeter, "theirs", name="same")
        print(group.greet().wait(), flush=True)
        sys.stdin.readline()
        group.execute_on(0).kills_itself()
        cluster.shutdown()
        print("gone", flush=True)
    """
    with driver(tmp_path, local, source) as other:
        assert other.stdout.readline() == "['theirs you from 0', 'theirs you from 1']\n"
        assert mine.greet().wait() == ["mine you from 0", "mine you from 1"]
        other.stdin.write("\n")
        other.stdin.flush()
        assert "gone" in other.stdout.read()
    assert mine.greet().wait() == ["mine you from 0", "mine you from 1"]


def test_second_driver_of_a_namespace_can_use_its_groups(local, shared, tmp_path):
    mine = lw.on_every_node(shared, lw.Looped, name="open").wait_ready()
    source = """
        cluster = Cluster(num_nodes=2, head=HEAD, namespace="shared")
        group = WorkerGroup.from_group_name(lw.Looped, "open")
        print(group.world_size, group.plain().wait(), sorted(group.numbers(2)))
        try:
            lw.Looped.create_group().launch(cluster, name="open")
        except ValueError as error:
            print(type(error).__name__)
        try:
            group.execute_on(1).dies_up
        except AttributeError:
            print("AttributeError")
    """
    with driver(tmp_path, local, source) as other:
        assert other.stdout.readline() == "2 [True, True] [(0, 0), (0, 1), (1, 0), (1, 1)]\n"
        assert other.stdout.read().split() == ["NameInUseError", "AttributeError"]
    assert mine.plain().wait() == [True, True]


def test_groups_of_other_namespaces_are_invisible(local, shared, tmp_path):
    lw.on_every_node(shared, lw.Greeter, name="hidden").wait_ready()
    source = """
        cluster = Cluster(num_nodes=2, head=HEAD, namespace="elsewhere")
        try:
            WorkerGroup.from_group_name(lw.Greeter, "hidden")
        except GroupNotFoundError as error:
            print(error)
    """
    with driver(tmp_path, local, source) as other:
        said = other.stdout.read()
    assert "hidden" in said
    assert "elsewhere" in said


def test_an_attached_handle_sees_the_end_of_the_group(local, shared, tmp_path):
    source = """
        cluster = Cluster(num_nodes=2, head=HEAD, namespace="shared")
        group = lw.on_every_node(cluster, lw.Greeter, name="brief").wait_ready()
        print("up", flush=True)
        sys.stdin.readline()
    """
    with driver(tmp_path, local, source) as other:
        assert other.stdout.readline() == "up\n"
        group = WorkerGroup.from_group_name(lw.Greeter, "brief")
        blocked = group.block()
        other.stdin.write("\n")
        other.stdin.flush()
        with pytest.raises(Exception, match="brief"):
            blocked.wait()
    with pytest.raises(GroupNotFoundError):
        WorkerGroup.from_group_name(lw.Greeter, "brief")


class TestFromWorkers:
    def test_a_worker_calls_another_group(self, shared):
        lw.on_every_node(shared, lw.Greeter, "hey", name="callees").wait_ready()
        caller = lw.Caller.create_group().launch(shared, name="callers")
        assert caller.call("callees").wait() == [["hey worker from 0", "hey worker from 1"]] * caller.world_size
        with pytest.raises(GroupNotFoundError):
            caller.call("nobody").wait()

    def test_an_error_passes_through_with_its_type(self, shared):
        lw.on_every_node(shared, lw.Greeter, name="callees").wait_ready()
        caller = lw.Caller.create_group().launch(shared, name="callers")
        with pytest.raises(ValueError, match="that was bad") as caught:
            caller.fail_through("callees").wait()
        assert caught.value.worker == "callers:0"
        assert "callees:0" in str(caught.value)

    def test_worker_that_calls_and_awaits_itself_gets_an_error(self, shared):
        caller = lw.Caller.create_group().launch(shared, name="selfish")
        with pytest.raises(UsageError, match="waits for its own"):
            caller.call_self().wait()

    def test_cluster_in_a_worker_belongs_to_its_job(self, shared):
        caller = lw.Caller.create_group().launch(shared, name="callers")
        assert caller.cluster().wait() == [(2, "shared", True)] * caller.world_size

    def test_group_launched_by_a_worker_ends_with_the_worker(self, shared):
        caller = lw.Caller.create_group().launch(shared, name="makers")
        assert caller.execute_on(0).launch_group("made").wait() == [["nested you from 0"]]
        attached = WorkerGroup.from_group_name(lw.Greeter, "made")
        assert attached.greet().wait() == ["nested you from 0"]
        blocked = attached.block()
        caller.shutdown()
        with pytest.raises(Exception, match="made"):
            blocked.wait()
