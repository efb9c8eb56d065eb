"""What one call of a worker costs in Python calls and locks, above the link: these do not drift."""

from __future__ import annotations

import _thread
import collections
import sys
from pathlib import Path

import pytest
from group_kit import World

import rlinf_actors
from rlinf_actors.wire import frames
from rlinf_actors.wire.payload import AuthenticatedParts
from rlinf_actors.worker.invocation import Invocation

OURS = str(Path(rlinf_actors.__file__).parent)
CALLS = 20


class Plain:
    """Stands in for the user's instance."""

    def stop(self) -> None: ...


class Count:
    """Counts the calls of functions of rlinf_actors, and the locks made, on this thread, for each of CALLS."""

    def __init__(self) -> None:
        self._seen: collections.Counter[str] = collections.Counter()

    def __enter__(self) -> None:
        sys.setprofile(self._event)

    def __exit__(self, *_exc) -> None:
        sys.setprofile(None)

    def _event(self, frame, event, arg) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            self._seen["calls"] += 1
        elif event == "c_call" and (arg is _thread.allocate_lock or arg is _thread.RLock):
            self._seen["locks"] += 1

    def __call__(self, what: str) -> float:
        return self._seen[what] / CALLS


@pytest.mark.parametrize("view", [False, True])
async def test_a_call_in_flight_costs_its_caller_few_calls_and_one_lock(view):
    world = World(1)
    first = world.group.stop()
    await world.ranks[0].until(1)  # the link is made, and a call is pending
    (peer,) = world.remote.peers
    sending, arriving, taking = Count(), Count(), Count()
    stop = world.group.execute_on(0).stop if view else world.group.stop
    with sending:
        results = [stop() for _ in range(CALLS)]
    answers = [frames.encode(frames.Ok(call.id)) for call in (await world.ranks[0].until(CALLS + 1))[1:]]
    with arriving:
        for answer in answers:
            peer._received(b"", answer, [])
    with taking:
        for result in results:
            result.wait()
    assert sending("calls") <= 7
    assert sending("locks") <= 1
    assert arriving("calls") <= 6
    assert taking("calls") <= 3
    assert arriving("locks") + taking("locks") == 0
    world.ranks[0].ok(world.ranks[0].calls[0].id)
    await first


def test_a_worker_runs_a_call_with_few_functions():
    answered = []
    calls = [
        Invocation(b"driver", n, "stop", AuthenticatedParts(), lambda *answer: answered.append(answer), bytes, 0.0, 0)
        for n in range(CALLS + 1)
    ]
    plain, running = Plain(), Count()
    calls.pop().run(plain)  # the first call of a method makes its count
    with running:
        for call in calls:
            call.run(plain)
    assert len(answered) == CALLS + 1
    assert running("calls") <= 5
    assert running("locks") == 0
