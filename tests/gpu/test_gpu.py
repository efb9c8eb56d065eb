"""Tensors on a GPU: by CUDA IPC between two workers on it, staged, in calls and channels; NCCL with one rank.

Figures go to stdout: run with -s, or look at the end of `pytest -rP`.
"""

from __future__ import annotations

import os
import signal
import statistics

import pytest

from rlinf_actors import Channel, NodePlacementStrategy, PackedPlacementStrategy
from rlinf_actors.settings import PATHS

pytestmark = [pytest.mark.gpu, pytest.mark.live, pytest.mark.torch, pytest.mark.timeout(180)]

MIB = 1 << 20


@pytest.fixture
def launched(cluster):
    """Launches groups of one worker on GPU 0 that end with the test."""
    import gpu_workers as gw

    groups = []

    def launch(name, strategy=None, **options):
        strategy = strategy or PackedPlacementStrategy(0, 0)
        group = gw.Gpu.create_group().launch(cluster, strategy, name=name, **options)
        groups.append(group)
        return group

    yield launch
    for group in groups:
        group.shutdown()


@pytest.fixture
def pair(launched):
    return launched("a"), launched("b")


# --- CUDA IPC ---


def test_every_dtype_and_shape(pair):
    a, b = pair
    for _ in range(2):
        saying = a.say_sample("b")
        assert b.hear_sample("a").wait() == [True]
        saying.wait()
    assert a.wait_released(2).wait() == [0]


def test_the_memory_is_the_senders_and_nothing_is_copied(pair):
    a, b = pair
    a.say_fill(256, 1.0, "b", keep=True).wait()
    assert b.hear_fill("a", keep=True).wait() == [(1.0, 1.0, "cuda:0")]
    assert b.memory().wait()[0][0] < MIB
    a.write_kept(2.0).wait()
    assert b.read_kept().wait() == [(2.0, 2.0)]
    assert a.lent().wait() == [1]
    b.drop_kept().wait()
    assert a.wait_released().wait() == [0]


def test_the_sender_keeps_what_it_sent_until_the_receiver_has_dropped_it(pair):
    a, b = pair
    a.say_fill(1024, 1.0, "b").wait()
    assert b.hear_fill("a", keep=True).wait() == [(1.0, 1.0, "cuda:0")]
    assert a.memory().wait()[0][0] >= 1024 * MIB
    a.say_fill(512, 9.0, "a").wait()  # would take its place
    assert b.read_kept().wait() == [(1.0, 1.0)]
    b.drop_kept().wait()
    a.wait_released().wait()
    assert a.memory().wait()[0][0] < 1024 * MIB


def test_many_one_after_the_other_in_both_directions(pair):
    a, b = pair
    works = [a.swap(50, "b"), b.swap(50, "a")]
    assert [work.wait() for work in works] == [[True], [True]]


def test_what_a_stream_has_not_computed_yet(pair):
    a, b = pair
    hearing = b.hear_fill("a")
    early = a.say_late("b").wait()
    assert hearing.wait() == [(7.0, 7.0, "cuda:0")]
    print("\nsend() returned before the stream was done:", early)


def test_into_a_tensor(pair):
    a, b = pair
    saying = a.say_fill(64, 4.0, "b")
    assert b.hear_into(64, "a").wait() == [(True, 4.0, 4.0)]
    saying.wait()
    assert a.wait_released().wait() == [0]


def test_a_worker_that_sends_to_itself_shares_its_own_memory(pair):
    a, _ = pair
    assert a.to_myself().wait() == [True]
    assert a.wait_released().wait() == [0]


def test_expandable_segments(launched):
    a, b = launched("a", env_vars={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}), launched("b")
    saying = a.say_sample("b")
    assert b.hear_sample("a").wait() == [True]
    saying.wait()
    assert a.wait_released().wait() == [0]
    a.say_fill(64, 4.0, "b").wait()
    assert b.hear_fill("a").wait() == [(4.0, 4.0, "cuda:0")]


def test_the_receiver_is_killed_while_it_holds_memory(pair):
    a, b = pair
    a.still_works().wait()
    before = a.memory().wait()[0][0]
    a.say_fill(1024, 1.0, "b").wait()
    assert b.hear_fill("a", keep=True).wait() == [(1.0, 1.0, "cuda:0")]
    os.kill(b.pid().wait()[0], signal.SIGKILL)
    assert a.wait_gone().wait() == [0]
    allocated, free = a.memory().wait()[0]
    assert allocated == before
    print(f"\nfree on the device afterwards: {free >> 20} MiB")


def test_the_sender_is_killed_while_its_memory_is_held(pair):
    a, b = pair
    a.say_fill(256, 1.0, "b").wait()
    assert b.hear_fill("a", keep=True).wait() == [(1.0, 1.0, "cuda:0")]
    os.kill(a.pid().wait()[0], signal.SIGKILL)
    b.drop_kept().wait()
    assert b.still_works().wait() == [1000.0]


# --- staged ---


def test_staged_by_the_setting(launched):
    a, b = launched("a", env_vars={PATHS: "accelerator=staged"}), launched("b")
    saying = a.say_sample("b")
    assert b.hear_sample("a").wait() == [True]
    saying.wait()
    assert a.lent().wait() == [0]
    saying = a.say_fill(256, 4.0, "b")
    assert b.hear_into(256, "a").wait() == [(True, 4.0, 4.0)]
    saying.wait()


def test_to_a_worker_without_a_gpu(launched):
    a, b = launched("a"), launched("b", NodePlacementStrategy([0]))
    saying = a.say_sample("b")
    assert b.hear_sample("a", "cpu").wait() == [True]
    saying.wait()


def test_as_an_argument_of_a_call(pair):
    a, _ = pair
    assert a.call_other("b").wait() == [[(1000.0, "cuda:0")]]


def test_in_a_channel(pair, cluster):
    a, b = pair
    channel = Channel.create("observations")
    a.put(channel).wait()
    assert b.get(channel).wait() == [("cuda", True, 3)]
    channel.close()


def test_broadcast(pair):
    members = [("a", [0]), ("b", [0])]
    works = [group.give(members) for group in pair]
    assert [work.wait() for work in works] == [[5.0], [5.0]]


def test_a_worker_without_a_gpu_of_its_own_opens_no_context(launched):
    a, agent = launched("a"), launched("agent", NodePlacementStrategy([0]))
    saying = a.say_fill(64, 2.0, "agent")
    assert agent.hear_fill("a").wait() == [(2.0, 2.0, "cpu")]
    saying.wait()
    assert agent.contexts().wait() == [0]
    assert a.contexts().wait() == [1]


# --- NCCL ---


def test_the_facts_of_the_handshake_are_known(pair):
    a, _ = pair
    version, model, parent = a.ccl_facts().wait()[0]
    assert version.count(".") == 2
    assert model
    assert len(parent.split(":")) == 3, "domain, bus and device"


def test_a_lane_of_nccl_with_one_rank(pair):
    a, _ = pair
    for mib in (1, 256):
        figures = a.nccl_alone(mib).wait()[0]
        assert figures["good"]
        assert not figures["initialized"]
        rates = {name: f"{mib / 1024 / figures[name]:.0f} GiB/s" for name in ("broadcast_s", "to_myself_s", "copy_s")}
        print(f"\nNCCL, one rank, {mib} MiB: {rates}")


def test_options_reach_nccl(pair):
    a, _ = pair
    assert a.nccl_options().wait() == [[2, 8, 2, True]]


# --- figures ---


def test_figures_of_ipc(pair):
    a, b = pair
    count = 50
    ponging = b.pong("a", count)
    plain = statistics.median(a.ping(0, "b", count).wait()[0])
    ponging.wait()
    print(f"\nplain message and answer: {plain * 1e6:.0f} us")
    for mib in (1, 256, 1024):
        ponging = b.pong("a", count)
        taken = statistics.median(a.ping(mib, "b", count).wait()[0][3:])
        ponging.wait()
        device, host = a.device_copy(mib).wait()[0], a.host_copy(mib).wait()[0]
        print(
            f"{mib:5} MiB by ipc: {taken * 1e6:7.0f} us, {(taken - plain) * 1e6:7.0f} us more than plain;"
            f" cudaMemcpy on the device {device * 1e6:7.0f} us, to the host {host * 1e6:7.0f} us;"
            f" ipc/copy {taken / device:.2f}"
        )


def test_figures_of_staging(launched):
    a, b = launched("a", env_vars={PATHS: "accelerator=staged"}), launched("b")
    count = 8
    for mib in (1, 256):
        ponging = b.pong("a", count)
        taken = statistics.median(a.ping(mib, "b", count).wait()[0][2:])
        ponging.wait()
        host = a.host_copy(mib).wait()[0]
        print(f"\n{mib:5} MiB staged: {taken * 1e6:7.0f} us; cudaMemcpy to the host alone {host * 1e6:7.0f} us")
