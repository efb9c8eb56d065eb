"""Plans of routed batches: every element arrives once, in order, whatever the two world sizes are."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_actors import (
    CommMapper,
    RoutingError,
    build_recv_plan,
    build_send_plan,
    decoupled_build_recv_plan,
    merge_batches,
    split_batch,
    split_channel_message,
)
from rlinf_actors.routing.route_plan import build_return_route, decoupled_build_send_plan, shards

SIZES = range(1, 17)


def routed(src_world_size, dst_world_size, batch_size):
    """Send the numbers of a batch through channels that the plans name; return what each receiver gets."""
    common = {
        "src_group_name": "a", "dst_group_name": "b", "src_world_size": src_world_size,
        "dst_world_size": dst_world_size, "tag": "t", "batch_size": batch_size,
    }  # fmt: skip
    part = batch_size // src_world_size
    queues = {}
    for rank in range(src_world_size):
        plan = build_send_plan(**common, src_rank=rank)
        mine = split_batch(list(range(rank * part, (rank + 1) * part)), [entry.batch_size for entry in plan.entries])
        for entry, shard in zip(plan.entries, mine, strict=True):
            assert entry.key not in queues, "one shard for each pair of ranks"
            queues[entry.key] = shard
    got = []
    for rank in range(dst_world_size):
        plan = build_recv_plan(**common, dst_rank=rank)
        mine = [queues.pop(entry.key) for entry in plan.entries]
        assert [len(one) for one in mine] == [entry.batch_size for entry in plan.entries]
        got.append(merge_batches(mine))
    assert not queues, "no shard is left"
    return got


@pytest.mark.parametrize("src_world_size", SIZES)
def test_every_element_arrives_once_and_in_order(src_world_size):
    for dst_world_size in SIZES:
        for factor in (1, 2, 3):
            batch_size = factor * math.lcm(src_world_size, dst_world_size)
            got = routed(src_world_size, dst_world_size, batch_size)
            assert [len(one) for one in got] == [batch_size // dst_world_size] * dst_world_size
            assert list(itertools.chain.from_iterable(got)) == list(range(batch_size))


@given(st.integers(1, 16), st.integers(1, 16), st.integers(0, 300))
def test_a_batch_is_divided_evenly_or_refused_by_name(src_world_size, dst_world_size, batch_size):
    if batch_size % src_world_size == 0 == batch_size % dst_world_size:
        assert sum(one.size for one in shards(batch_size, src_world_size, dst_world_size)) == batch_size
        return
    for build in (CommMapper.get_dst_ranks, CommMapper.get_src_ranks):
        with pytest.raises(
            RoutingError, match=rf"batch_size \({batch_size}\) must be divisible by (src|dst)_world_size"
        ):
            build(batch_size, src_world_size, dst_world_size, 0)


def test_refusals_are_what_old_callers_catch():
    with pytest.raises(AssertionError, match="such as 12"):
        CommMapper.get_dst_ranks(7, 2, 3, 0)
    with pytest.raises(ValueError, match=r"src_rank \(2\) must be in \[0, 2\)"):
        CommMapper.get_dst_ranks(12, 2, 3, 2)
    with pytest.raises(AssertionError, match=r"dst_world_size \(0\) must be 1 or more"):
        CommMapper.get_src_ranks(12, 2, 0, 0)


def test_a_receiver_without_a_batch_size_still_finds_its_senders():
    plan = build_recv_plan(
        src_group_name="a",
        dst_group_name="b",
        dst_rank=1,
        src_world_size=2,
        dst_world_size=3,
        tag=None,
        batch_size=None,
    )
    assert [(entry.peer_rank, entry.batch_size) for entry in plan.entries] == [(0, None), (1, None)]
    assert plan.tag == "default"


@pytest.mark.parametrize(("smaller", "larger"), [(s, s * n) for s in range(1, 5) for n in range(1, 5)])
def test_decoupled_shards_return_to_the_rank_that_sent_them(smaller, larger):
    """The larger group asks: each rank sends one shard. The smaller one answers what it received."""
    batch_size = 2 * larger
    requests = {}
    for rank in range(larger):
        plan = decoupled_build_send_plan(
            src_group_name="env", dst_group_name="rollout", src_rank=rank, src_world_size=larger,
            dst_world_size=smaller, tag="obs", mode="train", batch_size=batch_size,
        )  # fmt: skip
        (entry,) = plan.entries
        requests.setdefault(entry.key, []).append(entry.batch_index)
    (queue,) = requests.values()  # any rank of the smaller group may take any of them
    answered = []
    while queue:
        plan = decoupled_build_recv_plan(
            src_group_name="env", dst_group_name="rollout", recv_rank=None, src_world_size=smaller,
            dst_world_size=larger, tag="obs", batch_size=batch_size,
        )  # fmt: skip
        assert [entry.key for entry in plan.entries] == list(requests) * (larger // smaller)
        recorded = [queue.pop() for _ in plan.entries]
        back = decoupled_build_send_plan(
            src_group_name="rollout", dst_group_name="env", src_rank=None, src_world_size=smaller,
            dst_world_size=larger, tag="obs", tag_batch_router=recorded, batch_size=batch_size,
        )  # fmt: skip
        assert [entry.batch_index for entry in back.entries] == recorded
        answered += [entry.key for entry in back.entries]
    wanted = [
        decoupled_build_recv_plan(
            src_group_name="rollout", dst_group_name="env", recv_rank=rank, src_world_size=larger,
            dst_world_size=smaller, tag="obs", batch_size=batch_size,
        ).entries[0].key
        for rank in range(larger)
    ]  # fmt: skip
    assert sorted(answered) == sorted(wanted)


def test_decoupled_errors_name_the_sizes():
    with pytest.raises(RoutingError, match=r"batch_size \(10\) must be divisible by split_size \(4\)"):
        CommMapper.decoupled_get_batch_size(10, 2, 4)
    with pytest.raises(AssertionError, match="queue_size 3 must be at most"):
        CommMapper.decoupled_get_batch_size(8, 2, 4, queue_size=3)
    assert CommMapper.decoupled_get_batch_size(32, 2, 8) == [4, 4, 4, 4]
    assert CommMapper.decoupled_get_batch_size(32, 2, 8, queue_size=1) == [4]
    assert CommMapper.decoupled_get_batch_size(32, 4, 2) == [8]
    with pytest.raises(RoutingError, match="receive before each answer"):
        decoupled_build_send_plan(
            src_group_name="a", dst_group_name="b", src_rank=None, src_world_size=1, dst_world_size=2, tag="t",
            tag_batch_router=["0_0_train_t"], batch_size=2,
        )  # fmt: skip


@given(st.integers(0, 999), st.integers(0, 99), st.sampled_from(["train", "eval", None]), st.text())
def test_return_routes_keep_their_tag(rank, index, mode, tag):
    assert split_channel_message(build_return_route(rank, index, mode, tag)) == (rank, index, str(mode), tag)


@pytest.mark.parametrize("text", ["", "1_2_train", "x_0_train_tag", "1_y_train_tag"])
def test_a_text_that_is_no_return_route_is_refused(text):
    with pytest.raises(RoutingError, match="is no return route"):
        split_channel_message(text)


def test_a_mode_with_an_underscore_is_refused():
    with pytest.raises(RoutingError, match="must not contain an underscore"):
        build_return_route(0, 0, "pre_train", "obs")
