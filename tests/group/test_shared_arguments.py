"""Large arguments of a group call go once to each other node, whatever becomes of the rank that passes them on."""

from __future__ import annotations

import types
from collections import Counter

import numpy
import pytest

from rlinf_actors.errors import WorkerDiedError
from rlinf_actors.group.result import WorkerGroupFuncResult
from rlinf_actors.runtime.shared_arguments import SHARE_FROM
from rlinf_actors.wire import frames, payload
from rlinf_actors.wire.values import Endpoint


class Rank:
    """A Peer that keeps what is sent to it."""

    def __init__(self, rank: int, host: str) -> None:
        self.name, self.rank, self.node, self.worker_id = f"g:{rank}", rank, host, f"l-{rank}"
        self.error, self.pending, self.own_identity = None, {}, "driver:x"
        endpoint = Endpoint(host, f"ipc:///{rank}", "tcp://10.0.0.1:1")
        self.sibling = frames.Sibling(self.name, self.worker_id, 9, endpoint) if host != "here" else None
        self.sent: list[tuple[frames.AnyFrame, list]] = []

    def open(self, pending, call):
        self.pending[call] = pending
        return call

    def post(self, header, parts=(), *, now=False, alone=True):
        self.at_once, self.alone = now, alone
        self.send(frames.decode(header), parts)

    def post_call(self, pending, call, parts):
        self.at_once, self.alone = not self.pending, True
        self.open(pending, call.id)
        self.send(call, parts)

    def send(self, frame, parts=(), **_how):
        self.sent.append((frame, list(parts)))

    def forget(self, call):
        self.pending.pop(call, None)

    def answer(self):
        for call in list(self.pending):
            self.pending.pop(call).answer(frames.Ok(call), payload.AuthenticatedParts())

    @property
    def frames(self) -> list[type]:
        return [type(frame) for frame, _ in self.sent]


ARRAY = numpy.zeros(SHARE_FROM, "uint8")


def _nothing(*_args, **_more) -> None: ...


def call(ranks, argument=ARRAY, **more):
    lost = types.SimpleNamespace(failed=_nothing, seen=_nothing, collected=_nothing)
    runtime = types.SimpleNamespace(lost=lost)
    result = WorkerGroupFuncResult(runtime, "step", ranks)
    result._once = more.get("once", True)
    parts = payload.encode_call((argument,), {})
    result._start(*([parts] * more.get("each", 1)))
    return result


def sent_bytes(rank: Rank) -> int:
    return sum(memoryview(part).nbytes for _, parts in rank.sent for part in parts)


def test_one_rank_of_each_other_node_gets_the_array():
    ranks = [Rank(0, "here"), Rank(1, "a"), Rank(2, "a"), Rank(3, "b"), Rank(4, "b"), Rank(5, "b"), Rank(6, "c")]
    call(ranks)
    assert [rank.frames for rank in ranks] == [
        [frames.Call],
        [frames.ShareParts, frames.SharedCall],
        [frames.SharedCall],
        [frames.ShareParts, frames.SharedCall],
        [frames.SharedCall],
        [frames.SharedCall],
        [frames.Call],  # alone on its node
    ]
    assert [sibling.name for sibling in ranks[3].sent[0][0].to] == ["g:4", "g:5"]
    assert len({frame.id for rank in ranks for frame, _ in rank.sent}) == 1


def test_call_to_several_ranks_of_other_machines_leaves_in_one_flush():
    ranks = [Rank(0, "here"), Rank(1, "a"), Rank(2, "b")]
    call(ranks, 1)
    assert [rank.at_once for rank in ranks] == [True, False, False]
    call(ranks[2:], 1)
    assert not ranks[2].at_once, "another call is under way"
    alone = Rank(3, "a")
    call([alone], 1)
    assert alone.at_once


def test_bytes_grow_with_the_nodes_and_not_with_the_ranks():
    total = Counter()
    for per_node in (2, 16):
        ranks = [Rank(n, f"node{n // per_node}") for n in range(4 * per_node)]
        call(ranks)
        total[per_node] = sum(map(sent_bytes, ranks))
    assert 4 * SHARE_FROM <= total[2] < 4.1 * SHARE_FROM
    assert 4 * SHARE_FROM <= total[16] < 4.1 * SHARE_FROM


@pytest.mark.parametrize("why", ["small", "own values", "one rank"])
def test_arguments_are_sent_to_each_rank_if_they_cannot_be_shared(why):
    ranks = [Rank(n, "a") for n in range(1 if why == "one rank" else 2)]
    call(ranks, ARRAY[:1000] if why == "small" else ARRAY, each=2 if why == "own values" else 1)
    assert {kind for rank in ranks for kind in rank.frames} == {frames.Call}


def test_ranks_get_the_arguments_directly_when_the_first_rank_is_gone():
    ranks = [Rank(n, "a") for n in range(4)]
    result = call(ranks)
    ranks[1].answer()
    ranks[0].pending.pop(result._call).fail(WorkerDiedError("it died"))
    assert [rank.frames[-1] for rank in ranks[1:]] == [frames.SharedCall, frames.SharedParts, frames.SharedParts]
    assert ranks[2].sent[-1][0] == frames.SharedParts("", result._call)
    assert sent_bytes(ranks[2]) > SHARE_FROM


def test_rank_that_asks_gets_its_arguments():
    ranks = [Rank(n, "a") for n in range(3)]
    result = call(ranks)
    ranks[2].pending[result._call].parts_wanted()
    assert [rank.frames for rank in ranks[1:]] == [[frames.SharedCall], [frames.SharedCall, frames.SharedParts]]


def test_arguments_are_released_when_all_ranks_have_answered():
    ranks = [Rank(n, "a") for n in range(3)]
    result = call(ranks)
    for rank in ranks:
        assert result._sharing is not None
        rank.answer()
    assert result._sharing is None


@pytest.mark.parametrize("under_way", [0, 1])
def test_worker_may_not_change_arguments_in_place_that_may_be_sent_again(under_way):
    for once in (True, False):
        rank = Rank(0, "here")
        rank.pending = dict.fromkeys(range(under_way))
        call([rank], once=once)
        assert rank.alone == once
