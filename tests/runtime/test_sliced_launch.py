"""A launch of many workers is sent in parts, again if the head was restarted meanwhile."""

from __future__ import annotations

import pytest

from rlinf_actors.net.rpc import PartsMissingError
from rlinf_actors.runtime.sliced_launch import TRIES, send_launch
from rlinf_actors.wire.client_messages import Done, Launch, Launched
from rlinf_actors.wire.control_codec import Request, encode
from rlinf_actors.wire.launch_messages import PART_RANKS, LaunchPart, specs_of
from rlinf_actors.wire.protocol import MAX_ASKED_BYTES
from rlinf_actors.wire.resize_messages import AddRanks
from rlinf_actors.wire.values import GroupState, WorkerSpec

SIZE = 20_000


class Head:
    """A runtime whose head takes parts, and forgets them at the requests with these numbers."""

    def __init__(self, restarts=()) -> None:
        self.asked: list[object] = []
        self.workers: list[WorkerSpec] = []
        self.parts = 0
        self._restarts = set(restarts)

    async def ask(self, body, kind, timeout, on_reply=None):
        encode(Request(1, body), MAX_ASKED_BYTES)
        self.asked.append(body)
        if len(self.asked) in self._restarts:
            self.workers, self.parts = [], 0
        if isinstance(body, LaunchPart):
            if body.index == 0:
                self.workers, self.parts = [], 0
            if body.index != self.parts:
                raise PartsMissingError("send them again")
            self.parts += 1
            self.workers += specs_of(body.workers)
            return Done()
        if body.parts != self.parts:
            raise PartsMissingError("send them again")
        self.workers += body.workers
        answer = Launched(GroupState("ns", "g", "m:C", "o", "starting", []))
        on_reply(answer)
        return answer


def message(size: int) -> Launch:
    env = {f"VARIABLE_{n}": f"value number {n}" for n in range(20)}
    workers = [WorkerSpec(f"l-{rank}", "g", "ns", rank, size, rank % 7, env) for rank in range(size)]
    return Launch("ns", "g", "m:C", workers, "detail", get_if_exists=True)


async def test_small_launch_is_one_message():
    head, answers = Head(), []
    await send_launch(head, message(PART_RANKS), 1.0, answers.append)
    assert head.asked == [message(PART_RANKS)]
    assert len(answers) == 1


async def test_large_launch_arrives_whole():
    head, answers, launch = Head(), [], message(SIZE)
    await send_launch(head, launch, 1.0, answers.append)
    assert head.workers == launch.workers
    assert (head.asked[-1].detail, head.asked[-1].get_if_exists, head.asked[-1].parts) == ("detail", True, 10)
    assert len(answers) == 1


async def test_launch_with_large_environments_arrives_whole():
    head, answers, launch = Head(), [], message(100)
    for spec in launch.workers:
        spec.env["LARGE"] = "x" * 100_000
    await send_launch(head, launch, 1.0, answers.append)
    assert head.workers == launch.workers
    assert head.asked[-1].parts == 1


async def test_many_ranks_to_add_arrive_whole():
    head, answers, launch = Head(), [], message(SIZE)
    await send_launch(head, AddRanks("ns", "g", launch.workers), 1.0, answers.append)
    assert head.workers == launch.workers
    assert {body.launch for body in head.asked[:-1]} == {launch.workers[-1].id}
    assert head.asked[-1] == AddRanks("ns", "g", launch.workers[-1:], 10)
    assert len(answers) == 1


@pytest.mark.parametrize("restart", range(1, 6))
async def test_launch_survives_a_restart_of_the_head_between_any_two_parts(restart):
    head, answers, launch = Head([restart]), [], message(4 * PART_RANKS)
    await send_launch(head, launch, 1.0, answers.append)
    assert head.workers == launch.workers
    assert len(answers) == 1


async def test_launch_ends_if_the_head_is_restarted_again_and_again(monkeypatch):
    head = Head(range(2, 1000, 2))
    with pytest.raises(PartsMissingError):
        await send_launch(head, message(SIZE), 1.0, lambda launched: None)
    assert sum(isinstance(body, LaunchPart) and body.index == 0 for body in head.asked) == TRIES
