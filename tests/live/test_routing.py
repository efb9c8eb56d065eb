"""send_to and recv_from between groups of different sizes, one of whose workers is killed."""

from __future__ import annotations

import os
import signal

import live_workers as lw
import pytest
import routing_workers as rw

from rlinf_actors import Channel, PeerDiedError, RoutingError, build_route_channel_key

pytestmark = pytest.mark.live

BATCH = 12


@pytest.fixture
def groups(cluster):
    """Groups a of two ranks and b of three."""
    return lw.many(cluster, rw.Router, 2, name="a"), lw.many(cluster, rw.Router, 3, name="b")


def whole(parts):
    assert all(part["step"] == 3 and part["nothing"] is None for part in parts)
    numbers = [int(n) for part in parts for n in part["numbers"]]
    assert [name for part in parts for name in part["names"]] == [f"task {n}" for n in numbers]
    return numbers


def test_batches_arrive_whole_and_in_order(groups):
    a, b = groups
    for channel in (Channel.create("routed"), None):
        for options in ({}, {"tag": "obs"}, {"tag": "obs", "route_key": 1}):
            a.give("b", BATCH, channel, **options).wait()
            assert whole(b.take("a", BATCH, channel, **options).wait()) == list(range(BATCH))
        one, other = a.exchange("b", BATCH, channel), b.exchange("a", BATCH, channel)
        assert whole(one.wait()) == whole(other.wait()) == list(range(BATCH))
        a.give("b", BATCH, channel).wait()
        assert whole(b.take("a", None, channel).wait()) == list(range(BATCH))
        with pytest.raises(RoutingError, match=r"batch_size \(8\) must be divisible by dst_world_size \(3\)"):
            a.give("b", 8, channel).wait()
        a.give("b", 6, channel).wait()
        with pytest.raises(RoutingError, match="Expected batch size 4, but received 2"):
            b.execute_on(0).take("a", BATCH, channel).wait()
        b.execute_on(1, 2).take("a", 6, channel).wait()


def test_answers_return_to_the_rank_that_asked(cluster):
    asking = lw.many(cluster, rw.Asking, 4, False, name="env")
    answering = lw.many(cluster, rw.Asking, 2, True, name="rollout")
    channel = Channel.create("decoupled")
    asked = asking.ask("rollout", channel, 4, 5)
    answered = answering.answer("env", channel, 4, 10)
    assert asked.wait(60) == [[[-100 * rank - step] for step in range(5)] for rank in range(4)]
    answered.wait()


def test_the_death_of_a_sender_ends_the_receives_that_need_it(groups):
    a, b = groups
    channel = Channel.create("deaths")
    b.start_taking("a", BATCH, channel).wait()
    a.execute_on(0).give("b", BATCH, channel).wait()
    os.kill(a.execute_on(1).pid().wait()[0], signal.SIGKILL)
    first = b.execute_on(0).finish_taking().wait()[0]  # it needs rank 0 of a only
    assert [int(n) for n in first["numbers"]] == [0, 1, 2, 3]
    for rank in (1, 2):
        with pytest.raises(PeerDiedError, match=r"recv_from\(\) from 'a': .*a:1"):
            b.execute_on(rank).finish_taking().wait(20)
    returned = channel.get(build_route_channel_key("a", "b", 0, 1, None), async_op=True)
    assert [int(n) for n in returned.wait(20)["numbers"]] == [4, 5]  # the shard that rank 1 of b had got
    with pytest.raises(PeerDiedError, match="a:1"):
        b.execute_on(2).take("a", BATCH, channel).wait(20)


def test_a_shard_of_a_dead_sender_still_arrives_if_it_was_put(groups):
    a, b = groups
    channel = Channel.create("left")
    a.give("b", BATCH, channel).wait()
    for pid in a.pid().wait():
        os.kill(pid, signal.SIGKILL)
    assert whole(b.take("a", BATCH, channel).wait(20)) == list(range(BATCH))


def test_a_send_to_a_dead_receiver_does_not_wait_for_room(groups):
    a, b = groups
    channel = Channel.create("small", maxsize=1)
    a.give("b", BATCH, channel).wait()
    for pid in b.pid().wait():
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(PeerDiedError, match=r"send_to\(\) to 'b'"):
        a.execute_on(0).give("b", BATCH, channel).wait(20)
