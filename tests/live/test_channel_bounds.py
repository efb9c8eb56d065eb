"""How much memory and CPU a channel may use."""

from __future__ import annotations

import os

import channel_workers as cw
import pytest

from rlinf_actors import Channel
from rlinf_actors.channel.put_window import WINDOW_BYTES

pytestmark = pytest.mark.live

MIB = 1 << 20


def test_put_waits_while_the_channels_byte_limit_is_reached(rlinf_cluster, monkeypatch):
    monkeypatch.setenv("RLINF_ACTORS_CHANNEL_BYTES", str((4 << 20) + 4000))
    channel = Channel.create("bounded")
    block = bytes(1 << 20)
    works = [channel.put(block, async_op=True) for _ in range(80)]
    works[3].wait()
    assert channel.qsize() == 4
    assert channel.full()
    assert not works[4].done()
    for _ in range(80):
        assert channel.get() == block
    works[-1].wait()


@pytest.mark.parametrize("shared", ["0", ""], ids=["sockets", "shared memory"])
def test_idle_consumer_does_not_grow_the_memory_of_producers_and_host(rlinf_cluster, monkeypatch, shared):
    monkeypatch.setenv("RLINF_ACTORS_CHANNEL_BYTES", str(16 * MIB))
    env = {"RLINF_ACTORS_SHARED_MEMORY": shared} if shared else {}
    channel = Channel.create("flooded")
    producer = cw.launch(rlinf_cluster, env_vars=env)
    host = cw.host_pid(channel)
    empty = cw.memory(host)
    [(before, after, accepted)] = producer.flood(channel, MIB, 300).wait()
    full = cw.memory(host)
    assert 15 <= accepted <= 16  # the other puts wait
    if shared:
        assert after - before < 1.1 * WINDOW_BYTES  # 300 MiB, if each put had a copy
        assert full - empty < 1.1 * (16 * MIB + WINDOW_BYTES)
    else:  # handed over, items lie in the producer's memory; the first ones are copied, and shared a moment longer
        assert full - empty + after - before < 1.1 * (2 * 16 * MIB + 2 * WINDOW_BYTES)


@pytest.mark.timeout(0)
def test_many_items_leave_nothing_behind(rlinf_cluster, request):
    """Memory and descriptors of producer, host and consumer, after items of 100 B and arrays of 1 MiB."""
    np = pytest.importorskip("numpy")
    count = request.config.getoption("--channel-items")
    channel, arrays = Channel.create("stream", maxsize=1000), Channel.create("arrays", maxsize=8)
    group = cw.launch(rlinf_cluster, 2)
    producer, consumer = group.execute_on(0), group.execute_on(1)
    pids = [*group.pid().wait(), cw.host_pid(channel), cw.host_pid(arrays)]
    array = np.ones(MIB, np.uint8)

    def run(small: int, large: int) -> None:
        for stream, item, many, under_way in ((channel, b"x" * 100, small, 500), (arrays, array, large, 8)):
            eaten = consumer.consume(stream, many, under_way)
            producer.produce(stream, item, many, under_way).wait()
            assert eaten.wait() == [len(item) * many]

    def held() -> list[tuple[int, int]]:
        assert channel.qsize() == arrays.qsize() == 0
        return [(cw.memory(pid), len(os.listdir(f"/proc/{pid}/fd"))) for pid in pids]

    run(3000, 100)
    before = held()
    run(count, count // 50)
    for (memory, files), (memory_then, files_then) in zip(held(), before, strict=True):
        assert files <= files_then + 1
        assert memory - memory_then < 20 * MIB  # blocks for as many arrays as are under way may come later


def test_worker_that_waits_in_get_uses_no_cpu(rlinf_cluster):
    channel, echo = Channel.create("idle"), Channel.create("echo")
    group = cw.launch(rlinf_cluster)
    [pid] = group.pid().wait()
    result = group.get_behind_a_put(channel)
    assert channel.get("ready") == "asked"
    theirs, mine = cw.ticks(pid), cw.ticks(os.getpid())
    while cw.ticks(os.getpid()) < mine + 60:  # as long as it takes to do something else for 60 ticks
        echo.put("x")
        echo.get()
    assert cw.ticks(pid) - theirs < 10  # beats; one that spins or polls has as many as there are
    channel.put("wake")
    assert result.wait() == ["wake"]
