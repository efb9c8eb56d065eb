"""Large arrays between processes of one machine go through shared memory, and nothing of it is left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pace
import pytest
from shared_workers import Consumer, Holder, Streamer

from rlinf_actors import NodePlacementStrategy, WorkerDiedError
from rlinf_actors.net.unix_stream import StreamLink

pytestmark = pytest.mark.live
MIB = 1 << 20


@pytest.fixture
def holders(cluster):
    group = Holder.create_group().launch(cluster, NodePlacementStrategy([0, 0]), name="holders")
    group.wait_ready()
    group.echo(b"").wait()  # the links are there
    return group


def memory(cluster):
    return cluster.runtime.network.memory


def settled(cluster, group) -> int:
    """Bytes of the driver's shared memory in use once what the workers dropped is known here."""
    for _ in range(2):
        group.lends().wait()  # what they said before the answer has arrived
    done = threading.Event()
    cluster.runtime.network.soon(done.set)
    assert done.wait(pace.PATIENCE_S)
    return memory(cluster).used


def test_large_arguments_and_results_are_lent(cluster, holders):
    array = np.arange(MIB, dtype=np.float64)
    assert holders.is_shared(array).wait() == [True, True]
    assert holders.is_shared(np.zeros(100)).wait() == [False, False]
    result = holders.execute_on(0).echo(array).wait()[0]
    assert np.array_equal(result, array)
    assert holders.lends().wait()[0] >= array.nbytes  # while we have it
    del result
    settled(cluster, holders)
    assert holders.lends().wait() == [0, 0]


def test_memory_of_an_argument_is_kept_while_a_worker_uses_it(cluster, holders):
    array = np.full(MIB, 3, np.uint8)
    for _ in range(4):
        holders.keep(array).wait()
    array[:] = 0  # it was a snapshot
    assert holders.total().wait() == [4 * 3.0 * MIB] * 2
    assert settled(cluster, holders) >= 4 * MIB
    holders.release().wait()
    assert settled(cluster, holders) == 0
    assert holders.total().wait() == [0, 0]


def test_writes_into_a_shared_argument_are_invisible_to_other_ranks(holders):
    for number in range(10, 13):  # the same memory again and again
        answers = holders.fill(np.full(MIB, number, np.uint8)).wait()
        assert [before for before, _ in answers] == [[number], [number]]
        assert [np.unique(value).tolist() for _, value in answers] == [[1], [2]]


def test_arguments_beyond_the_arena_are_copied_into_the_workers_memory(cluster, holders):
    one = holders.execute_on(0)
    size = memory(cluster).size // 8
    for n in range(12):
        one.keep(np.full(size, n, np.uint8)).wait()
    assert one.total().wait() == [sum(float(n) * size for n in range(12))]
    assert memory(cluster).used <= memory(cluster).size * 3 // 4
    one.release().wait()
    assert settled(cluster, holders) == 0


def test_killed_worker_frees_the_memory_it_was_lent(cluster, holders):
    holders.keep(np.zeros(4 * MIB, np.uint8)).wait()
    for pid in holders.pid().wait():
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError):
        holders.pid().wait()
    with pytest.raises(WorkerDiedError):
        holders.execute_on(0).pid().wait()
    with pytest.raises(WorkerDiedError):
        holders.execute_on(1).pid().wait()
    assert memory(cluster).used == 0


def test_killed_caller_frees_results_it_was_lent(cluster, holders):
    caller = Holder.create_group().launch(cluster, name="caller")
    caller.echo_through("holders", np.zeros(MIB, np.uint8)).wait()
    assert holders.lends().wait() == [MIB, MIB]
    pid = caller.pid().wait()[0]
    holders.watch(pid).wait()
    os.kill(pid, signal.SIGKILL)
    assert holders.lends_after_its_end().wait() == [0, 0]


def test_a_stream_ends_with_the_worker_that_took_its_items(cluster):
    streamer = Streamer.create_group().launch(cluster, name="streamer")
    consumer = Consumer.create_group().launch(cluster, name="consumer")
    with pytest.raises(WorkerDiedError):
        consumer.take_one("streamer").wait()
    assert streamer.wait_until_closed().wait() == ["closed"]


def test_results_outlive_their_worker(cluster):
    group = Holder.create_group().launch(cluster, name="short")
    group.wait_ready()
    group.echo(b"").wait()
    result = group.echo(np.full(MIB, 7, np.uint8)).wait()[0]
    group.shutdown()
    assert int(result.sum()) == 7 * MIB


@pytest.mark.parametrize("side", ["driver", "worker"])
def test_everything_is_sent_by_socket_without_shared_memory(side, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, sys
            import numpy as np
            from rlinf_actors import Cluster, Worker
            from rlinf_actors.worker.context import current
            class Echo(Worker):
                def echo(self, value):
                    return value, current().runtime.network.memory is None
            if __name__ == "__main__":
                side = sys.argv[1]
                config = {"num_nodes": 1}
                if side == "driver":
                    os.environ["RLINF_ACTORS_SHARED_MEMORY"] = "0"
                else:
                    config["node_groups"] = [
                        {"label": "all", "node_ranks": 0, "env_configs": [
                            {"node_ranks": 0, "env_vars": [{"RLINF_ACTORS_SHARED_MEMORY": "0"}]}]}]
                with Cluster(cluster_cfg=config) as cluster:
                    if side == "driver":
                        assert cluster.runtime.network.memory is None
                    from rlinf_actors import NodePlacementStrategy
                    group = Echo.create_group().launch(cluster, NodePlacementStrategy([0], node_group_label="all")
                        if side == "worker" else None)
                    group.wait_ready()
                    array = np.arange(1 << 18)
                    for _ in range(3):
                        value, without = group.echo(array).wait()[0]
                        assert (value == array).all()
                    assert without or side == "driver", without
                    print("all sent")
            """
        )
    )
    run = subprocess.run([sys.executable, str(script), side], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip().splitlines()[-1] == "all sent"


def test_what_both_ends_still_read_stays_as_it_is_after_their_connection_was_lost(cluster, holders):
    group = Holder.create_group().launch(cluster, NodePlacementStrategy([0]), name="keeper").wait_ready()
    group.echo(b"").wait()
    first = np.ones(MIB, np.uint8)
    group.keep(first).wait()
    (result,) = group.echo(first).wait()
    lost = group.control.group.peers[0]
    if not isinstance(lost._joined, StreamLink):
        pytest.skip("ends the connection of a unix stream")
    lost._joined._connection.socket.shutdown(socket.SHUT_RDWR)
    limit = time.monotonic() + pace.PATIENCE_S
    while group.control.group.peers[0] is lost:
        assert time.monotonic() < limit
        time.sleep(0.01)
    group.echo(b"").wait()
    for _ in range(4):  # would be written into the blocks of the first
        group.echo(np.full(MIB, 2, np.uint8)).wait()
    assert group.total().wait() == [MIB]
    assert result.sum() == MIB
    del result
    group.shutdown()
    group.control.group.gone.wait(pace.PATIENCE_S)
    assert settled(cluster, holders) == 0, "it is free when the process that borrowed it has ended"
